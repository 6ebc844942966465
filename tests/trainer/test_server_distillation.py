"""Distillation from a teacher behind a server: the losses by hand, their gradients, and a server that fails.

After 10 the teacher goes to 11, 12, 13 with 0.6, 0.3, 0.1, the student with 1/2, 1/4, 1/4; both end after each of them.
Completions are written by a script, so that the sampled token is known. The second token has no divergence: every loss
is half of that of the first.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from fixtures.engines import ScriptedEngine
from fixtures.models import chain_logits, random_model, table_model
from fixtures.online_methods import METHODS
from fixtures.runs import GradientGrabber, assert_same_gradients, logs, prompts
from fixtures.tokenizers import word_tokenizer
from fixtures.vllm_stub import Fault, StubServer, running_stub
from torch.testing import assert_close
from transformers import TrainerCallback

from trl.errors import (
    ConfigError,
    GenerationError,
    NotSupportedError,
    ServerError,
    ServerTimeoutError,
    ServerUnreachableError,
)
from trl.generation.vllm_teacher import TeacherLogps
from trl.trainer.distillation_config import ServerDistillationConfig
from trl.trainer.server_distillation_trainer import ServerDistillationTrainer, support
from trl.types import Completion, RolloutBatch

ENDS = {11: {1: 1.0}, 12: {1: 1.0}, 13: {1: 1.0}}
STUDENT = {10: {11: 0.5, 12: 0.25, 13: 0.25}, **ENDS}
TEACHER = {10: {11: 0.6, 12: 0.3, 13: 0.1}, **ENDS}
RANDOM = torch.Generator().manual_seed(3)
# A teacher whose every token has a distribution of its own, for the student of `random_model`.
MIXED = {t: dict(enumerate((5 * torch.rand(64, generator=RANDOM)).softmax(0).tolist())) for t in range(64)}


_made: list[ServerDistillationTrainer] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    """Connections of a test's trainers end with the test."""
    yield
    while _made:
        _made.pop().teacher.close()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trl.generation.vllm_client._RETRY_PAUSE_S", 0.02)


def teacher_server(chain=TEACHER, **options: Any) -> Any:
    return running_stub(**{"weights": {"lm_head.weight": chain_logits(chain).T / 8}, **options})


@pytest.fixture
def server() -> Iterator[StubServer]:
    with teacher_server() as stub:
        yield stub


SERVED = replace(
    METHODS["distillation"], trainer=ServerDistillationTrainer, config=ServerDistillationConfig, arguments=dict
)


def config(folder, server, **changes):
    settings = {"teacher_model_server_url": server.url, "vllm_server_timeout": 5.0, "vllm_request_timeout": 5.0}
    return SERVED.make_config(folder, **(SERVED.sizes(4) | settings | {"max_grad_norm": 1e9} | changes))


def make(folder, server, student=None, dataset=None, engine=None, **changes):
    """A trainer on four equal prompts, and with options of the trainer among the changes."""
    names = ("eval_dataset", "callbacks", "processing_class")
    options: dict[str, Any] = {name: changes.pop(name) for name in names if name in changes}
    args = config(folder, server, **changes)
    trainer = SERVED.make(args, dataset or prompts(*["w10"] * 4), student or table_model(STUDENT), **options)
    _made.append(trainer)
    if engine is not None:
        trainer.engine = engine
    return trainer


def loss_at(folder, server, token, **changes):
    """The loss of completions that begin with this token."""
    trainer = make(folder, server, engine=ScriptedEngine([[token, 1]]), **changes)
    trainer.train()
    return logs(trainer, "loss")[0]


# ---- losses by hand, with all other tokens as one and without them ----

