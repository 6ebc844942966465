"""From a config to servers that are known, checked and joined."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from trl.errors import ConfigError
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_probe import ServerFacts, probe
from trl.generation.vllm_server import Server, VLLMServerEngine
from trl.weights.sync import ServerSync
from trl.weights.transfer import make_transfer


class ServerArguments(Protocol):
    """The options read here (`trl.trainer.arguments.VLLMArguments`)."""

    vllm_server_base_url: Any
    vllm_server_host: str
    vllm_server_port: int
    vllm_server_timeout: float
    vllm_server_api_key: str | None
    vllm_request_timeout: float
    vllm_weight_sync_timeout: float
    vllm_allow_unsupported_version: bool
    vllm_group_port: int
    vllm_structured_outputs_regex: str | None


def server_urls(args: ServerArguments) -> list[str]:
    """The base URLs of the servers, in the order given."""
    given = args.vllm_server_base_url
    if given is None:
        return [f"http://{args.vllm_server_host}:{args.vllm_server_port}"]
    urls = [given] if isinstance(given, str) else list(given)
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"`vllm_server_base_url` must start with http:// or https:// (got {url!r}).")
    return urls


def clients(args: ServerArguments) -> list[VLLMClient]:
    """One client per server; nothing is asked yet."""
    return [
        VLLMClient(url, api_key=args.vllm_server_api_key, timeout=args.vllm_weight_sync_timeout)
        for url in server_urls(args)
    ]


def connect(args: ServerArguments, device: torch.device, *, sends_weights: bool) -> VLLMServerEngine:
    """The engine over the servers of these arguments, which are waited for, asked what they are, and checked.

    Args:
        device: of the trainer.
        sends_weights: whether this process moves the weights; the others only generate.

    Raises:
        ServerUnreachableError, ServerVersionError, WeightSyncError, ConfigError: before anything is sent.
    """
    servers = []
    for i, client in enumerate(clients(args)):
        client.wait_until_ready(args.vllm_server_timeout)
        facts = probe(client, allow_unsupported_version=args.vllm_allow_unsupported_version)
        for problem in blocking_problems(facts, client.base_url):
            raise ConfigError(problem)
        sync = None
        if sends_weights:
            # One port is reserved for the first server; further ones take any.
            port = args.vllm_group_port if i == 0 else None
            sync = ServerSync(
                client,
                facts,
                make_transfer(client, facts, device, port),
                deadline=args.vllm_weight_sync_timeout,
                expected=checkpoint_shapes(facts.model_path),
            )
        servers.append(Server(client, facts, sync))
    if len({s.facts.vocab_size for s in servers}) > 1 or len({s.facts.model_path for s in servers}) > 1:
        raise ConfigError(
            f"The servers have different models: {', '.join(s.facts.model_path for s in servers)}: start them with one."
        )
    regex = args.vllm_structured_outputs_regex
    return VLLMServerEngine(
        servers,
        request_timeout=args.vllm_request_timeout,
        structured_outputs=None if regex is None else {"regex": regex},
    )


def blocking_problems(facts: ServerFacts, url: str) -> list[str]:
    """What keeps this server from serving a training run, each with its repair."""
    problems = []
    if not facts.dev_mode:
        problems.append(f"The server {url} has no weight-transfer endpoints: start it with VLLM_SERVER_DEV_MODE=1.")
        return problems
    if facts.backend is None:
        problems.append(
            f"The server {url} cannot receive weights: start it with "
            """`--weight-transfer-config '{"backend": "nccl"}'`."""
        )
    if facts.logprobs_mode is not None and facts.logprobs_mode != "processed_logprobs":
        problems.append(
            f"The server {url} returns {facts.logprobs_mode}, which leave the temperature out: start it with "
            "`--logprobs-mode processed_logprobs`."
        )
    return problems


def checkpoint_shapes(path: str) -> dict[str, tuple[int, ...]]:
    """Shapes by name in the safetensors files of a folder; empty where they cannot be read."""
    from safetensors import safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(_weight_files(path)):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dict
                shapes[name] = tuple(tensors.get_slice(name).get_shape())
    return shapes


def _weight_files(path: str) -> Sequence[Path]:
    folder = Path(path)
    return list(folder.glob("*.safetensors")) if folder.is_dir() else []
