"""The trainer of online methods: prompts in, completions sampled, scored and trained on.

A method brings two hooks: `annotate` (what the scores mean for each sequence) and `loss` (what a micro-batch adds).
"""

import time
import warnings
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Sampler
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, TrainerControl, TrainerState

from trl.data.chat import decode_completions, encode_prompt
from trl.data.formats import get_dataset_column_names
from trl.data.sampling import GroupSampler, SamplerEpochCallback, repeat_iterable_dataset
from trl.errors import ConfigError, DataError, NotSupportedError
from trl.generation.build import build_engine
from trl.models.forward import TokenLogps, token_logps
from trl.models.load import end_of_sequence_ids
from trl.models.reference import frozen_copy
from trl.rewards.scorer import RewardScorer
from trl.rollout.buffer import RolloutBuffer
from trl.rollout.collate import collate
from trl.rollout.micro_batch import group_order, pieces, split
from trl.rollout.single_turn import roll_out
from trl.trainer import completions as tables
from trl.trainer.base import BaseTrainer, Mode, column_lists
from trl.trainer.callbacks import SyncRefModelCallback
from trl.types import Normalizer, Rollout, RolloutBatch, Sampling

Rows = Sequence[dict[str, Any]]


class OnlineTrainer(BaseTrainer):
    """Base of the trainers whose model writes its own training data."""

    def __init__(
        self,
        model: str | PreTrainedModel,
        args: Any,
        *,
        scorer: RewardScorer,
        processing_class: PreTrainedTokenizerBase | None,
        train_dataset: Any,
        eval_dataset: Any,
        callbacks: list[TrainerCallback] | None,
        optimizers: tuple[Any, Any],
    ):
        for name, dataset in (("train_dataset", train_dataset), ("eval_dataset", eval_dataset)):
            for part in dataset.values() if isinstance(dataset, dict) else [dataset]:
                _check_dataset(name, part, scorer)
        if isinstance(train_dataset, (IterableDataset, *_streaming_types())):
            _settings_for_streams(args)
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
        self.scorer = scorer.to(self.accelerator.device)
        self.sampling = _sampling_of(args)
        self.ref_model = self._make_reference(policy)
        eos_ids = end_of_sequence_ids(policy, tokenizer)
        self.engine = build_engine(
            args,
            policy,
            eos_ids=sorted(eos_ids),
            pad_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(eos_ids),
            shared_prompts=self.packed,
            autocast=self.compute_loss_context_manager,
        )
        self.buffer = RolloutBuffer(args.steps_per_generation, args.num_iterations)
        self.completion_table = tables.CompletionTable(args.generation_batch_size)
        self._resumed_state: dict[str, Any] | None = None
        self._step_seconds = 0.0
        self._warned_unscorable = False
        self.add_callback(_StartOfTraining(self))
        # Ranks draw different samples: what made them equal so far was for the weights' initialisation.
        torch.manual_seed(args.seed + self.accelerator.process_index)

    # ---- what a method brings ----

    @abstractmethod
    def annotate(self, batch: RolloutBatch, rewards_NF: Tensor, mode: Mode) -> dict[str, list[float]]:
        """Sets what the loss needs of the scores, e.g. `batch.advantages`; returns columns for the completions table.

        Args:
            batch: this process's sequences.
            rewards_NF: the rewards of all processes' sequences, in their order, on the CPU.
        """

    @abstractmethod
    def loss(self, model: nn.Module, batch: RolloutBatch, mode: Mode) -> Tensor:
        """Scalar: what this micro-batch adds to the loss of the optimizer step."""

    @property
    def reference_needed(self) -> bool:
        """Whether the loss looks at a reference model."""
        return self.args.beta != 0.0

    def active_sequences(self, batch: RolloutBatch) -> Tensor:
        """`[N]` bool, on the CPU: sequences with a term of the loss that is not zero."""
        tokens = torch.zeros(batch.num_sequences, dtype=torch.long).index_add(
            0, batch.seq_of_token.cpu(), batch.loss_mask.long().cpu()
        )
        return tokens > 0

    # ---- one step ----

    def collect(self, rows: Rows, mode: Mode = "train") -> RolloutBatch:
        """One batch of completions, sampled, scored, annotated and recorded."""
        prompts = [row["prompt"] for row in rows]
        rollouts = roll_out(self._encode(prompts), self.engine, self.sampling)
        batch = collate(rollouts, self.accelerator.device, mask_truncated=self.args.mask_truncated_completions)
        texts = decode_completions([r.completion.token_ids for r in rollouts], prompts, self.processing_class)
        logged: dict[str, list[Any]] = {}
        own_rewards = self._score(rows, prompts, texts, rollouts, logged, mode)
        columns = self.annotate(batch, self.processes.gather(own_rewards).cpu(), mode)
        self._record_lengths(rollouts, mode)
        rewards = {name: own_rewards[:, i].tolist() for i, name in enumerate(self.scorer.names)}
        table = {"prompt": prompts, "completion": texts, **rewards, **columns}
        self.completion_table.extend(self.state.global_step, table, logged)
        return batch

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """Gradients of one micro-step; returns its part of the optimizer step's loss."""
        started = time.perf_counter()
        model.train()
        self.optimizer.train()
        batch = self._prepare_inputs(inputs)
        active = self.active_sequences(batch)
        if not active.any():
            active[0] = True  # a zero gradient is not the same as none: momentum moves on
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

    def prediction_step(
        self, model: nn.Module, inputs: Rows, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor, None, None]:
        """The loss of freshly sampled completions for these rows."""
        batch = self.collect(inputs, "eval")
        self._add_frozen_logps(batch, old=False)
        batch.norm = self._normalizers([batch])[0]
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = self.loss(model, batch, "eval")
        return loss.detach(), None, None

    def _generation_batch(self, rows: Rows) -> list[RolloutBatch]:
        """The slices of a new generation batch, one per micro-step, with everything the loss needs."""
        batch = self.collect(rows)
        if self.args.steps_per_generation > 1:
            batch = batch.select(group_order(batch))
        slices = batch.split(torch.arange(batch.num_sequences).chunk(self.args.steps_per_generation))
        for piece, norm in zip(slices, self._normalizers(slices), strict=True):
            piece.norm = norm
            self._add_frozen_logps(piece, old=not self.on_policy)
        self.finish_slices(slices)
        return slices

    def finish_slices(self, slices: list[RolloutBatch]) -> None:
        """Called with the slices of a new generation batch, when their log-probs are there."""

    @property
    def on_policy(self) -> bool:
        """Whether every slice is used before the weights that wrote it change."""
        return self.args.gradient_accumulation_steps % self.buffer.window == 0

    def _normalizers(self, slices: Sequence[RolloutBatch]) -> list[Normalizer]:
        """What the loss of each slice divides by: counts over all processes, per process and optimizer step."""
        counts = torch.tensor([[float(s.loss_mask.sum()), float(s.num_sequences)] for s in slices])
        tokens, sequences = (self.processes.total(counts) / self.processes.count).unbind(1)
        accumulation = self.args.gradient_accumulation_steps if self.model.training else 1
        norms = []
        for i in range(len(slices)):
            first = i // accumulation * accumulation
            step = slice(first, first + accumulation)
            # An optimizer step may reach beyond this generation batch: what is not known yet counts as the average.
            share = accumulation / len(tokens[step])
            norms.append(
                Normalizer(
                    sequences=float(sequences[step].sum()) * share,
                    tokens=float(tokens[step].sum()) * share,
                    generation_tokens=float(tokens.sum()) * accumulation / len(slices),
                    max_length=self.sampling.max_tokens,
                )
            )
        return norms

    def _add_frozen_logps(self, batch: RolloutBatch, old: bool) -> None:
        """Adds the old and the reference log-probs, where the loss needs them."""
        if old:
            batch.old_logps = self.frozen_logps(self.model, batch).logps
        if self.ref_model is not None:
            batch.ref_logps = self.frozen_logps(self.ref_model, batch).logps

    def frozen_logps(self, model: nn.Module, batch: RolloutBatch) -> TokenLogps:
        """Log-probs and entropies of a batch without gradient, in micro-batches."""
        logps = torch.zeros(batch.num_tokens, device=batch.device)
        entropies = torch.zeros_like(logps)
        training = model.training
        # Dropout off: these are the numbers of the policy, not of a random thinning of it.
        model.eval()
        with torch.no_grad(), self.compute_loss_context_manager():
            for piece in pieces(batch, torch.arange(batch.num_sequences), self.args.max_tokens_per_micro_batch):
                out = self.token_logps(model, batch.select(piece))
                where = batch.tokens_of(piece)
                logps[where], entropies[where] = out.logps.float(), out.entropies.float()
        model.train(training)
        return TokenLogps(logps, entropies)

    def token_logps(self, model: nn.Module, batch: RolloutBatch, **options: Any) -> TokenLogps:
        """`models.forward.token_logps` with this run's settings."""
        return token_logps(
            model,
            batch,
            temperature=self.sampling.temperature or 1.0,
            packed=self.packed,
            fp32_head=self.args.cast_lm_head_to_fp32,
            **options,
        )

    # ---- its parts ----

    def _encode(self, prompts: Sequence[Any]) -> list[list[int]]:
        """Token ids of each row's prompt; rows of a group are encoded once."""
        kwargs = self.args.chat_template_kwargs
        encoded: list[list[int]] = []
        for i, prompt in enumerate(prompts):
            same = i > 0 and prompt == prompts[i - 1]
            encoded.append(
                encoded[-1] if same else encode_prompt(prompt, self.processing_class, chat_template_kwargs=kwargs)
            )
        return encoded

    def _score(
        self,
        rows: Rows,
        prompts: Sequence[Any],
        texts: Sequence[Any],
        rollouts: Sequence[Rollout],
        logged: dict[str, list[Any]],
        mode: Mode,
    ) -> Tensor:
        """Rewards of this process's rows, `[N, F]`; their statistics are recorded."""
        rewards_NF = self.scorer.score(
            prompts,
            texts,
            [r.completion.token_ids for r in rollouts],
            column_lists(rows, without=("prompt", "completion", "completion_ids")),
            trainer_state=self.state,
            log_extra=logged.__setitem__,
            log_metric=self.user_metrics[mode].mean,
        )
        for i, name in enumerate(self.scorer.names):
            self.metrics[mode].mean(f"rewards/{name}/mean", rewards_NF[:, i])
            self.metrics[mode].std(f"rewards/{name}/std", rewards_NF[:, i])
        unscorable = torch.isnan(rewards_NF).all(1)
        if unscorable.any() and not self._warned_unscorable:
            self._warned_unscorable = True
            warnings.warn(
                f"No reward function scored {int(unscorable.sum())} of {len(rows)} completions: they stay out of the "
                "group statistics and get no advantage.",
                stacklevel=2,
            )
        return rewards_NF

    def _record_lengths(self, rollouts: Sequence[Rollout], mode: Mode) -> None:
        metrics = self.metrics[mode]
        lengths = torch.tensor([float(len(r.completion.token_ids)) for r in rollouts])
        ended = torch.tensor([r.completion.finish_reason == "stop" for r in rollouts])
        for name, values in (("", lengths), ("terminated_", lengths[ended])):
            metrics.mean(f"completions/mean_{name}length", values)
            metrics.bound(f"completions/min_{name}length", "min", values)
            metrics.bound(f"completions/max_{name}length", "max", values)
        metrics.mean("completions/clipped_ratio", (~ended).float())
        if mode == "train":
            own = lengths.sum() + sum(len(r.prompt_ids) for r in rollouts)
            self.state.num_input_tokens_seen += int(self.processes.total(own[None])[0])

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Logs with the metrics gathered, the token count, and the table of completions."""
        if not any(key.endswith("_runtime") for key in logs):
            logs["num_tokens"] = self.state.num_input_tokens_seen
        super().log(logs, start_time)
        if self.args.log_completions and len(self.completion_table) and self.accelerator.is_main_process:
            rows, step = self.completion_table.take(), self.state.global_step
            tables.show(rows, step, self.args.num_completions_to_print)
            tables.store(rows, Path(self.args.output_dir) / "completions", step)
            tables.send(rows, self.args.report_to, step, unique_prompts=self.args.log_unique_prompts)

    # ---- set-up ----

    def _make_reference(self, policy: PreTrainedModel) -> PreTrainedModel | None:
        if not self.reference_needed:
            return None
        reference = frozen_copy(policy).to(self.accelerator.device)
        if self.args.sync_ref_model:
            self.add_callback(SyncRefModelCallback(reference, self.accelerator))
        return reference

    def get_train_dataloader(self) -> DataLoader:
        """Batches of the rows of one whole generation round, repeated for every micro-step it feeds."""
        dataset = self.train_dataset
        if isinstance(dataset, (IterableDataset, *_streaming_types())):
            dataset = repeat_iterable_dataset(dataset, **self._group_plan())
        return self._get_dataloader(
            dataset=dataset,
            description="Training",
            batch_size=self._train_batch_size * self.args.steps_per_generation,
            sampler_fn=self._get_train_sampler,
            is_training=True,
        )

    def _group_plan(self) -> dict[str, int]:
        return {
            "group_size": self.args.num_generations,
            "prompts_per_batch": self.args.generation_batch_size // self.args.num_generations,
            "repeats": self.buffer.window,
        }

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler:
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        dataset = self.train_dataset if train_dataset is None else train_dataset
        sampler = GroupSampler(dataset, **self._group_plan(), shuffle=self.args.shuffle_dataset, seed=seed)
        self.add_callback(SamplerEpochCallback(sampler))
        return sampler

    def _get_eval_sampler(self, eval_dataset: Any) -> Sampler:
        return GroupSampler(eval_dataset, self.args.num_generations_eval, 1, shuffle=False, seed=0)

    # ---- what a checkpoint holds ----

    def extra_state(self) -> dict[str, Any]:
        """The generation window in flight."""
        return {"buffer": self.buffer.state_dict()}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Continues inside the generation window."""
        self.buffer.load_state_dict(state["buffer"], self.accelerator.device)

    def start_training(self) -> None:
        """Sets the generation window to where training starts or goes on."""
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


