"""Completions that have to match a regular expression."""

import re

import pytest
from fixtures.colocate import skip_without_vllm
from fixtures.models import vllm_model
from fixtures.runs import Recorder, grpo_config, logs, prompts, run
from fixtures.tokenizers import bpe_tokenizer

skip_without_vllm()
pytestmark = pytest.mark.filterwarnings("default")  # vLLM's own

REGEX = "(ab|c){2}d"


def nine_words():
    """The model of `bpe_tokenizer`: a head for its nine tokens."""
    model = vllm_model()
    model.resize_token_embeddings(9)
    model.generation_config.eos_token_id = 1
    return model


def test_every_completion_of_a_run_matches(tmp_path):
    recorder = Recorder()
    args = grpo_config(
        tmp_path,
        use_vllm=True,
        vllm_max_model_length=32,
        vllm_structured_outputs_regex=REGEX,
        vllm_parity_check_steps=1,
        per_device_train_batch_size=8,
        max_completion_length=12,
        max_steps=3,
        learning_rate=1e-3,
    )
    tokenizer = bpe_tokenizer()
    trainer = run(nine_words(), recorder, args, prompts("ab", "cd"), processing_class=tokenizer)
    trainer.engine.close()
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in recorder.completions]
    assert len(texts) == 24
    assert all(re.fullmatch(REGEX, text) for text in texts), texts
    assert len(set(texts)) > 1
    assert all(ids[-1] == 1 for ids in recorder.completions)
    # What constrains completions constrains no comparison of the weights.
    assert max(logs(trainer, "sampling/parity_max")) < 1e-4
