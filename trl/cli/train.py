"""The training commands: options, checks that need no model, the trainer, the run."""

import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl.cli.arguments import DatasetMixtureConfig, ModelConfig, RewardScriptArguments, ScriptArguments
from trl.cli.errors import report_error
from trl.cli.launch import refuse_launcher_options
from trl.cli.options import OptionGroup, dataclass_options, training_options
from trl.cli.parser import OptionParser
from trl.cli.threads import calm_openmp
from trl.errors import ConfigError, TRLError
from trl.trainer.arguments import (
    DistillationArguments,
    DPOArguments,
    GRPOArguments,
    KTOArguments,
    OnlineDPOArguments,
    RLOOArguments,
    ServerDistillationArguments,
    SFTArguments,
)

if TYPE_CHECKING:
    from transformers import Trainer


@dataclass(frozen=True)
class Method:
    """One training command.

    Attributes:
        summary: one line for the help text.
        script: options of the command itself.
        options: options of the method; the config adds those of `transformers.TrainingArguments`.
        config: where the config class is, as `module:name`.
        trainer: where the trainer class is, as `module:name`.
        columns: columns that every row of the dataset must have.
    """

    summary: str
    script: type
    options: type
    config: str
    trainer: str
    columns: tuple[str, ...]


METHODS = {
    "sft": Method(
        summary="Fine-tune on given texts (SFT).",
        script=ScriptArguments,
        options=SFTArguments,
        config="trl.trainer.sft_config:SFTConfig",
        trainer="trl.trainer.sft_trainer:SFTTrainer",
        columns=(),
    ),
    "dpo": Method(
        summary="Train on pairs of completions of which one is preferred (DPO).",
        script=ScriptArguments,
        options=DPOArguments,
        config="trl.trainer.dpo_config:DPOConfig",
        trainer="trl.trainer.dpo_trainer:DPOTrainer",
        columns=("chosen", "rejected"),
    ),
    "kto": Method(
        summary="Train on completions that are each good or bad (KTO).",
        script=ScriptArguments,
        options=KTOArguments,
        config="trl.trainer.kto_config:KTOConfig",
        trainer="trl.trainer.kto_trainer:KTOTrainer",
        columns=(),
    ),
    "grpo": Method(
        summary="Train by reinforcement with groups of completions (GRPO).",
        script=RewardScriptArguments,
        options=GRPOArguments,
        config="trl.trainer.grpo_config:GRPOConfig",
        trainer="trl.trainer.grpo_trainer:GRPOTrainer",
        columns=("prompt",),
    ),
    "rloo": Method(
        summary="Train by reinforcement, each completion against its siblings (RLOO).",
        script=RewardScriptArguments,
        options=RLOOArguments,
        config="trl.trainer.rloo_config:RLOOConfig",
        trainer="trl.trainer.rloo_trainer:RLOOTrainer",
        columns=("prompt",),
    ),
    "online-dpo": Method(
        summary="Train on the better and the worse of two completions (Online DPO).",
        script=RewardScriptArguments,
        options=OnlineDPOArguments,
        config="trl.trainer.online_dpo_config:OnlineDPOConfig",
        trainer="trl.trainer.online_dpo_trainer:OnlineDPOTrainer",
        columns=("prompt",),
    ),
    "distillation": Method(
        summary="Train a student on its own completions to predict as a teacher does.",
        script=ScriptArguments,
        options=DistillationArguments,
        config="trl.trainer.distillation_config:DistillationConfig",
        trainer="trl.trainer.distillation_trainer:DistillationTrainer",
        columns=("prompt",),
    ),
    "server-distillation": Method(
        summary="Distil from a teacher behind `vllm serve`.",
        script=ScriptArguments,
        options=ServerDistillationArguments,
        config="trl.trainer.distillation_config:ServerDistillationConfig",
        trainer="trl.trainer.server_distillation_trainer:ServerDistillationTrainer",
        columns=("prompt",),
    ),
}


_CONVENTIONS = (
    " An option's name may be written with - or _. A switch is set by --x and unset by --no_x or --x false; a list "
    "takes several values, a mapping JSON; `none` unsets what is not plain text. The YAML file has the same names."
)


@dataclass(frozen=True)
class Request:
    """A command line, understood. `settings` are the given options of the trainer's config."""

    name: str
    method: Method
    script: Any
    model: ModelConfig
    mixture: DatasetMixtureConfig
    settings: dict[str, Any]


@cache
def build_parser(name: str) -> OptionParser:
    """The parser of the training command `name`. Neither torch nor transformers is loaded."""
    method = METHODS[name]
    own = dataclass_options(method.options)
    taken = {option.name for option in own}
    inherited = tuple(option for option in training_options() if option.name not in taken)
    groups = (
        OptionGroup("data and rewards", dataclass_options(method.script)),
        OptionGroup("model", dataclass_options(ModelConfig)),
        OptionGroup("mixture of datasets", dataclass_options(DatasetMixtureConfig)),
        OptionGroup(name, own),
        OptionGroup("training (transformers.TrainingArguments)", inherited),
    )
    return OptionParser(groups, prog=f"trl {name}", usage=f"trl {name} [--config FILE] [--OPTION VALUE ...]",
                        description=method.summary + _CONVENTIONS)  # fmt: skip


def parse(name: str, argv: Sequence[str]) -> Request:
    """The command line `argv` of the training command `name`, without loading torch.

    Raises:
        ConfigError: an unknown option or a value of the wrong kind.
    """
    parser = build_parser(name)
    parsed = parser.parse_values(argv)
    refuse_launcher_options(parsed.unknown, name)
    if parsed.unknown:
        parser.refuse(parsed.unknown[0])
    _make_importable(parsed.config_file)
    script, model, mixture, own, inherited = parsed.values
    method = METHODS[name]
    return Request(
        name, method, method.script(**script), ModelConfig(**model), DatasetMixtureConfig(**mixture), own | inherited
    )


