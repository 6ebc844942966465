"""Options that trade time for memory: none of them changes a loss or a gradient."""

import pytest
from datasets import Dataset
from fixtures.models import random_model
from fixtures.runs import GradientGrabber, assert_same_gradients, logs
from fixtures.tokenizers import word_tokenizer

from trl.models.offload import OffloadedActivations
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

TEXTS = [" ".join(f"w{10 + (7 * i + j) % 40}" for j in range(n)) for i, n in enumerate((3, 5, 4, 6))]
OPTIONS = {
    "checkpointing": {"gradient_checkpointing": True},
    "selective": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"selective": True}},
    "offloading": {"activation_offloading": True},
    "both": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"selective": True},
        "activation_offloading": True,
    },
}


def train(folder, **changes):
    settings = {
        "output_dir": str(folder),
        "learning_rate": 0.0,
        "max_steps": 1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 4,
    }
    grabber = GradientGrabber()
    trainer = SFTTrainer(
        random_model(),
        SFTConfig(**(settings | changes)),
        train_dataset=Dataset.from_dict({"text": TEXTS}),
        processing_class=word_tokenizer(),
        callbacks=[grabber],
    )
    trainer.train()
    return logs(trainer, "loss")[0], grabber.steps[0]


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("budget", [None, 8])
def test_loss_and_gradients_are_those_without(tmp_path, name, budget):
    loss, gradients = train(tmp_path, max_tokens_per_micro_batch=budget)
    other_loss, other_gradients = train(tmp_path, max_tokens_per_micro_batch=budget, **OPTIONS[name])
    assert other_loss == pytest.approx(loss, abs=1e-6)
    assert_same_gradients(other_gradients, gradients, tolerance=1e-5)


def test_activations_are_moved_where_they_are_to(tmp_path, monkeypatch):
    entered = []
    enter = OffloadedActivations.__enter__

    def counted(self):
        entered.append(self)
        return enter(self)

    monkeypatch.setattr(OffloadedActivations, "__enter__", counted)
    train(tmp_path)
    assert not entered
    train(tmp_path, activation_offloading=True)
    assert len(entered) == 1
    assert entered[0].copies_out > 0
    assert entered[0].stored_bytes == 0
