"""A teacher on a real `vllm serve` on the CPU: its log-probs are those of the model."""

import os

import httpx
import pytest
import torch
from datasets import Dataset
from fixtures.models import random_model, vllm_model
from fixtures.tokenizers import word_tokenizer
from fixtures.vllm_cpu import RealServer, installed

from trl.errors import ConfigError, ServerError
from trl.generation.parity import as_batch
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_teacher import ServerTeacher, connect_teacher
from trl.models.forward import token_divergences
from trl.models.load import use_packed_attention
from trl.trainer.distillation_config import ServerDistillationConfig
from trl.trainer.server_distillation_trainer import ServerDistillationTrainer

# The first requests of a server that has just started, on a busy machine, take their time.
DEADLINE_S = 60.0
# Lengths of prompt and completion.
LENGTHS = [(3, 5), (1, 9), (20, 1), (7, 40)]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    if not installed():
        if os.environ.get("TRL_REQUIRE_VLLM") == "1":
            pytest.fail("no vLLM in .venv-vllm: run `make test`, which installs it")
        pytest.skip("no vLLM in .venv-vllm: `make test` installs it")
    folder = tmp_path_factory.mktemp("teacher")
    vllm_model().save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    real = RealServer(folder, folder / "server.log")
    real.start()
    yield real
    real.kill()


def teacher_on(server: RealServer, top_k: int, **options: int) -> ServerTeacher:
    return connect_teacher(server.url, top_k=top_k, timeout=30.0, request_timeout=DEADLINE_S, **options)


def random_sequences() -> list[tuple[list[int], list[int]]]:
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randint(7, 64, (n,), generator=generator).tolist() for n in both) for both in LENGTHS]


def logps_of_model(sequences: list[tuple[list[int], list[int]]]) -> torch.Tensor:
    """`[T, 64]` log-probs at the completion tokens, by transformers."""
    model, rows = vllm_model(), []
    for prompt, completion in sequences:
        with torch.no_grad():
            logits = model(torch.tensor([prompt + completion])).logits[0]
        rows.append(logits.log_softmax(1)[len(prompt) - 1 : -1])
    return torch.cat(rows)


@pytest.mark.parametrize("top_k", [1, 8, 64])
def test_distributions_are_those_of_the_model(server, top_k):
    sequences = random_sequences()
    expected = logps_of_model(sequences)
    teacher = teacher_on(server, top_k, vocab_size=64)
    try:
        found = teacher.distributions(sequences)
    finally:
        teacher.close()
    tokens = torch.tensor([token for _, completion in sequences for token in completion])
    torch.testing.assert_close(found.token_logps, expected.gather(1, tokens[:, None])[:, 0], atol=1e-3, rtol=0)
    torch.testing.assert_close(found.logps, expected.topk(top_k).values, atol=1e-3, rtol=0)
    torch.testing.assert_close(expected.gather(1, found.ids), found.logps, atol=1e-3, rtol=0)
    assert all(len(set(ids)) == top_k for ids in found.ids.tolist())


def test_the_temperature_of_a_request_does_not_touch_them(server):
    """Also with `--logprobs-mode processed_logprobs`, which divides those of generated tokens by it."""
    told = []
    with httpx.Client(base_url=server.url, timeout=DEADLINE_S, verify=False) as http:
        for temperature in (1.0, 0.1, 2.0):
            body = {"prompt": [[10, 11, 12, 13]], "max_tokens": 1, "prompt_logprobs": 3, "temperature": temperature}
            told.append(http.post("/v1/completions", json=body).json()["choices"][0]["prompt_logprobs"])
    assert told[0] == told[1] == told[2]
    assert [len(place) for place in told[0][1:]] == [4, 4, 4]


def test_the_cap_is_told_before_training(server):
    """Without a cap on log-probs there is still that of the vocabulary."""
    with pytest.raises(ConfigError, match=r"Requested prompt logprobs of 65, which is greater than max allowed: 64"):
        teacher_on(server, 65)


def test_a_student_with_more_tokens_is_told_before_training(server):
    with pytest.raises(ConfigError, match="fewer tokens than the student's 65"):
        teacher_on(server, 1, vocab_size=65)


def test_the_longest_sequence_that_the_server_scores_is_the_one_that_is_let_through(server):
    longest = [10 + i % 50 for i in range(server.max_model_len - 1)]
    teacher = teacher_on(server, 2)
    client = VLLMClient(server.url, timeout=DEADLINE_S)
    try:
        assert teacher.distributions([(longest[:1], longest[1:])]).ids.shape == (server.max_model_len - 2, 2)
        with pytest.raises(ServerError) as caught:
            client.prompt_top_logps([[*longest, 10]], 2)
        assert caught.value.status == 400
    finally:
        client.close()
        teacher.close()


@pytest.mark.parametrize(("beta", "top_k", "share"), [(0.0, 8, 0.75), (0.5, 1, 0.85), (1.0, 1, 0.95)])
def test_a_student_comes_closer_to_it(server, tmp_path, beta, top_k, share):
    """The student's whole distributions approach those of the served model, of which it saw a few log-probs only."""
    args = ServerDistillationConfig(
        output_dir=str(tmp_path),
        teacher_model_server_url=server.url,
        vllm_server_timeout=30.0,
        vllm_request_timeout=DEADLINE_S,
        beta=beta,
        loss_top_k=top_k,
        per_device_train_batch_size=16,
        max_completion_length=8,
        learning_rate=1e-2,
        max_steps=30,
        num_train_epochs=100,
        logging_steps=10,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    student = random_model(seed=5)
    use_packed_attention(student)
    before = mean_divergence(student)
    dataset = Dataset.from_dict({"prompt": [f"w{10 + i} w{20 + i}" for i in range(32)]})
    trainer = ServerDistillationTrainer(student, args, dataset, processing_class=word_tokenizer())
    trainer.train()
    trainer.teacher.close()
    assert mean_divergence(student) < share * before


def mean_divergence(student) -> float:
    """KL(teacher || student) over the whole vocabulary, after pairs of words that the prompts have."""
    batch = as_batch([[10 + i, 20 + i, 30] for i in range(32)], torch.device("cpu"))
    teacher = vllm_model()
    with torch.no_grad():
        return token_divergences(student, teacher, batch, 0.0, teacher_packed=False, packed=False)[0].mean().item()
