"""Times one GRPO step on the CPU, of this package and of the reference implementation, in one run.

    python benchmarks/grpo_step_cpu.py --reference-python REF/bin/python [--models tiny,135m] [--steps 5]

REF is a virtual environment with `trl==1.16.0` and the same torch. The same worker runs in both, on the same models,
prompts and number of tokens (end-of-sequence is switched off, so every completion has full length), one after the
other, each in a fresh process with the same number of threads. The first step is warm-up; the table shows medians.

`best` are the settings under which either is fastest here (float32, no checkpointing), `defaults` are its own.
"""

import argparse
import json
import os
import platform
import random
import statistics
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

SETTINGS = {  # name: (model, prompts, completions per prompt, completion tokens, words in a prompt)
    "tiny 4x4x32": ("tiny", 4, 4, 32, 12),
    "tiny 8x8x32": ("tiny", 8, 8, 32, 12),
    "tiny 8x8x128": ("tiny", 8, 8, 128, 12),
    "tiny 4x8x32, long prompts": ("tiny", 4, 8, 32, 140),
    "135m 4x4x32": ("135m", 4, 4, 32, 12),
}
VARIANTS = {"best": {"bf16": False, "gradient_checkpointing": False}, "defaults": {"use_cpu": True}}
PHASES = ("generate", "rest of roll-out", "train", "optimizer")