# Forward KL over the teacher's likeliest tokens:
#   11: 0.6 log 0.6/0.5 + 0.4 log 0.4/0.5 = 0.109393 - 0.089257
#   11, 12: 0.109393 + 0.3 log 0.3/0.25 + 0.1 log 0.1/0.25 = 0.109393 + 0.054696 - 0.091629
#   11, 12, 13: the same, as 13 is all that is left; without the rest 0.109393, 0.164090 and 0.072461.
FORWARD = {1: (0.020136, 0.109393), 2: (0.072461, 0.164090), 3: (0.072461, 0.072461)}
# Reverse KL at the sampled token:
#   11: 0.5 log 0.5/0.6 + 0.5 log 0.5/0.4 = -0.091161 + 0.111572
#   12: 0.25 log 0.25/0.3 + 0.75 log 0.75/0.7 = -0.045580 + 0.051745
#   13: 0.25 log 0.25/0.1 + 0.75 log 0.75/0.9 = 0.229073 - 0.136741
REVERSE = {11: (0.020411, -0.091161), 12: (0.006164, -0.045580), 13: (0.092332, 0.229073)}
# Halfway, over 11 and the sampled token; the mixture is (0.55, 0.45), (0.55, 0.275, 0.175) or (0.55, 0.175, 0.275):
#   11: teacher 0.6 log 0.6/0.55 + 0.4 log 0.4/0.45 = 0.052207 - 0.047113 = 0.005094,
#       student 0.5 log 0.5/0.55 + 0.5 log 0.5/0.45 = -0.047655 + 0.052680 = 0.005025
#   12: teacher 0.052207 + 0.3 log 0.3/0.275 + 0.1 log 0.1/0.175 = 0.052207 + 0.026103 - 0.055962 = 0.022348,
#       student -0.047655 + 0.25 log 0.25/0.275 + 0.25 log 0.25/0.175 = -0.047655 - 0.023828 + 0.089169 = 0.017686
#   13: the same terms with 12 and 13 changing places.
HALFWAY = {11: (0.005094 + 0.005025) / 2, 12: (0.022348 + 0.017686) / 2, 13: (0.022348 + 0.017686) / 2}


@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("token", [11, 13])
@pytest.mark.parametrize("top_k", FORWARD)
def test_forward_kl_looks_at_the_teachers_likeliest_tokens(tmp_path, server, top_k, token, tail):
    loss = loss_at(tmp_path, server, token, beta=0.0, loss_top_k=top_k, loss_add_tail=tail)
    assert loss == pytest.approx(FORWARD[top_k][not tail] / 2, abs=2e-6)


@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("token", REVERSE)
def test_reverse_kl_looks_at_the_sampled_token(tmp_path, server, token, tail):
    loss = loss_at(tmp_path, server, token, beta=1.0, loss_add_tail=tail)
    assert loss == pytest.approx(REVERSE[token][not tail] / 2, abs=2e-6)


@pytest.mark.parametrize(("token", "expected"), HALFWAY.items())
def test_between_them_both_tokens_count_and_once_where_they_are_the_same(tmp_path, server, token, expected):
    assert loss_at(tmp_path, server, token, beta=0.5) == pytest.approx(expected / 2, abs=2e-6)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_a_student_like_its_teacher_has_no_loss(tmp_path, server, beta):
    trainer = make(tmp_path, server, table_model(TEACHER), beta=beta)
    trainer.train()
    assert logs(trainer, "loss") == [pytest.approx(0.0, abs=2e-6)]
    assert logs(trainer, "grad_norm") == [pytest.approx(0.0, abs=1e-4)]


@pytest.mark.parametrize("temperature", [0.7, 2.0])
def test_the_students_log_probs_are_those_at_temperature_one(tmp_path, server, temperature):
    """As those of the teacher are; so is the entropy: 1/2 log 2 + 2 (1/4 log 4) at the first token."""
    trainer = make(tmp_path, server, engine=ScriptedEngine([[13, 1]]), temperature=temperature)
    trainer.train()
    assert logs(trainer, "loss") == [pytest.approx(REVERSE[13][0] / 2, abs=2e-6)]
    assert logs(trainer, "entropy") == [pytest.approx(1.5 * math.log(2) / 2, abs=1e-5)]
    assert trainer.engine.calls[0][1].temperature == temperature
    assert {c.body["temperature"] for c in server.of("/v1/completions")} == {1.0}


# ---- the tokens that are compared ----


TOLD = TeacherLogps(
    ids=torch.tensor([[11, 12], [30, 31]]),
    logps=torch.tensor([[-0.5, -1.0], [-0.25, -2.0]]),
    token_logps=torch.tensor([-1.0, -0.25]),
)


