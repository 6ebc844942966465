"""What a vLLM server is and can do: asked once, answered by name. Nothing else compares vLLM versions."""

import warnings
from dataclasses import dataclass
from typing import Any

from trl._deps import VLLM_VERSIONS, parse_version
from trl.errors import ServerError, ServerVersionError
from trl.generation.vllm_client import VLLMClient


@dataclass(frozen=True)
class ServerFacts:
    """One server.

    Attributes:
        version: of its vLLM.
        model: the id requests name.
        model_path: folder or hub name the weights came from.
        max_model_len: longest prompt plus completion, in tokens.
        dev_mode: whether the endpoints for weights and caches are there.
        world_size: number of workers, or None without dev mode.
        backend: of its weight transfer, or None where none is configured.
        logprobs_mode: e.g. `processed_logprobs`, or None without dev mode.
        max_logprobs: cap of log-probs per token, -1 for none, or None without dev mode.
        dtype: of its weights, e.g. `bfloat16`, or None without dev mode.
        vocab_size: of its model, or None where the server does not tell.
    """

    version: str
    model: str
    model_path: str
    max_model_len: int
    dev_mode: bool
    world_size: int | None
    backend: str | None
    logprobs_mode: str | None
    max_logprobs: int | None
    dtype: str | None
    vocab_size: int | None = None

    @property
    def packed_at_init(self) -> bool:
        """Whether the packed layout of `nccl` is announced once when joining (else with each update)."""
        return self._since("0.28")

    @property
    def ipc_packed_at_init(self) -> bool:
        """The same for `ipc`."""
        return self._since("0.27")

    @property
    def names_weight_versions(self) -> bool:
        """Whether a finished update can be given a label that `/weight_info` tells."""
        return self._since("0.27")

    @property
    def image_routes_need_flag(self) -> bool:
        """Whether `--enable-scale-out` exists and is needed for images."""
        return self._since("0.30")

    @property
    def cuts_long_requests(self) -> bool:
        """Whether prompt plus `max_tokens` beyond the context is cut (else refused)."""
        return self._since("0.32")

    def _since(self, version: str) -> bool:
        return parse_version(self.version) >= parse_version(version)


def probe(client: VLLMClient, *, allow_unsupported_version: bool = False) -> ServerFacts:
    """Asks a server that is ready.

    Raises:
        ServerVersionError: outside the supported range, unless allowed, which makes it a warning.
    """
    version = client.version()
    check_version(version, allow=allow_unsupported_version)
    model = client.models()[0]
    config: dict[str, Any] = {}
    world_size = None
    try:
        world_size = client.world_size()
        config = client.server_info()
    except ServerError as error:
        if error.status != 404:
            raise
    model_config = config.get("model_config") or {}
    transfer = config.get("weight_transfer_config") or {}
    hf_config = model_config.get("hf_text_config") or model_config.get("hf_config") or {}
    return ServerFacts(
        version=version,
        model=model["id"],
        model_path=model.get("root") or model["id"],
        max_model_len=int(model["max_model_len"]),
        dev_mode=world_size is not None,
        world_size=world_size,
        backend=transfer.get("backend"),
        logprobs_mode=model_config.get("logprobs_mode"),
        max_logprobs=model_config.get("max_logprobs"),
        dtype=str(model_config["dtype"]).removeprefix("torch.") if model_config.get("dtype") else None,
        vocab_size=hf_config.get("vocab_size") if isinstance(hf_config, dict) else None,
    )


def check_version(version: str, *, allow: bool = False) -> None:
    """Raises `ServerVersionError` for a vLLM outside the supported range, or warns where that is allowed."""
    try:
        if VLLM_VERSIONS.contains(parse_version(version).public):
            return
    except ValueError as error:
        raise ServerVersionError(f"The server calls its version {version!r}: is it vLLM?") from error
    text = f"vLLM {version} is outside the supported range {VLLM_VERSIONS}"
    if not allow:
        raise ServerVersionError(
            f"{text}: install a version inside it, or set `vllm_allow_unsupported_version=True` to try anyway."
        )
    warnings.warn(f"{text}: what it answers may be misread.", stacklevel=3)
