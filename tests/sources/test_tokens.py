"""Data that comes tokenised: files and columns of ids, read exactly, and refused where they are something else."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.blocks import BlockManager, ingest
from penstock.errors import BadRowError, ConfigError, SourceError
from penstock.sources import (
    Cursor,
    ReadOptions,
    Source,
    megatron,
    open_source,
    pick_columns,
    tokens,
    tokens_of,
    where,
)
from sources.making import PACKERS, jsonl_of, parquet_of, tar_of, zip_of

IDS = [number * 7 % 1000 for number in range(23)]
DTYPES = ["uint8", "uint16", "uint32", "int16", "int32", "int64"]


def npy_of(array: Any, version: tuple[int, int] | None = None) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, np.asarray(array), version=version)
    return file.getvalue()


def llm_c_of(ids: list[int], magic: int = 20240520, told: int | None = None) -> bytes:
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, 1, len(ids) if told is None else told
    return header.tobytes() + np.asarray(ids, dtype="<u2" if magic == 20240520 else "<u4").tobytes()


def raw_of(ids: list[int], dtype: str = "uint16") -> bytes:
    return np.asarray(ids, dtype=np.dtype(dtype).newbyteorder("<")).tobytes()


def cut(ids: list[int], width: int) -> list[list[int]]:
    return [ids[first : first + width] for first in range(0, len(ids), width)]


def write(folder: Path, name: str, data: bytes) -> Path:
    (folder / name).write_bytes(data)
    return folder / name


def samples(source: Source, cursor: Cursor | None = None) -> list[list[int]]:
    """Every sample from a cursor on; what is stored and what is handed on are the same."""
    return [ids for _, ids in placed(source, cursor)]


def placed(source: Source, cursor: Cursor | None = None) -> list[tuple[str, list[int]]]:
    """The same with the place of each sample."""
    found = []
    for batch in source.batches(cursor or Cursor()):
        for line, value, number in zip(batch.lines, batch.values, batch.numbers, strict=True):
            (stored,) = orjson.loads(line).items()
            assert stored == ("input_ids", list(value["input_ids"]))
            found.append((where(batch.file_name, number), stored[1]))
    return found


def read(path: Path, **options: Any) -> list[list[int]]:
    return samples(open_source(path, options=ReadOptions(**options)))


def error_of(path: Path, **options: Any) -> str:
    with pytest.raises(SourceError) as caught:
        read(path, **options)
    assert path.name in str(caught.value)
    return str(caught.value)


@pytest.fixture
def short_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "_BATCH_TOKENS", 8)
    monkeypatch.setattr(megatron, "_SEQUENCES_AT_A_TIME", 3)
    monkeypatch.setattr(megatron, "_TOKENS_AT_A_TIME", 6)


def check_any_place_can_be_gone_on_from(path: Path, **options: Any) -> None:
    source = open_source(path, options=ReadOptions(**options))
    every = placed(source)
    place = 0
    for batch in source.batches(Cursor()):
        for good in range(len(batch.lines) + 1):
            cursor = Cursor(**orjson.loads(orjson.dumps(batch.cursor_after(good).as_dict())))
            assert placed(open_source(path, options=ReadOptions(**options)), cursor) == every[place + good :]
        place += len(batch.lines)
    assert place == len(every)


# NumPy files


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
@pytest.mark.parametrize("dtype", ["uint8", "<u2", ">u2", "<u4", ">u4", "<i4", ">i8", "u8"])
def test_an_array_of_two_axes_has_a_sample_a_row(tmp_path: Path, dtype: str, version: tuple[int, int]) -> None:
    array = (np.arange(35) % 250).reshape(5, 7).astype(dtype)
    assert read(write(tmp_path, "a.npy", npy_of(array, version)), tokens_per_sample=2) == array.tolist()


@pytest.mark.parametrize("dtype", ["<u2", ">i4"])
def test_an_array_of_one_axis_is_cut_into_samples(tmp_path: Path, dtype: str) -> None:
    path = write(tmp_path, "a.npy", npy_of(np.array(IDS, dtype=dtype)))
    assert read(path, tokens_per_sample=5) == cut(IDS, 5)
    assert read(path, tokens_per_sample=23) == [IDS]
    assert read(path) == [IDS]
    long = write(tmp_path, "long.npy", npy_of(np.arange(5000, dtype="u2")))
    assert [len(sample) for sample in read(long)] == [2048, 2048, 904]


def test_an_array_may_be_empty(tmp_path: Path) -> None:
    for shape in ((0,), (0, 7)):
        assert read(write(tmp_path, "a.npy", npy_of(np.zeros(shape, dtype="u2")))) == []
    for shape in ((3, 0), (0, 0)):
        path = write(tmp_path, "a.npy", npy_of(np.zeros(shape, dtype="u2")))
        assert "its samples have no tokens" in error_of(path)


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (np.zeros(3), "holds float64, expected whole numbers"),
        (np.zeros(3, dtype=bool), "holds bool, expected whole numbers"),
        (np.zeros(3, dtype="M8[s]"), "expected whole numbers"),
        (np.zeros(3, dtype="U4"), "expected whole numbers"),
        (np.zeros(3, dtype=[("a", "u2")]), "expected whole numbers"),
        (np.asfortranarray(np.arange(6).reshape(2, 3)), r"shape (2, 3) in column order: expected (tokens,)"),
        (np.zeros((2, 2, 2), dtype="u2"), "shape (2, 2, 2): expected"),
        (np.uint16(3), "shape (): expected"),
    ],
)
def test_an_array_of_anything_else_is_refused(tmp_path: Path, array: Any, reason: str) -> None:
    assert reason in error_of(write(tmp_path, "a.npy", npy_of(array)))


def test_an_array_in_column_order_of_one_axis_is_in_row_order_too(tmp_path: Path) -> None:
    data = npy_of(np.array(IDS, dtype="u2")).replace(b"'fortran_order': False", b"'fortran_order': True ")
    assert read(write(tmp_path, "a.npy", data)) == [IDS]


class Trap:
    """Leaves a file behind where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (self._path,)


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    array = np.array([Trap(tmp_path / "sprung"), None], dtype=object)
    assert "holds object, expected whole numbers" in error_of(write(tmp_path, "a.npy", npy_of(array)))
    assert not (tmp_path / "sprung").exists()


