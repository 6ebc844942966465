"""One process of a run on several: `python ddp_worker.py FOLDER` with the variables a launcher sets."""

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from fixtures.engines import ScriptedEngine
from fixtures.models import random_model, table_model
from fixtures.runs import GradientGrabber, Recorder, grpo_config, make, prompts, run

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
SCRIPT = [[11, 12, 1], [11, 13, 14, 15, 1], [20, 1], [21, 22, 23, 24, 25, 1]]


def rewarded(completion_ids: list[list[int]], log_metric: Any, log_extra: Any, **kwargs: Any) -> list[float]:
    """The first id and the length; one process logs a metric that the other one does not have."""
    if RANK == WORLD - 1:
        log_metric("last", 3.0)
    log_extra("rank", [RANK] * len(completion_ids))
    return [ids[0] % 5 + len(ids) / 4 for ids in completion_ids]


def scripted(folder: Path, **changes: Any) -> dict[str, Any]:
    """One step on eight scripted completions, and an evaluation; a group of eight straddles two processes."""
    grabber = GradientGrabber()
    args = grpo_config(folder, per_device_train_batch_size=8 // WORLD, per_device_eval_batch_size=8 // WORLD, **changes)
    dataset = prompts("w10", "w20 w10")
    trainer = make(random_model(), Recorder(rewarded), args, dataset, eval_dataset=dataset, callbacks=[grabber])
    # The completion of a row is the same, whichever process the row is on.
    offset = RANK * 8 // WORLD
    asked: list[int] = []

    def script(prompt: list[int], index: int) -> list[int]:
        asked.append(0)
        return SCRIPT[(offset + len(asked) - 1) % 4]

    trainer.engine = ScriptedEngine(script)
    trainer.train()
    gradients = {name: g.tolist() for name, g in grabber.steps[-1].items() if "norm" in name or "lm_head" in name}
    evaluation = trainer.evaluate()
    return {"logs": trainer.state.log_history, "gradients": gradients, "evaluation": evaluation}


def sampled(folder: Path) -> list[list[int]]:
    """The completions of this process: 64 equally likely ids a token."""
    recorder = Recorder(lambda completion_ids, **_: [0.0] * len(completion_ids))
    args = grpo_config(folder, per_device_train_batch_size=8 // WORLD, num_generations=8)
    run(table_model({}), recorder, args, prompts("w10"))
    return recorder.completions


def main(folder: Path) -> None:
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message=".*barrier.*device.*")
    results = {
        "plain": scripted(folder / "plain", log_completions=True),
        "budget": scripted(
            folder / "budget",
            max_tokens_per_micro_batch=7,
            loss_type="bnpo",
            beta=0.1,
            max_steps=2,
            num_iterations=2,
            learning_rate=1e-2,
        ),
        "straddling": scripted(folder / "straddling", num_generations=8, loss_type="grpo", top_entropy_quantile=0.5),
        "checkpointing": scripted(folder / "checkpointing", gradient_checkpointing=True, entropy_coef=0.1),
        "sampled": sampled(folder / "sampled"),
    }
    (folder / f"{WORLD}_{RANK}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
