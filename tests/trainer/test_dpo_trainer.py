"""`DPOTrainer`: what it accepts, its reference model, its rows, what it logs and keeps."""

import inspect
import math

import pytest
import torch
from datasets import Dataset, load_from_disk
from fixtures.models import random_model
from fixtures.online_methods import plain_logps, quick_collections, same_weights, timeless, weights_of
from fixtures.runs import logs
from fixtures.tokenizers import BOS, CLOSE, EOS, OPEN, UNK, word_tokenizer
from transformers import TrainerCallback

from trl.errors import ConfigError, DataError, NotSupportedError
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_trainer import DPOTrainer

_quick = pytest.fixture(scope="module", autouse=True)(quick_collections)

LN2 = math.log(2)
ROWS = [
    {"prompt": f"w{10 + i} w{20 + i} ", "chosen": f"w{30 + i}", "rejected": f"w{40 + i} w{50 + i % 2}"}
    for i in range(8)
]
PAIRS = Dataset.from_list(ROWS)
SIGNATURE = (
    "model ref_model args data_collator train_dataset eval_dataset processing_class compute_metrics callbacks "
    "optimizers quantization_config peft_config"
)
MOVING = {"learning_rate": 1e-2, "lr_scheduler_type": "constant"}


def config(folder, **changes):
    settings = {
        "output_dir": str(folder),
        "learning_rate": 0.0,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "max_steps": 1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "seed": 0,
    }
    return DPOConfig(**(settings | changes))


def make(folder, dataset=PAIRS, model=None, **changes):
    """A trainer; `changes` are arguments of the trainer or options of the config."""
    own = inspect.signature(DPOTrainer).parameters
    options = {name: changes.pop(name) for name in list(changes) if name in own}
    options.setdefault("processing_class", word_tokenizer())
    return DPOTrainer(model or random_model(), args=config(folder, **changes), train_dataset=dataset, **options)


def train(*args, **changes):
    trainer = make(*args, **changes)
    trainer.train()
    return trainer


# ---- the constructor ----


def test_the_order_of_the_parameters():
    assert list(inspect.signature(DPOTrainer).parameters) == SIGNATURE.split()


def test_arguments_by_position(tmp_path):
    policy, reference, tokenizer = random_model(), random_model(seed=4), word_tokenizer()
    trainer = DPOTrainer(policy, reference, config(tmp_path), None, PAIRS, PAIRS, tokenizer)
    assert trainer.model is policy
    assert trainer.ref_model is reference
    assert trainer.processing_class is tokenizer
    assert len(trainer.train_dataset) == len(trainer.eval_dataset) == 8


@pytest.mark.parametrize("name", ["data_collator", "compute_metrics", "quantization_config", "peft_config"])
def test_what_is_not_supported_is_refused(tmp_path, name):
    with pytest.raises(NotSupportedError, match=f"`{name}` is not supported yet"):
        make(tmp_path, **{name: object})


