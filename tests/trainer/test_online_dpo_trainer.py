"""`OnlineDPOTrainer`: what it accepts, which models it scores with, what it asks for, logs and keeps."""

import inspect
import math
import socket

import pyarrow.parquet
import pytest
import torch
from fixtures.engines import ScriptedEngine
from fixtures.models import random_model, table_model
from fixtures.online_methods import METHODS, plain_logps, quick_collections, same_weights, timeless, variety, weights_of
from fixtures.runs import Recorder, by_length, logs, prompts
from fixtures.tokenizers import word_tokenizer
from fixtures.vllm_stub import running_stub
from transformers import LlamaConfig, LlamaForSequenceClassification

from trl.errors import ConfigError
from trl.trainer.online_dpo_config import OnlineDPOConfig
from trl.trainer.online_dpo_trainer import OnlineDPOTrainer

_quick = pytest.fixture(scope="module", autouse=True)(quick_collections)

ONLINE_DPO = METHODS["online-dpo"]
LN2 = math.log(2)
PROMPTS = prompts("w10", "w20 w10", "w30", "w40")
# Last id of a prompt -> its two completions. That of 41, 42 and 43 has no end.
SCRIPT = {10: [[11, 12, 1], [13, 1]], 40: [[41, 42, 43], [44, 1]]}


def script(prompt, index):
    """Of other prompts: the last id and one, and 20 21."""
    return SCRIPT.get(prompt[-1], [[prompt[-1] + 1, 1], [20, 21, 1]])[index % 2]


def make(folder, dataset=PROMPTS, model=None, reward_funcs=by_length, engine=True, **changes):
    """A trainer; `changes` are arguments of the trainer or options of the config."""
    own = inspect.signature(OnlineDPOTrainer).parameters
    options = {name: changes.pop(name) for name in list(changes) if name in own}
    args = ONLINE_DPO.make_config(folder, **changes)
    trainer = ONLINE_DPO.make(args, dataset, model, reward_funcs=reward_funcs, **options)
    if engine:
        trainer.engine = ScriptedEngine(script)
    return trainer


def train(*args, **changes):
    trainer = make(*args, **changes)
    trainer.train()
    return trainer


