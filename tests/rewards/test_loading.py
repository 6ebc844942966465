"""Reward functions by name."""

import subprocess
import sys

import pytest

from trl import rewards
from trl.errors import ConfigError
from trl.rewards.loading import load_reward_function


@pytest.fixture
def in_folder(tmp_path, monkeypatch):
    """A working directory with modules of the user's, forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("my_"):
            del sys.modules[name]


@pytest.mark.parametrize("name", ["accuracy_reward", "reasoning_accuracy_reward", "think_format_reward"])
def test_known_names(name):
    assert load_reward_function(name) is getattr(rewards, name)


def test_soft_overlong_punishment_is_bound():
    function = load_reward_function("get_soft_overlong_punishment")
    assert function == rewards.get_soft_overlong_punishment(1280, 256)
    assert function(completion_ids=[[0] * 1024, [0] * 1152, [0] * 1281]) == [0.0, -0.5, -1.0]


def test_dotted_path_in_the_working_directory(in_folder):
    (in_folder / "my_package").mkdir()
    (in_folder / "my_package" / "judges.py").write_text("def judge(completions, **kwargs):\n    return [3.0]\n")
    function = load_reward_function("my_package.judges.judge")
    assert function.__name__ == "judge"
    assert function(completions=["a"]) == [3.0]


def test_function_may_import_its_neighbours_when_called(in_folder):
    (in_folder / "my_lazy.py").write_text(
        "def judge(**kwargs):\n    import my_neighbour\n    return my_neighbour.VALUES\n"
    )
    function = load_reward_function("my_lazy.judge")
    (in_folder / "my_neighbour.py").write_text("VALUES = [1.0]\n")
    assert function() == [1.0]


def test_installed_module_and_lazy_attribute():
    assert load_reward_function("trl.rewards.think_format_reward") is rewards.think_format_reward


def test_callable_object(in_folder):
    (in_folder / "my_objects.py").write_text(
        "class Judge:\n    def __call__(self, **kw):\n        return [1.0]\njudge = Judge()\n"
    )
    assert load_reward_function("my_objects.judge")() == [1.0]


@pytest.mark.parametrize("spec", ["acuracy_reward", "", ".judge", "module.", "a b.c", "..x.f"])
def test_unknown_names_list_what_can_be_given(spec):
    with pytest.raises(ConfigError, match=r"give one of accuracy_reward, .* or a dotted path `module\.function`"):
        load_reward_function(spec)


def test_misspelt_name_gets_a_suggestion():
    with pytest.raises(ConfigError, match="did you mean accuracy_reward"):
        load_reward_function("acuracy_reward")


def test_missing_module(in_folder):
    with pytest.raises(
        ConfigError, match=r"`my_missing` does not import \(ModuleNotFoundError: No module named 'my_missing'\)"
    ):
        load_reward_function("my_missing.judge")


@pytest.mark.parametrize(("body", "reason"), [("1 / 0", "ZeroDivisionError: division by zero"), ("def", "SyntaxError")])
def test_broken_module_says_why(in_folder, body, reason):
    (in_folder / "my_broken.py").write_text(body + "\n")
    with pytest.raises(ConfigError, match=rf"`my_broken` does not import \({reason}") as caught:
        load_reward_function("my_broken.judge")
    assert caught.value.__cause__ is not None


def test_missing_attribute_gets_a_suggestion(in_folder):
    (in_folder / "my_typo.py").write_text("def length_reward(): ...\n")
    with pytest.raises(ConfigError, match=r"`my_typo` has no `lenght_reward` \(did you mean length_reward"):
        load_reward_function("my_typo.lenght_reward")


@pytest.mark.parametrize(("name", "what"), [("VALUE", "a value of type int"), ("Judge", "the class Judge")])
def test_things_that_are_no_functions(in_folder, name, what):
    (in_folder / "my_things.py").write_text("VALUE = 3\nclass Judge: ...\n")
    with pytest.raises(ConfigError, match=f"`?my_things.{name}'? is not callable with completions: it is {what}"):
        load_reward_function(f"my_things.{name}")


def test_loading_is_light():
    code = (
        "import sys; from trl.rewards.loading import load_reward_function as load; load('accuracy_reward'); "
        "load('get_soft_overlong_punishment'); print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
