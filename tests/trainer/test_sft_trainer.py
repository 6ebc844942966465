"""What `SFTTrainer` takes, refuses and leaves alone."""

import copy
import inspect

import pytest
import torch
from datasets import Dataset, DatasetDict
from fixtures.models import family_model, random_model
from fixtures.runs import logs
from fixtures.tokenizers import CHAT_TEMPLATE, word_tokenizer
from transformers import PreTrainedTokenizerFast

from trl.errors import ConfigError, DataError, NotSupportedError
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

TEXTS = Dataset.from_dict({"text": ["w10 w11 w12", "w20 w21", "w30 w31 w32 w33"]})
IDS = [[10, 11, 12, 1], [20, 21, 1], [30, 31, 32, 33, 1]]
CHAT = Dataset.from_list([{"messages": [{"role": "user", "content": "w20"}, {"role": "assistant", "content": "w21"}]}])
CHAT_IDS = [4, 6, 20, 5, 4, 6, 21, 5]


def config(folder, **changes):
    settings = {
        "output_dir": str(folder),
        "learning_rate": 0.0,
        "max_steps": 1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "gradient_checkpointing": False,
    }
    return SFTConfig(**(settings | changes))


def make(folder, dataset=TEXTS, *, model=None, tokenizer=None, eval_dataset=None, formatting_func=None, **changes):
    return SFTTrainer(
        model or random_model(),
        config(folder, **changes),
        train_dataset=dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer or word_tokenizer(),
        formatting_func=formatting_func,
    )


def rows(trainer):
    return [row["input_ids"] for row in trainer.train_dataset]


def loss(trainer):
    trainer.train()
    return logs(trainer, "loss")[0]


# ---- arguments ----


def test_arguments_come_in_the_usual_order():
    assert list(inspect.signature(SFTTrainer).parameters) == [
        "model",
        "args",
        "data_collator",
        "train_dataset",
        "eval_dataset",
        "processing_class",
        "compute_loss_func",
        "compute_metrics",
        "callbacks",
        "optimizers",
        "optimizer_cls_and_kwargs",
        "preprocess_logits_for_metrics",
        "quantization_config",
        "peft_config",
        "formatting_func",
    ]


@pytest.mark.parametrize(
    "name",
    [
        "data_collator",
        "compute_loss_func",
        "compute_metrics",
        "optimizer_cls_and_kwargs",
        "preprocess_logits_for_metrics",
        "quantization_config",
        "peft_config",
    ],
)
def test_what_is_not_there_yet_is_refused(tmp_path, name):
    with pytest.raises(NotSupportedError, match=f"`{name}` is not supported yet"):
        SFTTrainer(random_model(), config(tmp_path), train_dataset=TEXTS, **{name: object()})


def test_a_dataset_is_needed(tmp_path):
    with pytest.raises(ConfigError, match="`train_dataset` is missing"):
        SFTTrainer(random_model(), config(tmp_path), processing_class=word_tokenizer())