def test_a_model_by_name_and_data_are_enough(tmp_path, monkeypatch):
    random_model().save_pretrained(tmp_path / "tiny")
    word_tokenizer().save_pretrained(tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    trainer = DPOTrainer("tiny", train_dataset=PAIRS)
    assert trainer.args.output_dir == "tiny-DPO"
    assert same_weights(weights_of(random_model()), weights_of(trainer.ref_model))
    with pytest.raises(ConfigError, match="`train_dataset` is missing"):
        DPOTrainer("tiny")


# ---- the reference model ----


@pytest.mark.parametrize("changes", [{}, {"bf16": True}, {"gradient_checkpointing": True}])
def test_the_first_step_of_a_model_in_memory(tmp_path, changes):
    """Before it has moved, policy and reference are equal: every reward is 0, and the loss `-log sigmoid(0)`."""
    model = random_model()
    start = weights_of(model)
    trainer = train(tmp_path, model=model, max_steps=3, **MOVING, **changes)
    assert logs(trainer, "loss")[0] == pytest.approx(LN2, abs=1e-6)
    for name in ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"):
        assert logs(trainer, name)[0] == 0.0
    assert logs(trainer, "loss")[2] < LN2 - 1e-3
    assert logs(trainer, "rewards/margins")[2] > 1e-3
    assert trainer.ref_model is not model
    assert same_weights(start, weights_of(trainer.ref_model))
    assert not same_weights(start, weights_of(model))
    assert not trainer.ref_model.training
    assert not any(p.requires_grad for p in trainer.ref_model.parameters())


@pytest.mark.parametrize("given", ["path", "module"])
def test_a_given_reference_is_the_one_that_counts(tmp_path, given):
    other = random_model(seed=4)
    expected = weights_of(other)
    if given == "path":
        other.save_pretrained(tmp_path / "reference")
        other = str(tmp_path / "reference")
    trainer = train(tmp_path, ref_model=other, max_steps=2, **MOVING)
    assert (trainer.ref_model is other) == (given == "module")
    assert same_weights(expected, weights_of(trainer.ref_model))
    assert abs(logs(trainer, "loss")[0] - LN2) > 1e-3


def test_a_reference_that_cannot_be_packed_is_padded(tmp_path):
    packed, padded = (
        train(tmp_path, ref_model=random_model(seed=4, attn_implementation=kind)) for kind in ("sdpa", "eager")
    )
    assert packed.reference_packed
    assert not padded.reference_packed
    assert logs(padded, "loss")[0] == pytest.approx(logs(packed, "loss")[0], abs=1e-5)


def test_references_that_cannot_be_one(tmp_path):
    model = random_model()
    with pytest.raises(ConfigError, match="`ref_model` is the model that is trained"):
        make(tmp_path, model=model, ref_model=model)
    with pytest.raises(ConfigError, match=r"`ref_model` must have the vocabulary of `model` \(got 80 and 64 tokens\)"):
        make(tmp_path, model=model, ref_model=random_model(vocab_size=80))
    with pytest.raises(ConfigError, match="no/such-reference"):
        make(tmp_path, model=model, ref_model="no/such-reference")


@pytest.mark.parametrize("disabled", [True, False])
def test_dropout_is_off_unless_wanted(tmp_path, disabled):
    model = random_model(attention_dropout=0.5)
    trainer = train(tmp_path, model=model, **({} if disabled else {"disable_dropout": False}))
    assert (logs(trainer, "loss")[0] == pytest.approx(LN2, abs=1e-6)) == disabled


class Weights(TrainerCallback):
    """The weights of the policy after each step."""

    def __init__(self):
        self.after = []

    def on_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.after.append(weights_of(model))


SYNC = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.25, **MOVING}


def test_sync_pulls_the_reference_towards_the_policy(tmp_path):
    model, record = random_model(), Weights()
    start = weights_of(model)
    trainer = train(tmp_path, model=model, callbacks=[record], max_steps=5, **SYNC)
    for name, value in weights_of(trainer.ref_model).items():
        first = 0.75 * start[name] + 0.25 * record.after[1][name]
        torch.testing.assert_close(value, 0.75 * first + 0.25 * record.after[3][name])


# ---- resuming ----


def assert_resumes(folder, **changes):
    changes = {"max_steps": 5, "save_strategy": "steps", "save_steps": 3, **MOVING, **changes}
    whole = train(folder, **changes)
    resumed = make(folder, **changes)
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
    assert len(resumed.state.log_history) == len(whole.state.log_history)
    for one, other in zip(whole.state.log_history[:5], resumed.state.log_history[:5], strict=True):
        assert timeless(other) == timeless(one)
    assert same_weights(weights_of(whole.model), weights_of(resumed.model))
    return whole, resumed


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"loss_type": ["sigmoid", "sft"], "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
        {"precompute_ref_log_probs": True},
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, changes):
    assert_resumes(tmp_path, **changes)


def test_a_reference_that_moves_is_resumed_where_it_was(tmp_path):
    whole, resumed = assert_resumes(tmp_path, **SYNC)
    assert same_weights(weights_of(whole.ref_model), weights_of(resumed.ref_model))
    assert not same_weights(weights_of(random_model()), weights_of(resumed.ref_model))


# ---- a reference that has scored the data beforehand ----