# ---- the constructor ----


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder `tiny` with model and tokenizer, below the current directory."""
    random_model().save_pretrained(tmp_path / "tiny")
    word_tokenizer().save_pretrained(tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    return "tiny"


def test_a_model_and_a_reward_are_enough(folder):
    trainer = OnlineDPOTrainer(model=folder, reward_funcs=by_length, train_dataset=PROMPTS)
    assert isinstance(trainer.args, OnlineDPOConfig)
    assert trainer.args.output_dir == "tiny-OnlineDPO"
    assert trainer.model.dtype == torch.float32
    args = ONLINE_DPO.make_config("out")
    trainer = OnlineDPOTrainer(model=folder, args=args, reward_funcs=by_length, train_dataset=PROMPTS)
    trainer.train()
    assert logs(trainer, "loss")[0] == pytest.approx(LN2, abs=1e-6)


# ---- the reference model ----


def test_the_reference_of_a_model_in_memory_stays_what_the_model_was(tmp_path):
    model = random_model()
    start = weights_of(model)
    trainer = train(
        tmp_path, model=model, reward_funcs=variety, max_steps=3, learning_rate=1e-2, lr_scheduler_type="constant"
    )
    assert logs(trainer, "loss")[0] == pytest.approx(LN2, abs=1e-6)
    assert logs(trainer, "objective/kl")[0] == pytest.approx(0.0, abs=1e-5)
    assert logs(trainer, "rewards/margins")[0] == pytest.approx(0.0, abs=1e-6)
    assert abs(logs(trainer, "objective/kl")[1]) > 1e-3
    assert logs(trainer, "loss")[1] < LN2 - 1e-3
    assert logs(trainer, "rewards/margins")[1] > 1e-3
    assert trainer.ref_model is not model
    assert same_weights(start, weights_of(trainer.ref_model))
    assert not same_weights(start, weights_of(model))


@pytest.mark.parametrize("given", ["path", "module"])
def test_a_given_reference_is_the_one_that_counts(tmp_path, given):
    other = random_model(seed=4)
    expected = weights_of(other)
    if given == "path":
        other.save_pretrained(tmp_path / "reference")
        other = str(tmp_path / "reference")
    trainer = train(tmp_path, ref_model=other, max_steps=2, learning_rate=1e-2)
    assert (trainer.ref_model is other) == (given == "module")
    assert same_weights(expected, weights_of(trainer.ref_model))
    assert not trainer.ref_model.training
    assert not any(p.requires_grad for p in trainer.ref_model.parameters())
    assert abs(logs(trainer, "objective/kl")[0]) > 1e-2
    assert abs(logs(trainer, "loss")[0] - LN2) > 1e-3


def test_a_reference_that_cannot_be_packed_is_padded(tmp_path):
    packed, padded = (
        train(tmp_path, ref_model=random_model(seed=4, attn_implementation=kind)) for kind in ("sdpa", "eager")
    )
    assert packed.reference_packed
    assert not padded.reference_packed
    assert logs(padded, "loss")[0] == pytest.approx(logs(packed, "loss")[0], abs=1e-5)


def test_references_that_cannot_be_one(tmp_path):
    model = random_model()
    with pytest.raises(ConfigError, match="`ref_model` is the model that is trained"):
        make(tmp_path, model=model, ref_model=model)
    with pytest.raises(ConfigError, match=r"`ref_model` must have the vocabulary of `model` \(got 80 and 64 tokens\)"):
        make(tmp_path, model=model, ref_model=random_model(vocab_size=80))
    random_model(vocab_size=80).save_pretrained(tmp_path / "reference")
    with pytest.raises(ConfigError, match=r"got 80 and 64 tokens"):
        make(tmp_path, model=model, ref_model=str(tmp_path / "reference"))
    with pytest.raises(ConfigError, match="no/such-reference"):
        make(tmp_path, model=model, ref_model="no/such-reference")


@pytest.mark.parametrize("disabled", [True, False])
def test_dropout_is_off_unless_wanted(tmp_path, disabled):
    model = random_model(attention_dropout=0.5)
    trainer = train(tmp_path, model=model, **({} if disabled else {"disable_dropout": False}))
    assert (logs(trainer, "loss")[0] == pytest.approx(LN2, abs=1e-6)) == disabled


# ---- rewards ----


@pytest.fixture
def judge(tmp_path):
    """A reward model, also in the folder `judge` with its tokenizer."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForSequenceClassification(LlamaConfig(vocab_size=64, num_labels=1, pad_token_id=0, **sizes))
    model.save_pretrained(tmp_path / "judge")
    word_tokenizer().save_pretrained(tmp_path / "judge")
    return model


def judged(judge):
    """What the model says of every completion of the script, as texts, in the order of `PROMPTS`."""
    tokenizer, scores = word_tokenizer(), []
    for prompt in PROMPTS["prompt"]:
        for index in range(2):
            completion = " ".join(f"w{t}" for t in script(tokenizer(prompt)["input_ids"], index) if t != 1)
            with torch.no_grad():
                scores.append(judge(torch.tensor([tokenizer(prompt + completion)["input_ids"]])).logits.item())
    return scores


def margins(scores):
    return [abs(a - b) for a, b in zip(scores[::2], scores[1::2], strict=True)]


