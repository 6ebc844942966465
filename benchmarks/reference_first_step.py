"""Compares losses and gradients of this package and of the reference implementation, on the same completions.

    python benchmarks/reference_first_step.py --reference-python REF/bin/python [--only rloo,beta] [--keep FOLDER]

REF is a virtual environment with `trl==1.16.0` and the same torch. For each variant the reference trains a tiny random
model on the CPU for two optimizer steps, and its completions are recorded. Then this package trains the same model on
them, its engine replaced by one that repeats them. One row of the table is one optimizer step; the second one is taken
with weights that the first has moved, so that policy ratios are not 1. Variants in which the two mean to do something
else say so in the last column. Below the table are all other metrics that both log and that differ by more than 1e-4.

The difference of two numbers is relative to the larger one, or to `FLOOR` where both are smaller: the loss of a first
on-policy step is a sum of advantages, which is zero up to rounding. The reference rounds the loss of Online DPO to four
decimals.
"""

import argparse
import dataclasses
import importlib
import json
import math
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

FLOOR = 1e-2
TOLERANCE = 1e-4
VOCABULARY = 120
PAD, EOS, UNKNOWN = 0, 1, 2

COMMON = {
    "learning_rate": 2e-5,
    "max_steps": 2,
    "max_grad_norm": 1e9,  # the norm of the whole gradient, not a clipped one
    "logging_steps": 1,
    "shuffle_dataset": False,
    "bf16": False,
    "gradient_checkpointing": False,
    "use_cpu": True,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "seed": 1,
}
GROUPS = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 12}
DISTILLATION = {"per_device_train_batch_size": 4, "max_completion_length": 12}
PAIRS = {"per_device_train_batch_size": 4, "max_new_tokens": 12, "beta": 0.1}
HALVES = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
TWICE = {"num_iterations": 2}
SHORT = {"max_completion_length": 10, "mask_truncated_completions": True}

METHODS: dict[str, tuple[str, str, dict[str, Any]]] = {  # name: (module, class, settings of all its variants)
    "grpo": ("trl", "GRPO", {**GROUPS, **TWICE}),
    "rloo": ("trl", "RLOO", {**GROUPS, **TWICE}),
    "distillation": ("trl", "Distillation", DISTILLATION),
    "online_dpo": ("trl.experimental.online_dpo", "OnlineDPO", PAIRS),
}


@dataclasses.dataclass(frozen=True)
class Variant:
    """What is trained: a method with settings that differ from its ordinary ones, and a reward function's name."""

    method: str
    settings: dict[str, Any]
    reward: str = "even"
    gradient_sum: int = 1
    """Accumulation steps whose gradients the reference adds up, where this package takes their mean."""
    known: str = ""
    """What the two do differently on purpose."""


MASKED = "masked sequences: the reference adds their advantage to the loss, which has no gradient"
TIES = "ties: the reference takes the first completion for the better one"
SUMMED = "the reference's gradient is the sum over accumulation steps: halved here"

