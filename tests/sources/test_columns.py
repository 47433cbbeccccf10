"""Which column of a row is its text."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.errors import SourceError
from penstock.sources import pick_text_column, text_of
from penstock.sources.columns import TEXT_COLUMNS


def test_the_named_column_is_taken_even_where_a_better_known_one_is() -> None:
    assert pick_text_column([{"text": "a", "title": "b"}], "title") == "title"


@pytest.mark.parametrize("name", TEXT_COLUMNS)
def test_a_well_known_column_is_found(name: str) -> None:
    assert pick_text_column([{"id": "7", "url": "http", name: "words"}], None) == name


def test_the_better_known_column_wins_whatever_their_order() -> None:
    assert pick_text_column([{"abstract": "a", "content": "b", "text": "c"}], None) == "text"
    assert pick_text_column([{"abstract": "a", "content": "b"}], None) == "content"


def test_a_well_known_name_without_text_is_not_taken() -> None:
    assert pick_text_column([{"text": 5, "body": "words"}, {"text": None, "body": "more"}], None) == "body"


def test_a_column_that_appears_later_is_found() -> None:
    assert pick_text_column([{"id": "1"}, {"id": "2", "text": "a"}], None) == "text"
    assert pick_text_column([{"id": "1"}, {"id": "2", "title": "a"}], "title") == "title"


@pytest.mark.parametrize("row", [{"id": "x"}, {"id": "x", "label": "y"}, {"text": 1}, {}])
def test_no_column_is_guessed_from_being_a_string(row: dict[str, Any]) -> None:
    with pytest.raises(SourceError, match=r"no text column found among .*--text-column") as caught:
        pick_text_column([row], None)
    assert all(repr(column) in str(caught.value) for column in row)


def test_a_wrong_name_lists_the_columns_there_are() -> None:
    with pytest.raises(SourceError, match="no column 'txt': the rows have 'id', 'text', 'more'"):
        pick_text_column([{"id": 1, "text": "a"}, {"id": 2, "more": "b"}], "txt")


MESSAGES = [{"role": "user", "content": "Two and two?"}, {"role": "assistant", "content": "Four."}]
SHARED = [{"from": "human", "value": "Two and two?"}, {"from": "gpt", "value": "Four."}]


@pytest.mark.parametrize(("name", "chat"), [("messages", MESSAGES), ("conversations", SHARED)])
def test_a_chat_is_found_and_rendered_turn_by_turn(name: str, chat: list[dict[str, str]]) -> None:
    row = {"id": "7", name: chat}
    assert pick_text_column([row], None) == name
    assert text_of(row, name) == "<|user|>\nTwo and two?\n<|assistant|>\nFour.\n"


def test_turns_in_parts_and_turns_without_words_are_rendered_too() -> None:
    parts = [{"type": "text", "text": "Look: "}, {"type": "image"}, {"type": "text", "text": "a cat"}]
    chat = [{"role": "user", "content": parts}, {"role": "assistant", "content": None, "tool_calls": []}]
    assert text_of({"messages": chat}, "messages") == "<|user|>\nLook: a cat\n<|assistant|>\n\n"


@pytest.mark.parametrize("chat", [[{"role": 1, "content": "a"}], [{"role": "user", "content": 5}]])
def test_a_chat_whose_turn_is_no_text_says_so(chat: list[dict[str, Any]]) -> None:
    with pytest.raises(SourceError, match="holds a chat whose turn is no text"):
        text_of({"messages": chat}, "messages")


@pytest.mark.parametrize("value", [[], [1], ["a"], [{"text": "a"}], {"role": "user"}])
def test_what_is_no_chat_is_not_taken_for_one(value: Any) -> None:
    with pytest.raises(SourceError, match="no text column found"):
        pick_text_column([{"messages": value}], None)
    with pytest.raises(SourceError, match="expected a string"):
        text_of({"messages": value}, "messages")


def test_instructions_are_joined_and_an_empty_input_left_out() -> None:
    rows = [
        {"instruction": "Add.", "input": "2 2", "output": "4"},
        {"instruction": "Greet.", "input": "", "output": "Hi"},
    ]
    assert pick_text_column(rows, None) == "instruction,input,output"
    assert [text_of(row, "instruction,input,output") for row in rows] == ["Add.\n\n2 2\n\n4", "Greet.\n\nHi"]
    assert text_of({"instruction": "Greet.", "output": "Hi"}, "instruction,input,output") == "Greet.\n\nHi"


def test_several_columns_can_be_named() -> None:
    row = {"title": "A", "body": "B", "id": 1}
    assert pick_text_column([row], "title,body") == "title,body"
    assert text_of(row, "title,body") == "A\n\nB"
    with pytest.raises(SourceError, match="column 'id' holds int"):
        text_of(row, "title,id")
    with pytest.raises(SourceError, match="no column 'x,y'"):
        text_of(row, "x,y")


def test_a_column_whose_name_has_a_comma_is_itself() -> None:
    assert text_of({"a,b": "whole", "a": "part"}, "a,b") == "whole"


@pytest.mark.parametrize("text", ["words", ""])
def test_a_string_is_text_even_an_empty_one(text: str) -> None:
    assert text_of({"text": text}, "text") == text


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": 5}, "column 'text' holds int, expected a string"),
        ({"text": []}, "column 'text' holds an empty list, expected a string, or turns that each have a role"),
        (
            {"text": [{"content": "x"}]},
            "column 'text' holds a list that is no chat, expected a string, or turns that each have a role",
        ),
        ({"text": None}, "column 'text' holds NoneType, expected a string"),
        ({"other": "a"}, "no column 'text': the row has 'other'"),
        ({}, "no column 'text': the row has no columns"),
    ],
)
def test_a_row_without_text_says_why(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(SourceError) as caught:
        text_of(row, "text")
    assert str(caught.value) == reason