def test_a_file_cut_anywhere_is_told_and_no_sample_is_short(tmp_path: Path) -> None:
    array = np.arange(24, dtype="u2").reshape(6, 4)
    data = npy_of(array)
    for size in range(len(data)):
        error_of(write(tmp_path, "a.npy", data[:size]))
    flat = npy_of(array.reshape(-1))
    for size in range(len(flat)):
        error_of(write(tmp_path, "a.npy", flat[:size]), tokens_per_sample=4)


@pytest.mark.usefixtures("short_batches")
def test_the_samples_before_a_cut_come_out(tmp_path: Path) -> None:
    path = write(tmp_path, "a.npy", npy_of(np.arange(24, dtype="u2").reshape(6, 4))[:-1])
    batches = open_source(path).batches(Cursor())
    found = [value for batch in islice(batches, 2) for value in batch.values]
    assert [list(value["input_ids"]) for value in found] == cut(list(range(16)), 4)
    with pytest.raises(SourceError, match="ends in the middle of a sample"):
        next(batches)


def test_what_follows_an_array_is_told_and_not_lost(tmp_path: Path) -> None:
    for data in (npy_of(np.arange(6)) + b"\0", npy_of(np.zeros(0, dtype="u2")) + npy_of(np.arange(6))):
        assert "goes on behind byte" in error_of(write(tmp_path, "a.npy", data))


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '<u2', 'fortran_order': False, 'shape': (-3,), }",
        "{'descr': '<u2', 'fortran_order': False, 'shape': (True,), }",
        "{'descr': '<u2', 'fortran_order': False, 'shape': (1, 99999999999999999999), }",
        "{'descr': '<u2', 'fortran_order': False, 'shape': (9999999999,), }",
        "{'descr': '<u2', 'fortran_order': False, 'shape': 5, }",
        "{'descr': '<u2', 'fortran_order': False, }",
        "{'descr': '<zz', 'fortran_order': False, 'shape': (3,), }",
        "{'descr': ",
        "(((",
        "'" * 7,
        "open('x')",
        "{'a': " * 2000,
        "",
    ],
)
def test_a_damaged_header_is_told_and_takes_no_memory(tmp_path: Path, header: str) -> None:
    text = header.encode()
    for begin in (b"\x01\x00" + struct.pack("<H", len(text)), b"\x02\x00" + struct.pack("<I", len(text))):
        error_of(write(tmp_path, "a.npy", b"\x93NUMPY" + begin + text + bytes(6)))


