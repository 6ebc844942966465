"""What differs between a plain model and one wrapped for training on several devices."""

from typing import cast

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel


def unwrap(model: nn.Module) -> PreTrainedModel:
    """The model itself."""
    while isinstance(model, DistributedDataParallel):
        model = model.module
    return cast(PreTrainedModel, model)
