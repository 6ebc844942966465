"""The scorer: what functions are called with, what they may return, and what happens when they break the contract."""

import asyncio
import functools
import gc
import math
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fixtures.tokenizers import word_tokenizer
from torch import nn
from transformers import LlamaConfig, LlamaForSequenceClassification

from trl.errors import ConfigError, RewardError
from trl.rewards.scorer import RewardScorer

PROMPTS = ["p0", "p1", "p2", "p3"]
COMPLETIONS = ["a", "bb", "ccc", "dddd"]
IDS = [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4]]


def score(scorer, columns=None, **options):
    return scorer.score(PROMPTS, COMPLETIONS, IDS, columns or {}, **options)


def returning(values, name="judge"):
    def function(**kwargs):
        return values

    function.__name__ = name
    return function


def returning_async(values, name="judge"):
    async def function(**kwargs):
        return values

    function.__name__ = name
    return function


def lengths(completions, **kwargs):
    return [len(completion) for completion in completions]


async def lengths_later(completions, **kwargs):
    await asyncio.sleep(0)
    return [10 * len(completion) for completion in completions]


class Judge:
    def __call__(self, completions, **kwargs):
        return [2.0] * len(completions)


class AsyncJudge:
    async def __call__(self, completions, **kwargs):
        return [3.0] * len(completions)


@pytest.fixture
def make():
    """Makes scorers and closes them."""
    made = []

    def make(*args, **options):
        made.append(RewardScorer(*args, **options))
        return made[-1]

    yield make
    for scorer in made:
        scorer.close()


# ---- arguments


def test_functions_are_called_with_everything_there_is(make):
    seen = {}

    def recorder(**kwargs):
        seen.update(kwargs)
        return [0.0] * 4

    records = [{"k": [1]}, None, {"k": None}, {}]
    log_extra, log_metric = (lambda column, values: None), (lambda name, value: None)
    score(make(recorder), {"solution": records}, trainer_state="state", log_extra=log_extra, log_metric=log_metric)
    assert seen == {
        "prompts": PROMPTS,
        "completions": COMPLETIONS,
        "completion_ids": IDS,
        "solution": records,
        "trainer_state": "state",
        "log_extra": log_extra,
        "log_metric": log_metric,
    }


def test_function_without_kwargs_gets_what_it_accepts(make):
    def narrow(completion_ids, answer, scale=2):
        return [scale * len(ids) + a for ids, a in zip(completion_ids, answer)]

    columns = {"answer": [0, 0, 0, 1], "other": [9] * 4}
    assert score(make(narrow), columns).tolist() == [[2], [4], [6], [9]]


def test_logging_without_a_trainer_is_discarded(make):
    def logger(completions, log_extra, log_metric):
        log_extra("column", completions)
        log_metric("name", 1.0)
        return [1.0] * len(completions)

    assert score(make(logger)).tolist() == [[1.0]] * 4


def test_a_keyword_bound_in_a_partial_is_kept(make):
    def scaled(completions, scale, **kwargs):
        return [scale * len(completion) for completion in completions]

    scorer = make(functools.partial(scaled, scale=3))
    assert score(scorer).tolist() == [[3], [6], [9], [12]]
    assert score(scorer, {"scale": [7] * 4}).tolist() == [[3], [6], [9], [12]]


def test_missing_column_is_named_before_anything_runs(make):
    def needy(completions, solution, level):
        raise AssertionError("called")

    scorer = make([lengths, needy])
    message = (
        r"`needy` needs columns `level`, `solution`, which the dataset lacks \(it has columns `answer`, `prompt`\)"
    )
    with pytest.raises(RewardError, match=message):
        scorer.check(["prompt", "answer"])
    with pytest.raises(RewardError, match=r"needs column `level`.*\(it has column `solution`\)"):
        score(scorer, {"solution": [0] * 4})
    scorer.check(["solution", "level"])


def test_column_that_hides_behind_an_argument_is_reported(make):
    with pytest.warns(UserWarning, match="dataset's column `completions`"):
        make(lengths).check(["completions", "solution"])


def test_columns_must_be_aligned(make):
    with pytest.raises(RewardError, match="column `solution` has 3 values for 4 completions"):
        score(make(lengths), {"solution": [1, 2, 3]})


# ---- values


@pytest.mark.parametrize(
    "values",
    [
        [1.0, 0, True, None],
        (1.0, 0, True, None),
        [torch.tensor(1.0), np.float64(0), np.bool_(True), float("nan")],
        [np.array(1.0), np.int64(0), torch.tensor(True), torch.tensor(float("nan"))],
        torch.tensor([1.0, 0.0, 1.0, float("nan")], dtype=torch.bfloat16, requires_grad=True),
        np.array([1.0, 0.0, 1.0, np.nan]),
        np.array([1, 0, True, None], dtype=object),
    ],
)
def test_numbers_of_all_kinds(make, values):
    rewards_NF = score(make(returning(values)))
    assert rewards_NF.dtype == torch.float32
    assert rewards_NF.shape == (4, 1)
    assert rewards_NF[:3, 0].tolist() == [1.0, 0.0, 1.0]
    assert rewards_NF[3].isnan().all()