@pytest.mark.parametrize(
    "begin", [b"\x02\x00\xff\xff\xff\xff", b"\x09\x00\x10\x00\x00\x00", b"\x01", b"\x01\x00\x10", b""]
)
def test_a_header_that_is_none_is_told(tmp_path: Path, begin: bytes) -> None:
    assert "its NumPy header is damaged" in error_of(write(tmp_path, "a.npy", b"\x93NUMPY" + begin))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 127), bit=st.integers(0, 7))
def test_a_flipped_bit_of_a_header_is_an_error_or_harmless(tmp_path: Path, place: int, bit: int) -> None:
    data = bytearray(npy_of(np.arange(12, dtype="u2")))
    data[place] ^= 1 << bit
    path = write(tmp_path, "a.npy", bytes(data))
    try:
        found = read(path, tokens_per_sample=4)
    except SourceError:
        return
    assert sum(map(len, found)) in (12, 24), "another width of number, at most"


def test_a_file_that_only_says_it_is_numpy_is_raw_where_the_user_says_so(tmp_path: Path) -> None:
    path = write(tmp_path, "a.npy", raw_of(IDS))
    assert "not a NumPy file: where it holds raw tokens, say which with --token-dtype" in error_of(path)
    assert read(path, token_dtype="uint16", tokens_per_sample=4) == cut(IDS, 4)
    assert read(write(tmp_path, "b.npy", raw_of([1])), token_dtype="uint16") == [[1]]
    assert read(write(tmp_path, "c.npy", b""), token_dtype="uint16") == []


# Raw files


@pytest.mark.parametrize("dtype", DTYPES)
def test_raw_tokens_are_read_as_the_numbers_they_are(tmp_path: Path, dtype: str) -> None:
    ids = [number % 128 for number in IDS]
    path = write(tmp_path, "a.bin", raw_of(ids, dtype))
    assert read(path, token_dtype=dtype, tokens_per_sample=4) == cut(ids, 4)


def test_raw_tokens_are_two_bytes_each_unless_told_otherwise(tmp_path: Path) -> None:
    path = write(tmp_path, "a.bin", raw_of([0, 1, 65535] * 2000))
    assert [len(sample) for sample in read(path)] == [2048, 2048, 1904]
    assert read(path)[0][:4] == [0, 1, 65535, 0]


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 511, 512, 513])
def test_a_raw_file_may_be_of_any_length(tmp_path: Path, count: int) -> None:
    ids = [number % 65536 for number in range(count)]
    assert read(write(tmp_path, "a.bin", raw_of(ids)), tokens_per_sample=4) == cut(ids, 4)


@pytest.mark.parametrize(("dtype", "size"), [("uint16", 1), ("uint16", 2049), ("uint32", 6), ("int64", 1023)])
def test_a_part_of_a_token_at_the_end_is_told(tmp_path: Path, dtype: str, size: int) -> None:
    assert "ends in the middle of a sample" in error_of(write(tmp_path, "a.bin", bytes(size)), token_dtype=dtype)


@pytest.mark.parametrize(("magic", "dtype"), [(20240520, "uint16"), (20240801, "uint32")])
def test_the_header_of_llm_c_is_understood(tmp_path: Path, magic: int, dtype: str) -> None:
    path = write(tmp_path, "a.bin", llm_c_of(IDS, magic))
    assert read(path, tokens_per_sample=4) == cut(IDS, 4)
    assert read(path, tokens_per_sample=4, token_dtype=dtype) == cut(IDS, 4), "it is no tokens, whatever is said"
    assert f"token_dtype='int64', but its header, that of llm.c, says {dtype}" in error_of(path, token_dtype="int64")
    assert read(write(tmp_path, "b.bin", llm_c_of([], magic))) == []


