"""Kahneman-Tversky optimisation (KTO, arXiv:2402.01306): completions that are each good or not."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from trl.data.preference_rows import prepare_unpaired_dataset
from trl.functional.reduce import segment_sum
from trl.functional.unpaired import Judged, unpaired_losses
from trl.rollout.collate import Example
from trl.trainer.base import Mode, default_output_dir, refuse_unsupported
from trl.trainer.kto_config import KTOConfig
from trl.trainer.offline import Rows
from trl.trainer.preference import REFERENCE_LOGPS, PreferenceTrainer
from trl.types import RolloutBatch


class KTOTrainer(PreferenceTrainer):
    """Trains a language model on completions that are labelled good or bad.

    Args:
        model: name or folder of a causal language model, or the model.
        ref_model: the reference model, by name or as a model; a copy of `model` as it is now when not given.
        args: the configuration; `KTOConfig()` with output in `<model name>-KTO` when not given.
        train_dataset: rows with `prompt`, `completion` and `label`; rows with `chosen` and `rejected` become two.
        eval_dataset: the same, or a dict of datasets.
        processing_class: the tokenizer; the one beside the model when not given.
        callbacks, optimizers: as in `transformers.Trainer`.

    Raises:
        ConfigError, DataError, NotSupportedError: before training, with the row where one is at fault.
    """

    args: KTOConfig
    columns = ("prompt_ids", "completion_ids", "label", REFERENCE_LOGPS)
    prepare_rows = staticmethod(prepare_unpaired_dataset)

    def __init__(
        self,
        model: str | PreTrainedModel,
        ref_model: str | PreTrainedModel | None = None,
        args: KTOConfig | None = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        compute_metrics: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
    ):
        refuse_unsupported(
            data_collator=data_collator,
            compute_metrics=compute_metrics,
            quantization_config=quantization_config,
            peft_config=peft_config,
        )
        self.given_reference = ref_model
        super().__init__(
            model,
            args or KTOConfig(output_dir=default_output_dir(model, "KTO")),
            processing_class=processing_class,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            callbacks=callbacks,
            optimizers=optimizers,
        )

    @property
    def reference_stays(self) -> bool:
        """The KL estimate asks it at every step."""
        return self.args.needs_kl

    def examples(self, rows: Rows) -> list[Example]:
        """The completion of each row."""
        return [Example(row["prompt_ids"], row["completion_ids"]) for row in rows]

    def add_columns(self, batch: RolloutBatch, rows: Rows) -> None:
        """Adds the labels, and where the loss needs it the divergence from the reference on this batch."""
        super().add_columns(batch, rows)
        batch.advantages = torch.tensor([1.0 if row["label"] else -1.0 for row in rows], device=batch.device)

    def add_reference_logps(self, batch: RolloutBatch) -> None:
        """Also estimates the divergence from the reference, on completions behind prompts that are not theirs."""
        super().add_reference_logps(batch)
        if not self.args.needs_kl:
            return
        assert self.ref_model is not None
        other = mismatched(batch)
        difference = self.frozen_logps(self.model, other).logps - self.frozen_logps(self.ref_model, other).logps
        kl = segment_sum(difference * other.loss_mask, other.seq_of_token, other.num_sequences).mean()
        kl = (self.processes.total(kl[None].cpu()) / self.processes.count).clamp(min=0)
        batch.scores = kl.expand(batch.num_sequences).to(batch.device)
        self.metrics["train" if self.model.training else "eval"].mean("kl", kl)

    def loss(self, model: nn.Module, batch: RolloutBatch, mode: Mode) -> Tensor:
        """The loss of each completion, averaged over the completions of the optimizer step."""
        assert batch.norm is not None
        assert batch.advantages is not None
        assert batch.ref_logps is not None
        out = self.forward_logps(model, batch, statistics=("mean_logits",))
        mask, seq_of_token, count = batch.loss_mask, batch.seq_of_token, batch.num_sequences
        desirable = batch.advantages > 0
        log_ratios = segment_sum((out.logps - batch.ref_logps) * mask, seq_of_token, count)
        kl = None if batch.scores is None else batch.scores[0]
        losses = unpaired_losses(self.args.loss_type, Judged(log_ratios, desirable, kl), self.args.unpaired_options)
        # A repeated sequence that only keeps processes in step has no loss token.
        real = segment_sum(mask.to(losses), seq_of_token, count) > 0
        chosen, rejected = (torch.nonzero(real & kind).flatten() for kind in (desirable, ~desirable))
        self.record_choice(out, batch, log_ratios.detach(), chosen, rejected, mode)
        return self.with_balance_loss((losses * real).sum() / batch.norm.sequences, out, batch, mode)


def mismatched(batch: RolloutBatch) -> RolloutBatch:
    """The batch with each completion behind the prompt before its own, the first one behind the last."""
    following = torch.arange(batch.num_sequences).roll(-1)
    tokens = batch.tokens_of(following)
    return replace(
        batch,
        completion_ids=batch.completion_ids[tokens],
        completion_lengths=batch.completion_lengths[following],
        loss_mask=batch.loss_mask[tokens],
        ref_logps=None,
    )
