"""Adapters on their way to an engine: merged there, untouched here."""

import pytest
import torch
from fixtures.models import random_model
from peft import LoraConfig, get_peft_model

from trl.errors import NotSupportedError
from trl.weights.source import PolicyWeights

# PEFT reads an attribute that transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def adapted(**changes):
    """A bfloat16 model with LoRA of rank 4 whose weights are not zero, and the same model without."""
    base = random_model().bfloat16()
    plain = {name: p.detach().clone() for name, p in base.named_parameters()}
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    model = get_peft_model(base, LoraConfig(**{**settings, **changes}))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model, plain


def expected(model, plain):
    """`W + (alpha / r) B A` in float32, rounded once, under the names of the model without adapter."""
    parameters = dict(model.named_parameters())
    out = {}
    for name, weight in plain.items():
        stem = "base_model.model." + name.removesuffix(".weight")
        a = parameters.get(f"{stem}.lora_A.default.weight")
        if a is None:
            out[name] = weight
        else:
            delta = parameters[f"{stem}.lora_B.default.weight"].float() @ a.float()
            out[name] = (weight.float() + 8 / 4 * delta).bfloat16()
    return out


def test_the_engine_gets_merged_weights_and_the_base_does_not_drift():
    model, plain = adapted()
    want = expected(model, plain)
    assert any(not torch.equal(want[name], plain[name]) for name in plain)
    weights = PolicyWeights(model)
    for _ in range(50):
        sent = dict(weights)
        assert list(sent) == list(plain)
        assert all(torch.equal(sent[name], want[name]) for name in plain)
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            clean = name.removeprefix("base_model.model.").replace("base_layer.", "")
            assert torch.equal(parameter, plain[clean]), name
    assert not any(module.merged for module in model.modules() if "merged" in dir(module))


def test_an_exception_in_the_middle_leaves_the_model_unmerged():
    model, plain = adapted()
    stream = iter(PolicyWeights(model))
    for _ in range(5):
        next(stream)
    stream.close()
    weight = model.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight
    assert torch.equal(weight, plain["model.layers.0.self_attn.q_proj.weight"])


def test_metadata_is_that_of_the_model_without_adapter():
    model, plain = adapted()
    told = {info.name: info.shape for info in PolicyWeights(model, torch.float32).metadata()}
    assert told == {name: tuple(p.shape) for name, p in plain.items()}


def test_a_fully_trained_module_goes_in_the_place_of_the_original():
    model, _ = adapted(modules_to_save=["lm_head"])
    trained = model.base_model.model.lm_head.modules_to_save["default"].weight
    with torch.no_grad():
        trained.add_(1.0)
    assert torch.equal(dict(PolicyWeights(model))["lm_head.weight"], trained)


def test_a_disabled_adapter_is_left_out():
    model, plain = adapted()
    with model.disable_adapter():
        sent = dict(PolicyWeights(model))
    assert all(torch.equal(sent[name], plain[name]) for name in plain)


def test_what_cannot_be_merged_on_the_way_is_refused():
    model, _ = adapted(use_dora=True)
    with pytest.raises(NotSupportedError, match="DoRA"):
        PolicyWeights(model)
