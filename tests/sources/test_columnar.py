"""Parquet and Arrow: every value survives in the encoding that `penstock.sources.values` names."""

from __future__ import annotations

import datetime
import decimal
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow as pa
import pytest
from hypothesis import strategies as st
from pyarrow import parquet

from penstock.sources import columnar
from sources.making import PACKERS, Reading, arrow_file_of, arrow_stream_of, bad_rows, error_of, parquet_of
from sources.suite import Event, RawRow, SourceSuite

SCHEMA = pa.schema({"text": pa.string(), "n": pa.int64(), "x": pa.list_(pa.float64())})
NAN, INF = float("nan"), float("inf")

floats = st.floats(allow_nan=False, allow_infinity=False)
values = st.fixed_dictionaries(
    {
        "text": st.none() | st.text(max_size=5),
        "n": st.none() | st.integers(-(2**63), 2**63 - 1),
        "x": st.none() | st.lists(floats, max_size=2),
    }
)


class TestParquetSource(SourceSuite):
    suffix = ".parquet"

    def rows(self) -> st.SearchStrategy[list[RawRow]]:
        return st.lists(st.builds(lambda value: RawRow(b"", value), values), max_size=5)

    def file_of(self, rows: list[RawRow], *, newline_at_end: bool) -> bytes:
        return self.bytes_of(pa.Table.from_pylist([row.value for row in rows], SCHEMA))

    def bytes_of(self, table: pa.Table) -> bytes:
        return parquet_of(table, group_rows=2)


class TestPackedParquetSource(TestParquetSource):
    suffix = ".parquet.gz"

    def bytes_of(self, table: pa.Table) -> bytes:
        return PACKERS[".gz"](parquet_of(table, group_rows=2))


class TestArrowFileSource(TestParquetSource):
    suffix = ".arrow"

    def bytes_of(self, table: pa.Table) -> bytes:
        return arrow_file_of(table, batch_rows=2)


class TestArrowStreamSource(TestArrowFileSource):
    def bytes_of(self, table: pa.Table) -> bytes:
        return arrow_stream_of(table, batch_rows=2)


BOTH = pytest.mark.parametrize(
    ("name", "write"), [("a.parquet", parquet_of), ("a.arrow", arrow_file_of), ("b.arrow", arrow_stream_of)]
)
Write = Callable[..., bytes]


@BOTH
@pytest.mark.parametrize("codec", sorted(PACKERS))
def test_a_packed_file_is_unpacked(tmp_path: Path, name: str, write: Write, codec: str) -> None:
    rows = [{"a": number} for number in range(5)]
    packed = PACKERS[codec](write(pa.Table.from_pylist(rows)))
    assert Reading(tmp_path, name + codec, packed).values == rows


@BOTH
@pytest.mark.parametrize("count", [0, 1, 1023, 1024, 1025, 3000])
@pytest.mark.parametrize("group_rows", [1000, 100_000])
def test_every_row_comes_once_whatever_their_number(
    tmp_path: Path, name: str, write: Write, count: int, group_rows: int
) -> None:
    table = pa.table({"id": pa.array(range(count), pa.int64())})
    reading = Reading(tmp_path, name, write(table, group_rows))
    assert reading.events == [Event(f"{name}:{number + 1}", {"id": number}) for number in range(count)]


