"""Which column of a row is its text, and how chats and instructions become text.

    one column        "text"                         a string, as it is; a list of messages, rendered turn by turn
    several columns   "instruction,input,output"     those that are there and not empty, a blank line between them

A chat is a list of ``{"role": ..., "content": ...}`` or ``{"from": ..., "value": ...}``; each turn becomes
``<|role|>``, a newline, its content and a newline. The stored row keeps everything as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.errors import SourceError
from penstock.sources.tokens import TOKEN_COLUMN

TEXT_COLUMNS = ("text", "content", "document", "article", "body", "passage", "sentence", "story", "code", "abstract")
"""Looked for in this order when the user names no column."""

CHAT_COLUMNS = ("messages", "conversations", "conversation")
INSTRUCTION_COLUMNS = "instruction,input,output"

_ASKED_AND_ANSWERED = (
    (("instruction", "input"), "output"),
    (("prompt",), "completion"),
    (("prompt",), "response"),
    (("question",), "answer"),
)

_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant"}


def pick_text_column(rows: Sequence[dict[str, Any]], wanted: str | None) -> str:
    """Choose where the text is by the first rows: what the user names, else a known name, a chat, instructions."""
    columns = _columns(rows)
    if wanted is not None:
        if wanted in columns or ("," in wanted and set(wanted.split(",")) & set(columns)):
            return wanted
        raise SourceError(
            f"no column {wanted!r}: the rows have {_listed(columns)}; name one of them with --text-column"
        )
    for name in TEXT_COLUMNS:
        if any(isinstance(row.get(name), str) for row in rows):
            return name
    for name in CHAT_COLUMNS:
        if any(_is_chat(row.get(name)) for row in rows):
            return name
    if any(isinstance(row.get("instruction"), str) and isinstance(row.get("output"), str) for row in rows):
        return INSTRUCTION_COLUMNS
    held = {name: type(row[name]).__name__ for row in rows for name in TEXT_COLUMNS if row.get(name) is not None}
    told = "".join(f"; {name!r} holds {kind}, expected a string" for name, kind in held.items())
    raise SourceError(
        f"no text column found among {_listed(columns)}{told}: name it with --text-column, or pass --no-text"
    )


def pick_columns(
    rows: Sequence[dict[str, Any]], *, text: str | None = None, tokens: str | None = None
) -> tuple[str | None, str | None]:
    """Choose the text column or, where the rows come tokenised and hold no text, the token column; the other is None.

    Args:
        rows: The first rows.
        text: The text column, where the user names it.
        tokens: The token column, where the user names it.
    """
    if tokens is not None:
        if any(tokens in row for row in rows):
            return None, tokens
        raise SourceError(f"no column {tokens!r}: the rows have {_listed(_columns(rows))}: name one of them")
    try:
        return pick_text_column(rows, text), None
    except SourceError:
        if text is None and any(isinstance(row.get(TOKEN_COLUMN), list | np.ndarray) for row in rows):
            return None, TOKEN_COLUMN
        raise


def text_of(row: dict[str, Any], column: str) -> str:
    """The text of a row, or a SourceError that says why it has none."""
    if column in row:
        return _as_text(row[column], column)
    if "," in column:
        parts = [_as_text(row[name], name) for name in column.split(",") if row.get(name) is not None]
        if parts:
            return "\n\n".join(part for part in parts if part)
    raise SourceError(f"no column {column!r}: the row has {_listed(list(row))}")


def messages_of(row: dict[str, Any], column: str) -> list[dict[str, str]]:
    """The turns of a row, each with its role and its content: of a chat, of an instruction, of a prompt."""
    if _is_chat(row.get(column)):
        return [dict(zip(("role", "content"), _role_and_content(turn, column), strict=True)) for turn in row[column]]
    for asked, answered in _ASKED_AND_ANSWERED:
        asks = [row[name] for name in asked if isinstance(row.get(name), str) and row[name]]
        if asks and isinstance(row.get(answered), str):
            return [
                {"role": "user", "content": "\n\n".join(asks)},
                {"role": "assistant", "content": row[answered]},
            ]
    raise SourceError(
        f"no turns in the row, which has {_listed(list(row))}: expected a chat in {column!r}, instruction and output, "
        "or prompt and completion; to learn all of a text, do not ask for the assistant's turns alone"
    )


def _as_text(value: Any, column: str) -> str:
    if isinstance(value, str):
        return value
    if _is_chat(value):
        return "".join(_turn(message, column) for message in value)
    if isinstance(value, list):
        held = "a list that is no chat" if value else "an empty list"
        raise SourceError(f"column {column!r} holds {held}, expected a string, or turns that each have a role")
    raise SourceError(f"column {column!r} holds {type(value).__name__}, expected a string")


def _is_chat(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(message, dict) and ("role" in message or "from" in message) for message in value)
    )


def _turn(message: dict[str, Any], column: str) -> str:
    role, content = _role_and_content(message, column)
    return f"<|{role}|>\n{content}\n"


def _role_and_content(message: dict[str, Any], column: str) -> tuple[str, str]:
    role = message.get("role", message.get("from"))
    content = message.get("content", message.get("value"))
    if isinstance(content, list):  # parts of a turn; those that are no text have none to give
        content = "".join(
            part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)
        )
    if content is None:
        content = ""  # a turn that only calls a tool
    if not isinstance(role, str) or not isinstance(content, str):
        raise SourceError(f"column {column!r} holds a chat whose turn is no text: {message!r:.80}")
    return _ROLES.get(role, role), content


def _columns(rows: Sequence[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for row in rows for key in row))


def _listed(columns: list[str]) -> str:
    return ", ".join(repr(column) for column in columns) or "no columns"
