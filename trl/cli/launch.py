"""Options of `accelerate launch`: recognised, so that the answer can say where they go."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from trl.errors import ConfigError

if TYPE_CHECKING:
    from trl.cli.parser import Unknown

LAUNCHER_OPTIONS = frozenset(
    {
        "accelerate_config", "config_file", "num_processes", "num_machines", "machine_rank", "gpu_ids", "multi_gpu",
        "cpu", "mixed_precision", "main_process_ip", "main_process_port", "rdzv_backend", "rdzv_conf", "same_network",
        "use_deepspeed", "use_fsdp", "use_megatron_lm", "num_cpu_threads_per_process", "dynamo_backend",
        "deepspeed_config_file", "zero_stage", "zero3_init_flag", "fsdp_version", "fsdp_sharding_strategy",
    }
)  # fmt: skip


def refuse_launcher_options(unknown: "Iterable[Unknown]", method: str) -> None:
    """Raise for the first of `unknown` that `accelerate launch` would take.

    Raises:
        ConfigError: with the command line that takes it.
    """
    for setting in unknown:
        if setting.name in LAUNCHER_OPTIONS:
            name = "config_file" if setting.name == "accelerate_config" else setting.name
            raise ConfigError(
                f"`{setting.name}` is an option of the launcher: "
                f"run `accelerate launch --{name} … -m trl.cli {method} …`."
            )