@pytest.mark.parametrize("wrap", [returning, returning_async])
@pytest.mark.parametrize(
    ("values", "received"),
    [
        ([1.0], "1 value"),
        ([1.0, 2.0, 3.0], "3 values"),
        ([], "0 values"),
        (torch.ones(5), "5 values"),
        (None, r"None \(0 values\)"),
        (1.0, "a float instead of a list"),
        (torch.tensor(1.0), "a float instead of a list"),
        ("abcd", "a str instead of a list"),
    ],
)
def test_wrong_number_of_values(make, wrap, values, received):
    scorer = make([lengths, wrap(values, "odd_one")])
    with pytest.raises(ValueError, match=rf"`odd_one` returned {received} for 4 completions") as caught:
        score(scorer)
    assert isinstance(caught.value, RewardError)


@pytest.mark.parametrize("value", [math.inf, -math.inf, "1.0", 1e300, 10**400, [1.0], torch.ones(1), 1j])
def test_values_that_are_no_finite_numbers(make, value):
    with pytest.raises(RewardError, match=r"`judge` returned .* for completion 2 of 4: return a finite number"):
        score(make(returning([1.0, None, value, 0.0])))


def test_no_completions(make):
    assert make([lengths, lengths_later]).score([], [], [], {}).shape == (0, 2)


# ---- names and settings


def test_names(make):
    assert make([lengths, Judge(), AsyncJudge()]).names == ["lengths", "Judge", "AsyncJudge"]
    assert make(functools.partial(lengths_later, a=1)).names == ["lengths_later"]
    assert make(functools.partial(Judge(), a=1)).names == ["Judge"]
    assert make(Judge().__call__).names == ["__call__"]
    named = Judge()
    named.__name__ = "strict"
    assert make([named]).names == ["strict"]


def test_two_functions_never_share_a_name(make):
    functions = [returning([value] * 4, name) for value, name in [(1, "f"), (3, "f"), (5, "f_2"), (7, "f"), (9, "g")]]
    with pytest.warns(UserWarning, match="several rewards have the same name") as caught:
        scorer = make(functions)
    assert len(caught) == 1
    assert scorer.names == ["f", "f_3", "f_2", "f_4", "g"]
    assert score(scorer)[0].tolist() == [1, 3, 5, 7, 9]


def test_weights(make):
    assert make([lengths, Judge()]).weights.tolist() == [1.0, 1.0]
    scorer = make([lengths, Judge()], reward_weights=[0.5, 2])
    assert scorer.weights.tolist() == [0.5, 2.0]
    assert scorer.weights.dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reward_funcs": []}, "`reward_funcs` is empty"),
        ({"reward_funcs": None}, "`reward_funcs` is empty"),
        ({"reward_funcs": [lengths, 3]}, "`reward_funcs` holds 3"),
        ({"reward_funcs": lengths, "reward_weights": [1, 2]}, r"`reward_weights` .* 1 rewards \(got 2\)"),
        (
            {"reward_funcs": [lengths, Judge()], "reward_processing_classes": [None]},
            r"`reward_processing_classes` .* 2 rewards \(got 1\)",
        ),
    ],
)
def test_settings_that_cannot_work(options, message):
    with pytest.raises(ConfigError, match=message):
        RewardScorer(**options)


# ---- async functions


def test_async_and_sync_functions_fill_their_own_columns(make):
    scorer = make([lengths_later, lengths, AsyncJudge()])
    assert score(scorer).tolist() == [[10, 1, 3], [20, 2, 3], [30, 3, 3], [40, 4, 3]]
    assert score(make(functools.partial(AsyncJudge(), a=1))).tolist() == [[3.0]] * 4


def test_plain_function_around_an_async_one(make):
    assert score(make(lambda **kwargs: lengths_later(**kwargs))).tolist() == [[10], [20], [30], [40]]


def test_async_functions_run_concurrently(make):
    """Each waits for the other, which only ends when both run; the synchronous one runs meanwhile."""
    events = [threading.Event(), threading.Event()]

    def waiting(mine, other, name):
        async def function(completions, **kwargs):
            events[mine].set()
            while not events[other].is_set():
                await asyncio.sleep(0.001)
            return [1.0] * len(completions)

        function.__name__ = name
        return function

    def sync(completions, **kwargs):
        assert events[0].wait(10)
        assert events[1].wait(10)
        return [2.0] * len(completions)

    scorer = make([waiting(0, 1, "first"), sync, waiting(1, 0, "second")])
    assert score(scorer)[0].tolist() == [1.0, 2.0, 1.0]


