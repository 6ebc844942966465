"""Configurations of `DistillationTrainer` and `ServerDistillationTrainer`."""

from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from trl.errors import ConfigError
from trl.generation.build import urls_of_servers
from trl.generation.vllm_teacher import check_teacher_url
from trl.models.load import weight_bytes
from trl.trainer.arguments import DistillationArguments, ServerDistillationArguments
from trl.trainer.group_batches import GroupPlan, plan_of_prompts
from trl.trainer.online_config import OnlineConfig


@dataclass
class DistillationConfig(DistillationArguments, OnlineConfig):  # type: ignore[misc]  # see `TrainerConfig`
    """Options of `DistillationTrainer`: those of `trl.trainer.arguments.DistillationArguments` and of
    `transformers.TrainingArguments`. Batch sizes count prompts; each gets one completion.

    Raises:
        ConfigError: settings that cannot work together.
        NotSupportedError: an option whose capability this version does not have.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.beta <= 1.0:
            raise ConfigError(f"`beta` is between 0 (forward KL) and 1 (reverse KL) (got {self.beta}).")

    @property
    def group_plan(self) -> GroupPlan:
        """One completion of each prompt."""
        return plan_of_prompts(self, group_size=1)

    @property
    def teacher_loading(self) -> dict[str, Any]:
        """Arguments of the teacher's `from_pretrained`: unless they say so, it is in the dtype of mixed precision."""
        assert not isinstance(self.teacher_model_init_kwargs, str)  # the parent made a dict of it
        given = self.teacher_model_init_kwargs or {}
        dtype = "bfloat16" if self.bf16 else "float16" if self.fp16 else "float32"
        default = {} if "torch_dtype" in given else {"dtype": dtype}
        revision = {} if self.teacher_model_revision is None else {"revision": self.teacher_model_revision}
        return {**default, **revision, **given}

    def frozen_bytes(self, policy_bytes: int) -> int:
        """The teacher's weights, where it is given by name."""
        if self.teacher_model_name_or_path is None:
            return 0
        return weight_bytes(self.teacher_model_name_or_path, self.teacher_loading, self.trust_remote_code)


@dataclass
class ServerDistillationConfig(ServerDistillationArguments, DistillationConfig):  # type: ignore[misc]
    """Options of `ServerDistillationTrainer`: those of `trl.trainer.arguments.ServerDistillationArguments` and of
    `transformers.TrainingArguments`. Batch sizes count prompts; each gets one completion.

    Raises:
        ConfigError: settings that cannot work together.
        NotSupportedError: an option whose capability this version does not have.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.teacher_model_server_url is None:
            raise ConfigError("`teacher_model_server_url` is missing: set it to the URL of the teacher's `vllm serve`.")
        check_teacher_url(self.teacher_model_server_url)
        if _address(self.teacher_model_server_url) in map(_address, urls_of_servers(self)):
            raise ConfigError(
                f"`teacher_model_server_url` is the server of the student (got {self.teacher_model_server_url}), whose "
                "weights are replaced after each step: start another one for the teacher."
            )
        for name in ("teacher_model_name_or_path", "teacher_model_revision", "teacher_model_init_kwargs"):
            if (value := getattr(self, name)) is not None:
                raise ConfigError(f"`{name}={value!r}` is for a teacher in this process: leave it out.")
        if self.loss_top_k < 1:
            raise ConfigError(f"`loss_top_k` must be at least 1 (got {self.loss_top_k}).")
        if self.beta > 0.0 and self.loss_top_k != 1:
            raise ConfigError(
                f"With `beta` above 0 the loss looks at the sampled token, and at the teacher's likeliest: set "
                f"`loss_top_k` to 1 (got {self.loss_top_k}), or `beta` to 0 (got {self.beta})."
            )
        if self.reverse_kl_top_1_mode != "sampled":
            raise ConfigError(
                f"`reverse_kl_top_1_mode` can only be 'sampled' (got {self.reverse_kl_top_1_mode!r}): at the student's "
                "likeliest token a server cannot tell the teacher's probability."
            )


def _address(url: str) -> tuple[str, int | None]:
    """Host and port; the names of this machine count as one."""
    parts = urlsplit(url)
    local = parts.hostname in ("0.0.0.0", "127.0.0.1", "localhost", "::1")
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    return "localhost" if local else str(parts.hostname), port