VARIANTS = {
    "grpo, beta 0.05": Variant("grpo", {"beta": 0.05}),
    "grpo, loss grpo, T 0.7": Variant("grpo", {"loss_type": "grpo", "temperature": 0.7}),
    "rloo, beta 0": Variant("rloo", {"beta": 0.0}),
    "rloo, beta 0.05": Variant("rloo", {"beta": 0.05}),
    "rloo, beta 0.5": Variant("rloo", {"beta": 0.5}),
    "rloo, fresh completions": Variant("rloo", {"beta": 0.5, "num_iterations": 1}),
    "rloo, T 0.7": Variant("rloo", {"beta": 0.5, "temperature": 0.7}),
    "rloo, clipped rewards": Variant("rloo", {"beta": 0.05, "reward_clip_range": (0.2, 0.7)}),
    "rloo, rewards clipped to one": Variant("rloo", {"beta": 0.0, "reward_clip_range": (0.9, 1.0)}),
    "rloo, equal rewards": Variant("rloo", {"beta": 0.5}, reward="flat"),
    "rloo, normalised": Variant("rloo", {"normalize_advantages": True}),
    "rloo, missing rewards": Variant("rloo", {"beta": 0.5}, reward="gaps"),
    "rloo, missing, normalised": Variant("rloo", {"beta": 0.5, "normalize_advantages": True}, reward="gaps"),
    "rloo, truncated masked": Variant("rloo", {"beta": 0.5, **SHORT}, known=MASKED),
    "rloo, clip 0.1 / 0.02": Variant("rloo", {"beta": 0.0, "epsilon": 0.1, "epsilon_high": 0.02}),
    "rloo, accumulation 2": Variant("rloo", {"beta": 0.5, **HALVES}),
    "rloo, accumulation 2, masked": Variant("rloo", {"beta": 0.5, **HALVES, **SHORT}, known=MASKED),
    "distillation, beta 0": Variant("distillation", {"beta": 0.0}),
    "distillation, beta 0.1": Variant("distillation", {"beta": 0.1}),
    "distillation, beta 0.5": Variant("distillation", {"beta": 0.5}),
    "distillation, beta 1": Variant("distillation", {"beta": 1.0}),
    "distillation, beta 0, T 0.7": Variant("distillation", {"beta": 0.0, "temperature": 0.7}),
    "distillation, beta 0.1, T 0.7": Variant("distillation", {"beta": 0.1, "temperature": 0.7}),
    "distillation, beta 1, T 0.7": Variant("distillation", {"beta": 1.0, "temperature": 0.7}),
    "distillation, top-p 0.8": Variant("distillation", {"beta": 0.5, "top_p": 0.8}),
    "distillation, beta 0.1, accumulation 2": Variant("distillation", {"beta": 0.1, **HALVES}),
    "distillation, beta 1, accumulation 2": Variant("distillation", {"beta": 1.0, **HALVES}),
    "online_dpo, sigmoid": Variant("online_dpo", {}),
    "online_dpo, ipo": Variant("online_dpo", {"loss_type": "ipo"}, known=TIES),
    "online_dpo, equal rewards": Variant("online_dpo", {}, reward="flat", known=TIES),
    "online_dpo, T 0.5": Variant("online_dpo", {"temperature": 0.5}),
    "online_dpo, EOS penalty": Variant("online_dpo", {"missing_eos_penalty": 1.0, "max_new_tokens": 4}),
    "online_dpo, accumulation 2": Variant("online_dpo", HALVES, gradient_sum=2, known=SUMMED),
}


# ---- what is trained on ----


def even(ids: Sequence[int]) -> float:
    """Share of even ids, plus a little for length and for high ids: different completions hardly ever get the same."""
    return sum(i % 2 == 0 for i in ids) / len(ids) + 0.02 * len(ids) + 1e-5 * sum(ids)


REWARDS: dict[str, Callable[[Sequence[int]], float | None]] = {
    "even": even,
    "gaps": lambda ids: None if len(ids) > 11 else even(ids),  # a group of which one row alone has a reward
    "flat": lambda ids: 0.5,
}


def completed(ids: Sequence[int]) -> list[int]:
    """A row of ids up to its first end-of-sequence id: what follows is padding."""
    row = [int(i) for i in ids]
    return row[: row.index(EOS) + 1] if EOS in row else row


def make_models(folder: Path) -> None:
    """A small Llama `policy`, another one `teacher`, and `reference`, which is the policy slightly changed.

    Weights are large, so that distributions are far from uniform, and sequences end after some five tokens.
    """
    import torch
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>"])}
    vocabulary |= {f"w{i}": i for i in range(3, VOCABULARY)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in ("<pad>", "<eos>")])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        initializer_range=0.3,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
    )
    for name, seed, noise in (("policy", 0, 0.0), ("teacher", 1, 0.0), ("reference", 0, 0.03)):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        with torch.no_grad():
            model.lm_head.weight[EOS] *= 2
            for matrix in (p for p in model.parameters() if p.dim() > 1):
                matrix.add_(noise * torch.randn_like(matrix))
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def make_prompts() -> list[str]:
    """16 prompts of two to seven words, all different."""
    return [" ".join(f"w{3 + (7 * i + 5 * k) % (VOCABULARY - 3)}" for k in range(2 + i % 6)) for i in range(16)]