def _sampling_of(args: Any) -> Sampling:
    return Sampling(
        max_tokens=args.max_completion_length,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        extra=args.generation_kwargs or {},
    )


def _streaming_types() -> tuple[type, ...]:
    import datasets

    return (datasets.IterableDataset,)


def _check_dataset(name: str, dataset: Any, scorer: RewardScorer) -> None:
    """Raises where a dataset cannot be trained on, before a model is loaded."""
    if dataset is None:
        if name == "train_dataset":
            raise ConfigError("`train_dataset` is missing: pass a dataset with a `prompt` column.")
        return
    import datasets

    if not isinstance(dataset, (datasets.Dataset, datasets.IterableDataset, torch.utils.data.Dataset, list)):
        raise TypeError(f"`{name}` must be a dataset, or for evaluation a dict of them (got {type(dataset).__name__}).")
    if isinstance(dataset, (datasets.Dataset, datasets.IterableDataset)):
        columns = get_dataset_column_names(dataset)
        if "prompt" not in columns:
            raise DataError(f"`{name}` has no column `prompt` (it has {', '.join(columns)}): rename the one that is.")
        if {"image", "images"} & set(columns):
            raise NotSupportedError(f"`{name}` has images, which are not supported yet: drop the column.")
        scorer.check([c for c in columns if c not in ("prompt", "completion", "completion_ids")])


def _settings_for_streams(args: Any) -> None:
    """Lets every process read the whole stream and take its own rows."""
    args.accelerator_config.dispatch_batches = False
    if args.dataloader_num_workers:
        warnings.warn(
            "A streaming dataset is read in the main process: `dataloader_num_workers` is 0 now.", stacklevel=4
        )
        args.dataloader_num_workers = 0
