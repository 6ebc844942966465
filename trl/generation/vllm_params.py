"""From a `Sampling` to vLLM's parameters: those of a request to a server, which an engine in this process takes too."""

from typing import Any

from trl.errors import ConfigError, GenerationError
from trl.types import Sampling

# Names GenerationConfig and vLLM give the same setting.
_RENAMED = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "stop_strings": "stop"}
# Further fields that a request may have. A server ignores those that it does not know, without a word.
_KNOWN = frozenset(
    {
        "allowed_token_ids",
        "bad_words",
        "frequency_penalty",
        "ignore_eos",
        "include_stop_str_in_output",
        "logit_bias",
        "max_tokens",
        "min_p",
        "min_tokens",
        "presence_penalty",
        "priority",
        "repetition_penalty",
        "seed",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stop",
        "stop_token_ids",
        "structured_outputs",
        "temperature",
        "top_k",
        "top_p",
        "truncate_prompt_tokens",
        "vllm_xargs",
    }
)


def request_params(sampling: Sampling, structured_outputs: dict[str, Any] | None = None) -> dict[str, Any]:
    """Every sampling field of a request: what is left out, a server fills from the model's generation config.

    Args:
        structured_outputs: vLLM's constraint on the completions, e.g. `{"regex": …}`.

    Raises:
        ConfigError: settings that a request cannot carry.
    """
    params: dict[str, Any] = {
        "n": sampling.n,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p or 0.0,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }
    if sampling.with_logps:
        params["logprobs"] = 0
    for given, value in sampling.extra.items():
        name = _RENAMED.get(given, given)
        if name == "do_sample":
            params.update({} if value else {"temperature": 0.0})
        elif name in _KNOWN:
            params[name] = value
        else:
            raise ConfigError(
                f"`generation_kwargs` has `{given}`, which a request to vLLM cannot carry or the trainer sets itself: "
                f"leave it out, or use one of {', '.join(sorted(_KNOWN))}."
            )
    if structured_outputs is not None:
        params["structured_outputs"] = structured_outputs
    return params


def within_context(
    params: dict[str, Any], prompt_ids: list[int], index: int, max_model_len: int, remedy: str
) -> dict[str, Any]:
    """The parameters with no more tokens asked for than the context leaves beside this prompt.

    Args:
        index: of the prompt, for the message.
        remedy: how to have a longer context.

    Raises:
        GenerationError: the prompt leaves no room at all.
    """
    room = max_model_len - len(prompt_ids)
    if room < 1:
        raise GenerationError(
            f"Prompt {index} has {len(prompt_ids)} tokens, and vLLM's context is {max_model_len}: {remedy}, or drop "
            "the row."
        )
    limits: dict[str, Any] = {name: min(params[name], room) for name in ("max_tokens", "min_tokens") if name in params}
    return {**params, **limits}
