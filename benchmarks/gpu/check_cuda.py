"""Checks on a GPU what the CPU cannot show: packed attention in float32 and bfloat16, local generation, one GRPO step.

python benchmarks/gpu/check_cuda.py
"""

import json
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from trl import GRPOConfig, GRPOTrainer
from trl.generation.local import LocalEngine
from trl.generation.parity import as_batch
from trl.models.forward import supports_packing, token_logps
from trl.models.load import use_packed_attention
from trl.types import Prompt, RolloutBatch, Sampling


def make_model(dtype: torch.dtype) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        tie_word_embeddings=False,
        eos_token_id=1,
        pad_token_id=0,
    )
    model = Qwen2ForCausalLM(config).to("cuda", dtype).eval()
    use_packed_attention(model)
    return model


def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{i}": i for i in range(3, 1024)}}
    raw = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def groups(sequences: list[list[int]]) -> RolloutBatch:
    """Eight prompts of different lengths with four completions each."""
    prompts = [[*ids[: 3 + 7 * i], 5] for i, ids in enumerate(sequences[:8])]
    completions = sequences[:32]
    device = torch.device("cuda")
    flat = [token for ids in completions for token in ids]
    return RolloutBatch(
        prompt_ids=torch.tensor([token for ids in prompts for token in ids], device=device),
        prompt_lengths=torch.tensor([len(ids) for ids in prompts]),
        prompt_of_seq=torch.arange(8).repeat_interleave(4),
        completion_ids=torch.tensor(flat, device=device),
        completion_lengths=torch.tensor([len(ids) for ids in completions]),
        loss_mask=torch.ones(len(flat), dtype=torch.bool, device=device),
    )


def main() -> None:
    results: dict[str, object] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    lengths = torch.randint(2, 200, (32,), generator=torch.Generator().manual_seed(0)).tolist()
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(3, 1024, (n,), generator=generator).tolist() for n in lengths]
    for dtype in (torch.float32, torch.bfloat16):
        model = make_model(dtype)
        batch = as_batch(sequences, torch.device("cuda"))
        packed, padded = (token_logps(model, batch, packed=p).logps for p in (True, False))
        results[f"packing supported, {dtype}"] = supports_packing(model)
        results[f"packed - padded, {dtype}"] = float((packed - padded).abs().max())
    for dtype in (torch.float32, torch.bfloat16):
        model = make_model(dtype)
        batch = groups(sequences)
        packed, padded = (token_logps(model, batch, packed=p).logps for p in (True, False))
        exact = token_logps(make_model(torch.float32), batch, packed=False).logps
        results[f"groups with shared prompts: packed - padded, {dtype}"] = float((packed - padded).abs().max())
        results[f"groups: mean |packed - float32|, |padded - float32|, {dtype}"] = [
            float((x - exact).abs().mean()) for x in (packed, padded)
        ]
    model = make_model(torch.float32)
    engine = LocalEngine(model, eos_ids=[1])
    prompts = [Prompt(ids[:5]) for ids in sequences[:8] if len(ids) >= 5]
    mine = dict(engine.generate(prompts, Sampling(max_tokens=32, temperature=0.0)))
    equal = 0
    for i, prompt in enumerate(prompts):
        ids = torch.tensor([prompt.token_ids], device="cuda")
        theirs = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=32, do_sample=False)
        equal += mine[i][0].token_ids == theirs[0, 5:].tolist()
    results["greedy completions equal to generate"] = f"{equal} of {len(prompts)}"

    def reward(completion_ids: list[list[int]], **kwargs: object) -> list[float]:
        return [float(sum(token >= 512 for token in ids)) for ids in completion_ids]

    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=64,
        max_completion_length=64,
        learning_rate=1e-3,
        max_steps=10,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        beta=0.01,
        num_iterations=2,
    )
    rows = Dataset.from_dict({"prompt": [f"w{i} w{i + 1} w{i + 2}" for i in range(10, 90)]})
    trainer = GRPOTrainer(make_model(torch.float32), reward, config, rows, processing_class=tokenizer())
    trainer.train()
    steps = [e for e in trainer.state.log_history if "reward" in e]
    results["bf16 resolved to"] = config.bf16
    results["reward first and last"] = (steps[0]["reward"], steps[-1]["reward"])
    results["kl first and last"] = (steps[0]["kl"], steps[-1]["kl"])
    print("RESULT", json.dumps(results, default=str, indent=1))


if __name__ == "__main__":
    main()
