"""The task of the quickstart: put letters in order. Prompts, their solutions, and the rewards."""

import hashlib
import random
import string
from collections.abc import Iterable

from datasets import Dataset

TRAIN_LENGTHS = range(4, 8)
TEST_LENGTHS = range(3, 9)  # 3 and 8 are never trained on


def is_held_out(letters: Iterable[str]) -> bool:
    """Whether this *set* of letters, in whatever order, is kept for measuring: one set in eight."""
    return hashlib.sha256("".join(sorted(letters)).encode()).digest()[0] % 8 == 0


def draw(rng: random.Random, length: int, split: str) -> list[str]:
    """`length` distinct letters in random order, from the sets that belong to `split` ("train" or "test")."""
    while True:
        letters = rng.sample(string.ascii_lowercase, length)
        if is_held_out(letters) == (split == "test"):
            return letters


def sorting_dataset(split: str, *, seed: int = 0, rows: int | None = None, descending: bool = False) -> Dataset:
    """Rows `prompt` (conversational) and `solution` (the letters in order), lengths mixed, no prompt twice."""
    rng = random.Random(f"{split} {seed}")
    lengths = TRAIN_LENGTHS if split == "train" else TEST_LENGTHS
    prompts: dict[str, str] = {}
    while len(prompts) < (rows or {"train": 6400, "test": 1200}[split]):
        letters = draw(rng, lengths[len(prompts) % len(lengths)], split)
        prompts["sort " + " ".join(letters)] = " ".join(sorted(letters, reverse=descending))
    return Dataset.from_list(
        [{"prompt": [{"role": "user", "content": text}], "solution": prompts[text]} for text in prompts]
    )


def descending_dataset(split: str, **kwargs: int) -> Dataset:
    """The same prompts, z first: the model can learn from the reward alone that this is what is wanted."""
    return sorting_dataset(split, descending=True, **kwargs)


def order_reward(completions: list[list[dict[str, str]]], solution: list[str], **kwargs: object) -> list[float]:
    """Share of letter pairs in the order of the solution, in [0, 1]; 0 unless the answer has exactly its letters."""
    return [share_in_order(turns[0]["content"].split(), key.split()) for turns, key in zip(completions, solution)]


def share_in_order(answer: list[str], key: list[str]) -> float:
    """Share of the pairs of letters of `answer` that stand in the order of `key`; 0 if it is no permutation of it."""
    if sorted(answer) != sorted(key):
        return 0.0
    ranks = [key.index(letter) for letter in answer]
    pairs = [first < second for i, first in enumerate(ranks) for second in ranks[i + 1 :]]
    return sum(pairs) / len(pairs)


def exact_reward(completions: list[list[dict[str, str]]], solution: list[str], **kwargs: object) -> list[float]:
    """1.0 where the answer is the solution, else 0.0."""
    return [float(turns[0]["content"].split() == key.split()) for turns, key in zip(completions, solution)]


def random_reward(completions: list[list[dict[str, str]]], **kwargs: object) -> list[float]:
    """Noise in [0, 1), for the control: a run that is told nothing should learn nothing."""
    return [random.random() for _ in completions]