def raiser(exc, name="raiser"):
    async def function(**kwargs):
        raise exc

    function.__name__ = name
    return function


def test_exceptions_surface_unchanged_and_the_scorer_lives_on(make):
    error = KeyError("boom")
    broken = [True]

    async def sometimes(completions, **kwargs):
        if broken:
            raise error
        return [1.0] * len(completions)

    scorer = make([sometimes, lengths_later])
    with pytest.raises(KeyError) as caught:
        score(scorer)
    assert caught.value is error
    assert caught.value.args == ("boom",)
    assert caught.value.__notes__ == ["raised by reward function `sometimes`"]
    broken.clear()
    assert score(scorer)[0].tolist() == [1.0, 10.0]


def test_exception_of_a_synchronous_function_is_unchanged_too(make):
    def broken(**kwargs):
        raise KeyError("boom")

    scorer = make([lengths_later, broken])
    with pytest.raises(KeyError) as caught:
        score(scorer)
    assert caught.value.args == ("boom",)
    assert caught.value.__notes__ == ["raised by reward function `broken`"]


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_exceptions_that_end_a_loop_do_not_hang_the_caller(make, kind):
    scorer = make([raiser(kind("stop")), lengths_later])
    with pytest.raises(kind, match="stop"):
        score(scorer)
    with pytest.raises(kind, match="stop"):  # the loop still answers
        score(scorer)


def test_an_error_cancels_the_functions_that_still_run(make):
    cancelled = threading.Event()

    async def endless(**kwargs):
        try:
            await asyncio.sleep(3600)
        finally:
            cancelled.set()

    def broken(**kwargs):
        assert started.wait(10)
        raise ValueError("now")

    started = threading.Event()

    async def starter(**kwargs):
        started.set()
        await endless()

    scorer = make([starter, broken])
    with pytest.raises(ValueError, match="now"):
        score(scorer)
    assert cancelled.wait(10)


def test_works_inside_a_running_loop(make):
    async def caller():
        return score(make([lengths_later, lengths]))

    assert asyncio.run(caller())[:, 0].tolist() == [10, 20, 30, 40]


def reward_threads():
    return [thread for thread in threading.enumerate() if thread.name == "async-rewards"]


def test_thread_starts_on_need_and_ends_on_close(make):
    scorer = make([lengths, lengths_later])
    assert reward_threads() == []
    score(scorer)
    score(scorer)
    (thread,) = reward_threads()
    assert thread.daemon
    scorer.close()
    assert not thread.is_alive()
    assert score(scorer)[0].tolist() == [1.0, 10.0]  # a closed scorer starts again
    scorer.close()
    scorer.close()
    assert reward_threads() == []


def test_dropped_scorer_leaves_no_thread():
    scorer = RewardScorer(lengths_later)
    score(scorer)
    (thread,) = reward_threads()
    del scorer
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_process_exits_while_a_function_hangs():
    code = """
import asyncio, threading
from trl.rewards.scorer import RewardScorer
started = threading.Event()
async def hangs(**kwargs):
    started.set()
    await asyncio.sleep(3600)
scorer = RewardScorer(hangs)
threading.Thread(target=lambda: scorer.score(["p"], ["c"], [[1]], {}), daemon=True).start()
started.wait()
print("leaving")
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "leaving\n", "")


# ---- reward models


class Sum(nn.Module):
    """A reward model whose reward can be read off: the sum of the ids that are not masked."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.seen = []

    def forward(self, input_ids, attention_mask):
        self.seen.append(
            (input_ids.tolist(), attention_mask.tolist(), self.training, torch.is_inference_mode_enabled())
        )
        total = (input_ids * attention_mask).sum(1).float() * self.scale
        return SimpleNamespace(logits=torch.stack([total, total + 1000], dim=1))


def classifier(path=None, tokenizer=None, **options):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_labels=1,
        pad_token_id=None,
        **options,
    )
    model = LlamaForSequenceClassification(config)
    nn.init.normal_(model.score.weight)
    if path is not None:
        model.save_pretrained(path)
        (tokenizer or word_tokenizer()).save_pretrained(path)
    return model


def alone(model, ids):
    """The first logit for one unpadded row."""
    model.eval()
    with torch.no_grad():
        hidden = model.model(torch.tensor([ids])).last_hidden_state
        return model.score(hidden)[0, -1, 0].item()


def test_module_sees_right_padded_text_without_special_tokens(make):
    module = Sum().train()
    scorer = make(module, reward_processing_classes=word_tokenizer(add_bos=True))
    rewards_NF = scorer.score(["w10", "w20 "], [" w11 w12", "w21"], [[11, 12], [21]], {})
    assert rewards_NF.tolist() == [[33.0], [41.0]]
    assert module.seen == [([[20, 21, 0], [10, 11, 12]], [[1, 1, 0], [1, 1, 1]], False, True)]
    assert not rewards_NF.is_inference()
    assert scorer.names == ["Sum"]


