"""`trl env`: what a bug report needs to know about the machine. Whatever is missing is said to be missing."""

import importlib
import os
import platform
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from trl._version import __version__
from trl.errors import ConfigError

_PACKAGES = {
    "Transformers": "transformers",
    "Accelerate": "accelerate",
    "Datasets": "datasets",
    "HF Hub": "huggingface_hub",
    "bitsandbytes": "bitsandbytes",
    "DeepSpeed": "deepspeed",
    "Liger-Kernel": "liger-kernel",
    "PEFT": "peft",
    "vLLM": "vllm",
}
_MISSING = "not installed"


def run(argv: Sequence[str]) -> int:
    """Print the environment and return 0.

    Raises:
        ConfigError: there are options; the command takes none.
    """
    if argv and argv[0] in ("-h", "--help"):
        print("usage: trl env\n\nPrint versions and devices, for a bug report.")
        return 0
    if argv:
        raise ConfigError(f"`trl env` takes no options (got `{' '.join(argv)}`).")
    for name, value in environment().items():
        print(f"- {name}: {value}")
    return 0


def environment() -> dict[str, str]:
    """Versions and devices by name, in the order they are printed."""
    facts = {
        "Platform": platform.platform(),
        "Python": platform.python_version(),
        "TRL": __version__ + _git_hash(),
        "PyTorch": _version("torch"),
        "Accelerators": _accelerators(),
    }
    for title, distribution in _PACKAGES.items():
        facts[title] = _version(distribution)
        if title == "Accelerate":
            facts["Accelerate config"] = _accelerate_config()
    return facts


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return _MISSING


def _git_hash() -> str:
    """The commit of a checkout, in brackets; nothing for an installed package."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return ""
    command = ["git", "-C", str(root), "rev-parse", "--short", "HEAD"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return f" ({result.stdout.strip()})"


def _accelerators() -> str:
    try:
        torch = importlib.import_module("torch")
        if torch.cuda.is_available():
            return ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
        kind = torch.accelerator.current_accelerator()
        return "none, CPU only" if kind is None else f"{torch.accelerator.device_count()} × {kind.type}"
    except (ImportError, OSError, RuntimeError) as error:
        return f"unknown ({' '.join(str(error).split())})"


def _accelerate_config() -> str:
    """The content of accelerate's default config file in one line."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    folder = Path(os.environ.get("HF_HOME", cache / "huggingface")) / "accelerate"
    for name in ("default_config.yaml", "default_config.yml", "default_config.json"):
        try:
            lines = (folder / name).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError):
            continue
        return "; ".join(line.strip() for line in lines if line.strip())
    return "not found"
