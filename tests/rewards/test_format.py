"""The form of a completion: one closed block of thought at the start."""

import pytest

from trl.rewards import think_format_reward
from trl.rewards.format import completion_text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>a</think>b", 1.0),
        ("<think></think>", 1.0),
        ("<think>\na\n\n</think>\nb\n", 1.0),
        ("<think>a</think>b</think>", 1.0),
        ("<think>a", 0.0),
        ("a</think>b", 0.0),
        (" <think>a</think>b", 0.0),
        ("<think>a<think>b</think>c", 0.0),
        ("<think>a</think>b\n<think>", 0.0),
        ("</think><think>", 0.0),
        ("<Think>a</Think>", 0.0),
        ("", 0.0),
    ],
)
def test_think_format(text, expected):
    assert think_format_reward([[{"role": "assistant", "content": text}]], completion_ids=[[1]]) == [expected]
    assert think_format_reward([text]) == [expected]


def test_one_reward_a_completion_in_order():
    assert think_format_reward(["<think>a</think>", "b", "<think>c</think>"]) == [1.0, 0.0, 1.0]
    assert think_format_reward([]) == []


@pytest.mark.parametrize(
    ("completion", "text"),
    [
        ("plain", "plain"),
        ([{"role": "assistant", "content": "first"}, {"role": "tool", "content": "second"}], "first"),
        ([{"role": "assistant", "content": None}], ""),
        ([{"role": "assistant", "tool_calls": []}], ""),
        (
            [
                {
                    "role": "assistant",
                    "content": [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}],
                }
            ],
            "ab",
        ),
    ],
)
def test_completion_text(completion, text):
    assert completion_text(completion) == text
