"""Every online method with completions from a vLLM inside its own process."""

import math

import pytest
from fixtures.colocate import skip_without_vllm
from fixtures.models import vllm_model
from fixtures.online_methods import METHODS
from fixtures.runs import logs, prompts

skip_without_vllm()
pytestmark = pytest.mark.filterwarnings("default")  # vLLM's own


@pytest.mark.parametrize("name", METHODS)
def test_a_method_trains_with_parity_at_rounding_level(tmp_path, name):
    args = METHODS[name].make_config(
        tmp_path,
        use_vllm=True,
        vllm_max_model_length=32,
        vllm_parity_check_steps=1,
        temperature=1.0,
        learning_rate=1e-2,
        max_steps=3,
        max_tokens=8,
    )
    dataset = prompts(*[f"w{10 + i} w{20 + i}" for i in range(24)])
    trainer = METHODS[name].make(args, dataset, model=vllm_model())
    try:
        before = {key: value.clone() for key, value in trainer.model.state_dict().items()}
        trainer.train()
    finally:
        trainer.engine.close()
    losses, parities = logs(trainer, "loss"), logs(trainer, "sampling/parity_max")
    assert len(losses) == len(parities) == 3
    assert all(math.isfinite(loss) for loss in losses)
    assert max(parities) < 1e-3
    assert any(not value.equal(before[key]) for key, value in trainer.model.state_dict().items())