def test_a_file_that_differs_from_its_header_is_told(tmp_path: Path) -> None:
    data = llm_c_of(IDS)
    for size in range(8, len(data)):
        error_of(write(tmp_path, "a.bin", data[:size]))
    assert "goes on behind byte" in error_of(write(tmp_path, "a.bin", llm_c_of(IDS, told=20)))
    assert "tells of -1 tokens" in error_of(write(tmp_path, "a.bin", llm_c_of(IDS, told=-1)))


def test_tokens_that_look_like_a_header_are_tokens(tmp_path: Path) -> None:
    ids = [*np.frombuffer(struct.pack("<i", 20240520), dtype="<u2").tolist(), *range(1, 600)]
    assert read(write(tmp_path, "a.bin", raw_of(ids)), tokens_per_sample=601) == [ids]
    assert read(write(tmp_path, "b.bin", raw_of(ids[:5])), token_dtype="uint16") == [ids[:5]]


@pytest.mark.parametrize(
    "options", [{"tokens_per_sample": 0}, {"tokens_per_sample": -1}, {"token_dtype": "float32"}, {"token_dtype": "u2"}]
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(options))}="):
        ReadOptions(**options)


def test_how_tokens_are_read_is_part_of_the_identity(tmp_path: Path) -> None:
    path = write(tmp_path, "a.bin", raw_of(IDS))
    every = [{}, {"tokens_per_sample": 4}, {"token_dtype": "uint16"}, {"token_dtype": "uint8"}]
    revisions = [open_source(path, options=ReadOptions(**options)).revision() for options in every]
    assert all(one != other for index, one in enumerate(revisions) for other in revisions[:index])


# Compressed, in archives, and from any place on

FILES: dict[str, tuple[bytes, dict[str, Any], list[list[int]]]] = {
    "two.npy": (npy_of(np.array(IDS[:20], dtype=">i4").reshape(10, 2)), {}, cut(IDS[:20], 2)),
    "one.npy": (npy_of(np.array(IDS, dtype="u2")), {"tokens_per_sample": 3}, cut(IDS, 3)),
    "raw.npy": (raw_of(IDS), {"tokens_per_sample": 3, "token_dtype": "uint16"}, cut(IDS, 3)),
    "raw.bin": (raw_of(IDS), {"tokens_per_sample": 3}, cut(IDS, 3)),
    "wide.bin": (raw_of(IDS, "uint32"), {"tokens_per_sample": 3, "token_dtype": "uint32"}, cut(IDS, 3)),
    "llmc.bin": (llm_c_of(IDS), {"tokens_per_sample": 3}, cut(IDS, 3)),
}
EACH = pytest.mark.parametrize("name", FILES)


@EACH
@pytest.mark.usefixtures("short_batches")
@pytest.mark.parametrize("packing", ["", *PACKERS, "zip", "tar", "tar.gz"])
def test_files_are_read_and_gone_on_with_however_they_are_packed(tmp_path: Path, name: str, packing: str) -> None:
    data, options, expected = FILES[name]
    members = {f"a/{name}": data, f"b/{name}": data}
    if packing in PACKERS:
        path = write(tmp_path, name + packing, PACKERS[packing](data))
    elif packing:
        archive = zip_of(members) if packing == "zip" else tar_of(members)
        path = write(tmp_path, f"a.{packing}", PACKERS[".gz"](archive) if packing == "tar.gz" else archive)
        expected = expected * 2
    else:
        path = write(tmp_path, name, data)
    assert read(path, **options) == expected
    (*_, (last, _)) = placed(open_source(path, options=ReadOptions(**options)))
    assert last.endswith(f"{name}{packing if packing in PACKERS else ''}:{len(FILES[name][2])}")
    check_any_place_can_be_gone_on_from(path, **options)


