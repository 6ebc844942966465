"""Every online method on two processes does what it does on one: same losses, gradients and metrics."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fixtures.online_methods import GROUP_METHODS, METHODS, distance
from fixtures.scripts import load_script

WORKER = Path(__file__).parent / "online_processes_worker.py"
PROCESSES = 2
CASES = [(name, case) for name in METHODS for case in ("plain", "budget", "padded", "idle")]
CASES += [(name, "straddling") for name in GROUP_METHODS]

# What shows that the second half has nothing to train: equal rewards, none beside 0 1 2 3, or no tokens.
OF_IDLE_HALF = {
    "grpo": ("frac_reward_zero_std", 0.5),
    "rloo": ("frac_reward_zero_std", 0.5),
    "online-dpo": ("reward", 1.5),
    "distillation": ("completions/min_length", 0.0),
}

pytestmark = pytest.mark.slow


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
    command = [sys.executable, str(WORKER), str(folder)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Steps and evaluation of every method on one process: this one."""
    return load_script(WORKER).run(tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """The same of each of two processes."""
    folder = tmp_path_factory.mktemp("together")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [start(folder, rank, port) for rank in range(PROCESSES)]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [p.returncode for p in processes] == [0] * PROCESSES, "\n".join(outputs)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(PROCESSES)]


@pytest.mark.parametrize(("name", "case"), CASES)
def test_gradients_and_metrics_are_those_of_one_process(alone, together, name, case):
    one = alone[name]["steps"][case]
    for process in together:
        two = process[name]["steps"][case]
        assert max(map(distance, one.gradients, two.gradients)) < 1e-5
        for expected, found in zip(one.logged, two.logged, strict=True):
            assert found == pytest.approx(expected, abs=1e-5)
    assert distance(*one.gradients) > 1e-3


@pytest.mark.parametrize(("name", "case"), CASES)
def test_the_cases_are_what_they_are_meant_to_be(alone, together, name, case):
    """Two steps: processes take equally many micro-batches, as many as the one with most tokens needs."""
    one, (first, second) = alone[name]["steps"][case], (process[name]["steps"][case] for process in together)
    assert first.micro_batches == second.micro_batches
    assert (first.micro_batches > 2) is (case != "plain")
    assert (one.micro_batches > 2) is (case != "plain")
    if case == "idle":
        key, value = OF_IDLE_HALF[name]
        assert one.logged[0][key] == pytest.approx(value)


@pytest.mark.parametrize("name", METHODS)
def test_evaluation_is_that_of_one_process(alone, together, name):
    for process in together:
        assert process[name]["evaluation"] == pytest.approx(alone[name]["evaluation"], abs=1e-5)


@pytest.mark.parametrize("name", METHODS)
def test_processes_write_for_themselves_and_train_together(alone, together, name):
    first, second = (process[name]["sampled"] for process in together)
    for one, other in zip(first["rounds"], second["rounds"], strict=True):
        assert len(one) == len(other)
        assert [completion for _, completion in one] != [completion for _, completion in other]
    assert first["logged"] == second["logged"]
    assert len(first["logged"]) == 4
    assert all(torch.equal(value, second["weights"][key]) for key, value in first["weights"].items())
    assert distance(first["weights"], alone[name]["sampled"]["weights"]) > 1e-3


@pytest.mark.parametrize("name", GROUP_METHODS)
def test_a_resumed_run_is_the_uninterrupted_one_on_every_process(together, name):
    """The second round lies across the checkpoint: nobody asks for a third."""
    for process in together:
        whole, resumed = process[name]["sampled"], process[name]["resumed"]
        assert (len(whole["rounds"]), len(resumed["rounds"])) == (2, 0)
        assert resumed["logged"] == whole["logged"]
        assert all(torch.equal(value, resumed["weights"][key]) for key, value in whole["weights"].items())
