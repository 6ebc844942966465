"""Options that belong to a command rather than to a trainer: the dataset, the reward, how the model is loaded."""

from dataclasses import dataclass, field
from typing import Any, Literal

from trl.errors import ConfigError
from trl.trainer.arguments import option


@dataclass
class ScriptArguments:
    """Which dataset a run uses."""

    dataset_name: str | None = option(
        None,
        "Dataset: a hub id, a local folder, a .json, .jsonl, .csv or .parquet file, or a dotted path "
        "`module.function` to a function that gets the split's name.",
    )
    dataset_config: str | None = option(None, "Configuration of the dataset, where it has several.")
    dataset_train_split: str = option("train", "Split to train on.")
    dataset_test_split: str = option("test", "Split to evaluate on; read only if `eval_strategy` is not `no`.")
    dataset_streaming: bool = option(False, "Stream the dataset instead of downloading it first.")
    ignore_bias_buffers: bool = option(
        False, "Leave the model's boolean buffers out of DDP's synchronisation, which cannot handle them."
    )


@dataclass
class RewardScriptArguments(ScriptArguments):
    """The dataset, and what scores completions."""

    reward_funcs: list[str] | None = option(
        None,
        "Reward functions: `accuracy_reward`, `reasoning_accuracy_reward`, `think_format_reward`, "
        "`get_soft_overlong_punishment`, or dotted paths `module.function`.",
    )
    reward_model_name_or_path: str | None = option(None, "Reward model: a hub id or a local folder.")


@dataclass
class ModelConfig:
    """How the policy is loaded and, with LoRA, which part of it is trained."""

    model_name_or_path: str | None = option(None, "Model to train: a hub id or a local folder.")
    model_revision: str = option("main", "Branch, tag or commit of the model's repository.")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] | None = option(
        "float32", "Data type of the weights; `auto` is the one they were saved in."
    )
    attn_implementation: str | None = option(
        None, "Attention: `sdpa`, `flash_attention_2`, `kernels-community/flash-attn2`, … Not set: the model's own."
    )
    use_peft: bool = option(False, "Train a LoRA adapter instead of the model's weights.")
    lora_r: int = option(16, "LoRA: rank.")
    lora_alpha: int = option(32, "LoRA: scale, divided by the rank.")
    lora_dropout: float = option(0.05, "LoRA: dropout before the adapter.")
    lora_target_modules: list[str] | str | None = option(
        None, "LoRA: modules that get an adapter, or `all-linear`. Not set: peft's choice for the architecture."
    )
    lora_target_parameters: list[str] | None = option(
        None, "LoRA: parameters that get an adapter and are no module's weight, e.g. those of experts."
    )
    lora_modules_to_save: list[str] | None = option(None, "LoRA: modules that are trained in full and saved along.")
    lora_task_type: str = option("CAUSAL_LM", "LoRA: task type.")
    use_rslora: bool = option(False, "LoRA: divide the scale by the root of the rank (rank-stabilised).")
    use_dora: bool = option(False, "LoRA: also learn the weights' magnitude (DoRA).")
    load_in_8bit: bool = option(False, "Quantise the base model to 8 bits; trained through an adapter.")
    load_in_4bit: bool = option(False, "Quantise the base model to 4 bits; trained through an adapter.")
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = option("nf4", "4 bits: number format.")
    use_bnb_nested_quant: bool = option(False, "4 bits: quantise the quantisation constants too.")
    bnb_4bit_quant_storage: str | None = option(None, "4 bits: data type in which packed weights are stored.")

    def __post_init__(self) -> None:
        if self.load_in_8bit and self.load_in_4bit:
            raise ConfigError("`load_in_8bit` and `load_in_4bit` exclude each other: set one of them.")
        if isinstance(self.lora_target_modules, list) and len(self.lora_target_modules) == 1:
            self.lora_target_modules = self.lora_target_modules[0]


@dataclass
class DatasetConfig:
    """One dataset of a mixture."""

    path: str
    name: str | None = None
    data_dir: str | None = None
    data_files: str | list[str] | dict[str, Any] | None = None
    split: str = "train"
    columns: list[str] | None = None
    fraction: float | None = None


@dataclass
class DatasetMixtureConfig:
    """Several datasets, joined. It has priority over `dataset_name`."""

    datasets: list[DatasetConfig] = field(
        default_factory=list,
        metadata={
            "help": "Datasets to join, each a mapping with `path` and optionally `name`, `data_dir`, `data_files`, "
            "`split`, `columns`, `fraction` (its share of the mixture)."
        },
    )
    streaming: bool = option(False, "Stream the datasets of the mixture.")
    test_split_size: float | None = option(
        None, "Rows (or, below 1, the share) of the mixture that are held out as its test split."
    )

    def __post_init__(self) -> None:
        self.datasets = [DatasetConfig(**entry) if isinstance(entry, dict) else entry for entry in self.datasets]
