"""The quickstart: a language model learns to sort letters by reward alone. No GPU, no hub, a minute or two.

Measures the base model on prompts never trained on, does what `trl grpo --config examples/quickstart/sort.yaml`
does, and measures again. Any option of `trl grpo` can be added. Paths count from the root of the repository, wherever
this is started.
"""

import argparse
import json
import math
import os
import pkgutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import task
from rich.console import Console
from rich.table import Table

from trl.cli.curve import draw_curve, terminal_characters
from trl.cli.main import report_error
from trl.cli.threads import calm_openmp
from trl.cli.train import build_trainer, parse
from trl.errors import TRLError

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CONFIG = Path(__file__).resolve().with_name("sort.yaml")
ROOT = CONFIG.parents[2]
CONTROL = ["--reward_funcs", "task.random_reward", "--reward_weights", "1.0"]
DESCENDING = ["--dataset_name", "task.descending_dataset"]
EVAL_SEED = 2025
MAX_ANSWER_TOKENS = 10


@dataclass(frozen=True)
class Measurement:
    """What one model answered to the held-out prompts, and the share of right answers by number of letters."""

    greedy_answers: list[str]
    greedy: dict[int, float]
    sampled: dict[int, float]


def main() -> None:
    """Run the quickstart."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--control", action="store_true", help="a reward drawn at random: nothing should be learnt")
    parser.add_argument("--descending", action="store_true", help="another skill: from z to a")
    parser.add_argument("--eval_seed", type=int, default=EVAL_SEED, help=f"draws the held-out prompts ({EVAL_SEED})")
    options, rest = parser.parse_known_args()
    os.chdir(ROOT)
    shorthands = CONTROL * options.control + DESCENDING * options.descending
    quickstart(["--config", str(CONFIG), *shorthands, *rest], options.eval_seed)


def quickstart(argv: Sequence[str], eval_seed: int) -> None:
    """Measure, train with the options `argv` of `trl grpo`, measure again, report."""
    script = parse("grpo", argv).script
    calm_openmp()
    from transformers.utils.logging import disable_progress_bar  # loads torch, which must not come before `calm_openmp`

    from trl.cli.summary import save_reward_curve

    disable_progress_bar()  # the model is so small that a bar is only noise
    console = Console(highlight=False)
    held_out = pkgutil.resolve_name(script.dataset_name)("test", seed=eval_seed)
    trainer = build_trainer("grpo", argv)
    model: Any = trainer.model
    tokenizer: Any = trainer.processing_class

    console.rule("A language model learns to sort, by reward alone")
    console.print(f"The base model answers {len(held_out)} held-out prompts ...")
    before = measure(model, tokenizer, held_out)
    console.print(f"It is trained with {' and '.join(script.reward_funcs)} ...")
    trainer.train()
    console.print("It answers the same prompts again ...")
    after = measure(model, tokenizer, held_out)

    output_dir, history = Path(str(trainer.args.output_dir)), trainer.state.log_history
    trainer.save_model(str(output_dir))
    (output_dir / "accuracy.json").write_text(json.dumps({"before": asdict(before), "after": asdict(after)}, indent=1))
    print_reward_curve(console, [entry["reward"] for entry in history if "reward" in entry])
    print_answers(console, held_out, before, after)
    print_accuracy(console, before, after)
    console.print(f"\nmodel in {output_dir}, {save_reward_curve(history, output_dir)}", soft_wrap=True)
    console.print(verdict(before, after, trainer.state.global_step, script.reward_funcs), style="bold")


def measure(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", held_out: "Dataset") -> Measurement:
    """Answer every held-out prompt twice: greedily, and sampled at temperature 1."""
    greedy, sampled = (answer(model, tokenizer, held_out["prompt"], temperature) for temperature in (0.0, 1.0))
    keys = held_out["solution"]
    return Measurement(greedy, exact_match(greedy, keys), exact_match(sampled, keys))


def answer(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", prompts: Sequence[Any], temperature: float
) -> list[str]:
    """One answer a prompt, as text, in the order of the prompts. Temperature 0 is greedy."""
    from trl.generation.local import LocalEngine
    from trl.models.forward import supports_packing
    from trl.models.load import end_of_sequence_ids
    from trl.types import Prompt, Sampling

    encoded: Any = tokenizer.apply_chat_template(list(prompts), add_generation_prompt=True, return_dict=False)
    engine = LocalEngine(
        model, eos_ids=list(end_of_sequence_ids(model, tokenizer)), shared_prompts=supports_packing(model)
    )
    sampling = Sampling(temperature=temperature, max_tokens=MAX_ANSWER_TOKENS)
    answers = [""] * len(encoded)
    for index, (completion,) in engine.generate([Prompt(ids) for ids in encoded], sampling):
        answers[index] = str(tokenizer.decode(completion.token_ids, skip_special_tokens=True))
    return answers


def exact_match(answers: Sequence[str], keys: Sequence[str]) -> dict[int, float]:
    """Share of answers that equal their key, by the number of letters."""
    right: dict[int, list[bool]] = {}
    for written, key in zip(answers, keys):
        right.setdefault(len(key.split()), []).append(written.split() == key.split())
    return {length: sum(hits) / len(hits) for length, hits in sorted(right.items())}


def print_reward_curve(console: Console, rewards: Sequence[float]) -> None:
    """Draw the mean reward by step, on the scale of the rewards: from 0 to 1."""
    console.print(f"\nmean reward, steps 1 to {len(rewards)}")
    for line in draw_curve(rewards, low=0.0, high=1.0, characters=terminal_characters(sys.stdout.encoding)):
        console.print(line, style="green", markup=False)


def print_answers(console: Console, held_out: "Dataset", before: Measurement, after: Measurement) -> None:
    """Print the first two held-out prompts of each length with the greedy answers of both models."""
    table = Table("prompt", "base model", "after GRPO", "right", title="\nheld-out prompts, greedy answers")
    rows = zip(held_out["prompt"], held_out["solution"], before.greedy_answers, after.greedy_answers)
    shown = list(rows)[: 2 * len(before.greedy)]
    for prompt, key, base, trained in sorted(shown, key=lambda row: len(row[1])):
        table.add_row(prompt[0]["content"], base, trained, "yes" if trained == key else "no")
    console.print(table)


def print_accuracy(console: Console, before: Measurement, after: Measurement) -> None:
    """Print exact match before and after, by length."""
    prompts = len(before.greedy_answers) // len(before.greedy)
    table = Table(title=f"\nheld-out exact match, {prompts} prompts a length")
    for name in ("letters", "in training", "chance", "greedy: before", "after", "sampled: before", "after"):
        table.add_column(name, justify="right")
    for length in before.greedy:
        shares = [before.greedy, after.greedy, before.sampled, after.sampled]
        known = "yes" if length in task.TRAIN_LENGTHS else "never"
        chance = f"{1 / math.factorial(length):.5f}"
        table.add_row(str(length), known, chance, *(f"{share[length]:.3f}" for share in shares))
    console.print(table)


def verdict(before: Measurement, after: Measurement, steps: int, reward_funcs: Sequence[str]) -> str:
    """One sentence that says what happened, from the numbers alone."""
    first, last = (sum(m.greedy.values()) / len(m.greedy) for m in (before, after))
    told = " and ".join(dotted.rpartition(".")[2] for dotted in reward_funcs)
    return (
        f"Before, {first:.1%} of the greedy answers were right; after {steps} steps that were told nothing but "
        f"{told}, {last:.1%} are (lowest of the lengths: {min(after.greedy.values()):.1%})."
    )


if __name__ == "__main__":
    try:
        main()
    except TRLError as error:
        report_error(error)
        sys.exit(2)
