"""Classes that vLLM patches for everybody are given back to everybody but vLLM."""

import pytest
import torch
from torch import nn

from trl.generation.vllm_patches import OwnClasses


class TorchCompileWithNoGuardsWrapper:
    compiled = "vLLM's"

    def __call__(self, *args, **kwargs):
        raise AssertionError("vLLM's forward pass")


@pytest.fixture
def decoder():
    """A class of a decoder layer, to be patched."""

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return x + 1

    return Decoder


def patch(cls):
    """What vLLM does to a class it compiles: its bases, its call, its constructor, an attribute of its own."""

    def constructor(self):
        raise AssertionError("Current vLLM config is not set")

    cls.__bases__ = (*cls.__bases__, TorchCompileWithNoGuardsWrapper)
    cls.__call__ = TorchCompileWithNoGuardsWrapper.__call__
    cls.__init__ = constructor
    cls.do_not_compile = False


@pytest.fixture
def patched(decoder):
    """A model made before, vLLM's, and the classes given back."""
    ours, theirs = nn.Sequential(nn.Linear(2, 2), decoder(), nn.Sequential(decoder())), nn.Sequential(decoder())
    classes = OwnClasses(ours)
    patch(decoder)
    with pytest.raises(AssertionError, match="vLLM's forward pass"):
        ours(torch.ones(1, 2))
    classes.give_back(theirs)
    return ours, theirs


def test_models_made_before_and_after_run(decoder, patched):
    ours, _ = patched
    x = torch.ones(1, 2)
    assert torch.equal(ours(x), ours[0](x) + 2)
    assert torch.equal(decoder()(x), x + 1)
    assert decoder.__bases__ == (nn.Module,)
    assert "do_not_compile" not in vars(decoder)
    assert "__call__" not in vars(decoder)


def test_vllms_own_modules_stay_patched(decoder, patched):
    _, theirs = patched
    with pytest.raises(AssertionError, match="vLLM's forward pass"):
        theirs(torch.ones(1))
    module = theirs[0]
    assert isinstance(module, decoder)
    assert isinstance(module, TorchCompileWithNoGuardsWrapper)
    assert (type(module).__name__, module.do_not_compile, module.compiled) == ("Decoder", False, "vLLM's")
    assert list(module.state_dict()) == ["weight"]


def test_a_second_engine_finds_the_class_as_the_first_did(decoder, patched):
    ours, _ = patched
    others = nn.Sequential(decoder())
    classes = OwnClasses(ours)
    patch(decoder)
    classes.give_back(others)
    assert torch.equal(decoder()(torch.ones(1)), torch.tensor([2.0]))
    with pytest.raises(AssertionError, match="vLLM's forward pass"):
        others(torch.ones(1))


def test_an_engine_that_did_not_start_leaves_no_patch(decoder):
    model = decoder()
    classes = OwnClasses(model)
    patch(decoder)
    classes.give_back()
    assert torch.equal(model(torch.ones(1)), torch.tensor([2.0]))


def test_classes_that_nobody_patched_are_left_alone(decoder):
    model = nn.Sequential(nn.Linear(2, 2), decoder())
    classes = OwnClasses(model)
    types = [type(module) for module in model.modules()]
    classes.give_back(model)
    assert [type(module) for module in model.modules()] == types
