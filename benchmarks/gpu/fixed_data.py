"""Times SFT and DPO steps on one GPU: tokens or pairs a second and the peak of memory, for whichever `trl` is imported.

python benchmarks/gpu/fixed_data.py --method sft --batch 16 --model DIR [--packing] [--tokens-per-pass N]

The rows are random token ids with long-tailed lengths (64 to 2,048); the 0.5 B model has random weights. The first
steps warm up and are not counted. Prints one line of JSON.
"""

import argparse
import json
import time

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback


def lengths(count: int, low: int, high: int, generator: torch.Generator) -> list[int]:
    """Log-normal, median `low * 4`, cut to the range."""
    drawn = torch.empty(count).log_normal_(torch.tensor(low * 4.0).log().item(), 0.9, generator=generator)
    return drawn.clamp(low, high).long().tolist()


def tokens(length: int, generator: torch.Generator) -> list[int]:
    return torch.randint(10, 7000, (length,), generator=generator).tolist()


def rows(method: str, count: int) -> Dataset:
    g = torch.Generator().manual_seed(0)
    if method == "sft":
        return Dataset.from_dict({"input_ids": [tokens(n, g) for n in lengths(count, 64, 2048, g)]})
    prompts = lengths(count, 128, 1024, g)
    chosen, rejected = (lengths(count, 32, 1024, g) for _ in range(2))
    words = [f"w{i}" for i in range(10, 7000)]

    def text(n: int) -> str:
        return " ".join(words[i % len(words)] for i in tokens(n // 3 + 1, g))

    return Dataset.from_dict(
        {
            "prompt": [text(n) + " " for n in prompts],
            "chosen": [text(n) for n in chosen],
            "rejected": [text(n) for n in rejected],
        }
    )


class Clock(TrainerCallback):
    """Seconds of each optimizer step."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *args: object, **kwargs: object) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", choices=["sft", "dpo"], default="sft")
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--packing", action="store_true")
    parser.add_argument("--tokens-per-pass", type=int)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--offloading", action="store_true")
    parser.add_argument("--fp16", action="store_true")
    parser.add_argument("--fp32", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    import trl

    settings = {
        "output_dir": "/tmp/fixed_data",
        "per_device_train_batch_size": args.batch,
        "max_steps": args.steps,
        "max_length": 2048,
        "bf16": not (args.cpu or args.fp16 or args.fp32),
        "fp16": args.fp16,
        "activation_offloading": args.offloading,
        "use_cpu": args.cpu,
        "gradient_checkpointing": args.checkpointing,
        "learning_rate": 1e-6,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "seed": 0,
    }
    if args.packing:
        settings["packing"] = True
    if args.tokens_per_pass:
        settings["max_tokens_per_micro_batch"] = args.tokens_per_pass
    count = args.batch * args.steps * (6 if args.packing else 1)
    dataset = rows(args.method, count)
    clock = Clock()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    common = {"train_dataset": dataset, "processing_class": tokenizer, "callbacks": [clock]}
    if args.method == "sft":
        trainer = trl.SFTTrainer(args.model, args=trl.SFTConfig(**settings), **common)
    else:
        trainer = trl.DPOTrainer(args.model, args=trl.DPOConfig(**settings), **common)
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    seconds = clock.ends[-1] - clock.ends[args.warmup - 1]
    seen = steps[-1]["num_tokens"] - steps[args.warmup - 1]["num_tokens"]
    print(
        json.dumps(
            {
                "trl": trl.__version__,
                "method": args.method,
                "batch": args.batch,
                "packing": args.packing,
                "tokens_per_pass": args.tokens_per_pass,
                "checkpointing": args.checkpointing,
                "offloading": args.offloading,
                "precision": "fp16" if args.fp16 else "fp32" if args.fp32 or args.cpu else "bf16",
                "seconds_per_step": seconds / (args.steps - args.warmup),
                "tokens_per_second": seen / seconds,
                "pairs_per_second": args.batch * (args.steps - args.warmup) / seconds,
                "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None,
                "loss": [round(entry["loss"], 4) for entry in steps[:2]],
                "grad_norm": [round(entry["grad_norm"], 4) for entry in steps[:2]],
            }
        )
    )


if __name__ == "__main__":
    main()
