"""A run on two processes is the run on one: same loss, gradients and metrics, wherever a group lies."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet
import pytest
import torch

WORKER = Path(__file__).parent / "ddp_worker.py"
VARYING = ("step_time", "runtime", "per_second", "logged_at")


def start(folder, world, rank, port):
    launcher = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
    if world > 1:
        env |= {name: str(value) for name, value in launcher.items()}
    command = [sys.executable, str(WORKER), str(folder)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """World size -> results of each rank, and the folder they wrote to."""
    found = {}
    for world in (1, 2):
        folder = tmp_path_factory.mktemp(f"world{world}")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        processes = [start(folder, world, rank, port) for rank in range(world)]
        outputs = [process.communicate(timeout=300)[0] for process in processes]
        assert [p.returncode for p in processes] == [0] * world, "\n".join(outputs)
        found[world] = [json.loads((folder / f"{world}_{rank}.json").read_text()) for rank in range(world)], folder
    return found


CASES = ["plain", "budget", "straddling", "checkpointing"]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_logs_are_equal(results, case):
    one = results[1][0][0][case]["logs"]
    for rank in range(2):
        two = results[2][0][rank][case]["logs"]
        for expected, found in zip(one, two, strict=True):
            assert expected.keys() == found.keys()
            compared = [key for key in expected if not any(word in key for word in VARYING)]
            assert {k: found[k] for k in compared} == pytest.approx({k: expected[k] for k in compared}, abs=1e-5)
    assert one[0]["last"] == 3.0
    assert one[0]["grad_norm"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_equal(results, case):
    one = results[1][0][0][case]["gradients"]
    for rank in range(2):
        two = results[2][0][rank][case]["gradients"]
        for name, expected in one.items():
            expected, found = torch.tensor(expected), torch.tensor(two[name])
            torch.testing.assert_close(found, expected, atol=1e-4 * expected.abs().max().item() + 1e-7, rtol=0)


@pytest.mark.slow
def test_evaluation_is_equal(results):
    one, two = results[1][0][0]["plain"]["evaluation"], results[2][0][0]["plain"]["evaluation"]
    for key in ("eval_reward", "eval_reward_std", "eval_completions/mean_length", "eval_loss", "eval_entropy"):
        assert two[key] == pytest.approx(one[key], abs=1e-5)


@pytest.mark.slow
def test_the_table_has_the_rows_of_both_processes(results):
    def rows(world):
        path = results[world][1] / "plain" / "completions" / "completions_00001.parquet"
        return [{k: v for k, v in row.items() if k != "rank"} for row in pyarrow.parquet.read_table(path).to_pylist()]

    assert len(rows(2)) == 8
    for one, two in zip(rows(1), rows(2), strict=True):
        assert one == pytest.approx(two, abs=1e-5)


@pytest.mark.slow
def test_processes_draw_different_samples(results):
    first, second = (results[2][0][rank]["sampled"] for rank in range(2))
    assert len(first) == len(second) == 4
    assert not set(map(tuple, first)) & set(map(tuple, second))
