"""Mathematical correctness: what counts as right, wrong, and not gradable."""

import logging
import pickle
import subprocess
import sys
import threading

import pytest

import trl._deps
from trl.errors import MissingDependencyError
from trl.rewards import accuracy_reward, reasoning_accuracy_reward

pytest.importorskip("math_verify")

HALF = r"$\frac{1}{2}$"


def said(*texts):
    return [[{"role": "assistant", "content": text}] for text in texts]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (r"so it is \boxed{\frac{1}{2}}", 1.0),
        (r"\boxed{0.5}", 1.0),
        (r"The final answer is $\frac{1}{2}$. I hope it is correct.", 1.0),
        (r"\boxed{\frac{1}{2}\text{ cm}}", 1.0),
        (r"\boxed{\frac{1}{3}}", 0.0),
        (r"$x=\frac{1}{2}$", 0.0),  # LaTeX, but nothing says that it is the answer
        ("1/2", 0.0),  # no LaTeX
        ("", 0.0),
    ],
)
def test_answers_against_one_half(answer, expected):
    assert accuracy_reward(said(answer), [HALF]) == [expected]


def test_boxed_answer_is_tried_before_a_phrase():
    text = r"\boxed{4} The answer is $3$."
    assert accuracy_reward(said(text, text), ["4", "3"]) == [1.0, 0.0]


@pytest.mark.parametrize("gold", ["no number here", "", None])
def test_gold_without_an_answer_is_not_scored(gold):
    assert accuracy_reward(said(r"\boxed{1}", r"\boxed{1}"), [gold, "1"]) == [None, 1.0]


def test_gold_may_be_a_number():
    assert accuracy_reward(said(r"\boxed{42}", r"\boxed{41}"), [42, 42]) == [1.0, 0.0]


def test_log_columns_are_aligned_with_the_completions():
    columns = {}
    accuracy_reward(
        said(r"\boxed{1}", "no idea", r"\boxed{1}"),
        ["1", "2", "none"],
        log_extra=columns.__setitem__,
        prompts=["p"] * 3,
    )
    assert columns == {
        "solution": ["1", "2", "none"],
        "gold_parsed": ["1", "2", "[unparseable]"],
        "answer_parsed": ["1", "[unparseable]", "[skipped]"],
    }


def test_huge_numbers_are_logged_without_being_evaluated():
    columns = {}
    assert accuracy_reward(said(r"\boxed{10^{5000}}"), ["1"], log_extra=columns.__setitem__) == [0.0]
    assert columns["answer_parsed"] == ["10^{5000}"]


def test_texts_content_blocks_and_missing_content_are_read():
    blocks = [
        [{"role": "assistant", "content": [{"type": "text", "text": r"\boxed"}, {"type": "text", "text": "{1}"}]}]
    ]
    call = [[{"role": "assistant", "content": None, "tool_calls": []}]]
    assert accuracy_reward([r"\boxed{1}", *blocks, *call], ["1"] * 3) == [1.0, 1.0, 0.0]


def test_only_the_first_message_is_read():
    completion = [{"role": "assistant", "content": "hm"}, {"role": "assistant", "content": r"\boxed{1}"}]
    assert accuracy_reward([completion], ["1"]) == [0.0]


def test_works_in_a_thread_without_a_warning(caplog):
    results = []
    thread = threading.Thread(
        target=lambda: results.extend(accuracy_reward(said(r"\boxed{1}", r"\boxed{2}"), ["1", "1"]))
    )
    with caplog.at_level(logging.WARNING):
        thread.start()
        thread.join()
    assert results == [1.0, 0.0]
    assert caplog.records == []


def test_time_limits_hold_in_the_main_thread_only(monkeypatch):
    import math_verify

    limits = []
    parse, verify = math_verify.parse, math_verify.verify
    monkeypatch.setattr(math_verify, "parse", lambda *a, **kw: limits.append(kw["parsing_timeout"]) or parse(*a, **kw))
    monkeypatch.setattr(
        math_verify, "verify", lambda *a, **kw: limits.append(kw["timeout_seconds"]) or verify(*a, **kw)
    )
    accuracy_reward(said(r"\boxed{1}"), ["1"])
    assert limits == [10, 10, 5]
    limits.clear()
    thread = threading.Thread(target=accuracy_reward, args=(said(r"\boxed{1}"), ["1"]))
    thread.start()
    thread.join()
    assert limits == [None, None, None]


def test_a_shared_solution_is_parsed_once(monkeypatch):
    import math_verify

    texts, parse = [], math_verify.parse
    monkeypatch.setattr(math_verify, "parse", lambda text, **kw: texts.append(text) or parse(text, **kw))
    assert accuracy_reward(said("a", "b", "c"), ["7", "7", "7"]) == [0.0, 0.0, 0.0]
    assert texts.count("7") == 1


def test_reasoning_is_not_graded():
    completions = said(r"<think>\boxed{1}</think>\boxed{2}", r"<think>\boxed{2}</think>\boxed{1}")
    assert reasoning_accuracy_reward(completions, ["2", "2"]) == [1.0, 0.0]


def test_text_after_the_last_occurrence_is_graded():
    assert reasoning_accuracy_reward(said(r"</think>\boxed{2}</think>\boxed{1}"), ["1"]) == [1.0]


def test_first_delimiter_present_is_used():
    text = r"<a> \boxed{1} <b> \boxed{2} <a> \boxed{3}"
    grade = lambda delimiters, gold: reasoning_accuracy_reward(said(text), [gold], reasoning_delimiters=delimiters)  # noqa: E731
    assert grade(["<missing>", "<a>", "<b>"], "3") == [1.0]
    assert grade(["<b>", "<a>"], "3") == [0.0]  # what follows <b> holds 2 and 3


def test_incomplete_reasoning_is_wrong_even_without_a_gold_answer():
    columns = {}
    rewards = reasoning_accuracy_reward(
        said(r"\boxed{1}", r"\boxed{1}", r"</think>\boxed{1}"), ["1", "none", "none"], log_extra=columns.__setitem__
    )
    assert rewards == [0.0, 0.0, None]
    assert columns["answer_parsed"] == ["[incomplete reasoning]", "[incomplete reasoning]", "[skipped]"]
    assert columns["gold_parsed"] == ["1", "[unparseable]", "[unparseable]"]


@pytest.mark.parametrize("function", [accuracy_reward, reasoning_accuracy_reward])
def test_missing_package_is_named_when_called(monkeypatch, function):
    monkeypatch.setattr(trl._deps, "available", lambda module: False)
    with pytest.raises(MissingDependencyError, match=rf"`{function.__name__}` needs the package `math-verify`"):
        function(said("1"), ["1"])


def test_functions_are_picklable():
    assert pickle.loads(pickle.dumps(accuracy_reward)) is accuracy_reward


def test_import_is_light():
    code = (
        "import sys, trl.rewards; from trl.rewards import accuracy_reward, get_cosine_scaled_reward, loading; "
        "print([m for m in ('torch', 'transformers', 'math_verify', 'sympy') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_package_lists_its_six_functions():
    import trl.rewards

    assert {name for name in dir(trl.rewards) if name.endswith(("_reward", "_punishment"))} == set(trl.rewards.__all__)
    assert all(callable(getattr(trl.rewards, name)) for name in trl.rewards.__all__)
    with pytest.raises(AttributeError, match="nonsense"):
        trl.rewards.nonsense  # noqa: B018