def test_conversations_go_through_the_template_without_filled_fields(make):
    module = Sum()
    tokenizer = word_tokenizer(
        chat_template="{% for m in messages %}<open> {{ m['content'] }}"
        "{% if 'name' in m['extra'] %} w9{% endif %} <close> {% endfor %}"
    )
    prompt = [{"role": "user", "content": "w10", "extra": {"name": name}} for name in (None, "x")]
    completion = [{"role": "assistant", "content": "w11", "extra": {}}]
    make(module, reward_processing_classes=[tokenizer]).score([prompt], [completion], [[11]], {})
    assert module.seen[0][0] == [[4, 10, 5, 4, 10, 9, 5, 4, 11, 5]]


def test_conversation_without_a_template_is_refused(make):
    scorer = make(Sum(), reward_processing_classes=word_tokenizer(chat_template=None))
    message = [{"role": "user", "content": "w10"}]
    with pytest.raises(ConfigError, match="`Sum` has no chat template"):
        scorer.score([message], [message], [[1]], {})


def test_order_of_rows_survives_grouping_by_length(make):
    module = Sum()
    scorer = make(module, reward_processing_classes=word_tokenizer())
    counts = [(7 * row) % 40 for row in range(70)]  # 0 … 39, shuffled; an empty text too
    completions = [" ".join(["w10"] * count) for count in counts]
    rewards_NF = scorer.score([""] * 70, completions, [[]] * 70, {})
    assert rewards_NF[:, 0].tolist() == [10.0 * count for count in counts]
    assert [len(ids) for ids, *_ in module.seen] == [32, 32, 6]


@pytest.mark.parametrize("pad", ["own", "none"])
def test_model_by_path(make, tmp_path, pad):
    path = tmp_path / "tiny-reward"
    model = classifier(path, word_tokenizer(pad=pad))
    scorer = make([f"{path}/", lengths], model_init_kwargs={"dtype": "float32"})
    assert scorer.names == ["tiny-reward", "lengths"]
    (loaded,) = scorer.modules
    assert isinstance(loaded, LlamaForSequenceClassification)
    assert loaded.config.pad_token_id == {"own": 0, "none": 1}[pad]
    rewards_NF = scorer.score(["w10", "w20", "w30"], [" w11 w12", " w21", " w31 w32 w33"], [[0]] * 3, {})
    expected = [alone(model, ids) for ids in ([10, 11, 12], [20, 21], [30, 31, 32, 33])]
    assert rewards_NF[:, 0].tolist() == pytest.approx(expected, abs=1e-6)
    assert len({round(value, 4) for value in expected}) == 3


def test_pretrained_model_brings_its_tokenizer(make, tmp_path):
    path = tmp_path / "judge-model"
    classifier(path)
    model = LlamaForSequenceClassification.from_pretrained(path)
    scorer = make([model])
    assert scorer.names == ["judge-model"]
    assert scorer.modules == [model]
    reward = scorer.score(["w10"], [" w11"], [[11]], {}).item()
    assert reward == pytest.approx(alone(model, [10, 11]), abs=1e-6)


def test_module_without_a_tokenizer_is_refused():
    with pytest.raises(ConfigError, match="`Sum` does not say which tokenizer it needs"):
        RewardScorer([lengths, Sum()])


def test_tokenizer_without_pad_and_eos_is_refused():
    tokenizer = word_tokenizer(pad="none")
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="neither a pad nor an EOS token"):
        RewardScorer(Sum(), reward_processing_classes=tokenizer)


def test_not_a_number_of_a_model_is_not_scorable_and_infinity_is_an_error(make):
    module = Sum()
    scorer = make(module, reward_processing_classes=word_tokenizer())
    with torch.no_grad():
        module.scale.fill_(math.nan)
    assert scorer.score(["w10"], [" w11"], [[11]], {}).isnan().all()
    with torch.no_grad():
        module.scale.fill_(math.inf)
    with pytest.raises(RewardError, match="`Sum` returned inf for completion 0 of 1"):
        scorer.score(["w10"], [" w11"], [[11]], {})


def test_modules_can_be_placed(make):
    module = Sum()
    scorer = make([lengths, module], reward_processing_classes=[None, word_tokenizer()])
    assert scorer.modules == [module]
    wrapped = nn.ModuleList([module])
    scorer.replace_modules(lambda inner: wrapped)
    assert scorer.modules == [wrapped]
    assert scorer.to("meta") is scorer
    assert module.scale.device.type == scorer.weights.device.type == scorer.device.type == "meta"