@EACH
@pytest.mark.parametrize("packing", ["zip", "gz"])
def test_a_packed_file_that_is_cut_is_told(tmp_path: Path, name: str, packing: str) -> None:
    data, options, _ = FILES[name]
    cut_data = data[:-1]
    path = (
        write(tmp_path, f"{name}.gz", PACKERS[".gz"](cut_data))
        if packing == "gz"
        else write(tmp_path, "a.zip", zip_of({name: cut_data}))
    )
    assert name in error_of(path, **options)


# Megatron's pair

SEQUENCES = [[1, 2, 3], [], [4], [5, 6, 7, 8, 9, 10, 11, 12], [13, 14], [], [15, 16], [17], [18] * 5, [19]]
CODES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}


def index_of(sequences: list[list[int]], code: int = 8, documents: int = 2) -> bytes:
    lengths = np.array([len(sequence) for sequence in sequences], dtype="<i4")
    sizes = lengths.astype("<i8") * np.dtype(CODES.get(code, "uint16")).itemsize
    places = np.cumsum(sizes) - sizes
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sequences), documents)
    return head + lengths.tobytes() + places.astype("<i8").tobytes() + bytes(8 * documents)


def write_pair(folder: Path, sequences: list[list[int]], code: int = 8) -> Path:
    write(folder, "a.idx", index_of(sequences, code))
    return write(folder, "a.bin", raw_of([token for sequence in sequences for token in sequence], CODES[code]))


@pytest.mark.parametrize("code", CODES)
def test_the_index_says_where_sequences_end(tmp_path: Path, code: int) -> None:
    assert read(write_pair(tmp_path, SEQUENCES, code)) == SEQUENCES
    assert read(tmp_path) == SEQUENCES, "as a folder, too"


@pytest.mark.usefixtures("short_batches")
def test_sequences_are_read_a_few_at_a_time_and_gone_on_with_anywhere(tmp_path: Path) -> None:
    path = write_pair(tmp_path, SEQUENCES)
    batches = list(open_source(path).batches(Cursor()))
    assert max(len(batch.lines) for batch in batches) <= 3
    assert read(path) == SEQUENCES
    check_any_place_can_be_gone_on_from(path)


@pytest.mark.parametrize("sequences", [[], [[]], [[], []], [[7]]])
def test_there_may_be_little_or_nothing(tmp_path: Path, sequences: list[list[int]]) -> None:
    assert read(write_pair(tmp_path, sequences)) == sequences


def test_an_index_of_something_else_says_nothing(tmp_path: Path) -> None:
    path = write_pair(tmp_path, SEQUENCES)
    write(tmp_path, "a.idx", b"something else")
    assert read(path, tokens_per_sample=24) == [[token for sequence in SEQUENCES for token in sequence]]


def test_another_index_makes_another_source(tmp_path: Path) -> None:
    path = write_pair(tmp_path, [[1, 2], [3]])
    first = open_source(path).revision()
    write(tmp_path, "a.idx", index_of([[1], [2, 3]]))
    assert open_source(path).revision() != first


def altered(data: bytes, place: int, new: bytes) -> bytes:
    return data[:place] + new + data[place + len(new) :]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data: data[:20], "not a sound index"),
        (lambda data: data[:-1], "expected version 1 of"),
        (lambda data: altered(data, 9, b"\2"), "version 2 of"),
        (lambda data: altered(data, 17, b"\6"), "expected whole numbers"),
        (lambda data: altered(data, 17, b"\4"), "do not belong together"),
        (lambda data: altered(data, 18, bytes(8)), "tells of no sequences, but its tokens have 46 bytes"),
        (lambda data: altered(data, 18, b"\xff" * 8), "expected version 1 of"),
        (lambda data: altered(data, 26, b"\xff" * 8), "expected version 1 of"),
        (lambda data: altered(data, 34, b"\1"), "sequence 2 has 0 bytes from byte 6, expected one from byte 2"),
        (lambda data: altered(data, 34, b"\xff" * 4), "sequence 1 has -2 bytes"),
        (lambda data: altered(data, 34 + 36, b"\xff" * 4), "do not belong together"),
        (lambda data: altered(data, 34 + 40 + 8, b"\5"), "sequence 2 has 0 bytes from byte 5"),
        (lambda data: altered(data, 34 + 40 + 72, b"\5"), "do not belong together"),
    ],
)
def test_a_damaged_index_is_told(tmp_path: Path, damage: Callable[[bytes], bytes], reason: str) -> None:
    path = write_pair(tmp_path, SEQUENCES)
    write(tmp_path, "a.idx", damage((tmp_path / "a.idx").read_bytes()))
    with pytest.raises(SourceError, match=r"a\.idx.*") as caught:
        read(path)
    assert reason in str(caught.value)


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b"\0\0", lambda data: b""])
def test_files_that_do_not_belong_together_are_told(tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    path = write_pair(tmp_path, SEQUENCES)
    write(tmp_path, "a.bin", change(path.read_bytes()))
    with pytest.raises(SourceError, match="the two files do not belong together"):
        read(path)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(9, 33 + 12 * len(SEQUENCES)), bit=st.integers(0, 7))
