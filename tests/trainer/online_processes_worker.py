"""One process of the runs of every online method on several: `python online_processes_worker.py FOLDER` with the
variables a launcher sets.
"""

import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from fixtures.engines import ScriptedEngine
from fixtures.online_methods import (
    GROUP_METHODS,
    METHODS,
    PROMPTS,
    Method,
    Steps,
    recorded_rounds,
    timeless,
    two_steps,
    weights_of,
)
from fixtures.runs import prompts

from trl.types import Completion, Prompt, Sampling

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
ROWS = 8
# Row by row: of two processes, the first one has most of the tokens.
COMPLETIONS = [[11, 12, 13, 14, 15, 16], [17, 18, 19, 20, 21, 1], [22, 23, 24, 25, 1], [26, 27, 28, 1]]
COMPLETIONS += [[29, 1], [1], [30, 1], [31, 32, 1]]
BUDGET = {"max_tokens_per_micro_batch": 9}


class ByRow(ScriptedEngine):
    """An engine whose completion of a row is the same, whichever process the row is on.

    Args:
        silent: whether completions of the second half of the rows have no token.
    """

    def __init__(self, silent: bool = False):
        super().__init__(lambda prompt, index: [])
        self.silent, self.row = silent, 0

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> Iterator[tuple[int, list[Completion]]]:
        self.row = RANK * len(prompts) * sampling.n
        return super().generate(prompts, sampling)

    def _next(self, prompt: list[int], sampling: Sampling) -> Completion:
        ids = COMPLETIONS[self.row % ROWS]
        if self.silent and self.row >= ROWS // 2:
            ids = []
        self.row += 1
        return Completion(ids, [], "stop" if ids[-1:] != [16] else "length")


def rows_of(completion_ids: list[list[int]]) -> range:
    """Where the rows of this process are among those of all."""
    first = RANK * len(completion_ids)
    return range(first, first + len(completion_ids))


def rising(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """A reward of its own for each row."""
    return [(3 * row % 7) / 2 for row in rows_of(completion_ids)]


def level(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """Rewards that are equal in the second half, whose groups have nothing to learn from."""
    return [float(row) if row < ROWS // 2 else 1.0 for row in rows_of(completion_ids)]


def withheld(completion_ids: list[list[int]], **kwargs: Any) -> list[float | None]:
    """No rewards in the second half, whose pairs stay out of the loss."""
    return [float(row) if row < ROWS // 2 else None for row in rows_of(completion_ids)]


def cases_of(method: Method) -> dict[str, dict[str, Any]]:
    """Arguments of `two_steps`: `idle` is the case in which nothing is to be done for the rows of the second half."""
    rewarded = "reward_funcs" in method.signature
    reward = {"reward_funcs": rising} if rewarded else {}
    cases: dict[str, dict[str, Any]] = {
        "plain": {"options": reward},
        "budget": {"options": reward, **BUDGET},
        "padded": {"options": reward, "packed": False, **BUDGET},
    }
    if method.name in GROUP_METHODS:
        cases["straddling"] = {"options": reward, "num_generations": ROWS, **BUDGET}
        cases["idle"] = {"options": {"reward_funcs": level}, "beta": 0.0, **BUDGET}
    elif rewarded:
        cases["idle"] = {"options": {"reward_funcs": withheld}, **BUDGET}
    else:
        cases["idle"] = {"engine": ByRow(silent=True), **BUDGET}
    return cases


def steps(method: Method, folder: Path) -> dict[str, Steps]:
    """Two steps of each case, each of eight completions over all processes."""
    sizes = method.sizes(ROWS // WORLD)
    return {
        name: two_steps(method, folder, PROMPTS, **{"engine": ByRow(), **sizes, **case})
        for name, case in cases_of(method).items()
    }


def evaluation(method: Method, folder: Path) -> dict[str, Any]:
    """Of eight completions over all processes."""
    dataset = prompts(*(f"w{40 + i}" for i in range(ROWS // method.group_size)))
    args = method.make_config(folder, **method.sizes(ROWS // WORLD))
    options = {"reward_funcs": rising} if "reward_funcs" in method.signature else {}
    trainer = method.make(args, PROMPTS, engine=ByRow(), eval_dataset=dataset, **options)
    return timeless(trainer.evaluate())


def sampled(method: Method, folder: Path, resume_at: int | None = None) -> dict[str, Any]:
    """Four steps on what the model itself writes after one prompt: what was logged, the rounds, the weights in the end.

    Args:
        resume_at: goes on from the checkpoint of this step, which an earlier call has left.
    """
    changes = method.sizes(ROWS // WORLD, 2) | {"max_steps": 4, "learning_rate": 1e-2}
    if method.name in GROUP_METHODS:
        # Two optimizer steps a round: a checkpoint lies inside one.
        changes |= {"steps_per_generation": 4, "save_strategy": "steps", "save_steps": 3}
    trainer = method.make(method.make_config(folder / method.name, **changes), prompts(*["w10 w30"] * 16))
    rounds = recorded_rounds(trainer)
    trainer.train(resume_from_checkpoint=resume_at and str(folder / method.name / f"checkpoint-{resume_at}"))
    logged = list(map(timeless, trainer.state.log_history[:4]))
    return {"logged": logged, "rounds": rounds, "weights": weights_of(trainer.model)}


def run(folder: Path) -> dict[str, dict[str, Any]]:
    """Everything, method by method."""
    results: dict[str, dict[str, Any]] = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="No reward function scored")
        for name, method in METHODS.items():
            found = {"steps": steps(method, folder), "evaluation": evaluation(method, folder)}
            results[name] = {**found, "sampled": sampled(method, folder)}
            if name in GROUP_METHODS:
                results[name]["resumed"] = sampled(method, folder, resume_at=3)
    return results


def main(folder: Path) -> None:
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message=".*barrier.*device.*")
    torch.save(run(folder), folder / f"{RANK}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
