"""What the trainers share that hold a policy to a reference on fixed data: DPO and KTO."""

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trl.errors import ConfigError
from trl.functional.reduce import segment_mean, segment_sum
from trl.models.forward import TokenLogps
from trl.trainer.base import Mode
from trl.trainer.offline import OfflineTrainer, Rows
from trl.trainer.prompt_datasets import is_stream
from trl.types import RolloutBatch

REFERENCE_LOGPS = "ref_logps"
"""Column of the reference model's log-probs of a row's completions, one after the other."""


class PreferenceTrainer(OfflineTrainer):
    """An `OfflineTrainer` whose reference model may have scored the data beforehand."""

    prepare_rows: Callable[..., Any]
    """From rows to those with `self.columns`."""

    def prepare_dataset(self, dataset: Any, mode: Mode) -> Any:
        """Rows of the token ids of prompts and completions."""
        return self.prepare_rows(
            dataset,
            self.processing_class,
            chat_template_kwargs=self.args.chat_template_kwargs,
            max_length=self.args.max_length,
            truncation_mode=self.args.truncation_mode,
            num_proc=self.args.dataset_num_proc,
            desc=f"tokens of the {mode} dataset",
        )

    def prepare_models(self, policy: PreTrainedModel) -> None:
        """The reference model; once it has scored the data, where it is to, it is given up."""
        super().prepare_models(policy)
        if not self.args.precompute_ref_log_probs or self.ref_model is None:
            return
        self.train_dataset = self._scored(self.train_dataset)
        if isinstance(self.eval_dataset, dict):
            self.eval_dataset = {name: self._scored(part) for name, part in self.eval_dataset.items()}
        elif self.eval_dataset is not None:
            self.eval_dataset = self._scored(self.eval_dataset)
        if not self.reference_stays:
            self.ref_model = None

    @property
    def reference_stays(self) -> bool:
        """Whether the reference model is asked about more than the data."""
        return False

    @property
    def reference_moves(self) -> bool:
        """Whether the reference model follows the policy."""
        return self.args.sync_ref_model

    def add_columns(self, batch: RolloutBatch, rows: Rows) -> None:
        """Adds the reference's log-probs where the rows have them."""
        if rows and REFERENCE_LOGPS in rows[0]:
            told = [logp for row in rows for logp in row[REFERENCE_LOGPS]]
            batch.ref_logps = torch.tensor(told, dtype=torch.float32, device=batch.device)

    @torch.no_grad()
    def record_choice(
        self, out: TokenLogps, batch: RolloutBatch, log_ratios: Tensor, chosen: Tensor, rejected: Tensor, mode: Mode
    ) -> None:
        """Records entropy, and apart for chosen and rejected completions implicit rewards, log-probs and logits.

        Args:
            out: with `mean_logits`, which are averaged over tokens.
            log_ratios: `[N]` of whole completions.
            chosen, rejected: indices of sequences in the loss.
        """
        metrics, mask = self.metrics[mode], batch.loss_mask
        per_sequence = batch.seq_of_token, batch.num_sequences
        rewards = self.args.beta * log_ratios
        logps = segment_sum(out.logps * mask, *per_sequence)
        mean_logits = segment_mean(out.statistics["mean_logits"], mask, *per_sequence)
        lengths = segment_sum(mask.to(out.logps), *per_sequence)
        for name, which in (("chosen", chosen), ("rejected", rejected)):
            metrics.mean(f"rewards/{name}", rewards[which])
            metrics.mean(f"logps/{name}", logps[which])
            metrics.mean(f"logits/{name}", mean_logits[which], weights=lengths[which])
        metrics.ratio("entropy", (out.entropies * mask).sum(), mask.sum())

    def _scored(self, dataset: Any) -> Any:
        """The dataset with the reference's log-probs; from the cache, where this model has scored these rows."""
        if is_stream(dataset):
            raise ConfigError("`precompute_ref_log_probs=True` reads the dataset twice, and this one is a stream.")
        model = self.ref_model
        assert model is not None
        size = self.args.precompute_ref_batch_size or self.args.per_device_train_batch_size

        def score(columns: dict[str, list[Any]]) -> dict[str, list[list[float]]]:
            rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
            batch = self.collate(rows)
            logps = self.frozen_logps(model, batch).logps.cpu()
            counts = batch.completion_lengths.view(len(rows), -1).sum(1).tolist()
            return {REFERENCE_LOGPS: [part.tolist() for part in logps.split(counts)]}

        args = self.args
        read = f"{dataset._fingerprint} {weights_hash(model.parameters())} {model.config.to_json_string()}"
        precision = f"{args.bf16} {args.fp16} {args.cast_lm_head_to_fp32}"
        fingerprint = hashlib.sha256(f"{read} {precision}".encode()).hexdigest()
        return dataset.map(score, batched=True, batch_size=size, new_fingerprint=fingerprint[:32], desc="reference")


def weights_hash(weights: Iterable[nn.Parameter]) -> str:
    """A digest of the weights: equal for equal ones."""
    digest = hashlib.sha256()
    for weight in weights:
        digest.update(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
