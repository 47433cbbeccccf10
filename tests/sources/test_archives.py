"""Zip and tar: members are files; what nobody can read is told, what archivers add is passed over."""

from __future__ import annotations

import io
import logging
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pytest

from penstock.sources import ReadOptions
from sources.making import PACKERS, Reading, arrow_file_of, error_of, jsonl_of, parquet_of, tar_of, zip_of
from sources.suite import Event, RawRow
from sources.test_jsonl import TestJsonlSource as JsonlSuite

Archive = Callable[[dict[str, bytes]], bytes]


def tar_gz_of(members: dict[str, bytes]) -> bytes:
    return PACKERS[".gz"](tar_of(members))


EACH = pytest.mark.parametrize(("name", "archive"), [("a.zip", zip_of), ("a.tar", tar_of), ("a.tgz", tar_gz_of)])


class TestZipSource(JsonlSuite):
    suffix = ".zip"
    archive: Archive = staticmethod(zip_of)

    @contextmanager
    def source_of(self, files: list[list[RawRow]], newline_at_end: bool) -> Iterator[tuple[str, list[Event]]]:
        members: dict[str, bytes] = {"b/": b"", "README": b"of no format"}
        expected = []
        for number, rows in enumerate(files):
            members[f"b/{number}.jsonl"] = self.file_of(rows, newline_at_end=newline_at_end)
            members[f"b/.{number}.jsonl"] = b"hidden"
            expected += self.events_of(f"a{self.suffix}/b/{number}.jsonl", rows)
        with TemporaryDirectory() as folder:
            Path(folder, f"a{self.suffix}").write_bytes(self.archive(members))
            yield folder, expected


class TestTarSource(TestZipSource):
    suffix = ".tar"
    archive = staticmethod(tar_of)


class TestTarGzSource(TestZipSource):
    suffix = ".tar.gz"
    archive = staticmethod(tar_gz_of)


def numbered(first: int) -> list[dict[str, Any]]:
    return [{"n": first}, {"n": first + 1}]


@EACH
def test_members_of_any_format_are_read(tmp_path: Path, name: str, archive: Archive) -> None:
    members = {
        "00.jsonl": jsonl_of(numbered(0)),
        "01.json": b'[{"n":2},{"n":3}]',
        "02.csv": b"n\n4\n5\n",
        "03.parquet": parquet_of(pa.Table.from_pylist(numbered(6))),
        "04.arrow": arrow_file_of(pa.Table.from_pylist(numbered(8))),
        "05.jsonl.gz": PACKERS[".gz"](jsonl_of(numbered(10))),
        "06.parquet.zst": PACKERS[".zst"](parquet_of(pa.Table.from_pylist(numbered(12)))),
        "07.jsonl": b"",
        "deep/er/08.ndjson": jsonl_of(numbered(14)),
    }
    reading = Reading(tmp_path, name, archive(members))
    assert [int(value["n"]) for value in reading.values if value] == list(range(16))
    assert reading.events[-1].position == f"{name}/deep/er/08.ndjson:2"
    assert all(cursor is not None for cursor in reading.cursors)


@EACH
def test_what_archivers_add_and_hidden_members_are_passed_over(tmp_path: Path, name: str, archive: Archive) -> None:
    members = {
        "__MACOSX/": b"",
        "__MACOSX/._a.jsonl": b"\0\5",
        "__MACOSX/b.jsonl": b"?",
        ".DS_Store": b"?",
        ".hidden/a.jsonl": b"?",
        "a/.b.jsonl": b"?",
        "a/": b"",
        "a/c.jsonl": jsonl_of(numbered(0)),
    }
    assert Reading(tmp_path, name, archive(members)).values == numbered(0)


@EACH
def test_members_nobody_can_read_are_told(
    tmp_path: Path, name: str, archive: Archive, caplog: pytest.LogCaptureFixture
) -> None:
    members = {"a.jsonl": jsonl_of(numbered(0)), "b.png": b"", "c.png": b"", "d.zip": zip_of({}), "LICENSE": b""}
    with caplog.at_level(logging.WARNING):
        assert Reading(tmp_path, name, archive(members)).values == numbered(0)
    assert f"{name}: left out 2 x .png, 1 x .zip, 1 x no suffix: no reader for these" in caplog.text


