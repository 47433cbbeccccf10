"""Text in other encodings than UTF-8, and whole files instead of lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.sources import ReadOptions, open_source
from sources.making import Reading, error_of
from sources.suite import events, rows_a_batch

CONTENT = {
    ".txt": "é\nzwei\n\nüber",
    ".jsonl": '{"text":"é"}\n{"text":"ü"}\n?\n{"text":"ß"}\n',
    ".json": '[{"text":"é"},\n{"text":"ü"},{"text":"ß"}]',
    ".csv": 'text,b\né,"1\n2"\nü,3\nß,4\n',
    ".md": "# é\n",
}


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16", "utf-16-le", "utf-32", "cp1252", "utf-8-sig"])
@pytest.mark.parametrize("suffix", sorted(CONTENT))
@pytest.mark.parametrize("group_bytes", [1, 20, 1 << 20])
def test_a_file_reads_like_its_utf8_twin_from_every_cursor(
    tmp_path: Path, encoding: str, suffix: str, group_bytes: int
) -> None:
    name, options = f"a{suffix}", ReadOptions(encoding=encoding)
    with rows_a_batch(group_bytes):
        expected = Reading(tmp_path, name, CONTENT[suffix].encode()).events
        reading = Reading(tmp_path, name, CONTENT[suffix].encode(encoding), options)
        assert (reading.events, reading.error) == (expected, None)
        for index, cursor in enumerate(reading.cursors):
            if cursor is not None:
                assert events(open_source(tmp_path / name, options=options), cursor) == expected[index + 1 :]


@pytest.mark.parametrize("encoding", ["utf-17", "", "base64", "rot13", "utf\0"])
def test_an_unknown_encoding_is_refused_at_once(encoding: str) -> None:
    with pytest.raises(ConfigError, match=r"encoding=.* is unknown: expected a name such as utf-16 or latin-1"):
        ReadOptions(encoding=encoding)


def test_names_of_one_encoding_are_one_source(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a\n")

    def revision(encoding: str | None) -> object:
        return open_source(tmp_path, options=ReadOptions(encoding=encoding)).revision()

    assert revision("latin-1") == revision("ISO-8859-1") != revision("cp1252")
    assert revision("utf8") == revision("UTF-8") == revision(None) != revision("latin-1")


@pytest.mark.parametrize(("encoding", "data"), [("utf-16", b"\xff\xfea\0\n\0\0\xd8\n\0"), ("ascii", b"a\n\xff\n")])
def test_a_wrong_encoding_is_told(tmp_path: Path, encoding: str, data: bytes) -> None:
    error = error_of(tmp_path, "a.txt", data, ReadOptions(encoding=encoding))
    assert f"a.txt: not {encoding}" in error
    assert "--encoding" in error


def test_what_lies_before_half_a_character_comes_out(tmp_path: Path) -> None:
    data = "line\n".encode("utf-16") * 1 + "next\n".encode("utf-16-le") + b"x"
    reading = Reading(tmp_path, "a.txt", data, ReadOptions(encoding="utf-16"))
    assert reading.values == [{"text": "line"}, {"text": "next"}]
    assert reading.error is not None
    assert "a.txt: not utf-16: truncated data" in reading.error


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".csv", ".json"])
def test_without_an_encoding_what_is_not_utf8_is_a_bad_row(tmp_path: Path, suffix: str) -> None:
    data = CONTENT[suffix].encode("latin-1").replace(b"\xfc", b"fine")
    twin = [event.value for event in Reading(tmp_path, f"a{suffix}", CONTENT[suffix].encode()).events]
    values = Reading(tmp_path, f"a{suffix}", data).values
    assert len(values) == len(twin)
    assert values[0] is None


def test_a_text_file_can_be_one_sample(tmp_path: Path) -> None:
    options = ReadOptions(whole_files=True)
    assert Reading(tmp_path, "a.txt", b"one\n\ntwo", options).values == [{"text": "one\n\ntwo", "path": "a.txt"}]
    assert Reading(tmp_path, "a.txt", b"", options).values == [{"text": "", "path": "a.txt"}]
    assert Reading(tmp_path, "a.jsonl", b'{"a":1}\n{"a":2}', options).values == [{"a": 1}, {"a": 2}]
    assert open_source(tmp_path, options=options).revision() != open_source(tmp_path).revision()


def test_encodings_do_not_concern_columns(tmp_path: Path) -> None:
    import pyarrow as pa

    from sources.making import parquet_of

    data = parquet_of(pa.table({"text": ["é"]}))
    assert Reading(tmp_path, "a.parquet", data, ReadOptions(encoding="utf-16")).values == [{"text": "é"}]
