"""Supervised fine-tuning: the next token of given texts."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from trl.data.packing import pack_dataset
from trl.data.tokenize import prepare_sft_dataset
from trl.errors import ConfigError, DataError
from trl.functional.reduce import reduce_step_token_mean
from trl.rollout.collate import Example
from trl.trainer.base import Mode, default_output_dir, refuse_unsupported
from trl.trainer.offline import OfflineTrainer, Rows
from trl.trainer.sft_config import SFTConfig
from trl.trainer.templates import tokenizer_for_training
from trl.types import RolloutBatch

IGNORED = -100
"""The label of a token that is not learnt."""


class SFTTrainer(OfflineTrainer):
    """Trains a language model to continue texts as they are.

    Examples of a batch are laid end to end, without padding, where the model's attention can keep them apart.

    Args:
        model: name or folder of a causal language model, or the model.
        args: the configuration; `SFTConfig()` with output in `<model name>-SFT` when not given.
        train_dataset: rows with `text`, `messages`, `prompt` and `completion`, or `input_ids` (and `labels`).
        eval_dataset: the same, or a dict of datasets.
        processing_class: the tokenizer; the one beside the model when not given.
        callbacks, optimizers: as in `transformers.Trainer`.
        formatting_func: makes a text of a row, in place of its columns.

    Raises:
        ConfigError, DataError, NotSupportedError: before training, with the row where one is at fault.
    """

    args: SFTConfig
    columns = ("input_ids", "labels", "seq_lengths")

    def __init__(
        self,
        model: str | PreTrainedModel,
        args: SFTConfig | None = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        compute_loss_func: Any = None,
        compute_metrics: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: Any = None,
        preprocess_logits_for_metrics: Any = None,
        quantization_config: Any = None,
        peft_config: Any = None,
        formatting_func: Callable[[dict[str, Any]], str] | None = None,
    ):
        refuse_unsupported(
            data_collator=data_collator,
            compute_loss_func=compute_loss_func,
            compute_metrics=compute_metrics,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            quantization_config=quantization_config,
            peft_config=peft_config,
        )
        self._formatting_func = formatting_func
        super().__init__(
            model,
            args or SFTConfig(output_dir=default_output_dir(model, "SFT")),
            processing_class=processing_class,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            callbacks=callbacks,
            optimizers=optimizers,
        )

    def ready_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
        """The tokenizer with the end-of-sequence token and chat template of the options."""
        return tokenizer_for_training(tokenizer, self.args)

    def prepare_dataset(self, dataset: Any, mode: Mode) -> Any:
        """Rows of token ids and labels, several examples to a row where they are packed."""
        args = self.args
        if args.skips_preparation:
            _check_prepared(dataset)
            return dataset
        packs = args.packing if mode == "train" else bool(args.eval_packing)
        tokenizer = tokenizer_for_training(self.processing_class, args, assistant_only=args.assistant_only_loss)
        prepared = prepare_sft_dataset(
            dataset,
            tokenizer,
            text_field=args.dataset_text_field,
            completion_only=args.completion_only_loss,
            assistant_only=args.assistant_only_loss,
            chat_template_kwargs=args.chat_template_kwargs,  # type: ignore[arg-type]  # the config made a dict of it
            formatting_func=self._formatting_func,
            max_length=None if packs else args.max_length,
            truncation_mode=args.truncation_mode,
            num_proc=args.dataset_num_proc,
            desc=f"tokens of the {mode} dataset",
        )
        if args.shuffle_dataset and mode == "train":
            prepared = prepared.shuffle(seed=args.seed)
        if not packs:
            return prepared
        assert args.max_length is not None  # the config made sure
        return pack_dataset(prepared, args.max_length, args.packing_strategy)

    def examples(self, rows: Rows) -> list[Example]:
        """Each document, from its beginning to the last token that is learnt."""
        documents = [document for row in rows for document in _documents(row)]
        if found := [example for ids, labels in documents if (example := _example(ids, labels)) is not None]:
            return found
        # A batch in which nothing is learnt still goes through the model, for nothing.
        token = next((ids[:1] for ids, _ in documents if ids), None)
        if token is None:
            raise DataError(f"A batch of {len(rows)} rows has no tokens (`input_ids` are empty): remove such rows.")
        return [Example(token, token, [False])]

    def loss(self, model: nn.Module, batch: RolloutBatch, mode: Mode) -> Tensor:
        """Mean negative log-likelihood over the learnt tokens of the optimizer step; with `dft` each is weighted by the
        token's probability, without gradient (arXiv:2508.05629, eq. 9).
        """
        assert batch.norm is not None
        out = self.forward_logps(model, batch, statistics=("is_top1",))
        terms = -out.logps
        if self.args.loss_type == "dft":
            terms = terms * out.logps.detach().exp()
        metrics, mask = self.metrics[mode], batch.loss_mask
        count = mask.sum()
        metrics.ratio("entropy", (out.entropies.detach() * mask).sum(), count)
        metrics.ratio("mean_token_accuracy", (out.statistics["is_top1"] * mask).sum(), count)
        loss = reduce_step_token_mean(terms, mask, batch.seq_of_token, batch.norm)
        return self.with_balance_loss(loss, out, batch, mode)

    def eval_weight(self, batch: RolloutBatch) -> float:
        """How much the loss of an evaluation batch counts beside others': its learnt tokens."""
        return float(batch.loss_mask.sum())


def _check_prepared(dataset: Any) -> None:
    """Raises `ConfigError` where rows that are said to be tokens do not tell what is learnt."""
    import datasets

    if not isinstance(dataset, (datasets.Dataset, datasets.IterableDataset, list)):
        return  # its rows are known only when they are read
    columns = set(next(iter(dataset), {"input_ids"}))
    advice = "leave `skip_prepare_dataset` out, and it is made"
    if "input_ids" not in columns:
        raise ConfigError(f"The rows have no `input_ids` (they have {', '.join(sorted(columns))}): {advice}.")
    if "labels" not in columns and (masks := columns & {"completion_mask", "assistant_masks"}):
        raise ConfigError(f"The rows have `{min(masks)}` and no `labels`, which alone are read: {advice} of the mask.")


def _documents(row: dict[str, Any]) -> Iterator[tuple[list[int], list[int]]]:
    """Token ids and labels of each document of a row.

    Raises:
        DataError: columns that do not fit together.
    """
    ids = _as_list(row["input_ids"])
    labels = ids if row.get("labels") is None else _as_list(row["labels"])
    lengths = [len(ids)] if row.get("seq_lengths") is None else _as_list(row["seq_lengths"])
    if not len(labels) == len(ids) == sum(lengths):
        raise DataError(
            f"A row has {len(ids)} `input_ids`, {len(labels)} `labels` and documents (`seq_lengths`) of {sum(lengths)} "
            "tokens in sum: these have to be equal."
        )
    start = 0
    for length in lengths:
        yield ids[start : start + length], labels[start : start + length]
        start += length


def _as_list(values: Any) -> list[int]:
    """The numbers of a list, tensor or array."""
    return values if isinstance(values, list) else [int(value) for value in values]


def _example(ids: list[int], labels: list[int]) -> Example | None:
    """The document as what is read and what is learnt behind it; None where nothing is learnt.

    Its first token has nothing before it to be predicted from.
    """
    learnt = [label != IGNORED for label in labels]
    learnt[:1] = [False]
    if not any(learnt):
        return None
    first = learnt.index(True)
    end = len(learnt) - learnt[::-1].index(True)
    return Example(ids[:first], ids[first:end], learnt[first:end])
