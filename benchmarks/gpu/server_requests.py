"""Times one generation round of requests against a running server, with log-probs and without.

    python benchmarks/gpu/server_requests.py http://127.0.0.1:8765

The prompts and lengths are those of `grpo_vllm_step.py`, whose server and model this expects: what is measured here
is the server's share of that step. The first round of each is not counted.
"""

import argparse
import json
import random
import time

from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_probe import probe
from trl.generation.vllm_server import Server, VLLMServerEngine
from trl.types import Prompt, Sampling


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=180)
    parser.add_argument("--max-completion", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    client = VLLMClient(args.url, timeout=300)
    facts = probe(client)
    rng = random.Random(0)
    engine = VLLMServerEngine([Server(client, facts)])
    for with_logps in (True, False):
        sampling = Sampling(n=args.group, max_tokens=args.max_completion, with_logps=with_logps)
        seconds, tokens = [], 0
        for _ in range(args.rounds + 1):
            ids = [[rng.randrange(3, 1000) for _ in range(args.prompt_tokens)] for _ in range(args.prompts)]
            started = time.perf_counter()
            groups = [group for _, group in engine.generate([Prompt(p) for p in ids], sampling)]
            seconds.append(round(time.perf_counter() - started, 3))
            tokens = sum(len(c.token_ids) for group in groups for c in group)
        result = {"logps": with_logps, "seconds": seconds[1:], "tokens": tokens, "vllm": facts.version}
        print("RESULT", json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
