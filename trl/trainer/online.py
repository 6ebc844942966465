"""The trainer of online methods: prompts in, completions sampled, scored and trained on.

A method brings two hooks: `score` (what becomes of the completions before training) and `loss` (what a micro-batch
adds).
"""

import time
import warnings
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, TrainerControl, TrainerState

from trl.data.chat import decode_completions, encode_prompt
from trl.generation.build import build_engine, check_engine
from trl.models.forward import TokenLogps, supports_packing, token_logps
from trl.models.load import compute_dtype, end_of_sequence_ids
from trl.models.planner import MemoryPlan, gpu_memory
from trl.models.reference import frozen_copy
from trl.rollout.buffer import RolloutBuffer
from trl.rollout.collate import collate
from trl.rollout.micro_batch import group_order, pieces, split
from trl.rollout.normalizers import step_normalizers
from trl.rollout.single_turn import roll_out
from trl.trainer import completions as tables
from trl.trainer.base import Mode, log_prefix, mode_of
from trl.trainer.completions import CompletionTable
from trl.trainer.engine_weights import EngineWeights
from trl.trainer.group_loaders import GroupLoaders
from trl.trainer.memory import MemoryGuard, plan_of
from trl.trainer.metrics import from_all_processes
from trl.trainer.prompt_datasets import check_prompt_datasets, is_stream, settings_for_streams
from trl.trainer.sampling_options import sampling_of
from trl.types import Normalizer, Rollout, RolloutBatch

Rows = Sequence[dict[str, Any]]


@dataclass(slots=True)
class Samples:
    """The completions of one round, row by row.

    Attributes:
        rows: of the dataset.
        prompts: of the rows.
        texts: the completions as reward functions see them: strings or messages.
        rollouts: the completions as token ids.
        logged: further columns for the table of completions.
    """

    rows: Rows
    prompts: Sequence[Any]
    texts: Sequence[Any]
    rollouts: Sequence[Rollout]
    logged: dict[str, list[Any]] = field(default_factory=dict)


