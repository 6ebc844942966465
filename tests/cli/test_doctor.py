"""What `trl doctor` finds: every row that can fail does, says how to mend it, and makes the exit code 1."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fixtures.models import CHAIN_S, chain_logits, table_model
from fixtures.runs import grpo_config
from fixtures.tokenizers import word_tokenizer
from fixtures.vllm_stub import VERSIONS, Fault, running_stub

from trl.cli import doctor
from trl.cli.doctor import Finding, examine, server_settings
from trl.cli.main import main
from trl.cli.train import parse
from trl.generation.vllm_probe import ServerFacts
from trl.models.planner import PHASES
from trl.trainer.memory import plan_of

DOCS = Path(__file__).parents[2] / "docs"
HEAD = {"lm_head.weight": chain_logits(CHAIN_S).T / 8}
SERVER_ROWS = ["vLLM version", "dev mode", "weight transfer", "log-prob mode", "log-prob cap", "context"]
SERVER_ROWS += ["vocabulary", "parity"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that the stub server can be, saved."""
    folder = tmp_path_factory.mktemp("model")
    table_model(CHAIN_S).save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def options(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Options of a run without a server that lacks nothing."""
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"prompt": f"w{i} w10"}) for i in range(10, 18)))
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": "w10"}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "250")
    return {
        "model_name_or_path": str(model),
        "dataset_name": "rows.jsonl",
        "reward_funcs": "think_format_reward",
        "max_completion_length": "16",
        "use_cpu": "true",
    }


def words(options: dict[str, str]) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name}", *value.split())]


def findings(options: dict[str, str], method: str = "grpo") -> list[Finding]:
    found = list(examine(parse(method, words(options))))
    for finding in found:
        # Whatever else it tests: a failure comes with what mends it, and nothing else asks to be mended.
        assert bool(finding.repair) == (finding.verdict in ("fail", "warn")), finding
    return found


def of(subject: str, found: list[Finding]) -> Finding:
    (finding,) = [f for f in found if f.subject == subject]
    return finding


def failed(found: list[Finding]) -> list[str]:
    return [f.subject for f in found if f.verdict == "fail"]


def with_server(options: dict[str, str], *urls: str) -> dict[str, str]:
    return options | {"use_vllm": "true", "vllm_mode": "server", "vllm_server_base_url": " ".join(urls)}


def larger_head(size: int) -> dict[str, torch.Tensor]:
    """The same model with ids that never come."""
    head = torch.full((size, size), -60.0 / 8)
    head[:64, :64] = HEAD["lm_head.weight"]
    return {"lm_head.weight": head}


def good_server(version: str = "0.32", **changes: Any) -> Any:
    settings = {"backend": "gloo", "max_logprobs": -1, "weights": HEAD, "max_model_len": 64}
    return running_stub(version, **(settings | changes))


# ---- without a server ----


def test_a_run_that_lacks_nothing(options: dict[str, str]) -> None:
    found = findings(options)
    assert [f.subject for f in found] == ["settings", "rewards", "dataset", "model", "prompts", "GPU memory"]
    assert failed(found) == []


@pytest.mark.parametrize(
    ("changes", "subject", "text"),
    [
        ({"num_generations": "3"}, "settings", "num_generations"),
        ({"reward_funcs": "no_such_module.reward"}, "rewards", "no_such_module"),
        ({"dataset_name": "texts.jsonl"}, "dataset", "prompt"),
        ({"dataset_name": "missing.jsonl"}, "dataset", "missing.jsonl"),
    ],
)
def test_what_the_trainer_would_refuse(
    options: dict[str, str], changes: dict[str, str], subject: str, text: str
) -> None:
    found = findings(options | changes)
    assert failed(found) == [subject]
    finding = of(subject, found)
    assert text in f"{finding.detail} {finding.repair}"


def test_no_model_is_named(options: dict[str, str]) -> None:
    del options["model_name_or_path"]
    finding = of("model", findings(options))
    assert finding == Finding("model", "fail", "no model", "set `model_name_or_path` to a hub id or a local folder.")


def test_several_failures_are_all_told(options: dict[str, str]) -> None:
    found = findings(options | {"reward_funcs": "no_such_module.reward", "dataset_name": "texts.jsonl"})
    assert failed(found) == ["rewards", "dataset"]


def test_nothing_is_loaded_for_settings_that_do_not_fit(options: dict[str, str]) -> None:
    found = findings(options | {"num_generations": "3"})
    assert [f.subject for f in found] == ["settings", "rewards", "dataset"]


@pytest.mark.parametrize(("length", "verdict"), [(510, "ok"), (511, "fail")])
def test_prompt_and_completion_have_to_fit_the_positions(options: dict[str, str], length: int, verdict: str) -> None:
    finding = of("prompts", findings(options | {"max_completion_length": str(length)}))
    assert finding.verdict == verdict
    assert f"8 prompts 2 tokens, with its completion up to {length + 2}" in finding.detail


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Makes a GPU with so many free and total bytes."""

    def make(free: int, total: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *device: (free, total))

    return make


@pytest.mark.parametrize(("spare", "verdict"), [(0, "ok"), (-1, "fail")])
def test_memory_is_what_the_plan_needs_at_most(tmp_path: Path, gpu, spare: int, verdict: str) -> None:
    model = SimpleNamespace(failed=False, value=SimpleNamespace(policy=table_model(CHAIN_S)))
    args = grpo_config(tmp_path)
    planned = plan_of(args, model.value.policy, 5, frozen_bytes=0, total_bytes=1 << 40)
    gpu(max(map(planned.needs, PHASES)) + spare, 1 << 40)
    (finding,) = doctor._memory(args, model, 5)  # type: ignore[arg-type]
    assert finding.verdict == verdict
    assert "of 1024.0" in finding.detail


def test_a_share_that_cannot_work_is_a_failure_with_the_ones_that_can(tmp_path: Path, gpu, monkeypatch) -> None:
    model = SimpleNamespace(failed=False, value=SimpleNamespace(policy=table_model(CHAIN_S)))
    args = grpo_config(tmp_path, use_vllm=True, vllm_gpu_memory_utilization=1.0)
    gpu(80 << 30, 80 << 30)
    (finding,) = doctor._memory(args, model, 5)  # type: ignore[arg-type]
    assert finding.verdict == "fail"
    assert "Set it to a value from 0.0" in finding.repair


def test_vllm_inside_the_trainer_has_to_be_installed(options: dict[str, str]) -> None:
    finding = of("vLLM", findings(options | {"use_vllm": "true"}))
    assert (finding.verdict, "pip install 'trl[vllm]'" in finding.repair) == ("fail", True)


# ---- the server ----


@pytest.mark.parametrize("version", VERSIONS)
def test_a_server_as_it_should_be(options: dict[str, str], version: str) -> None:
    with good_server(version) as server:
        found = findings(with_server(options, server.url))
    assert {f.verdict for f in found} == {"ok", "skip"}
    assert [f.subject for f in found[-9:]] == [f"server {server.url}", *SERVER_ROWS]
    assert of("vLLM version", found).detail == f"{version}.0"
    assert of("context", found).detail == "64 tokens: prompts of up to 48"


@pytest.mark.parametrize(
    ("changes", "subject", "detail", "repair"),
    [
        ({"dev_mode": False}, "dev mode", "off", "VLLM_SERVER_DEV_MODE=1"),
        ({"backend": None}, "weight transfer", "off", '--weight-transfer-config \'{"backend": "nccl"}\''),
        ({"logprobs_mode": "raw_logprobs"}, "log-prob mode", "raw_logprobs", "--logprobs-mode processed_logprobs"),
        ({"max_model_len": 30}, "context", "30 tokens, and completions may have 30", "--max-model-len"),
        ({"vocab_size": 60}, "vocabulary", "smaller than 64", "serve the model"),
        ({"vocab_size": 70, "weights": larger_head(70)}, "vocabulary", "larger than 64", "serve the model"),
        ({"weights": {"lm_head.weight": HEAD["lm_head.weight"].roll(1)}}, "parity", "nats", "serve the model"),
        ({"version": "0.34"}, "vLLM version", "0.34.0", "vllm_allow_unsupported_version"),
    ],
)
def test_each_mistake_of_a_server_is_found(
    options: dict[str, str], changes: dict[str, Any], subject: str, detail: str, repair: str
) -> None:
    with good_server(**changes) as server:
        found = findings(with_server(options, server.url) | {"max_completion_length": "30"})
    finding = of(subject, found)
    assert finding.verdict == "fail"
    assert detail in finding.detail
    assert repair in finding.repair


@pytest.mark.parametrize(
    "changes",
    [
        {"backend": None},
        {"logprobs_mode": "raw_logprobs"},
        {"vocab_size": 70, "weights": larger_head(70)},
        {"dev_mode": False},
        {"vocab_size": 60},
        {"max_model_len": 8},
    ],
)
def test_one_mistake_is_one_failure(options: dict[str, str], changes: dict[str, Any]) -> None:
    with good_server(**changes) as server:
        assert len(failed(findings(with_server(options, server.url)))) == 1


def test_a_cap_on_log_probs_is_no_failure(options: dict[str, str]) -> None:
    with good_server(max_logprobs=20) as server:
        found = findings(with_server(options, server.url))
    assert failed(found) == []
    finding = of("log-prob cap", found)
    assert (finding.verdict, finding.repair) == ("warn", "vllm serve … --max-logprobs -1")


def test_a_version_that_is_allowed_is_looked_at_further(options: dict[str, str]) -> None:
    with good_server("0.34") as server, pytest.warns(UserWarning, match=r"0\.34"):
        found = findings(with_server(options, server.url) | {"vllm_allow_unsupported_version": "true"})
    assert failed(found) == []
    assert of("parity", found).verdict == "ok"


def test_without_the_model_parity_and_vocabulary_are_left_out(options: dict[str, str]) -> None:
    del options["model_name_or_path"]
    with good_server() as server:
        found = findings(with_server(options, server.url))
    assert failed(found) == ["model"]
    assert found[-1].subject == "context"


def stopped_server() -> str:
    with good_server() as server:
        return server.url


def test_nobody_answers(options: dict[str, str]) -> None:
    url = stopped_server()
    found = findings(with_server(options, url))
    assert found[-1] == Finding(f"server {url}", "fail", "nobody answers", "trl vllm-serve --model MODEL")


def test_each_of_several_servers_is_looked_at(options: dict[str, str]) -> None:
    gone = stopped_server()
    with good_server() as first, good_server(logprobs_mode="raw_logprobs") as second:
        found = findings(with_server(options, first.url, gone, second.url))
    names = [f.subject for f in found if f.subject.startswith("server ")]
    assert names == [f"server {url}" for url in (first.url, gone, second.url)]
    assert failed(found) == [f"server {gone}", "log-prob mode"]


def test_a_server_is_not_changed(options: dict[str, str]) -> None:
    with good_server() as server:
        findings(with_server(options, server.url))
        assert set(server.paths()) == {
            "/health",
            "/version",
            "/v1/models",
            "/get_world_size",
            "/server_info",
            "/v1/completions",
        }


def test_a_server_that_fails_is_a_failure_and_the_next_one_is_still_looked_at(options: dict[str, str]) -> None:
    faults = {"/server_info": Fault("status", "out of order")}
    with good_server(faults=faults) as broken, good_server() as good:
        found = list(examine(parse("grpo", words(with_server(options, broken.url, good.url)))))
    (finding,) = [f for f in found if f.verdict == "fail"]
    assert finding.subject == f"server {broken.url}"
    assert finding.repair
    assert finding.detail.endswith("/server_info?config_format=json answered 500: out of order")
    assert found[-1] == Finding("parity", "ok", found[-1].detail)


# ---- where trainer and server run ----

FACTS = ServerFacts("0.32.0", "m", "m", 64, True, 1, "nccl", "processed_logprobs", -1, "bfloat16")


@pytest.mark.parametrize(
    ("backend", "programs", "use_cpu", "repair"),
    [
        ("nccl", "python\nVLLM::EngineCore\n", False, '"ipc"'),
        ("nccl", "python\n", False, None),
        ("ipc", "python\n", False, '"nccl"'),
        ("ipc", "VLLM::EngineCore\n", False, None),
        ("nccl", "VLLM::EngineCore\n", True, None),
        ("ipc", "", True, None),
    ],
)
def test_the_backend_has_to_fit_where_both_run(
    monkeypatch: pytest.MonkeyPatch, backend: str, programs: str, use_cpu: bool, repair: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(doctor, "_programs_on_gpu", lambda: programs)
    args = SimpleNamespace(use_cpu=use_cpu, longest_completion=16, length_option="max_completion_length")
    found = [f for f in server_settings(replace(FACTS, backend=backend), args) if f.subject == "placement"]
    assert [f.verdict for f in found] == ([] if repair is None else ["fail"])
    assert all(str(repair) in f.repair for f in found)


# ---- a teacher behind a server ----

TEACHER_ROWS = ["teacher version", "teacher log-probs", "teacher context", "teacher vocabulary"]


@pytest.fixture
def distillation(options: dict[str, str]) -> Callable[..., list[Finding]]:
    """The findings about a distillation from this teacher, by forward KL over two tokens, with prompts of two."""

    def look(url: str, **changes: str) -> list[Finding]:
        settings = options | {"teacher_model_server_url": url, "beta": "0.0", "loss_top_k": "2"}
        del settings["reward_funcs"]
        return findings(settings | changes, "server-distillation")

    return look


@pytest.mark.parametrize("dev_mode", [True, False])
def test_a_teacher_needs_no_more_than_log_probs(distillation: Callable[..., list[Finding]], dev_mode: bool) -> None:
    """Neither weight transfer nor dev mode, nor another cap than vLLM's own, for as few tokens as these."""
    with good_server(dev_mode=dev_mode, backend=None, logprobs_mode="raw_logprobs", max_logprobs=20) as server:
        found = distillation(server.url)
    assert failed(found) == []
    assert "rewards" not in [f.subject for f in found]
    assert [f.subject for f in found[-5:]] == [f"teacher {server.url}", *TEACHER_ROWS]
    assert {f.verdict for f in found[-5:]} == {"ok"}
    assert of("teacher context", found).detail == "64 tokens; prompt, completion and one more may have 19"


@pytest.mark.parametrize(
    ("changes", "subject", "detail", "repair"),
    [
        ({"max_logprobs": 20}, "teacher log-probs", "at most 20", "vllm serve TEACHER … --max-logprobs -1"),
        (
            {"max_logprobs": 20, "dev_mode": False},
            "teacher log-probs",
            "greater than max allowed: 20",
            "vllm serve TEACHER … --max-logprobs -1",
        ),
        ({"logprobs_mode": "raw_logits"}, "teacher log-probs", "logits", "--logprobs-mode processed_logprobs"),
        ({"max_model_len": 18}, "teacher context", "18 tokens; prompt, completion and one more may have 19", "19"),
        ({"vocab_size": 63, "max_logprobs": 21}, "teacher vocabulary", "smaller than the student's 64", "same family"),
        ({"version": "0.34"}, "teacher version", "0.34.0", "vllm_allow_unsupported_version"),
    ],
)
def test_each_mistake_of_a_teacher_is_found_and_is_the_only_one(
    distillation: Callable[..., list[Finding]], changes: dict[str, Any], subject: str, detail: str, repair: str
) -> None:
    with good_server(**changes) as server:
        found = distillation(server.url, loss_top_k="21")
    assert failed(found) == [subject]
    finding = of(subject, found)
    assert detail in finding.detail
    assert repair in finding.repair


def test_the_flag_for_a_teacher_can_be_copied(distillation: Callable[..., list[Finding]]) -> None:
    with good_server(max_logprobs=20) as server:
        finding = of("teacher log-probs", distillation(server.url, loss_top_k="21"))
        assert (
            finding.detail == f"The teacher {server.url} gives at most 20 log-probs per token, and `loss_top_k` is 21"
        )
    assert finding.repair == "vllm serve TEACHER … --max-logprobs -1"


def test_a_teacher_with_more_ids_is_only_suspicious(distillation: Callable[..., list[Finding]]) -> None:
    """Families pad their vocabularies to different sizes."""
    with good_server(vocab_size=70, weights=larger_head(70)) as server:
        found = distillation(server.url)
    assert failed(found) == []
    finding = of("teacher vocabulary", found)
    assert (finding.verdict, finding.detail) == ("warn", "the teacher's is larger than the student's 64")


def test_nobody_teaches(distillation: Callable[..., list[Finding]]) -> None:
    url = stopped_server()
    found = distillation(url)
    assert found[-1] == Finding(f"teacher {url}", "fail", "nobody answers", "vllm serve TEACHER --max-logprobs -1")


def test_a_teacher_that_fails_is_a_failure(distillation: Callable[..., list[Finding]]) -> None:
    with good_server(faults={"/v1/completions": Fault("status", "out of order")}) as server:
        found = distillation(server.url)
    assert failed(found) == [f"teacher {server.url}"]
    assert "answered 500: out of order" in found[-1].detail


def test_a_teacher_has_a_url(distillation: Callable[..., list[Finding]]) -> None:
    finding = of("settings", distillation("127.0.0.1:8001"))
    assert (finding.verdict, "http://" in finding.detail + finding.repair) == ("fail", True)


def test_the_policys_server_and_the_teachers_are_both_looked_at(distillation: Callable[..., list[Finding]]) -> None:
    """A cap suffices for the policy's."""
    with good_server() as teacher, good_server(max_logprobs=20) as policy:
        found = distillation(teacher.url, use_vllm="true", vllm_mode="server", vllm_server_base_url=policy.url)
        assert [c.body for c in policy.of("/v1/completions") if c.body.get("prompt_logprobs")] == []
    assert failed(found) == []
    assert [f.subject for f in found[-14:]] == [
        f"server {policy.url}",
        *SERVER_ROWS,
        f"teacher {teacher.url}",
        *TEACHER_ROWS,
    ]
    assert of("log-prob cap", found).verdict == "warn"


def test_without_the_model_the_teachers_vocabulary_is_left_out(
    options: dict[str, str], distillation: Callable[..., list[Finding]]
) -> None:
    del options["model_name_or_path"]
    with good_server() as server:
        found = distillation(server.url)
    assert failed(found) == ["model"]
    assert found[-1] == Finding("teacher context", "ok", "64 tokens; prompt, completion and one more may have 18")


# ---- the command ----


def test_the_exit_code_and_the_table(options: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with good_server() as server:
        assert main(["doctor", "grpo", *words(with_server(options, server.url))]) == 0
        good = capsys.readouterr().out
        server.logprobs_mode = "raw_logprobs"
        assert main(["doctor", *words(with_server(options, server.url))]) == 1
        bad = capsys.readouterr().out
    assert "fail" not in good
    assert all(row in good for row in SERVER_ROWS)
    (line,) = [line for line in bad.splitlines() if "fail" in line]
    assert [cell.strip() for cell in line.strip("│").split("│")] == [
        "log-prob mode",
        "fail",
        "raw_logprobs",
        "vllm serve … --logprobs-mode processed_logprobs",
    ]


def test_a_warning_is_no_reason_to_stop(options: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with good_server(max_logprobs=20) as server:
        assert main(["doctor", "grpo", *words(with_server(options, server.url))]) == 0
    assert "warn" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["--help"], ["grpo", "-h"]])
def test_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *arguments]) == 0
    assert "usage: trl doctor" in capsys.readouterr().out


def test_an_option_that_does_not_exist_is_a_mistake_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "grpo", "--no_such_option", "1"]) == 2
    assert "no_such_option" in capsys.readouterr().err


def test_every_row_is_explained(options: dict[str, str]) -> None:
    section = (DOCS / "cli.md").read_text(encoding="utf-8").partition("## trl doctor")[2].partition("\n## ")[0]
    explained = {name for line in section.splitlines() if line[:2] == "| " for name in line.split("|")[1].split(",")}
    with good_server() as server:
        subjects = {f.subject.split(" http")[0] for f in findings(with_server(options, server.url))}
    assert subjects | {"placement", "teacher", *TEACHER_ROWS} == {name.strip() for name in explained} - {"row"}
