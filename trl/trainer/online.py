"""The trainer of online methods: prompts in, completions sampled, scored and trained on.

A method brings two hooks: `score` (what becomes of the completions before training) and `loss` (what a micro-batch
adds).
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, TrainerControl, TrainerState

from trl.data.chat import decode_completions, encode_prompt
from trl.generation.build import build_engine, check_engine
from trl.models.load import compute_dtype, end_of_sequence_ids
from trl.models.planner import MemoryPlan, gpu_memory
from trl.rollout.buffer import RolloutBuffer
from trl.rollout.collate import collate
from trl.rollout.micro_batch import group_order
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
        self.prepare_models(policy)
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

    @property
    def needs_sampling_logps(self) -> bool:
        """Whether the engine's log-probs are looked at: they cost it time."""
        return False

    @property
    def loss_temperature(self) -> float:
        """What divides the logits in the loss: as in sampling, unless the method has it otherwise."""
        return self.sampling.temperature or 1.0

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

    def _prepare_inputs(self, inputs: Any) -> Any:
        return self._in_short_step(self.buffer.next(inputs, self._generation_batch))

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
        self.add_reference_logps(batch)

    @property
    def forward_rows(self) -> int:
        """Sequences of one forward pass without a token budget: those of a micro-step."""
        return self.group_plan.micro_step_rows

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
        """Also logs the table of completions."""
        prefix = log_prefix(logs)
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
        return plan_of(self.args, policy, longest, frozen_bytes=self.frozen_bytes, total_bytes=total)

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
