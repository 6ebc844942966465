"""Completions from the model itself."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import cast

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, LogitsProcessor, PreTrainedModel

from trl.errors import GenerationError
from trl.generation.sampling import Sampler, resolve
from trl.models.decode import SharedPromptCache
from trl.models.forward import prompt_logits, step_logits, supports_packing
from trl.types import Completion, FinishReason, Prompt, Sampling, Scorer, WeightStream


class LocalEngine:
    """An `Engine` that samples from the model being trained.

    Args:
        model: the causal language model, not wrapped.
        eos_ids: every id that ends a completion.
        pad_id: fills finished rows where the model's own `generate` has to be used.
        shared_prompts: compute every distinct prompt once and keep its keys and values once, which needs a model that
            passes `models.forward.supports_packing`; False uses the model's own `generate`. None finds out.
        autocast: context factory under which the model runs.
    """

    own_weights = False
    scorers: Sequence[Scorer] = ()

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        eos_ids: Sequence[int],
        pad_id: int = 0,
        shared_prompts: bool | None = None,
        autocast: Callable[[], AbstractContextManager] = nullcontext,
    ):
        self.model = model
        self.eos_ids = sorted(eos_ids)
        self.pad_id = pad_id
        self.shared_prompts = supports_packing(model) if shared_prompts is None else shared_prompts
        self.autocast = autocast
        self.policy_version = 0

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> Iterator[tuple[int, list[Completion]]]:
        """Yields `(prompt index, its n completions)` as soon as the last of the n is finished.

        Raises:
            GenerationError: a prompt is empty.
            ConfigError: the sampling holds a setting that is not understood.
        """
        for index, prompt in enumerate(prompts):
            if not prompt.token_ids:
                raise GenerationError(f"Prompt {index} has no tokens: a completion needs at least one to start from.")
        if not prompts:
            return
        sampling = resolve(sampling)
        run = self._with_shared_prompts if self.shared_prompts else self._with_model_generate
        open_rows = [sampling.n] * len(prompts)
        finished: list[list[Completion | None]] = [[None] * sampling.n for _ in prompts]
        training = self.model.training
        self.model.eval()
        try:
            for row, completion in run([p.token_ids for p in prompts], sampling):
                index, place = divmod(row, sampling.n)
                finished[index][place] = completion
                open_rows[index] -= 1
                if not open_rows[index]:
                    yield index, [c for c in finished[index] if c is not None]
        finally:
            self.model.train(training)

    def update_weights(self, weights: WeightStream, version: int) -> None:
        """Notes the version; the weights are the model's own already."""
        self.policy_version = version

    def sleep(self) -> bool:
        """Nothing to free: the weights are the policy's."""
        return False

    def close(self) -> None:
        """Nothing to free."""

    def _with_shared_prompts(
        self, prompts: Sequence[list[int]], sampling: Sampling
    ) -> Iterator[tuple[int, Completion]]:
        """Yields `(row, completion)` as rows finish. Equal prompts share one computation, whatever asked for them."""
        distinct = list(dict.fromkeys(map(tuple, prompts)))
        place = {ids: i for i, ids in enumerate(distinct)}
        prompt_of_row = torch.tensor([place[tuple(ids)] for ids in prompts for _ in range(sampling.n)])
        sampler = Sampler(sampling, self.eos_ids)
        device = next(self.model.parameters()).device
        eos = torch.tensor(self.eos_ids, device=device)
        lengths = torch.tensor([len(ids) for ids in distinct])
        cache = SharedPromptCache(lengths, prompt_of_row, sampling.max_tokens, device)
        rows = list(range(len(prompt_of_row)))
        # [steps][rows] of everything sampled so far, on the device; read back when a row finishes.
        tape = _Tape(len(rows))
        with self._inference():
            logits = prompt_logits(self.model, distinct, cache)[prompt_of_row.to(device)]
        for step in range(sampling.max_tokens):
            with self._inference():
                history = None
                if sampler.needs_history:
                    history = [[*prompts[r // sampling.n], *tape.tokens(r)] for r in rows]
                tokens, logps = sampler.draw(sampler.process(logits, step, history))
                ended = torch.isin(tokens, eos).tolist()
            tape.append(rows, tokens, logps)
            last = step == sampling.max_tokens - 1
            for row, stop in zip(rows, ended, strict=True):
                if stop or last:
                    yield row, tape.completion(row, "stop" if stop else "length", self.policy_version)
            if last or all(ended):
                return
            with self._inference():
                if any(ended):
                    keep = torch.tensor([i for i, stop in enumerate(ended) if not stop])
                    rows = [rows[i] for i in keep.tolist()]
                    cache.keep_rows(keep)
                    tokens = tokens[keep.to(device)]
                logits = step_logits(self.model, tokens, cache)

    def _with_model_generate(
        self, prompts: Sequence[list[int]], sampling: Sampling
    ) -> Iterator[tuple[int, Completion]]:
        """Yields `(row, completion)` from the model's own `generate`, for models with state beside attention."""
        sampler = Sampler(sampling, self.eos_ids)
        device = next(self.model.parameters()).device
        rows = [ids for ids in prompts for _ in range(sampling.n)]
        width = max(map(len, rows))
        input_ids = torch.tensor([[self.pad_id] * (width - len(ids)) + ids for ids in rows], device=device)
        mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in rows], device=device)
        recorder = _DrawAndRecord(sampler, [len(ids) for ids in rows])
        with self._inference(), _bare_generation_config(self.model):
            output = cast(GenerationMixin, self.model).generate(
                input_ids=input_ids,
                attention_mask=mask,
                logits_processor=[recorder],
                do_sample=False,
                max_new_tokens=sampling.max_tokens,
                eos_token_id=self.eos_ids,
                pad_token_id=self.pad_id,
            )
        logps = torch.stack(recorder.logps, 1).tolist()
        for row, ids in enumerate(output[:, width:].tolist()):
            length = next((i + 1 for i, token in enumerate(ids) if token in self.eos_ids), len(ids))
            reason: FinishReason = "stop" if ids[length - 1] in self.eos_ids else "length"
            yield row, Completion(ids[:length], logps[row][:length], reason, self.policy_version)

    @contextmanager
    def _inference(self) -> Iterator[None]:
        # Entered and left between yields: whoever consumes the completions may compute gradients.
        with torch.no_grad(), self.autocast():
            yield


@contextmanager
def _bare_generation_config(model: PreTrainedModel) -> Iterator[None]:
    """While active, the model's own sampling defaults (penalties, forced tokens) are out of the way."""
    own = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own


class _Tape:
    """What every row has sampled, step by step, kept on the device until a row is asked for."""

    def __init__(self, num_rows: int):
        self._tokens: list[list[int]] = [[] for _ in range(num_rows)]
        self._logps: list[list[float]] = [[] for _ in range(num_rows)]

    def append(self, rows: Sequence[int], tokens: Tensor, logps: Tensor) -> None:
        for row, token, logp in zip(rows, tokens.tolist(), logps.tolist(), strict=True):
            self._tokens[row].append(token)
            self._logps[row].append(logp)

    def tokens(self, row: int) -> list[int]:
        return self._tokens[row]

    def completion(self, row: int, reason: FinishReason, version: int) -> Completion:
        return Completion(self._tokens[row], self._logps[row], reason, version)


class _DrawAndRecord(LogitsProcessor):
    """Draws the next token itself and leaves it as the only possible one, so that its log-prob is known exactly."""

    def __init__(self, sampler: Sampler, prompt_lengths: Sequence[int]):
        self.sampler = sampler
        self.prompt_lengths = prompt_lengths
        self.logps: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        step = len(self.logps)
        history = None
        if self.sampler.needs_history:
            history = [ids[-(n + step) :] for ids, n in zip(input_ids.tolist(), self.prompt_lengths, strict=True)]
        tokens, logps = self.sampler.draw(self.sampler.process(scores.float(), step, history))
        self.logps.append(logps)
        forced = torch.full_like(scores, -torch.inf)
        return forced.scatter_(1, tokens[:, None], 0.0)