@EACH
@pytest.mark.parametrize("members", [{}, {"a.png": b""}, {"a/": b""}, {".a.jsonl": b"{}"}])
def test_an_archive_with_nothing_to_read_is_told(
    tmp_path: Path, name: str, archive: Archive, members: dict[str, bytes]
) -> None:
    assert "holds no file that can be read" in error_of(tmp_path, name, archive(members))


@EACH
def test_a_member_that_is_damaged_is_named(tmp_path: Path, name: str, archive: Archive) -> None:
    members = {"a.jsonl": jsonl_of(numbered(0)), "b.jsonl.gz": b"garbage", "c.jsonl": b"{}"}
    reading = Reading(tmp_path, name, archive(members))
    assert reading.values == numbered(0)
    assert reading.error is not None
    assert reading.error.startswith(f"{name}/b.jsonl.gz: cannot be read to its end")


@EACH
def test_an_archive_cut_anywhere_is_told(tmp_path: Path, name: str, archive: Archive) -> None:
    rows = [{"n": number * 7919 % 100_003} for number in range(200)]
    members = {f"{number}.jsonl": jsonl_of(rows[number * 50 : number * 50 + 50]) for number in range(4)}
    data = archive(members)
    end = data.rindex(b"}") + 1 if name == "a.tar" else len(data)  # padding follows, which nobody misses
    most = 0
    for size in range(0, end, max(1, end // 150)):
        reading = Reading(tmp_path, name, data[:size])
        assert reading.error is not None, f"cut at {size} of {len(data)}"
        assert reading.error.startswith(name)
        assert reading.values == rows[: len(reading.values)]
        most = max(most, len(reading.values))
    assert most == 0 if name == "a.zip" else most >= 150


def test_a_damaged_header_is_not_the_end_of_a_tar(tmp_path: Path) -> None:
    data = bytearray(tar_of({"a.jsonl": b"{}\n", "b.jsonl": b"{}\n"}))
    data[1024 + 5] ^= 1
    reading = Reading(tmp_path, "a.tar", bytes(data))
    assert reading.values == [{}]
    assert reading.error is not None


def test_an_encrypted_zip_is_told(tmp_path: Path) -> None:
    data = bytearray(zip_of({"a.jsonl": b"{}\n"}))
    for signature, place in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        data[data.index(signature) + place] |= 1
    assert "a.zip/a.jsonl: cannot be unpacked" in error_of(tmp_path, "a.zip", bytes(data))


def test_a_name_in_a_tar_that_is_not_utf8_is_told(tmp_path: Path) -> None:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as archive:
        archive.addfile(tarfile.TarInfo("b\udcff.jsonl"))
    (tmp_path / "a.tar").write_bytes(file.getvalue())
    assert "the name is not UTF-8" in error_of(tmp_path, "a.tar", file.getvalue())


def test_members_of_a_zip_come_by_name_and_those_of_a_tar_as_they_lie(tmp_path: Path) -> None:
    members = {"b.txt": b"b", "a.txt": b"a", "c.txt": b"c"}
    assert [value["text"] for value in Reading(tmp_path, "a.zip", zip_of(members)).values if value] == ["a", "b", "c"]
    assert [value["text"] for value in Reading(tmp_path, "a.tar", tar_of(members)).values if value] == ["b", "a", "c"]


def test_options_hold_for_members_too(tmp_path: Path) -> None:
    data = zip_of({"a.txt": "é\nö\n".encode("latin-1")})
    options = ReadOptions(encoding="latin-1", whole_files=True)
    assert Reading(tmp_path, "a.zip", data, options).values == [{"text": "é\nö\n", "path": "a.zip/a.txt"}]


def test_a_stored_zip_is_read_too(tmp_path: Path) -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.parquet", parquet_of(pa.Table.from_pylist(numbered(0))))
    assert Reading(tmp_path, "a.zip", file.getvalue()).values == numbered(0)
