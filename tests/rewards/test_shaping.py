"""Length and repetition, with values from the formulas."""

import pickle

import pytest

import trl._deps
from trl.errors import ConfigError, MissingDependencyError
from trl.rewards import get_cosine_scaled_reward, get_repetition_penalty_reward, get_soft_overlong_punishment


def ids(*lengths):
    return [[1] * length for length in lengths]


@pytest.fixture
def one_answer():
    pytest.importorskip("math_verify")
    return lambda answer, count: [[{"role": "assistant", "content": answer}]] * count


def test_cosine_of_right_answers_falls_with_length(one_answer):
    reward = get_cosine_scaled_reward(100)
    got = reward(one_answer(r"\boxed{1}", 4), ["1"] * 4, ids(0, 50, 100, 300), prompts=None)
    assert got == pytest.approx([1.0, 0.75, 0.5, 0.5])


def test_cosine_of_wrong_answers_rises_with_length(one_answer):
    reward = get_cosine_scaled_reward(max_len=100)
    got = reward(completions=one_answer(r"\boxed{2}", 4), solution=["1"] * 4, completion_ids=ids(0, 50, 100, 300))
    assert got == pytest.approx([-1.0, -0.75, -0.5, -0.5])


def test_cosine_at_a_third_uses_the_given_values(one_answer):
    reward = get_cosine_scaled_reward(
        3, min_value_wrong=-2, max_value_wrong=0, min_value_correct=1, max_value_correct=5
    )
    # cos(π/3) = ½: a quarter of the way from the value at length 0
    assert reward(one_answer(r"\boxed{1}", 2), ["1", "2"], ids(1, 1)) == pytest.approx([4.0, -1.5])


def test_cosine_does_not_score_without_a_gold_answer(one_answer):
    assert get_cosine_scaled_reward(10)(one_answer(r"\boxed{1}", 1), ["none"], ids(5)) == [None]


def test_cosine_needs_math_verify_when_called(monkeypatch):
    reward = get_cosine_scaled_reward(10)
    monkeypatch.setattr(trl._deps, "available", lambda module: False)
    with pytest.raises(MissingDependencyError, match="`get_cosine_scaled_reward` needs the package `math-verify`"):
        reward(["1"], ["1"], ids(1))


@pytest.mark.parametrize(
    ("ngram_size", "completion", "expected"),
    [
        (2, [5, 5, 5, 5, 5], -0.75),  # 4 bigrams, 1 distinct
        (1, [1, 2, 1, 2], -0.5),
        (3, [1, 2, 3, 1, 2, 3], -0.25),  # 123 231 312 123
        (2, [1, 2, 3], 0.0),
        (3, [1, 1], 0.0),
        (3, [1, 1, 1], 0.0),
        (3, [], 0.0),
    ],
)
def test_repetition_penalty(ngram_size, completion, expected):
    assert get_repetition_penalty_reward(ngram_size)(completion_ids=[completion], prompts=None) == [expected]


def test_repetition_penalty_is_scaled_and_defaults_to_trigrams():
    assert get_repetition_penalty_reward(max_penalty=-2.0)([[7] * 6, [7, 7]]) == [-1.5, 0.0]


def test_soft_overlong_punishment_by_length():
    reward = get_soft_overlong_punishment(100, 20)
    assert reward(completion_ids=ids(0, 80, 85, 90, 100, 101, 500), prompts=None) == [0, 0, -0.25, -0.5, -1, -1, -1]


def test_soft_overlong_punishment_without_a_soft_part():
    assert get_soft_overlong_punishment(10, 0)(ids(10, 11)) == [0.0, -1.0]


@pytest.mark.parametrize(
    ("reward", "name"),
    [
        (get_cosine_scaled_reward(7), "cosine_scaled_reward"),
        (get_repetition_penalty_reward(), "repetition_penalty_reward"),
        (get_soft_overlong_punishment(4, 2), "soft_overlong_punishment_reward"),
    ],
)
def test_factories_return_named_picklable_callables(reward, name):
    copy = pickle.loads(pickle.dumps(reward))
    assert copy == reward
    assert copy.__name__ == reward.__name__ == name


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: get_cosine_scaled_reward(0), r"`max_len` must be positive \(got 0\)"),
        (lambda: get_repetition_penalty_reward(3, 0.5), r"`max_penalty` must not be positive \(got 0.5\)"),
        (lambda: get_repetition_penalty_reward(0), r"`ngram_size` must be at least 1 \(got 0\)"),
        (lambda: get_soft_overlong_punishment(10, 20), r"`soft_punish_cache` .*\(got 20 and 10\)"),
        (lambda: get_soft_overlong_punishment(10, -1), r"`soft_punish_cache` .*\(got -1 and 10\)"),
    ],
)
def test_settings_that_cannot_work(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