def make_tiny(folder: Path) -> None:
    """A 4.2 M-parameter Llama with a word-level tokenizer."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = string.ascii_lowercase
    words = ["<pad>", "<eos>", "<unk>", *(a + b + c for a in letters for b in letters for c in "aeiou")][:4096]
    vocabulary = {w: i for i, w in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    print(f"tiny: {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters", file=sys.stderr)


def make_135m(folder: Path, gguf: Path) -> None:
    """SmolLM2-135M from a GGUF file, its weights copied into a fresh model so that it saves as an ordinary one."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype="float32")
    vars(loaded.config).pop("quantization_config", None)  # loading has undone it
    fresh = type(loaded)(loaded.config)
    fresh.load_state_dict(loaded.state_dict())
    fresh.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def worker(model: str, setting: str, variant: str, steps: int) -> None:
    """Trains a few steps with whatever `trl` this interpreter has; prints one JSON line."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback

    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    _, prompts, group, tokens, words = SETTINGS[setting]
    tokenizer = AutoTokenizer.from_pretrained(model)
    vocabulary = [w for w in tokenizer.get_vocab() if w.isalpha() and w.isascii()]
    rng = random.Random(0)
    rows = [{"prompt": " ".join(rng.choices(vocabulary, k=words))} for _ in range(prompts * (steps + 1))]
    clock = dict.fromkeys(PHASES, 0.0)
    log: list[dict[str, float]] = []

    def timed(function: Callable, phase: str) -> Callable:
        def call(*args: object, **kwargs: object) -> object:
            started = time.perf_counter()
            result = function(*args, **kwargs)
            if hasattr(result, "__next__"):
                result = list(result)  # type: ignore[call-overload]
            clock[phase] += time.perf_counter() - started
            return result

        return call

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: object, **kwargs: object) -> None:
            self.started = time.perf_counter()
            clock.update(dict.fromkeys(PHASES, 0.0))

        def on_step_end(self, *args: object, **kwargs: object) -> None:
            log.append({"step": time.perf_counter() - self.started, **clock})

    def reward(completion_ids: list[list[int]], **kwargs: object) -> list[float]:
        assert all(len(ids) == tokens for ids in completion_ids)
        return [float(len(set(ids))) + i % 3 for i, ids in enumerate(completion_ids)]

    with tempfile.TemporaryDirectory() as output:
        config = GRPOConfig(
            output_dir=output,
            per_device_train_batch_size=prompts * group,
            num_generations=group,
            max_completion_length=tokens,
            generation_kwargs={"min_new_tokens": tokens},
            max_steps=steps + 1,
            learning_rate=1e-4,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            **VARIANTS[variant],
        )
        trainer = GRPOTrainer(model, reward, config, Dataset.from_list(rows), callbacks=[Clock()])
        roll_out = "_prepare_inputs"
        setattr(trainer, roll_out, timed(getattr(trainer, roll_out), "rest of roll-out"))
        engine = vars(trainer).get("engine")
        if engine is not None:
            engine.generate = timed(engine.generate, "generate")
        else:
            trainer.model.generate = timed(trainer.model.generate, "generate")
        step = trainer.training_step
        trainer.training_step = timed(step, "train")  # type: ignore[method-assign]
        trainer.train()
    medians = {name: statistics.median(entry[name] for entry in log[1:]) for name in log[0]}
    # Each phase was timed around the one it contains.
    medians["optimizer"] = medians["step"] - medians["train"]
    medians["train"] -= medians["rest of roll-out"]
    medians["rest of roll-out"] -= medians["generate"]
    print("RESULT " + json.dumps(medians))


def run_worker(python: str, *arguments: str) -> dict[str, float]:
    """The medians that a worker in a fresh process prints."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    # The script's own folder only: which `trl` it finds is the interpreter's affair.
    command = [python, "-P", __file__, "--worker", *arguments]
    done = subprocess.run(command, env=env, cwd=tempfile.gettempdir(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    return json.loads(line.removeprefix("RESULT "))


def describe_machine() -> str:
    """Processor, cores and versions, as one line."""
    import torch
    import transformers

    cpuinfo = Path("/proc/cpuinfo")
    names = [x for x in cpuinfo.read_text().splitlines() if x.startswith("model name")] if cpuinfo.exists() else []
    processor = names[0].split(":")[1].strip() if names else platform.processor()
    return (
        f"{processor}, {os.cpu_count()} cores, one thread; Python {platform.python_version()}, "
        f"torch {torch.__version__}, transformers {transformers.__version__}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference-python", help="interpreter of the reference implementation's environment")
    parser.add_argument("--gguf", type=Path, help="SmolLM2-135M as GGUF, for the 135m setting")
    parser.add_argument("--settings", default=None, help="comma-separated substrings of the settings to run")
    parser.add_argument("--variants", default="best,defaults")
    parser.add_argument("--steps", type=int, default=5, help="timed steps")
    parser.add_argument("--worker", nargs=3, metavar=("MODEL", "SETTING", "VARIANT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(*args.worker, steps=args.steps)
        return
    wanted = args.settings.split(",") if args.settings else [""]
    settings = [name for name in SETTINGS if any(part in name for part in wanted)]
    print(describe_machine(), "\n")
    head = ["setting", "implementation", "step s", *(f"{p} s" for p in PHASES), "times slower"]
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder)
        make_tiny(models / "tiny")
        if any("135m" in s for s in settings):
            if args.gguf is None:
                raise SystemExit("The 135m setting needs --gguf FILE.")
            make_135m(models / "135m", args.gguf)
        for setting in settings:
            model = str(models / SETTINGS[setting][0])
            ours = run_worker(sys.executable, model, setting, "best", "--steps", str(args.steps))
            _print_row(setting, "this package", ours, ours["step"])
            for variant in args.variants.split(",") if args.reference_python else []:
                steps = args.steps if variant == "best" else max(1, min(2, args.steps))
                theirs = run_worker(args.reference_python, model, setting, variant, "--steps", str(steps))
                _print_row(setting, f"reference, {variant}", theirs, ours["step"])


def _print_row(setting: str, name: str, medians: dict[str, float], base: float) -> None:
    cells = [setting, name, f"{medians['step']:.3f}", *(f"{medians[p]:.3f}" for p in PHASES)]
    print("| " + " | ".join([*cells, f"{medians['step'] / base:.2f}"]) + " |", flush=True)


if __name__ == "__main__":
    main()
