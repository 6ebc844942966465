"""A vLLM plugin: weight transfer into a server on the CPU.

vLLM calls `register` in each of its processes when this package is installed in its environment. The server then
accepts `--weight-transfer-config '{"backend": "gloo"}'` (the contract of `nccl`, over TCP) and `"shm"` (the contract of
`ipc`, through shared memory). With `TRL_CPU_TRANSFER_AS_GPU=1` in its environment they also answer to `nccl` and `ipc`,
so that a server on the CPU starts with the very command of production.
"""

import os

_ENGINES = {"gloo": ("GlooEngine", "nccl"), "shm": ("SharedFileEngine", "ipc")}


def register() -> None:
    """Adds the backends to vLLM's table. Called by vLLM."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory

    module = f"{__name__}.engines"
    as_gpu = os.environ.get("TRL_CPU_TRANSFER_AS_GPU") == "1"
    for name, (engine, gpu_name) in _ENGINES.items():
        # vLLM calls this more than once in a process.
        if name not in Factory._registry:
            Factory.register_engine(name, module, engine)
        if as_gpu:
            Factory._registry[gpu_name] = Factory._registry[name]
