"""`GRPOTrainer`: what it accepts, how often it generates and steps, what it logs and keeps."""

import itertools
import math
import warnings

import pyarrow.parquet
import pytest
import torch
from datasets import Dataset
from fixtures.engines import ScriptedEngine
from fixtures.models import CHAIN_S, family_model, random_model, table_model
from fixtures.runs import (
    GradientGrabber,
    Recorder,
    assert_same_gradients,
    by_length,
    grpo_config,
    logs,
    make,
    prompts,
    run,
)
from fixtures.tokenizers import word_tokenizer
from torch.utils.data import IterableDataset
from transformers import LlamaConfig, LlamaForSequenceClassification, TrainerCallback

from trl import GRPOConfig, GRPOTrainer
from trl.errors import ConfigError, DataError, NotSupportedError, RewardError

PROMPTS = prompts("w10", "w20 w10")


def variety(completion_ids, **kwargs):
    return [len(set(ids)) + ids[0] % 3 / 4 for ids in completion_ids]


def needs_answer(completions, answer):
    return [0.0] * len(completions)


# ---- the constructor ----


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"train_dataset": None}, ConfigError, "`train_dataset` is missing"),
        ({"train_dataset": "my-dataset"}, TypeError, r"`train_dataset` must be a dataset.*got str"),
        ({"train_dataset": {"train": PROMPTS}}, TypeError, r"`train_dataset` must be a dataset.*got dict"),
        ({"train_dataset": Dataset.from_dict({"text": ["w10"]})}, DataError, r"no column `prompt` \(it has text\)"),
        ({"train_dataset": [{"text": "w10"}]}, DataError, r"no column `prompt` \(it has text\)"),
        ({"train_dataset": prompts("w10", image=["x"])}, NotSupportedError, "images"),
        ({"eval_dataset": Dataset.from_dict({"text": ["w10"]})}, DataError, "`eval_dataset` has no column `prompt`"),
        ({"eval_dataset": {"a": PROMPTS, "b": 3}}, TypeError, r"got int"),
        ({"reward_funcs": None}, ConfigError, "`reward_funcs` is missing"),
        ({"reward_funcs": []}, ConfigError, "`reward_funcs` is empty"),
        ({"reward_funcs": [by_length, 3]}, ConfigError, "holds 3"),
        ({"reward_funcs": needs_answer}, RewardError, "`needs_answer` needs column `answer`"),
        ({"reward_processing_classes": [None, None]}, ConfigError, "for each of the 1 rewards"),
        ({"tools": [print]}, NotSupportedError, "`tools`"),
        ({"rollout_func": print}, NotSupportedError, "`rollout_func`"),
        ({"environment_factory": print}, NotSupportedError, "`environment_factory`"),
    ],
)
def test_what_cannot_work_is_named_before_a_model_is_loaded(tmp_path, changes, error, message):
    given = {"train_dataset": PROMPTS, "reward_funcs": by_length, "processing_class": word_tokenizer(), **changes}
    with pytest.raises(error, match=message):
        GRPOTrainer("no/such-model", args=grpo_config(tmp_path), **given)


def test_weights_that_do_not_match_the_rewards_are_named(tmp_path):
    args = grpo_config(tmp_path, reward_weights=[1.0, 2.0])
    with pytest.raises(ConfigError, match="`reward_weights` must have one entry for each of the 1 rewards"):
        GRPOTrainer("no/such-model", by_length, args, train_dataset=PROMPTS)


def test_a_model_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(ConfigError, match="no/such-model"):
        GRPOTrainer("no/such-model", by_length, grpo_config(tmp_path), train_dataset=PROMPTS)


def test_model_init_kwargs_are_for_names(tmp_path):
    args = grpo_config(tmp_path, model_init_kwargs={"dtype": "bfloat16"})
    with pytest.raises(ConfigError, match="`model_init_kwargs` is for a model given by name"):
        make(random_model(), by_length, args, PROMPTS)


def test_a_model_in_memory_needs_its_tokenizer(tmp_path):
    with pytest.raises(ConfigError, match="pass `processing_class`"):
        GRPOTrainer(random_model(), by_length, grpo_config(tmp_path), train_dataset=PROMPTS)