@pytest.mark.parametrize("dataset", [[{"text": "w10"}], DatasetDict(train=TEXTS), "w10"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_something_else_than_a_dataset_is_refused(tmp_path, dataset, shuffle):
    with pytest.raises(TypeError, match=f"got {type(dataset).__name__}"):
        make(tmp_path, dataset, shuffle_dataset=shuffle)


@pytest.mark.parametrize("name", ["train_dataset", "eval_dataset"])
@pytest.mark.parametrize("column", ["image", "images"])
def test_images_are_refused(tmp_path, name, column):
    images = TEXTS.add_column(column, ["a", "b", "c"])
    given = {"dataset": images} if name == "train_dataset" else {"eval_dataset": {"part": images}}
    with pytest.raises(NotSupportedError, match=f"`{name}` has images"):
        make(tmp_path, **given)


def test_a_model_by_folder_brings_its_tokenizer_and_names_the_output(tmp_path, monkeypatch):
    folder = tmp_path / "small"
    # A Llama's tokenizer is loaded as it was saved, one of Qwen2 is made anew.
    family_model("llama").save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    monkeypatch.chdir(tmp_path)
    trainer = SFTTrainer(str(folder), train_dataset=Dataset.from_list([{"input_ids": ids} for ids in IDS]))
    assert trainer.args.output_dir == "small-SFT"
    assert trainer.model.dtype == torch.float32
    assert trainer.processing_class.get_vocab()["w10"] == 10
    assert rows(trainer) == IDS


def test_options_of_loading_are_for_names(tmp_path):
    with pytest.raises(ConfigError, match="`model_init_kwargs`"):
        make(tmp_path, model_init_kwargs={"dtype": "bfloat16"})


# ---- rows ----


def test_texts_end_with_eos(tmp_path):
    assert rows(make(tmp_path)) == IDS


def test_another_column_may_hold_the_text(tmp_path):
    assert rows(make(tmp_path, TEXTS.rename_column("text", "story"), dataset_text_field="story")) == IDS


def test_a_formatting_function_makes_the_text(tmp_path):
    trainer = make(tmp_path, formatting_func=lambda row: row["text"] + " w9")
    assert rows(trainer) == [[*ids[:-1], 9, 1] for ids in IDS]


@pytest.mark.parametrize("option", ["completion_only_loss", "assistant_only_loss"])
def test_a_formatting_function_makes_one_text(tmp_path, option):
    with pytest.raises(ConfigError, match=f"`{option}=True`.*`formatting_func`"):
        make(tmp_path, formatting_func=lambda row: row["text"], **{option: True})


@pytest.mark.parametrize(("mode", "kept"), [("keep_start", slice(0, 3)), ("keep_end", slice(-3, None))])
@pytest.mark.filterwarnings("ignore:`truncation_mode:FutureWarning")
def test_long_rows_are_cut(tmp_path, mode, kept):
    assert rows(make(tmp_path, max_length=3, truncation_mode=mode)) == [ids[kept] for ids in IDS]


def test_rows_whose_completion_is_cut_off_are_left_out_with_a_warning(tmp_path):
    data = Dataset.from_dict({"prompt": ["w10 w11 w12", "w20"], "completion": [" w13", " w21"]})
    with pytest.warns(UserWarning, match="1 of 2 rows .*`max_length=3`"):
        trainer = make(tmp_path, data, max_length=3)
    assert rows(trainer) == [[20, 21, 1]]


def test_errors_name_row_and_column(tmp_path):
    with pytest.raises(DataError, match="Row 1: `text` is None"):
        make(tmp_path, Dataset.from_dict({"text": ["w10", None]}), shuffle_dataset=True)


def test_shuffling_changes_the_order_alone(tmp_path):
    many = Dataset.from_dict({"text": [f"w{i}" for i in range(10, 40)]})
    shuffled = rows(make(tmp_path, many, shuffle_dataset=True))
    assert shuffled != rows(make(tmp_path, many)) == sorted(shuffled)
    assert rows(make(tmp_path, many, shuffle_dataset=True)) == shuffled
    assert rows(make(tmp_path, many, shuffle_dataset=True, seed=1)) != shuffled


@pytest.mark.parametrize("changes", [{}, {"packing": True, "max_length": 8}, {"shuffle_dataset": True}])
def test_a_stream_is_trained_on_as_a_table(tmp_path, changes):
    stream = make(tmp_path, TEXTS.to_iterable_dataset(), eval_dataset=TEXTS.to_iterable_dataset(), **changes)
    table = make(tmp_path, eval_dataset=TEXTS, **changes)
    assert sorted(rows(stream)) == sorted(rows(table))
    assert loss(stream) == pytest.approx(loss(table), abs=1e-5)
    assert stream.evaluate()["eval_loss"] == pytest.approx(table.evaluate()["eval_loss"], abs=1e-5)


def test_a_stream_for_evaluation_alone(tmp_path):
    stream = make(tmp_path, eval_dataset=TEXTS.to_iterable_dataset())
    assert stream.evaluate()["eval_loss"] == pytest.approx(make(tmp_path, eval_dataset=TEXTS).evaluate()["eval_loss"])


# ---- rows that are tokens already ----

SKIP = {"dataset_kwargs": {"skip_prepare_dataset": True}}
TOKENS = [
    {"input_ids": [10, 11, 12, 13], "labels": [-100, -100, 12, 13]},
    {"input_ids": [20, 21, 1], "labels": [-100, 21, 1]},
]


@pytest.mark.parametrize("kind", ["arrow", "torch", "numpy", "list", "stream"])
def test_tokens_are_taken_as_they_are(tmp_path, kind):
    table = Dataset.from_list(TOKENS)
    expected = loss(make(tmp_path, table))
    makers = {"arrow": lambda: table, "list": lambda: TOKENS, "stream": table.to_iterable_dataset}
    dataset = makers.get(kind, lambda: table.with_format(kind))()
    assert loss(make(tmp_path, dataset, **SKIP)) == pytest.approx(expected, abs=1e-6)


def test_masks_become_labels(tmp_path):
    masked = [{"input_ids": row["input_ids"], "completion_mask": [int(n > 0) for n in row["labels"]]} for row in TOKENS]
    trainer = make(tmp_path, Dataset.from_list(masked))
    assert [row["labels"] for row in trainer.train_dataset] == [row["labels"] for row in TOKENS]


@pytest.mark.parametrize("name", ["completion_mask", "assistant_masks"])
def test_masks_that_nobody_would_read_are_refused(tmp_path, name):
    masked = Dataset.from_list([{"input_ids": [10, 11], name: [0, 1]}])
    with pytest.raises(ConfigError, match=f"`{name}` and no `labels`"):
        make(tmp_path, masked, **SKIP)


def test_rows_without_tokens_are_refused_where_they_are_said_to_have_some(tmp_path):
    with pytest.raises(ConfigError, match=r"no `input_ids` \(they have text\)"):
        make(tmp_path, **SKIP)


@pytest.mark.parametrize(
    "row",
    [
        {"input_ids": [10, 11, 12], "labels": [10, 11]},
        {"input_ids": [10, 11, 12], "labels": [10, 11, 12], "seq_lengths": [2]},
    ],
)
def test_columns_of_other_lengths_are_an_error(tmp_path, row):
    trainer = make(tmp_path, Dataset.from_list([row]), **SKIP)
    with pytest.raises(DataError, match=r"3 `input_ids`, . `labels`"):
        trainer.train()


def test_a_batch_without_any_token_is_an_error(tmp_path):
    trainer = make(tmp_path, [{"input_ids": []}], **SKIP)
    with pytest.raises(DataError, match="has no tokens"):
        trainer.train()


# ---- tokenizer ----


def test_the_tokenizer_is_saved_as_it_is_without_options(tmp_path):
    tokenizer = word_tokenizer()
    assert make(tmp_path, tokenizer=tokenizer).processing_class is tokenizer


def test_another_end_of_sequence_token_is_learnt_and_saved(tmp_path):
    tokenizer = word_tokenizer()
    before = copy.deepcopy(tokenizer.special_tokens_map)
    trainer = make(tmp_path, tokenizer=tokenizer, eos_token="<eos2>")
    assert rows(trainer) == [[*ids[:-1], 2] for ids in IDS]
    assert tokenizer.special_tokens_map == before
    trainer.train()
    trainer.save_model(str(tmp_path))
    assert PreTrainedTokenizerFast.from_pretrained(tmp_path).eos_token == "<eos2>"
    # The trained model stops where it has learnt to.
    assert 2 in trainer.model.generation_config.eos_token_id


def test_an_end_of_sequence_token_must_be_known(tmp_path):
    with pytest.raises(ConfigError, match="`eos_token='<nope>'` is not in the vocabulary"):
        make(tmp_path, eos_token="<nope>")


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_chat_template_is_taken_from_elsewhere_and_saved(tmp_path, kind):
    template = "{% for message in messages %}{{ message['content'] }} <close> {% endfor %}"
    folder, path = tmp_path / "source", tmp_path / "template.jinja"
    word_tokenizer(chat_template=template).save_pretrained(folder)
    path.write_text(template)
    tokenizer = word_tokenizer()
    source = str({"file": path, "folder": folder}[kind])
    trainer = make(tmp_path / "out", CHAT, tokenizer=tokenizer, chat_template_path=source)
    assert rows(trainer) == [[20, 5, 21, 5]]
    assert tokenizer.chat_template == CHAT_TEMPLATE
    trainer.save_model(str(tmp_path / "saved"))
    assert PreTrainedTokenizerFast.from_pretrained(tmp_path / "saved").chat_template == template


def test_the_variant_that_marks_the_assistant_is_not_saved(tmp_path):
    trainer = make(tmp_path, CHAT, assistant_only_loss=True)
    assert [row["labels"] for row in trainer.train_dataset] == [[-100] * 6 + CHAT_IDS[6:]]
    assert trainer.processing_class.chat_template == CHAT_TEMPLATE


@pytest.mark.parametrize("path", ["missing.jinja", "missing_folder"])
def test_a_template_that_is_not_there(tmp_path, path):
    with pytest.raises(ConfigError, match="`chat_template_path="):
        make(tmp_path, CHAT, chat_template_path=str(tmp_path / path))


def test_a_tokenizer_without_a_template_gives_none(tmp_path):
    word_tokenizer(chat_template=None).save_pretrained(tmp_path / "source")
    with pytest.raises(ConfigError, match="has no chat template"):
        make(tmp_path, CHAT, chat_template_path=str(tmp_path / "source"))


def test_messages_need_a_template(tmp_path):
    with pytest.raises(DataError, match="has no chat template"):
        make(tmp_path, CHAT, tokenizer=word_tokenizer(chat_template=None))


def test_variables_of_the_template_reach_it_and_those_of_the_row_come_first(tmp_path):
    template = "{% if mode %}{{ mode }} {% endif %}{% for m in messages %}{{ m['content'] }} {% endfor %}"
    messages = CHAT[0]["messages"]
    data = [{"messages": messages, "chat_template_kwargs": {"mode": mode}} for mode in ("w8", None)]
    tokenizer = word_tokenizer(chat_template=template)
    trainer = make(tmp_path, Dataset.from_list(data), tokenizer=tokenizer, chat_template_kwargs={"mode": "w9"})
    assert rows(trainer) == [[8, 20, 21], [9, 20, 21]]


@pytest.mark.parametrize("tools", ["missing", [], None])
def test_no_tools_are_no_tools(tmp_path, tools):
    template = "{% if tools is not none %}w8 {% endif %}{% for m in messages %}{{ m['content'] }} {% endfor %}"
    row = {"messages": CHAT[0]["messages"], **({} if tools == "missing" else {"tools": tools})}
    assert rows(make(tmp_path, Dataset.from_list([row]), tokenizer=word_tokenizer(chat_template=template))) == [
        [20, 21]
    ]
