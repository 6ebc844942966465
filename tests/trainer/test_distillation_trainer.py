"""The trainer that distils from a teacher in its process: which teachers it takes, when it samples, what it records."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.engines import ScriptedEngine
from fixtures.models import family_model, random_model, table_model
from fixtures.online_methods import METHODS
from fixtures.runs import logs, prompts
from fixtures.tokenizers import bpe_tokenizer, word_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback

from trl import DistillationConfig, DistillationTrainer
from trl.errors import ConfigError, DataError, GenerationError, NotSupportedError
from trl.functional import divergence as divergence_module
from trl.functional import logps as logps_module
from trl.models.load import check_same_tokens

ENDS = {11: {1: 1.0}, 12: {1: 1.0}}
STUDENT = {10: {11: 0.5, 12: 0.5}, **ENDS}
TEACHER = {10: {11: 0.9, 12: 0.1}, **ENDS}
# Reverse KL of the coins (1/2, 1/2) and (0.9, 0.1) at the first of two tokens: (0.5 log 5/9 + 0.5 log 5) / 2.
LOSS = 0.255413
PROMPTS = prompts(*["w10"] * 8)


def config(folder, **changes):
    return METHODS["distillation"].make_config(folder, **changes)


def make(folder, student=None, teacher=None, dataset=None, **changes):
    """A trainer on eight prompts, and with options of the trainer among the changes."""
    names = ("eval_dataset", "callbacks", "processing_class")
    options: dict[str, Any] = {name: changes.pop(name) for name in names if name in changes}
    if teacher is not None:
        options["teacher_model"] = teacher
    return METHODS["distillation"].make(config(folder, **changes), dataset or PROMPTS, student, **options)


def saved(folder, model, tokenizer=None):
    """The model's folder, with a tokenizer where one is given."""
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return str(folder)


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


# ---- where the teacher comes from ----


def test_a_teacher_by_folder_as_argument_or_option_or_as_a_model(tmp_path):
    folder = saved(tmp_path / "teacher", table_model(TEACHER), word_tokenizer())
    options = {"args": config(tmp_path), "train_dataset": PROMPTS, "processing_class": word_tokenizer()}
    by_option = {**options, "args": config(tmp_path, teacher_model_name_or_path=folder)}
    for trainer in (
        DistillationTrainer(table_model(STUDENT), folder, **options),
        DistillationTrainer(table_model(STUDENT), table_model(TEACHER), **options),
        DistillationTrainer(table_model(STUDENT), **by_option),
    ):
        trainer.train()
        assert logs(trainer, "loss") == [pytest.approx(LOSS, abs=2e-6)]


def test_student_and_teacher_of_one_folder_are_two_models(tmp_path):
    folder = saved(tmp_path / "both", table_model(STUDENT), word_tokenizer())
    trainer = DistillationTrainer(folder, folder, config(tmp_path, learning_rate=0.1), PROMPTS)
    trainer.train()
    assert logs(trainer, "loss") == [pytest.approx(0.0, abs=1e-6)]
    assert trainer.model.lm_head.weight.data_ptr() != trainer.teacher_model.lm_head.weight.data_ptr()


