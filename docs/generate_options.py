"""Writes the tables of options into the pages of the trainers, between two markers; `make docs` runs it.

The options are declared and explained in `trl/trainer/arguments.py`. What is added here is which of them this version
does not carry out.
"""

import dataclasses
import inspect
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trl.cli.values import describe, value_type
from trl.trainer.arguments import (
    DistillationArguments,
    DPOArguments,
    GRPOArguments,
    KTOArguments,
    OnlineDPOArguments,
    RLOOArguments,
    SamplerCorrectionArguments,
    ServerDistillationArguments,
    SFTArguments,
    VLLMArguments,
)


@dataclasses.dataclass(frozen=True)
class Table:
    """The options of one config.

    Attributes:
        arguments: the option class.
        beyond: another one whose table says the rest.
    """

    arguments: type
    beyond: type = object

    @property
    def config(self) -> str:
        """The config's name."""
        return self.arguments.__name__.replace("Arguments", "Config")

    @property
    def begin(self) -> str:
        """The line before the table in its page."""
        return f"<!-- options of {self.config}: written by docs/generate_options.py -->"


DOCS = Path(__file__).parent
PAGES = {
    "sft.md": [Table(SFTArguments)],
    "dpo.md": [Table(DPOArguments)],
    "kto.md": [Table(KTOArguments)],
    "grpo.md": [Table(GRPOArguments)],
    "rloo.md": [Table(RLOOArguments)],
    "online_dpo.md": [Table(OnlineDPOArguments)],
    "distillation.md": [
        Table(DistillationArguments),
        Table(ServerDistillationArguments, beyond=DistillationArguments),
    ],
}
END = "<!-- end of options -->"

REFUSED = "Not supported yet: setting it is an error."
UNREAD = "Accepted, without effect in this version."
NOTES = {
    "cache_implementation": REFUSED,
    "use_transformers_continuous_batching": REFUSED,
    "transformers_continuous_batching_config": REFUSED,
    "use_transformers_paged": REFUSED,
    "max_tool_calling_iterations": REFUSED,
    "log_completions_hub_repo": REFUSED,
    "pad_to_multiple_of": UNREAD,
    "ds3_gather_for_generation": UNREAD,
    "log_multimodal": UNREAD,
}
# Of one option class, and those that are made of it.
OWN_NOTES: dict[type, dict[str, str]] = {
    RLOOArguments: {"vllm_importance_sampling_mode": "Here only `sequence_truncate` and `sequence_mask`."},
    OnlineDPOArguments: {"router_aux_loss_coef": UNREAD},
    DistillationArguments: {"router_aux_loss_coef": UNREAD},
}
GROUP_NOTES = {
    VLLMArguments: "[vLLM inside the trainer](colocate.md) and [vLLM servers](vllm.md) explain them.",
    SamplerCorrectionArguments: "With `use_vllm` only; [how it is meant](vllm.md#log-probs-and-their-correction).",
}


def option_groups(table: Table) -> Iterator[tuple[str, str, list[dataclasses.Field[Any]]]]:
    """Yields title, note and fields of each option group of a table, in the order of its fields.

    An option that several groups declare, because it has another default or another meaning in one of them, is shown
    in the first one as it is in the last one.
    """
    fields = {field.name: field for field in dataclasses.fields(table.arguments)}
    for group in reversed(table.arguments.__mro__):
        if group in table.beyond.__mro__:
            continue
        own = [fields.pop(name) for name in inspect.get_annotations(group) if name in fields]
        if own:
            title = inspect.getdoc(group) or group.__name__
            if group is table.arguments:
                title = f"Others of `{table.config}`"
            yield title.splitlines()[0].rstrip("."), GROUP_NOTES.get(group, ""), own


def note_of(arguments: type, name: str) -> str | None:
    """What is added to the meaning of an option."""
    own = [OWN_NOTES[group][name] for group in arguments.__mro__ if name in OWN_NOTES.get(group, {})]
    return own[0] if own else NOTES.get(name)


def default_of(field: dataclasses.Field[Any]) -> Any:
    """The default of an option, also of one that is made anew for each config."""
    made = field.default_factory
    return field.default if made is dataclasses.MISSING else made()


def options_table(table: Table) -> str:
    """The options as Markdown: for each group a heading and a table."""
    hints = typing.get_type_hints(table.arguments)
    parts = []
    for title, note, fields in option_groups(table):
        lines = [
            f"### {title}",
            "",
            *([note, ""] if note else []),
            "| option | takes | default | meaning |",
            "|---|---|---|---|",
        ]
        for field in fields:
            meaning = " ".join(filter(None, (field.metadata["help"], note_of(table.arguments, field.name))))
            takes = describe(value_type(hints[field.name])).replace(" (JSON on the command line)", "")
            cells = [f"`{field.name}`", takes, f"`{default_of(field)!r}`", meaning]
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def filled(page: str, tables: list[Table]) -> str:
    """The text of a page with what stands between each table's markers replaced.

    Raises:
        ValueError: a marker is missing.
    """
    for table in tables:
        head, begin, rest = page.partition(table.begin)
        _, end, tail = rest.partition(END)
        if not begin or not end:
            raise ValueError(f"The page needs the lines {table.begin!r} and {END!r}, in this order.")
        page = f"{head}{begin}\n\n{options_table(table)}\n\n{end}{tail}"
    return page


def main() -> None:
    """Write all pages."""
    for name, tables in PAGES.items():
        path = DOCS / name
        path.write_text(filled(path.read_text(encoding="utf-8"), tables), encoding="utf-8")
        print(f"docs/{name}: options written", file=sys.stderr)


if __name__ == "__main__":
    main()
