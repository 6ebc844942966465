"""The arithmetic of groups, micro-steps and generation batches, shared by the online configs."""

from typing import Protocol

from trl.errors import ConfigError


class GroupBatchArguments(Protocol):
    """The options read and set here."""

    per_device_train_batch_size: int
    per_device_eval_batch_size: int
    gradient_accumulation_steps: int

    @property
    def world_size(self) -> int: ...

    num_generations: int | None
    num_generations_eval: int | None
    generation_batch_size: int | None
    steps_per_generation: int | None
    eval_strategy: str
    auto_find_batch_size: bool


def rows_of_process(args: GroupBatchArguments) -> dict[str, int]:
    """Completions that one process asks for at a time, in training (`train`) and evaluation (`eval`)."""
    assert args.steps_per_generation is not None
    train = args.per_device_train_batch_size * args.steps_per_generation
    return {"train": train, "eval": args.per_device_eval_batch_size}


def resolve_batch_sizes(args: GroupBatchArguments, min_generations: int) -> None:
    """Fills `generation_batch_size`, `steps_per_generation` and `num_generations_eval`.

    Raises:
        ConfigError: two numbers that do not fit each other, both named.
    """
    if args.auto_find_batch_size:
        raise ConfigError("`auto_find_batch_size` would change the groups: set `per_device_train_batch_size` instead.")
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
        check_eval_batch(args)


def check_eval_batch(args: GroupBatchArguments) -> None:
    """Raises `ConfigError` unless evaluation batches hold whole groups."""
    assert args.num_generations_eval is not None
    eval_batch = args.per_device_eval_batch_size * args.world_size
    if eval_batch % args.num_generations_eval:
        raise ConfigError(
            f"`num_generations_eval` must divide the evaluation batch over all processes (got "
            f"{args.num_generations_eval} and {eval_batch}): set `per_device_eval_batch_size` to a multiple of it."
        )


def _next_multiple(value: int, factor: int) -> int:
    return -(-value // factor) * factor


def _check_group(name: str, value: int | None, least: int) -> None:
    if value is None or value < least:
        raise ConfigError(f"`{name}` needs at least {least} completions per prompt (got {value}).")
