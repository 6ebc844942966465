"""`trl doctor`: what would stop a training run, found before a GPU hour is spent.

The same options as the training command; a table with a verdict a row, and for every finding the command or option
that repairs it.
"""

import subprocess
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trl.cli.train import METHODS, Request, build_config, load_data, load_rewards, parse
from trl.errors import ConfigError, ParityError, ServerError, ServerVersionError, TRLError

Verdict = Literal["ok", "warn", "fail", "skip"]
# Enough to tell one model from another.
_PARITY_TOKENS = 16


@dataclass(frozen=True)
class Finding:
    """One row of the table.

    Attributes:
        subject: what was looked at.
        verdict: `ok`, `warn`, `fail`, or `skip` where it could not be looked at.
        detail: what was found.
        repair: command or option that mends it.
    """

    subject: str
    verdict: Verdict
    detail: str
    repair: str = ""


def run(argv: Sequence[str]) -> int:
    """Print the table; 0 when nothing fails, 1 otherwise.

    Args:
        argv: the options of the training command, with its name first (`grpo` when left out).
    """
    words = list(argv)
    if {"-h", "--help"} & set(words) or not words:
        print("usage: trl doctor [METHOD] --config FILE [--OPTION VALUE ...]\n\n" + __doc__.split("\n\n")[0])
        return 0
    name = words.pop(0) if words[0] in METHODS else "grpo"
    findings = list(examine(parse(name, words)))
    show(findings)
    return 1 if any(f.verdict == "fail" for f in findings) else 0


def examine(request: Request) -> Iterator[Finding]:
    """The findings, cheapest first. What depends on something that failed is skipped."""
    settings = _Attempt("settings", lambda: build_config(request))
    yield settings.finding("fit each other")
    rewards = _Attempt("rewards", lambda: load_rewards(request.script))
    yield rewards.finding("load")
    data = _Attempt("dataset", lambda: load_data(request))
    yield data.finding("has the columns the method needs")
    if settings.failed:
        return
    model = _Attempt("model", lambda: _load_model(request))
    yield model.finding("loads")
    longest = 0
    if not (data.failed or model.failed):
        prompts = _Attempt("prompts", lambda: _lengths(settings.value, data.value["train_dataset"], model.value))
        if prompts.failed:
            yield Finding("prompts", "fail", str(prompts.error), "mend or drop the row")
        else:
            longest = max(prompts.value)
            yield _positions(settings.value, model.value, prompts.value)
    yield from _memory(settings.value, model, longest)
    if not settings.value.use_vllm:
        return
    yield _engine(settings.value)
    if settings.value.vllm_mode == "server":
        yield from _servers(settings.value, None if model.failed else model.value)


class _Attempt:
    """Something that works or raises one of our errors."""

    def __init__(self, subject: str, function: Callable[[], Any]):
        self.subject = subject
        self.error: TRLError | None = None
        self.value: Any = None
        try:
            self.value = function()
        except TRLError as error:
            self.error = error

    @property
    def failed(self) -> bool:
        return self.error is not None

    def finding(self, good: str) -> Finding:
        if self.error is None:
            return Finding(self.subject, "ok", good)
        found, _, repair = str(self.error).partition(": ")
        return Finding(self.subject, "fail", found, repair)


@dataclass(frozen=True)
class _Model:
    policy: Any
    tokenizer: Any


def _load_model(request: Request) -> _Model:
    from trl.cli.model import get_model_init_kwargs
    from trl.models.load import load_policy, load_tokenizer, use_packed_attention

    if request.model.model_name_or_path is None:
        raise ConfigError("no model: set `model_name_or_path` to a hub id or a local folder.")
    kwargs = get_model_init_kwargs(request.model, request.settings.get("model_init_kwargs") or {})
    policy = load_policy(request.model.model_name_or_path, kwargs)
    use_packed_attention(policy)
    return _Model(policy.eval(), load_tokenizer(policy))


def _engine(args: Any) -> Finding:
    """Whether the options of vLLM fit each other, and it is there where it is needed."""
    from trl.generation.build import check_engine

    attempt = _Attempt("vLLM", lambda: check_engine(args))
    return attempt.finding("options fit each other")


