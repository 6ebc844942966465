"""Low-rank adapters merged into the weights on their way out; the model itself is never touched."""

from typing import Any

from torch import Tensor, nn

from trl._deps import available
from trl.errors import NotSupportedError

# Parameters of the wrapper that an engine has no place for, and what the wrapper puts into the names of the others.
_OWN_PARTS = ("lora_A.", "lora_B.", "lora_embedding_A.", "lora_embedding_B.", "lora_magnitude_vector.")
_ORIGINAL = "original_module."
_PREFIX, _BASE = "base_model.model.", "base_layer."


def without_adapters(model: nn.Module) -> nn.Module:
    """The model that adapters were added to; itself for one without."""
    if not available("peft"):
        return model
    from peft import PeftModel

    return model.get_base_model() if isinstance(model, PeftModel) else model


class Adapters:
    """The adapters of a model, as far as its weights are concerned; none for a model without.

    Args:
        model: maybe wrapped by PEFT.

    Raises:
        NotSupportedError: a kind of adapter that cannot be merged on the way.
    """

    def __init__(self, model: nn.Module):
        self._layers: dict[str, Any] = {}
        self.present = False
        if not available("peft"):
            return
        from peft import PeftModel
        from peft.tuners.lora import LoraLayer

        if not isinstance(model, PeftModel):
            return
        self.present = True
        for name, module in model.named_modules():
            if isinstance(module, LoraLayer):
                _check(name, module)
                self._layers[f"{name}.{_BASE}weight"] = module

    def checkpoint_name(self, name: str) -> str | None:
        """The name an engine knows a parameter by; None for one that is the adapter's own."""
        if not self.present:
            return name
        if any(part in name for part in _OWN_PARTS) or _ORIGINAL in name:
            return None
        name = name.removeprefix(_PREFIX).replace(_BASE, "")
        # A fully trained module stands beside the original one under the adapter's name.
        head, marker, tail = name.partition("modules_to_save.")
        return head + tail.partition(".")[2] if marker else name

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """`W + sum of (alpha / r) B A` over the active adapters, in float32 where there are any; else the weight.

        (LoRA, arXiv:2106.09685, eq. 3.)
        """
        layer = self._layers.get(name)
        if layer is None or layer.disable_adapters:
            return weight
        merged: Tensor = weight.float()
        for adapter in layer.active_adapters:
            if adapter in layer.lora_A:
                delta = layer.lora_B[adapter].weight.float() @ layer.lora_A[adapter].weight.float()
                merged = merged + layer.scaling[adapter] * (delta.T if layer.fan_in_fan_out else delta)
        return merged


def _check(name: str, layer: Any) -> None:
    base = layer.get_base_layer()
    if layer.merged:
        raise NotSupportedError(f"The adapter of {name} is merged already: call `unmerge_adapter()` before training.")
    if any(layer.use_dora.values()) or not isinstance(base, (nn.Linear, _conv1d())):
        kind = "a DoRA adapter" if any(layer.use_dora.values()) else f"an adapter on {type(base).__name__}"
        raise NotSupportedError(f"{name} has {kind}, which cannot be sent to an engine: use LoRA on linear layers.")


def _conv1d() -> type[nn.Module]:
    from transformers.pytorch_utils import Conv1D

    return Conv1D