AMSTERDAM = ZoneInfo("Europe/Amsterdam")
NOON = datetime.datetime(2024, 5, 6, 12, 30, 15, 123456)
CASES: list[tuple[pa.DataType, Any, Any]] = [
    (pa.timestamp("us"), NOON, "2024-05-06T12:30:15.123456"),
    (pa.timestamp("s"), NOON.replace(microsecond=0), "2024-05-06T12:30:15"),
    (
        pa.timestamp("ms", tz="UTC"),
        NOON.replace(microsecond=5000, tzinfo=datetime.UTC),
        "2024-05-06T12:30:15.005000+00:00",
    ),
    (pa.timestamp("us", tz="Europe/Amsterdam"), NOON.replace(tzinfo=AMSTERDAM), "2024-05-06T12:30:15.123456+02:00"),
    (pa.timestamp("us", tz="+05:30"), NOON.replace(tzinfo=datetime.UTC), "2024-05-06T18:00:15.123456+05:30"),
    (pa.timestamp("ns"), 1_000, "1970-01-01T00:00:00.000001"),
    (pa.timestamp("ns"), 1, "1970-01-01T00:00:00.000000001"),
    (pa.timestamp("ns"), -1, "1969-12-31T23:59:59.999999999"),
    (pa.timestamp("ns", tz="+05:30"), 1, "1970-01-01T05:30:00.000000001+05:30"),
    (pa.list_(pa.timestamp("ns")), [1, None], ["1970-01-01T00:00:00.000000001", None]),
    (
        pa.struct({"a": pa.timestamp("ns"), "b": pa.int8()}),
        {"a": 2, "b": 1},
        {"a": "1970-01-01T00:00:00.000000002", "b": 1},
    ),
    (pa.map_(pa.string(), pa.timestamp("ns")), [("k", 3)], [["k", "1970-01-01T00:00:00.000000003"]]),
    (pa.date32(), datetime.date(2024, 5, 6), "2024-05-06"),
    (pa.date64(), datetime.date(2024, 5, 6), "2024-05-06"),
    (pa.time32("s"), datetime.time(1, 2, 3), "01:02:03"),
    (pa.time64("us"), datetime.time(1, 2, 3, 4), "01:02:03.000004"),
    (pa.time64("ns"), 5, "00:00:00.000000005"),
    (pa.duration("us"), datetime.timedelta(seconds=1, microseconds=500_000), {"$seconds": 1.5}),
    (pa.duration("ns"), 1_500_000_001, {"$seconds": 1.500000001}),
    (pa.decimal128(20, 2), decimal.Decimal("123456789012345678.90"), {"$decimal": "123456789012345678.90"}),
    (pa.binary(), b"\x00\xff", {"$base64": "AP8="}),
    (pa.large_binary(), b"", {"$base64": ""}),
    (pa.binary(2), b"ab", {"$base64": "YWI="}),
    (pa.large_string(), "é", "é"),
    (pa.dictionary(pa.int8(), pa.string()), "word", "word"),
    (pa.null(), None, None),
    (pa.bool_(), True, True),
    (pa.uint64(), 2**64 - 1, 2**64 - 1),
    (pa.int64(), -(2**63), -(2**63)),
    (pa.float16(), 1.5, 1.5),
    (pa.float32(), 0.25, 0.25),
    (pa.float64(), 1e300, 1e300),
    (pa.float16(), NAN, {"$float": "nan"}),
    (pa.float32(), INF, {"$float": "inf"}),
    (pa.float64(), -INF, {"$float": "-inf"}),
    (pa.list_(pa.float64()), [1.0, NAN, None], [1.0, {"$float": "nan"}, None]),
    (pa.struct({"a": pa.list_(pa.float32())}), {"a": [INF]}, {"a": [{"$float": "inf"}]}),
    (pa.map_(pa.string(), pa.float64()), [("k", NAN)], [["k", {"$float": "nan"}]]),
    (pa.list_(pa.list_(pa.int32())), [[1], [], None], [[1], [], None]),
    (pa.list_(pa.binary()), [b"a"], [{"$base64": "YQ=="}]),
    (pa.large_list(pa.string()), ["a", None], ["a", None]),
    (pa.list_(pa.int16(), 2), [1, 2], [1, 2]),
    (pa.struct({"a": pa.struct({"b": pa.date32()})}), {"a": {"b": datetime.date(1, 1, 1)}}, {"a": {"b": "0001-01-01"}}),
    (pa.map_(pa.int32(), pa.string()), [(1, "a"), (2, None)], [[1, "a"], [2, None]]),
]


@BOTH
@pytest.mark.parametrize(("kind", "value", "stored"), CASES, ids=lambda value: str(value)[:40])
def test_every_value_survives(
    tmp_path: Path, name: str, write: Write, kind: pa.DataType, value: Any, stored: Any
) -> None:
    table = pa.table({"v": pa.array([value, None, value], kind), "text": ["a", "b", "c"]})
    assert Reading(tmp_path, name, write(table)).values == [
        {"v": stored, "text": "a"},
        {"v": None, "text": "b"},
        {"v": stored, "text": "c"},
    ]


