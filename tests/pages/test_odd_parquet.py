"""Parquet as it is found: any row groups, encodings and codecs; damage and contradictions are told by name."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from pages.making import (
    END,
    TOKENIZER,
    batches_of,
    choose,
    digest_of,
    documents,
    ids_of,
    loader_of,
    make_dataset,
    packed,
    put_shards,
    shard_bytes,
    table_bytes,
    text_of,
    texts_of,
)
from penstock import R2DatasetLoader
from penstock.errors import BadRowError, PageError, SourceError
from penstock.pages import make_index
from penstock.pages.data_pages import decode, take_pages
from penstock.pages.thrift import I64, NotWhole, read_struct, write_struct
from penstock.storage import open_storage

COUNT = 200
TEXTS = texts_of("web", COUNT)


def tokens_of(folder: Path, rows: int = 30, **more: Any) -> list[int]:
    """All tokens of config web, page by page in the order of rows."""
    pages = [("web", first, "train") for first in range(0, COUNT, rows)]
    loader = loader_of(pages, dataset=folder, num_rows_per_page=rows, **more)
    return [int(token) for batch in loader.batches() for token in batch.input_ids[batch.mask]]


EXPECTED = TOKENIZER.encode(TEXTS).ids.tolist()


# -- shapes ------------------------------------------------------------------------------------------------------------


def uneven_groups(texts: list[str]) -> bytes:
    """Row groups of 1, 2, 0, 3, 40, ... rows."""
    import io

    buffer = io.BytesIO()
    table = pa.table({"text": texts, "other": list(range(len(texts)))})
    chance, at = random.Random(3), 0
    with parquet.ParquetWriter(buffer, table.schema) as writer:
        while at < len(texts):
            count = chance.choice([0, 1, 1, 2, 3, 17, 40])
            writer.write_table(table.slice(at, count))
            at += count
    return buffer.getvalue()


def nested(texts: list[str], depth: int) -> pa.Table:
    column: Any = pa.array(texts)
    for name in ["text", "inner", "outer"][:depth]:
        column = pa.StructArray.from_arrays([column], [name])
    return pa.table({"x": list(range(len(texts))), "doc": column})


SHAPES: dict[str, tuple[bytes, str | None]] = {
    "one group": (shard_bytes(TEXTS, group_rows=1000), None),
    "one row a group": (shard_bytes(TEXTS, group_rows=1), None),
    "uneven and empty groups": (uneven_groups(TEXTS), None),
    "zstd": (shard_bytes(TEXTS, compression="zstd"), None),
    "gzip": (shard_bytes(TEXTS, compression="gzip"), None),
    "brotli": (shard_bytes(TEXTS, compression="brotli"), None),
    "lz4": (shard_bytes(TEXTS, compression="lz4"), None),
    "not compressed": (shard_bytes(TEXTS, compression="none"), None),
    "no dictionary": (shard_bytes(TEXTS, use_dictionary=False), None),
    "dictionary that runs full": (shard_bytes(TEXTS, dictionary_pagesize_limit=50, group_rows=200), None),
    "delta length": (
        shard_bytes(TEXTS, use_dictionary=False, column_encoding={"text": "DELTA_LENGTH_BYTE_ARRAY"}),
        None,
    ),
    "delta": (shard_bytes(TEXTS, use_dictionary=False, column_encoding={"text": "DELTA_BYTE_ARRAY"}), None),
    "many data pages": (shard_bytes(TEXTS, group_rows=1000, data_page_size=64, write_batch_size=5), None),
    "data pages of version 2": (
        shard_bytes(TEXTS, group_rows=70, data_page_version="2.0", data_page_size=64, write_batch_size=5),
        None,
    ),
    "checksums and a page index": (shard_bytes(TEXTS, write_page_checksum=True, write_page_index=True), None),
    "large strings": (table_bytes(pa.table({"text": pa.array(TEXTS, pa.large_string())})), None),
    "dictionary type": (table_bytes(pa.table({"text": pa.array(TEXTS).dictionary_encode()})), None),
    "required": (
        table_bytes(pa.table([pa.array(TEXTS)], pa.schema([pa.field("text", pa.string(), nullable=False)]))),
        None,
    ),
    "another usual name": (table_bytes(pa.table({"title": ["t"] * COUNT, "content": TEXTS})), None),
    "a name of its own": (table_bytes(pa.table({"text": ["no"] * COUNT, "essay": TEXTS})), "essay"),
    "a dot in its name": (table_bytes(pa.table({"a.b": TEXTS})), "a.b"),
    "inside a struct": (table_bytes(nested(TEXTS, 1), group_rows=30), "doc.text"),
    "inside three": (table_bytes(nested(TEXTS, 3), group_rows=30, data_page_size=64), "doc.outer.inner.text"),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_gives_the_same_tokens(tmp_path: Path, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data, column = SHAPES[shape]
    folder = put_shards(tmp_path / "set", {"web/0.parquet": data}, text_column=column)
    assert tokens_of(folder, text_column=column) == EXPECTED
    monkeypatch.setattr(R2DatasetLoader, "READ_BUFFER_SIZE", 100)
    monkeypatch.setattr(R2DatasetLoader, "TOKEN_CACHE_BYTES", 0)
    assert tokens_of(folder, rows=7, text_column=column) == EXPECTED, "by many small ranges as well"


def test_pages_cross_row_groups_shards_and_empty_shards(tmp_path: Path) -> None:
    cuts = [0, 1, 1, 40, 40, 41, 150, 200, 200]
    shards = {
        f"web/{number}.parquet": shard_bytes(TEXTS[first:last], group_rows=9)
        for number, (first, last) in enumerate(pairwise(cuts))
    }
    assert tokens_of(put_shards(tmp_path / "set", shards)) == EXPECTED


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(st.one_of(st.none(), st.text(max_size=40)), min_size=1, max_size=60),
    group_rows=st.integers(1, 30),
    page_bytes=st.integers(1, 200),
    version=st.sampled_from(["1.0", "2.0"]),
    dictionary=st.booleans(),
    data=st.data(),
)
def test_any_rows_of_any_chunk_are_found(
    texts: list[str | None], group_rows: int, page_bytes: int, version: str, dictionary: bool, data: st.DataObject
) -> None:
    raw = shard_bytes(
        texts,
        group_rows=group_rows,
        data_page_size=page_bytes,
        data_page_version=version,
        use_dictionary=dictionary,
        write_batch_size=3,
    )
    footer = parquet.read_metadata(pa.BufferReader(raw))
    group = data.draw(st.integers(0, footer.num_row_groups - 1))
    rows, column = footer.row_group(group).num_rows, footer.row_group(group).column(1)
    first = data.draw(st.integers(0, rows - 1))
    last = data.draw(st.integers(first + 1, rows))
    start = column.dictionary_page_offset or column.data_page_offset
    own = memoryview(raw)[start : start + column.total_compressed_size]
    taken = take_pages(lambda at, size: own[at : at + size], len(own), first, last, "it")
    begins = group * group_rows
    found = decode([taken], [column.compression], 1, "it")
    expected = texts[begins + first : begins + last]
    assert found.rows == expected
    assert found.size_bytes == sum(len((text or "").encode()) for text in expected)


# -- rows without text -------------------------------------------------------------------------------------------------


def with_nulls(tmp_path: Path, nulls: set[int]) -> Path:
    texts = [None if row in nulls else text for row, text in enumerate(TEXTS)]
    return put_shards(tmp_path / "set", {"web/0.parquet": shard_bytes(texts)})


def test_a_null_text_stops_and_is_named_by_shard_and_row(tmp_path: Path) -> None:
    folder = with_nulls(tmp_path, {77})
    for _ in range(2):  # the second time from the token cache
        with pytest.raises(
            BadRowError, match=r"page \('web', 60, 'train'\).*web/0.parquet: row 77 .*on_bad_row='skip'"
        ):
            tokens_of(folder)


def test_a_null_text_can_be_left_out_and_shifts_nobody(tmp_path: Path) -> None:
    nulls = {0, 77, 78, 199}
    folder = with_nulls(tmp_path, nulls)
    kept = [text for row, text in enumerate(TEXTS) if row not in nulls]
    for _ in range(2):
        assert tokens_of(folder, on_bad_row="skip") == TOKENIZER.encode(kept).ids.tolist()
    pages = choose(folder, 4, 50)
    loader = loader_of(pages, on_bad_row="skip")
    list(loader)
    report = loader.report()
    assert (report["samples"], report["skipped"], report["complete"]) == (200, 4, True)
    whole = loader_of(choose(put_shards(tmp_path / "whole", {"web/0.parquet": shard_bytes(TEXTS)}), 4, 50))
    list(whole)
    # Another file, so another data set; but what of it was read is the same.
    assert {tuple(page) for page in loader.report()["pages"]} == {tuple(page) for page in whole.report()["pages"]}


def test_a_page_of_nothing_but_nulls_has_no_batches(tmp_path: Path) -> None:
    folder = put_shards(tmp_path / "set", {"web/0.parquet": shard_bytes([None] * 10 + TEXTS[:5])})
    loader = loader_of([("web", 0, "train")], dataset=folder, num_rows_per_page=10, on_bad_row="skip")
    assert list(loader) == []
    assert loader.report()["complete"]
    both = loader_of(
        [("web", 10, "train"), ("web", 0, "train")], dataset=folder, num_rows_per_page=10, on_bad_row="skip"
    )
    assert len(list(both)) == len(both) > 0
    assert both.report()["complete"]


def test_a_null_struct_is_a_null_text(tmp_path: Path) -> None:
    column = pa.array([{"text": "a"}, None, {"text": None}, {"text": "b"}])
    folder = put_shards(
        tmp_path / "set", {"web/0.parquet": table_bytes(pa.table({"doc": column}))}, text_column="doc.text"
    )
    loader = loader_of([("web", 0, "train")], dataset=folder, text_column="doc.text", on_bad_row="skip", length=4)
    assert [token for batch in loader.batches() for token in batch.input_ids[batch.mask]] == ids_of("a") + ids_of("b")
    assert loader.report()["skipped"] == 2


# -- columns -----------------------------------------------------------------------------------------------------------


def test_a_column_that_is_not_there_is_an_error_that_names_those_that_are(tmp_path: Path) -> None:
    folder = put_shards(tmp_path / "set", {"web/0.parquet": shard_bytes(TEXTS)})
    with pytest.raises(PageError, match=r"no column 'body': it has 'id', 'text', 'score'; name one of them"):
        tokens_of(folder, text_column="body")


@pytest.mark.parametrize(
    ("column", "problem"),
    [
        ("score", "holds DOUBLE, expected strings"),
        ("list.list.element", "holds lists"),
        ("raw", "holds BYTE_ARRAY, expected strings"),
    ],
)
def test_a_column_of_something_else_is_refused(tmp_path: Path, column: str, problem: str) -> None:
    table = pa.table({"text": ["t"], "score": [1.0], "list": [["a", "b"]], "raw": pa.array([b"b"])})
    folder = put_shards(tmp_path / "set", {"web/0.parquet": table_bytes(table)})
    with pytest.raises(PageError, match=problem):
        list(loader_of([("web", 0, "train")], dataset=folder, text_column=column))


def test_without_a_usual_name_the_column_must_be_named(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    storage.put("web/0.parquet", table_bytes(pa.table({"essay": ["t"]})))
    with pytest.raises(SourceError, match="usual name for text: it has 'essay'; name one of them as text_column"):
        make_index(storage)


# -- contradictions and damage -----------------------------------------------------------------------------------------


def reindex(folder: Path, change: Any) -> None:
    path = folder / "_shard_sizes.json"
    sizes = orjson.loads(path.read_bytes())
    change(sizes)
    path.write_bytes(orjson.dumps(sizes))


def test_a_shard_with_other_rows_than_the_index_says_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path / "set", {"web": COUNT})

    def change(sizes: Any) -> None:
        sizes["web"]["shards"][1]["num_rows"] -= 1
        del sizes["web"]["total_rows"], sizes["web"]["shards"][1]["size_bytes"]

    reindex(folder, change)
    with pytest.raises(
        PageError, match=r"web/0001.parquet has 90 rows, _shard_sizes.json says 89: .*penstock pages index"
    ):
        list(loader_of([("web", 80, "train")], dataset=folder))


def test_a_shard_of_another_size_than_the_index_says_was_written_again(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path / "set", {"web": COUNT})
    pages = choose(folder, 2, 20)
    for shard in (folder / "web").iterdir():
        shard.write_bytes(shard_bytes(["another"] * 90))
    with pytest.raises(PageError, match="it was written again"):
        list(loader_of(pages))


def test_a_missing_shard_is_an_error_that_names_it(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path / "set", {"web": COUNT})
    (folder / "web" / "0001.parquet").unlink()
    with pytest.raises(PageError, match=r"page \('web', 90, 'train'\).*0001.parquet is missing"):
        list(loader_of([("web", 90, "train")], dataset=folder))


def test_a_damaged_name_in_a_footer_is_told(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path / "set", {"web": COUNT})
    shard = folder / "web" / "0000.parquet"
    data = bytearray(shard.read_bytes())
    schema = data.index(b"\x05score", len(data) - int.from_bytes(data[-8:-4], "little") - 8)  # its length, and a name
    data[schema + 1] = 0xFF
    shard.write_bytes(data)
    with pytest.raises(PageError, match=r"0000\.parquet is not a sound Parquet file"):
        digest_of(loader_of([("web", 0, "train")], dataset=folder))


def test_a_shard_that_is_written_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path / "set", {"web": COUNT})
    loader = loader_of([("web", 0, "train"), ("web", 20, "train")], dataset=folder, num_rows_per_page=20)
    loader.TOKEN_CACHE_BYTES = 0
    digest_of(loader)
    shard = folder / "web" / "0000.parquet"
    data = bytearray(shard.read_bytes())
    data[10] ^= 1
    shard.write_bytes(data)
    with pytest.raises(PageError, match=r"0000\.parquet was written again"):
        digest_of(loader)


@pytest.mark.parametrize("data", [b"", b"PAR1", b"no parquet at all", b"PAR1" + b"\xff" * 60 + b"PARE"])
def test_what_is_no_parquet_is_named(tmp_path: Path, data: bytes) -> None:
    storage = open_storage(tmp_path)
    storage.put("web/0.parquet", data)
    with pytest.raises(SourceError, match=r"0\.parquet"):
        make_index(storage)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(4, 2000), value=st.integers(0, 255))
def test_a_damaged_byte_gives_the_texts_or_an_error_and_nothing_else(place: int, value: int) -> None:
    texts = [f"text number {row}" for row in range(60)]
    raw = bytearray(shard_bytes(texts, group_rows=60, data_page_size=64, write_batch_size=4, write_page_checksum=True))
    footer = parquet.read_metadata(pa.BufferReader(bytes(raw)))
    column = footer.row_group(0).column(1)
    start = column.dictionary_page_offset or column.data_page_offset
    raw[start + place % column.total_compressed_size] = value
    own = memoryview(raw)[start : start + column.total_compressed_size]
    try:
        taken = take_pages(lambda at, size: own[at : at + size], len(own), 20, 40, "it")
        got = decode([taken], [column.compression], 1, "it").rows
    except SourceError:
        return
    assert len(got) == 20


# -- thrift ------------------------------------------------------------------------------------------------------------


@given(st.binary(max_size=200))
def test_any_bytes_are_a_struct_or_a_value_error(data: bytes) -> None:
    try:
        _, end = read_struct(memoryview(data), 0)
    except ValueError:
        return
    assert 0 < end <= len(data)


@given(
    st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=40), st.binary(max_size=300), st.integers(1, 200)
)
def test_what_is_written_is_read(numbers: list[int], data: bytes, field: int) -> None:
    fields = [
        (field, numbers[0]),
        (field + 1, I64(2**40)),
        (field + 20, data),
        (field + 21, numbers),
        (field + 22, ((1, 5),)),
    ]
    written = write_struct(fields)
    got, end = read_struct(memoryview(written), 0)
    assert end == len(written)
    assert got == {
        field: numbers[0],
        field + 1: 2**40,
        field + 20: data,
        field + 21: numbers,
        field + 22: {1: 5},
    }
    for cut in range(end):
        with pytest.raises(NotWhole):
            read_struct(memoryview(written)[:cut], 0)


def test_the_texts_of_this_file_are_what_they_are() -> None:
    assert documents([("web", 0, "train")], COUNT, {"web": COUNT}) == [
        ids_of(text_of("web", row)) for row in range(COUNT)
    ]
    assert packed([[1, END]], 1, 4) == [[[1, END, END, END]]]
    assert batches_of([]) == []
