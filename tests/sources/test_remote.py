"""Files of buckets and web servers as sources: the rows of local ones, of one version, from any cursor."""

from __future__ import annotations

import io
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import orjson
import pyarrow as pa
import pytest

from blocks.remote_stores import files, objects
from equipment.buckets import use_key
from equipment.nursery import nursery
from equipment.proxy import faulty_proxy
from equipment.servers import S3Server
from equipment.web import WebServer, web_server
from penstock.blocks import BlockManager, ingest
from penstock.errors import AccessDenied, BlockStoreError, SourceError
from penstock.sources import Cursor, Source, open_source
from penstock.storage import open_storage, ranged
from sources.making import PACKERS, arrow_file_of, arrow_stream_of, jsonl_of, parquet_of, tar_of, zip_of
from sources.suite import events, rows_a_batch

ROWS = [{"text": f"sample {number} " + "x" * (number * 37 % 400), "id": number} for number in range(40)]
TABLE = pa.Table.from_pylist(ROWS)
CSV = b"text,id\n" + b"".join(b'"%s",%d\n' % (row["text"].encode(), row["id"]) for row in ROWS)


def npy_of() -> bytes:
    file = io.BytesIO()
    np.save(file, np.arange(60, dtype=np.uint16).reshape(10, 6))
    return file.getvalue()


FILES: dict[str, Callable[[], bytes]] = {
    "a.jsonl": lambda: jsonl_of(ROWS),
    "a.json": lambda: orjson.dumps(ROWS),
    "a.csv": lambda: CSV,
    "a.tsv": lambda: CSV.replace(b",", b"\t"),
    "a.parquet": lambda: parquet_of(TABLE, 7),
    "a.arrow": lambda: arrow_file_of(TABLE, 7),
    "b.arrow": lambda: arrow_stream_of(TABLE, 7),
    "a.txt": lambda: b"".join(row["text"].encode() + b"\n" for row in ROWS),
    "a.md": lambda: b"# one sample\n",
    "a.npy": npy_of,
    "a.bin": lambda: np.arange(5000, dtype=np.uint16).tobytes(),
    "a.zip": lambda: zip_of({"x.jsonl": jsonl_of(ROWS[:20]), "y.parquet": parquet_of(TABLE, 7)}),
    "a.tar": lambda: tar_of({"x.jsonl": jsonl_of(ROWS[:20]), "y.txt": b"one\ntwo\n"}),
    "a.tar.gz": lambda: PACKERS[".gz"](tar_of({"x.jsonl": jsonl_of(ROWS)})),
    "a.parquet.gz": lambda: PACKERS[".gz"](parquet_of(TABLE, 7)),
    **{f"a.jsonl{codec}": (lambda pack=pack: pack(jsonl_of(ROWS))) for codec, pack in PACKERS.items()},
}


def put(url: str, contents: dict[str, bytes]) -> str:
    storage = open_storage(url)
    for key, data in contents.items():
        storage.put(key, data)
    return url


def lines(source: Source, cursor: Cursor | None = None) -> Iterator[tuple[bytes, Cursor]]:
    """The rows as stored, each with the cursor behind it."""
    for batch in source.batches(cursor or Cursor()):
        for place, line in enumerate(batch.lines):
            yield line, batch.cursor_after(place + 1)


def values(source: Source) -> list[dict[str, Any] | None]:
    return [event.value for event in events(source)]


@pytest.fixture
def web() -> Iterator[WebServer]:
    with web_server() as server:
        yield server


