"""What every online method does alike: one suite, run over all of them."""

import inspect
import math

import pytest
import torch
from datasets import Dataset
from fixtures.engines import ScriptedEngine
from fixtures.models import family_model, random_model
from fixtures.online_methods import (
    COMMON_METRICS,
    GROUP_METHODS,
    METHODS,
    PROMPTS,
    REWARDED_METHODS,
    ServedEngine,
    distance,
    quick_collections,
    recorded_rounds,
    same_weights,
    scripted_engine,
    timeless,
    two_steps,
    varied,
    variety,
    weights_of,
)
from fixtures.runs import GradientGrabber, Recorder, logs, prompts
from fixtures.tokenizers import EOS, word_tokenizer

from trl.errors import ConfigError, DataError, NotSupportedError, ParityError, RewardError
from trl.models.planner import GIB, PHASES
from trl.trainer import online

NAMELESS = Dataset.from_dict({"text": ["w10"]})
ENGINES = {"local": lambda: None, "scripted": scripted_engine}

every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
every_engine = pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)


_quick = pytest.fixture(scope="module", autouse=True)(quick_collections)


# ---- the constructor ----


@every_method
def test_the_order_of_positional_arguments(method):
    expected = method.signature.split()
    first, *rest = inspect.signature(method.trainer).parameters.values()
    assert [first.name, *(p.name for p in rest)][: len(expected)] == expected
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in (first, *rest))
    assert first.default is first.empty
    assert {p.name: p.default for p in rest} == {p.name: None for p in rest} | {"optimizers": (None, None)}


@pytest.mark.parametrize(
    ("name", "argument"), [(name, a) for name, method in METHODS.items() for a in method.unsupported.split()]
)
def test_arguments_of_later_versions_raise_when_given(tmp_path, name, argument):
    method = METHODS[name]
    with pytest.raises(NotSupportedError, match=f"`{argument}` is not supported yet"):
        method.make(method.make_config(tmp_path), PROMPTS, "no/such-model", **{argument: [print]})


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"dataset": None}, ConfigError, "`train_dataset` is missing"),
        ({"dataset": "my-dataset"}, TypeError, "`train_dataset` must be a dataset.*got str"),
        ({"dataset": NAMELESS}, DataError, r"`train_dataset` has no column `prompt` \(it has text\)"),
        ({"dataset": prompts("w10", image=["x"])}, NotSupportedError, "`train_dataset` has images"),
        ({"eval_dataset": prompts("w10", images=[["x"]])}, NotSupportedError, "`eval_dataset` has images"),
        ({"eval_dataset": {"a": NAMELESS}}, DataError, "`eval_dataset` has no column `prompt`"),
        ({}, ConfigError, "`no/such-model` cannot be loaded"),
    ],
)
@every_method
def test_what_cannot_work_is_named_before_a_model_is_loaded(tmp_path, method, changes, error, message):
    given = {"dataset": PROMPTS, "model": "no/such-model", **changes}
    with pytest.raises(error, match=message):
        method.make(method.make_config(tmp_path), **given)


@every_method
def test_a_model_in_memory_needs_its_tokenizer(tmp_path, method):
    with pytest.raises(ConfigError, match="pass `processing_class`"):
        method.make(method.make_config(tmp_path), PROMPTS, processing_class=None)