def test_without_arguments_the_output_is_named_after_the_student(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = saved(tmp_path / "small", random_model(), word_tokenizer())
    trainer = DistillationTrainer(folder, random_model(seed=7), train_dataset=PROMPTS)
    assert trainer.args.output_dir.endswith("small-Distillation")
    assert type(trainer.args) is DistillationConfig


def test_a_teacher_has_to_be_given(tmp_path):
    with pytest.raises(ConfigError, match="no teacher: pass `teacher_model`, or set `teacher_model_name_or_path`"):
        DistillationTrainer("no/such/student", args=config(tmp_path), train_dataset=PROMPTS)


def test_the_student_is_no_teacher_of_itself(tmp_path):
    model = random_model()
    with pytest.raises(ConfigError, match=r"`teacher_model` is the model that is trained.*Pass a copy"):
        make(tmp_path, model, model)
    make(tmp_path, model, copy.deepcopy(model))


def test_a_teacher_that_is_nowhere_is_named(tmp_path):
    with pytest.raises(ConfigError, match=f"The model `{tmp_path}/none` cannot be loaded"):
        make(tmp_path, random_model(), f"{tmp_path}/none")


@pytest.mark.parametrize(
    ("option", "value"), [("teacher_model_revision", "main"), ("teacher_model_init_kwargs", {"dtype": "float16"})]
)
def test_how_to_load_a_teacher_that_is_loaded_is_refused(tmp_path, option, value):
    with pytest.raises(ConfigError, match=f"`{option}` is for a teacher given by name"):
        make(tmp_path, **{option: value})


def test_two_teachers_are_one_too_many(tmp_path):
    with pytest.raises(ConfigError, match="teacher_model_name_or_path"):
        make(tmp_path, teacher=random_model(seed=7), teacher_model_name_or_path="another/teacher")


@pytest.mark.parametrize("name", ["quantization_config", "peft_config", "tools"])
def test_what_this_version_does_not_have_is_refused(tmp_path, name):
    with pytest.raises(NotSupportedError, match=name):
        DistillationTrainer("a", "b", config(tmp_path), PROMPTS, **{name: ["x"]})


@pytest.mark.parametrize(
    ("dataset", "error"), [(None, ConfigError), (PROMPTS.rename_column("prompt", "question"), DataError)]
)
def test_a_dataset_without_prompts_is_refused_before_anything_is_loaded(tmp_path, dataset, error):
    with pytest.raises(error, match="prompt"):
        DistillationTrainer("no/such/student", "no/such/teacher", config(tmp_path), dataset)


# ---- how it is loaded ----


@pytest.fixture
def loaded(monkeypatch):
    """The names and arguments that models were loaded with."""
    calls = []

    def from_pretrained(name, **kwargs):
        calls.append((name, kwargs))
        return random_model(seed=7)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)
    return calls


def test_revision_and_arguments_reach_the_loader(tmp_path, loaded):
    make(
        tmp_path,
        random_model(),
        "some/teacher",
        teacher_model_revision="v2",
        teacher_model_init_kwargs='{"attn_implementation": "eager"}',
        trust_remote_code=True,
    )
    (call,) = loaded
    assert call == (
        "some/teacher",
        {"revision": "v2", "attn_implementation": "eager", "dtype": "float32", "trust_remote_code": True},
    )


def test_without_a_revision_none_is_given(tmp_path, loaded):
    make(tmp_path, random_model(), "some/teacher")
    assert loaded[0][1] == {"dtype": "float32", "trust_remote_code": False}


@pytest.mark.parametrize(
    ("bf16", "given", "dtype"), [(False, None, "float32"), (True, None, "bfloat16"), (True, "float32", "float32")]
)
def test_a_teacher_has_the_type_of_mixed_precision_unless_told_otherwise(tmp_path, bf16, given, dtype):
    folder = saved(tmp_path / "teacher", table_model(TEACHER), word_tokenizer())
    kwargs = None if given is None else {"dtype": given}
    trainer = make(tmp_path, table_model(STUDENT), folder, bf16=bf16, teacher_model_init_kwargs=kwargs)
    assert trainer.teacher_model.dtype == getattr(torch, dtype)
    assert trainer.model.dtype == torch.float32
    trainer.train()
    # 8 bits of log 0.1 / 8 leave an error below 1%.
    assert logs(trainer, "loss") == [pytest.approx(LOSS, abs=5e-3)]


def test_the_older_name_of_the_type_is_heard(tmp_path):
    folder = saved(tmp_path / "teacher", table_model(TEACHER), word_tokenizer())
    trainer = make(tmp_path, table_model(STUDENT), folder, teacher_model_init_kwargs={"torch_dtype": "bfloat16"})
    assert trainer.teacher_model.dtype == torch.bfloat16


def loss_in_bfloat16(folder, **changes):
    """Hidden states are 8 times unit vectors, which bfloat16 has exactly; the weights log p / 8 it has not."""
    trainer = make(folder, table_model(STUDENT), table_model(TEACHER), bf16=True, **changes)
    trainer.train()
    return logs(trainer, "loss")[0]


def test_a_head_in_float32_is_exact_also_in_mixed_precision(tmp_path):
    assert loss_in_bfloat16(tmp_path, cast_lm_head_to_fp32=True) == pytest.approx(LOSS, abs=2e-6)


def test_the_heads_product_has_the_type_of_mixed_precision_otherwise(tmp_path):
    """log 0.1 / 8 = -0.287823 lies between -0.289063 and -0.287109 of bfloat16: the logit is 0.0057 too large."""
    assert abs(loss_in_bfloat16(tmp_path) - LOSS) > 1e-5


