"""The memory plan: hand-worked numbers, invariances, and its estimates against what autograd really keeps."""

from contextlib import nullcontext
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fixtures.batches import random_batch
from fixtures.models import FAMILIES, family_model
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from trl.errors import ConfigError, DeviceMemoryError
from trl.models.checkpointing import checkpointing_kwargs
from trl.models.forward import token_logps
from trl.models.load import use_packed_attention
from trl.models.planner import (
    CUDA_CONTEXT,
    DOUBT,
    GIB,
    PHASES,
    EngineSize,
    MemoryPlan,
    ModelSize,
    TrainingSize,
    check,
    explain_out_of_memory,
    forward_activations,
    layer_activations,
    logits_tile,
    plan,
    train_activations,
)
from trl.trainer.group_batches import GroupPlan

# Half a billion parameters, float32 weights, bfloat16 products.
HALF_B = ModelSize(
    parameters=494_032_768,
    weight_bytes=4 * 494_032_768,
    layers=24,
    hidden_size=896,
    intermediate_size=4864,
    vocab_size=151_936,
    num_attention_heads=14,
    num_key_value_heads=2,
    head_dim=64,
    compute_bytes=2,
)
TRAINING = TrainingSize(
    tokens=16_384,
    sequence_tokens=1024,
    gradient_checkpointing=True,
    optimizer="adamw_torch_fused",
    trainable_parameters=HALF_B.parameters,
    trainable_bytes=HALF_B.weight_bytes,
)
ENGINE = EngineSize(utilization=0.3, max_model_length=2048)


def planned(gib: float = 80, *, training: dict[str, Any] | None = None, **engine: Any) -> MemoryPlan:
    return plan(HALF_B, replace(TRAINING, **(training or {})), replace(ENGINE, **engine), int(gib * GIB))


# ---- the parts, by hand ----


def test_cache_of_a_token():
    assert HALF_B.cache_bytes == 2 * 24 * 2 * 64 * 2 == 12_288


def test_engine_parts():
    parts = ENGINE.least(HALF_B)
    assert parts["engine weights"] == 988_065_536
    # 128 blocks of 16 tokens; a token more opens another block.
    assert parts["engine cache"] == 128 * 16 * 12_288
    assert replace(ENGINE, max_model_length=2049).least(HALF_B)["engine cache"] == 129 * 16 * 12_288
    # 256 sequences with three float32 numbers a word, and 4,096 tokens with two residuals and a norm in float32.
    # The MLP's three tensors of two bytes would be smaller than the logits.
    assert parts["engine activations"] == 256 * 151_936 * 12 + 4096 * 12 * 896


def test_engine_gets_its_share_and_no_more():
    p = planned(80, utilization=0.5)
    assert sum(n for part, n in p.phases["generate"].items() if part.startswith("engine")) == 40 * GIB
    tokens = (40 * GIB - 988_065_536 - (256 * 151_936 * 12 + 4096 * 12 * 896)) // 12_288
    assert f"vLLM's cache: {tokens:,} tokens, {tokens / 2048:.1f} sequences of 2,048" in p.table()


def test_weights_gradients_and_optimizer():
    train = planned(training={"frozen_bytes": HALF_B.weight_bytes}).phases["train"]
    assert train["policy weights"] == train["frozen models"] == train["gradients"] == 1_976_131_072
    assert train["optimizer"] == 2 * 1_976_131_072
    assert train["autocast copies"] == 988_065_536
    assert train["CUDA context"] == CUDA_CONTEXT


@pytest.mark.parametrize(
    ("optimizer", "bytes_per_parameter"),
    [("adamw_torch", 8), ("adamw_8bit", 2), ("sgd", 0), ("lion_8bit", 1), ("rmsprop", 4), ("not listed", 8)],
)
def test_optimizer_states(optimizer, bytes_per_parameter):
    states = planned(training={"optimizer": optimizer}).phases["train"]["optimizer"]
    assert states == bytes_per_parameter * HALF_B.parameters


def test_weights_of_16_bits_make_no_copies_and_halve_the_states():
    half = replace(HALF_B, weight_bytes=2 * HALF_B.parameters)
    p = plan(half, replace(TRAINING, trainable_bytes=half.weight_bytes), ENGINE, 80 * GIB)
    assert p.phases["train"]["autocast copies"] == 0
    assert p.phases["train"]["optimizer"] == 4 * HALF_B.parameters


