"""Rows without what they are needed for join the bad ones, and everything stays in order."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.sources import Cursor, open_source, set_textless_rows_aside, set_tokenless_rows_aside
from sources.suite import events

GOOD, UNFIT, BAD = b'{"text":"a","ids":[1]}', b'{"text":5,"ids":["a"]}', b"nonsense"


@pytest.mark.parametrize("what", ["text", "tokens"])
@settings(max_examples=60, deadline=None)
@given(lines=st.lists(st.sampled_from([GOOD, UNFIT, BAD]), max_size=9))
def test_every_row_is_good_or_bad_in_its_place(what: str, lines: list[bytes]) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder, "a.jsonl")
        path.write_bytes(b"\n".join(lines))
        source = open_source(path)
        every = events(source)
        for batch in source.batches(Cursor()):
            if what == "text":
                set_textless_rows_aside(batch, "text")
            else:
                set_tokenless_rows_aside(batch, "ids")
            good = [number + 1 for number, line in enumerate(lines) if line is GOOD]
            assert batch.numbers == good
            assert batch.lines == [GOOD + b"\n"] * len(good)
            assert len(batch.values) == len(good)
            wrong = [number + 1 for number, line in enumerate(lines) if line is not GOOD]
            assert [row.position for row in batch.bad] == [f"a.jsonl:{number}" for number in wrong]
            assert [row.before for row in batch.bad] == [sum(other < number for other in good) for number in wrong]
            for taken, number in enumerate(good, 1):
                assert events(source, batch.cursor_after(taken)) == every[number:]


def test_the_reason_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(UNFIT + b"\n{}\n" + BAD)
    reasons = []
    for screen, column in ((set_textless_rows_aside, "text"), (set_tokenless_rows_aside, "ids")):
        (batch,) = open_source(tmp_path / "a.jsonl").batches(Cursor())
        screen(batch, column)
        reasons.append([row.reason for row in batch.bad])
    assert reasons[0][:2] == ["column 'text' holds int, expected a string", "no column 'text': the row has no columns"]
    assert "not of whole numbers" in reasons[1][0]
    assert "no such column" in reasons[1][1]
    assert reasons[0][2] == reasons[1][2]
