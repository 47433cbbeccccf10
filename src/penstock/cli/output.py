"""How commands speak: JSON for programs, tables for people."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

_WIDE = 240

TOKENIZER_HELP = (
    "A tokenizer.json, a folder with one, a *.tiktoken file, or a model of the Hub: owner/name or owner/name@revision. "
    "Behind it, ?end_of_text=TOKEN says what ends a document, and ?encoding=cl100k_base how a tiktoken file cuts words."
)

CHECK_FAILED = 3
"""Exit code of a check that did not hold."""


def print_json(value: Any) -> None:
    import orjson

    sys.stdout.write(orjson.dumps(value, option=orjson.OPT_INDENT_2).decode() + "\n")


def console(*, stderr: bool = False) -> Console:
    """A console that prints words as they are: names of files and rows may hold anything, markup too."""
    from rich.console import Console

    class Honest(Console):
        """Says that its reader has gone, instead of ending the program."""

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    screen = Honest(stderr=stderr, highlight=False, soft_wrap=True, markup=False, emoji=False)
    if not screen.is_terminal:
        screen.width = _WIDE  # nobody reads it at 80 columns: cut nothing
    return screen


def print_facts(title: str, facts: dict[str, object]) -> None:
    """A short list of names and values."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), title_justify="left", show_header=False, box=None, padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name, Text(str(value)))
    console().print(table)


def counted(count: int, what: str) -> str:
    """A number of things as people say it: 1 sample, 2,000 samples."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def human_bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
