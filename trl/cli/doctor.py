"""`trl doctor`: what would stop a training run, found before a GPU hour is spent.

The same options as the training command; a table with a verdict a row, and for every finding the command or option
that repairs it.
"""

import subprocess
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trl.cli.arguments import RewardScriptArguments
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
    if isinstance(request.script, RewardScriptArguments):
        yield _Attempt("rewards", lambda: load_rewards(request)).finding("load")
    data = _Attempt("dataset", lambda: load_data(request))
    yield data.finding("has the columns the method needs")
    if settings.failed:
        return
    model = _Attempt("model", lambda: _load_model(request))
    yield model.finding("loads")
    if "use_vllm" not in settings.value.__dataclass_fields__:
        return  # a method on fixed data: what is left to look at are completions that are still to be written
    longest = 0
    if not (data.failed or model.failed):
        prompts = _Attempt("prompts", lambda: _lengths(settings.value, data.value["train_dataset"], model.value))
        if prompts.failed:
            yield Finding("prompts", "fail", str(prompts.error), "mend or drop the row")
        else:
            longest = max(prompts.value)
            yield _positions(settings.value, model.value, prompts.value)
    yield from _memory(settings.value, model, longest)
    if settings.value.use_vllm:
        yield _engine(settings.value)
        if settings.value.vllm_mode == "server":
            yield from _servers(settings.value, model.value)
    if "teacher_model_server_url" in settings.value.__dataclass_fields__:
        yield from _teacher(settings.value, model.value, longest)


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
    longest = max(lengths) + args.longest_completion
    # Not every family has a limit.
    limit = getattr(model.policy.config.get_text_config(), "max_position_embeddings", None)
    detail = f"longest of {len(lengths)} prompts {max(lengths)} tokens, with its completion up to {longest}"
    if limit is not None and longest > limit:
        return Finding("prompts", "fail", f"{detail}; the model has {limit} positions", f"lower `{args.length_option}`")
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
    policy = model.value.policy
    frozen = _Attempt("GPU memory", lambda: args.frozen_bytes(sum(p.nbytes for p in policy.parameters())))
    if frozen.failed:
        yield frozen.finding("")
        return
    planned = plan_of(args, policy, longest, frozen_bytes=frozen.value, total_bytes=total)
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
        yield from _until_it_fails(f"server {client.base_url}", client, _server(args, client, model))


def _until_it_fails(subject: str, client: Any, findings: Iterator[Finding]) -> Iterator[Finding]:
    """The findings, and one more where the server fails. The client is closed."""
    try:
        yield from findings
    except ServerError as error:
        yield Finding(subject, "fail", str(error), "see the server's log, and restart it")
    finally:
        client.close()


def _reach(subject: str, version: str, start: str, client: Any, args: Any) -> Generator[Finding, None, Any]:
    """Whether the server answers, and with which version; returns its facts, or None where there is nobody to ask.

    Args:
        subject, version: of the two rows.
        start: command that starts such a server.
    """
    from trl.generation.vllm_probe import probe

    if not client.health():
        yield Finding(subject, "fail", "nobody answers", start)
        return None
    yield Finding(subject, "ok", "answers")
    try:
        facts = probe(client, allow_unsupported_version=args.vllm_allow_unsupported_version)
    except ServerVersionError as error:
        yield Finding(version, "fail", *str(error).split(": ", 1))
        return None
    yield Finding(version, "ok", facts.version)
    return facts


def _server(args: Any, client: Any, model: _Model | None) -> Iterator[Finding]:
    start = "trl vllm-serve --model MODEL"
    facts = yield from _reach(f"server {client.base_url}", "vLLM version", start, client, args)
    if facts is None:
        return
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
    room = facts.max_model_len - args.longest_completion
    if room < 1:
        yield Finding(
            "context",
            "fail",
            f"{facts.max_model_len} tokens, and completions may have {args.longest_completion}",
            f"vllm serve … --max-model-len N, or a smaller `{args.length_option}`",
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


def _teacher(args: Any, model: _Model | None, longest: int) -> Iterator[Finding]:
    """The rows of a teacher behind a server of its own, where the config names one.

    Args:
        longest: tokens of the longest prompt, 0 where that is not known.
    """
    from trl.generation.vllm_teacher import teacher_client

    if args.teacher_model_server_url is None:
        return
    attempt = _Attempt(
        "teacher",
        lambda: teacher_client(
            args.teacher_model_server_url, api_key=args.vllm_server_api_key, request_timeout=args.vllm_request_timeout
        ),
    )
    if attempt.failed:
        yield Finding("teacher", "fail", str(attempt.error), "teacher_model_server_url: http://HOST:PORT")
        return
    client = attempt.value
    subject = f"teacher {client.base_url}"
    yield from _until_it_fails(subject, client, _teacher_server(subject, args, client, model, longest))


def _teacher_server(subject: str, args: Any, client: Any, model: _Model | None, longest: int) -> Iterator[Finding]:
    from trl.generation.vllm_teacher import check_teacher

    facts = yield from _reach(subject, "teacher version", "vllm serve TEACHER --max-logprobs -1", client, args)
    if facts is None:
        return
    try:
        check_teacher(client, facts, args.loss_top_k)
        yield Finding("teacher log-probs", "ok", f"{args.loss_top_k} per token can be had")
    except ConfigError as error:
        found, _, repair = str(error).partition(": start it with ")
        yield Finding("teacher log-probs", "fail", found, repair.strip("`."))
    # vLLM has to generate a token after the sequence that it scores.
    needed = max(longest, 1) + args.longest_completion + 1
    detail = f"{facts.max_model_len} tokens; prompt, completion and one more may have {needed}"
    repair = f"vllm serve TEACHER … --max-model-len {needed}, or a smaller `{args.length_option}`"
    if needed > facts.max_model_len:
        yield Finding("teacher context", "fail", detail, repair)
    else:
        yield Finding("teacher context", "ok", detail)
    if model is not None:
        yield _teacher_vocabulary(client, model)


def _vocabulary(client: Any, model: _Model) -> Finding:
    """The server takes the model's last id, and refuses the one after it."""
    size = model.policy.config.get_text_config().vocab_size
    if not _accepts(client, size - 1):
        return Finding("vocabulary", "fail", f"the server's is smaller than {size}", "serve the model that is trained")
    if _accepts(client, size):
        return Finding("vocabulary", "fail", f"the server's is larger than {size}", "serve the model that is trained")
    return Finding("vocabulary", "ok", f"{size} tokens")


def _teacher_vocabulary(client: Any, model: _Model) -> Finding:
    """Whether the teacher knows what the model writes. Families pad their vocabularies to different sizes."""
    tokens, size = len(model.tokenizer), model.policy.config.get_text_config().vocab_size
    subject, repair = "teacher vocabulary", "serve a teacher of the same family"
    if not _accepts(client, min(tokens, size) - 1):
        return Finding(subject, "fail", f"the teacher's is smaller than the student's {min(tokens, size)}", repair)
    if _accepts(client, size):
        repair += ", unless its further ids are padding"
        return Finding(subject, "warn", f"the teacher's is larger than the student's {size}", repair)
    return Finding(subject, "ok", f"has the student's {min(tokens, size)} tokens")


def _accepts(client: Any, token: int) -> bool:
    """Whether the server has this id."""
    try:
        client.completions([[token]], {"max_tokens": 1, "temperature": 0.0, "n": 1})
    except ServerError as error:
        if error.status == 400:
            return False
        raise
    return True


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
