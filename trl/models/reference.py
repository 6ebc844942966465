"""Models beside the policy that are asked and not trained: a reference, a teacher."""

import copy

import torch
from torch import nn
from transformers import PreTrainedModel

from trl.models.load import use_packed_attention


def frozen_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of the model as it is now, in evaluation mode, without gradients."""
    reference = copy.deepcopy(model)
    reference.requires_grad_(False)
    return reference.eval()


def frozen(model: PreTrainedModel) -> PreTrainedModel:
    """The model itself, in evaluation mode, without gradients, its attention packed where it can be."""
    use_packed_attention(model)
    model.requires_grad_(False)
    return model.eval()


@torch.no_grad()
def mix_in(reference: nn.Module, policy: nn.Module, alpha: float) -> None:
    """`reference <- (1 - alpha) * reference + alpha * policy` (TR-DPO, arXiv:2404.09656, eq. 5)."""
    for ref, new in zip(reference.parameters(), policy.parameters(), strict=True):
        ref.lerp_(new.to(ref.dtype), alpha)
