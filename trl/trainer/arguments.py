"""Option groups: each option is declared and documented once, here.

Nothing heavy is imported, so the command line can list every option without loading torch. A trainer's config is its
option class and `transformers.TrainingArguments`.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

LossType = Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]
SamplerCorrectionMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


def option(default: Any, text: str) -> Any:
    """A dataclass field with its help text."""
    return field(default=default, metadata={"help": text})


@dataclass
class BaseArguments:
    """Defaults that differ from `transformers.TrainingArguments`."""

    logging_steps: float = option(
        10, "Log every this many optimizer steps; a fraction below 1 is a share of all steps."
    )
    gradient_checkpointing: bool | None = option(
        True, "Recompute activations in the backward pass: less memory, about a third more compute."
    )
    bf16: bool | None = option(
        None, "bfloat16 mixed precision. Not set: used where the accelerator has it, and never beside `fp16`."
    )
    lr_scheduler_kwargs: dict | str | None = option(
        None, "Arguments of the learning-rate schedule (JSON on the command line)."
    )


@dataclass
class ModelArguments:
    """How the policy is loaded."""

    model_init_kwargs: dict | str | None = option(
        None, "Arguments of `from_pretrained` when the model is given by name, e.g. `dtype` or `attn_implementation`."
    )
    trust_remote_code: bool = option(False, "Run code that a model, tokenizer or reward model brings along.")
    disable_dropout: bool = option(False, "Set every dropout of the policy and the reference model to zero.")
    cast_lm_head_to_fp32: bool = option(False, "Compute the LM head's product in float32.")


@dataclass
class MixtureArguments:
    """Mixtures of experts."""

    router_aux_loss_coef: float | None = option(
        None, "Weight of a mixture-of-experts model's balance loss. Not set: the model config's; 0: off."
    )


@dataclass
class CompletionLengthArguments:
    """How long completions may be."""

    max_completion_length: int | None = option(512, "Most tokens of one completion.")


@dataclass
class SamplingArguments:
    """How completions are sampled."""

    temperature: float = option(1.0, "Sampling temperature. It also divides the logits in training.")
    top_p: float = option(1.0, "Nucleus sampling: keep the fewest tokens that hold this much probability.")
    top_k: int = option(0, "Keep the k most likely tokens; 0 keeps all.")
    min_p: float | None = option(None, "Keep tokens at least this likely relative to the most likely one.")
    repetition_penalty: float = option(1.0, "Penalty on tokens that occur in the prompt or completion; 1 is off.")
    generation_kwargs: dict | str | None = option(None, "Further sampling settings; they override the options above.")
    chat_template_kwargs: dict | str | None = option(None, "Variables for the chat template, e.g. `enable_thinking`.")
    cache_implementation: str | None = option(None, "Key-value cache of transformers generation, by its name.")
    ds3_gather_for_generation: bool = option(True, "DeepSpeed ZeRO-3: gather the weights once for generation.")
    use_transformers_continuous_batching: bool = option(False, "Generate with transformers' continuous batching.")
    transformers_continuous_batching_config: dict | str | None = option(None, "Its configuration.")
    use_transformers_paged: bool = option(False, "Deprecated name of `use_transformers_continuous_batching`.")


@dataclass
class VLLMArguments:
    """Generation with vLLM."""

    use_vllm: bool = option(False, "Generate with vLLM.")
    vllm_mode: Literal["colocate", "server"] = option(
        "colocate", "`colocate`: vLLM inside the trainer's process; `server`: a `vllm serve` elsewhere."
    )
    vllm_model_impl: str = option("vllm", "Colocate: model implementation vLLM uses, `vllm`, `transformers` or `auto`.")
    vllm_enable_sleep_mode: bool = option(False, "Colocate: free the engine's GPU memory while optimising.")
    vllm_structured_outputs_regex: str | None = option(None, "Completions must match this regular expression.")
    vllm_server_base_url: str | list[str] | None = option(
        None, "Server: its URL, or a list of URLs to spread requests over; overrides host and port."
    )
    vllm_server_api_key: str | None = option(None, "Server: its key. Not set: `VLLM_API_KEY` of the environment.")
    vllm_request_timeout: float = option(600.0, "Server: most seconds for one request.")
    vllm_weight_sync_timeout: float = option(300.0, "Server: most seconds for each phase of a weight update.")
    vllm_allow_unsupported_version: bool = option(
        False, "Server: only warn about a vLLM version that is not supported."
    )
    vllm_parity_check_steps: int = option(
        50, "Compare the engine's log-probs with the trainer's every this many optimizer steps; 0 never does."
    )
    vllm_server_host: str = option("0.0.0.0", "Server: its host.")
    vllm_server_port: int = option(8000, "Server: its port.")
    vllm_server_timeout: float = option(240.0, "Server: seconds to wait for it.")
    vllm_group_port: int = option(51216, "Server: port the trainer opens for the weight-transfer rendezvous.")
    vllm_gpu_memory_utilization: float = option(0.3, "Colocate: share of the GPU's memory for vLLM.")
    vllm_max_model_length: int | None = option(None, "Colocate: longest prompt plus completion, in tokens.")
    vllm_tensor_parallel_size: int = option(1, "Colocate: GPUs that share one engine; must divide the world size.")


@dataclass
class PromptArguments:
    """How prompts are read, and completions laid out for the model."""

    shuffle_dataset: bool | None = option(True, "Shuffle the prompts.")
    remove_unused_columns: bool | None = option(False, "Drop dataset columns other than the prompt; rewards lose them.")
    pad_to_multiple_of: int | str | None = option("auto", "Pad to a multiple of this where padding is needed.")
    max_tokens_per_micro_batch: int | None = option(
        None, "Most tokens of one forward pass; longer batches are split. Not set: a whole micro-step in one."
    )


@dataclass
class GroupArguments:
    """Groups, and how completions are cut into optimizer steps."""

    num_generations: int | None = option(8, "Completions per prompt: the group size.")
    num_generations_eval: int | None = option(None, "Group size in evaluation. Not set: `num_generations`.")
    generation_batch_size: int | None = option(None, "Completions of one generation round, over all processes.")
    steps_per_generation: int | None = option(None, "Micro-steps fed by one generation round.")
    num_iterations: int = option(1, "Optimisation passes over each generated batch.")
    mask_truncated_completions: bool = option(False, "Leave completions that did not end out of the loss.")


@dataclass
class ReferenceArguments:
    """The reference model."""

    beta: float = option(0.0, "Weight of the KL divergence from the reference model; 0 loads no reference model.")
    sync_ref_model: bool = option(False, "Pull the reference model towards the policy now and then.")
    ref_model_mixup_alpha: float = option(0.6, "Share of the policy in that pull.")
    ref_model_sync_steps: int = option(512, "Optimizer steps between two pulls.")


@dataclass
class RewardArguments:
    """How rewards are added up."""

    reward_weights: list[float] | None = option(None, "One weight per reward function. Not set: all 1.")


@dataclass
class AdvantageArguments(RewardArguments):
    """How rewards become advantages."""

    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = option(
        "sum_then_normalize", "Sum the rewards and normalise, or normalise each reward in its group and sum."
    )
    scale_rewards: Literal["group", "batch", "none"] | bool = option(
        "group", "Divide advantages by the standard deviation of the group, of the batch, or not at all."
    )


@dataclass
class ClipArguments:
    """How far the policy may move from the one that sampled."""

    epsilon: float = option(0.2, "Lower clip of the policy ratio, and the upper one unless `epsilon_high` is set.")
    epsilon_high: float | None = option(None, "Upper clip of the policy ratio.")


@dataclass
class PolicyLossArguments(ClipArguments):
    """The policy-gradient loss."""

    loss_type: LossType = option("dapo", "Which surrogate and which reduction.")
    epsilon_high: float | None = option(
        None, "Upper clip of the policy ratio; for `cispo` the cap of the ratio itself."
    )
    importance_sampling_level: Literal["token", "sequence"] = option(
        "token", "Policy ratio per token, or one per sequence (GSPO)."
    )
    delta: float | None = option(None, "Upper bound of the unclipped ratio (two-sided clip).")
    sapo_temperature_neg: float = option(1.05, "SAPO: slope for negative advantages.")
    sapo_temperature_pos: float = option(1.0, "SAPO: slope for positive advantages.")
    vespo_k_pos: float = option(2.0, "VESPO: gamma shape for advantages of zero and above.")
    vespo_lambda_pos: float = option(3.0, "VESPO: gamma rate for advantages of zero and above.")
    vespo_k_neg: float = option(3.0, "VESPO: gamma shape for negative advantages.")
    vespo_lambda_neg: float = option(2.0, "VESPO: gamma rate for negative advantages.")
    use_bias_correction_kl: bool = option(True, "Multiply the KL estimate by the policy ratio.")
    off_policy_mask_threshold: float | None = option(
        None, "Drop sequences of negative advantage whose divergence from the sampler exceeds this."
    )
    top_entropy_quantile: float = option(1.0, "Train only on this share of tokens, the ones of highest entropy.")
    entropy_coef: float = option(0.0, "Weight of the entropy bonus.")
    use_adaptive_entropy: bool = option(False, "Steer `entropy_coef` towards `entropy_target`.")
    entropy_coef_min: float = option(0.0, "Lower bound of the steered weight.")
    entropy_coef_max: float = option(1.0, "Upper bound of the steered weight.")
    entropy_coef_delta: float = option(0.005, "Change of the steered weight per optimizer step.")
    entropy_target: float = option(0.2, "Entropy that the controller aims at, in nats per token.")


@dataclass
class SamplerCorrectionArguments:
    """Correction of the gap between vLLM's and the trainer's log-probs."""

    vllm_importance_sampling_correction: bool = option(True, "Weight the loss by trainer over sampler probability.")
    vllm_importance_sampling_mode: SamplerCorrectionMode = option(
        "sequence_mask", "Ratio per token or per sequence; outside the bounds it is truncated or the term dropped."
    )
    vllm_importance_sampling_clip_max: float | None = option(3.0, "Upper bound of the ratio.")
    vllm_importance_sampling_clip_min: float | None = option(None, "Lower bound of the ratio.")
    vllm_importance_sampling_cap: float | None = option(None, "Deprecated name of `vllm_importance_sampling_clip_max`.")


@dataclass
class CompletionLogArguments:
    """Tables of completions."""

    log_completions: bool = option(False, "Print samples and store all completions as parquet files.")
    log_multimodal: bool = option(True, "Include images in the tables sent to trackers.")
    num_completions_to_print: int | None = option(None, "Rows printed each time. Not set: all.")
    log_unique_prompts: bool = option(False, "Send only the first completion of each prompt to trackers.")
    log_completions_hub_repo: str | None = option(None, "Dataset repository that receives the parquet files.")


@dataclass
class OnlineArguments(
    CompletionLogArguments, VLLMArguments, SamplingArguments, PromptArguments, ModelArguments, BaseArguments
):
    """What the methods share whose model writes its own training data."""


@dataclass
class PolicyGradientArguments(
    SamplerCorrectionArguments,
    ClipArguments,
    RewardArguments,
    ReferenceArguments,
    GroupArguments,
    CompletionLengthArguments,
    MixtureArguments,
    OnlineArguments,
):
    """What the methods share that reinforce completions by advantages."""


@dataclass
class GRPOArguments(PolicyLossArguments, AdvantageArguments, PolicyGradientArguments):
    """Every option of GRPO that `transformers.TrainingArguments` does not have, or has another default for."""

    learning_rate: float = option(1e-6, "Initial learning rate of AdamW.")
    max_tool_calling_iterations: int | None = option(None, "Most tool turns of one completion. Not set: no limit.")


@dataclass
class RLOOArguments(PolicyGradientArguments):
    """Every option of RLOO that `transformers.TrainingArguments` does not have, or has another default for."""

    learning_rate: float = option(1e-6, "Initial learning rate of AdamW.")
    num_generations: int | None = option(2, "Completions per prompt: the group size.")
    vllm_importance_sampling_mode: SamplerCorrectionMode = option(
        "sequence_mask", "What becomes of ratios outside the bounds: `sequence_truncate` or `sequence_mask`."
    )
    beta: float = option(0.05, "Weight of the KL divergence that is taken off the reward; 0 loads no reference model.")
    normalize_advantages: bool = option(
        False, "Divide advantages by their standard deviation over the generation round."
    )
    reward_clip_range: tuple[float, float] | None = option(None, "Lowest and highest reward; others are clamped.")


@dataclass
class OnlineDPOArguments(RewardArguments, OnlineArguments):
    """Every option of Online DPO that `transformers.TrainingArguments` does not have, or has another default for."""

    learning_rate: float = option(5e-7, "Initial learning rate of AdamW.")
    temperature: float = option(0.9, "Sampling temperature. The loss looks at the policy itself, at temperature 1.")
    disable_dropout: bool = option(True, "Set every dropout of the policy and the reference model to zero.")
    vllm_gpu_memory_utilization: float = option(0.55, "Colocate: share of the GPU's memory for vLLM.")
    beta: float | list[float] = option(
        0.1, "How strongly the policy is held to the reference; a list has one value per epoch, the last one stays."
    )
    loss_type: Literal["sigmoid", "ipo"] = option("sigmoid", "Loss of a pair: that of DPO, or of IPO.")
    max_new_tokens: int = option(64, "Most tokens of one completion.")
    max_length: int = option(512, "Most tokens of prompt and completion: longer prompts lose their beginning.")
    missing_eos_penalty: float | None = option(None, "Taken off the score of a completion that did not end.")
    reward_model_path: str | None = option(None, "Reward model, a hub id or a local folder, beside `reward_funcs`.")


@dataclass
class DistillationArguments(CompletionLengthArguments, OnlineArguments):
    """Every option of distillation that `transformers.TrainingArguments` does not have, or has another default for."""

    learning_rate: float = option(1e-6, "Initial learning rate of AdamW.")
    beta: float = option(
        1.0, "Divergence: 0 is forward KL, 1 reverse KL, between them the generalised Jensen-Shannon divergence."
    )
    teacher_model_name_or_path: str | None = option(None, "Teacher: a hub id or a local folder.")
    teacher_model_revision: str | None = option(None, "Branch, tag or commit of the teacher's repository.")
    teacher_model_init_kwargs: dict | str | None = option(None, "Arguments of the teacher's `from_pretrained`.")
    max_tool_calling_iterations: int | None = option(None, "Most tool turns of one completion. Not set: no limit.")


@dataclass
class ServerDistillationArguments(DistillationArguments):
    """The options of distillation, with a teacher behind `vllm serve`."""

    teacher_model_server_url: str | None = option(None, "URL of the server that has the teacher.")
    vllm_server_port: int = option(8001, "Server: its port.")
    temperature: float = option(1.0, "Sampling temperature. The loss compares both models at temperature 1.")
    loss_top_k: int = option(1, "Forward KL: how many of the teacher's likeliest tokens are compared.")
    loss_add_tail: bool = option(True, "Compare the probability of all other tokens too, as one.")
    reverse_kl_top_1_mode: Literal["sampled"] = option(
        "sampled", "Which token reverse KL compares: the one that was sampled."
    )


@dataclass
class TokenArguments:
    """How rows become tokens, and tokens micro-batches."""

    max_length: int | None = option(1024, "Most tokens of a sequence. Not set: all.")
    truncation_mode: Literal["keep_start", "keep_end"] = option(
        "keep_start", "Which end of a longer sequence is kept; `keep_end` is deprecated."
    )
    dataset_num_proc: int | None = option(None, "Processes that make tokens of the dataset.")
    pad_to_multiple_of: int | str | None = option("auto", "Pad to a multiple of this where padding is needed.")
    pad_token: str | None = option(None, "Deprecated: set it on the tokenizer.")
    max_tokens_per_micro_batch: int | None = option(
        None, "Most tokens of one forward pass; longer batches are split. Not set: a whole micro-step in one."
    )


@dataclass
class OfflineArguments(TokenArguments, ModelArguments, BaseArguments):
    """What the methods share that train on fixed data."""

    activation_offloading: bool = option(False, "Move activations to the CPU until the backward pass needs them.")


@dataclass
class SFTArguments(MixtureArguments, OfflineArguments):
    """Every option of SFT that `transformers.TrainingArguments` does not have, or has another default for."""

    learning_rate: float = option(2e-5, "Initial learning rate of AdamW.")
    chat_template_path: str | None = option(
        None, "A tokenizer whose chat template is taken over, or a `.jinja` file that holds one."
    )
    chat_template_kwargs: dict | str | None = option(None, "Variables for the chat template, e.g. `enable_thinking`.")
    dataset_text_field: str = option("text", "Column of plain text.")
    dataset_kwargs: dict | str | None = option(None, "`skip_prepare_dataset`: the rows have `input_ids` already.")
    eos_token: str | None = option(None, "End-of-sequence token, in place of the tokenizer's.")
    shuffle_dataset: bool = option(False, "Shuffle the rows once, before they are packed.")
    packing: bool = option(False, "Fill rows of `max_length` with several examples.")
    packing_strategy: Literal["bfd", "bfd_split", "wrapped"] = option(
        "bfd", "Best fit, best fit with longer examples cut into pieces, or all joined and cut."
    )
    padding_free: bool = option(False, "Without effect: no model that can do without is given padding.")
    eval_packing: bool | None = option(None, "The same in evaluation. Not set: as `packing`.")
    completion_only_loss: bool | None = option(
        None, "Learn completions and not prompts. Not set: where the rows have prompts."
    )
    assistant_only_loss: bool = option(False, "Learn what the assistant says and nothing else.")
    loss_type: Literal["nll", "dft", "chunked_nll"] = option(
        "nll", "Negative log-likelihood, or the same weighted by the token's probability; `chunked_nll` is `nll`."
    )


@dataclass
class PrecomputeArguments:
    """When the reference model scores the data."""

    precompute_ref_log_probs: bool = option(False, "Score the whole dataset by the reference model before training.")
    precompute_ref_batch_size: int | None = option(None, "Rows at a time in that. Not set: those of a micro-step.")


PairLossType = Literal[
    "sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot",
    "aot_unpaired", "apo_zero", "apo_down", "discopop", "sft",
]  # fmt: skip


@dataclass
class DPOArguments(PrecomputeArguments, ReferenceArguments, MixtureArguments, OfflineArguments):
    """Every option of DPO that `transformers.TrainingArguments` does not have, or has another default for."""

    learning_rate: float = option(1e-6, "Initial learning rate of AdamW.")
    disable_dropout: bool = option(True, "Set every dropout of the policy and the reference model to zero.")
    chat_template_kwargs: dict | str | None = option(None, "Variables for the chat template, e.g. `enable_thinking`.")
    beta: float = option(0.1, "How strongly the policy is held to the reference.")
    padding_free: bool = option(False, "Without effect: no model that can do without is given padding.")
    loss_type: list[PairLossType] = field(
        default_factory=lambda: ["sigmoid"], metadata={"help": "One loss, or several that are added up."}
    )
    loss_weights: list[float] | None = option(None, "One weight per loss. Not set: all 1.")
    ld_alpha: float | None = option(None, "LD-DPO: weight of what the longer completion has beyond the shorter one.")
    f_divergence_type: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] = option(
        "reverse_kl", "Which divergence from the reference the loss stands for."
    )
    f_alpha_divergence_coef: float = option(0.5, "The alpha of `alpha_divergence`.")
    label_smoothing: float = option(0.0, "Probability that a label is wrong: `robust`, `exo_pair`, `aot`.")
    use_weighting: bool = option(False, "WPO: weigh pairs by how likely the policy would write them.")
    discopop_tau: float = option(0.05, "DiscoPOP: temperature of its gate.")


@dataclass
class KTOArguments(PrecomputeArguments, ReferenceArguments, MixtureArguments, OfflineArguments):
    """Every option of KTO that `transformers.TrainingArguments` does not have, or has another default for."""

    learning_rate: float = option(1e-6, "Initial learning rate of AdamW.")
    train_sampling_strategy: str = option("sequential", "Order of the rows: `sequential` or `random`.")
    disable_dropout: bool = option(True, "Set every dropout of the policy and the reference model to zero.")
    chat_template_kwargs: dict | str | None = option(None, "Variables for the chat template, e.g. `enable_thinking`.")
    beta: float = option(0.1, "How strongly the policy is held to the reference.")
    loss_type: Literal["kto", "apo_zero_unpaired"] = option("kto", "The loss of KTO, or that of APO without pairs.")
    desirable_weight: float = option(1.0, "Weight of desirable completions.")
    undesirable_weight: float = option(1.0, "Weight of undesirable completions.")