def scored(folder, dataset=PAIRS, seed=4, **changes):
    """A trainer with a precomputed reference, and how many batches of it were scored."""
    calls = []

    class Counting(DPOTrainer):
        def frozen_logps(self, model, *args, **kwargs):
            calls.append(model)
            return super().frozen_logps(model, *args, **kwargs)

    args = config(folder, precompute_ref_log_probs=True, **changes)
    reference = random_model(seed=seed)
    trainer = Counting(
        random_model(), reference, args, train_dataset=dataset, eval_dataset=dataset, processing_class=word_tokenizer()
    )
    assert all(model is reference for model in calls)
    return trainer, len(calls)


@pytest.mark.parametrize(("size", "batches"), [(None, 2), (3, 3), (8, 1)])
def test_a_precomputed_reference_is_the_live_one(tmp_path, size, batches):
    changes = {"max_steps": 3, **MOVING}
    live = train(tmp_path, ref_model=random_model(seed=4), eval_dataset=PAIRS, **changes)
    told, calls = scored(tmp_path, precompute_ref_batch_size=size, **changes)
    told.train()
    assert calls == 2 * batches  # of the data to train on, and of those to evaluate on
    assert told.ref_model is None
    assert logs(told, "loss") == pytest.approx(logs(live, "loss"), abs=1e-6)
    assert logs(told, "rewards/margins") == pytest.approx(logs(live, "rewards/margins"), abs=1e-6)
    assert told.evaluate()["eval_loss"] == pytest.approx(live.evaluate()["eval_loss"], abs=1e-6)


def test_scores_are_kept_for_the_same_model_and_data(tmp_path):
    """A dataset in memory has no folder for them; one on disk has."""
    PAIRS.save_to_disk(tmp_path / "data")
    PAIRS.select(range(4)).save_to_disk(tmp_path / "other")
    data, other = (load_from_disk(tmp_path / name) for name in ("data", "other"))
    first, calls = scored(tmp_path, data)
    assert calls == 2  # two batches, which the evaluation has from the cache
    again, calls = scored(tmp_path, data)
    assert calls == 0
    assert again.train_dataset["ref_logps"][:] == first.train_dataset["ref_logps"][:]
    others, calls = scored(tmp_path, data, seed=5)
    assert calls == 2
    assert others.train_dataset["ref_logps"][0] != first.train_dataset["ref_logps"][0]
    assert scored(tmp_path, other)[1] == 1
    assert scored(tmp_path, data, max_length=3)[1] == 2
    assert scored(tmp_path, data, bf16=True)[1] == 2


def test_the_same_weights_in_another_model_are_scored_anew(tmp_path):
    """What is read out of the weights depends on the config, too."""
    PAIRS.save_to_disk(tmp_path / "data")
    data, models = load_from_disk(tmp_path / "data"), [random_model(), random_model(rms_norm_eps=0.1)]
    assert same_weights(*map(weights_of, models))
    logps = [
        make(tmp_path, data, ref_model=model, precompute_ref_log_probs=True).train_dataset["ref_logps"][0]
        for model in models
    ]
    assert logps[0] != pytest.approx(logps[1], abs=1e-3)


def test_a_stream_cannot_be_scored_beforehand(tmp_path):
    with pytest.raises(ConfigError, match="`precompute_ref_log_probs=True` reads the dataset twice"):
        make(tmp_path, PAIRS.to_iterable_dataset(), precompute_ref_log_probs=True)


# ---- rows ----


def ids_of(trainer):
    return [tuple(row[name] for name in ("prompt_ids", "chosen_ids", "rejected_ids")) for row in trainer.train_dataset]


EXPECTED = [([10 + i, 20 + i], [30 + i, EOS], [40 + i, 50 + i % 2, EOS]) for i in range(8)]


def test_texts_with_and_without_their_prompt(tmp_path):
    implicit = [{name: row["prompt"] + row[name] for name in ("chosen", "rejected")} for row in ROWS]
    explicit, implicit = make(tmp_path), make(tmp_path, Dataset.from_list(implicit))
    assert ids_of(explicit) == ids_of(implicit) == EXPECTED
    assert explicit.train_dataset.column_names == ["prompt_ids", "chosen_ids", "rejected_ids"]


