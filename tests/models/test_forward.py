"""The forward pass over ragged batches: both layouts give the numbers that the plain model gives."""

import math

import pytest
import torch
from fixtures.batches import make_batch, random_batch, sequences_of
from fixtures.models import CHAIN_S, FAMILIES, chain_logp, family_model, random_model, table_model
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from trl.generation.parity import as_batch
from trl.models import attention
from trl.models.attention import PACKED_ATTENTION, PackedLayout, Segment
from trl.models.forward import supports_packing, token_logps
from trl.models.load import disable_dropout
from trl.types import RolloutBatch

PACKABLE = ["llama", "qwen2", "qwen3", "mistral", "gemma3_text", "gpt2", "mixtral", "granite", "cohere"]
NOT_PACKABLE = ["gemma2", "lfm2"]
# Families of which a layer looks at a few tokens only, and does not say so to the attention function.
SILENT_WINDOWS = {
    "qwen2_moe": {
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "phimoe": {"sliding_window": 5, "num_local_experts": 4},
    "llama4_text": {
        "attention_chunk_size": 4,
        "intermediate_size_mlp": 48,
        "num_local_experts": 2,
        "head_dim": 8,
        "layer_types": ["chunked_attention", "full_attention"],
        "moe_layers": [],
    },
}
# Families whose logits are more than the head's product.
TRANSFORMED = {
    "gemma2": {},
    "granite": {},
    "cohere": {},
    "nanochat": {"final_logit_softcapping": 3.0},
    "hyperclovax": {"logits_scaling": 0.25},
    "minicpm3": {"dim_model_base": 8, "num_key_value_heads": 4, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4,
                 "v_head_dim": 8, "kv_lora_rank": 8, "q_lora_rank": 8},
    "falcon_h1": {"lm_head_multiplier": 0.25, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8,
                  "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 8},
    "recurrent_gemma": {"logits_soft_cap": 3.0, "lru_width": 32, "head_dim": 8, "attention_window_size": 64,
                        "block_types": ["recurrent", "attention"]},
}  # fmt: skip


def ragged() -> RolloutBatch:
    """Prompts shared by three, one and two sequences; completions of 1 to 9 tokens."""
    return random_batch([3, 1, 7], [4, 1, 6, 2, 1, 9], [0, 0, 1, 2, 2, 0])


def one_by_one(model, batch, temperature=1.0):
    """Log-probs and entropies from the model's own logits, a sequence at a time."""
    logps, entropies = [], []
    for prompt, completion in sequences_of(batch):
        logits = model(input_ids=torch.tensor([prompt + completion])).logits[0].float() / temperature
        log_p = logits[len(prompt) - 1 : -1].log_softmax(-1)
        logps.append(log_p.gather(1, torch.tensor(completion)[:, None]).squeeze(1))
        entropies.append(-(log_p.exp() * log_p).sum(-1))
    return torch.cat(logps), torch.cat(entropies)


def with_gradients(model, batch, packed):
    """Log-probs, entropies, and all gradients of a mix of them."""
    model.zero_grad()
    out = token_logps(model, batch, packed=packed)
    mix = torch.linspace(-1, 1, batch.num_tokens)
    ((out.logps * mix).sum() + (out.entropies * mix.flip(0)).sum()).backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return out.logps.detach(), out.entropies.detach(), grads


def assert_same(first, second):
    for a, b in zip(first[:2], second[:2], strict=True):
        assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert first[2].keys() == second[2].keys()
    for name, grad in first[2].items():
        assert_close(grad, second[2][name], rtol=1e-5, atol=1e-5 * max(1.0, grad.abs().max().item()), msg=name)


@pytest.mark.parametrize("family", PACKABLE)
def test_layouts_agree(family):
    model = family_model(family, packed=True)
    assert supports_packing(model)
    packed = with_gradients(model, ragged(), packed=True)
    assert_same(packed, with_gradients(model, ragged(), packed=False))
    logps, entropies = one_by_one(family_model(family), ragged())
    assert_close(packed[0], logps, rtol=1e-5, atol=1e-5)
    assert_close(packed[1], entropies, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("family", ["qwen2", "gemma3_text", "mixtral"])
def test_gradient_checkpointing_changes_nothing(family, packed):
    model = family_model(family, packed=True)
    disable_dropout(model)
    model.train()
    plain = with_gradients(model, ragged(), packed)
    runs = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    model.activation_checkpointing_enable()
    assert_same(with_gradients(model, ragged(), packed), plain)
    assert len(runs) == 2, "the layer did not run again in the backward pass"


@pytest.mark.parametrize("family", NOT_PACKABLE)
def test_what_cannot_be_packed_is_noticed_and_padded(family):
    model = family_model(family, packed=True, **({"attn_implementation": "eager"} if family == "gemma2" else {}))
    assert not supports_packing(model)
    out = token_logps(model, ragged(), packed=False)
    expected = one_by_one(family_model(family), ragged())
    assert_close((out.logps, out.entropies), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", SILENT_WINDOWS)
def test_a_window_that_attention_is_not_told_of_is_noticed(family):
    model = family_model(family, packed=True, **SILENT_WINDOWS[family])
    assert model.config._attn_implementation == PACKED_ATTENTION
    assert not supports_packing(model)
    out = token_logps(model, ragged(), packed=False)
    expected = one_by_one(family_model(family, **SILENT_WINDOWS[family]), ragged())
    assert_close((out.logps, out.entropies), expected, rtol=1e-5, atol=1e-5)


def test_a_model_without_the_attention_for_it_is_not_packed():
    assert not supports_packing(random_model())


@pytest.mark.parametrize("training", [True, False])
def test_the_probe_leaves_the_model_as_it_was(training):
    model = random_model(packed=True).train(training)
    supports_packing(model)
    assert model.training is training
    assert "forward" not in vars(model.get_output_embeddings())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("family", TRANSFORMED)
def test_what_a_family_does_to_its_logits(family, temperature):
    model = family_model(family, **TRANSFORMED[family])
    batch = random_batch([3, 5], [4, 2], [0, 1])
    out = token_logps(model, batch, packed=False, temperature=temperature)
    expected = one_by_one(model, batch, temperature)
    assert_close((out.logps, out.entropies), expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("packed", [True, False])
def test_closed_form(packed):
    model = table_model(CHAIN_S, packed=True)
    batch = make_batch([[10], [20, 10]], [[11, 12, 1], [11, 13, 14, 15, 1]])
    out = token_logps(model, batch, packed=packed)
    half = -math.log(2)
    assert_close(out.logps, torch.tensor([0.0, half, 0.0, 0.0, half, 0.0, 0.0, 0.0]), rtol=0, atol=1e-6)
    assert_close(out.entropies, -torch.tensor([0.0, half, 0.0, 0.0, half, 0.0, 0.0, 0.0]), rtol=0, atol=1e-6)
    assert_close(out.logps.tolist()[:3], chain_logp(CHAIN_S, [10], [11, 12, 1]), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("temperature", "share"), [(1.0, 0.75), (0.5, 0.9)])
@pytest.mark.parametrize("packed", [True, False])
def test_temperature_divides_the_logits(packed, temperature, share):
    model = table_model({10: {11: 0.75, 12: 0.25}}, packed=True)
    out = token_logps(model, make_batch([[10]], [[11], [12]], [0, 0]), packed=packed, temperature=temperature)
    assert_close(out.logps.exp(), torch.tensor([share, 1 - share]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("fp32_head", [True, False])
def test_uniform_in_bfloat16(packed, fp32_head):
    model = table_model({}, dtype=torch.bfloat16, packed=True)
    out = token_logps(model, ragged(), packed=packed, fp32_head=fp32_head)
    assert out.logps.dtype == torch.float32
    assert_close(out.logps, torch.full((23,), -math.log(64)), rtol=0, atol=1e-5)


def test_fp32_head_is_the_product_in_float32():
    model = random_model(packed=True).bfloat16()
    captured = []
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda _, args: captured.append(args[0]))
    out = token_logps(model, make_batch([[10, 11]], [[12]]), fp32_head=True)
    hook.remove()
    hidden = captured[0][0, 1].float()
    expected = (model.get_output_embeddings().weight.float() @ hidden).log_softmax(0)[12]
    assert_close(out.logps[0], expected)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("family", PACKABLE)
def test_sequences_keep_to_themselves(family, packed):
    model = family_model(family, packed=True)
    batch = ragged()
    before = token_logps(model, batch, packed=packed)
    changed = batch.select(torch.arange(batch.num_sequences))
    for sequence in (2, 5):
        place = batch.tokens_of(torch.tensor([sequence]))[0]
        changed.completion_ids[place] = (batch.completion_ids[place] + 1) % 64
    after = token_logps(model, changed, packed=packed)
    others = torch.isin(batch.seq_of_token, torch.tensor([2, 5]), invert=True)
    assert_close(after.logps[others], before.logps[others], rtol=0, atol=2e-6)
    assert_close(after.entropies[others], before.entropies[others], rtol=0, atol=2e-6)
    assert ((after.logps - before.logps)[~others].abs() > 1e-4).sum() > 10


def test_a_prompt_reaches_its_own_sequences_only():
    model = random_model(packed=True)
    batch = ragged()
    before = token_logps(model, batch).logps
    batch.prompt_ids[0] = (batch.prompt_ids[0] + 1) % 64
    moved = (token_logps(model, batch).logps - before).abs() > 1e-5
    assert set(batch.seq_of_token[moved].tolist()) == {0, 1, 5}


MISTRAL = family_model("mistral", packed=True)


@st.composite
def batches(draw):
    prompts = draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    sequences = draw(st.lists(st.tuples(st.integers(1, 12), st.integers(0, len(prompts) - 1)), min_size=1, max_size=4))
    completions, prompt_of_seq = zip(*sequences, strict=True)
    return random_batch(prompts, completions, prompt_of_seq, seed=draw(st.integers(0, 9)))


@settings(max_examples=10, deadline=None, derandomize=True)
@given(batches())
def test_layouts_agree_on_any_ragged_batch(batch):
    with torch.no_grad():
        packed, padded = (token_logps(MISTRAL, batch, packed=p) for p in (True, False))
        expected = one_by_one(MISTRAL, batch)
    for got in (packed, padded):
        assert_close((got.logps, got.entropies), expected, rtol=1e-5, atol=1e-5)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), min_size=1, max_size=12))
def test_a_layout_covers_the_row_once(lengths):
    starts = [sum(n for n, _ in lengths[:i]) for i in range(len(lengths))]
    segments = [Segment(s, n, 0, min(p, s)) for s, (n, p) in zip(starts, lengths, strict=True)]
    layout = PackedLayout(segments, torch.device("cpu"))
    rows = torch.cat([b.queries[b.valid] for b in layout.buckets])
    assert sorted(rows.tolist()) == list(range(sum(n for n, _ in lengths)))
    assert rows[layout.inverse].tolist() == list(range(len(rows)))


@pytest.mark.parametrize("packed", [True, False])
def test_balance_loss_of_experts(packed):
    # Without shared prompts both layouts route the same tokens.
    model = family_model("mixtral", packed=True)
    batch = random_batch([3, 1, 5], [4, 1, 6], [0, 1, 2])
    out = token_logps(model, batch, packed=packed, with_aux_loss=True)
    losses, tokens = [], []
    for prompt, completion in sequences_of(batch):
        ids = torch.tensor([prompt + completion[:-1]])
        losses.append(family_model("mixtral")(input_ids=ids, output_router_logits=True).router_logits)
        tokens.append(ids.shape[1])
    chosen, share = torch.zeros(4), torch.zeros(4)
    for routers in losses:
        for router in routers:
            probabilities = router.softmax(-1)
            chosen += torch.bincount(probabilities.topk(2).indices.flatten(), minlength=4)
            share += probabilities.sum(0)
    rows = 2 * sum(tokens)
    assert_close(out.aux_loss, 4 * (chosen / rows * share / rows).sum(), rtol=1e-5, atol=1e-5)
    assert token_logps(model, batch, packed=packed).aux_loss is None


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen2", {"attention_dropout": 0.5}),
        ("gpt2", {"attn_pdrop": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5}),
        ("phi", {"attention_dropout": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5}),
        ("opt", {"dropout": 0.5, "attention_dropout": 0.5, "layerdrop": 0.5, "ffn_dim": 48}),
    ],
)
def test_dropout_can_be_switched_off(family, changes, packed):
    model = family_model(family, packed=True, **changes)
    packed = packed and supports_packing(model)
    expected = token_logps(model, ragged(), packed=packed).logps
    model.train()
    assert (token_logps(model, ragged(), packed=packed).logps - expected).abs().max() > 1e-3
    disable_dropout(model)
    assert_close(token_logps(model, ragged(), packed=packed).logps, expected, rtol=0, atol=1e-6)


def test_an_error_inside_the_model_leaves_the_head_usable():
    model = random_model()
    with pytest.raises(IndexError):
        token_logps(model, make_batch([[10]], [[999, 1]]), packed=False)
    assert model(input_ids=torch.tensor([[10]])).logits.shape == (1, 1, 64)


def test_families_of_the_fixtures_are_covered():
    assert {*PACKABLE, *NOT_PACKABLE} == set(FAMILIES)


def test_attention_computes_in_the_dtype_of_mixed_precision(monkeypatch):
    """Rotary embeddings leave queries and keys in float32, for which the fast kernel does not exist."""
    seen = []
    plain = attention._bucketed_attention

    def look(q, k, v, *rest):
        seen.append({q.dtype, k.dtype, v.dtype})
        return plain(q, k, v, *rest)

    monkeypatch.setattr(attention, "_bucketed_attention", look)
    model = random_model(packed=True)
    batch = as_batch([[3, 10, 11, 12], [20, 21, 22]], torch.device("cpu"))
    with torch.no_grad():
        exact = token_logps(model, batch, packed=True).logps
        with torch.autocast("cpu", torch.bfloat16):
            mixed = token_logps(model, batch, packed=True).logps
    layers = model.config.num_hidden_layers
    assert seen == [{torch.float32}] * layers + [{torch.bfloat16}] * layers
    assert (mixed.float() - exact).abs().max() < 0.1
