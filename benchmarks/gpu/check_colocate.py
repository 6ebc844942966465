"""Checks vLLM inside the trainer on real GPUs; prints one JSON line a process.

    python benchmarks/gpu/check_colocate.py [--sleep] [--impl transformers] [--dtype float32] [--out-of-memory]
    torchrun --nproc-per-node 2 benchmarks/gpu/check_colocate.py [--tp 2]

Trains a small model for three steps, and says how far apart vLLM's and the trainer's log-probs are at every step,
whether greedy completions after training are those of the trainer itself, and how much of the GPU training takes.
`--out-of-memory` limits what training may take, and prints what the user is told.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from transformers import Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from fixtures.tokenizers import word_tokenizer

from trl import GRPOConfig, GRPOTrainer
from trl.errors import DeviceMemoryError
from trl.generation.local import LocalEngine
from trl.types import Prompt, Sampling
from trl.weights.source import PolicyWeights


def small_model(dtype: torch.dtype) -> Qwen3ForCausalLM:
    """Four layers of width 512, the weights far from uniform."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.08,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config).to(dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sleep", action="store_true")
    parser.add_argument("--impl", default="vllm")
    parser.add_argument("--dtype", default="float32", help="of the policy's weights; it computes in bfloat16")
    parser.add_argument("--tp", type=int, default=1, help="processes that share an engine")
    parser.add_argument("--out-of-memory", action="store_true")
    options = parser.parse_args()
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_vllm=True,
        vllm_gpu_memory_utilization=0.1,
        vllm_max_model_length=256,
        vllm_enable_sleep_mode=options.sleep,
        vllm_model_impl=options.impl,
        vllm_tensor_parallel_size=options.tp,
        vllm_parity_check_steps=1,
        per_device_train_batch_size=16,
        num_generations=4,
        max_completion_length=64,
        bf16=True,
        learning_rate=1e-4,
        max_steps=3,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
    )
    prompts = Dataset.from_dict({"prompt": [f"w{i} w{i + 1} w{i + 2}" for i in range(10, 42)]})

    def reward(completion_ids: list[list[int]], **kwargs: object) -> list[float]:
        return [sum(token % 2 for token in ids) / 64 for ids in completion_ids]

    model = small_model(getattr(torch, options.dtype))
    trainer = GRPOTrainer(model, reward, config, prompts, processing_class=word_tokenizer())
    if options.out_of_memory:
        torch.cuda.set_per_process_memory_fraction(0.001)
        try:
            trainer.train()
        except DeviceMemoryError as error:
            print("RESULT", error, flush=True)
        return
    used = []
    trainer.model.register_forward_pre_hook(lambda *_: used.append(torch.cuda.mem_get_info()))
    trainer.train()
    policy = trainer.accelerator.unwrap_model(trainer.model)
    trainer.engine.update_weights(PolicyWeights(policy), 3)
    asked = [Prompt([10 + int(os.environ.get("RANK", "0")), 11, 12]), Prompt([20, 21]), Prompt([30])]
    greedy = Sampling(max_tokens=24, temperature=0.0)
    own = LocalEngine(policy, eos_ids=[1], autocast=trainer.compute_loss_context_manager)
    written = [dict(engine.generate(asked, greedy)) for engine in (trainer.engine, own)]
    pairs = [
        (a, b) for i in range(3) for a, b in zip(written[0][i][0].token_ids, written[1][i][0].token_ids, strict=False)
    ]
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    result = {
        "rank": os.environ.get("RANK", "0"),
        **vars(options),
        "greedy_tokens_equal": f"{sum(a == b for a, b in pairs)} of {len(pairs)}",
        "used_GiB_training": round(max((total - free) / 2**30 for free, total in used), 2),
        **{key: [entry.get(key) for entry in logged] for key in ("loss", "reward", "sampling/parity_max")},
        "sampling/sampling_logp_difference/max": [e.get("sampling/sampling_logp_difference/max") for e in logged],
    }
    print("RESULT", json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
