"""The stream of weights: names, dtypes, and a master copy that stays as it is."""

import pytest
import torch
from fixtures.models import family_model, random_model
from torch import nn

from trl.weights.source import PolicyWeights, TensorInfo, as_bytes, dtype_name


def test_metadata_equals_what_the_stream_yields():
    for dtype in (None, torch.bfloat16, torch.float16, torch.float32):
        weights = PolicyWeights(random_model(), dtype)
        told = weights.metadata()
        assert told == [TensorInfo(n, t.dtype, tuple(t.shape)) for n, t in weights]
        assert [i.num_bytes for i in told] == [len(as_bytes(t)) for _, t in weights]


def test_bytes_sent_are_the_master_rounded_once_and_the_master_stays():
    model = random_model().float()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    weights = PolicyWeights(model, torch.bfloat16)
    for (name, sent), info in zip(weights, weights.metadata(), strict=True):
        assert sent.dtype == info.dtype == torch.bfloat16
        assert info.num_bytes == 2 * before[name].numel() == len(as_bytes(sent))
        error = (sent.float() - before[name]).abs()
        assert (error <= 2**-8 * before[name].abs()).all()
        assert torch.equal(sent, before[name].bfloat16())
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(as_bytes(parameter.detach()), as_bytes(before[name])), name


def test_a_mixed_model_is_sent_in_one_dtype_or_as_it_is():
    model = random_model().bfloat16()
    model.model.norm.float()
    assert {t.dtype for _, t in PolicyWeights(model, torch.bfloat16)} == {torch.bfloat16}
    own = {i.name: i.dtype for i in PolicyWeights(model).metadata()}
    assert own["model.norm.weight"] == torch.float32
    assert own["model.embed_tokens.weight"] == torch.bfloat16
    assert {i.dtype for i in PolicyWeights(model).in_dtype(torch.float16).metadata()} == {torch.float16}


def test_integers_keep_their_dtype():
    model = nn.Module()
    model.table = nn.Parameter(torch.arange(3), requires_grad=False)
    assert [(n, t.dtype) for n, t in PolicyWeights(model, torch.bfloat16)] == [("table", torch.int64)]


def test_the_stream_can_be_read_again_and_follows_the_model():
    model = random_model()
    weights = PolicyWeights(model)
    first = {n: t.clone() for n, t in weights}
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    second = dict(weights)
    assert torch.equal(second["lm_head.weight"], first["lm_head.weight"] + 1.0)


def test_tied_weights_are_sent_once():
    model = family_model("qwen2", tie_word_embeddings=True)
    names = [i.name for i in PolicyWeights(model).metadata()]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    assert len(names) == len(set(names))


def test_buffers_that_checkpoints_hold_are_sent_as_they_are():
    """A router's bias is one: an engine that starts without the checkpoint has it from nowhere else."""
    model = nn.ModuleDict({"router": nn.Linear(2, 3, bias=False)})
    model["router"].register_buffer("correction", torch.tensor([0.1, 0.2, 0.3]))
    model["router"].register_buffer("table", torch.ones(4), persistent=False)
    sent = dict(PolicyWeights(model, torch.bfloat16))
    assert list(sent) == ["router.weight", "router.correction"]
    assert sent["router.weight"].dtype == torch.bfloat16
    assert torch.equal(sent["router.correction"], model["router"].correction)
    assert [(i.name, i.dtype) for i in PolicyWeights(model, torch.bfloat16).metadata()] == [
        ("router.weight", torch.bfloat16),
        ("router.correction", torch.float32),
    ]


@pytest.mark.parametrize(
    "wrap",
    [lambda m: nn.ModuleDict({"module": m}), lambda m: nn.ModuleDict({"_orig_mod": m})],
    ids=["module", "_orig_mod"],
)
def test_names_are_those_of_the_checkpoint(wrap):
    inner = nn.ModuleDict({"layer": nn.ModuleDict({"_checkpoint_wrapped_module": nn.Linear(2, 2)})})
    assert [i.name for i in PolicyWeights(wrap(inner)).metadata()] == ["layer.weight", "layer.bias"]


def test_names_that_only_look_like_wrappers_stay():
    model = nn.ModuleDict({"layer": nn.ModuleDict({"module": nn.Linear(2, 2, bias=False)})})
    assert [i.name for i in PolicyWeights(model).metadata()] == ["layer.module.weight"]


def test_names_of_dtypes_on_the_wire():
    assert [dtype_name(d) for d in (torch.float32, torch.bfloat16, torch.int8)] == ["float32", "bfloat16", "int8"]
