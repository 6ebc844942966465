"""What one GPU holds while a model generates, is scored and is trained, with vLLM in the same process.

Arithmetic on sizes; nothing is allocated. Meant for plain and data-parallel training of decoders with a gated MLP and
attention that keeps no score matrix. Weights, gradients, optimizer states and vLLM's share are close. Activations are
estimates: within 20 % of the measured peak of small Llamas, further off for other families. Not counted: fragmentation,
weights split over processes, and the cache of generation without vLLM.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, floor
from typing import Any, Literal

import torch
from transformers import PreTrainedModel
from transformers.training_args import OptimizerNames

from trl.errors import ConfigError, DeviceMemoryError
from trl.functional.logps import GPU_CHUNK_ELEMENTS
from trl.models.checkpointing import is_selective
from trl.models.offload import STASH

Phase = Literal["generate", "score", "train"]
PHASES: tuple[Phase, ...] = ("generate", "score", "train")
ENGINE_PARTS = ("engine weights", "engine activations", "engine cache")
GIB = 2**30
DOUBT = 0.3
"""By how much activations may be overestimated."""
CUDA_CONTEXT = GIB
"""Kernels, their workspaces and captured graphs: outside of torch's and of vLLM's accounts."""
CACHE_BLOCK = 16
"""Tokens of one block of vLLM's cache."""

# Bytes of optimizer states: as multiples of the trainable weights, and for each trainable parameter beside. What is not
# listed counts as AdamW. Paged states leave the GPU when room is short.
_OPTIMIZERS = {
    **dict.fromkeys(("sgd", "adafactor", "paged_adamw_32bit", "paged_adamw_8bit", "paged_lion_8bit"), (0, 0)),
    **dict.fromkeys(("adagrad", "rmsprop"), (1, 0)),
    **dict.fromkeys(("lion_8bit", "adamw_torch_4bit"), (0, 1)),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "adamw_torch_8bit"), (0, 2)),
    **dict.fromkeys(("lion_32bit", "rmsprop_bnb"), (0, 4)),
}


