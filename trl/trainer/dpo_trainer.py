"""Direct preference optimisation (DPO, arXiv:2305.18290) and the losses that grew out of it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from trl.data.preference_rows import prepare_preference_dataset
from trl.functional.preference import Completions, Pairs, mixture, scale_tails, wpo_weights
from trl.functional.reduce import segment_sum
from trl.models.forward import TokenLogps
from trl.rollout.collate import Example
from trl.trainer.base import Mode, default_output_dir, refuse_unsupported
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.offline import Rows
from trl.trainer.preference import REFERENCE_LOGPS, PreferenceTrainer
from trl.types import Normalizer, RolloutBatch


class DPOTrainer(PreferenceTrainer):
    """Trains a language model on pairs of completions, of which one is preferred.

    The prompt that the two share goes through the model once.

    Args:
        model: name or folder of a causal language model, or the model.
        ref_model: the reference model, by name or as a model; a copy of `model` as it is now when not given.
        args: the configuration; `DPOConfig()` with output in `<model name>-DPO` when not given.
        train_dataset: rows with `chosen` and `rejected`, texts or messages, and best with their `prompt`.
        eval_dataset: the same, or a dict of datasets.
        processing_class: the tokenizer; the one beside the model when not given.
        callbacks, optimizers: as in `transformers.Trainer`.

    Raises:
        ConfigError, DataError, NotSupportedError: before training, with the row where one is at fault.
    """

    args: DPOConfig
    columns = ("prompt_ids", "chosen_ids", "rejected_ids", REFERENCE_LOGPS)
    prepare_rows = staticmethod(prepare_preference_dataset)

    def __init__(
        self,
        model: str | PreTrainedModel,
        ref_model: str | PreTrainedModel | None = None,
        args: DPOConfig | None = None,
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
        self._chosen_tokens: dict[Mode, float] = {}
        super().__init__(
            model,
            args or DPOConfig(output_dir=default_output_dir(model, "DPO")),
            processing_class=processing_class,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            callbacks=callbacks,
            optimizers=optimizers,
        )

    def examples(self, rows: Rows) -> list[Example]:
        """Chosen and rejected completion of each row, in turn."""
        return [
            Example(row["prompt_ids"], row[name], unit=index)
            for index, row in enumerate(rows)
            for name in ("chosen_ids", "rejected_ids")
        ]

    def loss(self, model: nn.Module, batch: RolloutBatch, mode: Mode) -> Tensor:
        """The losses of each pair, added up with their weights, averaged over the pairs of the optimizer step."""
        args, seq_of_token, count = self.args, batch.seq_of_token, batch.num_sequences
        assert batch.norm is not None
        statistics = ["is_top1", "mean_logits", *(["log_sum_sq_probs"] if args.use_weighting else [])]
        out = self.forward_logps(model, batch, statistics=statistics)
        mask = batch.loss_mask
        # The two of a pair have the same number; the chosen one comes first.
        chosen, rejected = torch.argsort(batch.units, stable=True).to(batch.device).view(-1, 2).unbind(1)
        lengths = segment_sum(mask.to(out.logps), seq_of_token, count)
        # A repeated pair that only keeps processes in step has no loss token.
        in_loss = lengths[chosen] + lengths[rejected] > 0
        chosen, rejected = chosen[in_loss], rejected[in_loss]
        ref_logps = out.logps.detach() if batch.ref_logps is None else batch.ref_logps
        difference, ref_terms = out.logps - ref_logps, ref_logps
        if args.ld_alpha is not None:
            shared = torch.zeros_like(lengths)
            shared[chosen] = shared[rejected] = torch.minimum(lengths[chosen], lengths[rejected])
            difference, ref_terms = (
                scale_tails(values, mask, seq_of_token, shared, args.ld_alpha) for values in (difference, ref_logps)
            )
        completions = Completions(
            segment_sum(difference * mask, seq_of_token, count),
            lengths,
            ref_logps=segment_sum(ref_terms * mask, seq_of_token, count),
            nll=segment_sum(-out.logps * mask, seq_of_token, count) / self._mean_chosen_length(batch.norm, mode),
        )
        pairs = Pairs(completions.select(chosen), completions.select(rejected))
        losses, _ = mixture(args.loss_type, args.loss_weights, pairs, args.pair_options)
        if args.use_weighting:
            weights = wpo_weights(out.logps, out.statistics["log_sum_sq_probs"], mask, seq_of_token, count)
            losses = losses * weights[chosen] * weights[rejected]
        self._record(out, batch, completions.log_ratios.detach(), chosen, rejected, mode)
        return self.with_balance_loss(losses.sum() / (batch.norm.sequences / 2), out, batch, mode)

    def _normalizer(self, batches: Sequence[RolloutBatch]) -> Normalizer:
        # The rows are as they were collated: chosen and rejected in turn.
        chosen = sum(float(batch.completion_lengths[::2].sum()) for batch in batches)
        total = self.processes.total(torch.tensor([chosen], dtype=torch.float64)).item()
        self._chosen_tokens["train"] = total / self.processes.count
        return super()._normalizer(batches)

    def _eval_normalizer(self, batch: RolloutBatch) -> Normalizer:
        self._chosen_tokens["eval"] = float(batch.completion_lengths[::2].sum())
        return super()._eval_normalizer(batch)

    def _mean_chosen_length(self, norm: Normalizer, mode: Mode) -> float:
        """Mean length of the chosen completions of the optimizer step: with it `sft` weighs their tokens alike."""
        return max(self._chosen_tokens[mode], 1.0) / (norm.sequences / 2)

    @torch.no_grad()
    def _record(
        self, out: TokenLogps, batch: RolloutBatch, log_ratios: Tensor, chosen: Tensor, rejected: Tensor, mode: Mode
    ) -> None:
        self.record_choice(out, batch, log_ratios, chosen, rejected, mode)
        metrics, rewards = self.metrics[mode], self.args.beta * log_ratios
        metrics.mean("rewards/accuracies", (rewards[chosen] > rewards[rejected]).double())
        metrics.mean("rewards/margins", rewards[chosen] - rewards[rejected])
        of_chosen = batch.loss_mask & torch.isin(batch.seq_of_token, chosen)
        metrics.ratio("mean_token_accuracy", (out.statistics["is_top1"] * of_chosen).sum(), of_chosen.sum())
