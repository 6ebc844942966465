"""Peak memory of log-probs and entropies, forward and backward: the chunked head against full logits.

    python benchmarks/head_memory.py [--device cuda] [--tokens 256,512,1024,2048] [--hidden 256] [--vocabulary 32768]

`full` computes logits `[tokens, vocabulary]`, as a plain torch loss does; `chunked` is `trl.functional.logps`. Every
cell is measured in a fresh process. On the CPU it is the growth of the process's peak resident memory, on CUDA the peak
of allocated memory, both above what hidden states and head take before the first product. The gradient of the head
(vocabulary x hidden) is part of it, and is the same for both.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable

from torch import Tensor

MIB = 1 << 20
METHODS = ("full", "chunked")


def full(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies from full logits, in float32."""
    log_p = (hidden @ weight.T).float().log_softmax(1)
    return log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(1)


def worker(method: str, tokens: int, hidden_size: int, vocabulary: int, device: str) -> dict[str, float]:
    """Peak MiB and seconds of one forward and backward pass, and the loss, which both methods share."""
    import torch

    from trl.functional.logps import chosen_logps

    methods: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {"full": full, "chunked": chosen_logps}
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    # A small pass first, so that libraries and threads do not count.
    warm = torch.zeros(2, 2, device=device, dtype=dtype, requires_grad=True)
    sum(x.sum() for x in methods[method](warm, warm, torch.zeros(2, dtype=torch.long, device=device))).backward()
    hidden = torch.randn(tokens, hidden_size, device=device).to(dtype).requires_grad_()
    weight = (0.1 * torch.randn(vocabulary, hidden_size, device=device)).to(dtype).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), device=device)
    before, start = _memory(device), time.perf_counter()
    logps, entropies = methods[method](hidden, weight, targets)
    loss = logps.mean() + 0.01 * entropies.mean()
    loss.backward()
    value = loss.item()
    return {"mib": (_memory(device, peak=True) - before) / MIB, "seconds": time.perf_counter() - start, "loss": value}


def _memory(device: str, peak: bool = False) -> int:
    """Bytes in use, or their highest number so far; on the CPU both are the highest number."""
    import torch

    if device == "cuda":
        if peak:
            return torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def measure(method: str, tokens: int, args: argparse.Namespace) -> dict[str, float]:
    """What `worker` returns, from a process of its own."""
    command = [sys.executable, __file__, "--worker", method, "--tokens", str(tokens), "--device", args.device]
    command += ["--hidden", str(args.hidden), "--vocabulary", str(args.vocabulary)]
    # Large blocks go back to the system at once: the peak is of what is in use, not of what the allocator keeps.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(MIB)}
    return json.loads(subprocess.run(command, check=True, capture_output=True, env=environment).stdout)


def main() -> None:
    """Prints a table with a row per number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="256,512,1024,2048", help="numbers of tokens, with commas between")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--worker", choices=METHODS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(worker(args.worker, int(args.tokens), args.hidden, args.vocabulary, args.device)))
        return
    print(f"{args.device}, hidden size {args.hidden}, vocabulary {args.vocabulary}: peak MiB (seconds)\n")
    print(f"| tokens | {' | '.join(METHODS)} | full / chunked |\n|---|{'---|' * (len(METHODS) + 1)}")
    for tokens in map(int, args.tokens.split(",")):
        cells = {method: measure(method, tokens, args) for method in METHODS}
        losses = {method: cell["loss"] for method, cell in cells.items()}
        if abs(losses["full"] - losses["chunked"]) > 1e-3 * abs(losses["full"]):
            raise SystemExit(f"The two methods disagree at {tokens} tokens: {losses}")
        texts = [f"{cell['mib']:.0f} ({cell['seconds']:.1f})" for cell in cells.values()]
        print(f"| {tokens} | {' | '.join(texts)} | {cells['full']['mib'] / cells['chunked']['mib']:.1f} |", flush=True)


if __name__ == "__main__":
    main()