@pytest.fixture
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges of so few bytes that a small file is many."""
    monkeypatch.setattr(ranged, "_FIRST_RANGE_BYTES", 200)
    monkeypatch.setattr(ranged, "_LARGEST_RANGE_BYTES", 700)
    monkeypatch.setattr(ranged, "_BUFFER_BYTES", 100)


# Formats and cursors


@pytest.mark.parametrize("name", FILES)
def test_every_format_is_read_as_from_a_disk_and_goes_on_from_any_row(
    tmp_path: Path, bucket: str, web: WebServer, name: str
) -> None:
    data = FILES[name]()
    (tmp_path / name).write_bytes(data)
    put(bucket, {name: data})
    web.files[f"folder/{name}"] = data
    expected = list(lines(open_source(tmp_path / name)))
    assert expected
    for spec in (f"{bucket}/{name}", f"{web.url}/folder/{name}"):
        assert list(lines(open_source(spec))) == expected
        for index in (0, len(expected) // 2, len(expected) - 1):
            rest = [line for line, _ in lines(open_source(spec), expected[index][1])]
            assert rest == [line for line, _ in expected[index + 1 :]]


@pytest.mark.usefixtures("small_ranges")
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet", "a.zip"])
def test_many_ranges_make_one_file(tmp_path: Path, bucket: str, name: str) -> None:
    (tmp_path / name).write_bytes(FILES[name]())
    put(bucket, {name: FILES[name]()})
    assert events(open_source(f"{bucket}/{name}")) == events(open_source(tmp_path / name))


def test_megatron_files_are_read_with_their_index(tmp_path: Path, bucket: str) -> None:
    sizes = np.array([3, 5, 2], dtype=np.int32)
    pointers = np.array([0, 6, 16], dtype=np.int64)
    index = b"MMIDIDX\x00\x00" + (1).to_bytes(8, "little") + bytes([8]) + (3).to_bytes(8, "little")
    index += (4).to_bytes(8, "little") + sizes.tobytes() + pointers.tobytes() + np.arange(4, dtype=np.int64).tobytes()
    contents = {"a.bin": np.arange(10, dtype=np.uint16).tobytes(), "a.idx": index}
    for name, data in contents.items():
        (tmp_path / name).write_bytes(data)
    put(bucket, contents)
    expected = list(lines(open_source(tmp_path / "a.bin")))
    assert len(expected) == 3
    assert list(lines(open_source(f"{bucket}/a.bin"))) == expected
    assert list(lines(open_source(f"{bucket}/*.bin"))) == expected


def test_a_folder_that_datasets_saved_is_read_in_its_order(tmp_path: Path, bucket: str) -> None:
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved", num_shards=3)
    put(bucket, files(tmp_path / "saved"))
    assert values(open_source(bucket)) == ROWS


# Names


def test_a_prefix_is_everything_readable_below_it_sorted(bucket: str, caplog: pytest.LogCaptureFixture) -> None:
    put(
        f"{bucket}/raw",
        {
            "b/2.jsonl": b'{"text":"2"}\n',
            "a/1.jsonl": b'{"text":"1"}\n',
            "c.jsonl.gz": PACKERS[".gz"](b'{"text":"3"}\n'),
            ".hidden/0.jsonl": b'{"text":"hidden"}\n',
            "_picture.png": b"",
            "store/block_manifest.json": b"{}",
            "store/blocks/block_00000.jsonl": b'{"text":"stored"}\n',
        },
    )
    put(bucket, {"raw2/4.jsonl": b'{"text":"another prefix"}\n'})
    for spec in (f"{bucket}/raw", f"{bucket}/raw/"):
        source = open_source(spec)
        assert source.name == "raw"
        assert values(source) == [{"text": "1"}, {"text": "2"}, {"text": "3"}]
    told = " ".join(record.message for record in caplog.records)
    assert "raw/store: left out: it is a block store" in told
    assert "left out 1 x .png" in told


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.jsonl", ["1"]),
        ("**/*.jsonl", ["1", "2", "3"]),
        ("a/*.jsonl", ["2"]),
        ("*/*.jsonl", ["2"]),
        ("**/[34].jsonl", ["3"]),
        ("a/**", ["2", "3"]),
    ],
)
def test_patterns_are_those_of_the_hub(bucket: str, pattern: str, expected: list[str]) -> None:
    put(bucket, {f"{key}.jsonl": b'{"text":"%s"}\n' % key[-1].encode() for key in ("1", "a/2", "a/b/3")})
    assert [row["text"] for row in values(open_source(f"{bucket}/{pattern}")) if row] == expected


def test_what_is_not_there_is_told(bucket: str, web: WebServer, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    put(bucket, {"a.jsonl": b"{}\n", "b.xyz": b"", "store/block_manifest.json": b"{}"})
    for spec, told in [
        (f"{bucket}/missing", "no such object, and nothing below it"),
        (f"{bucket}/*.parquet", "the pattern matches no object"),
        (f"{bucket}/b.xyz", "no reader for '.xyz'"),
        (f"{bucket}/store", "is a block store already"),
        (f"{bucket}/?.jsonl", "expected no '?'"),
        ("s3://no-such-bucket-here/a", "no such bucket|no such object"),
        (f"{web.url}/missing.jsonl", "the server has no such file"),
        (web.url, "names no file"),
        ("ftp://user:password@server/a.jsonl", "^ftp:// is no source: expected a file"),
        ("https://user:password@server/a.jsonl", "credentials do not belong into a URL"),
        ("https://server/a.jsonl?token=password", "expected no '?'"),
    ]:
        with pytest.raises(SourceError, match=told) as caught:
            open_source(spec)
        assert "password" not in str(caught.value)
    use_key(monkeypatch, "stranger", s3.url)
    with pytest.raises(SourceError, match="403") as caught:
        open_source(f"{bucket}/a.jsonl")
    assert isinstance(caught.value.__cause__, AccessDenied)


def test_the_output_is_never_read_as_input(bucket: str) -> None:
    put(bucket, {"a.jsonl": b'{"text":"a"}\n'})
    assert ingest(bucket, f"{bucket}/out", 10).total_samples == 1
    assert ingest(f"{bucket}/**/*.jsonl", f"{bucket}/out2", 10).total_samples == 2  # those of the first, named so
    put(f"{bucket}/out3", {"b.jsonl": b'{"text":"b"}\n'})
    with pytest.raises(SourceError, match="lies inside"):
        ingest(f"{bucket}/out3/*.jsonl", f"{bucket}/out3", 10)


# Versions


@pytest.mark.usefixtures("small_ranges")
def test_an_object_that_changes_while_it_is_read_is_an_error_and_not_a_mix(bucket: str) -> None:
    put(bucket, {"a.txt": b"old line\n" * 1000})
    source = open_source(f"{bucket}/a.txt")
    source.revision()
    seen = []
    with rows_a_batch(20), pytest.raises(SourceError, match=r"a.txt was written while it was read"):  # noqa: PT012
        for batch in source.batches(Cursor()):
            seen += batch.values
            put(bucket, {"a.txt": b"new line\n" * 1000})
    assert {row["text"] for row in seen} == {"old line"}


@pytest.mark.usefixtures("small_ranges")
@pytest.mark.parametrize("etags", ["strong", "weak", "none"])
def test_a_file_of_a_web_server_that_changes_is_an_error_too(web: WebServer, etags: str) -> None:
    web.etags = etags
    web.files["a.txt"] = b"old line\n" * 1000
    assert len(values(open_source(f"{web.url}/a.txt"))) == 1000
    source = open_source(f"{web.url}/a.txt")
    source.revision()
    web.files["a.txt"] = b"new line\n" * 1000
    web.modified["a.txt"] = "Wed, 05 Feb 2025 10:00:00 GMT"
    with pytest.raises(SourceError, match=r"a.txt was written while it was read"):
        list(source.batches(Cursor()))


def test_an_object_that_changed_between_two_tries_is_another_data_set(tmp_path: Path, bucket: str) -> None:
    put(bucket, {"a.jsonl": jsonl_of(ROWS[:30]) + b"a bad row\n"})
    with pytest.raises(SourceError, match=r"a.jsonl:31"):
        ingest(f"{bucket}/a.jsonl", tmp_path / "out", 10)
    put(bucket, {"a.jsonl": jsonl_of(ROWS[:30][::-1])})
    with pytest.raises(BlockStoreError, match="its files have changed"):
        ingest(f"{bucket}/a.jsonl", tmp_path / "out", 10)
    assert BlockManager(tmp_path / "out", dataset_chunk_size=10).get_rows(0, 0) == ROWS[:10]


# Ingesting


def test_a_killed_ingest_from_a_bucket_into_a_bucket_goes_on_from_its_cursor(
    tmp_path: Path, bucket: str, s3: S3Server
) -> None:
    put(
        f"{bucket}/raw",
        {
            "1.jsonl.gz": PACKERS[".gz"](jsonl_of(ROWS)),
            "2.parquet": parquet_of(TABLE, 7),
            "3.jsonl": jsonl_of(ROWS),
        },
    )
    spec = f"{bucket}/raw/*"
    ingest(spec, tmp_path / "whole", 9)
    keys = {"AWS_ACCESS_KEY_ID": "tester", "AWS_SECRET_ACCESS_KEY": "tester-secret", "AWS_ENDPOINT_URL": s3.url}
    with nursery(keys) as forks:
        for nth in (1, 5, 9, 13):
            dest = f"{bucket}/{nth}"
            fault = {"PENSTOCK_FAULT": f"storage.after_put|.ingest/block*|{nth}"}
            assert forks.ingest(spec, dest, env=fault, block_size=9) == -signal.SIGKILL
            assert forks.ingest(spec, dest, block_size=9) == 0
            assert objects(dest) == files(tmp_path / "whole")
    assert "etag" not in (tmp_path / "whole/block_manifest.json").read_text().lower()
    assert [row for block in range(14) for row in BlockManager(tmp_path / "whole").get_rows(block, 0)] == ROWS * 3


@pytest.mark.usefixtures("quick_retries")
def test_through_trouble_every_row_arrives(
    tmp_path: Path, bucket: str, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(bucket, {"a.jsonl.gz": PACKERS[".gz"](jsonl_of(ROWS)), "b.parquet": parquet_of(TABLE, 7)})
    with faulty_proxy(s3.url, status=0.2, cut=0.1, stall=0.02, stall_s=0.3) as proxy:
        use_key(monkeypatch, "tester", proxy.url)
        for number in range(3):
            ingest(f"{bucket}/*", tmp_path / str(number), 9)
            assert values(open_source(tmp_path / str(number) / "blocks")) == ROWS * 2
        assert proxy.made.total() - proxy.made[""] > 0


def test_files_of_a_bucket_can_be_trained_on_as_they_are(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    put(f"{bucket}/raw", {"a.jsonl": jsonl_of(ROWS)})
    for spec in (f"{bucket}/raw", f"{bucket}/raw/*.jsonl", f"{bucket}/raw/a.jsonl"):
        with BlockManager(spec, 15, 15) as manager:
            assert manager.get_rows(2, 0) == ROWS[30:]
            assert manager.is_last_block(2)
    put(f"{bucket}/raw", {"a.jsonl": jsonl_of(ROWS[::-1])})
    with BlockManager(f"{bucket}/raw", 15, 15) as manager:
        assert manager.get_rows(0, 0) == ROWS[:24:-1], "another version is another data set"