def test_a_folder_with_model_and_tokenizer_is_enough(tmp_path, monkeypatch):
    random_model().save_pretrained(tmp_path / "tiny")
    word_tokenizer().save_pretrained(tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    trainer = GRPOTrainer("tiny", by_length, train_dataset=PROMPTS)
    assert trainer.args.output_dir == "tiny-GRPO"
    assert isinstance(trainer.args, GRPOConfig)
    assert trainer.model.dtype == torch.float32
    args = grpo_config(tmp_path, model_init_kwargs={"dtype": "bfloat16", "attn_implementation": "eager"})
    trainer = run(str(tmp_path / "tiny"), by_length, args, PROMPTS, processing_class=None)
    assert trainer.model.dtype == torch.bfloat16
    assert trainer.model.config._attn_implementation == "eager"
    assert trainer.state.global_step == 1


# ---- data ----


class Stream(IterableDataset):
    def __iter__(self):
        return ({"prompt": f"w{i} w10", "number": i} for i in range(20, 30))


@pytest.mark.parametrize("stream", [Stream(), Dataset.from_list(list(Stream())).to_iterable_dataset()])
def test_streams_feed_groups_in_their_order(tmp_path, stream):
    recorder = Recorder()
    args = grpo_config(tmp_path, per_device_train_batch_size=8, max_steps=3, num_iterations=2)
    trainer = run(table_model(CHAIN_S), recorder, args, stream, eval_dataset=stream)
    assert trainer.state.global_step == 3
    assert [call["number"] for call in recorder.calls] == [[20] * 4 + [21] * 4, [22] * 4 + [23] * 4]
    recorder.calls.clear()
    assert trainer.evaluate()["eval_reward_std"] >= 0
    assert [call["number"] for call in recorder.calls] == [[i] * 4 for i in range(20, 30)]


def test_workers_are_not_used_for_streams(tmp_path):
    args = grpo_config(tmp_path, dataloader_num_workers=2)
    with pytest.warns(UserWarning, match="`dataloader_num_workers` is 0 now"):
        make(table_model(CHAIN_S), by_length, args, Stream())


def test_conversations_and_plain_prompts(tmp_path):
    chat = [{"prompt": [{"role": "user", "content": "w20"}]}, {"prompt": "w10"}]
    recorder = Recorder()
    args = grpo_config(tmp_path, per_device_train_batch_size=8)
    run(table_model({6: {11: 1.0}, **CHAIN_S}), recorder, args, chat)
    call = recorder.calls[0]
    for prompt, completion in zip(call["prompts"], call["completions"], strict=True):
        assert isinstance(completion, str) == isinstance(prompt, str)


@pytest.fixture
def reward_model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_labels=1,
        pad_token_id=0,
    )
    return LlamaForSequenceClassification(config)


def test_reward_models_by_path_and_as_modules_agree(tmp_path, reward_model):
    reward_model.save_pretrained(tmp_path / "judge")
    word_tokenizer().save_pretrained(tmp_path / "judge")
    sources = [str(tmp_path / "judge"), reward_model]
    trainer = run(
        table_model(CHAIN_S),
        sources,
        grpo_config(tmp_path),
        PROMPTS,
        reward_processing_classes=[None, word_tokenizer()],
    )
    by_path = logs(trainer, "rewards/judge/mean")[0]
    as_module = logs(trainer, "rewards/LlamaForSequenceClassification/mean")[0]
    assert by_path == pytest.approx(as_module, abs=1e-6)
    assert logs(trainer, "reward")[0] == pytest.approx(2 * by_path, abs=1e-5)
    assert by_path != 0


# ---- how often ----


