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
from trl.trainer.arguments import GRPOArguments, SamplerCorrectionArguments, VLLMArguments

DOCS = Path(__file__).parent
PAGES = {"grpo.md": GRPOArguments}
BEGIN = "<!-- options: written by docs/generate_options.py -->"
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
GROUP_NOTES = {
    VLLMArguments: "[vLLM inside the trainer](colocate.md) and [vLLM servers](vllm.md) explain them.",
    SamplerCorrectionArguments: "With `use_vllm` only; [how it is meant](vllm.md#log-probs-and-their-correction).",
}


def option_groups(arguments: type) -> Iterator[tuple[str, str, list[dataclasses.Field[Any]]]]:
    """Yields title, note and fields of each option group that `arguments` is made of, in the order of its fields."""
    fields = {field.name: field for field in dataclasses.fields(arguments)}
    for group in reversed(arguments.__mro__):
        own = [fields[name] for name in inspect.get_annotations(group) if name in fields]
        if own:
            title = "Others" if group is arguments else inspect.getdoc(group) or group.__name__
            yield title.splitlines()[0].rstrip("."), GROUP_NOTES.get(group, ""), own


def options_table(arguments: type) -> str:
    """The options as Markdown: for each group a heading and a table."""
    hints = typing.get_type_hints(arguments)
    parts = []
    for title, note, fields in option_groups(arguments):
        lines = [
            f"### {title}",
            "",
            *([note, ""] if note else []),
            "| option | takes | default | meaning |",
            "|---|---|---|---|",
        ]
        for field in fields:
            meaning = " ".join(filter(None, (field.metadata["help"], NOTES.get(field.name))))
            takes = describe(value_type(hints[field.name])).replace(" (JSON on the command line)", "")
            cells = [f"`{field.name}`", takes, f"`{field.default!r}`", meaning]
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def filled(page: str, arguments: type) -> str:
    """The text of a page with what stands between the markers replaced.

    Raises:
        ValueError: a marker is missing.
    """
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"The page needs the lines {BEGIN!r} and {END!r}, in this order.")
    return f"{head}{BEGIN}\n\n{options_table(arguments)}\n\n{END}{tail}"


def main() -> None:
    """Write all pages."""
    for name, arguments in PAGES.items():
        path = DOCS / name
        path.write_text(filled(path.read_text(encoding="utf-8"), arguments), encoding="utf-8")
        print(f"docs/{name}: options written", file=sys.stderr)


if __name__ == "__main__":
    main()
