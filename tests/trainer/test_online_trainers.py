"""What every online method does alike: one suite, run over all of them."""

import copy
import inspect
import math

import pyarrow.parquet
import pytest
import torch
from datasets import Dataset
from fixtures.engines import ScriptedEngine
from fixtures.models import family_model, random_model
from fixtures.online_methods import (
    METHODS,
    recorded_rounds,
    scripted_engine,
    varied,
    variety,
    weights_of,
)
from fixtures.runs import GradientGrabber, Recorder, logs, prompts
from fixtures.tokenizers import word_tokenizer
from torch.utils.data import IterableDataset
from transformers import PreTrainedModel

from trl.errors import ConfigError, DataError, NotSupportedError, ParityError
from trl.models.planner import GIB, PHASES
from trl.trainer import online
from trl.types import Scorer

PROMPTS = prompts(*(f"w{10 + i} w{30 + i}" for i in range(16)))
ENGINES = {"local": lambda: None, "scripted": scripted_engine}
VARYING = ("step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss")

every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
every_engine = pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)


def trained(method, args, dataset=PROMPTS, **options):
    trainer = method.make(args, dataset, **options)
    trainer.train()
    return trainer


def distance(one, other):
    """The largest difference of two sets of gradients, as a share of the largest entry."""
    assert one.keys() == other.keys()
    scale = max(g.abs().max().item() for g in one.values())
    return max((g - other[name]).abs().max().item() for name, g in one.items()) / scale


# ---- the constructor ----

# Positional arguments are part of the interface.
SIGNATURES = {
    "grpo": "model reward_funcs args train_dataset eval_dataset processing_class reward_processing_classes callbacks "
    "optimizers quantization_config peft_config tools rollout_func environment_factory",
    "rloo": "model reward_funcs args train_dataset eval_dataset processing_class reward_processing_classes callbacks "
    "optimizers quantization_config peft_config",
    "online-dpo": "model ref_model reward_funcs args data_collator train_dataset eval_dataset processing_class "
    "reward_processing_classes peft_config compute_metrics callbacks optimizers preprocess_logits_for_metrics",
    "distillation": "model teacher_model args train_dataset eval_dataset processing_class callbacks optimizers "
    "quantization_config peft_config tools",
}
UNSUPPORTED = {
    "grpo": ("quantization_config", "peft_config", "tools", "rollout_func", "environment_factory"),
    "rloo": ("quantization_config", "peft_config"),
    "online-dpo": (
        "data_collator",
        "peft_config",
        "compute_metrics",
        "preprocess_logits_for_metrics",
        "quantization_config",
    ),
    "distillation": ("quantization_config", "peft_config", "tools"),
}


@every_method
def test_the_order_of_positional_arguments(method):
    expected = SIGNATURES[method.name].split()
    parameters = list(inspect.signature(method.trainer).parameters.values())
    assert [p.name for p in parameters][: len(expected)] == expected
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
    assert parameters[0].default is inspect.Parameter.empty
    assert {p.name: p.default for p in parameters[1:]} == {p.name: None for p in parameters[1:]} | {
        "optimizers": (None, None)
    }


@pytest.mark.parametrize(("name", "argument"), [(name, a) for name, args in UNSUPPORTED.items() for a in args])
def test_arguments_of_later_versions_raise_when_given(tmp_path, name, argument):
    method = METHODS[name]
    with pytest.raises(NotSupportedError, match=f"`{argument}` is not supported yet"):
        method.make(method.make_config(tmp_path), PROMPTS, model="no/such-model", **{argument: [print]})


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"dataset": None}, ConfigError, "`train_dataset` is missing"),
        ({"dataset": "my-dataset"}, TypeError, "`train_dataset` must be a dataset.*got str"),
        ({"dataset": Dataset.from_dict({"text": ["w10"]})}, DataError, r"no column `prompt` \(it has text\)"),
        ({"dataset": prompts("w10", image=["x"])}, NotSupportedError, "`train_dataset` has images"),
        ({"eval_dataset": prompts("w10", images=[["x"]])}, NotSupportedError, "`eval_dataset` has images"),
        ({"eval_dataset": {"a": Dataset.from_dict({"text": ["w10"]})}}, DataError, "`eval_dataset` has no column"),
    ],
)
@every_method
def test_data_that_cannot_be_trained_on_is_named_before_a_model_is_loaded(tmp_path, method, changes, error, message):
    given = {"dataset": PROMPTS, "model": "no/such-model", **changes}
    with pytest.raises(error, match=message):
        method.make(method.make_config(tmp_path), **given)