class OnlineTrainer(GroupLoaders):
    """Base of the trainers whose model writes its own training data."""

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
        check_prompt_datasets(train_dataset, eval_dataset)
        check_engine(args)
        if is_stream(train_dataset):
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
        policy = self.accelerator.unwrap_model(self.model)
        tokenizer = self.processing_class
        self.sampling = sampling_of(args)
        self.ref_model: PreTrainedModel | None = None
        self.prepare_models(policy)
        self.reference_packed = self.ref_model is not None and supports_packing(self.ref_model)
        eos_ids = end_of_sequence_ids(policy, tokenizer)
        plan = self.group_plan
        self.memory = MemoryGuard(self._memory_plan(policy))
        self.engine = build_engine(
            args,
            policy,
            tokenizer,
            self.processes,
            eos_ids=sorted(eos_ids),
            shared_prompts=self.packed,
            autocast=self.compute_loss_context_manager,
            dtype=compute_dtype(args, policy),
            sequences=max(plan.rows, plan.eval_rows),
        )
        self.engine_weights = EngineWeights(
            self.engine,
            policy,
            self.processes,
            self.metrics["train"],
            parity_steps=args.vllm_parity_check_steps,
            score=lambda batch: self.frozen_logps(policy, batch, temperature=1.0).logps,
            compute_dtype=compute_dtype(args, policy),
        )
        self.buffer = RolloutBuffer(plan.steps_per_generation, plan.num_iterations)
        step_rows = plan.micro_step_rows * args.gradient_accumulation_steps
        self.completion_tables: dict[Mode, CompletionTable] = {
            "train": CompletionTable(max(plan.rows, step_rows)),
            "eval": CompletionTable(max(plan.rows, plan.eval_rows, step_rows)),
        }
        self._resumed_state: dict[str, Any] | None = None
        self._step_seconds = 0.0
        self.add_callback(_StartOfTraining(self))
        # Ranks draw different samples: what made them equal so far was for the weights' initialisation.
        torch.manual_seed(args.seed + self.accelerator.process_index)

    # ---- what a method brings ----

    def score(self, batch: RolloutBatch, samples: Samples, mode: Mode) -> dict[str, list[Any]]:
        """Sets what the loss needs to know of the completions; returns columns for the table of completions.

        Args:
            batch: this process's sequences, in the order of `samples`.
        """
        return {}

    @abstractmethod
    def loss(self, model: nn.Module, batch: RolloutBatch, mode: Mode) -> Tensor:
        """Scalar: what this micro-batch adds to the loss of the optimizer step."""

    def eval_weight(self, batch: RolloutBatch) -> float:
        """How much the loss of an evaluation batch counts beside others': its sequences."""
        return float(batch.num_sequences)

    @property
    def needs_sampling_logps(self) -> bool:
        """Whether the engine's log-probs are looked at: they cost it time."""
        return False

    @property
    def loss_temperature(self) -> float:
        """What divides the logits in the loss: as in sampling, unless the method has it otherwise."""
        return self.sampling.temperature or 1.0

    def active_sequences(self, batch: RolloutBatch) -> Tensor:
        """`[N]` bool, on the CPU: sequences with a term of the loss that is not zero, and the others of their unit."""
        units = batch.units
        tokens = torch.zeros(int(units.max()) + 1, dtype=torch.long).index_add(
            0, units[batch.seq_of_token.cpu()], batch.loss_mask.long().cpu()
        )
        return tokens[units] > 0

    # ---- one step ----

    def collect(self, rows: Rows, mode: Mode = "train") -> RolloutBatch:
        """One batch of completions, sampled, scored and recorded."""
        prompts, step = [row["prompt"] for row in rows], self.state.global_step
        sampling = replace(self.sampling, with_logps=self.needs_sampling_logps)
        with self.memory.phase("generate"):
            self.engine_weights.bring_up_to_date(step)
            rollouts = roll_out(self.encode(prompts), self.engine, sampling)
            self.engine_weights.compare(rollouts, step)
        self.engine_weights.rest()
        batch = collate(rollouts, self.accelerator.device)
        texts = decode_completions([r.completion.token_ids for r in rollouts], prompts, self.processing_class)
        samples = Samples(rows, prompts, texts, rollouts)
        columns = self.score(batch, samples, mode)
        tokens = tables.record_lengths(self.metrics[mode], rollouts)
        if mode == "train":
            self.state.num_input_tokens_seen += int(self.processes.total(torch.tensor([tokens]))[0])
        table = {"prompt": prompts, "completion": texts, **columns}
        self.completion_tables[mode].extend(step, table, samples.logged)
        return batch

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers' `Trainer.train`, with memory that runs out explained."""
        with self.memory.phase("train"):
            return super().train(*args, **kwargs)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """Gradients of one micro-step; returns its part of the optimizer step's loss."""
        started = time.perf_counter()
        model.train()
        self.optimizer.train()
        batch = self._in_short_step(self._prepare_inputs(inputs))
        active = self.active_sequences(batch)
        micro_batches = split(batch, active, self.args.max_tokens_per_micro_batch, self.processes.largest)
        total = torch.zeros((), device=self.accelerator.device)
        for i, micro_batch in enumerate(micro_batches):
            with self.no_sync(model, last=i == len(micro_batches) - 1):
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

    def on_gradients_complete(self) -> None:
        """Called once per optimizer step, when its last micro-step is done."""

    def _prepare_inputs(self, inputs: Any) -> Any:
        return self.buffer.next(inputs, self._generation_batch)

    def prediction_step(  # type: ignore[override]  # a batch is rows here
        self, model: nn.Module, inputs: Rows, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor, None, None]:
        """The loss of freshly sampled completions for these rows."""
        batch = self.collect(inputs, "eval")
        self.add_frozen_logps(batch, old=False)
        batch.norm = self._normalizers([batch], accumulation=1)[0]
        with self.memory.phase("score"), torch.no_grad(), self.compute_loss_context_manager():
            loss = self.loss(model, batch, "eval").detach()
        # Weighted, where transformers would count the last, smaller batch as a whole one.
        self.metrics["eval"].mean("loss", loss, weights=self.eval_weight(batch))
        return loss, None, None

    def _generation_batch(self, rows: Rows) -> list[RolloutBatch]:
        """The slices of a new generation batch, one per micro-step, with everything the loss needs."""
        batch = self.collect(rows)
        count = self.group_plan.steps_per_generation
        if count > 1:
            batch = batch.select(group_order(batch))
        slices = batch.split(torch.arange(batch.num_sequences).chunk(count))
        norms = self._normalizers(slices, self.args.gradient_accumulation_steps)
        for piece, norm in zip(slices, norms, strict=True):
            piece.norm = norm
            self.add_frozen_logps(piece, old=not self.on_policy)
        self.finish_slices(slices)
        return slices

    def finish_slices(self, slices: list[RolloutBatch]) -> None:
        """Called with the slices of a new generation batch, when their log-probs are there."""

    @property
    def on_policy(self) -> bool:
        """Whether every slice is used before the weights that wrote it change."""
        return self.args.gradient_accumulation_steps % self.buffer.window == 0

    def _in_short_step(self, batch: RolloutBatch) -> RolloutBatch:
        """The batch, divided by less in the last optimizer step of an epoch where that has fewer micro-steps."""
        share = self.current_gradient_accumulation_steps / self.args.gradient_accumulation_steps
        return batch if share == 1.0 else replace(batch, norm=batch.norm and batch.norm.scaled(share))

    def _normalizers(self, slices: Sequence[RolloutBatch], accumulation: int) -> list[Normalizer]:
        """What the loss of each slice divides by: counts over all processes, per process and optimizer step."""
        counts = torch.tensor([[float(s.loss_mask.sum()), float(s.num_sequences)] for s in slices])
        tokens, sequences = (self.processes.total(counts) / self.processes.count).unbind(1)
        return step_normalizers(tokens.tolist(), sequences.tolist(), accumulation, self.sampling.max_tokens)

    def add_frozen_logps(self, batch: RolloutBatch, old: bool) -> None:
        """Adds the old and the reference log-probs, where the loss needs them and they are not there yet."""
        if old and batch.old_logps is None:
            batch.old_logps = self.frozen_logps(self.model, batch).logps
        if self.ref_model is not None and batch.ref_logps is None:
            batch.ref_logps = self.frozen_logps(self.ref_model, batch).logps

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

    def _forward_pieces(self, batch: RolloutBatch) -> list[Tensor]:
        """The sequences by forward pass: none larger than the token budget or, without one, than a micro-step."""
        everything, budget = torch.arange(batch.num_sequences), self.args.max_tokens_per_micro_batch
        if budget is None:
            return list(everything.split(self.group_plan.micro_step_rows))
        return pieces(batch, everything, budget)

    def token_logps(self, model: nn.Module, batch: RolloutBatch, **options: Any) -> TokenLogps:
        """`models.forward.token_logps` with this run's settings."""
        packed = self.reference_packed if model is self.ref_model else self.packed
        settings = {"temperature": self.loss_temperature, "packed": packed}
        return token_logps(model, batch, **{**settings, "fp32_head": self.args.cast_lm_head_to_fp32, **options})

    # ---- its parts ----

    def encode(self, prompts: Sequence[Any]) -> list[list[int]]:
        """Token ids of each row's prompt; rows of a group are encoded once."""
        kwargs = self.args.chat_template_kwargs
        encoded: list[list[int]] = []
        for i, prompt in enumerate(prompts):
            same = i > 0 and prompt == prompts[i - 1]
            encoded.append(
                encoded[-1] if same else encode_prompt(prompt, self.processing_class, chat_template_kwargs=kwargs)
            )
        return encoded

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Logs with the metrics gathered, the token count, and the table of completions."""
        prefix = log_prefix(logs)
        if prefix is None:
            logs["num_tokens"] = self.state.num_input_tokens_seen
        super().log(logs, start_time)
        if not self.args.log_completions:
            return
        table = self.completion_tables[mode_of(prefix)]
        rows = from_all_processes(table.take())
        if rows and self.accelerator.is_main_process:
            tables.publish(rows, self.args, self.state.global_step, "" if prefix in (None, "train") else f"{prefix}_")

    # ---- set-up ----

    def _memory_plan(self, policy: PreTrainedModel) -> MemoryPlan | None:
        """What each phase is going to need, on a GPU."""
        if self.accelerator.device.type != "cuda":
            return None
        dataset = self.train_dataset
        # Some prompts of all over the dataset stand for the rest.
        some = [] if is_stream(dataset) else [dataset[i] for i in range(0, len(dataset), len(dataset) // 64 + 1)]
        longest = max(map(len, self.encode([row["prompt"] for row in some])), default=0)
        total = gpu_memory(self.accelerator.device)[1]
        frozen = sum(p.numel() * p.element_size() for model in self.frozen_models for p in model.parameters())
        return plan_of(self.args, policy, longest, frozen_bytes=frozen, total_bytes=total)

    def prepare_models(self, policy: PreTrainedModel) -> None:
        """Makes and places the models beside the policy, before an engine takes its share of the memory."""
        self.ref_model = self.make_reference(policy)

    def make_reference(self, policy: PreTrainedModel) -> PreTrainedModel | None:
        """The reference model: a copy of the policy as it is now, where the loss needs one."""
        return frozen_copy(policy).to(self.accelerator.device) if self.args.needs_reference else None

    @property
    def frozen_models(self) -> list[PreTrainedModel]:
        """The models beside the policy that the loss looks at."""
        return [] if self.ref_model is None else [self.ref_model]

    # ---- what a checkpoint holds ----

    def extra_state(self) -> dict[str, Any]:
        """The generation window in flight."""
        return {"buffer": self.buffer.state_dict()}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Continues inside the generation window."""
        self.buffer.load_state_dict(state["buffer"], self.accelerator.device)

    def start_training(self) -> None:
        """Sets the generation window to where training starts or goes on."""
        self.engine_weights.forget()
        if self._resumed_state is not None:
            self.load_extra_state(self._resumed_state)
            self._resumed_state = None
        else:
            self.buffer.reset(self.state.global_step * self.args.gradient_accumulation_steps)
            if self.buffer.inside_window:
                warnings.warn(
                    "The checkpoint holds no completions of the generation window it was saved in: new ones are drawn, "
                    "so the run differs from an uninterrupted one.",
                    stacklevel=2,
                )


class _StartOfTraining(TrainerCallback):
    def __init__(self, trainer: OnlineTrainer):
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._trainer.start_training()

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # The best checkpoint may have been loaded.
        self._trainer.engine_weights.forget()
