"""The online methods learn: each teaches the quickstart's base model to sort letters, in less than two minutes."""

import copy
from pathlib import Path

import pytest
from fixtures.scripts import load_script
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl import DistillationConfig, DistillationTrainer, RLOOConfig, RLOOTrainer
from trl.data.chat import decode_completions, encode_prompt
from trl.generation.local import LocalEngine
from trl.models.forward import supports_packing
from trl.models.load import end_of_sequence_ids, use_packed_attention
from trl.trainer.online_dpo_config import OnlineDPOConfig
from trl.trainer.online_dpo_trainer import OnlineDPOTrainer
from trl.types import Prompt, Sampling

pytestmark = pytest.mark.slow

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"
BASE = str(QUICKSTART / "base")
TASK = load_script(QUICKSTART / "task.py")
REWARDS = [TASK.order_reward, TASK.exact_reward]
SETTINGS = {
    "max_steps": 150,
    "learning_rate": 1e-3,
    "warmup_steps": 5,
    "adam_beta2": 0.99,
    "gradient_checkpointing": False,
    "seed": 0,
    "use_cpu": True,
    "logging_steps": 1,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
}


def exact_share(model) -> float:
    """The share of held-out prompts that the model answers right, greedily."""
    model = copy.deepcopy(model)
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    use_packed_attention(model)
    rows = TASK.sorting_dataset("test", seed=7, rows=600)
    engine = LocalEngine(model, eos_ids=end_of_sequence_ids(model, tokenizer), shared_prompts=supports_packing(model))
    prompts = [Prompt(encode_prompt(prompt, tokenizer)) for prompt in rows["prompt"]]
    answers = dict(engine.generate(prompts, Sampling(temperature=0.0, max_tokens=10)))
    ids = [answers[index][0].token_ids for index in range(len(prompts))]
    texts = decode_completions(ids, rows["prompt"][:], tokenizer)
    return sum(TASK.exact_reward(texts, rows["solution"])) / len(prompts)


def values(trainer, key):
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def assert_reward_rises(trainer) -> None:
    """From about 0.26, that of the letters in any order."""
    rewards = values(trainer, "reward")
    assert sum(rewards[:3]) / 3 < 0.35
    assert sum(rewards[-5:]) / 5 > 0.9


@pytest.fixture(scope="module")
def sorter(tmp_path_factory):
    """The trainer of a model that RLOO taught to sort."""
    args = RLOOConfig(
        **SETTINGS,
        output_dir=str(tmp_path_factory.mktemp("rloo")),
        per_device_train_batch_size=256,
        num_generations=8,
        max_completion_length=10,
        beta=0.0,
        reward_weights=[0.5, 0.5],
    )
    trainer = RLOOTrainer(BASE, REWARDS, args, TASK.sorting_dataset("train"))
    trainer.train()
    return trainer


def test_the_base_model_does_not_sort():
    assert exact_share(AutoModelForCausalLM.from_pretrained(BASE)) < 0.1


def test_rloo(sorter):
    assert_reward_rises(sorter)
    assert exact_share(sorter.model) > 0.75


def test_online_dpo(tmp_path):
    args = OnlineDPOConfig(
        **SETTINGS,
        output_dir=str(tmp_path),
        per_device_train_batch_size=128,
        max_new_tokens=10,
        temperature=1.0,
        reward_weights=[0.5, 0.5],
    )
    trainer = OnlineDPOTrainer(BASE, reward_funcs=REWARDS, args=args, train_dataset=TASK.sorting_dataset("train"))
    trainer.train()
    assert_reward_rises(trainer)
    assert exact_share(trainer.model) > 0.75


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_distillation(sorter, tmp_path, beta):
    args = DistillationConfig(
        **SETTINGS,
        output_dir=str(tmp_path),
        per_device_train_batch_size=128,
        max_completion_length=10,
        beta=beta,
    )
    trainer = DistillationTrainer(BASE, copy.deepcopy(sorter.model), args, TASK.sorting_dataset("train"))
    trainer.train()
    losses = values(trainer, "loss")
    assert sum(losses[-5:]) < 0.2 * sum(losses[:5])
    print(beta, losses[:2], losses[-2:], exact_share(trainer.model), exact_share(sorter.model))
    assert exact_share(trainer.model) > 0.9 * exact_share(sorter.model)