# ---- training, with either implementation ----


def worker(folder: Path) -> None:
    """Trains each variant that `job.json` lists, with whatever `trl` this interpreter has; writes `done.json`."""
    import torch

    torch.set_num_threads(1)
    job = json.loads((folder / "job.json").read_text())
    done = {name: train(folder, VARIANTS[name], completions) for name, completions in job.items()}
    (folder / "done.json").write_text(json.dumps(done))


def train(folder: Path, variant: Variant, script: list[Any] | None) -> dict[str, Any]:
    """What one run logs, and the completions it was trained on.

    Args:
        script: `(prompt ids, completion ids)` to train on, in order; the model's own are sampled when there are none.
    """
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    def load(name: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32)

    def reward(completion_ids: list[list[int]], **kwargs: object) -> list[float | None]:
        return [REWARDS[variant.reward](completed(ids)) for ids in completion_ids]

    module_name, prefix, settings = METHODS[variant.method]
    module = importlib.import_module(module_name)
    config_class = getattr(module, f"{prefix}Config")
    tokenizer = AutoTokenizer.from_pretrained(folder / "policy")
    prompts = make_prompts()
    if script is not None:  # the order the reference took them in, which is not always that of the dataset
        asked = dict.fromkeys(str(tokenizer.decode(ids)) for ids, _ in script)
        prompts = [*asked, *(p for p in prompts if p not in asked)]
    models = {"distillation": {"teacher_model": "teacher"}, "online_dpo": {"ref_model": "reference"}}
    with tempfile.TemporaryDirectory() as output:
        wanted = {**COMMON, **settings, **variant.settings, "output_dir": output}
        known = {f.name for f in dataclasses.fields(config_class)}
        # The reference's Online DPO has no such option: it always shuffles.
        args = config_class(**{k: v for k, v in wanted.items() if k in known or k != "shuffle_dataset"})
        trainer = getattr(module, f"{prefix}Trainer")(
            load("policy"),
            args=args,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=tokenizer,
            **({} if variant.method == "distillation" else {"reward_funcs": reward}),
            **{k: load(name) for k, name in models.get(variant.method, {}).items()},
        )
        if variant.method in ("grpo", "rloo") and args.beta:
            trainer.ref_model.load_state_dict(load("reference").state_dict())
        recorded: list[Any] = []
        if script is None:
            trainer.model.generate = recording(trainer.model.generate, recorded)
        else:
            trainer.engine = RepeatingEngine(script)
        trainer.train()
    return {"completions": recorded, "log": [entry for entry in trainer.state.log_history if "loss" in entry]}


def recording(generate: Callable[..., Any], recorded: list[Any]) -> Callable[..., Any]:
    """`generate` that also appends `(prompt ids, completion ids)` of each row, without padding."""

    def call(*args: Any, **kwargs: Any) -> Any:
        output = generate(*args, **kwargs)
        prompts, masks = kwargs["input_ids"], kwargs["attention_mask"].bool()
        for i, row in enumerate(output[:, prompts.shape[1] :].tolist()):
            source = i * len(prompts) // len(output)
            recorded.append((prompts[source][masks[source]].tolist(), completed(row)))
        return output

    return call


class RepeatingEngine:
    """An engine that repeats recorded completions, for each prompt in the order they were recorded in."""

    own_weights = False
    scorers = ()

    def __init__(self, script: list[Any]):
        queues = defaultdict(list)
        for prompt, completion in script:
            queues[tuple(prompt)].append(completion)
        self._queues = {prompt: iter(completions) for prompt, completions in queues.items()}

    def generate(self, prompts: Sequence[Any], sampling: Any) -> Iterator[tuple[int, list[Any]]]:
        from trl.types import Completion

        for i, prompt in enumerate(prompts):
            answers = [next(self._queues[tuple(prompt.token_ids)]) for _ in range(sampling.n)]
            yield i, [Completion(ids, [], "stop" if ids[-1] == EOS else "length") for ids in answers]

    def update_weights(self, weights: Any, version: int) -> None:
        """Nothing to update."""

    def sleep(self) -> bool:
        """Nothing to free."""
        return False

    def close(self) -> None:
        """Nothing to free."""


