"""Times GRPO steps that generate with vLLM: step, generation, weight sync, and the GPU's memory.

    python benchmarks/gpu/grpo_vllm_step.py --backend colocate [--sleep]    # vLLM inside the trainer, on GPU 0
    python benchmarks/gpu/grpo_vllm_step.py --backend ipc                   # server and trainer on GPU 0
    python benchmarks/gpu/grpo_vllm_step.py --backend nccl                  # server on GPU 1, trainer on GPU 0
    python benchmarks/gpu/grpo_vllm_step.py --url http://127.0.0.1:8765     # a server that runs already

Trains a few steps of a 0.5 B-parameter model with random weights (Qwen2.5-0.5B's shape; completion lengths are
geometric, about 240 tokens, up to 1,024) and prints one JSON line; a server is started and stopped. `--no-correction`
leaves out the importance-sampling correction, and with it the engine's log-probs. `--alone` also times vLLM by itself,
in process, on the same prompts. `--label` names the run; the script runs unchanged with the reference implementation,
which has no `ipc`.
"""

import argparse
import glob
import json
import os
import random
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import types
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PORT = 8765


def make_model(folder: Path, eos_ids: int = 600) -> None:
    """A bfloat16 model of 0.5 B random parameters, with a tokenizer trained on Python's own library."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=8000, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train(sorted(glob.glob(sysconfig.get_paths()["stdlib"] + "/*.py"))[:150], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=special[2], pad_token=special[0])
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        eos_token_id=2,
        pad_token_id=0,
        bos_token_id=None,
    )
    with torch.device("cuda"):
        model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    # Many end-of-sequence ids make lengths geometric, so that waste by unequal lengths shows as on real data.
    ends = [2, *range(1000, 1000 + eos_ids)]
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=0, do_sample=True)
    model.save_pretrained(folder)
    fast.save_pretrained(folder)


def start_server(model: Path, backend: str, memory: float, log: Path) -> subprocess.Popen:
    """A `vllm serve` process, on GPU 0 for `ipc` and on GPU 1 for `nccl`."""
    env = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "0" if backend == "ipc" else "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    }
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--host", "127.0.0.1"]
    command += ["--port", str(PORT), "--weight-transfer-config", json.dumps({"backend": backend})]
    command += ["--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1", "--max-model-len", "4096"]
    command += ["--gpu-memory-utilization", str(memory)]
    return subprocess.Popen(command, env=env, stdout=log.open("w"), stderr=subprocess.STDOUT)


def wait_for(server: subprocess.Popen, log: Path, seconds: float) -> float:
    """Seconds until the server is ready."""
    started = time.monotonic()
    while time.monotonic() - started < seconds:
        if server.poll() is not None:
            raise SystemExit(f"The server ended with {server.returncode}:\n{log.read_text()[-3000:]}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=5):
                return time.monotonic() - started
        except OSError:
            time.sleep(1)
    raise SystemExit(f"The server was not ready after {seconds} s:\n{log.read_text()[-3000:]}")


def train(model: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Medians over the steps but the first."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback

    from trl import GRPOConfig, GRPOTrainer

    rng = random.Random(0)
    words = ["return", "self", "import", "class", "value", "index", "while", "lambda", "yield", "assert"]
    prompts = [" ".join(rng.choices(words, k=150)) for _ in range(args.prompts * (args.steps + 1))]
    clock: dict[str, float] = {}
    log: list[dict[str, float]] = []
    syncs: list[float] = []

    def waiting(results: Iterator, name: str) -> Iterator:
        # Only the waiting counts where results come as they finish.
        while True:
            started = time.perf_counter()
            item = next(results, None)
            clock[name] = clock.get(name, 0.0) + time.perf_counter() - started
            if item is None:
                return
            yield item

    def timed(owner: Any, function: str, name: str, each: list[float] | None = None) -> None:
        original: Callable = getattr(owner, function)

        def call(*a: Any, **k: Any) -> Any:
            torch.cuda.synchronize()
            phase[0] = "generate"
            started = time.perf_counter()
            result = original(*a, **k)
            torch.cuda.synchronize()
            spent = time.perf_counter() - started
            clock[name] = clock.get(name, 0.0) + spent
            if each is not None:
                each.append(spent)
            return waiting(result, name) if isinstance(result, types.GeneratorType) else result

        setattr(owner, function, call)

    used: dict[str, float] = {}
    phase = ["train"]

    def watch() -> None:
        # All that is taken of the GPU, by whomever: torch's own account knows nothing of memory that vLLM lets go.
        while phase[0] != "end":
            free, total = torch.cuda.mem_get_info(0)
            used[phase[0]] = max(used.get(phase[0], 0.0), round((total - free) / 2**30, 1))
            time.sleep(0.01)

    class Clock(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **k: Any) -> None:
            torch.cuda.synchronize()
            clock.clear()
            if state.global_step == 1:
                used.clear()  # the first step also compares log-probs, with everything awake
            torch.cuda.empty_cache()  # what the step before only kept in reserve is not this step's peak
            self.started = time.perf_counter()

        def on_step_end(self, *a: Any, **k: Any) -> None:
            torch.cuda.synchronize()
            log.append({"step": time.perf_counter() - self.started, **clock})
            print("STEP", json.dumps(log[-1]), flush=True)

    tokens: list[int] = []

    def reward(completion_ids: list[list[int]], **k: Any) -> list[float]:
        tokens.append(sum(map(len, completion_ids)))
        return [float(len(set(ids))) for ids in completion_ids]

    count = args.prompts * args.group
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_vllm=True,
        vllm_mode="colocate" if args.backend == "colocate" else "server",
        vllm_server_base_url=args.url or f"http://127.0.0.1:{PORT}",
        vllm_gpu_memory_utilization=0.3,
        vllm_max_model_length=4096,
        vllm_enable_sleep_mode=args.sleep,
        vllm_importance_sampling_correction=not args.no_correction,
        per_device_train_batch_size=args.micro,
        gradient_accumulation_steps=count // args.micro,
        num_generations=args.group,
        max_completion_length=args.max_completion,
        model_init_kwargs={"dtype": "bfloat16"},
        gradient_checkpointing=False,
        bf16=True,
        logging_steps=1,
        max_steps=args.steps + 1,
        report_to="none",
        save_strategy="no",
    )
    trainer = GRPOTrainer(str(model), reward, config, Dataset.from_dict({"prompt": prompts}), callbacks=[Clock()])
    parts = vars(trainer)
    if "engine" in parts:
        timed(trainer.engine, "generate", "generate")
        timed(trainer.engine, "update_weights", "sync", syncs)
    else:
        timed(parts["vllm_generation"], "generate", "generate")
        timed(parts["vllm_generation"], "sync_weights", "sync", syncs)

    def training(*a: Any) -> None:
        phase[0] = "train"

    trainer.model.register_forward_pre_hook(training)
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    trainer.train()
    phase[0] = "end"
    body = log[1:]
    synced = trainer.engine.last_sync if "engine" in parts else []
    last_sync = (synced[0] if isinstance(synced, list) and synced else synced).seconds if synced else {}
    alone = vllm_alone(trainer, prompts, args) if args.alone else {}
    return {
        "label": args.label,
        "backend": args.backend,
        **{name: round(statistics.median(e.get(name, 0.0) for e in body), 4) for name in ("step", "generate", "sync")},
        "sync_max": round(max(syncs[1:], default=0.0), 4),
        "tokens": statistics.median(tokens),
        "peak_GiB": round(torch.cuda.max_memory_allocated() / 2**30, 1),
        "used_GiB": used,
        **alone,
        "last_sync": {name: round(seconds, 4) for name, seconds in last_sync.items()},
        "history": [e for e in trainer.state.log_history if "sampling/parity_kl" in e or "loss" in e][-2:],
    }


def vllm_alone(trainer: Any, prompts: list[str], args: argparse.Namespace) -> dict[str, float]:
    """Seconds of vLLM's own `generate` for one step's completions, with log-probs and without; no text is made."""
    from vllm import SamplingParams

    engine = trainer.engine
    ids = [{"prompt_token_ids": trainer.processing_class(text)["input_ids"]} for text in prompts[: args.prompts]]
    ends = sorted(trainer.model.generation_config.eos_token_id)
    seconds = {}
    for name, logprobs in (("alone_with_logps", 0), ("alone", None)):
        params = SamplingParams(
            n=args.group, max_tokens=args.max_completion, logprobs=logprobs, detokenize=False, stop_token_ids=ends
        )
        started = time.perf_counter()
        engine.llm.generate(ids, params, use_tqdm=False)
        seconds[name] = round(time.perf_counter() - started, 2)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=["colocate", "ipc", "nccl"], default="colocate")
    parser.add_argument("--url", help="of a server that runs already, with the same model")
    parser.add_argument("--sleep", action="store_true", help="colocate: vLLM frees its memory while training")
    parser.add_argument("--alone", action="store_true", help="colocate: time vLLM by itself too")
    parser.add_argument("--no-correction", action="store_true", help="ask for no log-probs")
    parser.add_argument("--label", default="this package")
    parser.add_argument("--model", type=Path, help="folder of the model; made when it is not there")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--max-completion", type=int, default=1024)
    parser.add_argument("--micro", type=int, default=32)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--memory", type=float, default=0.4, help="share of GPU memory for the server")
    args = parser.parse_args()
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # the trainer's, before CUDA starts; the server gets its own
    model = args.model or Path(tempfile.gettempdir()) / "grpo-bench-0.5b"
    if not (model / "config.json").exists():
        make_model(model)
    if args.url or args.backend == "colocate":
        print("RESULT", json.dumps(train(model, args)), flush=True)
        return
    log = Path(tempfile.gettempdir()) / "grpo-bench-server.log"
    server = start_server(model, args.backend, args.memory, log)
    try:
        print(f"server ready after {wait_for(server, log, 300):.0f} s", flush=True)
        print("RESULT", json.dumps(train(model, args)), flush=True)
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()


if __name__ == "__main__":
    main()