def test_a_flipped_bit_of_an_index_gives_no_other_samples(tmp_path: Path, place: int, bit: int) -> None:
    path = write_pair(tmp_path, SEQUENCES)
    data = bytearray((tmp_path / "a.idx").read_bytes())
    data[place] ^= 1 << bit
    write(tmp_path, "a.idx", bytes(data))
    with suppress(SourceError):
        assert read(path) == SEQUENCES


@pytest.mark.parametrize("packing", ["gz", "zip", "tar"])
def test_a_pair_that_is_packed_is_refused_rather_than_read_wrong(tmp_path: Path, packing: str) -> None:
    pair = {"a.bin": raw_of([1, 2, 3], "int32"), "a.idx": index_of([[1, 2, 3]], 4)}
    if packing == "gz":
        write(tmp_path, "a.idx", pair["a.idx"])
        path = write(tmp_path, "a.bin.gz", PACKERS[".gz"](pair["a.bin"]))
    else:
        path = write(tmp_path, f"x.{packing}", zip_of(pair) if packing == "zip" else tar_of(pair))
    with pytest.raises(SourceError, match=r"a\.bin.* has an index beside it.*: unpack it"):
        read(path)


# Columns


def test_a_column_of_ids_is_found_where_there_is_no_text() -> None:
    assert pick_columns([{"input_ids": [1], "labels": [1]}]) == (None, "input_ids")
    assert pick_columns([{}, {"input_ids": np.array([1])}]) == (None, "input_ids")
    assert pick_columns([{"input_ids": [1], "text": "a"}]) == ("text", None)
    assert pick_columns([{"input_ids": [1], "text": "a"}], tokens="input_ids") == (None, "input_ids")
    assert pick_columns([{"ids": [1]}, {"input_ids": [1]}], tokens="ids") == (None, "ids")
    assert pick_columns([{"input_ids": "1 2"}, {"title": "a"}], text="title") == ("title", None)


@pytest.mark.parametrize(
    ("rows", "named", "reason"),
    [
        ([{"ids": [1]}], {}, "no text column found among 'ids'"),
        ([{"input_ids": "1 2"}], {}, "no text column found among 'input_ids'"),
        ([{"input_ids": [1]}], {"text": "words"}, "no column 'words'"),
        ([{"input_ids": [1]}], {"tokens": "ids"}, "no column 'ids': the rows have 'input_ids': name one of them"),
        ([{}], {"tokens": "ids"}, "no column 'ids': the rows have no columns"),
    ],
)
def test_rows_without_either_say_what_there_is(rows: list[dict[str, Any]], named: dict[str, str], reason: str) -> None:
    with pytest.raises(SourceError) as caught:
        pick_columns(rows, **named)  # pyright: ignore[reportArgumentType]
    assert reason in str(caught.value)


@pytest.mark.parametrize("ids", [[], [0], [1, 2, 2**31 - 1], list(range(1000))])
def test_ids_are_whole_numbers_from_zero_on(ids: list[int]) -> None:
    assert tokens_of({"input_ids": ids}, "input_ids").tolist() == ids
    assert tokens_of({"x": np.array(ids, dtype="i8")}, "x").tolist() == ids


