"""What all trainers share: set-up in named steps, metrics, and what a checkpoint holds beside transformers' part."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainerCallback, set_seed
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from trl.errors import ConfigError, NotSupportedError
from trl.generation.dispatch import Processes
from trl.models.forward import supports_packing
from trl.models.load import disable_dropout, load_policy, load_tokenizer, use_packed_attention
from trl.trainer.config import TrainerConfig
from trl.trainer.metrics import Metrics

Mode = Literal["train", "eval"]


def identity(rows: Any) -> Any:
    """The rows as they are: trainers that generate make tensors later."""
    return rows


class BaseTrainer(Trainer):
    """A `transformers.Trainer` whose subclasses bring a loss over flat batches."""

    args: Any
    model: PreTrainedModel
    processing_class: PreTrainedTokenizerBase
    optimizer: Any
    train_dataset: Any
    eval_dataset: Any

    def __init__(
        self,
        model: str | PreTrainedModel,
        args: TrainerConfig,
        *,
        processing_class: PreTrainedTokenizerBase | None,
        train_dataset: Any,
        eval_dataset: Any,
        callbacks: list[TrainerCallback] | None,
        optimizers: tuple[Any, Any],
    ):
        if args.n_gpu > 1:
            raise ConfigError(
                f"{args.n_gpu} GPUs are visible to one process, which would copy the model to each for every step: "
                "start one process per GPU with `accelerate launch`, or show it one by CUDA_VISIBLE_DEVICES."
            )
        set_seed(args.seed)
        # The LM head is applied outside of the model's forward pass: a search would take its weights for unused.
        if args.ddp_find_unused_parameters and args.world_size > 1:
            raise ConfigError("`ddp_find_unused_parameters=True` cannot be used with this trainer: leave it out.")
        args.ddp_find_unused_parameters = False
        policy = self._ready_policy(model, args)
        tokenizer = processing_class or load_tokenizer(policy, args.trust_remote_code)  # type: ignore[attr-defined]
        self.metrics: dict[Mode, Metrics] = {"train": Metrics(), "eval": Metrics()}
        self.user_metrics: dict[Mode, Metrics] = {"train": Metrics(), "eval": Metrics()}
        super().__init__(
            model=policy,
            args=args,
            data_collator=identity,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=tokenizer,
            callbacks=callbacks,
            optimizers=optimizers,
        )
        self.processes = Processes(self.accelerator)
        self.packed = supports_packing(policy)

    @staticmethod
    def _ready_policy(model: str | PreTrainedModel, args: Any) -> PreTrainedModel:
        """The model, loaded where it is a name, with the attention and dropout that the arguments ask for."""
        if isinstance(model, str):
            policy = load_policy(model, args.model_init_kwargs, args.trust_remote_code)
        elif args.model_init_kwargs:
            raise ConfigError(
                "`model_init_kwargs` is for a model given by name, and this one is loaded already: leave it out, or "
                "pass the name."
            )
        else:
            policy = model
        use_packed_attention(policy)
        if args.disable_dropout:
            disable_dropout(policy)
        return policy

    def _set_signature_columns_if_needed(self) -> None:
        self._signature_columns = ["prompt", "image", "images"]  # type: ignore[assignment]

    def compute_loss_context_manager(self) -> AbstractContextManager:  # type: ignore[override]  # no stack is needed
        """Mixed precision for the whole loss: the LM head, and models that are not trained, run in it too."""
        return self.accelerator.autocast()

    def no_sync(self, model: nn.Module, last: bool) -> AbstractContextManager:
        """Holds gradients back until the last micro-batch of an optimizer step."""
        if last or not self.accelerator.sync_gradients:
            return nullcontext()
        return self.accelerator.no_sync(model)

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Adds the metrics gathered since the last log; `evaluate` returns them too."""
        prefix = log_prefix(logs)
        if prefix != "train":
            mode, before = mode_of(prefix), f"{prefix}_" if prefix else ""
            logs.update({before + n: value for n, value in self.metrics[mode].flush(self.processes.gather).items()})
            users = self.user_metrics[mode].flush(self.processes.gather)
            taken = {*logs, *_NAMES_OF_TRANSFORMERS}
            logs.update({f"{before}logged/{n}" if before + n in taken else before + n: v for n, v in users.items()})
        super().log(logs, start_time)

    def extra_state(self) -> dict[str, Any]:
        """What a checkpoint of this process holds beside transformers' part: plain containers of tensors."""
        return {}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Takes what `extra_state` gave."""

    def save_shared_state(self, folder: Path) -> None:
        """Adds to a checkpoint, in the first process, what is the same in all of them."""

    def load_shared_state(self, folder: Path) -> None:
        """Takes, in every process, what `save_shared_state` wrote, if it is there."""

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super()._save_checkpoint(*args, **kwargs)
        folder = Path(self._get_output_dir(trial=None)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if self.args.save_only_model or not folder.is_dir():
            return
        torch.save(self.extra_state(), folder / _state_file(self.args.process_index))
        if self.args.process_index == 0:
            self.save_shared_state(folder)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *args: Any, **kwargs: Any) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, *args, **kwargs)
        folder = Path(resume_from_checkpoint)
        self.load_shared_state(folder)
        path = folder / _state_file(self.args.process_index)
        if path.is_file():
            self._resumed_state = torch.load(path, map_location="cpu", weights_only=True)


def log_prefix(logs: dict[str, Any]) -> str | None:
    """What the names of these logs begin with: None for those of a training step, "train" for those of its end, else
    the prefix of an evaluation.
    """
    return next((key.removesuffix("_runtime") for key in logs if key.endswith("_runtime")), None)


def mode_of(prefix: str | None) -> Mode:
    """Whose metrics go with logs of this prefix."""
    return "train" if prefix in (None, "train") else "eval"


# Added to the logs after ours.
_NAMES_OF_TRANSFORMERS = ("epoch", "step", "num_input_tokens_seen", "total_flos")


def _state_file(rank: int) -> str:
    return f"rollout_state_{rank}.pt"


def default_output_dir(model: str | PreTrainedModel, method: str) -> str:
    """`<model name>-<method>`."""
    name = model if isinstance(model, str) else model.config._name_or_path or "model"
    return f"{name.rstrip('/').split('/')[-1]}-{method}"


def refuse_unsupported(**arguments: Any) -> None:
    """Raises for an argument of a trainer whose capability this version does not have.

    Raises:
        NotSupportedError: one of them is given.
    """
    for name, value in arguments.items():
        if value:
            raise NotSupportedError(f"`{name}` is not supported yet: leave it out.")


def column_lists(rows: Sequence[dict[str, Any]], without: Sequence[str]) -> dict[str, list[Any]]:
    """The rows' columns as lists, but those named."""
    names = dict.fromkeys(name for row in rows for name in row if name not in without)
    return {name: [row.get(name) for row in rows] for name in names}