def test_gradients_are_there_while_generating_only_under_accumulation_or_in_buckets():
    def gradients(**changes: bool) -> list[int]:
        p = planned(training=changes)
        return [p.phases[phase]["gradients"] // HALF_B.weight_bytes for phase in PHASES]

    assert gradients() == [0, 0, 1]
    assert gradients(gradients_stay=True) == [1, 1, 1]
    assert gradients(buckets=True) == [1, 1, 2]


def test_activations_by_hand():
    # Two norms of (4 + 4) bytes, five inputs of projections, q k v and output with a logsumexp a head, four of the MLP.
    assert layer_activations(HALF_B) == 2 * 8 * 896 + 5 * 2 * 896 + 14 * (4 * 2 * 64 + 4) + 4 * 2 * 4864 == 69_432
    last = (4 + 2 * 4 + 2) * 896
    assert train_activations(HALF_B, 1000, checkpointing=False, tile=10**9) == 1000 * (24 * 69_432 + last)
    # Each layer's input in float32; one layer's inner ones come when the tile has gone, in its place.
    kept = 1000 * (24 * 4 * 896 + last)
    assert train_activations(HALF_B, 1000, checkpointing=True, tile=10**9) == kept
    assert train_activations(HALF_B, 1000, checkpointing=True, tile=10**6) == kept + 69_432_000 - 10**6
    # Residuals and norm, and the MLP's three tensors.
    assert forward_activations(HALF_B, 1000, tile=0) == 1000 * (12 * 896 + 3 * 2 * 4864)


def test_activations_of_selective_checkpointing_and_offloading_by_hand():
    inner, last, inputs = 69_432, (4 + 2 * 4 + 2) * 896, 4 * 896
    attention = 14 * (64 * 2 + 4)  # output in two bytes, and a logsumexp a head

    def of(checkpointing: bool, tile: int = 10**9, model: ModelSize = HALF_B, **kinds: bool) -> int:
        return train_activations(model, 1000, checkpointing, tile, **kinds)

    assert of(True, selective=True) == 1000 * (24 * (inputs + attention) + last)
    # Of the layer that is computed again, attention's results are there already.
    assert of(True, 10**6, selective=True) == of(True, selective=True) + 1000 * (inner - attention) - 10**6
    assert of(True, offloading=True) == 1000 * (5 * inputs + last)
    assert of(True, 0, offloading=True) == 1000 * (5 * inputs + last + inner)
    assert of(True, model=replace(HALF_B, layers=3), offloading=True) == 1000 * (3 * inputs + last)
    assert of(True, selective=True, offloading=True) == 1000 * (5 * inputs + 24 * attention + last)
    # Without checkpointing: what one layer keeps.
    assert of(False, offloading=True) == 1000 * last
    assert of(False, 0, offloading=True) == 1000 * (inner + last)
    # There is nothing to select from without checkpointing.
    assert of(False, selective=True) == of(False) == 1000 * (24 * inner + last)
    assert of(False, selective=True, offloading=True) == of(False, offloading=True)


def test_the_plan_takes_both_into_account():
    def activations(**changes: Any) -> int:
        return planned(training=changes).phases["train"]["activations"]

    tile = logits_tile(HALF_B, TRAINING.tokens, gradient=True)
    full = activations()
    assert full == train_activations(HALF_B, TRAINING.tokens, True, tile)
    for kinds in ({"selective": True}, {"offloading": True}, {"selective": True, "offloading": True}):
        assert activations(**kinds) == train_activations(HALF_B, TRAINING.tokens, True, tile, **kinds) != full
    assert activations(offloading=False) == full
    score = [planned(training=kinds).phases["score"] for kinds in ({}, {"selective": True, "offloading": True})]
    assert score[0] == score[1]


def test_logits_tile_by_hand():
    words, chunk = 151_936, 2**27 // 151_936
    assert chunk == 883
    assert logits_tile(HALF_B, 100, gradient=False) == 100 * words * 12
    # Beside three float32 tensors of one chunk stand the next one's logits, in bfloat16 and float32.
    assert logits_tile(HALF_B, 884, gradient=False) == logits_tile(HALF_B, 10**6, gradient=False) == chunk * words * 18
    # The gradient of the head's weights, in float32 and bfloat16.
    assert logits_tile(HALF_B, 100, gradient=True) == 100 * words * 12 + words * 896 * 6
    single = replace(HALF_B, compute_bytes=4)
    assert logits_tile(single, 884, gradient=False) == chunk * words * 16


# ---- what fits ----


def test_a_plan_that_fits():
    p = planned(80)
    check(p)
    assert all(f"{phase}: fits" in p.table() for phase in PHASES)


def test_too_small_a_share():
    p = planned(80, utilization=0.01)
    with pytest.raises(ConfigError, match="`vllm_gpu_memory_utilization` is too small") as caught:
        check(p)
    least = sum(ENGINE.least(HALF_B).values())
    assert f"(got 0.01): vLLM gets 0.8 GiB; with one sequence of 2,048 tokens it needs {least / GIB:.1f}" in str(
        caught.value
    )
    assert "Set it to a value from 0.02 to " in str(caught.value)


def test_a_sequence_that_does_not_fit_the_cache():
    # 0.05 * 24 GiB hold 1.4 GiB of weights and activations, but not the 1.5 GiB of 131,072 tokens beside.
    p = planned(24, utilization=0.05, max_model_length=131_072)
    assert "less than one sequence of 131,072" in p.table()
    with pytest.raises(ConfigError, match="is too small"):
        check(p)


def test_too_large_a_share():
    p = planned(80, utilization=0.9)
    with pytest.raises(ConfigError, match="`vllm_gpu_memory_utilization` is too large") as caught:
        check(p)
    train = p.phases["train"]
    rest = sum(train.values()) - train["engine cache"] - train["engine weights"]
    # In training the engine's own activations are gone.
    room = 80 * GIB - rest + p.phases["generate"]["engine activations"]
    assert p.utilizations() == (0.02, int(100 * room / (80 * GIB)) / 100)
    assert f"Set it to a value from 0.02 to {p.utilizations()[1]}." in str(caught.value)
    assert p.table() in str(caught.value)


@pytest.mark.parametrize("sleep_level", [0, 1, 2])
@pytest.mark.parametrize("gib", [16, 24, 80])
def test_the_values_named_work_and_those_outside_do_not(sleep_level, gib):
    low, high = planned(gib, sleep_level=sleep_level).utilizations()
    for value in (low, (low + high) / 2, high):
        check(planned(gib, sleep_level=sleep_level, utilization=value))
    with pytest.raises(ConfigError):
        check(planned(gib, sleep_level=sleep_level, utilization=low - 0.01 - 1e-6))
    over = planned(gib, sleep_level=sleep_level, utilization=high + 0.01 + 1e-6)
    assert max(over.needs(phase) for phase in PHASES) > over.total_bytes


def test_only_sleep_helps():
    # Training by SGD on single short sequences leaves half a GiB, in which vLLM's weights do not fit.
    training = {"optimizer": "sgd", "tokens": 16, "sequence_tokens": 16}
    alone = plan(HALF_B, replace(TRAINING, **training), None, GIB)
    gib = alone.needs("train") / GIB + 0.5
    awake = planned(gib, training=training, max_model_length=16)
    assert awake.utilizations() is None
    with pytest.raises(ConfigError, match="No value works") as caught:
        check(awake)
    advice = str(caught.value).split("most first: ")[1].splitlines()[0]
    assert advice.startswith("`vllm_enable_sleep_mode=True` (")
    assert advice.count("GiB") == 1
    check(planned(gib, training=training, max_model_length=16, sleep_level=1))


def test_training_that_does_not_fit_beside_a_sleeping_engine_is_not_blamed_on_the_share():
    training = {"gradient_checkpointing": False, "tokens": 65_536}
    with pytest.warns(UserWarning, match="where all sequences of a micro-batch are of full length") as caught:
        check(planned(24, training=training, sleep_level=2))
    advice = str(caught[0].message).split("most first: ")[1]
    names = ["gradient_checkpointing=True", "max_tokens_per_micro_batch=32768", "optim='adamw_8bit'"]
    places = [advice.index(name) for name in names]
    assert places == sorted(places)
    assert "sleep" not in advice


def test_without_an_engine():
    p = plan(HALF_B, TRAINING, None, 80 * GIB)
    check(p)
    assert "engine" not in p.table()
    assert "vLLM" not in p.table()
    with pytest.raises(ConfigError, match=r"^Training lacks at least \d+\.\d GiB") as caught:
        check(plan(HALF_B, TRAINING, None, 6 * GIB))
    assert "vllm" not in str(caught.value)


def test_estimates_are_given_the_benefit_of_the_doubt():
    p = planned(80, training={"gradient_checkpointing": False, "tokens": 32_768})
    estimated = p.phases["train"]["activations"] + p.phases["train"]["logits tile"]
    assert p.needs("train") - p.needs("train", DOUBT) == int(DOUBT * estimated)
    # A GPU short of a tenth of what is estimated: refused by nobody, vouched for by nobody.
    rest = p.needs("train") - p.phases["train"]["engine cache"]
    tight = planned((rest - 0.1 * estimated) / GIB, training=asdict(p.training), utilization=0.03)
    assert "train: may not fit" in tight.table()
    check(tight)
    # Of four tenths: it works while completions stay short, which is said.
    with pytest.warns(UserWarning, match="may run out"):
        check(planned((rest - 0.4 * estimated) / GIB, training=asdict(p.training), utilization=0.05))
    # Weights, gradients and optimizer alone are too much.
    certain = sum(p.phases["train"][part] for part in ("policy weights", "gradients", "optimizer", "CUDA context"))
    with pytest.raises(ConfigError):
        check(planned((certain - 1) / GIB, training=asdict(p.training), utilization=0.05))


# ---- invariances ----

sizes = st.builds(
    replace,
    st.just(TRAINING),
    tokens=st.integers(1, 200_000),
    gradient_checkpointing=st.booleans(),
    optimizer=st.sampled_from(["adamw_torch", "adamw_8bit", "sgd"]),
    frozen_bytes=st.sampled_from([0, HALF_B.weight_bytes]),
    gradients_stay=st.booleans(),
)


@given(sizes, st.integers(1, 100_000), st.sampled_from([0, 1]))
def test_more_tokens_never_need_less(training, more, sleep_level):
    engine = replace(ENGINE, sleep_level=sleep_level)
    few, many = (plan(HALF_B, replace(training, tokens=training.tokens + n), engine, 80 * GIB) for n in (0, more))
    assert all(many.needs(phase) >= few.needs(phase) for phase in PHASES)


@given(sizes, st.floats(0.05, 0.95))
def test_sleep_takes_the_engine_out_of_score_and_train(training, utilization):
    engine = replace(ENGINE, utilization=utilization)
    awake, asleep = (plan(HALF_B, training, replace(engine, sleep_level=n), 80 * GIB) for n in (0, 2))
    assert asleep.needs("generate") == awake.needs("generate")
    for phase in ("score", "train"):
        held = awake.phases[phase]["engine weights"] + awake.phases[phase]["engine cache"]
        assert asleep.needs(phase) == awake.needs(phase) - held


@given(sizes)
def test_checkpointing_never_needs_more(training):
    with_it, without = (replace(training, gradient_checkpointing=on) for on in (True, False))
    assert plan(HALF_B, with_it, ENGINE, GIB).needs("train") <= plan(HALF_B, without, ENGINE, GIB).needs("train")


def train_needs(training: TrainingSize, **changes: Any) -> int:
    return plan(HALF_B, replace(training, **changes), ENGINE, GIB).needs("train")


@given(sizes, st.booleans())
def test_offloading_never_needs_more(training, selective):
    assert train_needs(training, selective=selective, offloading=True) <= train_needs(training, selective=selective)


@given(sizes)
def test_selective_checkpointing_lies_between_full_and_none(training):
    kinds = [(True, False), (True, True), (False, False)]
    needs = [train_needs(training, gradient_checkpointing=on, selective=selective) for on, selective in kinds]
    assert needs == sorted(needs)


# ---- out of memory ----


def test_out_of_memory_says_where_what_and_what_to_change():
    p = planned(24, training={"gradient_checkpointing": False}, utilization=0.3)
    torch_error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
    error = explain_out_of_memory(torch_error, p, "train", allocated=14 * GIB, reserved=int(15.5 * GIB))
    assert isinstance(error, DeviceMemoryError)
    assert isinstance(error, MemoryError)
    lines = str(error).splitlines()
    assert lines[0] == (
        "The GPU's memory ran out in the phase `train`: CUDA out of memory. Tried to allocate 2.00 GiB."
    )
    needs = f"{p.needs('train') / GIB:.1f}"
    assert lines[1] == f"torch had 14.0 GiB allocated and 15.5 GiB reserved; the plan was {needs} of 24.0 GiB."
    names = ["gradient_checkpointing=True", "max_tokens_per_micro_batch=8192", "vllm_enable_sleep_mode=True"]
    assert all(name in lines[2] for name in names)
    assert "vllm_gpu_memory_utilization=0.2" in lines[2]
    assert str(error).endswith(p.table())


def test_out_of_memory_while_generating_points_at_the_engine():
    p = planned(24, utilization=0.8)
    error = explain_out_of_memory(torch.OutOfMemoryError(), p, "generate", allocated=0, reserved=0)
    assert "OutOfMemoryError" in str(error).splitlines()[0]
    assert "`vllm_gpu_memory_utilization=0.7` (2.4 GiB)" in str(error)
    assert "gradient_checkpointing" not in str(error).splitlines()[2]


def test_advice_knows_offloading_where_the_method_has_it_and_what_selection_costs():
    def advice(**training: Any) -> str:
        p = planned(24, training={"tokens": 65_536, **training})
        error = explain_out_of_memory(torch.OutOfMemoryError(), p, "train", allocated=0, reserved=0)
        return str(error).splitlines()[2]

    offload, full = "`activation_offloading=True`", "`gradient_checkpointing_kwargs={'selective': False}`"
    # Five inputs of layers in place of 24, in float32.
    freed = 65_536 * 19 * 4 * 896
    assert f"{offload} ({freed / GIB:.1f} GiB)" in advice(offloading=False)
    assert offload not in advice(offloading=None)
    assert offload not in advice(offloading=True)
    # Attention's results in 24 layers; in the one that is computed again they are there in either case.
    freed = 65_536 * 23 * 14 * (64 * 2 + 4)
    assert f"{full} ({freed / GIB:.1f} GiB)" in advice(selective=True)
    assert full not in advice()
    assert full not in advice(selective=True, gradient_checkpointing=False)


def test_table_has_a_row_a_part_and_a_column_a_phase():
    p = planned(80)
    lines = p.table().splitlines()
    assert lines[0].split() == ["GiB", *PHASES]
    rows = {line[:18].strip(): line[18:].split() for line in lines[1:] if ":" not in line}
    assert rows["policy weights"] == ["1.8", "1.8", "1.8"]
    assert rows["gradients"] == ["0.0", "0.0", "1.8"]
    assert rows["engine weights"] == ["0.9", "0.9", "0.9"]
    assert rows["GPU"] == ["80.0", "80.0", "80.0"]
    assert rows["sum"] == [f"{p.needs(phase) / GIB:.1f}" for phase in PHASES]


# ---- sizes off models and configs ----


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_of_many_families(family):
    model = family_model(family)
    size = ModelSize.of(model, torch.bfloat16)
    assert size.parameters == sum(p.numel() for p in model.parameters())
    assert size.weight_bytes == 4 * size.parameters
    assert (size.hidden_bytes, size.compute_bytes) == (4, 2)
    assert min(asdict(size).values()) > 0


def test_sizes_of_a_llama():
    size = ModelSize.of(llama(layers=3, key_value_heads=2, dtype=torch.bfloat16), torch.bfloat16)
    sizes = (size.layers, size.hidden_size, size.intermediate_size, size.num_key_value_heads, size.head_dim)
    assert sizes == (3, 64, 176, 2, 16)
    assert size.weight_bytes == 2 * size.parameters
    assert size.hidden_bytes == 2


def arguments(**changes: Any) -> Any:
    defaults = {
        "optim": "adamw_torch_fused",
        "gradient_checkpointing": True,
        "group_plan": GroupPlan(8, 8, rows=32, eval_rows=8, prompts=4, steps_per_generation=4),
        "longest_completion": 300,
        "max_tokens_per_micro_batch": None,
        "gradient_accumulation_steps": 4,
        "world_size": 1,
    }
    return SimpleNamespace(**{**defaults, **changes})


@pytest.mark.parametrize(("budget", "tokens"), [(None, 3200), (1000, 1000), (100, 400), (10_000, 3200)])
def test_tokens_of_a_micro_batch(budget, tokens):
    """Rows of 400 tokens: all eight, or what the budget allows, but no sequence is cut."""
    args = arguments(max_tokens_per_micro_batch=budget)
    assert TrainingSize.of(args, llama(), prompt_tokens=100, frozen_bytes=0).tokens == tokens


@pytest.mark.parametrize(("accumulation", "stays"), [(4, False), (2, False), (8, True), (3, True)])
def test_gradients_stay_where_a_round_ends_inside_an_optimizer_step(accumulation, stays):
    args = arguments(gradient_accumulation_steps=accumulation, world_size=2)
    size = TrainingSize.of(args, llama(), prompt_tokens=1, frozen_bytes=7)
    assert (size.gradients_stay, size.buckets, size.frozen_bytes) == (stays, True, 7)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (False, None)),
        ({"gradient_checkpointing_kwargs": None, "activation_offloading": False}, (False, False)),
        ({"gradient_checkpointing_kwargs": {"selective": True}, "activation_offloading": True}, (True, True)),
        ({"gradient_checkpointing_kwargs": checkpointing_kwargs({"selective": True})}, (True, None)),
    ],
)
def test_what_a_config_says_of_activations(settings, expected):
    size = TrainingSize.of(arguments(**settings), llama(), prompt_tokens=1, frozen_bytes=0)
    assert (size.selective, size.offloading) == expected