def _lengths(args: Any, dataset: Any, model: _Model) -> list[int]:
    """Tokens of the prompts of a sample of the rows."""
    from itertools import islice

    from trl.data.chat import encode_prompt

    return [
        len(encode_prompt(row["prompt"], model.tokenizer, chat_template_kwargs=args.chat_template_kwargs))
        for row in islice(dataset, 200)
    ]


def _positions(args: Any, model: _Model, lengths: list[int]) -> Finding:
    """Whether prompt plus completion fits the model's own positions."""
    longest = max(lengths) + args.max_completion_length
    # Not every family has a limit.
    limit = getattr(model.policy.config.get_text_config(), "max_position_embeddings", None)
    detail = f"longest of {len(lengths)} prompts {max(lengths)} tokens, with its completion up to {longest}"
    if limit is not None and longest > limit:
        return Finding("prompts", "fail", f"{detail}; the model has {limit} positions", "lower `max_completion_length`")
    return Finding("prompts", "ok", detail)


def _memory(args: Any, model: _Attempt, longest: int) -> Iterator[Finding]:
    """The plan of each phase against the GPU."""
    import torch

    from trl.models.planner import PHASES, check, gpu_memory
    from trl.trainer.memory import plan_of

    if model.failed or not torch.cuda.is_available():
        yield Finding("GPU memory", "skip", "no GPU" if not torch.cuda.is_available() else "the model did not load")
        return
    free, total = gpu_memory()
    planned = plan_of(args, model.value.policy, longest, reference=args.beta != 0.0, total_bytes=total)
    if planned is None:
        yield Finding("GPU memory", "skip", "the model's config has not the sizes that a plan needs")
        return
    needs = ", ".join(f"{phase} {planned.needs(phase) / 2**30:.1f}" for phase in PHASES)
    detail = f"GiB at most: {needs}; free {free / 2**30:.1f} of {total / 2**30:.1f}"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            check(planned)
        except ConfigError as error:
            yield Finding("GPU memory", "fail", detail, str(error).splitlines()[0])
            return
    if said:
        yield Finding("GPU memory", "warn", detail, str(said[0].message).splitlines()[0])
    elif max(map(planned.needs, PHASES)) > free:
        yield Finding("GPU memory", "fail", detail, "choose a free GPU by CUDA_VISIBLE_DEVICES")
    else:
        yield Finding("GPU memory", "ok", detail)


def _servers(args: Any, model: _Model | None) -> Iterator[Finding]:
    from trl.generation.connect import clients

    for client in clients(args):
        try:
            yield from _server(args, client, model)
        except ServerError as error:
            yield Finding(f"server {client.base_url}", "fail", str(error), "see the server's log, and restart it")
        finally:
            client.close()


def _server(args: Any, client: Any, model: _Model | None) -> Iterator[Finding]:
    from trl.generation.vllm_probe import probe

    name = f"server {client.base_url}"
    if not client.health():
        yield Finding(name, "fail", "nobody answers", "trl vllm-serve --model MODEL")
        return
    yield Finding(name, "ok", "answers")
    try:
        facts = probe(client, allow_unsupported_version=args.vllm_allow_unsupported_version)
    except ServerVersionError as error:
        yield Finding("vLLM version", "fail", *str(error).split(": ", 1))
        return
    yield Finding("vLLM version", "ok", facts.version)
    yield from server_settings(facts, args)
    if model is None:
        return
    vocabulary = _vocabulary(client, model)
    yield vocabulary
    if vocabulary.verdict == "fail":
        yield Finding("parity", "skip", "the vocabularies differ")
    elif facts.max_model_len <= _PARITY_TOKENS:
        yield Finding("parity", "skip", f"the context has no room for {_PARITY_TOKENS} tokens")
    else:
        yield _parity(client, facts, model)


def server_settings(facts: Any, args: Any) -> Iterator[Finding]:
    """What can be told from the server's own account, without a model."""
    yield _row("dev mode", facts.dev_mode, "VLLM_SERVER_DEV_MODE=1 vllm serve …")
    if not facts.dev_mode:
        for subject in ("weight transfer", "log-prob mode", "log-prob cap"):
            yield Finding(subject, "skip", "told in dev mode only")
    else:
        yield from _dev_settings(facts, args)
    room = facts.max_model_len - args.max_completion_length
    if room < 1:
        yield Finding(
            "context",
            "fail",
            f"{facts.max_model_len} tokens, and completions may have {args.max_completion_length}",
            "vllm serve … --max-model-len N, or a smaller `max_completion_length`",
        )
    else:
        yield Finding("context", "ok", f"{facts.max_model_len} tokens: prompts of up to {room}")


