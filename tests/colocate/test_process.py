"""What an engine does to the process it lives in, and to other processes: nothing."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from fixtures.colocate import skip_without_vllm

skip_without_vllm()

WORKER = Path(__file__).parent / "worker.py"
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def start(role, folder, **variables):
    """A process of this role, with only these of the variables that a launcher sets."""
    env = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
    env |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true", **variables}
    command = [sys.executable, str(WORKER), role, str(folder)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def ended(processes):
    """The output of each process, once all of them have ended well."""
    outputs = [process.communicate(timeout=280)[0] for process in processes]
    assert [p.returncode for p in processes] == [0] * len(processes), "\n".join(o[-3000:] for o in outputs)
    return outputs


def found(folder, rank=0):
    return json.loads((folder / f"{rank}.json").read_text())


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """Outputs and findings of two runs at once: one from a shell, and one from a launcher whose port is said."""
    folders = [tmp_path_factory.mktemp(name) for name in ("shell", "launcher")]
    sizes = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    launched = {**sizes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    outputs = ended([start("alone", folders[0]), start("alone", folders[1], **launched)])
    return outputs, [found(folder) for folder in folders]


def losses(job):
    return [entry["loss"] for entry in job["log"] if "loss" in entry]


def test_two_runs_on_one_machine_do_not_meet(jobs):
    _, (shell, launcher) = jobs
    assert len(losses(shell)) == 3
    assert losses(shell) == pytest.approx(losses(launcher), abs=1e-5)
    for job in (shell, launcher):
        told, own = job["answers"]
        assert told == own


@pytest.mark.parametrize("job", [0, 1], ids=["shell", "launcher"])
def test_the_process_is_as_it_was_once_the_engine_has_started(jobs, job):
    states = jobs[1][job]["states"]
    # A launcher's processes are in one before.
    assert states["before"]["in a group"] is (job == 1)
    assert states["started"] == {**states["before"], "in a group": True}


@pytest.mark.parametrize("job", [0, 1], ids=["shell", "launcher"])
def test_a_weight_update_changes_nothing_else(jobs, job):
    before, after = jobs[1][job]["update"]
    assert after == before


@pytest.mark.parametrize("job", [0, 1], ids=["shell", "launcher"])
def test_the_process_is_as_it_was_when_the_engine_has_ended(jobs, job):
    states = jobs[1][job]["states"]
    # A run draws, of course.
    assert {k: v for k, v in states["closed"].items() if "generator" not in k} == {
        k: v for k, v in states["before"].items() if "generator" not in k
    }
    assert ("MASTER_PORT" in states["closed"]["environment"]) is (job == 1)


def test_an_update_of_the_weights_says_nothing(jobs):
    """One line for each step would hide what there is to read."""
    for output in jobs[0]:
        assert "grad_norm" in output
        assert "Failed to load weights" not in output
        assert "raw prompts" not in output


# ---- vLLM's Transformers backend ----


@pytest.fixture(scope="module")
def over_transformers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("transformers")
    ended([start("transformers", folder)])
    return found(folder)


def test_a_run_over_the_transformers_backend(over_transformers):
    steps = over_transformers["log"][:-1]
    assert len(steps) == 6
    assert all(abs(entry["loss"]) < 10 for entry in steps)
    assert over_transformers["moved"] > 1e-3
    assert max(entry["kl"] for entry in steps) > 1e-3
    assert len(over_transformers["parity"]) == 6
    assert max(over_transformers["parity"]) < 1e-4
    told, own = over_transformers["answers"]
    assert told == own


def test_the_policy_is_still_what_it_was(over_transformers):
    assert over_transformers["class"] == "Qwen3ForCausalLM"
    assert over_transformers["config"]["architectures"] == ["Qwen3ForCausalLM"]
    assert over_transformers["copy"] == 0.0


@pytest.mark.parametrize("which", ["earlier", "later"])
def test_other_models_of_the_family_run(over_transformers, which):
    """One that the trainer does not know of, and one that is made when the engine has ended."""
    (first, *_), (second, *_) = over_transformers["earlier"], over_transformers["later"]
    assert isinstance(over_transformers[which], list), over_transformers[which]
    assert first == second


def test_what_was_trained_can_be_loaded_in_the_same_process(over_transformers):
    assert isinstance(over_transformers["loaded"], list), over_transformers["loaded"]
    (loaded,), (trained,) = over_transformers["loaded"], over_transformers["logits"]
    for row, expected in zip(loaded, trained, strict=True):
        assert row == pytest.approx(expected, abs=1e-5)


# ---- several processes ----


def launch(role, folder, world):
    sizes = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    launcher = {**sizes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    ended([start(role, folder, RANK=str(r), LOCAL_RANK=str(r), **launcher) for r in range(world)])
    return [found(folder, r) for r in range(world)]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    ended([start("tp1", folder)])
    return found(folder)


@pytest.fixture(scope="module", params=["tp1", "tp2"])
def two_processes(request, tmp_path_factory):
    return request.param, launch(request.param, tmp_path_factory.mktemp(request.param), 2)


@pytest.mark.slow
def test_every_process_gets_the_completions_of_its_own_prompts(one_process, two_processes):
    role, ranks = two_processes
    assert [rank["engine's processes"] for rank in ranks] == [2 if role == "tp2" else 1] * 2
    assert ranks[0]["answers"] + ranks[1]["answers"] == one_process["answers"]
    for rank in ranks:
        assert rank["answers"] == rank["expected"]
    assert ranks[0]["only the first asks"] == ranks[0]["answers"]
    assert ranks[1]["only the first asks"] == []


@pytest.mark.slow
def test_the_engines_of_all_processes_have_the_weights_of_the_run(two_processes):
    _, ranks = two_processes
    for rank in ranks:
        steps = rank["log"][:-1]
        assert len(steps) == 3
        assert max(entry["sampling/parity_max"] for entry in steps) < 1e-4
        assert rank["later"] != rank["answers"]
    assert [e["loss"] for e in ranks[0]["log"][:-1]] == pytest.approx([e["loss"] for e in ranks[1]["log"][:-1]])


@pytest.mark.slow
def test_the_processes_are_still_a_group_when_their_engines_have_ended(two_processes):
    _, ranks = two_processes
    assert [rank["sum of ranks"] for rank in ranks] == [1.0, 1.0]


@pytest.mark.slow
def test_processes_draw_different_completions(two_processes):
    _, ranks = two_processes
    first, second = (rank["completions"] for rank in ranks)
    assert len(first) == len(second) == 12
    assert first != second