def test_frozen_weights_have_neither_gradients_nor_states():
    model = llama()
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)
    size = TrainingSize.of(arguments(), model, prompt_tokens=1, frozen_bytes=0)
    assert (size.trainable_parameters, size.trainable_bytes) == (64 * 64, 4 * 64 * 64)


# ---- the estimate against autograd ----


def llama(layers: int = 2, key_value_heads: int = 4, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=key_value_heads,
    )
    return LlamaForCausalLM(config).to(dtype).train()


def kept_bytes(model: PreTrainedModel, packed: bool, autocast: bool) -> int:
    """Bytes in distinct storages that autograd keeps of a forward pass over 8 sequences of 64 tokens, but weights."""
    batch = random_batch([16] * 8, [48] * 8, list(range(8)))
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    shapes = {s for p in model.parameters() if p.dim() == 2 for s in (p.shape, p.T.shape)}
    kept: dict[int, torch.Tensor] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        cast_weight = autocast and x.shape in shapes and x.dtype == torch.bfloat16
        if x.untyped_storage().data_ptr() not in weights and not cast_weight:
            kept[x.untyped_storage().data_ptr()] = x
        return x

    precision = torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x), precision:
        result = token_logps(model, batch, packed=packed)
    assert result.logps.requires_grad
    return sum(x.untyped_storage().nbytes() for x in kept.values())


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("key_value_heads", [4, 1])
@pytest.mark.parametrize(
    ("dtype", "autocast"), [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)]
)
def test_estimate_is_near_what_autograd_keeps(dtype, autocast, key_value_heads, packed):
    model = llama(4, key_value_heads, dtype)
    if packed:
        use_packed_attention(model)
    size = ModelSize.of(model, torch.bfloat16 if autocast else dtype)
    estimate = train_activations(size, 8 * 64, checkpointing=False, tile=0)
    assert estimate == pytest.approx(kept_bytes(model, packed, autocast), rel=0.15)


@pytest.mark.parametrize(("dtype", "autocast"), [(torch.float32, False), (torch.bfloat16, False)])
def test_estimate_of_a_layer_and_of_what_checkpointing_keeps_instead(dtype, autocast):
    size = ModelSize.of(llama(dtype=dtype), dtype)
    one, three = (kept_bytes(llama(n, dtype=dtype), packed=False, autocast=autocast) for n in (1, 3))
    assert 512 * layer_activations(size) == pytest.approx((three - one) / 2, rel=0.15)
    model, inputs = llama(3, dtype=dtype), []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    kept_bytes(model, packed=False, autocast=autocast)
    measured = sum(x.untyped_storage().nbytes() for x in inputs) + one
    size = ModelSize.of(model, dtype)
    assert train_activations(size, 512, checkpointing=True, tile=0) == pytest.approx(measured, rel=0.15)
