"""The arithmetic of groups, micro-steps and generation batches, shared by the online methods."""

from dataclasses import dataclass
from typing import Protocol

from trl.errors import ConfigError


@dataclass(frozen=True)
class GroupPlan:
    """How many completions are asked for at a time, and how they are cut into micro-steps.

    Attributes:
        group_size: completions per prompt in training.
        eval_group_size: completions per prompt in evaluation.
        rows: completions that one process asks for in one generation round.
        eval_rows: completions that one process asks for in one evaluation batch.
        prompts: different prompts of one generation round, over all processes.
        steps_per_generation: micro-steps fed by one generation round.
        num_iterations: optimisation passes over each generated batch.
    """

    group_size: int
    eval_group_size: int
    rows: int
    eval_rows: int
    prompts: int
    steps_per_generation: int
    num_iterations: int = 1

    @property
    def micro_step_rows(self) -> int:
        """Completions of one process and micro-step."""
        return self.rows // self.steps_per_generation

    @property
    def window(self) -> int:
        """Micro-steps between two generation rounds."""
        return self.steps_per_generation * self.num_iterations


class PromptBatchArguments(Protocol):
    """The options of `transformers.TrainingArguments` that are read here."""

    per_device_train_batch_size: int
    per_device_eval_batch_size: int
    gradient_accumulation_steps: int

    @property
    def world_size(self) -> int: ...


class GroupBatchArguments(PromptBatchArguments, Protocol):
    """The options read and set here."""

    num_generations: int | None
    num_generations_eval: int | None
    generation_batch_size: int | None
    steps_per_generation: int | None
    num_iterations: int
    eval_strategy: str


def group_plan(args: GroupBatchArguments) -> GroupPlan:
    """The plan of options that `resolve_batch_sizes` has filled: batch sizes count completions."""
    assert args.steps_per_generation is not None
    assert args.generation_batch_size is not None
    assert args.num_generations is not None
    assert args.num_generations_eval is not None
    return GroupPlan(
        group_size=args.num_generations,
        eval_group_size=args.num_generations_eval,
        rows=args.per_device_train_batch_size * args.steps_per_generation,
        eval_rows=args.per_device_eval_batch_size,
        prompts=args.generation_batch_size // args.num_generations,
        steps_per_generation=args.steps_per_generation,
        num_iterations=args.num_iterations,
    )


def plan_of_prompts(args: PromptBatchArguments, group_size: int) -> GroupPlan:
    """The plan of a method whose batch sizes count prompts, and which generates once per optimizer step.

    Args:
        group_size: completions per prompt.
    """
    steps = args.gradient_accumulation_steps
    return GroupPlan(
        group_size=group_size,
        eval_group_size=group_size,
        rows=args.per_device_train_batch_size * steps * group_size,
        eval_rows=args.per_device_eval_batch_size * group_size,
        prompts=args.per_device_train_batch_size * steps * args.world_size,
        steps_per_generation=steps,
    )


def resolve_batch_sizes(args: GroupBatchArguments, min_generations: int) -> None:
    """Fills `generation_batch_size`, `steps_per_generation` and `num_generations_eval`.

    Raises:
        ConfigError: two numbers that do not fit each other, both named.
    """
    step = args.per_device_train_batch_size * args.world_size
    if args.generation_batch_size is not None and args.steps_per_generation is not None:
        raise ConfigError(
            f"`generation_batch_size` ({args.generation_batch_size}) and `steps_per_generation` "
            f"({args.steps_per_generation}) say the same thing: set one of them."
        )
    if args.generation_batch_size is not None:
        if args.generation_batch_size % step:
            fitting = _next_multiple(args.generation_batch_size, step)
            raise ConfigError(
                f"`generation_batch_size` must be a multiple of the {step} completions of one micro-step over all "
                f"processes (got {args.generation_batch_size}): set it to {fitting}."
            )
        args.steps_per_generation = args.generation_batch_size // step
    elif args.steps_per_generation is None:
        args.steps_per_generation = args.gradient_accumulation_steps
    args.generation_batch_size = step * args.steps_per_generation
    _check_group("num_generations", args.num_generations, min_generations)
    assert args.num_generations is not None
    if args.generation_batch_size % args.num_generations:
        fitting = _next_multiple(args.generation_batch_size, args.num_generations)
        raise ConfigError(
            f"`num_generations` must divide the generation batch (got {args.num_generations} and "
            f"{args.generation_batch_size}): change `per_device_train_batch_size` or `gradient_accumulation_steps` so "
            f"that it holds a multiple of {args.num_generations}, such as {fitting}."
        )
    if args.num_generations_eval is None:
        args.num_generations_eval = args.num_generations
    _check_group("num_generations_eval", args.num_generations_eval, 1)
    if args.eval_strategy != "no":
        check_eval_batch(args, args.num_generations_eval)


def check_eval_batch(args: PromptBatchArguments, group_size: int) -> None:
    """Raises `ConfigError` unless evaluation batches hold whole groups."""
    eval_batch = args.per_device_eval_batch_size * args.world_size
    if eval_batch % group_size:
        raise ConfigError(
            f"`num_generations_eval` must divide the evaluation batch over all processes (got {group_size} and "
            f"{eval_batch}): set `per_device_eval_batch_size` to a multiple of it."
        )


def _next_multiple(value: int, factor: int) -> int:
    return -(-value // factor) * factor


def _check_group(name: str, value: int | None, least: int) -> None:
    if value is None or value < least:
        raise ConfigError(f"`{name}` needs at least {least} completions per prompt (got {value}).")