@pytest.mark.parametrize("how", ["path", "module", "reward_model_path"])
def test_reward_models(tmp_path, judge, how):
    options = {
        "path": {"reward_funcs": str(tmp_path / "judge")},
        "module": {"reward_funcs": judge, "reward_processing_classes": word_tokenizer()},
        "reward_model_path": {"reward_funcs": None, "reward_model_path": str(tmp_path / "judge")},
    }
    trainer = train(tmp_path, **options[how])
    scores = judged(judge)
    name = "LlamaForSequenceClassification" if how == "module" else "judge"
    assert logs(trainer, f"rewards/{name}/mean")[0] == pytest.approx(sum(scores) / 8, abs=1e-6)
    assert logs(trainer, "objective/scores")[0] == pytest.approx(sum(scores) / 8, abs=1e-6)
    assert logs(trainer, "objective/scores_margin")[0] == pytest.approx(sum(margins(scores)) / 4, abs=1e-6)


@pytest.mark.parametrize("given", [by_length, [by_length]], ids=["function", "list"])
def test_the_reward_model_of_the_arguments_comes_last(tmp_path, judge, given):
    trainer = train(
        tmp_path, reward_funcs=given, reward_model_path=str(tmp_path / "judge"), reward_weights=[0.5, -100.0]
    )
    lengths = [len(script([int(p.split()[-1][1:])], i)) for p in PROMPTS["prompt"] for i in range(2)]
    scores = [0.5 * n - 100 * s for n, s in zip(lengths, judged(judge), strict=True)]
    assert logs(trainer, "rewards/by_length/mean")[0] == pytest.approx(sum(lengths) / 8)
    assert logs(trainer, "reward")[0] == pytest.approx(sum(scores) / 8, rel=1e-5)
    assert logs(trainer, "objective/scores_margin")[0] == pytest.approx(sum(margins(scores)) / 4, rel=1e-5)


def test_rewards_in_a_tuple_and_a_reward_model(tmp_path, judge):
    trainer = train(tmp_path, reward_funcs=(by_length, variety), reward_model_path=str(tmp_path / "judge"))
    assert trainer.scorer.names == ["by_length", "variety", "judge"]


def test_the_sum_of_weighted_rewards_decides(tmp_path):
    """By length alone the first of prompt 10 wins; three times the other reward turns it round."""

    def brief(completion_ids, **kwargs):
        return [-float(len(ids)) for ids in completion_ids]

    def preferences(reward_weights):
        trainer = make(tmp_path, reward_funcs=[by_length, brief], reward_weights=reward_weights)
        return trainer.collect([{"prompt": "w10"}] * 2).advantages.tolist()

    assert preferences(None) == [0.0, 0.0]
    assert preferences([1.0, 0.5]) == [1.0, -1.0]
    assert preferences([1.0, 3.0]) == [-1.0, 1.0]


# ---- prompts ----


LONG = ["w7 w8 w12 w13 w14 w10", "w9 w12 w13 w14 w10", "w12 w13 w14 w10", "w40"]


def test_long_prompts_lose_their_beginning_before_the_model_writes(tmp_path):
    """10 tokens in all and 6 for the completion leave 4. Two prompts that are equal then still have pairs of theirs."""
    recorder = Recorder()
    options = {"max_length": 10, "max_steps": 2, "shuffle_dataset": False, "reward_funcs": recorder}
    trainer = make(tmp_path, prompts(*LONG), ref_model=random_model(seed=4), eval_dataset=prompts(LONG[0]), **options)
    with pytest.warns(UserWarning, match=r"A prompt of 6 tokens leaves less .*\(6\) of `max_length` \(10\)") as caught:
        trainer.train()
    assert len(caught) == 1
    trainer.evaluate()  # and says no more
    for requests, sampling in trainer.engine.calls[:2]:
        assert sorted(requests) == sorted([[12, 13, 14, 10]] * 3 + [[40]])
        assert (sampling.n, sampling.max_tokens) == (2, 6)
    assert trainer.engine.calls[2][0] == [[12, 13, 14, 10]]
    # The rewards see the whole prompts.
    assert recorder.calls[0]["prompts"] == [text for text in LONG for _ in range(2)]
    assert recorder.calls[0]["completion_ids"] == [[11, 12, 1], [13, 1]] * 3 + [[41, 42, 43], [44, 1]]
    assert logs(trainer, "num_tokens")[0] == 2 * (3 * 4 + 1) + 4 * (3 + 2)
    # The policy is scored behind what it was sampled behind.
    pairs = [((12, 13, 14, 10), *SCRIPT[10])] * 3 + [((40,), *SCRIPT[40])]
    margins = [log_ratio(prompt, better) - log_ratio(prompt, worse) for prompt, better, worse in pairs]
    expected = mean([math.log1p(math.exp(-0.1 * margin)) for margin in margins])
    assert logs(trainer, "loss") == pytest.approx([expected] * 2, rel=1e-5)