@every_method
def test_a_folder_and_data_are_enough(tmp_path, monkeypatch, method):
    model = family_model("llama")
    model.save_pretrained(tmp_path / "tiny")
    word_tokenizer().save_pretrained(tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    trainer = method.trainer(model="tiny", train_dataset=PROMPTS, **method.arguments())
    assert type(trainer.args) is method.config
    assert trainer.args.output_dir == f"tiny-{method.label}"
    by_path = method.train(method.make_config(tmp_path), PROMPTS, "tiny", processing_class=None)
    in_memory = method.train(method.make_config(tmp_path), PROMPTS, model)
    assert timeless(by_path.state.log_history[0]) == timeless(in_memory.state.log_history[0])


@every_method
def test_the_optimizer_of_the_caller_is_used(tmp_path, method):
    model = random_model()
    head = model.lm_head.weight
    optimizer = torch.optim.SGD([head], lr=0.5)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    before, grabber = weights_of(model), GradientGrabber()
    options = {"engine": scripted_engine(), "optimizers": (optimizer, schedule), "callbacks": [grabber]}
    method.train(method.make_config(tmp_path, max_grad_norm=0.0), PROMPTS, model, **options)
    torch.testing.assert_close(head.detach(), before.pop("lm_head.weight") - 0.5 * grabber.steps[0]["lm_head.weight"])
    assert same_weights(before, weights_of(model))


# ---- a run ----


@every_engine
@every_method
def test_three_steps_log_finite_numbers_under_the_standard_names(tmp_path, method, engine):
    args = method.make_config(tmp_path, max_steps=3, learning_rate=1e-3, **method.frozen)
    *steps, end = method.train(args, PROMPTS, engine=engine()).state.log_history
    assert [entry["step"] for entry in steps] == [1, 2, 3]
    assert end.keys() >= {"train_loss", "train_runtime"}
    for entry in steps:
        assert entry.keys() == COMMON_METRICS | method.metrics
        # None: a mean over nothing, such as the length of completions that ended where none did.
        assert all(math.isfinite(value) for value in entry.values() if value is not None)
        assert entry["step_time"] > 0
    assert steps[0]["grad_norm"] > 0


@every_method
def test_what_is_recorded_of_completions(tmp_path, method):
    trainer = method.make(method.make_config(tmp_path, max_steps=2), PROMPTS, engine=scripted_engine())
    rounds = recorded_rounds(trainer)
    trainer.train()
    tokens = 0
    for round_, entry in zip(rounds, trainer.state.log_history[:2], strict=True):
        lengths = [len(completion) for _, completion in round_]
        ended = [len(completion) for _, completion in round_ if completion[-1] == EOS]
        tokens += sum(len(prompt) + len(completion) for prompt, completion in round_)
        assert len(lengths) == 8
        expected = {
            "num_tokens": tokens,
            "completions/mean_length": sum(lengths) / 8,
            "completions/min_length": min(lengths),
            "completions/max_length": max(lengths),
            "completions/mean_terminated_length": sum(ended) / len(ended),
            "completions/min_terminated_length": min(ended),
            "completions/max_terminated_length": max(ended),
            "completions/clipped_ratio": 1 - len(ended) / 8,
        }
        assert {name: entry[name] for name in expected} == pytest.approx(expected)


@every_engine
@every_method
def test_the_policy_moves_and_nothing_else_does(tmp_path, method, engine):
    model = random_model()
    args = method.make_config(tmp_path, max_steps=3, learning_rate=1e-2, **method.frozen)
    trainer = method.make(args, PROMPTS, model, engine=engine())
    (frozen,) = trainer.frozen_models
    before, told = weights_of(model), weights_of(frozen)
    trainer.train()
    assert not frozen.training
    assert not any(p.requires_grad or p.grad is not None for p in frozen.parameters())
    assert same_weights(told, weights_of(frozen))
    assert not any(torch.equal(before[name], value) for name, value in weights_of(model).items())


@every_method
def test_at_learning_rate_zero_nothing_moves(tmp_path, method):
    model = random_model()
    before = weights_of(model)
    trainer = method.train(method.make_config(tmp_path, max_steps=2), PROMPTS, model, engine=scripted_engine())
    assert logs(trainer, "grad_norm")[0] > 0
    assert same_weights(before, weights_of(model))


@every_engine
@every_method
def test_mixed_precision_on_the_cpu(tmp_path, method, engine):
    def run(bf16):
        model = random_model()
        args = method.make_config(tmp_path, max_steps=2, learning_rate=1e-3, bf16=bf16, **method.frozen)
        trainer = method.train(args, PROMPTS, model, engine=engine())
        assert {p.dtype for m in (model, *trainer.frozen_models) for p in m.parameters()} == {torch.float32}
        return trainer.state.log_history[0]

    half, full = run(bf16=True), run(bf16=False)
    assert half["entropy"] != full["entropy"]
    assert half["entropy"] == pytest.approx(full["entropy"], rel=0.1)
    assert math.isfinite(half["loss"])
    assert half["grad_norm"] > 0


@pytest.mark.parametrize("values", [[1.0], [1.0, 2.0, 3.0], None])
@pytest.mark.parametrize("name", REWARDED_METHODS)
def test_a_wrong_number_of_rewards_stops_the_run_before_any_update(tmp_path, name, values):
    def careless(completions, **kwargs):
        return values

    method, model = METHODS[name], random_model()
    before = weights_of(model)
    trainer = method.make(method.make_config(tmp_path, learning_rate=1.0), PROMPTS, model, reward_funcs=careless)
    with pytest.raises(RewardError, match=r"`careless` returned .* for 8 completions"):
        trainer.train()
    assert same_weights(before, weights_of(model))


@pytest.mark.parametrize("name", REWARDED_METHODS)
def test_all_columns_reach_the_rewards(tmp_path, name):
    method, recorder = METHODS[name], Recorder(variety)
    dataset = prompts("w10", "w11", "w12", "w13", number=[0, 1, 2, 3])
    method.train(method.make_config(tmp_path), dataset, reward_funcs=recorder, engine=scripted_engine())
    (call,) = recorder.calls
    assert [f"w{10 + number}" for number in call["number"]] == call["prompts"]
    assert len(call["completions"]) == len(call["completion_ids"]) == 8


# ---- one gradient, however the work is cut ----


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Two steps of each method with eight completions in one packed forward pass."""
    folder = tmp_path_factory.mktemp("whole")
    return {name: two_steps(method, folder, PROMPTS, scripted_engine()) for name, method in METHODS.items()}


def assert_same_steps(expected, found):
    assert found.losses == pytest.approx(expected.losses, abs=1e-5)
    assert max(map(distance, expected.gradients, found.gradients)) < 1e-5


@every_method
def test_two_steps_have_gradients_of_their_own(whole, method):
    """Without which the equalities below would prove nothing."""
    steps = whole[method.name]
    assert (len(steps.gradients), steps.micro_batches) == (2, 2)
    assert distance(*steps.gradients) > 1e-3
    assert steps.losses[0] != steps.losses[1]


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize(("completions", "accumulation"), [(8, 1), (4, 2), (2, 4)])
@every_method
def test_gradient_accumulation_changes_nothing(tmp_path, whole, method, completions, accumulation, packed):
    sizes = method.sizes(completions, accumulation)
    found = two_steps(method, tmp_path, PROMPTS, scripted_engine(), packed=packed, **sizes)
    assert found.micro_batches == 2 * accumulation
    assert_same_steps(whole[method.name], found)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize(("budget", "accumulation"), [(1, 1), (10, 2), (1000, 1)])
@every_method
def test_a_token_budget_changes_nothing(tmp_path, whole, method, budget, accumulation, packed):
    changes = method.sizes(8 // accumulation, accumulation) | {"max_tokens_per_micro_batch": budget}
    found = two_steps(method, tmp_path, PROMPTS, scripted_engine(), packed=packed, **changes)
    assert (found.micro_batches > 2 * accumulation) is (budget < 1000)
    assert_same_steps(whole[method.name], found)


@every_method
def test_checkpointed_activations_change_nothing(tmp_path, whole, method):
    found = two_steps(method, tmp_path, PROMPTS, scripted_engine(), gradient_checkpointing=True)
    assert_same_steps(whole[method.name], found)


# ---- how often ----


@pytest.mark.parametrize("accumulation", [1, 2])
@every_method
def test_an_epoch_has_every_prompt_once_and_a_round_for_each_optimizer_step(tmp_path, method, accumulation):
    engine, per_step = scripted_engine(), 8 * accumulation // method.group_size
    args = method.make_config(tmp_path, max_steps=-1, num_train_epochs=2, **method.sizes(8, accumulation))
    trainer = method.train(args, PROMPTS, engine=engine)
    assert trainer.state.global_step == len(engine.calls) == 2 * 16 // per_step
    assert trainer.state.epoch == 2.0
    assert [len(asked) for asked, _ in engine.calls] == [per_step] * len(engine.calls)
    assert {sampling.n for _, sampling in engine.calls} == {method.group_size}
    asked = [ids for prompts_of_round, _ in engine.calls for ids in prompts_of_round]
    assert sorted(asked[:16]) == sorted(asked[16:]) == [[10 + i, 30 + i] for i in range(16)]
    assert asked[:16] != asked[16:]


@pytest.mark.parametrize(
    ("steps_per_generation", "num_iterations", "rounds"), [(1, 1, 8), (4, 1, 2), (2, 2, 2), (1, 4, 2), (4, 2, 1)]
)
@pytest.mark.parametrize("name", GROUP_METHODS)
def test_a_round_may_feed_several_optimizer_steps(tmp_path, name, steps_per_generation, num_iterations, rounds):
    engine, method = scripted_engine(), METHODS[name]
    window = {"steps_per_generation": steps_per_generation, "num_iterations": num_iterations}
    args = method.make_config(tmp_path, max_steps=4, **method.sizes(8, 2), **window)
    assert method.train(args, PROMPTS, engine=engine).state.global_step == 4
    assert len(engine.calls) == rounds


@every_method
def test_too_few_prompts_for_a_round_are_named(tmp_path, method):
    trainer = method.make(method.make_config(tmp_path), prompts("w10"), engine=scripted_engine())
    with pytest.raises(DataError, match=f"at least {8 // method.group_size} prompts, has 1"):
        trainer.train()


# ---- interrupted ----

# With several optimizer steps a round, the checkpoint lies inside one.
WINDOWS = ({"steps_per_generation": 4, "max_tokens_per_micro_batch": 12}, {"num_iterations": 2})
INTERRUPTED = [(name, {}, engine) for name in METHODS for engine in ("local", "scripted")]
INTERRUPTED += [(name, window, "local") for name in GROUP_METHODS for window in WINDOWS]


@pytest.mark.parametrize(("name", "window", "engine"), INTERRUPTED)
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, name, window, engine):
    method = METHODS[name]
    settings = {"max_steps": 4, "learning_rate": 1e-2, "save_strategy": "steps", "save_steps": 3, **method.frozen}

    def make():
        args = method.make_config(tmp_path, **settings, **method.sizes(8, 2), **window)
        # Its answers do not depend on how often it was asked before.
        scripted = ScriptedEngine(lambda prompt, index: varied(prompt, index % method.group_size))
        trainer = method.make(args, PROMPTS, engine=scripted if engine == "scripted" else None)
        return trainer, recorded_rounds(trainer)

    (whole, rounds), (resumed, later) = make(), make()
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert len(later) < len(rounds)
    assert later == rounds[len(rounds) - len(later) :]
    assert same_weights(weights_of(whole.model), weights_of(resumed.model))
    assert list(map(timeless, resumed.state.log_history[:4])) == list(map(timeless, whole.state.log_history[:4]))


# ---- the weights of an engine that has its own ----


@every_method
def test_an_engine_has_the_weights_of_the_policy_whenever_it_generates(tmp_path, method):
    engine = ServedEngine()
    args = method.make_config(tmp_path, max_steps=3, learning_rate=1e-2, vllm_parity_check_steps=2)
    trainer = method.train(args, PROMPTS, engine=engine, eval_dataset=prompts("w10", "w11"))
    rounds = [[("weights", step), "generate"] for step in range(3)]
    # Compared at the start and two steps later.
    assert engine.events == [*rounds[0], "score", *rounds[1], *rounds[2], "score"]
    assert len(logs(trainer, "sampling/weight_sync_time")) == 3
    assert logs(trainer, "sampling/parity_kl") == pytest.approx([0.0, 0.0], abs=1e-6)
    assert logs(trainer, "sampling/parity_max") == pytest.approx([0.0, 0.0], abs=1e-4)
    engine.events.clear()
    for _ in range(2):
        trainer.evaluate()
    assert [event for event in engine.events if event != "generate"] == [("weights", 3)]
    assert engine.events[0] == ("weights", 3)
    assert same_weights(weights_of(trainer.model), weights_of(engine.model))


@every_method
def test_an_engine_with_other_weights_is_found_out(tmp_path, method):
    trainer = method.make(method.make_config(tmp_path), PROMPTS, engine=ServedEngine(follows=False))
    with pytest.raises(ParityError, match="does not have the trainer's weights"):
        trainer.train()
    unchecked = ServedEngine(follows=False)
    method.train(method.make_config(tmp_path, vllm_parity_check_steps=0), PROMPTS, engine=unchecked)
    assert "score" not in unchecked.events


@every_method
def test_log_probs_are_asked_of_an_engine_only_where_they_are_needed(tmp_path, method):
    engine = ServedEngine()
    method.train(method.make_config(tmp_path), PROMPTS, engine=engine)
    assert [sampling.with_logps for _, sampling in engine.calls] == [method.name in GROUP_METHODS]


# ---- the memory plan ----


@every_method
def test_the_memory_plan_of_a_method(tmp_path, monkeypatch, method):
    """Eight completions of up to 6 tokens after prompts of up to 3; float32 weights, and AdamW's two states."""
    model, dataset = random_model(), prompts("w10", "w10 w20 w30", *["w11"] * 6)
    trainer = method.make(method.make_config(tmp_path, **method.frozen), dataset, model, engine=scripted_engine())
    monkeypatch.setattr(type(trainer.accelerator), "device", torch.device("cuda"))
    monkeypatch.setattr(online, "gpu_memory", lambda device: (GIB, 80 * GIB))
    plan = trainer._memory_plan(model)
    assert (plan.total_bytes, plan.engine) == (80 * GIB, None)
    assert (plan.training.sequence_tokens, plan.training.tokens) == (9, 8 * 9)
    size = 4 * sum(p.numel() for p in model.parameters())
    for phase in PHASES:
        assert plan.phases[phase]["policy weights"] == plan.phases[phase]["frozen models"] == size
        assert plan.phases[phase]["optimizer"] == 2 * size
    trainer.args.use_vllm = True
    shared = trainer._memory_plan(model).engine
    assert (shared.utilization, shared.sequences) == (0.55 if method.name == "online-dpo" else 0.3, 8)
