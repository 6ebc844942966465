"""The online methods against a real `vllm serve` on the CPU. The trainer's environment has no vLLM."""

import importlib.util
import math
import os
import time
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from fixtures.models import vllm_model
from fixtures.online_methods import METHODS
from fixtures.tokenizers import word_tokenizer
from fixtures.vllm_cpu import RealServer, installed

from trl.cli.main import main
from trl.errors import ServerError, TRLError
from trl.generation.connect import connect
from trl.generation.local import LocalEngine
from trl.models.load import use_packed_attention
from trl.types import Prompt, Sampling
from trl.weights.source import PolicyWeights

pytestmark = pytest.mark.filterwarnings("default")  # threads of a killed connection may warn late

PROMPTS = [Prompt([10, 11, 12]), Prompt([20, 21, 22, 23]), Prompt([30])]
GREEDY = Sampling(n=1, max_tokens=12, temperature=0.0)
# The first requests of a server that has just started, on a busy machine, take their time.
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    if not installed():
        if os.environ.get("TRL_REQUIRE_VLLM") == "1":
            pytest.fail("no vLLM in .venv-vllm: run `make test`, which installs it")
        pytest.skip("no vLLM in .venv-vllm: `make test` installs it")
    folder = tmp_path_factory.mktemp("served")
    vllm_model().save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    real = RealServer(folder, folder / "server.log")
    real.start()
    yield real
    real.kill()


def arguments(server: RealServer, **changes: object) -> SimpleNamespace:
    settings = {
        "vllm_server_base_url": server.url,
        "vllm_server_host": "127.0.0.1",
        "vllm_server_port": server.port,
        "vllm_server_timeout": 30.0,
        "vllm_server_api_key": None,
        "vllm_request_timeout": DEADLINE_S,
        "vllm_weight_sync_timeout": DEADLINE_S,
        "vllm_allow_unsupported_version": False,
        "vllm_group_port": 0,
        "vllm_structured_outputs_regex": None,
    }
    return SimpleNamespace(**{**settings, **changes})


def assert_equal_to_local(engine, model) -> None:
    """The server's greedy completions and their log-probs are those of the model here."""
    here = dict(LocalEngine(model, eos_ids=[1]).generate(PROMPTS, GREEDY))
    there = dict(engine.generate(PROMPTS, GREEDY))
    for index in range(len(PROMPTS)):
        (mine,), (theirs,) = here[index], there[index]
        assert theirs.token_ids == mine.token_ids
        assert theirs.logps == pytest.approx(mine.logps, abs=1e-4)


def perturb(model) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)


def test_the_trainer_has_no_vllm():
    assert importlib.util.find_spec("vllm") is None


def test_a_sync_makes_the_server_the_model(server):
    model = vllm_model()
    use_packed_attention(model)
    engine = connect(arguments(server), torch.device("cpu"), sends_weights=True)
    try:
        assert_equal_to_local(engine, model)
        for version in (1, 2):
            perturb(model)
            before = dict(engine.generate(PROMPTS, GREEDY))
            engine.update_weights(PolicyWeights(model), version)
            after = dict(engine.generate(PROMPTS, GREEDY))
            assert [c[0].token_ids for c in before.values()] != [c[0].token_ids for c in after.values()]
            assert {c[0].policy_version for c in after.values()} == {version}
            assert_equal_to_local(engine, model)
    finally:
        engine.close()


def test_sampling_fields_reach_the_server(server):
    engine = connect(
        arguments(server, vllm_structured_outputs_regex=r"w4[0-9]( w4[0-9])*"), torch.device("cpu"), sends_weights=False
    )
    try:
        sampling = Sampling(n=3, max_tokens=5, temperature=0.7, top_k=3, extra={"min_tokens": 2})
        results = dict(engine.generate(PROMPTS, sampling))
    finally:
        engine.close()
    assert sorted(results) == [0, 1, 2]
    assert all(len(group) == 3 and 2 <= len(c.token_ids) <= 5 for group in results.values() for c in group)
    ids = {token for group in results.values() for c in group for token in c.token_ids}
    assert ids <= {*range(40, 50), 1}