# ---- its tokens ----


def gapped_tokenizer():
    """Words 7 to 19, and 50: 17 tokens, and ids beyond their number."""
    vocab = {"<pad>": 0, "<eos>": 1, "<eos2>": 2, "<unk>": 6} | {f"w{i}": i for i in [*range(7, 20), 50]}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")


def test_other_tokens_are_refused_with_one_of_them(tmp_path):
    folder = saved(tmp_path / "teacher", random_model(seed=7), bpe_tokenizer())
    with pytest.raises(ConfigError, match=r"other tokens than the model: id \d is '.*' there and '.*' here"):
        make(tmp_path, random_model(), folder)


@pytest.mark.parametrize("beside", [True, False])
def test_a_teacher_padded_larger_is_compared_over_the_ids_of_both(tmp_path, beside):
    """The same as with a teacher that has the first 64 rows alone, whatever share the 6 others have."""
    teacher = given = random_model(seed=7, vocab_size=70)
    if beside:
        given = saved(tmp_path / "teacher", teacher, word_tokenizer())
    cut = random_model(seed=7)
    with torch.no_grad():
        for name, value in cut.named_parameters():
            value.copy_(teacher.get_parameter(name)[: len(value)])
    losses = []
    for t in (given, cut):
        trainer = make(tmp_path, random_model(), t)
        trainer.engine = ScriptedEngine([[11, 12, 13, 1]])
        trainer.train()
        losses += logs(trainer, "loss")
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    assert losses[0] > 1e-2


def test_a_teacher_with_fewer_ids_than_the_tokenizer_has_tokens_is_refused(tmp_path):
    teacher = random_model(seed=7, vocab_size=60)
    for t in (teacher, saved(tmp_path / "teacher", teacher, word_tokenizer(vocab_size=60))):
        with pytest.raises(ConfigError, match=r"The teacher has fewer tokens .*got 60 and 64"):
            make(tmp_path, random_model(), t)


def padded_smaller(folder, student, **changes):
    """A trainer whose tokenizer has 60 tokens, the student 64 ids, and the teacher 60."""
    tokenizer = word_tokenizer(vocab_size=60)
    teacher = saved(folder / "teacher", random_model(seed=7, vocab_size=60), tokenizer)
    return make(folder, student, teacher, processing_class=tokenizer, **changes)


def test_a_teacher_padded_smaller_reads_what_has_a_token(tmp_path):
    trainer = padded_smaller(tmp_path, table_model(STUDENT))
    trainer.train()
    assert logs(trainer, "loss")[0] > 0


def test_an_id_that_the_teacher_lacks_is_noticed_and_the_advice_helps(tmp_path):
    student = {10: {61: 1.0}, 61: {1: 1.0}}
    trainer = padded_smaller(tmp_path, table_model(student))
    with pytest.raises(GenerationError, match=r"wrote token 61, and the teacher has 60 tokens.*suppress_tokens"):
        trainer.train()
    trainer = padded_smaller(tmp_path, table_model(student), generation_kwargs={"suppress_tokens": [60, 61, 62, 63]})
    trainer.train()
    assert trainer.state.global_step == 1


def test_a_tokenizer_with_gaps_is_as_large_as_its_largest_id(tmp_path):
    """Prompts with `w50` would be an index error inside of a teacher of 40 ids."""
    teacher = saved(tmp_path / "teacher", random_model(seed=7, vocab_size=40), gapped_tokenizer())
    with pytest.raises(ConfigError, match="fewer tokens"):
        make(tmp_path, random_model(), teacher, processing_class=gapped_tokenizer())


def test_a_tokenizer_with_gaps_fits_a_teacher_that_is_large_enough(tmp_path):
    teacher = saved(tmp_path / "teacher", random_model(seed=7, vocab_size=51), gapped_tokenizer())
    make(tmp_path, random_model(), teacher, processing_class=gapped_tokenizer())


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        *(pytest.param(name) for name in ("qwen2", "gpt2", "gemma3_text")),
    ],
)
def test_a_teacher_saved_without_its_tokenizer_is_taken(tmp_path, family):
    folder = saved(tmp_path / "teacher", family_model(family, seed=7))
    check_same_tokens(
        random_model(),
        word_tokenizer(),
        AutoModelForCausalLM.from_pretrained(folder),
        trust_remote_code=False,
    )


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        pytest.param("qwen2"),
    ],
)
def test_a_student_saved_without_its_tokenizer_needs_one(tmp_path, family):
    folder = saved(tmp_path / "student", family_model(family))
    with pytest.raises(ConfigError, match=r"No tokenizer stands beside .*pass `processing_class`"):
        DistillationTrainer(folder, random_model(seed=7), config(tmp_path), PROMPTS)


