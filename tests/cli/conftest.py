"""Helpers for tests that need a process of their own."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _run(arguments: list[str], folder: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"} | variables
    environment["HF_HOME"] = str(folder / "cache")
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def run_python(tmp_path: Path) -> "Callable[..., subprocess.CompletedProcess[str]]":
    """Runs a piece of Python in a fresh process, in the test's folder."""
    return lambda code, **variables: _run(["-c", code], tmp_path, **variables)


@pytest.fixture
def run_trl(tmp_path: Path) -> "Callable[..., subprocess.CompletedProcess[str]]":
    """Runs the command `trl` in a fresh process, in the test's folder."""
    return lambda *words, **variables: _run(["-m", "trl.cli", *words], tmp_path, **variables)