@pytest.mark.parametrize("kind", [pa.float64(), pa.dictionary(pa.int8(), pa.float64())])
def test_a_nan_behind_a_dictionary_is_no_null(tmp_path: Path, kind: pa.DataType) -> None:
    column = pa.array([1.0, NAN, None], pa.float64())
    table = pa.table({"v": column.dictionary_encode() if pa.types.is_dictionary(kind) else column})
    stored = [{"v": 1.0}, {"v": {"$float": "nan"}}, {"v": None}]
    assert Reading(tmp_path, "a.arrow", arrow_file_of(table)).values == stored


@BOTH
def test_a_value_no_calendar_has_is_a_bad_row(tmp_path: Path, name: str, write: Write) -> None:
    table = pa.table({"v": pa.array([0, 10**18, 1], pa.int64()).cast(pa.timestamp("us"))})
    (bad,) = bad_rows(tmp_path, name, write(table, 10))
    assert (bad.position, bad.before) == (f"{name}:2", 1)
    assert Reading(tmp_path, name, write(table, 10)).values[2] == {"v": "1970-01-01T00:00:00.000001"}


@BOTH
def test_a_string_that_is_not_utf8_is_a_bad_row(tmp_path: Path, name: str, write: Write) -> None:
    column = pa.array([b"fine", b"ol\xe9", b"more"], pa.binary()).view(pa.string())
    (bad,) = bad_rows(tmp_path, name, write(pa.table({"v": column}), 10))
    assert bad.position == f"{name}:2"
    assert "UTF8" in bad.reason


def test_an_empty_row_group_in_the_middle_is_passed_over(tmp_path: Path) -> None:
    file = io.BytesIO()
    schema = pa.schema({"a": pa.int64()})
    with parquet.ParquetWriter(file, schema) as writer:
        for numbers in ([1, 2], [], [3]):
            writer.write_table(pa.table({"a": numbers}, schema))
    reading = Reading(tmp_path, "a.parquet", file.getvalue())
    assert reading.events == [Event(f"a.parquet:{number}", {"a": number}) for number in (1, 2, 3)]


@pytest.mark.parametrize("write", [arrow_file_of, arrow_stream_of])
def test_rows_without_columns_are_rows(tmp_path: Path, write: Write) -> None:
    table = pa.table({"a": [1, 2, 3]}).select([])
    assert Reading(tmp_path, "a.arrow", write(table)).values == [{}, {}, {}]


@BOTH
def test_two_columns_of_one_name_are_refused(tmp_path: Path, name: str, write: Write) -> None:
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2])], ["a", "a"])
    assert "two columns have one name: 'a': rename one" in error_of(tmp_path, name, write(table))


@BOTH
def test_large_rows_come_few_at_a_time(
    tmp_path: Path, name: str, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columnar, "BATCH_BYTES", 1000)
    rows = [{"a": f"{number:0400d}"} for number in range(10)]
    reading = Reading(
        tmp_path,
        name,
        write(pa.Table.from_pylist(rows), 10, **{"use_dictionary": False} if name == "a.parquet" else {}),
    )
    assert reading.values == rows
    assert len({cursor.skip - 1 - (cursor.skip - 1) % 2 for cursor in reading.cursors if cursor}) == 5


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
@pytest.mark.parametrize("data", [b"", b"garbage" * 20, b"PAR1", b"ARROW1\0\0"])
def test_what_is_none_is_told(tmp_path: Path, name: str, data: bytes) -> None:
    assert "not a sound" in error_of(tmp_path, name, data)


def test_a_stream_cut_between_two_batches_is_no_shorter_stream(tmp_path: Path) -> None:
    data = arrow_stream_of(pa.table({"a": [1, 2, 3, 4]}), 2)
    reading = Reading(tmp_path, "a.arrow", data[:-8])
    assert reading.values == [{"a": 1}, {"a": 2}, {"a": 3}, {"a": 4}]
    assert reading.error is not None
    assert "it is truncated" in reading.error
