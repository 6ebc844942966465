"""The quickstart's task, with completions from a real vLLM in the trainer's process."""

from pathlib import Path

import pytest
from fixtures.colocate import skip_without_vllm
from fixtures.scripts import load_script

from trl import GRPOConfig, GRPOTrainer

skip_without_vllm()
pytestmark = pytest.mark.filterwarnings("default")  # vLLM's own warnings are no failures

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"


def test_letters_are_sorted_by_reward_alone(tmp_path):
    """The settings of `sort.yaml`, but the number of steps: rewards are 0.26 at first and 0.95 at the end."""
    sorting = load_script(QUICKSTART / "task.py")
    args = GRPOConfig(
        output_dir=str(tmp_path),
        use_vllm=True,
        vllm_max_model_length=64,
        vllm_parity_check_steps=10,
        use_cpu=True,
        max_steps=100,
        per_device_train_batch_size=256,
        num_generations=8,
        max_completion_length=10,
        loss_type="dapo",
        learning_rate=1e-3,
        warmup_steps=5,
        adam_beta2=0.99,
        gradient_checkpointing=False,
        reward_weights=[0.5, 0.5],
        seed=0,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
    )
    rewards = [sorting.order_reward, sorting.exact_reward]
    trainer = GRPOTrainer(str(QUICKSTART / "base"), rewards, args, sorting.sorting_dataset("train"))
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert sum(entry["reward"] for entry in steps[:3]) / 3 < 0.35
    assert sum(entry["reward"] for entry in steps[-5:]) / 5 > 0.9
    parity = [entry["sampling/parity_max"] for entry in steps if "sampling/parity_max" in entry]
    assert len(parity) == 10
    assert max(parity) < 1e-4
    trainer.engine.close()