@pytest.mark.parametrize("name", METHODS)
def test_a_method_trains_on_the_server_with_parity_at_rounding_level(server, tmp_path, name):
    args = METHODS[name].make_config(
        tmp_path,
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=server.url,
        vllm_server_timeout=30.0,
        vllm_request_timeout=DEADLINE_S,
        vllm_weight_sync_timeout=DEADLINE_S,
        vllm_group_port=0,
        vllm_parity_check_steps=1,
        temperature=1.0,
        learning_rate=1e-2,
        max_steps=3,
        max_tokens=8,
    )
    dataset = Dataset.from_dict({"prompt": [f"w{10 + i} w{20 + i}" for i in range(24)]})
    # By its name, and without a tokenizer: both are read from the folder.
    trainer = METHODS[name].make(args, dataset, model=str(server.model), processing_class=None)
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(steps) == 3
    assert all(math.isfinite(entry["loss"]) for entry in steps)
    for entry in steps:
        assert entry["sampling/parity_max"] < 1e-3
        assert entry["sampling/weight_sync_time"] > 0
        if "num_generations" in METHODS[name].settings:  # those with a sampler correction
            assert abs(entry["sampling/sampling_logp_difference/max"]) < 1e-3
            assert entry["sampling/importance_sampling_ratio/mean"] == pytest.approx(1.0, abs=1e-2)
    trainer.engine_weights.bring_up_to_date(3)
    assert_equal_to_local(trainer.engine, trainer.model)
    trainer.engine.close()


def test_doctor_passes_the_server_it_should(server, tmp_path, monkeypatch, capsys):
    # The server still has the weights of the run before: what is served is what is asked about.
    engine = connect(arguments(server), torch.device("cpu"), sends_weights=True)
    engine.update_weights(PolicyWeights(vllm_model()), 7)
    engine.close()
    (tmp_path / "doctor_rewards.py").write_text(
        "def length(completions, **kwargs):\n    return [0.0] * len(completions)\n"
    )
    (tmp_path / "rows.jsonl").write_text('{"prompt": "w10 w11"}\n' * 8)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    words = ["doctor", "grpo", "--model_name_or_path", str(server.model), "--dataset_name", "rows.jsonl"]
    words += ["--reward_funcs", "doctor_rewards.length", "--use_vllm", "--vllm_mode", "server"]
    words += ["--vllm_server_base_url", server.url, "--max_completion_length", "16"]
    code = main(words)
    output = capsys.readouterr().out
    assert code == 0, output
    assert "fail" not in output
    assert "parity" in output


def test_a_killed_server_is_a_typed_error_in_time_and_a_restarted_one_is_used_again(server):
    model = vllm_model()
    use_packed_attention(model)
    engine = connect(arguments(server), torch.device("cpu"), sends_weights=True)
    try:
        perturb(model)
        engine.update_weights(PolicyWeights(model), 1)
        assert_equal_to_local(engine, model)
        server.kill()
        started = time.monotonic()
        with pytest.raises(ServerError):
            dict(engine.generate(PROMPTS, GREEDY))
        with pytest.raises(TRLError):
            engine.update_weights(PolicyWeights(model), 2)
        assert time.monotonic() - started < 2 * DEADLINE_S
        server.start()
        # It came back with the weights from disk; the engine notices, and sends everything again.
        engine.update_weights(PolicyWeights(model), 3)
        assert_equal_to_local(engine, model)
    finally:
        engine.close()


def test_a_server_restarted_between_two_roll_outs_gets_the_weights_again(server):
    model = vllm_model()
    use_packed_attention(model)
    engine = connect(arguments(server), torch.device("cpu"), sends_weights=True)
    try:
        perturb(model)
        engine.update_weights(PolicyWeights(model), 1)
        server.kill()
        server.start()
        assert_equal_to_local(engine, model)
    finally:
        engine.close()


@pytest.mark.slow
def test_shared_memory_moves_the_weights_too(server):
    server.kill()
    shared = RealServer(server.model, server.log, backend="ipc")
    shared.start()
    try:
        model = vllm_model()
        use_packed_attention(model)
        engine = connect(arguments(shared), torch.device("cpu"), sends_weights=True)
        perturb(model)
        engine.update_weights(PolicyWeights(model), 1)
        assert_equal_to_local(engine, model)
        engine.close()
    finally:
        shared.kill()
        server.start()