@dataclass(frozen=True)
class ModelSize:
    """Sizes of a model: `weight_bytes` as loaded, `compute_bytes` of one element of matrix products and vLLM's weights.

    `intermediate_size` is the MLP's width that one token passes: of all its experts.
    """

    parameters: int
    weight_bytes: int
    layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    compute_bytes: int

    @classmethod
    def of(cls, model: PreTrainedModel, compute_dtype: torch.dtype) -> "ModelSize":
        """The sizes of this model, which may be on the meta device."""
        config, weights = model.config.get_text_config(), list(model.parameters())
        hidden, heads, entries = config.hidden_size, config.num_attention_heads, vars(config)
        width = entries.get("moe_intermediate_size") or entries.get("intermediate_size") or 4 * hidden
        return cls(
            parameters=sum(p.numel() for p in weights),
            weight_bytes=sum(p.numel() * p.element_size() for p in weights),
            layers=config.num_hidden_layers,
            hidden_size=hidden,
            intermediate_size=width * (entries.get("num_experts_per_tok") or 1),
            vocab_size=config.vocab_size,
            num_attention_heads=heads,
            num_key_value_heads=entries.get("num_key_value_heads") or heads,
            head_dim=entries.get("head_dim") or hidden // heads,
            compute_bytes=compute_dtype.itemsize,
        )

    @property
    def hidden_bytes(self) -> int:
        """Of one element of the residual stream: as the weights, where mixed precision computes in fewer bytes."""
        return max(self.compute_bytes, self.weight_bytes // self.parameters)

    @property
    def cache_bytes(self) -> int:
        """Of one token's keys and values in all layers."""
        return 2 * self.layers * self.num_key_value_heads * self.head_dim * self.compute_bytes


@dataclass(frozen=True)
class TrainingSize:
    """Sizes of training: most `tokens` of one forward pass, and of one sequence, which is never cut.

    `trainable_bytes` are as loaded; `frozen_bytes` are those of a reference model or teacher; `gradients_stay` while
    completions are drawn; `buckets` hold the gradients a second time, to send them to other processes. `selective`
    checkpointing keeps attention's results; `offloading` of activations is None where the method has no such option.
    """

    tokens: int
    sequence_tokens: int
    gradient_checkpointing: bool
    optimizer: str
    trainable_parameters: int
    trainable_bytes: int
    frozen_bytes: int = 0
    gradients_stay: bool = False
    buckets: bool = False
    selective: bool = False
    offloading: bool | None = None

    @classmethod
    def of(cls, args: Any, model: PreTrainedModel, *, prompt_tokens: int, frozen_bytes: int) -> "TrainingSize":
        """Of an online method's config and policy, prompts having up to `prompt_tokens`."""
        sequence = prompt_tokens + args.longest_completion
        rows = sequence * args.group_plan.micro_step_rows
        trainable = [p for p in model.parameters() if p.requires_grad]
        return cls(
            tokens=min(rows, max(sequence, args.max_tokens_per_micro_batch or rows)),
            sequence_tokens=sequence,
            gradient_checkpointing=bool(args.gradient_checkpointing),
            optimizer=OptimizerNames(args.optim).value,
            trainable_parameters=sum(p.numel() for p in trainable),
            trainable_bytes=sum(p.numel() * p.element_size() for p in trainable),
            frozen_bytes=frozen_bytes,
            gradients_stay=args.group_plan.window % args.gradient_accumulation_steps != 0,
            buckets=args.world_size > 1,
            selective=is_selective(vars(args).get("gradient_checkpointing_kwargs")),
            offloading=vars(args).get("activation_offloading"),
        )


@dataclass(frozen=True)
class EngineSize:
    """Sizes of vLLM: `utilization` is its share of the GPU, for weights, activations and cache.

    `sleep_level` 0 never sleeps. `batched_tokens` and `sequences` are the most of one engine step.
    """

    utilization: float
    max_model_length: int
    sleep_level: int = 0
    batched_tokens: int = 4096
    sequences: int = 256

    def least(self, model: ModelSize) -> dict[str, int]:
        """Bytes vLLM needs to start: its parts, the cache being that of one sequence."""
        sampled = 12 * self.sequences * model.vocab_size  # float32 logits, log-probs and a sorted copy
        sizes = (
            model.parameters * model.compute_bytes,
            forward_activations(model, self.batched_tokens, sampled) + sampled,
            ceil(self.max_model_length / CACHE_BLOCK) * CACHE_BLOCK * model.cache_bytes,
        )
        return dict(zip(ENGINE_PARTS, sizes, strict=True))


def layer_activations(model: ModelSize) -> int:
    """Bytes that autograd keeps of a token in one layer, from the forward to the backward pass.

    Counted on a Llama block of transformers. H, A, I are the widths of the residual stream, of all query heads and of
    the MLP; r, c bytes an element of the residual stream and of matrix products:

    * each of two norms: its input in float32, which is the residual, and its result before the scale: (4 + r) H;
    * the inputs of projections: c H a norm; five times in all in mixed precision, which casts for each projection;
    * q, k and v repeated for every query head, attention's output, and a logsumexp a head: 4 c A + 4 heads;
    * gate, its activation, up, and their product: 4 c I.
    """
    r, c, width = model.hidden_bytes, model.compute_bytes, model.hidden_size
    projections = (5 if r > c else 2) * c * width
    attention = model.num_attention_heads * (4 * c * model.head_dim + 4)
    return 2 * (4 + r) * width + projections + attention + 4 * c * model.intermediate_size


def train_activations(
    model: ModelSize, tokens: int, checkpointing: bool, tile: int, *, selective: bool = False, offloading: bool = False
) -> int:
    """Bytes of a training pass beside the LM head's tile: all layers', the last norm's and the head's input.

    With checkpointing each layer keeps its input, and all the rest one at a time, when the tile is gone. Selective
    checkpointing keeps attention's output and logsumexp in every layer, which offloading does not move. With offloading
    the inputs of `STASH` layers are on the device; without checkpointing, about as much as one layer keeps: what is in
    use and what is on its way.
    """
    r, c, width = model.hidden_bytes, model.compute_bytes, model.hidden_size
    last, inner = (4 + 2 * r + c) * width, layer_activations(model)
    if not checkpointing and not offloading:
        return tokens * (model.layers * inner + last)
    inputs = checkpointing * r * width * (min(model.layers, STASH) if offloading else model.layers)
    attention = checkpointing * selective * model.num_attention_heads * (c * model.head_dim + 4)
    kept = inputs + model.layers * attention + last
    return tokens * kept + max(0, tokens * (inner - attention) - tile)


def forward_activations(model: ModelSize, tokens: int, tile: int) -> int:
    """Bytes of a pass without gradient beside the tile: residual, norm, and a layer's widest part before the tile."""
    c, width = model.compute_bytes, model.hidden_size
    widest = max(8 * width, 3 * c * model.intermediate_size, 4 * c * model.num_attention_heads * model.head_dim)
    return tokens * (2 * model.hidden_bytes + 4) * width + max(0, tokens * widest - tile)


def logits_tile(model: ModelSize, tokens: int, gradient: bool) -> int:
    """Bytes of the chunked LM head (`trl.functional.logps`) at their most.

    A chunk has logits, log-probs and probabilities in float32; the next one's logits are made beside them, in 16 bits
    first. Backward, the gradient of the head's weights adds up in float32 beside the tile.
    """
    c, chunk = model.compute_bytes, max(1, GPU_CHUNK_ELEMENTS // model.vocab_size)
    narrow, tile = c % 4, min(tokens, chunk) * model.vocab_size
    forward = tile * (12 if tokens <= chunk else 16 + narrow)
    backward = tile * (8 + 2 * narrow) + model.vocab_size * model.hidden_size * (4 + c)
    return max(forward, backward) if gradient else forward


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of each part in each phase, and the sizes they come from; no `engine`: no vLLM in this process."""

    model: ModelSize
    training: TrainingSize
    engine: EngineSize | None
    total_bytes: int
    phases: dict[Phase, dict[str, int]]

    def needs(self, phase: Phase, doubt: float = 0.0) -> int:
        """Bytes of a phase, its activations being overestimated by this share."""
        parts = self.phases[phase]
        return sum(parts.values()) - int(doubt * (parts.get("activations", 0) + parts.get("logits tile", 0)))

    def share_limits(self, doubt: float = 0.0) -> tuple[int, int]:
        """Least bytes that vLLM starts with, and most that leave room for the rest; negative: as much is lacking."""
        least = self.engine.least(self.model) if self.engine else dict.fromkeys(ENGINE_PARTS, 0)
        most = self.total_bytes
        for phase, parts in self.phases.items():
            room = self.total_bytes - self.needs(phase, doubt)
            if "engine cache" in parts:
                room += parts["engine cache"] + least["engine weights"] + least["engine activations"]
            if "engine cache" in parts or room < 0:
                most = min(most, room)
        return sum(least.values()), most

    def utilizations(self) -> tuple[float, float] | None:
        """Least and largest `vllm_gpu_memory_utilization` that work, in hundredths; None if none does."""
        for doubt in (0.0, DOUBT):
            least, most = (100 * share / self.total_bytes for share in self.share_limits(doubt))
            if ceil(least) <= floor(most):
                return ceil(least) / 100, floor(most) / 100
        return None

    def table(self) -> str:
        """The plan in GiB, a row a part and a column a phase; then verdicts on the phases and on vLLM's cache."""
        parts = self.phases["generate"] | self.phases["train"]
        rows = {part: [self.phases[phase].get(part, 0) for phase in PHASES] for part in parts}
        rows |= {"sum": [self.needs(phase) for phase in PHASES], "GPU": [self.total_bytes] * 3}
        lines = [f"{'GiB':<18}" + "".join(f"{phase:>10}" for phase in PHASES)]
        lines += [f"{part:<18}" + "".join(f"{_gib(n):>10}" for n in row) for part, row in rows.items()]
        for phase in PHASES:
            spare = self.total_bytes - self.needs(phase)
            unsure = self.needs(phase, DOUBT) <= self.total_bytes
            verdict = "fits" if spare >= 0 else "may not fit" if unsure else "does not fit"
            lines.append(f"{phase}: {verdict}, {_gib(abs(spare))} GiB {'to spare' if spare >= 0 else 'too much'}")
        if self.engine is not None:
            longest = self.engine.max_model_length
            tokens = self.phases["generate"]["engine cache"] // self.model.cache_bytes
            room = f"{tokens / longest:.1f} sequences" if tokens >= longest else "less than one sequence"
            lines.append(f"vLLM's cache: {tokens:,} tokens, {room} of {longest:,}")
        return "\n".join(lines)


def plan(model: ModelSize, training: TrainingSize, engine: EngineSize | None, total_bytes: int) -> MemoryPlan:
    """What each phase needs on a GPU of `total_bytes`."""
    states, fixed = _OPTIMIZERS.get(training.optimizer, (2, 0))
    mixed = model.hidden_bytes > model.compute_bytes
    held = {
        "policy weights": model.weight_bytes,
        "frozen models": training.frozen_bytes,
        "gradients": training.trainable_bytes * (training.gradients_stay + training.buckets),
        "optimizer": states * training.trainable_bytes + fixed * training.trainable_parameters,
        "CUDA context": CUDA_CONTEXT,
    }
    tile, head_tile = (logits_tile(model, training.tokens, gradient) for gradient in (False, True))
    # Autocast keeps the weights it has cast until it is left.
    scored = held | {
        "autocast copies": model.parameters * model.compute_bytes * mixed,
        "activations": forward_activations(model, training.tokens, tile),
        "logits tile": tile,
    }
    layers = train_activations(
        model,
        training.tokens,
        training.gradient_checkpointing,
        head_tile,
        selective=training.selective,
        offloading=bool(training.offloading),
    )
    trained = scored | {
        "gradients": training.trainable_bytes * (1 + training.buckets),
        "activations": layers,
        "logits tile": head_tile,
    }
    awake: dict[str, int] = {}
    if engine is not None:
        awake = engine.least(model)
        used = awake["engine weights"] + awake["engine activations"]
        awake["engine cache"] = max(0, round(engine.utilization * total_bytes) - used)
    waits = engine is not None and not engine.sleep_level
    waiting = {part: n for part, n in awake.items() if waits and part != "engine activations"}
    phases: dict[Phase, dict[str, int]] = {
        "generate": held | awake,
        "score": scored | waiting,
        "train": trained | waiting,
    }
    return MemoryPlan(model, training, engine, total_bytes, phases)


def _gib(n: float) -> str:
    return f"{n / GIB:.1f}"


def check(plan: MemoryPlan) -> None:
    """Raises for a plan that cannot work, and warns of one that works only while sequences stay short.

    Raises:
        ConfigError: vLLM cannot start, or what is left does not hold weights, gradients and optimizer. Says which
            values work, or what else to change.
    """
    engine, (least, sure), (_, likely) = plan.engine, plan.share_limits(), plan.share_limits(DOUBT)
    share = round(engine.utilization * plan.total_bytes) if engine else 0
    if least <= share <= likely:
        return
    if least <= share <= plan.share_limits(1.0)[1]:
        works = plan.utilizations()
        fix = f"`vllm_gpu_memory_utilization={works[1]}` leaves room for that." if engine and works else ""
        warnings.warn(
            f"The GPU's memory may run out where all sequences of a micro-batch are of full length. {fix} "
            f"{_advice(plan, _largest)}\n{plan.table()}",
            stacklevel=2,
        )
        return
    room = sure if sure >= least else likely
    if engine is None:
        raise ConfigError(
            f"Training lacks at least {_gib(-room)} GiB on this GPU. {_advice(plan, _largest)}\n{plan.table()}"
        )
    wrong = "is too small" if share < least else "is too large" if room >= 0 else "is not at fault"
    parts = ", ".join(f"{part.removeprefix('engine ')} {_gib(n)}" for part, n in engine.least(plan.model).items())
    leaves = f"the rest leaves {_gib(room)} GiB" if room >= 0 else f"the rest lacks {_gib(-room)} GiB even without it"
    works = plan.utilizations()
    fix = f"Set it to a value from {works[0]} to {works[1]}." if works else f"No value works. {_advice(plan, _largest)}"
    raise ConfigError(
        f"`vllm_gpu_memory_utilization` {wrong} (got {engine.utilization}): vLLM gets {_gib(share)} GiB; with one "
        f"sequence of {engine.max_model_length:,} tokens it needs {_gib(least)} ({parts}), and {leaves}. {fix}\n"
        f"{plan.table()}"
    )


def explain_out_of_memory(
    error: BaseException, plan: MemoryPlan, phase: Phase, *, allocated: int, reserved: int
) -> DeviceMemoryError:
    """The error to raise from torch's: where memory ran out, what was planned, and what to change.

    Args:
        error: torch's, whose first line is kept.
        allocated, reserved: bytes of torch's allocator at that moment.
    """
    first, *_ = str(error).splitlines() or [type(error).__name__]
    return DeviceMemoryError(
        f"The GPU's memory ran out in the phase `{phase}`: {first}\ntorch had {_gib(allocated)} GiB allocated and "
        f"{_gib(reserved)} GiB reserved; the plan was {_gib(plan.needs(phase))} of {_gib(plan.total_bytes)} GiB.\n"
        f"{_advice(plan, lambda p: p.needs(phase))}\n{plan.table()}"
    )


def _largest(plan: MemoryPlan) -> int:
    """Bytes of the phase that needs most, vLLM's cache holding one sequence."""
    one = plan.engine.least(plan.model)["engine cache"] if plan.engine else 0
    return max(plan.needs(p) + one * ("engine cache" in n) - n.get("engine cache", 0) for p, n in plan.phases.items())


def _advice(given: MemoryPlan, needed: Callable[[MemoryPlan], int]) -> str:
    """What to change so that fewer bytes are needed, the most effective first."""
    t, e = given.training, given.engine
    half = max(t.sequence_tokens, t.tokens // 2)
    changes: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        (f"`max_tokens_per_micro_batch={half}`", {"tokens": min(half, t.tokens)}, {}),
        ("`gradient_checkpointing=True`", {"gradient_checkpointing": True}, {}),
        ("`gradient_checkpointing_kwargs={'selective': False}`", {"selective": False}, {}),
        ("`optim='adamw_8bit'`", {"optimizer": "adamw_8bit"}, {}),
    ]
    if t.offloading is not None:
        changes.append(("`activation_offloading=True`", {"offloading": True}, {}))
    if e is not None:
        length = min(e.max_model_length, t.sequence_tokens)
        share = max(ceil(100 * given.share_limits()[0] / given.total_bytes) / 100, round(e.utilization - 0.1, 2))
        changes += [
            ("`vllm_enable_sleep_mode=True`", {}, {"sleep_level": e.sleep_level or 2}),
            (f"`vllm_max_model_length={length}`", {}, {"max_model_length": length}),
            (f"`vllm_gpu_memory_utilization={share}`", {}, {"utilization": share}),
        ]
    freed = {
        name: needed(given)
        - needed(plan(given.model, replace(t, **training), e and replace(e, **engine), given.total_bytes))
        for name, training, engine in changes
    }
    useful = sorted((name for name, n in freed.items() if n > GIB / 20), key=lambda name: -freed[name])
    listed = ", ".join(f"{name} ({_gib(freed[name])} GiB)" for name in useful)
    return f"What frees memory, most first: {listed}." if useful else "Use shorter completions or a smaller model."


def gpu_memory(device: torch.device | int | None = None) -> tuple[int, int]:
    """Free and total bytes of a CUDA device."""
    return torch.cuda.mem_get_info(device)