def _dev_settings(facts: Any, args: Any) -> Iterator[Finding]:
    """What a server tells in dev mode only."""
    import torch

    yield _row("weight transfer", facts.backend, """vllm serve … --weight-transfer-config '{"backend": "nccl"}'""")
    on_gpu = torch.cuda.is_available() and not args.use_cpu
    shared = on_gpu and "vllm" in _programs_on_gpu().lower()
    if facts.backend == "nccl" and shared:
        yield Finding(
            "placement",
            "fail",
            "trainer and server are on one GPU, where NCCL cannot run",
            """--weight-transfer-config '{"backend": "ipc"}', or another GPU by CUDA_VISIBLE_DEVICES""",
        )
    elif facts.backend == "ipc" and on_gpu and not shared:
        yield Finding(
            "placement",
            "fail",
            "trainer and server are on different GPUs, which `ipc` cannot bridge",
            """--weight-transfer-config '{"backend": "nccl"}'""",
        )
    yield _row(
        "log-prob mode",
        facts.logprobs_mode == "processed_logprobs" and facts.logprobs_mode,
        "vllm serve … --logprobs-mode processed_logprobs",
        found=facts.logprobs_mode,
    )
    if facts.max_logprobs == -1:
        yield Finding("log-prob cap", "ok", "none")
    else:
        yield Finding(
            "log-prob cap", "warn", f"{facts.max_logprobs}; a teacher needs more", "vllm serve … --max-logprobs -1"
        )


def _row(subject: str, good: Any, repair: str, found: Any = None) -> Finding:
    if good:
        return Finding(subject, "ok", "on" if good is True else str(good))
    return Finding(subject, "fail", str(found) if found else "off", repair)


def _programs_on_gpu() -> str:
    command = ["nvidia-smi", "--query-compute-apps=process_name", "--format=csv,noheader", "-i", "0"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _vocabulary(client: Any, model: _Model) -> Finding:
    """The server takes the model's last id, and refuses the one after it."""
    size = model.policy.config.get_text_config().vocab_size
    params = {"max_tokens": 1, "temperature": 0.0, "n": 1}

    def accepted(token: int) -> bool:
        try:
            client.completions([[token]], params)
        except ServerError as error:
            if error.status == 400:
                return False
            raise
        return True

    if not accepted(size - 1):
        return Finding("vocabulary", "fail", f"the server's is smaller than {size}", "serve the model that is trained")
    if accepted(size):
        return Finding("vocabulary", "fail", f"the server's is larger than {size}", "serve the model that is trained")
    return Finding("vocabulary", "ok", f"{size} tokens")


def _parity(client: Any, facts: Any, model: _Model) -> Finding:
    import torch

    from trl.generation.parity import as_batch, compare, verdict
    from trl.models.forward import token_logps
    from trl.weights.source import dtype_name

    size = model.policy.config.get_text_config().vocab_size
    sequences = torch.randint(size, (4, _PARITY_TOKENS), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.no_grad():
        own = token_logps(model.policy, as_batch(sequences, model.policy.device), packed=False).logps
    parity = compare(client.prompt_logps(sequences), own)
    detail = f"log-probs differ by {parity.mean:.2g} nats on average, {parity.max:.2g} at most"
    try:
        warning = verdict(parity, [dtype_name(model.policy.dtype), facts.dtype])
    except ParityError:
        return Finding("parity", "fail", detail, "serve the model that is trained; or it still has a run's weights")
    return Finding("parity", "warn" if warning else "ok", detail)


def show(findings: Sequence[Finding]) -> None:
    """Print the table."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = {"ok": "green", "warn": "yellow", "fail": "red", "skip": "dim"}
    table = Table("", "verdict", "found", "repair")
    for f in findings:
        table.add_row(f.subject, Text(f.verdict, colours[f.verdict]), Text(f.detail), Text(f.repair))
    Console().print(table)
