"""A repair of vLLM models on the CPU."""

from torch import nn


def repack_tied_heads(model: nn.Module) -> None:
    """Renews what vLLM packed of an LM head that is tied to the embedding.

    Such a head receives no weight of its own, so a reload does not repack it, and on the CPU its product would go on
    with the old packed copy. On a GPU nothing is packed, and nothing happens here.
    """
    for module in model.modules():
        if any(cls.__name__ == "ParallelLMHead" for cls in type(module).__mro__) and "cpu_linear" in vars(module):
            module.quant_method.process_weights_after_loading(module)  # type: ignore[operator, union-attr]
