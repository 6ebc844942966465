"""The quickstart: its task is fair, its base model knows only what the docs say it knows, and the main job works."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from fixtures.scripts import load_script

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = ROOT / "examples" / "quickstart"


@pytest.fixture(scope="module")
def task() -> ModuleType:
    return load_script(QUICKSTART / "task.py")


def say(*answers: str) -> list[list[dict[str, str]]]:
    return [[{"role": "assistant", "content": answer}] for answer in answers]


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("a b c d", 1.0),
        ("d c b a", 0.0),
        ("a c b d", 5 / 6),  # one of six pairs is out of order
        ("b c d a", 3 / 6),
        ("a b c", 0.0),  # a letter is missing
        ("a b c d d", 0.0),  # a letter is too many
        ("a b c e", 0.0),  # a letter is another one
        ("sort a b c d", 0.0),
        ("", 0.0),
    ],
)
def test_order_reward_is_the_share_of_pairs_in_order(task: ModuleType, answer: str, reward: float) -> None:
    assert task.order_reward(say(answer), ["a b c d"], prompts=None) == [pytest.approx(reward)]


def test_order_reward_follows_the_solution_not_the_alphabet(task: ModuleType) -> None:
    assert task.order_reward(say("c b a", "a b c"), ["c b a", "c b a"]) == [1.0, 0.0]


def test_exact_reward(task: ModuleType) -> None:
    assert task.exact_reward(say("a b c", "a c b", ""), ["a b c"] * 3, prompts=None) == [1.0, 0.0, 0.0]


def test_random_reward_tells_nothing(task: ModuleType) -> None:
    rewards = task.random_reward(say(*["a b c"] * 50), solution=["a b c"] * 50)
    assert len(set(rewards)) == 50
    assert all(0 <= reward < 1 for reward in rewards)


def letters_of(row: dict) -> list[str]:
    return row["prompt"][0]["content"].split()[1:]


@pytest.mark.parametrize("seed", [0, 1, 2025])
def test_no_held_out_set_of_letters_is_ever_trained_on(task: ModuleType, seed: int) -> None:
    trained = {frozenset(letters_of(row)) for row in task.sorting_dataset("train", seed=seed)}
    held_out = {frozenset(letters_of(row)) for row in task.sorting_dataset("test", seed=seed)}
    assert not trained & held_out
    assert not any(task.is_held_out(letters) for letters in trained)
    assert all(task.is_held_out(letters) for letters in held_out)


@pytest.mark.parametrize(
    ("split", "rows", "lengths"), [("train", 6400, {4, 5, 6, 7}), ("test", 1200, set(range(3, 9)))]
)
def test_rows(task: ModuleType, split: str, rows: int, lengths: set[int]) -> None:
    dataset = task.sorting_dataset(split)
    asked = [letters_of(row) for row in dataset]
    assert len({tuple(letters) for letters in asked}) == rows
    assert all(len(set(letters)) == len(letters) for letters in asked)
    assert {length: sum(len(letters) == length for letters in asked) for length in lengths} == dict.fromkeys(
        lengths, rows // len(lengths)
    )
    assert [row["solution"].split() for row in dataset] == [sorted(letters) for letters in asked]


def test_descending_asks_the_same_and_wants_the_reverse(task: ModuleType) -> None:
    ascending, descending = task.sorting_dataset("test", rows=60), task.descending_dataset("test", rows=60)
    assert ascending["prompt"][:] == descending["prompt"][:]
    assert [key.split()[::-1] for key in ascending["solution"]] == [key.split() for key in descending["solution"]]


def test_yaml_task_and_reward_are_under_a_hundred_lines() -> None:
    assert sum(len((QUICKSTART / name).read_text().splitlines()) for name in ("sort.yaml", "task.py")) < 100


@pytest.mark.parametrize("do_sample", [False, True])
def test_the_base_model_answers_with_the_letters_it_was_given_and_does_not_sort(
    task: ModuleType, do_sample: bool
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART / "base")
    model = AutoModelForCausalLM.from_pretrained(QUICKSTART / "base")
    rows = task.sorting_dataset("test", seed=11, rows=600).filter(lambda row: len(row["solution"].split()) == 6)
    ids = tokenizer.apply_chat_template(
        rows["prompt"][:], add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    written = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=do_sample, max_new_tokens=10)
    answers = tokenizer.batch_decode(written[:, ids.shape[1] :], skip_special_tokens=True)
    permutations = sum(sorted(a.split()) == key.split() for a, key in zip(answers, rows["solution"]))
    assert permutations >= 97
    assert sum(task.exact_reward(say(*answers), rows["solution"])) <= 5


def run_quickstart(output_dir: Path, *options: str) -> dict[str, dict]:
    command = [sys.executable, str(QUICKSTART / "run.py"), "--output_dir", str(output_dir), *options]
    finished = subprocess.run(command, cwd=ROOT, env=os.environ | {"COLUMNS": "120"}, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert "held-out exact match" in finished.stdout
    assert (output_dir / "reward_curve.png").stat().st_size > 10_000
    return json.loads((output_dir / "accuracy.json").read_text())


@pytest.mark.slow
def test_the_reward_teaches_to_sort(tmp_path: Path) -> None:
    accuracy = run_quickstart(tmp_path)
    assert max(accuracy["before"]["greedy"][length] for length in "5678") <= 0.05
    assert min(accuracy["after"]["greedy"].values()) >= 0.95


@pytest.mark.slow
def test_a_random_reward_teaches_nothing(tmp_path: Path) -> None:
    accuracy = run_quickstart(tmp_path, "--control")
    assert max(accuracy["after"]["greedy"][length] for length in "5678") <= 0.05
