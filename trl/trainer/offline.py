"""The trainer of methods on fixed data: rows made tokens once, then flat batches of them.

A method brings `prepare_dataset` (rows to token ids), `examples` (what is learnt from some rows) and `loss` (what a
micro-batch adds).
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from trl.data.formats import get_dataset_column_names
from trl.errors import ConfigError, NotSupportedError
from trl.models.offload import get_act_offloading_ctx_manager
from trl.rollout.collate import Example, collate_examples
from trl.trainer.base import Mode
from trl.trainer.flat_batches import FlatBatchTrainer
from trl.trainer.memory import MemoryGuard
from trl.trainer.metrics import Metrics
from trl.trainer.prompt_datasets import is_stream, settings_for_streams
from trl.types import Normalizer, RolloutBatch

Rows = Sequence[dict[str, Any]]


class OfflineTrainer(FlatBatchTrainer):
    """Base of the trainers whose data are there before training."""

    columns: tuple[str, ...]
    """Of a prepared dataset."""

    def __init__(
        self,
        model: str | PreTrainedModel,
        args: Any,
        *,
        processing_class: PreTrainedTokenizerBase | None,
        train_dataset: Any,
        eval_dataset: Any,
        callbacks: list[TrainerCallback] | None,
        optimizers: tuple[Any, Any],
    ):
        if train_dataset is None:
            raise ConfigError("`train_dataset` is missing: pass a dataset.")
        for name, dataset in _named(train_dataset, eval_dataset):
            _refuse_images(name, dataset)
            if is_stream(dataset):
                settings_for_streams(args)
        super().__init__(
            model,
            args,
            processing_class=processing_class,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            callbacks=callbacks,
            optimizers=optimizers,
        )
        self.memory = MemoryGuard(None)
        self.processing_class = self.ready_tokenizer(self.processing_class)
        self.callback_handler.processing_class = self.processing_class
        with args.main_process_first(desc="preparing the dataset"):
            self.train_dataset = self.prepare_dataset(train_dataset, "train")
            if isinstance(eval_dataset, dict):
                self.eval_dataset = {name: self.prepare_dataset(part, "eval") for name, part in eval_dataset.items()}
            elif eval_dataset is not None:
                self.eval_dataset = self.prepare_dataset(eval_dataset, "eval")
        self.prepare_models(self.accelerator.unwrap_model(self.model))

    # ---- what a method brings ----

    def ready_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
        """The tokenizer that is saved with the model: a copy where options change the one given."""
        return tokenizer

    @abstractmethod
    def prepare_dataset(self, dataset: Any, mode: Mode) -> Any:
        """The dataset with the columns `self.columns`."""

    @abstractmethod
    def examples(self, rows: Rows) -> list[Example]:
        """What is learnt from these rows."""

    def add_columns(self, batch: RolloutBatch, rows: Rows) -> None:
        """Adds what the loss needs of the rows beside their tokens."""

    # ---- one step ----

    def collate(self, rows: Rows) -> RolloutBatch:
        """The flat batch of these rows."""
        batch = collate_examples(self.examples(rows), self.accelerator.device)
        self.add_columns(batch, rows)
        return batch

    def get_batch_samples(  # a batch is rows here
        self, epoch_iterator: Any, num_batches: int, device: torch.device
    ) -> tuple[list[RolloutBatch], None]:
        """The batches of one optimizer step, each with what its loss is divided by: counts over the whole step."""
        samples, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        if not samples:
            return [], None
        batches = [self.collate(rows) for rows in samples[:-1]]
        count = self.new_rows(samples[-1])
        last = self.collate(samples[-1][: max(count, 1)])
        norm = self._normalizer([*batches, last] if count else batches)
        if not count:
            last.loss_mask = torch.zeros_like(last.loss_mask)
        batches.append(last)
        for batch in batches:
            batch.norm = norm
        return batches, None

    def new_rows(self, rows: Rows) -> int:
        """How many of these rows count: those behind them repeat the beginning of the dataset.

        With them the last batch is filled up, so that every process has one. The end of a stream is not known, and
        all its rows count.
        """
        state = self.accelerator.gradient_state
        if self.processes.count == 1 or not state.end_of_dataloader or state.remainder <= 0:
            return len(rows)
        return min(max(state.remainder - self.args.process_index * len(rows), 0), len(rows))

    def _normalizer(self, batches: Sequence[RolloutBatch]) -> Normalizer:
        counts = [
            sum(float(b.loss_mask.sum()) for b in batches),
            float(sum(b.num_sequences for b in batches)),
            float(sum(b.num_tokens + len(b.prompt_ids) for b in batches)),
        ]
        tokens, sequences, seen = self.processes.total(torch.tensor([counts], dtype=torch.float64))[0].tolist()
        self.state.num_input_tokens_seen += int(seen)
        world = self.processes.count
        return Normalizer(sequences / world, tokens / world, tokens / world, max_length=0)

    def _eval_normalizer(self, batch: RolloutBatch) -> Normalizer:
        tokens = float(batch.loss_mask.sum())
        return Normalizer(float(batch.num_sequences), tokens, tokens, max_length=0)

    def saved_activations(self) -> AbstractContextManager:
        """Where activations wait for the backward pass: on the CPU, where they are to."""
        if not self.args.activation_offloading:
            return nullcontext()
        return get_act_offloading_ctx_manager(self.model)

    def floating_point_ops(self, inputs: Any) -> int:
        """Operations of one forward and backward pass, without those of attention: 6 for each weight and token."""
        batch: RolloutBatch = inputs
        weights = self.accelerator.unwrap_model(self.model).num_parameters(exclude_embeddings=True)
        return 6 * weights * (batch.num_tokens + len(batch.prompt_ids))

    def _prepare_inputs(self, inputs: Any) -> Any:
        self.add_reference_logps(inputs)
        return inputs

    def prediction_step(  # type: ignore[override]  # a batch is rows here
        self, model: nn.Module, inputs: Rows, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor, None, None]:
        """The loss of these rows."""
        count = self.new_rows(inputs)
        gathered = self.metrics["eval"]
        if not count:
            self.metrics["eval"] = Metrics()  # all processes compute, and what this one gets is forgotten
        batch = self.collate(inputs[: max(count, 1)])
        self.add_reference_logps(batch)
        batch.norm = self._eval_normalizer(batch)
        total = torch.zeros((), device=batch.device)
        with self.memory.phase("score"), torch.no_grad(), self.compute_loss_context_manager():
            for micro_batch in self.micro_batches(batch, torch.ones(batch.num_sequences, dtype=torch.bool)):
                total += self.loss(model, micro_batch, "eval").detach()
        # Weighted, where transformers would count the last, smaller batch as a whole one.
        self.metrics["eval"].mean("loss", total, weights=self.eval_weight(batch))
        self.metrics["eval"] = gathered
        return total, None, None

    def _set_signature_columns_if_needed(self) -> None:
        self._signature_columns = list(self.columns)  # type: ignore[assignment]


def _named(train_dataset: Any, eval_dataset: Any) -> Iterator[tuple[str, Any]]:
    """Every dataset, with the argument that it was given as."""
    yield "train_dataset", train_dataset
    if eval_dataset is not None:
        for part in eval_dataset.values() if isinstance(eval_dataset, dict) else [eval_dataset]:
            yield "eval_dataset", part


def _refuse_images(name: str, dataset: Any) -> None:
    import datasets

    if not isinstance(dataset, (datasets.Dataset, datasets.IterableDataset)):
        return
    if {"image", "images"} & set(get_dataset_column_names(dataset)):
        raise NotSupportedError(f"`{name}` has images, which are not supported yet: drop the column.")
