"""`KTOTrainer`: its loss and divergence estimate against plain torch, and what must not change them."""

import math

import pytest
import torch
from datasets import Dataset
from fixtures.models import random_model
from fixtures.runs import GradientGrabber, assert_same_gradients, logs
from fixtures.tokenizers import word_tokenizer

from trl.errors import ConfigError
from trl.trainer.kto_config import KTOConfig
from trl.trainer.kto_trainer import KTOTrainer

SETTINGS = {
    "learning_rate": 0.0,
    "max_steps": 1,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "per_device_train_batch_size": 6,
    "per_device_eval_batch_size": 6,
}
LABELS = [True, False, True, True, False, True]


def words(start: int, count: int) -> str:
    return " ".join(f"w{10 + (7 * start + i) % 40}" for i in range(count))


def dataset(prompt_words: int = 3) -> Dataset:
    return Dataset.from_dict(
        {
            "prompt": [words(i, prompt_words) + " " for i in range(6)],
            "completion": [words(i + 3, 1 + i % 4) for i in range(6)],
            "label": LABELS,
        }
    )


def trainer_of(folder, *, model=None, reference=None, rows=None, **changes):
    args = KTOConfig(output_dir=str(folder), **(SETTINGS | changes))
    grabber = GradientGrabber()
    trainer = KTOTrainer(
        model or random_model(),
        reference,
        args,
        train_dataset=rows or dataset(),
        eval_dataset=rows or dataset(),
        processing_class=word_tokenizer(),
        callbacks=[grabber],
    )
    return trainer, grabber


def log_prob(model, prompt, completion):
    ids = torch.tensor([[*prompt, *completion]])
    logps = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return logps[len(prompt) - 1 :].sum()


def expected(policy, reference, rows, beta=0.1, weights=(1.0, 1.0), kl=True):
    """Loss and gradients of one batch, written out."""
    prompts, completions = rows["prompt_ids"][:], rows["completion_ids"][:]

    def ratio(prompt, completion):
        with torch.no_grad():
            base = log_prob(reference, prompt, completion)
        return log_prob(policy, prompt, completion) - base

    point = 0.0
    if kl:
        with torch.no_grad():
            others = [ratio(p, c) for p, c in zip(prompts, completions[1:] + completions[:1], strict=True)]
        point = max(0.0, sum(others).item() / len(others))
    terms = []
    for prompt, completion, good in zip(prompts, completions, LABELS, strict=True):
        gain = beta * (ratio(prompt, completion) - point)
        terms.append(weights[0] * torch.sigmoid(-gain) if good else weights[1] * torch.sigmoid(gain))
    loss = sum(terms) / len(terms)
    policy.zero_grad()
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in policy.named_parameters()}, point


@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
@pytest.mark.parametrize("budget", [None, 9])
def test_loss_and_gradients_against_plain_torch(tmp_path, loss_type, budget):
    policy, reference = random_model(), random_model(seed=3)
    trainer, grabber = trainer_of(
        tmp_path,
        reference=reference,
        loss_type=loss_type,
        max_tokens_per_micro_batch=budget,
        desirable_weight=1.5,
        undesirable_weight=0.5,
    )
    kl = loss_type == "kto"
    loss, gradients, point = expected(policy, reference, trainer.train_dataset, weights=(1.5, 0.5), kl=kl)
    trainer.train()
    assert logs(trainer, "loss")[0] == pytest.approx(loss, rel=1e-5)
    assert_same_gradients(grabber.steps[0], gradients, tolerance=1e-3)
    if kl:
        assert logs(trainer, "kl")[0] == pytest.approx(point, abs=1e-5)
    else:
        assert logs(trainer, "kl") == []


def test_the_first_step_of_a_copy_is_a_half(tmp_path):
    """Equal models: every log-ratio is 0, and so is the divergence; `1 - sigmoid(0)` is 1/2."""
    trainer, _ = trainer_of(tmp_path, learning_rate=1e-2, max_steps=2)
    before = {name: value.clone() for name, value in trainer.ref_model.state_dict().items()}
    trainer.train()
    assert logs(trainer, "loss")[0] == pytest.approx(0.5, abs=1e-6)
    assert logs(trainer, "loss")[1] < 0.5
    assert logs(trainer, "rewards/chosen")[0] == pytest.approx(0.0, abs=1e-6)
    assert all(value.equal(before[name]) for name, value in trainer.ref_model.state_dict().items())


def test_precomputed_and_live_reference_agree(tmp_path):
    reference = random_model(seed=3)
    losses = []
    for precomputes in (False, True):
        trainer, _ = trainer_of(
            tmp_path, reference=reference, loss_type="apo_zero_unpaired", precompute_ref_log_probs=precomputes
        )
        assert (trainer.ref_model is None) is precomputes
        trainer.train()
        losses.append(logs(trainer, "loss")[0])
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


def test_long_prompts_are_read_once_and_change_nothing(tmp_path):
    """Rows of one prompt share it where it is long enough: the loss is that of prompts that are repeated."""
    rows = Dataset.from_dict(
        {"prompt": [words(0, 40) + " "] * 6, "completion": [words(i + 3, 1 + i % 4) for i in range(6)], "label": LABELS}
    )
    trainer, _ = trainer_of(tmp_path, reference=random_model(seed=3), rows=rows)
    loss, _, _ = expected(random_model(), random_model(seed=3), trainer.train_dataset)
    trainer.train()
    assert logs(trainer, "loss")[0] == pytest.approx(loss, rel=1e-5)


def test_paired_rows_become_two(tmp_path):
    rows = Dataset.from_dict({"prompt": ["w10 "] * 4, "chosen": ["w11 w12"] * 4, "rejected": ["w13"] * 4})
    trainer, _ = trainer_of(tmp_path, rows=rows)
    assert trainer.train_dataset["label"][:] == [True] * 4 + [False] * 4


def test_evaluation_is_finite_and_knows_the_divergence(tmp_path):
    trainer, _ = trainer_of(tmp_path, reference=random_model(seed=3))
    metrics = trainer.evaluate()
    assert math.isfinite(metrics["eval_loss"])
    assert metrics["eval_kl"] >= 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"per_device_train_batch_size": 1}, "to 2 or more"),
        ({"train_sampling_strategy": "random"}, "'sequential'"),
        ({"beta": 0.0}, "`beta` must be above 0"),
        ({"loss_type": "sigmoid"}, "`loss_type` must be one of"),
        (
            {"sync_ref_model": True, "precompute_ref_log_probs": True, "loss_type": "apo_zero_unpaired"},
            "`sync_ref_model` moves",
        ),
    ],
)
def test_settings_that_cannot_work_are_named(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        KTOConfig(output_dir=str(tmp_path), **(SETTINGS | changes))