def test_support_of_forward_kl_is_what_the_teacher_told():
    ids, logps = support(TOLD, torch.tensor([12, 30]), 0.0)
    assert ids.tolist() == [[11, 12], [30, 31]]
    assert_close(logps, TOLD.logps)


def test_support_of_reverse_kl_is_the_sampled_token():
    ids, logps = support(TOLD, torch.tensor([12, 30]), 1.0)
    assert ids.tolist() == [[12], [30]]
    assert logps.tolist() == [[-1.0], [-0.25]]


@pytest.mark.parametrize("beta", [0.001, 0.5, 0.999])
def test_support_between_is_the_likeliest_and_the_sampled_token_unless_they_are_one(beta):
    ids, logps = support(TOLD, torch.tensor([12, 30]), beta)
    assert ids.tolist() == [[11, 12], [30, 30]]
    assert logps[0].tolist() == [-0.5, -1.0]
    assert logps[1, 0].item() == -0.25
    assert logps[1, 1].isnan()
    assert not TOLD.token_logps.isnan().any()


@pytest.mark.parametrize(("beta", "places"), [(0.0, 2), (0.5, 2), (1.0, 1)])
def test_support_of_no_tokens(beta, places):
    nothing = TeacherLogps(torch.empty(0, 2, dtype=torch.long), torch.empty(0, 2), torch.empty(0))
    ids, logps = support(nothing, torch.empty(0, dtype=torch.long), beta)
    assert ids.shape == logps.shape == (0, places)
    assert ids.dtype == torch.long


# ---- gradients ----

EIGHT = [f"w{10 + i}" for i in range(8)]
LENGTHS = [1, 6, 2, 5, 3, 1, 4, 6]


def script(prompt, index):
    return [20 + (7 * prompt[0] + 3 * i) % 40 for i in range(LENGTHS[prompt[0] - 10])]


def tailed(logps, add_tail):
    """Probabilities `[K]`, with what is left as one more."""
    p = logps.exp()
    return torch.cat([p, (1 - p.sum())[None]]) if add_tail else p


def plain(student, beta, top_k, add_tail):
    """Loss and gradients, a token at a time, from the student's full logits and the teacher's table."""
    log_t = chain_logits(MIXED).log_softmax(1)
    values = []
    for prompt in range(10, 18):
        ids = [prompt, *script([prompt], 0)]
        log_s = student(input_ids=torch.tensor([ids])).logits[0].log_softmax(1)
        for place, (before, sampled) in enumerate(itertools.pairwise(ids)):
            likeliest = log_t[before].topk(top_k).indices.tolist()
            compared = {0.0: likeliest, 1.0: [sampled]}.get(beta, list(dict.fromkeys([likeliest[0], sampled])))
            s, t = tailed(log_s[place, compared], add_tail), tailed(log_t[before, compared], add_tail)
            m = (1 - beta) * s + beta * t
            if beta in (0.0, 1.0):
                p, q = (t, s) if beta == 0.0 else (s, t)
                values.append((p * (p / q).log()).sum())
            else:
                values.append(beta * (t * (t / m).log()).sum() + (1 - beta) * (s * (s / m).log()).sum())
    loss = torch.stack(values).mean()
    loss.backward()
    return loss.item(), {n: p.grad for n, p in student.named_parameters() if p.grad is not None}