@every_method
def test_a_model_that_does_not_exist_is_named(tmp_path, method):
    with pytest.raises(ConfigError, match="`no/such-model` cannot be loaded"):
        method.make(method.make_config(tmp_path), PROMPTS, model="no/such-model")


@every_method
def test_a_model_in_memory_needs_its_tokenizer(tmp_path, method):
    with pytest.raises(ConfigError, match="pass `processing_class`"):
        method.make(method.make_config(tmp_path), PROMPTS, processing_class=None)


SUFFIXES = {"grpo": "GRPO", "rloo": "RLOO", "online-dpo": "OnlineDPO", "distillation": "Distillation"}


@every_method
def test_a_folder_and_data_are_enough(tmp_path, monkeypatch, method):
    model = family_model("llama")
    model.save_pretrained(tmp_path / "tiny")
    word_tokenizer().save_pretrained(tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    trainer = method.trainer(model="tiny", train_dataset=PROMPTS, **method.arguments())
    assert type(trainer.args) is method.config
    assert trainer.args.output_dir == f"tiny-{SUFFIXES[method.name]}"
    assert trainer.processing_class.get_vocab() == word_tokenizer().get_vocab()
    by_path = trained(method, method.make_config(tmp_path), model="tiny", processing_class=None)
    in_memory = trained(method, method.make_config(tmp_path), model=model)
    assert logs(by_path, "loss") == logs(in_memory, "loss")


@every_method
def test_the_optimizer_of_the_caller_is_used(tmp_path, method):
    model = random_model()
    head = model.lm_head.weight
    optimizer = torch.optim.SGD([head], lr=0.5)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    before, grabber = weights_of(model), GradientGrabber()
    args = method.make_config(tmp_path, max_grad_norm=0.0)
    trained(method, args, model=model, engine=scripted_engine(), optimizers=(optimizer, schedule), callbacks=[grabber])
    torch.testing.assert_close(head.detach(), before.pop("lm_head.weight") - 0.5 * grabber.steps[0]["lm_head.weight"])
    assert all(torch.equal(weights_of(model)[name], value) for name, value in before.items())


# ---- a run ----

COMMON_METRICS = {
    "loss",
    "grad_norm",
    "learning_rate",
    "num_tokens",
    "step_time",
    "entropy",
    *(f"completions/{of}_{kind}" for of in ("mean", "min", "max") for kind in ("length", "terminated_length")),
    "completions/clipped_ratio",
    "epoch",
    "step",
}
REWARD_METRICS = {"reward", "rewards/variety/mean", "rewards/variety/std"}
GROUP_METRICS = REWARD_METRICS | {
    "reward_std",
    "frac_reward_zero_std",
    "kl",
    *(f"clip_ratio/{name}" for name in ("low_mean", "low_min", "high_mean", "high_max", "region_mean")),
}
PAIR_METRICS = REWARD_METRICS | {
    *(f"objective/{name}" for name in ("kl", "entropy", "non_score_reward", "rlhf_reward", "scores", "scores_margin")),
    *(f"rewards/{name}" for name in ("chosen", "rejected", "accuracies", "margins")),
    "logps/chosen",
    "logps/rejected",
    "val/contain_eos_token",
    "pairs/tied",
    "beta",
}
METRICS = {"grpo": GROUP_METRICS, "rloo": GROUP_METRICS, "online-dpo": PAIR_METRICS, "distillation": set()}


@every_engine
@every_method
def test_three_steps_log_finite_numbers_under_the_standard_names(tmp_path, method, engine):
    args = method.make_config(tmp_path, max_steps=3, learning_rate=1e-3, **method.frozen)
    trainer = trained(method, args, engine=engine())
    *steps, end = trainer.state.log_history
    assert [entry["step"] for entry in steps] == [1, 2, 3]
    assert end.keys() >= {"train_loss", "train_runtime"}
    for entry in steps:
        assert entry.keys() == COMMON_METRICS | METRICS[method.name]
        # None: a mean over nothing, such as the length of completions that ended where none did.
        assert all(math.isfinite(value) for value in entry.values() if value is not None)
    assert all(entry["grad_norm"] > 0 for entry in steps[:1])
    assert all(entry["step_time"] > 0 for entry in steps)


@every_method
def test_what_is_recorded_of_completions(tmp_path, method):
    engine = scripted_engine()
    trainer = method.make(method.make_config(tmp_path, max_steps=2), PROMPTS, engine=engine)
    rounds = recorded_rounds(trainer)
    trainer.train()
    tokens = 0
    for round_, entry in zip(rounds, trainer.state.log_history, strict=False):
        lengths = [len(completion) for _, completion in round_]
        ended = [len(completion) for _, completion in round_ if completion[-1] == 1]
        tokens += sum(len(prompt) + len(completion) for prompt, completion in round_)
        assert len(lengths) == 8
        assert set(lengths) != {6}
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
    assert frozen is not model
    assert not frozen.training
    assert not any(p.requires_grad or p.grad is not None for p in frozen.parameters())
    assert all(torch.equal(told[name], value) for name, value in weights_of(frozen).items())
    assert not any(torch.equal(before[name], value) for name, value in weights_of(model).items())


@every_method
def test_at_learning_rate_zero_nothing_moves(tmp_path, method):
    model = random_model()
    before = weights_of(model)
    trainer = trained(method, method.make_config(tmp_path, max_steps=2), model=model, engine=scripted_engine())
    assert logs(trainer, "grad_norm")[0] > 0
    assert all(torch.equal(before[name], value) for name, value in weights_of(model).items())


@every_engine
@every_method
def test_mixed_precision_on_the_cpu(tmp_path, method, engine):
    def run(bf16):
        model = random_model()
        args = method.make_config(tmp_path, max_steps=2, learning_rate=1e-3, bf16=bf16, **method.frozen)
        trainer = trained(method, args, model=model, engine=engine())
        assert {p.dtype for m in (model, *trainer.frozen_models) for p in m.parameters()} == {torch.float32}
        return [logs(trainer, key)[0] for key in ("entropy", "loss")]

    half, full = run(True), run(False)
    assert half[0] != full[0]
    assert half[0] == pytest.approx(full[0], rel=0.1)
    assert math.isfinite(half[1])


# ---- one gradient, however the work is cut ----


def plain_attention(model):
    """The model with an attention that only takes padded rows."""
    model.set_attn_implementation("eager")
    return model


LAYOUTS = {"packed": lambda model: model, "padded": plain_attention}


def two_steps(method, folder, layout, **changes):
    """Losses and gradients of two steps on scripted completions, and how many micro-batches they took."""
    grabber = GradientGrabber()
    settings = {"optim": "sgd", "learning_rate": 1e-2, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    args = method.make_config(folder, max_steps=2, **{**settings, **method.frozen, **changes})
    lay_out = LAYOUTS[layout]
    models = {k: lay_out(m) for k, m in method.arguments().items() if isinstance(m, PreTrainedModel)}
    trainer = method.make(
        args, PROMPTS, lay_out(random_model()), engine=scripted_engine(), callbacks=[grabber], **models
    )
    assert trainer.packed is (layout == "packed")
    loss, micro_batches = trainer.loss, []

    def counted(*args):
        micro_batches.append(args)
        return loss(*args)

    trainer.loss = counted
    trainer.train()
    assert len(logs(trainer, "loss")) == len(grabber.steps) == 2
    return logs(trainer, "loss"), grabber.steps, len(micro_batches)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Two steps of each method with eight completions in one packed forward pass."""
    folder = tmp_path_factory.mktemp("whole")
    return {name: two_steps(method, folder, "packed") for name, method in METHODS.items()}


def assert_same_steps(expected, found):
    assert found[0] == pytest.approx(expected[0], abs=1e-5)
    assert max(distance(one, other) for one, other in zip(expected[1], found[1], strict=True)) < 1e-5


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("completions", "accumulation"), [(8, 1), (4, 2), (2, 4)])
@every_method
def test_gradient_accumulation_changes_nothing(tmp_path, whole, method, completions, accumulation, layout):
    found = two_steps(method, tmp_path, layout, **method.sizes(completions, accumulation))
    assert found[2] == 2 * accumulation
    assert_same_steps(whole[method.name], found)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("budget", "accumulation"), [(1, 1), (12, 1), (20, 2), (1000, 1)])
@every_method
def test_a_token_budget_changes_nothing(tmp_path, whole, method, budget, accumulation, layout):
    sizes = method.sizes(8 // accumulation, accumulation)
    found = two_steps(method, tmp_path, layout, max_tokens_per_micro_batch=budget, **sizes)
    assert (found[2] > 2 * accumulation) is (budget < 1000)
    assert_same_steps(whole[method.name], found)


@every_method
def test_the_gradient_is_there_and_moves_the_loss(whole, method):
    """Without which the equalities above would prove nothing."""
    losses, gradients, micro_batches = whole[method.name]
    assert micro_batches == 2
    assert distance(*gradients) > 1e-3
    assert losses[0] != losses[1]


@every_method
def test_checkpointed_activations_change_nothing(tmp_path, whole, method):
    assert_same_steps(whole[method.name], two_steps(method, tmp_path, "packed", gradient_checkpointing=True))


# ---- how often ----


@pytest.mark.parametrize("accumulation", [1, 2])
@every_method
def test_an_epoch_has_every_prompt_once_and_a_round_for_each_optimizer_step(tmp_path, method, accumulation):
    engine, per_step = scripted_engine(), 8 * accumulation // method.group_size
    args = method.make_config(
        tmp_path, max_steps=-1, num_train_epochs=2, gradient_accumulation_steps=accumulation, data_seed=3
    )
    trainer = trained(method, args, engine=engine)
    steps_per_epoch = 16 // per_step
    assert trainer.state.global_step == len(engine.calls) == 2 * steps_per_epoch
    assert trainer.state.epoch == 2.0
    assert {len(asked) for asked, _ in engine.calls} == {per_step}
    assert {sampling.n for _, sampling in engine.calls} == {method.group_size}
    asked = [ids for prompts_of_round, _ in engine.calls for ids in prompts_of_round]
    every = sorted([10 + i, 30 + i] for i in range(16))
    assert sorted(asked[:16]) == sorted(asked[16:]) == every
    assert asked[:16] != asked[16:]


@pytest.mark.parametrize(
    ("steps_per_generation", "num_iterations", "rounds"),
    [(1, 1, 8), (4, 1, 2), (2, 2, 2), (1, 4, 2), (4, 2, 1)],
)
@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.has_option("num_iterations")])
def test_a_round_may_feed_several_optimizer_steps(tmp_path, name, steps_per_generation, num_iterations, rounds):
    engine, method = scripted_engine(), METHODS[name]
    args = method.make_config(
        tmp_path,
        max_steps=4,
        gradient_accumulation_steps=2,
        steps_per_generation=steps_per_generation,
        num_iterations=num_iterations,
    )
    trainer = trained(method, args, engine=engine)
    assert trainer.state.global_step == 4
    assert len(engine.calls) == rounds


# ---- interrupted ----

WINDOWS = [(name, {}) for name in METHODS] + [
    (name, extras)
    for name, method in METHODS.items()
    if method.has_option("num_iterations")
    for extras in ({"steps_per_generation": 4, "max_tokens_per_micro_batch": 12}, {"num_iterations": 2})
]
RESUMED_ENGINES = {
    "local": lambda: None,
    # Its answers do not depend on what it was asked before.
    "scripted": lambda: ScriptedEngine(lambda prompt, index: varied(prompt, index % 4)),
}


@pytest.mark.parametrize("engine", RESUMED_ENGINES.values(), ids=RESUMED_ENGINES)
@pytest.mark.parametrize(("name", "extras"), WINDOWS)
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, name, extras, engine):
    method = METHODS[name]
    settings = {"max_steps": 5, "learning_rate": 1e-2, "save_strategy": "steps", "save_steps": 3, **method.frozen}

    def make():
        args = method.make_config(tmp_path, **settings, **method.sizes(8, 2), **extras)
        trainer = method.make(args, PROMPTS, engine=engine())
        return trainer, recorded_rounds(trainer)

    (whole, rounds), (resumed, later) = make(), make()
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert later == rounds[len(rounds) - len(later) :]
    assert len(later) < len(rounds)
    for name, value in weights_of(whole.model).items():
        assert torch.equal(value, weights_of(resumed.model)[name]), name
    one, other = (
        [{k: v for k, v in entry.items() if k not in VARYING} for entry in t.state.log_history]
        for t in (whole, resumed)
    )
    assert one == other


# ---- evaluation ----


@every_engine
@every_method
def test_evaluation_is_finite_and_leaves_training_alone(tmp_path, method, engine):
    model = random_model()
    args = method.make_config(tmp_path, learning_rate=1e-2, **method.frozen)
    trainer = method.make(args, PROMPTS, model, engine=engine(), eval_dataset=prompts("w10", "w11", "w12 w13"))
    rounds, before = recorded_rounds(trainer), weights_of(model)
    metrics = trainer.evaluate()
    # The last batch is shorter.
    assert sum(map(len, rounds)) == 3 * method.group_size
    expected = (COMMON_METRICS | METRICS[method.name]) - {"grad_norm", "learning_rate", "num_tokens", "epoch", "step"}
    assert metrics.keys() >= {f"eval_{name}" for name in expected - {"step_time"}}
    assert all(math.isfinite(value) for value in metrics.values() if value is not None)
    assert all(torch.equal(before[name], value) for name, value in weights_of(model).items())
    assert trainer.state.num_input_tokens_seen == 0
    assert not any(p.grad is not None for p in model.parameters())
    trainer.train()
    assert logs(trainer, "completions/mean_length")


@every_method
def test_the_evaluation_loss_is_a_mean_over_sequences(tmp_path, method):
    """Three prompts in one batch, or one after the other."""

    def evaluate(rows):
        engine = scripted_engine()
        args = method.make_config(tmp_path, **(method.sizes(8) | {"per_device_eval_batch_size": rows}))
        trainer = method.make(args, PROMPTS, engine=engine, eval_dataset=prompts("w10", "w11", "w12 w13"))
        return trainer.evaluate()

    one = method.group_size // method.batch_unit
    together, apart = evaluate(3 * one), evaluate(one)
    compared = [name for name in together if "runtime" not in name and "per_second" not in name]
    if method.name in ("grpo", "distillation"):  # means over tokens, of each batch
        compared.remove("eval_loss")
    assert {n: apart[n] for n in compared} == pytest.approx({n: together[n] for n in compared}, abs=1e-5)


@every_method
def test_a_dict_of_evaluation_sets_while_training(tmp_path, method):
    sets = {"short": prompts("w10", "w11"), "long": prompts("w10 w20 w30", "w11 w21 w31")}
    args = method.make_config(tmp_path, max_steps=2, eval_strategy="steps", eval_steps=1)
    trainer = method.make(args, PROMPTS, engine=scripted_engine(), eval_dataset=sets)
    rounds = recorded_rounds(trainer)
    trainer.train()
    for name in sets:
        assert len(logs(trainer, f"eval_{name}_loss")) == 2
        assert all(math.isfinite(value) for value in logs(trainer, f"eval_{name}_loss"))
    lengths = [[len(prompt) for prompt, _ in round_] for round_ in rounds]
    group = 2 * method.group_size
    assert lengths == 2 * [[2] * 8, [1] * group, [3] * group]
    assert trainer.evaluate(sets["long"], metric_key_prefix="held_out").keys() >= {"held_out_loss"}


# ---- streams ----


class Stream(IterableDataset):
    """A stream of torch."""

    def __init__(self, first, count):
        self.first, self.count = first, count

    def __iter__(self):
        return ({"prompt": f"w{i} w10"} for i in range(self.first, self.first + self.count))


STREAMS = {
    "torch": Stream,
    "datasets": lambda first, count: Dataset.from_list(list(Stream(first, count))).to_iterable_dataset(),
}


@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)
@every_engine
@every_method
def test_streams_are_read_in_their_order(tmp_path, method, engine, stream):
    args = method.make_config(tmp_path, max_steps=3, **method.sizes(4, 2))
    trainer = method.make(args, stream(20, 30), engine=engine(), eval_dataset=stream(60, 4))
    rounds = recorded_rounds(trainer)
    trainer.train()
    assert trainer.state.global_step == 3
    per_step = 8 // method.group_size
    first = [[prompt[0] for prompt, _ in round_] for round_ in rounds]
    in_groups = [20 + i // method.group_size for i in range(3 * 8)]
    assert first == [in_groups[i : i + 8] for i in (0, 8, 16)]
    assert per_step * 3 <= 30
    rounds.clear()
    assert math.isfinite(trainer.evaluate()["eval_loss"])
    first = [prompt[0] for round_ in rounds for prompt, _ in round_]
    assert first == [60 + i // method.group_size for i in range(4 * method.group_size)]


# ---- the table of completions ----

COLUMNS = {
    "grpo": ["variety", "advantage"],
    "rloo": ["variety", "advantage"],
    "online-dpo": ["variety", "score", "preference"],
    "distillation": [],
}


@every_method
def test_the_table_of_completions_is_stored(tmp_path, method, capsys):
    args = method.make_config(tmp_path, max_steps=2, log_completions=True, num_completions_to_print=1)
    trainer = method.make(args, PROMPTS, engine=scripted_engine(), eval_dataset=prompts("w10", "w11"))
    rounds = recorded_rounds(trainer)
    trainer.train()
    trainer.evaluate()
    decode = trainer.processing_class.decode
    files = ["completions_00001.parquet", "completions_00002.parquet", "eval_completions_00002.parquet"]
    assert sorted(path.name for path in (tmp_path / "completions").iterdir()) == files
    for number, (file, round_) in enumerate(zip(files, rounds, strict=True)):
        table = pyarrow.parquet.read_table(tmp_path / "completions" / file)
        assert table.column_names == ["step", "prompt", "completion", *COLUMNS[method.name]]
        stored = table.to_pylist()
        assert [row["step"] for row in stored] == [number] * len(round_)
        assert [row["prompt"] for row in stored] == [decode(prompt) for prompt, _ in round_]
        assert [row["completion"] for row in stored] == [decode(c, skip_special_tokens=True) for _, c in round_]
        if "variety" in table.column_names:
            rewards = variety([completion for _, completion in round_])
            assert [row["variety"] for row in stored] == pytest.approx(rewards)
    assert "Step 2" in capsys.readouterr().out


@pytest.mark.parametrize("name", [name for name in METHODS if name != "distillation"])
def test_all_columns_reach_the_rewards(tmp_path, name):
    method, recorder = METHODS[name], Recorder(variety)
    dataset = prompts("w10", "w11", "w12", "w13", number=[0, 1, 2, 3])
    trained(method, method.make_config(tmp_path), dataset, reward_funcs=recorder, engine=scripted_engine())
    (call,) = recorder.calls
    assert [f"w{10 + number}" for number in call["number"]] == call["prompts"]
    assert len(call["completions"]) == len(call["completion_ids"]) == 8


# ---- the weights of an engine that has its own ----


class Served(ScriptedEngine):
    """A scripted engine behind which stands a model of its own, and a record of what it was asked in which order."""

    def __init__(self, follows=True):
        super().__init__(varied, logps=self.told, own_weights=True)
        self.model, self.follows = random_model(seed=3), follows
        self.events = []
        self.scorers = [Scorer("the engine", "float32", 64, self.score)]

    def update_weights(self, weights, version):
        self.events.append(("weights", version))
        if self.follows:
            self.model.load_state_dict(dict(weights))

    def generate(self, prompts, sampling):
        self.events.append("generate")
        return super().generate(prompts, sampling)

    def score(self, sequences):
        self.events.append("score")
        return [self.told(list(ids[:1]), list(ids[1:])) for ids in sequences]

    @torch.no_grad()
    def told(self, prompt, completion):
        log_p = self.model(torch.tensor([[*prompt, *completion]])).logits[0].log_softmax(1)
        return log_p[range(len(prompt) - 1, len(prompt) + len(completion) - 1), completion].tolist()


@every_method
def test_an_engine_has_the_policy_s_weights_whenever_it_generates(tmp_path, method):
    engine = Served()
    args = method.make_config(tmp_path, max_steps=3, learning_rate=1e-2, vllm_parity_check_steps=2)
    trainer = trained(method, args, engine=engine, eval_dataset=prompts("w10", "w11"))
    rounds = [[("weights", step), "generate"] for step in range(3)]
    # Compared at the start and two steps later.
    assert engine.events == [*rounds[0], "score", *rounds[1], *rounds[2], "score"]
    assert len(logs(trainer, "sampling/weight_sync_time")) == 3
    assert logs(trainer, "sampling/parity_kl") == pytest.approx([0.0, 0.0], abs=1e-6)
    assert logs(trainer, "sampling/parity_max") == pytest.approx([0.0, 0.0], abs=1e-4)
    engine.events.clear()
    trainer.evaluate()
    trainer.evaluate()
    assert engine.events == [("weights", 3), "generate", "generate"]
    assert all(torch.equal(value, weights_of(trainer.model)[name]) for name, value in weights_of(engine.model).items())


@every_method
def test_an_engine_with_other_weights_is_found_out(tmp_path, method):
    trainer = method.make(method.make_config(tmp_path), PROMPTS, engine=Served(follows=False))
    with pytest.raises(ParityError, match="does not have the trainer's weights"):
        trainer.train()
    unchecked = method.make_config(tmp_path, vllm_parity_check_steps=0)
    engine = Served(follows=False)
    trained(method, unchecked, engine=engine)
    assert "score" not in engine.events


@every_method
def test_log_probs_are_asked_of_an_engine_only_where_they_are_needed(tmp_path, method):
    engine = Served()
    trained(method, method.make_config(tmp_path), engine=engine)
    corrects = method.has_option("vllm_importance_sampling_correction")
    assert [sampling.with_logps for _, sampling in engine.calls] == [corrects]


# ---- the memory plan ----


@every_method
def test_the_memory_plan_of_a_method(tmp_path, monkeypatch, method):
    """Eight completions of up to 6 tokens after prompts of up to 3; float32 weights, and AdamW's two states."""
    model, longest = random_model(), prompts("w10", "w10 w20 w30", "w11", "w12", "w13", "w14", "w15", "w16")
    engine = scripted_engine()
    trainer = method.make(method.make_config(tmp_path, **method.frozen), longest, model, engine=engine)
    monkeypatch.setattr(type(trainer.accelerator), "device", torch.device("cuda"))
    monkeypatch.setattr(online, "gpu_memory", lambda device: (GIB, 80 * GIB))
    plan = trainer._memory_plan(model)
    size = 4 * sum(p.numel() for p in model.parameters())
    assert (plan.total_bytes, plan.engine) == (80 * GIB, None)
    assert (plan.training.sequence_tokens, plan.training.tokens) == (9, 8 * 9)
    for phase in PHASES:
        assert plan.phases[phase]["policy weights"] == plan.phases[phase]["frozen models"] == size
        assert plan.phases[phase]["optimizer"] == 2 * size
        assert plan.needs(phase) < plan.total_bytes
    trainer.args.use_vllm = True
    shared = trainer._memory_plan(model)
    assert shared.engine.utilization == copy.copy(method.config)().vllm_gpu_memory_utilization
    assert shared.engine.sequences == 8
    assert shared.phases["generate"]["engine cache"] > 0