def test_conversations_with_and_without_their_prompt(tmp_path):
    user, good, bad = (
        {"role": r, "content": c} for r, c in (("user", "w10"), ("assistant", "w20"), ("assistant", "w30"))
    )
    explicit = Dataset.from_list([{"prompt": [user], "chosen": [good], "rejected": [bad]}])
    implicit = Dataset.from_list([{"chosen": [user, good], "rejected": [user, bad]}])
    # Open, role, content, close; the generation prompt, open and role, belongs to the prompt.
    expected = [([OPEN, UNK, 10, CLOSE, OPEN, UNK], [20, CLOSE], [30, CLOSE])]
    assert ids_of(make(tmp_path, explicit)) == ids_of(make(tmp_path, implicit)) == expected


def test_a_stream_trains_as_its_rows_do(tmp_path):
    changes = {"max_steps": 2, "train_sampling_strategy": "sequential", **MOVING}
    assert logs(train(tmp_path, PAIRS.to_iterable_dataset(), **changes), "loss") == pytest.approx(
        logs(train(tmp_path, **changes), "loss"), abs=1e-6
    )


def test_rows_are_cut_at_the_end(tmp_path):
    expected = [([10 + i, 20 + i], [30 + i], [40 + i]) for i in range(8)]
    assert ids_of(make(tmp_path, max_length=3)) == expected


@pytest.mark.filterwarnings("ignore:`truncation_mode='keep_end'`:FutureWarning")
def test_rows_are_cut_at_the_beginning(tmp_path):
    """The longer completion has 3 tokens: of 4, the prompt keeps one."""
    trainer = make(tmp_path, max_length=4, truncation_mode="keep_end")
    assert ids_of(trainer) == [([20 + i], chosen, rejected) for i, (_, chosen, rejected) in enumerate(EXPECTED)]


def test_rows_without_room_for_a_completion_are_left_out(tmp_path):
    rows = Dataset.from_list([*ROWS[:2], {"prompt": "w10 w11 w12 ", "chosen": "w13", "rejected": "w14"}])
    with pytest.warns(UserWarning, match="have no token of a completion within `max_length=3`"):
        trainer = make(tmp_path, rows, max_length=3)
    assert len(trainer.train_dataset) == 2


def test_an_empty_text_is_its_end(tmp_path):
    rows = Dataset.from_list([{"prompt": "w10 ", "chosen": "w11", "rejected": ""}, *ROWS[:3]])
    trainer = train(tmp_path, rows, ref_model=random_model(seed=4))
    assert ids_of(trainer)[0] == ([10], [11, EOS], [EOS])
    assert math.isfinite(logs(trainer, "loss")[0])


def test_rows_without_a_prompt_begin_with_bos(tmp_path):
    rows = Dataset.from_list([{"chosen": "w11", "rejected": "w12 w13"}])
    assert ids_of(make(tmp_path, rows)) == [([BOS], [11, EOS], [12, 13, EOS])]


@pytest.mark.parametrize("half", [{}, {"rejected": None}], ids=["missing", "none"])
def test_rows_that_are_no_pairs(tmp_path, half):
    with pytest.raises(DataError, match="rejected"):
        make(tmp_path, Dataset.from_list([{"prompt": "w10", "chosen": "w11", **half}]))


@pytest.mark.parametrize(("length", "passes"), [(32, 1), (31, 2)])
def test_a_long_prompt_goes_through_the_model_once(tmp_path, length, passes):
    """A completion's last token predicts nothing: 3 + 4 tokens are 2 + 3."""
    rows = {
        "prompt_ids": [list(range(8, 8 + length))],
        "chosen_ids": [[50, 51, EOS]],
        "rejected_ids": [[52, 53, 54, EOS]],
    }
    trainer = make(tmp_path, Dataset.from_dict(rows))
    seen = []
    for model in (trainer.model, trainer.ref_model):
        model.get_input_embeddings().register_forward_hook(
            lambda module, inputs, output: seen.append(inputs[0].numel())
        )
    trainer.train()
    assert seen == 2 * [passes * length + 2 + 3]


# ---- metrics ----

METRICS = {
    *("loss", "grad_norm", "learning_rate", "epoch", "step", "step_time", "num_tokens", "entropy"),
    *("mean_token_accuracy", "rewards/accuracies", "rewards/margins"),
    *(f"{kind}/{side}" for kind in ("rewards", "logps", "logits") for side in ("chosen", "rejected")),
}


