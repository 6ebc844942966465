"""Selective checkpointing: attention runs once, everything else twice, and the gradients are the same."""

import json
from contextlib import nullcontext

import pytest
import torch
from fixtures.batches import random_batch
from fixtures.models import family_model, random_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel, Trainer, TrainingArguments

from trl.errors import ConfigError
from trl.models import enable_selective_activation_checkpointing, get_act_offloading_ctx_manager
from trl.models.checkpointing import ATTENTION_OPS, checkpointing_kwargs, is_selective, keeps
from trl.models.forward import token_logps
from trl.models.load import disable_dropout
from trl.types import RolloutBatch


class Calls(TorchDispatchMode):
    """Counts the attention kernels and matrix products that really run."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = self.products = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.attention += keeps(op)
        self.products += op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return op(*args, **(kwargs or {}))


def checkpoint_all(model):
    """By its newer name, or by the older one."""
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()


# How a model is made ready for each kind of checkpointing.
KINDS = {
    "none": lambda model: None,
    "full": checkpoint_all,
    "selective": enable_selective_activation_checkpointing,
}


def model_with(kind: str, family: str = "qwen2") -> PreTrainedModel:
    model = family_model(family, packed=True)
    disable_dropout(model)
    KINDS[kind](model)
    return model.train()


def ragged() -> RolloutBatch:
    """Prompts shared by three, one and two sequences."""
    return random_batch([3, 1, 7], [4, 1, 6, 2, 1, 9], [0, 0, 1, 2, 2, 0])


def train(model: PreTrainedModel, packed: bool, *, offload: bool = False) -> tuple[list[Tensor], Calls, Calls]:
    """Gradients, and what ran in the forward and in the backward pass."""
    forward, backward = Calls(), Calls()
    offloaded = get_act_offloading_ctx_manager(model, min_offload_size=64, max_fwd_stash_size=1)
    with offloaded if offload else nullcontext(), forward:
        out = token_logps(model, ragged(), packed=packed)
        loss = (out.logps * torch.linspace(-1, 1, 23)).sum() + out.entropies.square().sum()
    with backward:
        loss.backward()
    assert (offloaded.copies_back > 0) == offload
    assert offloaded.stored_bytes == 0
    return [p.grad for p in model.parameters() if p.grad is not None], forward, backward


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("family", ["qwen2", "gpt2", "gemma3_text", "mixtral"])
def test_gradients_are_identical(family, packed):
    expected, *_ = train(model_with("none", family), packed)
    assert len(expected) > 10
    for kind in KINDS:
        for offload in (False, True):
            grads, *_ = train(model_with(kind, family), packed, offload=offload)
            assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True)), (kind, offload)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("packed", [True, False])
def test_attention_runs_again_under_full_checkpointing_only(packed, offload):
    runs = {kind: train(model_with(kind), packed, offload=offload)[1:] for kind in KINDS}
    once = runs["none"][0].attention
    assert once == 2 if not packed else once > 2  # two layers, of several groups of sequences each where packed
    assert {kind: forward.attention for kind, (forward, _) in runs.items()} == dict.fromkeys(KINDS, once)
    assert {kind: backward.attention for kind, (_, backward) in runs.items()} == {
        "none": 0,
        "full": once,
        "selective": 0,
    }
    products = {kind: backward.products for kind, (_, backward) in runs.items()}
    assert products["full"] == products["selective"]
    # Of seven projections in each of two layers the last need not run again: nothing reads its result.
    assert products["full"] - products["none"] == 2 * 6


@pytest.mark.parametrize("autocast", [False, True])
def test_in_16_bits(autocast):
    grads = []
    for kind in KINDS:
        model = model_with(kind)
        if not autocast:
            model = model.bfloat16()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = token_logps(model, ragged()).logps.sum()
        loss.backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for others in grads[1:] for a, b in zip(others, grads[0], strict=True))


def test_what_is_kept():
    for name in ATTENTION_OPS:
        namespace, _, function = name.partition("::")
        if namespace == "aten":
            assert keeps(getattr(torch.ops.aten, function).default)
    assert keeps(torch.ops.torch_attn._varlen_attn.default)
    aten = torch.ops.aten
    for op in (aten.mm, aten._scaled_dot_product_flash_attention_for_cpu_backward, aten._flash_attention_backward):
        assert not keeps(op.default)


def test_kernels_of_flash_attention_are_kept_unless_they_write_into_their_arguments():
    library = torch.library.Library("test_flash_attn_0a1b2c", "DEF")
    for schema in (
        "varlen_fwd(Tensor q, Tensor k, Tensor v) -> (Tensor, Tensor)",
        "varlen_bwd(Tensor grad, Tensor q) -> Tensor",
        "fwd_into(Tensor q, Tensor(a!) out) -> Tensor(a!)",
    ):
        library.define(schema)
    ops = torch.ops.test_flash_attn_0a1b2c
    kept = [keeps(op.default) for op in (ops.varlen_fwd, ops.varlen_bwd, ops.fwd_into)]
    assert kept == [True, False, False]


def test_a_model_whose_attention_cannot_be_kept_is_warned_about():
    model = random_model(attn_implementation="eager").train()
    with pytest.warns(UserWarning, match="keeps nothing of a model whose `attn_implementation` is 'eager'"):
        enable_selective_activation_checkpointing(model)
    ids = torch.arange(7, 17)[None]
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    grads = [p.grad.clone() for p in model.parameters()]
    plain = random_model(attn_implementation="eager").train()
    plain(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(grads, plain.parameters(), strict=True))


# ---- the user's switch ----


@pytest.mark.parametrize("given", [None, {}, {"use_reentrant": True}, {"use_reentrant": False, "debug": True}])
def test_other_settings_are_passed_on(given):
    assert checkpointing_kwargs(given) == given
    assert not is_selective(given)


def test_the_switch():
    given = {"selective": True, "preserve_rng_state": False}
    kwargs = checkpointing_kwargs(given)
    assert kwargs is not None
    assert kwargs.keys() == {"use_reentrant", "preserve_rng_state", "context_fn"}
    assert kwargs["use_reentrant"] is False
    assert len(kwargs["context_fn"]()) == 2
    assert given == {"selective": True, "preserve_rng_state": False}
    assert checkpointing_kwargs(kwargs) == checkpointing_kwargs({**kwargs, "selective": True}) == kwargs
    assert is_selective(given)
    assert is_selective(kwargs)
    off = {"selective": False, "use_reentrant": True}
    assert checkpointing_kwargs(off) == {"use_reentrant": True}
    assert not is_selective(off)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"selective": "yes"}, "must be true or false \\(got 'yes'\\)"),
        ({"selective": 1}, "must be true or false \\(got 1\\)"),
        ({"selective": True, "use_reentrant": True}, "both `selective=True` and `use_reentrant=True`"),
        ({"selective": True, "context_fn": nullcontext}, "both `selective=True` and a `context_fn`"),
    ],
)
def test_what_does_not_go_together(given, message):
    with pytest.raises(ConfigError, match=message):
        checkpointing_kwargs(given)


@pytest.mark.parametrize(("given", "attention_calls"), [({"selective": True}, 2), ({"selective": False}, 4)])
def test_a_trainer_of_transformers_takes_it(tmp_path, given, attention_calls):
    args = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        activation_checkpointing=True,
        activation_checkpointing_kwargs=checkpointing_kwargs(given),
    )
    with Calls() as calls:
        Trainer(random_model(), args, train_dataset=[{"input_ids": [7, 8, 9], "labels": [7, 8, 9]}]).train()
    assert calls.attention == attention_calls  # of two layers


def test_a_config_that_holds_it_can_be_written(tmp_path):
    args = TrainingArguments(
        output_dir=str(tmp_path), activation_checkpointing_kwargs=checkpointing_kwargs({"selective": True})
    )
    written = json.loads(args.to_json_string())["activation_checkpointing_kwargs"]
    assert written == {"use_reentrant": False, "context_fn": "selective"}
    torch.save(args, tmp_path / "args.bin")
    loaded = torch.load(tmp_path / "args.bin", weights_only=False)
    assert is_selective(loaded.activation_checkpointing_kwargs)
    assert len(loaded.activation_checkpointing_kwargs["context_fn"]()) == 2


@pytest.mark.gpu
def test_the_attention_of_packed_rows_on_a_gpu_runs_once():
    on_cpu = random_batch([16] * 4, [240] * 4, list(range(4)))
    batch = RolloutBatch.from_state_dict(on_cpu.state_dict(), torch.device("cuda"))
    grads, calls = {}, {}
    for kind in KINDS:
        model = random_model(packed=True, scale=1.0, hidden_size=256).to("cuda", torch.bfloat16)
        KINDS[kind](model)
        with Calls() as counted:
            token_logps(model.train(), batch).logps.mean().backward()
        calls[kind] = counted.attention
        grads[kind] = [p.grad for p in model.parameters()]
    assert calls == {"none": 2, "full": 4, "selective": 2}
    # The attention kernel adds gradients up in any order.
    for kind in ("full", "selective"):
        for a, b in zip(grads[kind], grads["none"], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2 * b.abs().max().item())