# ---- what becomes of it ----


class _Watch(TrainerCallback):
    """Notes the teacher's state before every optimizer step."""

    def __init__(self):
        self.seen: list[tuple[bool, bool, bool]] = []

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        parameters = list(self.teacher.parameters())
        training = any(m.training for m in self.teacher.modules())
        gradients = any(p.grad is not None for p in parameters)
        self.seen.append((training, gradients, any(p.requires_grad for p in parameters)))


def test_the_teacher_stays_as_it_is_while_the_student_moves(tmp_path):
    student, teacher = random_model(), random_model(seed=7).train()
    before, student_before = weights(teacher), weights(student)
    watch = _Watch()
    trainer = make(tmp_path, student, teacher, callbacks=[watch], learning_rate=0.01, max_steps=3)
    watch.teacher = trainer.teacher_model
    trainer.train()
    trainer.evaluate(PROMPTS)
    assert watch.seen == [(False, False, False)] * 3
    assert all(torch.equal(before[name], value) for name, value in trainer.teacher_model.state_dict().items())
    assert any(not torch.equal(student_before[n], value) for n, value in trainer.model.state_dict().items())
    assert sum(len(g["params"]) for g in trainer.optimizer.param_groups) == len(list(student.parameters()))


def test_the_students_dropout_is_not_the_teachers(tmp_path):
    """gpt2 drops a tenth of everything in training, at the student's side too, but for `disable_dropout`."""
    losses = {}
    for name, student_p, teacher_p in (("none", 0.0, 0.0), ("teacher", 0.0, 0.5), ("student", 0.5, 0.0)):
        drops = [{f"{where}_pdrop": p for where in ("resid", "attn", "embd")} for p in (student_p, teacher_p)]
        student, teacher = (family_model("gpt2", seed=s, **d) for s, d in zip((0, 7), drops, strict=True))
        trainer = make(tmp_path, student, teacher.train())
        trainer.engine = ScriptedEngine([[11, 12, 13, 1]])
        trainer.train()
        losses[name] = logs(trainer, "loss")[0]
    assert losses["teacher"] == pytest.approx(losses["none"], abs=1e-6)
    assert losses["student"] != pytest.approx(losses["none"], abs=1e-3)


def test_checkpoints_hold_the_student_alone(tmp_path):
    trainer = make(tmp_path, table_model(STUDENT), table_model(TEACHER), save_strategy="steps", save_steps=1)
    trainer.train()
    (path,) = Path(tmp_path, "checkpoint-1").glob("*.safetensors")
    size = sum(v.numel() * v.element_size() for v in trainer.model.state_dict().values())
    assert path.stat().st_size < 1.2 * size
    assert trainer.frozen_models == [trainer.teacher_model]


# ---- memory ----


class _MostRows(TorchDispatchMode):
    """The most rows of logits that any operation makes. The transposed head, 32 rows here, is none."""

    rows = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.dim() and x.shape[-1] == 67 and x.numel() != 32 * 67:
                self.rows = max(self.rows, x.numel() // 67)
        return out


def test_a_step_never_has_the_logits_of_all_its_tokens(tmp_path, monkeypatch):
    """48 tokens of eight sequences, in chunks of 5; sampling has a row for each sequence."""
    monkeypatch.setattr(logps_module, "CPU_CHUNK_ELEMENTS", 5 * 2 * 67)
    monkeypatch.setattr(divergence_module, "KEPT_ELEMENTS", 0)
    student, teacher = (random_model(seed=seed, vocab_size=67) for seed in (0, 7))
    trainer = make(tmp_path, student, teacher)
    engine, trainer.engine = trainer.engine, ScriptedEngine([[11, 12, 13, 14, 15, 16]])
    with _MostRows() as seen:
        trainer.train()
    assert seen.rows == 5
    trainer.engine = engine
    with _MostRows() as seen:
        trainer.evaluate(PROMPTS)
    assert seen.rows <= 8
