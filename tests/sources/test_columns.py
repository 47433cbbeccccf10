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


@pytest.mark.parametrize("text", ["words", ""])
def test_a_string_is_text_even_an_empty_one(text: str) -> None:
    assert text_of({"text": text}, "text") == text


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": 5}, "column 'text' holds int, expected a string"),
        ({"text": None}, "column 'text' holds NoneType, expected a string"),
        ({"other": "a"}, "no column 'text': the row has 'other'"),
        ({}, "no column 'text': the row has no columns"),
    ],
)
def test_a_row_without_text_says_why(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(SourceError) as caught:
        text_of(row, "text")
    assert str(caught.value) == reason
