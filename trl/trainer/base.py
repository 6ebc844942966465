"""What all trainers share: set-up in named steps, metrics, and what a checkpoint holds beside transformers' part."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainerCallback, set_seed
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from trl.errors import ConfigError
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
        set_seed(args.seed)
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
        self._signature_columns = ["prompt", "image", "images"]

    def no_sync(self, model: nn.Module, last: bool) -> AbstractContextManager:
        """Holds gradients back until the last micro-batch of an optimizer step."""
        if last or not self.accelerator.sync_gradients:
            return nullcontext()
        return self.accelerator.no_sync(model)

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Adds the metrics gathered since the last log; `evaluate` returns them too."""
        prefix = next((key.removesuffix("_runtime") for key in logs if key.endswith("_runtime")), None)
        if prefix is None or prefix.startswith("eval"):
            mode: Mode = "train" if prefix is None else "eval"
            gather: Callable[[torch.Tensor], torch.Tensor] = self.processes.gather
            own = self.metrics[mode].flush(gather)
            users = self.user_metrics[mode].flush(gather)
            own.update({f"logged/{name}" if name in own else name: value for name, value in users.items()})
            logs.update({f"{prefix}_{name}" if prefix else name: value for name, value in own.items()})
        super().log(logs, start_time)

    def extra_state(self) -> dict[str, Any]:
        """What a checkpoint of this process holds beside transformers' part: plain containers of tensors."""
        return {}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Takes what `extra_state` gave."""

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super()._save_checkpoint(*args, **kwargs)
        folder = Path(self._get_output_dir(trial=None)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if self.args.save_only_model or not folder.is_dir():
            return
        torch.save(self.extra_state(), folder / _state_file(self.args.process_index))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *args: Any, **kwargs: Any) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, *args, **kwargs)
        path = Path(resume_from_checkpoint) / _state_file(self.args.process_index)
        if path.is_file():
            self._resumed_state = torch.load(path, map_location="cpu", weights_only=True)


def _state_file(rank: int) -> str:
    return f"rollout_state_{rank}.pt"


def default_output_dir(model: str | PreTrainedModel, method: str) -> str:
    """`<model name>-<method>`."""
    name = model if isinstance(model, str) else model.config._name_or_path or "model"
    return f"{name.rstrip('/').split('/')[-1]}-{method}"


def column_lists(rows: Sequence[dict[str, Any]], without: Sequence[str]) -> dict[str, list[Any]]:
    """The rows' columns as lists, but those named."""
    return {name: [row.get(name) for row in rows] for name in rows[0] if name not in without}