@pytest.mark.parametrize(
    ("iterations", "steps_per_generation", "accumulation"), list(itertools.product((1, 2, 3), (1, 2, 4), (1, 2)))
)
def test_generations_and_optimizer_steps(tmp_path, iterations, steps_per_generation, accumulation):
    recorder = Recorder(variety)
    args = grpo_config(
        tmp_path,
        num_iterations=iterations,
        steps_per_generation=steps_per_generation,
        gradient_accumulation_steps=accumulation,
        max_steps=-1,
        num_train_epochs=1,
        per_device_train_batch_size=2,
        num_generations=2,
    )
    dataset = prompts(*(f"w{20 + i} w10" for i in range(8)))
    trainer = run(table_model(CHAIN_S), recorder, args, dataset)
    micro_steps = 8 * iterations
    assert trainer.state.global_step == math.ceil(micro_steps / accumulation)
    assert len(recorder.calls) == 8 // steps_per_generation
    assert {len(call["prompts"]) for call in recorder.calls} == {2 * steps_per_generation}
    assert sorted(p for call in recorder.calls for p in call["prompts"]) == sorted(2 * list(dataset["prompt"]))


def test_training_twice_begins_anew(tmp_path):
    recorder = Recorder()
    args = grpo_config(tmp_path, steps_per_generation=2, max_steps=3)
    trainer = run(table_model(CHAIN_S), recorder, args, PROMPTS)
    assert trainer.buffer.inside_window
    trainer.train()
    assert len(recorder.calls) == 4
    assert recorder.calls[0]["prompts"] == recorder.calls[2]["prompts"]


# ---- evaluation ----


def test_evaluation_alone(tmp_path):
    trainer = make(table_model(CHAIN_S), by_length, grpo_config(tmp_path), PROMPTS, eval_dataset=PROMPTS)
    metrics = trainer.evaluate()
    assert metrics["eval_reward"] == metrics["eval_completions/mean_length"]
    assert "eval_loss" in metrics
    assert trainer.state.num_input_tokens_seen == 0
    trainer.train()
    assert trainer.state.global_step == 1


def test_a_dict_of_evaluation_sets(tmp_path):
    sets = {"one": prompts("w10", value=[1.0]), "two": prompts("w10", value=[2.0])}

    def given(completions, value, **kwargs):
        return value

    trainer = make(table_model(CHAIN_S), given, grpo_config(tmp_path), prompts("w10", value=[0.0]), eval_dataset=sets)
    metrics = trainer.evaluate()
    assert (metrics["eval_one_reward"], metrics["eval_two_reward"]) == (1.0, 2.0)
    assert trainer.evaluate(sets["two"], metric_key_prefix="held_out")["held_out_reward"] == 2.0


# ---- metrics ----


