"""The trainer of losses over flat batches: micro-batches, log-probs, frozen models, and the memory they take."""

import time
from abc import abstractmethod
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trl.errors import ConfigError
from trl.models.forward import TokenLogps, supports_packing, token_logps
from trl.models.load import load_policy
from trl.models.reference import frozen, frozen_copy
from trl.rollout.micro_batch import pieces, split
from trl.trainer.base import BaseTrainer, Mode, log_prefix
from trl.trainer.callbacks import SyncRefModelCallback
from trl.trainer.memory import MemoryGuard
from trl.types import RolloutBatch

REFERENCE_FILE = "reference_model.pt"


class FlatBatchTrainer(BaseTrainer):
    """A `BaseTrainer` whose method brings `loss`, which says what a micro-batch adds to the optimizer step's loss."""

    memory: MemoryGuard
    given_reference: str | PreTrainedModel | None = None
    ref_model: PreTrainedModel | None = None
    reference_packed = False
    _step_seconds = 0.0

    @abstractmethod
    def loss(self, model: nn.Module, batch: RolloutBatch, mode: Mode) -> Tensor:
        """Scalar: what this micro-batch adds to the loss of the optimizer step."""

    @property
    def loss_temperature(self) -> float:
        """What divides the logits in the loss."""
        return 1.0

    def active_sequences(self, batch: RolloutBatch) -> Tensor:
        """`[N]` bool, on the CPU: sequences with a term of the loss that is not zero, and the others of their unit."""
        units = batch.units
        unit_of_token = torch.repeat_interleave(units, batch.completion_lengths)
        tokens = torch.zeros(int(units.max()) + 1, dtype=torch.long)
        return tokens.index_add(0, unit_of_token, batch.loss_mask.long().cpu())[units] > 0

    def eval_weight(self, batch: RolloutBatch) -> float:
        """How much the loss of an evaluation batch counts beside others': its sequences."""
        return float(batch.num_sequences)

    # ---- the models beside the policy ----

    def prepare_models(self, policy: PreTrainedModel) -> None:
        """Makes and places the models beside the policy, before an engine takes its share of the memory."""
        self.ref_model = self.make_reference(policy)
        self.reference_packed = self.ref_model is not None and supports_packing(self.ref_model)

    def make_reference(self, policy: PreTrainedModel) -> PreTrainedModel | None:
        """The reference model, where the loss needs one: that given, or a copy of the policy as it is now."""
        if not self.args.needs_reference:
            return None
        reference = self._given_reference(policy) or frozen_copy(policy)
        reference.to(self.accelerator.device)
        if self.reference_moves:
            self.add_callback(SyncRefModelCallback(reference, self.accelerator))
        return reference

    def _given_reference(self, policy: PreTrainedModel) -> PreTrainedModel | None:
        """The reference model that the user gave, as it is asked.

        Raises:
            ConfigError: it has another vocabulary, or is the policy.
        """
        given = self.given_reference
        if given is None:
            return None
        if isinstance(given, str):
            given = load_policy(given, self.args.model_init_kwargs, self.args.trust_remote_code)
        if given is policy:
            raise ConfigError("`ref_model` is the model that is trained: leave it out, and a copy is made.")
        own, other = (model.config.get_text_config().vocab_size for model in (policy, given))
        if own != other:
            raise ConfigError(
                f"`ref_model` must have the vocabulary of `model` (got {other} and {own} tokens): it is to score the "
                "same completions."
            )
        return frozen(given)

    @property
    def reference_moves(self) -> bool:
        """Whether the reference model follows the policy."""
        return False

    def save_shared_state(self, folder: Path) -> None:
        """The reference model, where it moves."""
        if self.reference_moves and self.ref_model is not None:
            torch.save(self.ref_model.state_dict(), folder / REFERENCE_FILE)

    def load_shared_state(self, folder: Path) -> None:
        """The reference model as it was."""
        if self.reference_moves and self.ref_model is not None and (folder / REFERENCE_FILE).is_file():
            self.ref_model.load_state_dict(torch.load(folder / REFERENCE_FILE, map_location="cpu", weights_only=True))

    @property
    def frozen_models(self) -> list[PreTrainedModel]:
        """The models beside the policy that the loss looks at."""
        return [] if self.ref_model is None else [self.ref_model]

    @property
    def frozen_bytes(self) -> int:
        """What the weights of these models take."""
        return sum(p.numel() * p.element_size() for model in self.frozen_models for p in model.parameters())

    # ---- a mixture of experts ----

    @cached_property
    def balance_coef(self) -> float:
        """The weight of a mixture-of-experts model's balance loss; 0 for other models."""
        config = self.accelerator.unwrap_model(self.model).config.get_text_config().to_dict()
        if "router_aux_loss_coef" not in config:
            return 0.0
        given = self.args.router_aux_loss_coef
        return float(config["router_aux_loss_coef"] if given is None else given)

    def forward_logps(self, model: nn.Module, batch: RolloutBatch, **options: Any) -> TokenLogps:
        """The log-probs to be trained, with the balance loss of a mixture of experts where it counts."""
        return self.token_logps(model, batch, with_aux_loss=self.balance_coef != 0.0, **options)

    def with_balance_loss(self, loss: Tensor, out: TokenLogps, batch: RolloutBatch, mode: Mode) -> Tensor:
        """The loss, plus this micro-batch's share of a mixture of experts' balance loss."""
        if out.aux_loss is None:
            return loss
        assert batch.norm is not None
        # A repeated sequence that only keeps processes in step has no loss token, and counts for nothing here too.
        counted = torch.bincount(batch.seq_of_token[batch.loss_mask], minlength=1).count_nonzero()
        self.metrics[mode].mean("aux_loss", out.aux_loss)
        return loss + self.balance_coef * out.aux_loss * counted / batch.norm.sequences

    # ---- log-probs ----

    def token_logps(self, model: nn.Module, batch: RolloutBatch, **options: Any) -> TokenLogps:
        """`models.forward.token_logps` with this run's settings."""
        packed = self.reference_packed if model is self.ref_model else self.packed
        settings = {"temperature": self.loss_temperature, "packed": packed}
        return token_logps(model, batch, **{**settings, "fp32_head": self.args.cast_lm_head_to_fp32, **options})

    def frozen_logps(self, model: nn.Module, batch: RolloutBatch, **options: Any) -> TokenLogps:
        """Log-probs and entropies of a batch without gradient, in micro-batches."""
        logps = torch.zeros(batch.num_tokens, device=batch.device)
        entropies = torch.zeros_like(logps)
        training = model.training
        # Dropout off: these are the numbers of the policy, not of a random thinning of it.
        model.eval()
        with self.memory.phase("score"), torch.no_grad(), self.compute_loss_context_manager():
            for piece in self._forward_pieces(batch):
                out = self.token_logps(model, batch.select(piece), **options)
                where = batch.tokens_of(piece)
                logps[where], entropies[where] = out.logps.float(), out.entropies.float()
        model.train(training)
        return TokenLogps(logps, entropies)

    def add_reference_logps(self, batch: RolloutBatch) -> None:
        """Adds the reference model's log-probs, where the loss needs them and they are not there yet."""
        if self.ref_model is not None and batch.ref_logps is None:
            batch.ref_logps = self.frozen_logps(self.ref_model, batch).logps

    @property
    def forward_rows(self) -> int | None:
        """Sequences of one forward pass without a token budget; None for all of a batch."""
        return None

    def _forward_pieces(self, batch: RolloutBatch) -> list[Tensor]:
        """The sequences by forward pass: none larger than the token budget or, without one, than `forward_rows`."""
        everything, budget = torch.arange(batch.num_sequences), self.args.max_tokens_per_micro_batch
        if budget is None and self.forward_rows is not None:
            return list(everything.split(self.forward_rows))
        return pieces(batch, everything, budget)

    # ---- one step ----

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers' `Trainer.train`, with memory that runs out explained."""
        with self.memory.phase("train"):
            return super().train(*args, **kwargs)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """Gradients of one micro-step; returns its part of the optimizer step's loss."""
        started = time.perf_counter()
        model.train()
        self.optimizer.train()
        batch: Any = self._prepare_inputs(inputs)
        micro_batches = self.micro_batches(batch, self.active_sequences(batch))
        total = torch.zeros((), device=self.accelerator.device)
        for i, micro_batch in enumerate(micro_batches):
            with self.no_sync(model, last=i == len(micro_batches) - 1), self.saved_activations():
                with self.compute_loss_context_manager():
                    loss = self.loss(model, micro_batch, "train")
                self.accelerator.backward(loss)
            total += loss.detach()
        self._step_seconds += time.perf_counter() - started
        if self.accelerator.sync_gradients:
            self.metrics["train"].mean("step_time", self._step_seconds)
            self._step_seconds = 0.0
            self.on_gradients_complete()
        return total

    def saved_activations(self) -> AbstractContextManager:
        """Where activations wait for the backward pass."""
        return nullcontext()

    def micro_batches(self, batch: RolloutBatch, active: Tensor) -> list[RolloutBatch]:
        """The active sequences, cut by the token budget; as many pieces on every process."""
        return split(batch, active, self.args.max_tokens_per_micro_batch, self.processes.largest)

    def on_gradients_complete(self) -> None:
        """Called once per optimizer step, when its last micro-step is done."""

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Logs with the metrics gathered, and the number of tokens so far."""
        if log_prefix(logs) is None:
            logs["num_tokens"] = self.state.num_input_tokens_seen
        super().log(logs, start_time)
