"""The reference model: a frozen copy of the policy at the start, and its synchronisation."""

import copy

import torch
from torch import nn
from transformers import PreTrainedModel


def frozen_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of the model as it is now, in evaluation mode, without gradients."""
    reference = copy.deepcopy(model)
    reference.requires_grad_(False)
    return reference.eval()


@torch.no_grad()
def mix_in(reference: nn.Module, policy: nn.Module, alpha: float) -> None:
    """`reference <- (1 - alpha) * reference + alpha * policy` (TR-DPO, arXiv:2404.09656, eq. 5)."""
    for ref, new in zip(reference.parameters(), policy.parameters(), strict=True):
        ref.lerp_(new.to(ref.dtype), alpha)