def run_worker(python: str, folder: Path, job: Mapping[str, Any]) -> dict[str, Any]:
    """What a worker in a fresh process of this interpreter makes of the job."""
    (folder / "job.json").write_text(json.dumps(job))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    # The script's own folder only: which `trl` it finds is the interpreter's affair.
    command = [python, "-P", __file__, "--worker", str(folder)]
    done = subprocess.run(command, env=env, cwd=tempfile.gettempdir(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return json.loads((folder / "done.json").read_text())


# ---- the comparison ----

# Clocks and places, the same only by chance.
_NOT_COMPARED = ("loss", "grad_norm", "step_time", "epoch", "step")


def difference(ours: float, theirs: float) -> float:
    """Relative to the larger one, or to `FLOOR`."""
    return abs(ours - theirs) / max(abs(ours), abs(theirs), FLOOR)


def compare(name: str, ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> float:
    """Prints a row for each step; returns the largest difference in them."""
    variant, worst = VARIANTS[name], 0.0
    for mine, other in zip(ours, theirs, strict=True):
        pairs = [(mine["loss"], other["loss"]), (mine["grad_norm"], other["grad_norm"] / variant.gradient_sum)]
        gap = max(difference(*pair) for pair in pairs)
        worst = max(worst, gap)
        numbers = [f"{value:.6g}" for pair in pairs for value in pair]
        print("| " + " | ".join([name, str(mine["step"]), *numbers, f"{gap:.1e}", variant.known]) + " |")
    return worst


def other_metrics(ours: dict[str, Any], theirs: dict[str, Any]) -> Iterator[str]:
    """A line for each metric of a method that differs somewhere, with the values that differ most."""
    compared: dict[tuple[str, str], list[tuple[float, str]]] = defaultdict(list)
    for name, run in ours.items():
        for mine, other in zip(run["log"], theirs[name]["log"], strict=True):
            for key in sorted(set(other) - set(_NOT_COMPARED)):
                a, b = (float("nan") if log.get(key) is None else log[key] for log in (mine, other))
                gap = difference(a, b)
                gap = float("inf") if math.isnan(gap) else gap  # one of them has no value
                where = f"{a:.6g} (reference {b:.6g}) in `{name}`, step {mine['step']}"
                compared[VARIANTS[name].method, key].append((gap, where))
    for (method, key), values in compared.items():
        different = sum(gap > TOLERANCE for gap, _ in values)
        if different:
            yield f"{method} {key}: {different} of {len(values)} steps, most {max(values)[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference-python", help="interpreter of the reference implementation's environment")
    parser.add_argument("--only", default="", help="comma-separated substrings that a variant's name must all contain")
    parser.add_argument("--keep", type=Path, help="folder for models, completions and logs, instead of a temporary one")
    parser.add_argument("--worker", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker)
        return
    if not args.reference_python:
        parser.error("--reference-python is missing")
    names = [name for name in VARIANTS if all(part in name for part in args.only.split(","))]
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.keep or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        make_models(folder)
        theirs = run_worker(args.reference_python, folder, dict.fromkeys(names))
        (folder / "reference.json").write_text(json.dumps(theirs, indent=1))
        ours = run_worker(sys.executable, folder, {name: theirs[name]["completions"] for name in names})
    head = ["variant", "step", "loss", "reference", "gradient norm", "reference", "difference", "known"]
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    worst = {name: compare(name, ours[name]["log"], theirs[name]["log"]) for name in names}
    same = [gap for name, gap in worst.items() if not VARIANTS[name].known]
    print(f"\nLargest difference where none is known: {max(same, default=0.0):.1e}\n\nOther metrics that differ:\n")
    print("\n".join(other_metrics(ours, theirs)))


if __name__ == "__main__":
    main()
