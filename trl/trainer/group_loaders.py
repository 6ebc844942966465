"""Data loaders that keep the rows of a group together."""

from typing import Any

from torch.utils.data import DataLoader, Sampler

from trl.data.sampling import GroupSampler, SamplerEpochCallback, repeat_iterable_dataset
from trl.rollout.buffer import RolloutBuffer
from trl.trainer.flat_batches import FlatBatchTrainer
from trl.trainer.group_batches import GroupPlan
from trl.trainer.prompt_datasets import is_stream


class GroupLoaders(FlatBatchTrainer):
    """A trainer whose batches are whole groups: each prompt as often as it gets completions."""

    buffer: RolloutBuffer

    @property
    def group_plan(self) -> GroupPlan:
        """How many completions are asked for at a time."""
        return self.args.group_plan

    def get_train_dataloader(self) -> DataLoader:
        """Batches of the rows of one whole generation round, repeated for every micro-step it feeds."""
        dataset = self.train_dataset
        if is_stream(dataset):
            dataset = repeat_iterable_dataset(dataset, **self._group_plan())
        return self._get_dataloader(
            dataset=dataset,
            description="Training",
            batch_size=self.group_plan.rows,
            sampler_fn=self._get_train_sampler,
            is_training=True,
        )

    def _group_plan(self) -> dict[str, int]:
        plan = self.group_plan
        return {"group_size": plan.group_size, "prompts_per_batch": plan.prompts, "repeats": plan.window}

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler:
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        dataset = self.train_dataset if train_dataset is None else train_dataset
        sampler = GroupSampler(dataset, **self._group_plan(), shuffle=self.args.shuffle_dataset, seed=seed)
        self.remove_callback(SamplerEpochCallback)  # that of an earlier call of `train`
        self.add_callback(SamplerEpochCallback(sampler))
        return sampler

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Batches of whole groups."""
        self.args.check_evaluation()
        if isinstance(eval_dataset, str):
            eval_dataset = self.eval_dataset[eval_dataset]
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if is_stream(dataset):
            eval_dataset = repeat_iterable_dataset(dataset, self.group_plan.eval_group_size, 1)
        return super().get_eval_dataloader(eval_dataset)

    def _get_eval_sampler(self, eval_dataset: Any) -> Sampler:
        return GroupSampler(eval_dataset, self.group_plan.eval_group_size, 1, shuffle=False, seed=0)