def own_logp(prompt, completion):
    """The completion's log-prob under the model that is trained."""
    return plain_logps(random_model(), prompt, completion).sum().item()


def log_ratio(prompt, completion):
    """Between that model and the reference of seed 4."""
    return own_logp(prompt, completion) - plain_logps(random_model(seed=4), prompt, completion).sum().item()


def mean(values):
    return sum(values) / len(values)


@pytest.mark.parametrize("max_length", [6, 3])
def test_without_room_for_a_prompt_prompts_keep_their_length(tmp_path, max_length):
    """The config has warned; the trainer says no more."""
    with pytest.warns(UserWarning, match="leaves no room for a prompt"):
        args = ONLINE_DPO.make_config(tmp_path, max_length=max_length)
    trainer = ONLINE_DPO.make(args, prompts(*LONG), reward_funcs=by_length)
    trainer.engine = ScriptedEngine(script)
    trainer.train()
    assert sorted(map(len, trainer.engine.calls[0][0])) == [1, 4, 5, 6]


# ---- which completion belongs to whom ----


def successors(prompt, index):
    """Two completions that tell their prompt: its last id and one, its last id and two."""
    return [prompt[-1] + 1 + index % 2, 1]


@pytest.mark.parametrize(("rows", "accumulation"), [(6, 1), (2, 3), (1, 6)])
def test_every_row_gets_completions_of_its_own_prompt(tmp_path, rows, accumulation):
    """Equal prompts apart and side by side, unequal lengths; two completions of each, asked for by token ids."""
    recorder = Recorder()
    dataset = prompts("w10", "w20 w30", "w10", "w40", "w40", "w50 w51 w52")
    options = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": accumulation, "max_steps": 2}
    trainer = make(tmp_path, dataset, reward_funcs=recorder, eval_dataset=dataset, **options)
    trainer.engine = ScriptedEngine(successors)
    trainer.train()
    trainer.evaluate()
    for requests, sampling in trainer.engine.calls:
        assert all(isinstance(token, int) for ids in requests for token in ids)
        assert sampling.temperature == 0.9
    for requests, sampling in trainer.engine.calls[:2]:
        assert len(requests) * sampling.n == 2 * 6
    assert sum(len(call["prompts"]) for call in recorder.calls) == 3 * 2 * 6
    for call in recorder.calls:
        firsts = [ids[0] for ids in call["completion_ids"]]
        lasts = [int(prompt.split()[-1][1:]) for prompt in call["prompts"]]
        assert [a - b for a, b in zip(firsts, lasts, strict=True)] == [1, 2] * (len(firsts) // 2)


def test_completions_of_a_server_and_its_weights(tmp_path):
    """By the chain every x is followed by x + 1, x + 2 and the end."""
    ends = [10, 20, 30, 40]
    chain = {x: {x + 1: 1.0} for p in ends for x in (p, p + 1)} | {p + 2: {1: 1.0} for p in ends}
    recorder = Recorder()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {"use_vllm": True, "vllm_mode": "server", "vllm_group_port": port, "max_steps": 2}
    with running_stub() as server:
        options["vllm_server_base_url"] = server.url
        dataset = prompts("w10", "w20", "w7 w30", "w40")
        trainer = train(tmp_path, dataset, table_model(chain), recorder, engine=False, **options)
        bodies = [call.body for call in server.of("/v1/completions") if call.body.get("prompt_logprobs") is None]
        updates = len(server.of("/finish_weight_update"))
        trainer.engine.close()
    assert updates >= 2
    for call in recorder.calls:
        lasts = [int(prompt.split()[-1][1:]) for prompt in call["prompts"]]
        assert call["completion_ids"] == [[x + 1, x + 2, 1] for x in lasts]
    assert sum(len(body["prompt"]) * body["n"] for body in bodies) == 2 * 2 * 4
    assert all(body["n"] == 2 and body["temperature"] == 0.9 and body["max_tokens"] == 6 for body in bodies)
    assert all(isinstance(token, int) for body in bodies for ids in body["prompt"] for token in ids)
    assert logs(trainer, "sampling/parity_max")[0] == pytest.approx(0.0, abs=1e-4)
    # The two completions of a prompt are the same.
    assert logs(trainer, "pairs/tied") == [1.0, 1.0]


# ---- what is logged ----


def test_the_metrics_of_a_scripted_step(tmp_path):
    """The reference is another model; the completion of prompt 40 without an end pays half a point."""
    scores = {11: 3.0, 13: 1.0, 41: 2.0, 44: 2.0, 31: 1.0, 20: 4.0}
    trainer = train(
        tmp_path,
        prompts("w10", "w40", "w30"),
        reward_funcs=lambda completion_ids, **_: [scores[ids[0]] for ids in completion_ids],
        ref_model=random_model(seed=4),
        per_device_train_batch_size=3,
        beta=0.2,
        missing_eos_penalty=0.5,
    )
    better = {(10,): [11, 12, 1], (40,): [44, 1], (30,): [20, 21, 1]}
    worse = {(10,): [13, 1], (40,): [41, 42, 43], (30,): [31, 1]}
    logps, ratios = ([f(p, c) for side in (better, worse) for p, c in side.items()] for f in (own_logp, log_ratio))
    chosen, rejected = ratios[:3], ratios[3:]
    wins = [a > b for a, b in zip(chosen, rejected, strict=True)]
    assert len(set(wins)) == 2, "all right or all wrong would prove little"
    expected = {
        "loss": mean([math.log1p(math.exp(-0.2 * (a - b))) for a, b in zip(chosen, rejected, strict=True)]),
        "reward": 13 / 6,
        "objective/scores": 12.5 / 6,
        "objective/scores_margin": (2 + 0.5 + 3) / 3,
        "objective/kl": mean(ratios),
        "objective/entropy": -mean(logps),
        "objective/non_score_reward": -0.2 * mean(ratios),
        "objective/rlhf_reward": 12.5 / 6 - 0.2 * mean(ratios),
        "rewards/chosen": 0.2 * mean(chosen),
        "rewards/rejected": 0.2 * mean(rejected),
        "rewards/margins": 0.2 * (mean(chosen) - mean(rejected)),
        "rewards/accuracies": mean(wins),
        "logps/chosen": mean(logps[:3]),
        "logps/rejected": mean(logps[3:]),
        "val/contain_eos_token": 5 / 6,
        "pairs/tied": 0.0,
        "beta": 0.2,
    }
    log = trainer.state.log_history[0]
    assert {key: log[key] for key in expected} == pytest.approx(expected, rel=1e-4)


def test_the_table_has_scores_and_preferences(tmp_path):
    def known(completion_ids, **kwargs):
        return [None if ids[0] == 31 else float(len(ids)) for ids in completion_ids]

    dataset = prompts("w10", "w40", "w30", "w20")
    options = {"missing_eos_penalty": 1.0, "shuffle_dataset": False, "log_completions": True}
    with pytest.warns(UserWarning, match="No reward function scored 1 of 8"):
        train(tmp_path, dataset, reward_funcs=known, **options)
    rows = pyarrow.parquet.read_table(tmp_path / "completions" / "completions_00001.parquet").to_pylist()
    # 41 42 43 has no end, and pays for it: a tie with 44 <eos>.
    assert [row["known"] for row in rows] == pytest.approx([3, 2, 3, 2, math.nan, 3, 2, 3], nan_ok=True)
    assert [row["score"] for row in rows] == pytest.approx([3, 2, 2, 2, math.nan, 3, 2, 3], nan_ok=True)
    assert [row["preference"] for row in rows] == [1, -1, 0, 0, 0, 0, -1, 1]
    assert [row["completion"] for row in rows][:4] == ["w11 w12", "w13", "w41 w42 w43", "w44"]


@pytest.mark.parametrize("name", ["score", "preference", "completion", "prompt"])
def test_a_reward_may_have_the_name_of_a_column(tmp_path, name):
    def reward(completion_ids, **kwargs):
        return [10.0 + len(ids) for ids in completion_ids]

    reward.__name__ = name
    trainer = make(tmp_path, reward_funcs=reward, missing_eos_penalty=100.0)
    trainer.collect([{"prompt": "w40"}] * 2)
    first, second = trainer.completion_tables["train"].take()
    assert (first["prompt"], first["completion"]) == ("w40", "w41 w42 w43")
    assert (first["score"], second["score"]) == (-87.0, 12.0)
    assert (first["preference"], second["preference"]) == (-1.0, 1.0)
    assert first[f"rewards/{name}"] == 13.0


# ---- evaluation and resuming ----


def test_evaluation_is_the_same_loss_on_its_own_completions(tmp_path):
    """Three prompts in batches of two and one; every metric finite."""
    dataset = prompts("w10", "w40", "w30")
    sizes = {"per_device_train_batch_size": 3, "per_device_eval_batch_size": 2}
    trainer = make(tmp_path, dataset, eval_dataset=dataset, ref_model=random_model(seed=4), beta=0.2, **sizes)
    metrics = trainer.evaluate()
    assert all(math.isfinite(value) for value in metrics.values())
    pairs = [((10,), [11, 12, 1], [13, 1]), ((40,), [41, 42, 43], [44, 1]), ((30,), [20, 21, 1], [31, 1])]
    margins = [log_ratio(p, a) - log_ratio(p, b) for p, a, b in pairs]
    assert metrics["eval_loss"] == pytest.approx(mean([math.log1p(math.exp(-0.2 * m)) for m in margins]), rel=1e-4)
    assert metrics["eval_rewards/margins"] == pytest.approx(0.2 * mean(margins), rel=1e-4)
    assert metrics["eval_objective/scores"] == metrics["eval_reward"] == 2.5
    assert metrics["eval_beta"] == pytest.approx(0.2)


def test_evaluation_of_completions_without_a_score(tmp_path):
    def unknown(completion_ids, **kwargs):
        return [None] * len(completion_ids)

    trainer = make(tmp_path, eval_dataset=PROMPTS, reward_funcs=unknown)
    with pytest.warns(UserWarning, match="No reward function scored 8 of 8"):
        metrics = trainer.evaluate()
    assert metrics["eval_loss"] == 0.0
    assert metrics["eval_reward"] is None
    assert metrics["eval_objective/kl"] is None


@pytest.mark.parametrize("save_at", [1, 2])
def test_resuming_goes_on_in_the_epoch_with_its_beta(tmp_path, save_at):
    """Two optimizer steps an epoch, completions sampled from the policy."""
    sizes = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "max_tokens_per_micro_batch": 12}
    lengths = {"max_steps": -1, "num_train_epochs": 2, "save_strategy": "steps", "save_steps": save_at}
    settings = {"engine": False, "reward_funcs": variety, "learning_rate": 1e-2, "beta": [0.5, 0.1], **sizes, **lengths}
    whole = train(tmp_path, **settings)
    resumed = make(tmp_path, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{save_at}"))
    assert logs(resumed, "beta") == pytest.approx([0.5, 0.5, 0.1, 0.1])
    for one, other in zip(whole.state.log_history[:4], resumed.state.log_history[:4], strict=True):
        assert timeless(other) == pytest.approx(timeless(one), abs=1e-5)
    assert min(logs(whole, "grad_norm")) > 0