BAD: list[tuple[Any, str]] = [
    ([1, -1], "holds ids from -1 to 1: expected 0 to 2147483647"),
    ([2**31], "holds ids from 2147483648"),
    ([2**63], "holds ids from 9223372036854775808"),
    ([2**64], "not of whole numbers"),
    ([-1, 2**63], "not of whole numbers"),
    ([1.0, 2.0], "not of whole numbers: [1.0, 2.0]"),
    ([1, None], "not of whole numbers"),
    (["1"], "not of whole numbers"),
    ([[1, 2], [3, 4]], "not of whole numbers"),
    ([[1, 2], [3]], "not of whole numbers"),
    ([[]], "not of whole numbers"),
    ([True, False], "not of whole numbers"),
    ([True, 2], "not of whole numbers"),
    ("12", "holds no list of token ids: got str"),
    (None, "holds no list of token ids: got NoneType"),
    ({"a": 1}, "holds no list of token ids: got dict"),
    (5, "holds no list of token ids: got int"),
]


@pytest.mark.parametrize(("value", "reason"), BAD)
def test_anything_else_is_a_bad_row_with_its_reason(tmp_path: Path, value: Any, reason: str) -> None:
    with pytest.raises(SourceError) as caught:
        tokens_of({"input_ids": value}, "input_ids")
    assert reason in str(caught.value)
    if value not in ([2**64], [-1, 2**63]):
        path = write(tmp_path, "a.jsonl", jsonl_of([{"input_ids": [1]}, {"input_ids": value}, {"input_ids": [2]}]))
        with pytest.raises(BadRowError, match=r"a\.jsonl:2: column 'input_ids' holds "):
            ingest(path, tmp_path / "out")
        manifest = ingest(path, tmp_path / "skipped", on_bad_row="skip")
        assert (manifest.total_samples, manifest.skipped_count) == (2, 1)


def test_a_missing_column_is_told() -> None:
    with pytest.raises(SourceError, match="column 'input_ids' holds no list of token ids: got no such column"):
        tokens_of({"ids": [1]}, "input_ids")


# Through the blocks

ROWS = [{"input_ids": IDS[: number % 7], "id": number} for number in range(25)]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.jsonl", jsonl_of(ROWS)),
        ("a.json", orjson.dumps(ROWS)),
        ("a.parquet", parquet_of(pa.Table.from_pylist(ROWS), 7)),
        ("a.zip", zip_of({"a.jsonl.gz": PACKERS[".gz"](jsonl_of(ROWS))})),
    ],
)
def test_columns_of_ids_come_back_from_blocks(tmp_path: Path, name: str, data: bytes) -> None:
    manifest = ingest(write(tmp_path, name, data), tmp_path / "out", 10)
    assert (manifest.header.text_column, manifest.header.token_column) == (None, "input_ids")
    manager = BlockManager(tmp_path / "out")
    assert [row for block in range(3) for row in manager.get_rows(block, 0)] == ROWS


@EACH
def test_files_of_ids_come_back_from_blocks(tmp_path: Path, name: str) -> None:
    data, options, expected = FILES[name]
    manifest = ingest(write(tmp_path, name, data), tmp_path / "out", 4, **options)
    assert manifest.header.token_column == "input_ids"
    manager = BlockManager(tmp_path / "out")
    blocks = [manager.get_rows(block.block_id, 0) for block in manifest.blocks]
    assert [row["input_ids"] for rows in blocks for row in rows] == expected
    assert [len(rows) for rows in blocks] == [4] * (len(expected) // 4) + [len(expected) % 4] * (len(expected) % 4 > 0)


def test_negative_numbers_in_a_file_are_bad_rows(tmp_path: Path) -> None:
    path = write(tmp_path, "a.npy", npy_of(np.array([[1, 2], [-1, 3], [4, 5]], dtype="i4")))
    with pytest.raises(BadRowError, match=r"a\.npy:2: column 'input_ids' holds ids from -1 to 3"):
        ingest(path, tmp_path / "out")
    assert ingest(path, tmp_path / "skipped", on_bad_row="skip").total_samples == 2