def _make_importable(config_file: Path | None) -> None:
    """Let dotted paths of rewards and datasets name modules beside the YAML file and in the working directory."""
    folders = ([config_file.resolve().parent] if config_file else []) + [Path.cwd()]
    for folder in map(str, folders):  # the working directory comes last, and so to the front
        if folder not in sys.path:
            sys.path.insert(0, folder)


def build_trainer(method: str, argv: Sequence[str]) -> "Trainer":
    """The trainer that `trl METHOD ARGV` runs, with the progress line instead of a progress bar.

    Everything that can be checked without a model is checked before one is loaded.

    Args:
        method: a key of `METHODS`, e.g. `grpo`.
        argv: options as on the command line, e.g. `["--config", "run.yaml", "--max_steps", "3"]`.

    Raises:
        ConfigError: an option, or a combination of options, that cannot work.
        DataError: a dataset that is missing or has not the columns the method needs.
    """
    return _build(parse(method, argv))


def _build(request: Request) -> "Trainer":
    if request.model.model_name_or_path is None:
        raise ConfigError("no model: set `model_name_or_path` to a hub id or a local folder.")
    rewards = load_rewards(request)
    data = load_data(request)
    config = build_config(request)
    return _make_trainer(request, config, rewards | data)


def load_rewards(request: Request) -> dict[str, Any]:
    """The reward functions and models as arguments of a trainer; nothing for a method without rewards."""
    from trl.rewards.loading import load_reward_function

    script = request.script
    if not isinstance(script, RewardScriptArguments):
        return {}
    rewards: list[Any] = [load_reward_function(spec) for spec in script.reward_funcs or ()]
    if script.reward_model_name_or_path is not None:
        rewards.append(script.reward_model_name_or_path)
    if not rewards and not request.settings.get("reward_model_path"):
        raise ConfigError("no reward: set `reward_funcs`, e.g. to `module.function`, or `reward_model_name_or_path`.")
    return {"reward_funcs": rewards or None}


def load_data(request: Request) -> dict[str, Any]:
    """The datasets as arguments of a trainer, their columns checked."""
    from trl.cli.datasets import check_columns, load_training_data

    evaluate = request.settings.get("eval_strategy", "no") != "no"
    train, test = load_training_data(request.script, request.mixture, evaluate)
    check_columns(train, request.method.columns, f"the training dataset of `trl {request.name}`")
    if test is not None:
        check_columns(test, request.method.columns, f"the evaluation dataset of `trl {request.name}`")
    return {"train_dataset": train, "eval_dataset": test}


def build_config(request: Request) -> Any:
    """The method's config. Its own checks run here, before a model is loaded."""
    from trl.cli.model import get_model_init_kwargs

    explicit = request.settings.get("model_init_kwargs") or {}
    if not isinstance(explicit, dict):
        raise ConfigError(f"`model_init_kwargs` must be a mapping, JSON on the command line (got `{explicit}`).")
    settings = {"disable_tqdm": True} | request.settings
    settings["model_init_kwargs"] = get_model_init_kwargs(request.model, explicit)
    try:
        return _import(request.method.config)(**settings)
    except TRLError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _make_trainer(request: Request, config: Any, arguments: dict[str, Any]) -> "Trainer":
    from transformers import PrinterCallback, ProgressCallback

    from trl.cli.model import get_peft_config, get_quantization_config
    from trl.cli.progress import ProgressLine

    trainer = _import(request.method.trainer)(
        model=request.model.model_name_or_path,
        args=config,
        peft_config=get_peft_config(request.model),
        quantization_config=get_quantization_config(request.model),
        **arguments,
    )
    trainer.remove_callback(ProgressCallback)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(ProgressLine())
    if request.script.ignore_bias_buffers:
        model = trainer.model
        model._ddp_params_and_buffers_to_ignore = [
            name for name, buffer in model.named_buffers() if not buffer.is_floating_point()
        ]
    return trainer


def _import(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def run(name: str, argv: Sequence[str]) -> int:
    """Train, save, push if asked, print a summary; 0 when all of it was done, 1 when training stopped on an error.

    Raises:
        TRLError: something was found to be wrong before training.
    """
    if {"-h", "--help"} & set(argv):
        build_parser(name).print_help()
        return 0
    request = parse(name, argv)
    calm_openmp()  # after the YAML file's `env`, which may say how threads wait, and before torch
    if not sys.stderr.isatty():  # bars would fill a log file; the setting is read at import
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    trainer = _build(request)
    try:
        _train_and_save(trainer, request.script.dataset_name)
    except TRLError as error:
        report_error(error)
        return 1
    return 0


def _train_and_save(trainer: Any, dataset_name: str | None) -> None:
    from trl.cli.summary import print_summary

    trainer.train(resume_from_checkpoint=_checkpoint(trainer.args.resume_from_checkpoint))
    trainer.save_model(trainer.args.output_dir)
    print_summary(trainer)
    if trainer.args.push_to_hub:
        trainer.push_to_hub(dataset_name=dataset_name)


def _checkpoint(setting: str | None) -> str | bool | None:
    """`true` asks for the last checkpoint, `false` for none; anything else is a path."""
    words = {"true": True, "false": None, "no": None, "none": None, "": None}
    return words.get(setting.lower(), setting) if setting else None
