"""What a server is, asked once."""

import pytest
from fixtures.vllm_stub import VERSIONS, Fault, running_stub

from trl.errors import ServerError, ServerVersionError
from trl.generation.vllm_probe import ServerFacts, check_version, probe


def facts(version: str) -> ServerFacts:
    return ServerFacts(version, "m", "m", 10, True, 1, "gloo", None, None, None)


def test_a_server_in_dev_mode_tells_everything():
    with running_stub("0.32", max_logprobs=-1, dtype="torch.bfloat16", max_model_len=99) as server:
        found = probe(server.client())
    assert found == ServerFacts(
        version="0.32.0",
        model="policy",
        model_path="/models/policy",
        max_model_len=99,
        dev_mode=True,
        world_size=1,
        backend="gloo",
        logprobs_mode="processed_logprobs",
        max_logprobs=-1,
        dtype="bfloat16",
    )


def test_without_dev_mode_the_rest_is_still_told():
    with running_stub("0.32", dev_mode=False) as server:
        found = probe(server.client())
    assert (found.dev_mode, found.world_size, found.backend, found.logprobs_mode) == (False, None, None, None)
    assert (found.model, found.max_model_len) == ("policy", 2048)


def test_no_transfer_configured_is_no_backend():
    with running_stub("0.32", backend=None) as server:
        assert probe(server.client()).backend is None


def test_another_failure_is_not_taken_for_missing_dev_mode():
    faults = {"/server_info": Fault("status", "broken")}
    with running_stub("0.32", faults=faults) as server, pytest.raises(ServerError, match="broken"):
        probe(server.client())


@pytest.mark.parametrize(
    ("question", "first"),
    [
        ("packed_at_init", "0.28"),
        ("ipc_packed_at_init", "0.27"),
        ("names_weight_versions", "0.27"),
        ("image_routes_need_flag", "0.30"),
        ("cuts_long_requests", "0.32"),
    ],
)
def test_questions_change_their_answer_at_one_version(question, first):
    versions = ["0.23", "0.24", "0.25", "0.26", "0.27", "0.28", "0.29", "0.30", "0.31", "0.32", "0.33"]
    yes = [v for v in versions if getattr(facts(f"{v}.0"), question)]
    assert yes == versions[versions.index(first) :]


@pytest.mark.parametrize("version", [*(f"{v}.0" for v in VERSIONS), "0.33.9", "0.32.0+cpu", "0.32.1rc1"])
def test_supported_versions_pass(version):
    check_version(version)


@pytest.mark.parametrize("version", ["0.22.1", "0.34.0", "1.0"])
def test_other_versions_are_refused_or_warned_about(version):
    with pytest.raises(ServerVersionError, match=rf"vLLM {version} is outside.*vllm_allow_unsupported_version=True"):
        check_version(version)
    with pytest.warns(UserWarning, match=f"vLLM {version} is outside"):
        check_version(version, allow=True)


def test_a_version_that_is_none_is_refused():
    with pytest.raises(ServerVersionError, match="is it vLLM"):
        check_version("latest")
