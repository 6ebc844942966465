"""One process with an engine: `python worker.py ROLE FOLDER`, in the environment that a launcher or a shell gives it.

What it finds goes to `FOLDER/RANK.json`.
"""

import copy
import gc
import hashlib
import json
import logging
import os
import pickle
import random
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from fixtures.colocate import complete
from fixtures.models import vllm_model
from fixtures.runs import Recorder, grpo_config, logs, make, prompts
from transformers import AutoModelForCausalLM

import trl.trainer.online as online
from trl.generation.local import LocalEngine
from trl.types import Prompt, Sampling
from trl.weights.source import PolicyWeights

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
GREEDY = Sampling(n=2, max_tokens=10, temperature=0.0)
QUESTIONS = [[10, 11, 12], [20, 21, 22, 23], [30], [7, 8], [40]]


def process_state() -> dict[str, Any]:
    """Everything about the process that a library has no business to change."""

    def digest(value: Any) -> str:
        return hashlib.sha256(pickle.dumps(value)).hexdigest()

    root = logging.getLogger()
    return {
        # torch notes a number of its own there when it is first asked to compile.
        "environment": {k: v for k, v in os.environ.items() if not k.startswith("_TORCHINDUCTOR")},
        "torch's generator": digest(torch.get_rng_state().numpy().tobytes()),
        "python's generator": digest(random.getstate()),
        "numpy's generator": digest(np.random.get_state()),
        "threads": torch.get_num_threads(),
        "default dtype": str(torch.get_default_dtype()),
        "default device": str(torch.get_default_device()),
        "gradients": torch.is_grad_enabled(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "in a group": torch.distributed.is_initialized(),
        "folder": os.getcwd(),
        "cores": sorted(os.sched_getaffinity(0)),
        "garbage collection": [gc.isenabled(), gc.get_threshold()],
        "signals": [str(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)],
        "root logger": [root.level, len(root.handlers)],
    }


def answers(engine: Any, questions: list[list[int]]) -> list[list[list[int]]]:
    rows = complete(engine, GREEDY, [Prompt(ids) for ids in questions])
    return [[c.token_ids for c in row] for row in rows]


def odd(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    return [sum(t % 2 for t in ids) / len(ids) for ids in completion_ids]


def trainer_of(folder: Path, reward: Any = odd, **changes: Any) -> Any:
    settings = {
        "use_vllm": True,
        "vllm_max_model_length": 32,
        "vllm_parity_check_steps": 1,
        "per_device_train_batch_size": 8 // WORLD,
        "learning_rate": 1e-3,
        "max_steps": 3,
    }
    args = grpo_config(folder, **(settings | changes))
    return make(vllm_model(), reward, args, prompts("w10 w11 w12", "w20 w21", "w30", "w7"))


def alone(folder: Path) -> dict[str, Any]:
    """What an engine leaves behind: around its start, and after a run. And what the run was like."""
    states = {}

    def watched(*args: Any, **options: Any) -> Any:
        # Randomness is somewhere: not where a seed of 0 puts it.
        torch.manual_seed(5)
        random.seed(6)
        np.random.seed(7)
        states["before"] = process_state()
        engine = build_engine(*args, **options)
        states["started"] = process_state()
        return engine

    build_engine, online.build_engine = online.build_engine, watched
    trainer = trainer_of(folder)
    weights = PolicyWeights(trainer.model)
    in_between = [process_state()]
    trainer.engine.update_weights(weights, 0)
    in_between.append(process_state())
    trainer.train()
    trainer.engine_weights.forget()
    trainer.engine_weights.bring_up_to_date(9)
    told, own = answers(trainer.engine, QUESTIONS), answers(LocalEngine(trainer.model, eos_ids=[1]), QUESTIONS)
    trainer.engine.close()
    states["closed"] = process_state()
    return {"states": states, "update": in_between, "answers": [told, own], "log": trainer.state.log_history}


def transformers_backend(folder: Path) -> dict[str, Any]:
    """A run over vLLM's Transformers backend, which patches classes that the policy is of."""
    before = vllm_model()
    trainer = trainer_of(folder, vllm_model_impl="transformers", beta=0.05, max_steps=6)
    start = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    moved = max((p - q).abs().max().item() for p, q in zip(trainer.model.parameters(), start, strict=True))
    policy, ids = trainer.model, torch.tensor([QUESTIONS[0]])
    with torch.no_grad():
        logits = policy(ids).logits
        copied = copy.deepcopy(policy)(ids).logits
        trainer.save_model(str(folder / "saved"))
        policy.save_pretrained(folder / "saved_by_itself")
    trainer.engine_weights.forget()
    trainer.engine_weights.bring_up_to_date(9)
    told, own = answers(trainer.engine, QUESTIONS), answers(LocalEngine(policy, eos_ids=[1]), QUESTIONS)
    trainer.engine.close()
    result = {
        "log": trainer.state.log_history,
        "impl": type(trainer.engine.llm).__name__,
        "moved": moved,
        "copy": (logits - copied).abs().max().item(),
        "answers": [told, own],
        "parity": logs(trainer, "sampling/parity_max"),
        "config": json.loads((folder / "saved" / "config.json").read_text()),
        "class": type(policy).__name__,
        "logits": logits.tolist(),
    }
    # Models that the process had before, and those that it makes afterwards.
    with torch.no_grad():
        for name, make_model in {
            "earlier": lambda: before,
            "later": vllm_model,
            "loaded": lambda: AutoModelForCausalLM.from_pretrained(folder / "saved"),
        }.items():
            try:
                result[name] = make_model()(ids).logits.tolist()
            except Exception as error:
                result[name] = f"{type(error).__name__}: {error}"
    return result


def together(folder: Path, tensor_parallel_size: int) -> dict[str, Any]:
    """Each process has questions of its own, not equally many, and its share of a run."""
    recorder = Recorder(odd)
    trainer = trainer_of(folder, recorder, vllm_tensor_parallel_size=tensor_parallel_size)
    trainer.engine_weights.bring_up_to_date(0)
    own = QUESTIONS if WORLD == 1 else [QUESTIONS[:2], QUESTIONS[2:]][RANK]
    told = answers(trainer.engine, own)
    none = answers(trainer.engine, own if RANK == 0 else [])
    expected = answers(LocalEngine(trainer.accelerator.unwrap_model(trainer.model), eos_ids=[1]), own)
    trainer.train()
    trainer.engine_weights.forget()
    trainer.engine_weights.bring_up_to_date(9)
    later = answers(trainer.engine, own)
    trainer.engine.close()
    ranks = torch.tensor([float(RANK)])
    if WORLD > 1 and torch.distributed.is_initialized():
        torch.distributed.all_reduce(ranks)
    return {
        "answers": told,
        "only the first asks": none,
        "expected": expected,
        "later": later,
        "log": trainer.state.log_history,
        "completions": recorder.completions,
        "sum of ranks": ranks.item(),
        "engine's processes": trainer.engine.llm.llm_engine.vllm_config.parallel_config.world_size,
    }


ROLES = {
    "alone": alone,
    "transformers": transformers_backend,
    "tp1": lambda folder: together(folder, 1),
    "tp2": lambda folder: together(folder, 2),
}


if __name__ == "__main__":
    role, folder = sys.argv[1], Path(sys.argv[2])
    found = ROLES[role](folder / f"run{RANK}" if WORLD == 1 else folder / "run")
    (folder / f"{RANK}.json").write_text(json.dumps(found))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