def plain_metrics(model, reference, beta):
    """The metrics by one forward pass for each completion; means over tokens where they are of tokens."""
    found, entropy, hits = {}, [], []
    for side, place in (("chosen", 1), ("rejected", 2)):
        sums, ratios, logits = [], [], []
        for row in EXPECTED:
            prompt, completion = row[0], row[place]
            own, other = (plain_logps(m, prompt, completion) for m in (model, reference))
            sums.append(own.sum())
            ratios.append((own - other).sum())
            with torch.no_grad():
                raw = model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
            logits.append(raw.mean(1))
            entropy.append(torch.distributions.Categorical(logits=raw).entropy())
            if side == "chosen":
                hits.append((raw.argmax(1) == torch.tensor(completion)).float())
        found[f"logps/{side}"] = torch.stack(sums).mean()
        found[f"logits/{side}"] = torch.cat(logits).mean()
        found[f"rewards/{side}"] = beta * torch.stack(ratios)
    margins = found["rewards/chosen"] - found["rewards/rejected"]
    found |= {"rewards/margins": margins, "rewards/accuracies": (margins > 0).float()}
    found |= {"entropy": torch.cat(entropy), "mean_token_accuracy": torch.cat(hits)}
    return {name: value.mean().item() for name, value in found.items()}


def test_metrics(tmp_path):
    model, reference = random_model(seed=4), random_model(seed=1)
    changes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "beta": 0.3}
    trainer = train(tmp_path, model=model, ref_model=reference, eval_dataset=PAIRS, **changes)
    expected = plain_metrics(model, reference, 0.3)
    (entry,) = (entry for entry in trainer.state.log_history if "loss" in entry)
    assert set(entry) == METRICS
    assert {name: entry[name] for name in expected} == pytest.approx(expected, abs=1e-4)
    assert expected["mean_token_accuracy"] > 0
    assert entry["num_tokens"] == 8 * (2 * 2 + 2 + 3)  # prompts of 2 tokens, completions of 2 and 3
    evaluation = trainer.evaluate()
    assert {name: evaluation[f"eval_{name}"] for name in expected} == pytest.approx(expected, abs=1e-4)


# ---- evaluation ----


def test_evaluation_weighs_pairs_alike(tmp_path):
    data = {"eval_dataset": PAIRS.select(range(5)), "ref_model": random_model(seed=4)}
    cut, whole = (make(tmp_path, per_device_eval_batch_size=size, **data).evaluate() for size in (4, 5))
    assert cut["eval_loss"] == pytest.approx(whole["eval_loss"], abs=1e-6)
    assert cut["eval_rewards/margins"] == pytest.approx(whole["eval_rewards/margins"], abs=1e-5)


def test_evaluation_leaves_training_as_it_is(tmp_path):
    plain, evaluated = (
        train(tmp_path, max_steps=3, loss_type=["sigmoid", "sft"], eval_dataset=PAIRS.select(range(3)), **MOVING, **how)
        for how in ({}, {"eval_strategy": "steps", "eval_steps": 1})
    )
    assert logs(evaluated, "loss") == logs(plain, "loss")
    assert logs(evaluated, "num_tokens") == logs(plain, "num_tokens")
    assert len(logs(evaluated, "eval_loss")) == 3


@pytest.mark.parametrize("precomputed", [False, True])
def test_several_evaluation_datasets(tmp_path, precomputed):
    parts = {"one": PAIRS.select([0, 1]), "two": PAIRS.select([2, 3])}
    trainer = make(tmp_path, eval_dataset=parts, ref_model=random_model(seed=4), precompute_ref_log_probs=precomputed)
    found = trainer.evaluate()
    together = make(tmp_path, eval_dataset=PAIRS.select(range(4)), ref_model=random_model(seed=4)).evaluate()
    assert (found["eval_one_loss"] + found["eval_two_loss"]) / 2 == pytest.approx(together["eval_loss"], abs=1e-6)
    assert found["eval_one_loss"] != pytest.approx(found["eval_two_loss"], abs=1e-4)
