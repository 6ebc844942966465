"""DPO: losses and gradients are those of plain formulas, and the same however a step is cut into micro-batches and
spread over processes.

Run as a script, `python test_dpo.py FOLDER` with the variables a launcher sets, it is one process of several.
"""

import copy
import math
import os
import socket
import subprocess
import sys
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from datasets import Dataset
from fixtures.models import random_model
from fixtures.online_methods import Steps, distance, timeless
from fixtures.runs import GradientGrabber
from fixtures.tokenizers import word_tokenizer
from torch.nn.functional import logsigmoid

from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_trainer import DPOTrainer

PROCESSES = 2
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def words(start, count):
    return [7 + (start * 11 + 5 * i) % 57 for i in range(count)]


# Prompt, chosen, rejected. The first half has most of the tokens; lengths of a pair differ either way.
SIZES = [(3, 9, 7), (4, 6, 9), (2, 8, 8), (5, 7, 6), (3, 1, 2), (2, 2, 1), (4, 1, 1), (3, 3, 2)]
PAIRS = [(words(i, p), words(i + 20, c), words(i + 40, r)) for i, (p, c, r) in enumerate(SIZES)]
# Prompts long enough to be stored once, of which two pairs have the same.
LONG = [(words(i // 2, 33), chosen, rejected) for i, (_, chosen, rejected) in enumerate(PAIRS)]


def dataset(pairs):
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    return Dataset.from_list([dict(zip(names, pair, strict=True)) for pair in pairs])


def near(model):
    """Another model, whose log-probs of a token differ by some tenths."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.03 * torch.randn(parameter.shape, generator=generator))
    return other


def train(folder, pairs=PAIRS, *, packed=True, steps=1, **changes):
    """Steps of plain gradient descent over all pairs in their order, and the evaluation after them."""
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": steps,
        "per_device_train_batch_size": len(pairs) // WORLD,
        "per_device_eval_batch_size": len(pairs) // WORLD,
        "optim": "sgd",
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
    }
    model = random_model(seed=2)
    reference = near(model)
    if not packed:
        for m in (model, reference):
            m.set_attn_implementation("eager")  # it only takes padded rows
    grabber, rows = GradientGrabber(), dataset(pairs)
    trainer = DPOTrainer(
        model,
        reference,
        DPOConfig(**(settings | changes)),
        train_dataset=rows,
        eval_dataset=rows,
        processing_class=word_tokenizer(),
        callbacks=[grabber],
    )
    assert trainer.packed is packed
    assert trainer.reference_packed is (packed and trainer.args.needs_reference)
    loss, micro_batches = trainer.loss, []

    def counted(*args):
        micro_batches.append(args)
        return loss(*args)

    trainer.loss = counted
    trainer.train()
    found = Steps(list(map(timeless, trainer.state.log_history[:steps])), grabber.steps, len(micro_batches))
    return found, timeless(trainer.evaluate())


# ---- the formulas ----


def log_probs(model, prompt, completion):
    logits = model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(1)


def sums(d, scores=lambda r: r):
    return scores(d["chosen"].sum()) - scores(d["rejected"].sum())


def ld_margin(d, alpha):
    shared = min(len(d["chosen"]), len(d["rejected"]))
    parts = {name: d[name][:shared].sum() + alpha * d[name][shared:].sum() for name in ("chosen", "rejected")}
    return parts["chosen"] - parts["rejected"]


def dpo(margin, beta=0.1):
    return -logsigmoid(beta * margin)


# Settings, and the loss of a pair from the differences of its tokens' log-probs.
FORMULAS = {
    "sigmoid": ({}, lambda d: dpo(sums(d))),
    "ipo": (
        {"loss_type": "ipo", "beta": 0.2},
        lambda d: (d["chosen"].mean() - d["rejected"].mean() - 1 / 0.4) ** 2,
    ),
    "apo_zero": (
        {"loss_type": "apo_zero", "beta": 0.3},
        lambda d: 1 - torch.sigmoid(0.3 * d["chosen"].sum()) + torch.sigmoid(0.3 * d["rejected"].sum()),
    ),
    "mixture": (
        {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 0.5]},
        lambda d: (
            0.8 * dpo(sums(d))
            - 0.2 * (logsigmoid(0.1 * d["chosen"].sum()) + logsigmoid(-0.1 * d["rejected"].sum()))
            # Over 37 chosen tokens of 8 pairs: the mean over pairs is to be that over tokens.
            + 0.5 * d["nll"] * 8 / 37
        ),
    ),
    "sft": ({"loss_type": "sft"}, lambda d: d["nll"] * 8 / 37),
    "ld_alpha": ({"ld_alpha": 0.3}, lambda d: dpo(ld_margin(d, 0.3))),
    "use_weighting": ({"use_weighting": True}, lambda d: d["wpo"] * dpo(sums(d))),
    "forward_kl": ({"f_divergence_type": "forward_kl"}, lambda d: dpo(sums(d, lambda r: 1 - torch.exp(-r)))),
    "js_divergence": (
        {"f_divergence_type": "js_divergence"},
        lambda d: dpo(sums(d, lambda r: math.log(2) + logsigmoid(r))),
    ),
    "alpha_divergence": (
        {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.3},
        lambda d: dpo(sums(d, lambda r: (torch.exp(-0.7 * r) - 1) / -0.7)),
    ),
}


def plain(formula):
    """Mean loss over the pairs in float64, and its gradients by name, by one forward pass for each completion."""
    policy = random_model(seed=2).double()
    reference = near(random_model(seed=2)).double().requires_grad_(False)
    losses = []
    for prompt, chosen, rejected in PAIRS:
        d, weights = {}, []
        for name, completion in (("chosen", chosen), ("rejected", rejected)):
            log_p = log_probs(policy, prompt, completion)
            own, ref = (
                m[range(len(completion)), completion] for m in (log_p, log_probs(reference, prompt, completion))
            )
            d[name] = own - ref
            weights.append((own - (2 * log_p).logsumexp(1)).mean().exp().detach())
            d.setdefault("nll", -own.sum())
        losses.append(formula({**d, "wpo": weights[0] * weights[1]}))
    loss = torch.stack(losses).mean()
    loss.backward()
    return loss.item(), {name: p.grad for name, p in policy.named_parameters()}


def test_the_data_are_what_the_formulas_count():
    assert sum(len(chosen) for _, chosen, _ in PAIRS) == 37
    assert len(PAIRS) == 8


@pytest.mark.parametrize("name", FORMULAS)
def test_loss_and_gradients_are_those_of_the_formula(tmp_path, name):
    settings, formula = FORMULAS[name]
    found, _ = train(tmp_path, **settings)
    loss, gradients = plain(formula)
    assert found.losses[0] == pytest.approx(loss, rel=1e-5)
    assert distance({n: g.float() for n, g in gradients.items()}, found.gradients[0]) < 1e-4


def test_the_formulas_differ():
    """Otherwise the test above would not tell one from another."""
    losses = sorted(plain(formula)[0] for _, formula in FORMULAS.values())
    assert min(b - a for a, b in pairwise(losses)) > 1e-4


def test_evaluation_is_the_loss_of_the_formula(tmp_path):
    settings, formula = FORMULAS["mixture"]
    _, evaluation = train(tmp_path, learning_rate=0.0, **settings)
    assert evaluation["eval_loss"] == pytest.approx(plain(formula)[0], rel=1e-5)


# ---- cuts ----

BUDGET = {"max_tokens_per_micro_batch": 16}
MIXED = FORMULAS["mixture"][0]


def sizes(pairs):
    """Micro-steps of this many pairs, of all processes together."""
    return {"per_device_train_batch_size": pairs // WORLD, "gradient_accumulation_steps": 8 // pairs}


CASES: dict[str, dict[str, Any]] = {
    "whole": MIXED,
    "accumulation": {**MIXED, **sizes(2)},
    "budget": {**MIXED, **BUDGET},
    "accumulation and budget": {**MIXED, **BUDGET, **sizes(4)},
    "ipo": {"loss_type": "ipo", **BUDGET},
    "weighted": {"use_weighting": True, "ld_alpha": 0.5, **BUDGET, **sizes(4)},
    "precomputed": {**MIXED, **BUDGET, "precompute_ref_log_probs": True, "precompute_ref_batch_size": 3},
    "long prompts": {**MIXED, "pairs": LONG, "max_tokens_per_micro_batch": 60},
    "checkpointing": {**MIXED, **BUDGET, "gradient_checkpointing": True},
    # The last process lacks a row.
    "seven": {**MIXED, "pairs": PAIRS[:7], **sizes(8), "per_device_eval_batch_size": 8 // WORLD},
}


def run_cases(folder):
    return {name: train(folder, steps=2, **case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Steps and evaluation of every case on one process: this one."""
    return run_cases(tmp_path_factory.mktemp("alone"))


def assert_same_run(one, other):
    """Two steps and an evaluation: gradients, and everything logged but how long it took."""
    (steps, evaluation), (other_steps, other_evaluation) = one, other
    assert max(map(distance, steps.gradients, other_steps.gradients)) < 1e-5
    for expected, found in zip((*steps.logged, evaluation), (*other_steps.logged, other_evaluation), strict=True):
        assert found == pytest.approx(expected, abs=1e-5, rel=1e-5)
    assert distance(*steps.gradients) > 1e-3


@pytest.mark.parametrize("case", ["accumulation", "budget", "accumulation and budget", "precomputed", "checkpointing"])
def test_cuts_change_nothing(alone, case):
    assert_same_run(alone["whole"], alone[case])
    assert alone[case][0].micro_batches > 2
    assert alone["whole"][0].micro_batches == 2


@pytest.mark.parametrize("case", ["ipo", "weighted", "long prompts"])
def test_cuts_change_nothing_of_other_settings(tmp_path, alone, case):
    settings = {n: v for n, v in CASES[case].items() if n not in {**BUDGET, **sizes(4)}}
    assert_same_run(train(tmp_path, steps=2, **settings), alone[case])
    assert alone[case][0].micro_batches > 2


@pytest.mark.parametrize("pairs", [PAIRS, LONG], ids=["short prompts", "long prompts"])
@pytest.mark.parametrize("budget", [None, 60])
def test_padded_rows_have_the_same_gradients(tmp_path, pairs, budget):
    packed = train(tmp_path, pairs, steps=2, **MIXED)
    padded = train(tmp_path, pairs, steps=2, packed=False, max_tokens_per_micro_batch=budget, **MIXED)
    # The layouts round differently.
    assert max(map(distance, packed[0].gradients, padded[0].gradients)) < 1e-4
    for expected, found in zip((*packed[0].logged, packed[1]), (*padded[0].logged, padded[1]), strict=True):
        assert found == pytest.approx(expected, abs=1e-5, rel=1e-5)


# ---- processes ----


def start(folder, rank, port):
    launcher = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": PROCESSES,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
    env |= {name: str(value) for name, value in launcher.items()}
    command = [sys.executable, __file__, str(folder)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """Steps and evaluation of every case, of each of two processes."""
    folder = tmp_path_factory.mktemp("together")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [start(folder, rank, port) for rank in range(PROCESSES)]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [p.returncode for p in processes] == [0] * PROCESSES, "\n".join(outputs)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(PROCESSES)]


@pytest.mark.parametrize("case", CASES)
def test_two_processes_are_as_one(alone, together, case):
    """But for `sft` in evaluation, which is the mean over the tokens of a batch: of a process."""
    steps, evaluation = alone[case]
    for process in together:
        other_steps, other_evaluation = process[case]
        own = {"eval_loss": evaluation["eval_loss"]} if "sft" in CASES[case].get("loss_type", "") else {}
        assert_same_run((steps, evaluation), (other_steps, other_evaluation | own))


@pytest.mark.parametrize("case", CASES)
def test_processes_take_equally_many_micro_batches(together, case):
    """Those with fewer tokens repeat a pair that must not count."""
    first, second = (process[case][0].micro_batches for process in together)
    assert first == second


def main(folder):
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message=".*barrier.*device.*")
    torch.save(run_cases(folder), folder / f"{RANK}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    torch.distributed.destroy_process_group()