def test_the_metrics_of_a_scripted_step(tmp_path):
    """Two prompts of 1 and 2 tokens; four completions each, one of them cut off at 6 tokens."""
    script = {(10,): [[11, 1], [11, 12, 1], [11, 12, 13, 1], [20] * 6], (20, 10): [[11, 1]] * 4}

    def first(completion_ids, **kwargs):
        return [None if len(ids) == 6 else float(len(ids)) for ids in completion_ids]

    def second(completion_ids, log_metric, **kwargs):
        log_metric("mine", 7.0)
        return [1.0] * len(completion_ids)

    args = grpo_config(tmp_path, per_device_train_batch_size=8, reward_weights=[1.0, 0.5])
    trainer = make(random_model(), [first, second], args, PROMPTS)
    trainer.engine = ScriptedEngine(lambda prompt, index: script[tuple(prompt)][index])
    trainer.train()
    logged = trainer.state.log_history[0]
    expected = {
        "num_tokens": 4 * 1 + 4 * 2 + 15 + 8,
        "completions/mean_length": 23 / 8,
        "completions/min_length": 2,
        "completions/max_length": 6,
        "completions/mean_terminated_length": 17 / 7,
        "completions/min_terminated_length": 2,
        "completions/max_terminated_length": 4,
        "completions/clipped_ratio": 1 / 8,
        "rewards/first/mean": 17 / 7,
        "rewards/first/std": torch.tensor([2.0, 3, 4, 2, 2, 2, 2]).std().item(),
        "rewards/second/mean": 1.0,
        "rewards/second/std": 0.0,
        "reward": (17 + 8 * 0.5) / 8,
        "reward_std": torch.tensor([2.5, 3.5, 4.5, 0.5]).std().item() / 2,
        "frac_reward_zero_std": 0.5,
        "mine": 7.0,
        "clip_ratio/low_mean": 0.0,
        "clip_ratio/low_min": 0.0,
        "clip_ratio/high_mean": 0.0,
        "clip_ratio/high_max": 0.0,
        "clip_ratio/region_mean": 0.0,
    }
    assert {name: logged[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    assert 0 < logged["entropy"] < math.log(64)
    assert logged["step_time"] > 0
    assert trainer.engine.calls[0][1].n == 4


@pytest.mark.parametrize(
    ("loss_type", "present", "absent"),
    [
        ("dapo", "clip_ratio/region_mean", "cispo_clip_ratio"),
        ("cispo", "cispo_clip_ratio", "clip_ratio/region_mean"),
        ("vespo", "vespo/phi_seq_mean", "clip_ratio/region_mean"),
        ("sapo", "entropy", "clip_ratio/region_mean"),
    ],
)
def test_metrics_by_loss(tmp_path, loss_type, present, absent):
    trainer = run(table_model(CHAIN_S), Recorder(variety), grpo_config(tmp_path, loss_type=loss_type), PROMPTS)
    assert len(logs(trainer, present)) == 1
    assert logs(trainer, absent) == []


def test_clipping_is_counted_where_it_happens(tmp_path):
    """A high learning rate and several passes: some tokens leave the bounds, and cispo caps above 0.2 nearly all."""
    args = grpo_config(tmp_path, num_iterations=3, max_steps=3, learning_rate=5e-2, lr_scheduler_type="constant")
    trainer = run(random_model(), Recorder(variety), args, PROMPTS)
    region = logs(trainer, "clip_ratio/region_mean")
    assert region[0] == 0.0
    assert region[2] > 0.0
    low, high = logs(trainer, "clip_ratio/low_mean")[2], logs(trainer, "clip_ratio/high_mean")[2]
    assert region[2] == pytest.approx(low + high)


def test_a_metric_without_a_value_is_none(tmp_path):
    args = grpo_config(tmp_path, max_completion_length=2)
    trainer = run(table_model(CHAIN_S), by_length, args, PROMPTS)
    assert logs(trainer, "completions/mean_terminated_length") == [None]
    assert logs(trainer, "completions/min_terminated_length") == [None]


# ---- the table, callbacks, saving ----


def test_the_table_is_printed_and_stored(tmp_path, capsys):
    args = grpo_config(tmp_path, log_completions=True, num_completions_to_print=1)
    run(table_model({10: {11: 1.0}, 11: {1: 1.0}}), by_length, args, prompts("w10"))
    printed = capsys.readouterr().out
    assert printed.count("w11") == 1
    assert "by_length" in printed
    stored = pyarrow.parquet.read_table(tmp_path / "completions" / "completions_00001.parquet")
    assert (
        stored.to_pylist()
        == [{"step": 0, "prompt": "w10", "completion": "w11", "by_length": 2.0, "advantage": 0.0}] * 4
    )


class Watcher(TrainerCallback):
    def __init__(self):
        self.events = []

    def on_step_end(self, args, state, control, **kwargs):
        self.events.append(("step", state.global_step))
        if state.global_step == 2:
            control.should_training_stop = True

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.events.append(("log", "reward" in logs))


def test_callbacks_see_steps_and_metrics_and_can_stop(tmp_path):
    watcher = Watcher()
    trainer = make(table_model(CHAIN_S), by_length, grpo_config(tmp_path, max_steps=9), PROMPTS, callbacks=[watcher])
    trainer.train()
    assert trainer.state.global_step == 2
    assert watcher.events == [("step", 1), ("log", True), ("step", 2), ("log", True), ("log", False)]


def test_a_saved_model_is_the_trained_one(tmp_path):
    trainer = run(random_model(), variety, grpo_config(tmp_path, learning_rate=1e-2), PROMPTS)
    trainer.save_model(str(tmp_path / "saved"))
    again = make(str(tmp_path / "saved"), variety, grpo_config(tmp_path), PROMPTS, processing_class=None)
    for one, other in zip(trainer.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)
    args = torch.load(tmp_path / "saved" / "training_args.bin", weights_only=False)
    assert args.to_dict() == trainer.args.to_dict()


# ---- terms of the loss ----


def test_the_entropy_bonus_is_subtracted_with_its_weight(tmp_path):
    args = grpo_config(tmp_path, entropy_coef=0.5, gradient_accumulation_steps=2, beta=0.0)
    trainer = run(table_model(CHAIN_S), Recorder(variety), args, PROMPTS)
    entropy, policy_loss = logs(trainer, "entropy")[0], logs(trainer, "policy_loss")[0]
    assert entropy > 0
    assert logs(trainer, "loss")[0] == pytest.approx(policy_loss - 0.5 * entropy, abs=1e-5)
    plain = run(table_model(CHAIN_S), Recorder(variety), grpo_config(tmp_path, gradient_accumulation_steps=2), PROMPTS)
    assert policy_loss == pytest.approx(logs(plain, "loss")[0], abs=1e-5)
    assert logs(plain, "policy_loss") == []


@pytest.mark.parametrize(("target", "expected"), [(5.0, [0.0, 0.15, 0.2, 0.2]), (0.0, [0.0] * 4)])
def test_the_adaptive_weight_follows_the_entropy(tmp_path, target, expected):
    """Below the target it grows by 0.05 from 0.1 and is used from the second step on; above it is not used."""
    args = grpo_config(
        tmp_path,
        entropy_coef=0.1,
        use_adaptive_entropy=True,
        entropy_coef_delta=0.05,
        entropy_coef_max=0.2,
        entropy_target=target,
        max_steps=4,
    )
    trainer = run(table_model(CHAIN_S), Recorder(variety), args, PROMPTS)
    assert logs(trainer, "entropy_coef") == pytest.approx(expected)


def test_only_tokens_of_high_entropy_are_trained_on(tmp_path):
    """Chain S has two kinds of tokens: the choice after w11, of entropy ln 2, and the rest, of entropy 0."""
    script = [[11, 12, 1], [11, 13, 14, 15, 1]]
    args = grpo_config(tmp_path, top_entropy_quantile=0.2)
    trainer = make(table_model(CHAIN_S), by_length, args, prompts("w10"))
    trainer.engine = ScriptedEngine(script)
    trainer.train()
    # 16 tokens, 4 of them choices; one choice a completion keeps -A each, and the advantages add up to 0
    assert logs(trainer, "loss")[0] == pytest.approx(0.0, abs=1e-6)
    uneven = make(table_model(CHAIN_S), by_length, args, prompts("w10"))
    uneven.engine = ScriptedEngine([[11, 12, 1], [11, 12, 1], [11, 12, 1], [15, 15, 15, 1]])
    uneven.train()
    # The last completion has no choice: 3 tokens of 13 are kept, all of completions of less than average length.
    advantage = -0.25 / (0.5 + 1e-4)
    assert logs(uneven, "loss")[0] == pytest.approx(-3 * advantage / 13, abs=1e-4)


def test_off_policy_sequences_of_negative_advantage_are_dropped(tmp_path):
    """The sampler was far more certain of its second completion than the trainer is: 2 nats a token."""
    chain = {10: {11: 0.5, 12: 0.5}, 11: {1: 1.0}, 12: {1: 1.0}}

    def step(threshold):
        args = grpo_config(
            tmp_path,
            off_policy_mask_threshold=threshold,
            vllm_importance_sampling_correction=True,
            loss_type="grpo",
            vllm_importance_sampling_mode="token_truncate",
        )
        trainer = make(table_model(chain), Recorder(lambda **_: [1.0, 0.0, 1.0, 0.0]), args, prompts("w10"))
        shift = {11: 0.0, 12: 4.0}
        trainer.engine = ScriptedEngine(
            [[11, 1], [12, 1]], logps=lambda p, ids: [math.log(0.5) + shift[ids[0]], 0.0], own_weights=True
        )
        trainer.train()
        return logs(trainer, "loss")[0]

    advantage = 0.5 / (math.sqrt(1 / 3) + 1e-4)
    kept = -advantage * 2 / 4  # the two good completions
    dropped = advantage * 2 / 4 * (math.exp(-4) + 1) / 2  # the others, their first token weighed by the correction
    assert step(1.9) == pytest.approx(kept, abs=1e-5)
    assert step(2.1) == pytest.approx(kept + dropped, abs=1e-5)


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"])
def test_skipping_sequences_without_advantage_changes_nothing(tmp_path, monkeypatch, loss_type):
    def step():
        grabber = GradientGrabber()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            args = grpo_config(tmp_path, per_device_train_batch_size=8, loss_type=loss_type)
        trainer = make(random_model(), by_length, args, PROMPTS, callbacks=[grabber])
        trainer.engine = ScriptedEngine(
            lambda prompt, index: [11, 12, 1] if len(prompt) == 1 else [11, *[20] * index, 1]
        )
        sizes = []
        loss = trainer.loss
        monkeypatch.setattr(
            trainer, "loss", lambda m, batch, mode: sizes.append(batch.num_sequences) or loss(m, batch, mode)
        )
        trainer.train()
        return logs(trainer, "loss")[0], grabber.steps[0], sizes

    skipping = step()
    monkeypatch.setattr(GRPOTrainer, "active_sequences", lambda self, batch: torch.ones(batch.num_sequences).bool())
    whole = step()
    assert (skipping[2], whole[2]) == ([4], [8])
    assert skipping[0] == pytest.approx(whole[0], abs=1e-6)
    assert_same_gradients(whole[1], skipping[1])


def test_the_balance_loss_of_a_mixture_of_experts(tmp_path):
    def step(coef):
        args = grpo_config(tmp_path, router_aux_loss_coef=coef, gradient_accumulation_steps=2)
        return run(family_model("mixtral", router_aux_loss_coef=0.25), Recorder(variety), args, PROMPTS)

    without, default, given = step(0.0), step(None), step(0.5)
    assert logs(without, "aux_loss") == []
    plain, aux = logs(without, "loss")[0], logs(default, "aux_loss")[0]
    assert aux > 0
    assert logs(default, "loss")[0] == pytest.approx(plain + 0.25 * aux, abs=1e-5)
    assert logs(given, "loss")[0] == pytest.approx(plain + 0.5 * aux, abs=1e-5)


def test_checkpointing_activations_changes_nothing(tmp_path):
    def step(on):
        grabber = GradientGrabber()
        args = grpo_config(tmp_path, gradient_checkpointing=on)
        trainer = run(random_model(), Recorder(variety), args, PROMPTS, callbacks=[grabber])
        assert trainer.model.is_activation_checkpointing is on
        return logs(trainer, "loss")[0], grabber.steps[0]

    on, off = step(True), step(False)
    assert on[0] == pytest.approx(off[0], abs=1e-6)
    assert_same_gradients(on[1], off[1])


@pytest.mark.parametrize(("family", "packed"), [("gpt2", True), ("gemma3_text", True), ("lfm2", False)])
def test_many_families_train_packed_or_not(tmp_path, family, packed):
    args = grpo_config(tmp_path, num_iterations=2, max_steps=2, beta=0.1, disable_dropout=True)
    trainer = run(family_model(family), Recorder(variety), args, PROMPTS)
    assert trainer.packed is packed
    assert logs(trainer, "kl") == pytest.approx([0.0, 0.0], abs=1e-5)
    assert logs(trainer, "clip_ratio/region_mean") == [0.0, 0.0]
    assert logs(trainer, "grad_norm")[0] > 0


def test_learning_moves_the_probability_of_what_is_rewarded(tmp_path):
    chain = {10: {11: 0.5, 12: 0.5}, 11: {1: 1.0}, 12: {1: 1.0}}
    recorder = Recorder(lambda completion_ids, **_: [float(ids[0] == 11) for ids in completion_ids])
    args = grpo_config(tmp_path, per_device_train_batch_size=16, num_generations=16, learning_rate=2e-2, max_steps=15)
    trainer = run(table_model(chain), recorder, args, prompts("w10"))
    rewards = logs(trainer, "reward")
    assert sum(rewards[-3:]) / 3 > 0.9
    assert sum(rewards[:2]) / 2 < 0.8
