"""The trainer of methods whose completions are scored by reward functions and models."""

import warnings
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from trl.errors import ConfigError
from trl.rewards.scorer import RewardScorer, RewardSource
from trl.trainer.base import Mode, column_lists
from trl.trainer.online import OnlineTrainer, Samples
from trl.trainer.prompt_datasets import ROW_COLUMNS, check_prompt_datasets, extra_columns
from trl.types import RolloutBatch

# What the table of completions has of every method.
_TABLE_COLUMNS = ("step", "prompt", "completion")


class RewardedTrainer(OnlineTrainer):
    """An `OnlineTrainer` whose method brings `annotate` (what the rewards mean for each sequence) and `loss`."""

    def __init__(
        self,
        model: str | PreTrainedModel,
        args: Any,
        *,
        reward_funcs: RewardSource | list[RewardSource] | None,
        reward_processing_classes: Any,
        processing_class: PreTrainedTokenizerBase | None,
        train_dataset: Any,
        eval_dataset: Any,
        callbacks: list[TrainerCallback] | None,
        optimizers: tuple[Any, Any],
    ):
        check_prompt_datasets(train_dataset, eval_dataset)
        self.scorer = _scorer_of(reward_funcs, reward_processing_classes, args)
        for columns in extra_columns(train_dataset, eval_dataset):
            self.scorer.check(columns)
        self._warned_unscorable = False
        super().__init__(
            model,
            args,
            processing_class=processing_class,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            callbacks=callbacks,
            optimizers=optimizers,
        )

    @abstractmethod
    def annotate(self, batch: RolloutBatch, rewards_NF: Tensor, mode: Mode) -> dict[str, list[float]]:
        """Sets what the loss needs of the scores, e.g. `batch.advantages`; returns columns for the completions table.

        Args:
            batch: this process's sequences.
            rewards_NF: the rewards of all processes' sequences, in their order, on the CPU.
        """

    def prepare_models(self, policy: PreTrainedModel) -> None:
        """Also places the reward models."""
        super().prepare_models(policy)
        self.scorer = self.scorer.to(self.accelerator.device)

    def score(self, batch: RolloutBatch, samples: Samples, mode: Mode) -> dict[str, list[Any]]:
        """Rewards, and what the method makes of them."""
        own_rewards = self._rewards(samples, mode)
        columns = self.annotate(batch, self.processes.gather(own_rewards).cpu(), mode)
        taken = {*_TABLE_COLUMNS, *columns}
        names = [f"rewards/{name}" if name in taken else name for name in self.scorer.names]
        return {**{name: own_rewards[:, i].tolist() for i, name in enumerate(names)}, **columns}

    def _rewards(self, samples: Samples, mode: Mode) -> Tensor:
        """Rewards of this process's rows, `[N, F]`; their statistics are recorded."""
        rewards_NF = self.scorer.score(
            samples.prompts,
            samples.texts,
            [r.completion.token_ids for r in samples.rollouts],
            column_lists(samples.rows, without=ROW_COLUMNS),
            trainer_state=self.state,
            log_extra=samples.logged.__setitem__,
            log_metric=self.user_metrics[mode].mean,
        )
        for i, name in enumerate(self.scorer.names):
            self.metrics[mode].mean(f"rewards/{name}/mean", rewards_NF[:, i])
            self.metrics[mode].std(f"rewards/{name}/std", rewards_NF[:, i])
        unscorable = torch.isnan(rewards_NF).all(1)
        if unscorable.any() and not self._warned_unscorable:
            self._warned_unscorable = True
            warnings.warn(
                f"No reward function scored {int(unscorable.sum())} of {len(samples.rows)} completions: they stay out "
                "of the comparison with others of their prompt, and teach nothing.",
                stacklevel=2,
            )
        return rewards_NF


def _scorer_of(reward_funcs: Any, reward_processing_classes: Any, args: Any) -> RewardScorer:
    if reward_funcs is None:
        raise ConfigError("`reward_funcs` is missing: pass at least one reward function or reward model.")
    return RewardScorer(
        reward_funcs,
        reward_weights=args.reward_weights,
        reward_processing_classes=reward_processing_classes,
        model_init_kwargs=args.model_init_kwargs if isinstance(args.model_init_kwargs, dict) else None,
        trust_remote_code=args.trust_remote_code,
    )
