"""Sleep and weights of an engine inside the trainer: it never generates with weights that it has lost."""

import pytest
import torch
from fixtures.fake_llm import GENERATION, SCORED_GENERATION, install
from fixtures.models import random_model
from fixtures.runs import Recorder, grpo_config, logs, make, prompts
from peft import LoraConfig, get_peft_model

from trl.errors import ParityError

PROMPTS = prompts(*(f"w{i} w{i + 1}" for i in range(10, 26)))
LOADED = ["load", "reset cache", "generate"]
VARYING = ("step_time", "weight_sync_time", "train_runtime", "per_second")


@pytest.fixture(autouse=True)
def vllm(monkeypatch):
    yield install(monkeypatch)
    # What the trainer's engine has joined, which nobody closes here.
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def variety(completion_ids, **kwargs):
    return [len(set(ids)) + ids[0] % 3 / 4 for ids in completion_ids]


class Watcher(Recorder):
    """A reward function that copies the policy's weights: the ones that wrote what it scores."""

    def __init__(self):
        super().__init__(variety)
        self.policy = []
        self.model = None

    def __call__(self, **kwargs):
        self.policy.append({name: p.detach().clone() for name, p in self.model.named_parameters()})
        return super().__call__(**kwargs)


def colocated(folder, vllm, *, seed=0, **changes):
    """A trainer, its engine's stand-in, and what watches them."""
    settings = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_enable_sleep_mode": True,
        "vllm_parity_check_steps": 0,
        "learning_rate": 1e-2,
        "max_steps": 3,
        "steps_per_generation": 2,
        "num_generations": 2,
        **changes,
    }
    watcher = Watcher()
    dataset = PROMPTS.select(range(4))
    trainer = make(random_model(seed=seed), watcher, grpo_config(folder, **settings), PROMPTS, eval_dataset=dataset)
    watcher.model = trainer.model
    return trainer, vllm[-1], watcher


def assert_wrote_with_the_policy(llm, watcher):
    """Every generation was met with the weights that the policy had then, bit for bit."""
    assert len(llm.seen) == len(watcher.policy) > 0
    for seen, policy in zip(llm.seen, watcher.policy, strict=True):
        assert seen.keys() == policy.keys()
        for name, tensor in seen.items():
            assert torch.equal(tensor, policy[name]), name


@pytest.mark.parametrize(
    ("window", "generations"),
    [
        ({"steps_per_generation": 2}, 2),
        ({"steps_per_generation": 1}, 3),
        ({"steps_per_generation": 2, "num_iterations": 2}, 1),
        ({"steps_per_generation": 2, "num_iterations": 2, "max_steps": 5}, 2),
        ({"steps_per_generation": 2, "gradient_accumulation_steps": 2}, 3),
        ({"steps_per_generation": 4, "gradient_accumulation_steps": 2}, 2),
        ({"steps_per_generation": 2, "gradient_accumulation_steps": 2, "num_iterations": 2}, 2),
    ],
)
def test_weights_come_back_before_every_generation(tmp_path, vllm, window, generations):
    trainer, llm, watcher = colocated(tmp_path, vllm, **window)
    assert llm.calls == ["sleep"]
    trainer.train()
    assert llm.calls == ["sleep", *GENERATION * generations]
    assert_wrote_with_the_policy(llm, watcher)
    moved = [not torch.equal(watcher.policy[0]["lm_head.weight"], p["lm_head.weight"]) for p in watcher.policy[1:]]
    assert all(moved)
    assert logs(trainer, "sampling/sampling_logp_difference/max")[0] < 1e-4


def test_an_evaluation_without_a_step_loads_again(tmp_path, vllm):
    """Four rows in two batches, before training, after it and once more."""
    trainer, llm, watcher = colocated(tmp_path, vllm, per_device_eval_batch_size=4)
    trainer.evaluate()
    assert llm.calls == ["sleep", *GENERATION * 2]
    trainer.train()
    assert llm.calls == ["sleep", *GENERATION * 4]
    trainer.evaluate()
    trainer.evaluate()
    assert llm.calls == ["sleep", *GENERATION * 8]
    assert_wrote_with_the_policy(llm, watcher)
    # The last four are of one step, and of the weights that training ended with.
    for policy in watcher.policy[-4:]:
        assert torch.equal(policy["lm_head.weight"], trainer.model.lm_head.weight)


def test_evaluations_between_steps(tmp_path, vllm):
    """After steps 1, 2 and 3, two batches each; generations before steps 1 and 3."""
    trainer, llm, watcher = colocated(tmp_path, vllm, eval_strategy="steps", eval_steps=1, max_steps=3)
    trainer.train()
    assert llm.calls == ["sleep", *GENERATION * (2 + 3 * 2)]
    assert_wrote_with_the_policy(llm, watcher)