SPLITS = [
    {"per_device_train_batch_size": 8},
    {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
    {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_tokens_per_micro_batch": 7},
]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(
    ("beta", "top_k", "tail"), [(0.0, 1, True), (0.0, 3, True), (0.0, 3, False), (0.5, 1, True), (1.0, 1, True)]
)
def test_loss_and_gradient_are_those_of_the_full_logits(tmp_path, beta, top_k, tail, split):
    """The mean over all tokens of the step, however it is cut."""
    loss, gradients = plain(random_model(), beta, top_k, tail)
    grabber = GradientGrabber()
    changes = {"beta": beta, "loss_top_k": top_k, "loss_add_tail": tail, "temperature": 0.7, **split}
    with teacher_server(MIXED) as server:
        trainer = make(
            tmp_path, server, random_model(), prompts(*EIGHT), ScriptedEngine(script), callbacks=[grabber], **changes
        )
        trainer.train()
    assert logs(trainer, "loss") == [pytest.approx(loss, abs=1e-5)]
    assert_same_gradients(gradients, grabber.steps[0])


def test_equal_sequences_are_asked_for_once(tmp_path, server):
    make(tmp_path, server, engine=ScriptedEngine([[11, 1], [12, 1]])).train()
    asked = [prompt for call in server.of("/v1/completions") for prompt in call.body["prompt"]]
    assert [p for p in asked if p[0] == 10] in ([[10, 11, 1], [10, 12, 1]], [[10, 12, 1], [10, 11, 1]])


class _WithEmpty(ScriptedEngine):
    """An engine whose script may give completions without tokens."""

    def _next(self, prompt, sampling):
        ids = self.script(prompt, 0)
        return Completion(ids, [], "length" if not ids else "stop")


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("some", [True, False])
def test_completions_without_tokens_do_not_count(tmp_path, server, beta, some):
    """With some: only one of four completions has tokens."""
    written = iter([[13], [], [], []])
    engine = _WithEmpty(lambda prompt, index: next(written) if some else [])
    trainer = make(tmp_path, server, engine=engine, beta=beta)
    trainer.train()
    expected = {0.0: FORWARD[1][0], 0.5: HALFWAY[13], 1.0: REVERSE[13][0]}[beta] if some else 0.0
    assert logs(trainer, "loss") == [pytest.approx(expected, abs=2e-6)]
    assert all(p.grad is None or p.grad.isfinite().all() for p in trainer.model.parameters())


# ---- a run ----


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, beta):
    changes = {
        "beta": beta,
        "learning_rate": 1e-2,
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    with teacher_server(MIXED) as server:
        whole = make(tmp_path, server, random_model(), prompts(*EIGHT), **changes)
        whole.train()
        resumed = make(tmp_path, server, random_model(seed=5), prompts(*EIGHT), **changes)
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for name in ("loss", "grad_norm", "entropy", "num_tokens"):
        assert logs(resumed, name) == pytest.approx(logs(whole, name), abs=1e-5), name
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert_close(other, one, atol=1e-6, rtol=0)


def test_a_window_keeps_what_the_teacher_told(tmp_path, server):
    trainer = make(tmp_path, server, beta=0.5, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    trainer.train()
    torch.save(trainer.extra_state(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    again = make(tmp_path, server, beta=0.5, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    again.load_extra_state(state)
    for one, other in zip(trainer.buffer.slices, again.buffer.slices, strict=True):
        assert isinstance(other, RolloutBatch)
        assert other.teacher_ids.shape == (one.num_tokens, 2)
        assert_close(other.teacher_ids, one.teacher_ids)
        assert_close(other.teacher_logps, one.teacher_logps, equal_nan=True)
        expected, found = (t.divergences(t.model, s)[0] for t, s in ((trainer, one), (again, other)))
        assert_close(found, expected)


def test_what_the_teacher_told_stays_with_its_tokens(tmp_path):
    """Slices are shuffled and cut by a budget: log-probs told for a token are those of the teacher's table there."""
    with teacher_server(MIXED) as server:
        changes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_tokens_per_micro_batch": 5}
        trainer = make(tmp_path, server, random_model(), prompts(*EIGHT), ScriptedEngine(script), **changes)
        trainer.train()
    log_t = chain_logits(MIXED).log_softmax(1)
    for piece in trainer.buffer.slices:
        befores = []
        for i, completion in enumerate(piece.completion_ids.split(piece.completion_lengths.tolist())):
            befores += [piece.prompt_ids[piece.prompt_of_seq[i]].item(), *completion[:-1].tolist()]
        assert piece.teacher_ids[:, 0].tolist() == piece.completion_ids.tolist()
        assert_close(piece.teacher_logps[:, 0], log_t[befores, piece.completion_ids], atol=1e-5, rtol=0)


def test_evaluation_and_metrics(tmp_path, server):
    trainer = make(tmp_path, server, engine=ScriptedEngine([[13, 1]]), eval_dataset=prompts(*["w10"] * 3))
    trainer.train()
    metrics = trainer.evaluate()
    assert metrics["eval_loss"] == pytest.approx(REVERSE[13][0] / 2, abs=2e-6)
    logged = trainer.state.log_history[0]
    assert (logged["num_tokens"], logged["completions/mean_length"], logged["completions/clipped_ratio"]) == (12, 2, 0)
    assert logged["step_time"] > 0


# ---- set-up ----


def test_an_impossible_teacher_is_refused_before_training(tmp_path):
    with (
        running_stub(max_logprobs=20) as few,
        running_stub(logprobs_mode="raw_logits") as logits,
        running_stub(vocab_size=40) as small,
    ):
        with pytest.raises(ConfigError, match=r"at most 20 .*`loss_top_k` is 21.*--max-logprobs -1"):
            make(tmp_path, few, beta=0.0, loss_top_k=21)
        with pytest.raises(ConfigError, match="--logprobs-mode processed_logprobs"):
            make(tmp_path, logits)
        with pytest.raises(ConfigError, match="fewer tokens than the student's 64"):
            make(tmp_path, small)


def test_a_server_without_a_cap_tells_as_many_as_asked(tmp_path):
    with teacher_server(max_logprobs=-1) as server:
        loss = loss_at(tmp_path, server, 11, beta=0.0, loss_top_k=40)
    assert loss == pytest.approx(FORWARD[3][0] / 2, abs=2e-6)


def test_a_student_padded_larger_than_its_tokenizer_and_teacher(tmp_path):
    with teacher_server(vocab_size=60) as server:
        trainer = make(
            tmp_path, server, engine=ScriptedEngine([[13, 1]]), processing_class=word_tokenizer(vocab_size=60)
        )
        trainer.train()
    assert logs(trainer, "loss") == [pytest.approx(REVERSE[13][0] / 2, abs=2e-6)]


def test_the_servers_key_is_sent(tmp_path):
    with teacher_server(api_key="secret") as server:
        assert loss_at(tmp_path, server, 11, vllm_server_api_key="secret") == pytest.approx(0.020411 / 2, abs=2e-6)


def test_nobody_at_the_address(tmp_path):
    with running_stub() as server:
        args = config(tmp_path, server, vllm_server_timeout=0.3)
    with pytest.raises(ServerUnreachableError, match=server.url):
        ServerDistillationTrainer(random_model(), args, prompts("w10"), processing_class=word_tokenizer())


@pytest.mark.parametrize("name", ["quantization_config", "peft_config"])
def test_what_this_version_does_not_have_is_refused(tmp_path, server, name):
    with pytest.raises(NotSupportedError, match=name):
        ServerDistillationTrainer("a", config(tmp_path, server), prompts("w10"), **{name: ["x"]})


# ---- a server that fails ----


class _Break(TrainerCallback):
    """Breaks the server after the first step."""

    def __init__(self, server, fault):
        self.server, self.fault = server, fault

    def on_step_end(self, args, state, control, **kwargs):
        self.server.faults["/v1/completions"] = self.fault


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (Fault("status", "EngineCore died"), ServerError),
        (Fault("drop"), ServerUnreachableError),
        (Fault("hang"), ServerTimeoutError),
        (Fault("trickle"), ServerTimeoutError),
        (Fault("garbage", "nothing"), ServerError),
    ],
    ids=lambda x: getattr(x, "kind", None),
)
def test_a_server_that_fails_ends_the_run_with_the_reason(tmp_path, server, fault, error):
    changes = {"vllm_request_timeout": 0.5, "max_steps": 3, "callbacks": [_Break(server, fault)]}
    trainer = make(tmp_path, server, **changes)
    with pytest.raises(error, match=server.url):
        trainer.train()
    assert trainer.state.global_step == 1


def test_a_server_that_stumbles_once_ends_nothing(tmp_path, server):
    changes = {"max_steps": 3, "callbacks": [_Break(server, Fault("status", status=503, times=1))]}
    trainer = make(tmp_path, server, engine=ScriptedEngine([[13, 1]]), **changes)
    trainer.train()
    assert logs(trainer, "loss") == [pytest.approx(REVERSE[13][0] / 2, abs=2e-6)] * 3


def test_a_sequence_that_does_not_fit_the_server_says_what_to_change(tmp_path):
    with teacher_server(max_model_len=4) as server:
        trainer = make(tmp_path, server, engine=ScriptedEngine([[13, 13, 13, 1]]))
        with pytest.raises(GenerationError, match=r"--max-model-len.*max_completion_length"):
            trainer.train()