def test_the_first_generation_of_a_resumed_run(tmp_path, vllm):
    settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    whole, _, _ = colocated(tmp_path, vllm, **settings)
    whole.train()
    # Other weights than the checkpoint's, so that the ones of the start would be noticed.
    resumed, llm, watcher = colocated(tmp_path, vllm, seed=5, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert llm.calls == ["sleep", *GENERATION]
    assert_wrote_with_the_policy(llm, watcher)
    assert not torch.equal(watcher.policy[0]["lm_head.weight"], random_model(seed=5).lm_head.weight)


def test_a_run_resumed_within_a_window_loads_for_the_next_one(tmp_path, vllm):
    settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": 4}
    whole, _, _ = colocated(tmp_path, vllm, **settings)
    whole.train()
    resumed, llm, watcher = colocated(tmp_path, vllm, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert llm.calls == ["sleep", *GENERATION]
    assert_wrote_with_the_policy(llm, watcher)


@pytest.mark.parametrize("sleeps", [True, False])
@pytest.mark.parametrize("parity_steps", [0, 1, 50])
def test_a_resumed_run_draws_what_the_whole_one_drew(tmp_path, vllm, sleeps, parity_steps):
    settings = {
        "vllm_enable_sleep_mode": sleeps,
        "vllm_parity_check_steps": parity_steps,
        "save_strategy": "steps",
        "save_steps": 2,
        "max_steps": 6,
    }
    whole, _, first = colocated(tmp_path, vllm, **settings)
    whole.train()
    resumed, _, second = colocated(tmp_path, vllm, seed=5, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert len(first.calls) == 1 + len(second.calls) == 3
    assert [c["completion_ids"] for c in second.calls] == [c["completion_ids"] for c in first.calls[1:]]
    for one, other in zip(whole.state.log_history[2:6], resumed.state.log_history[2:6], strict=True):
        steady = {k: v for k, v in one.items() if not any(w in k for w in (*VARYING, "parity"))}
        assert {k: other[k] for k in steady} == pytest.approx(steady, abs=1e-5)


def test_the_comparison_comes_before_the_sleep(tmp_path, vllm):
    trainer, llm, _ = colocated(tmp_path, vllm, vllm_parity_check_steps=3, max_steps=6)
    trainer.train()
    # Generations at steps 0, 2 and 4: compared at 0, and again at the first one three steps later.
    assert llm.calls == ["sleep", *SCORED_GENERATION, *GENERATION, *SCORED_GENERATION]
    assert max(logs(trainer, "sampling/parity_max")) < 1e-4


def test_an_engine_that_stays_awake_loads_once_a_step(tmp_path, vllm):
    trainer, llm, watcher = colocated(tmp_path, vllm, vllm_enable_sleep_mode=False)
    assert llm.calls == []
    trainer.evaluate()
    assert llm.calls == [*LOADED, "generate"]
    trainer.train()
    # Training may start with weights of a checkpoint: it sends them once more.
    assert llm.calls == [*LOADED, "generate", *LOADED, *LOADED]
    trainer.evaluate()
    assert llm.calls == [*LOADED, "generate", *LOADED, *LOADED, *LOADED, "generate"]
    assert_wrote_with_the_policy(llm, watcher)


def test_rewards_and_optimizer_find_the_engine_asleep(tmp_path, vllm):
    rewarded, stepped = [], []

    def looking(completion_ids, **kwargs):
        rewarded.append(set(vllm[-1].memory))
        return variety(completion_ids)

    args = grpo_config(tmp_path, use_vllm=True, vllm_enable_sleep_mode=True, max_steps=3, steps_per_generation=2)
    trainer = make(random_model(), looking, args, PROMPTS)
    trainer.on_gradients_complete = lambda: stepped.append(set(vllm[-1].memory))
    trainer.train()
    assert (rewarded, stepped) == ([set()] * 2, [set()] * 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_engine_computes_as_the_policy_does(tmp_path, vllm, dtype):
    """It takes weights of its own dtype alone, and its generations would assert that some are missing."""
    args = grpo_config(tmp_path, use_vllm=True, vllm_enable_sleep_mode=True, max_steps=2)
    make(random_model().to(dtype), variety, args, PROMPTS).train()
    assert {p.dtype for p in vllm[-1].model.parameters()} == {dtype}
    assert vllm[-1].options["dtype"] == str(dtype).removeprefix("torch.")
    assert len(vllm[-1].seen) == 2


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # of peft
def test_an_adapter_is_merged_on_the_way(tmp_path, vllm):
    """The engine is one of the model beneath it, and generates as the whole."""
    torch.manual_seed(0)
    model = get_peft_model(random_model(), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    args = grpo_config(tmp_path, use_vllm=True, vllm_enable_sleep_mode=True, max_steps=2, learning_rate=1e-2)
    trainer = make(model, variety, args, PROMPTS)
    trainer.train()
    assert vllm[-1].calls == ["sleep", *SCORED_GENERATION, *GENERATION]
    assert max(logs(trainer, "sampling/parity_max")) < 1e-4
    assert max(logs(trainer, "sampling/sampling_logp_difference/max")) < 1e-4


def test_a_reward_that_fails_leaves_an_engine_that_can_go_on(tmp_path, vllm):
    trainer, llm, watcher = colocated(tmp_path, vllm)
    watcher.rule = None
    with pytest.raises(TypeError):
        trainer.train()
    assert llm.calls == ["sleep", *GENERATION]
    watcher.rule = variety
    watcher.policy.clear()
    llm.seen.clear()
    trainer.train()
    assert llm.calls == ["sleep", *GENERATION * 3]
    assert_wrote_with_the_policy(llm, watcher)


def test_an_engine_with_other_weights_is_noticed(tmp_path, vllm):
    trainer, llm, _ = colocated(tmp_path, vllm, vllm_parity_check_steps=1)
    load = llm.load

    def wrong(weights):
        load((name, tensor.flip(0)) for name, tensor in weights)

    llm.load = wrong
    with pytest.raises(ParityError, match="does not have the trainer's weights"):
        trainer.train()
