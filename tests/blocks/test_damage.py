"""Damage is found and named: by verifying, and by reading just what is damaged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blocks.data import all_rows, damages, numbered, write_jsonl
from penstock.blocks import BlockManager, ingest
from penstock.errors import BlockStoreError, CorruptBlockError, PenstockError

ROWS = numbered(25)
BLOCK = "blocks/block_00001.jsonl"
INDEX = "blocks/block_00001.idx"


@pytest.fixture
def dest(tmp_path: Path) -> Path:
    ingest(write_jsonl(tmp_path / "rows.jsonl", ROWS), tmp_path / "out", 10)
    return tmp_path / "out"


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def truncate(path: Path, by: int = 1) -> None:
    path.write_bytes(path.read_bytes()[:-by])


def append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b'{"text":"more"}\n')


def swap_lines(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    lines[0], lines[7] = lines[7], lines[0]  # of equal length
    path.write_bytes(b"".join(lines))


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def make_unreadable(path: Path) -> None:
    path.unlink()
    path.symlink_to("/proc/self/mem")  # opens like a file; reading its first byte is an I/O error


def test_a_sound_store_has_no_damage(dest: Path) -> None:
    assert damages(dest) == {}
    assert all_rows(dest) == ROWS


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: flip(path, 0), "its bytes have changed"),
        (lambda path: flip(path, -1), "its bytes have changed"),
        (truncate, "bytes, expected"),
        (append, "bytes, expected"),
        (swap_lines, "its bytes have changed"),
        (Path.unlink, "missing"),
        (make_folder, "missing"),
        (make_unreadable, "cannot be read"),
        (lambda path: path.write_bytes(b""), "0 bytes, expected"),
    ],
)
def test_a_damaged_block_is_named(dest: Path, damage: Callable[[Path], Any], reason: str) -> None:
    damage(dest / BLOCK)
    found = damages(dest)
    assert list(found) == [BLOCK]
    assert reason in found[BLOCK]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: flip(path, 0), "does not match its block"),
        (lambda path: flip(path, 8), "does not match its block"),
        (lambda path: flip(path, 16 + 5 * 12), "does not match its block"),
        (lambda path: flip(path, -1), "does not match its block"),
        (truncate, "does not match its block"),
        (append, "does not match its block"),
        (Path.unlink, "missing"),
        (make_unreadable, "cannot be read"),
    ],
)
def test_a_damaged_index_is_named(dest: Path, damage: Callable[[Path], Any], reason: str) -> None:
    damage(dest / INDEX)
    found = damages(dest)
    assert list(found) == [INDEX]
    assert reason in found[INDEX]


def test_every_damaged_file_is_named(dest: Path) -> None:
    flip(dest / "blocks/block_00000.jsonl", 3)
    (dest / INDEX).unlink()
    truncate(dest / "blocks/block_00002.jsonl")
    assert list(damages(dest)) == ["blocks/block_00000.jsonl", INDEX, "blocks/block_00002.jsonl"]


@pytest.mark.parametrize("name", [BLOCK, INDEX])
@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(b""), Path.unlink, make_folder])
def test_reading_what_is_damaged_names_it_and_the_rest_is_read(
    dest: Path, name: str, damage: Callable[[Path], Any]
) -> None:
    damage(dest / name)
    manager = BlockManager(dest, dataset_chunk_size=4, cache_bytes=0, prefetch=False)
    for get in (manager.get_chunk, manager.get_rows):
        with pytest.raises(CorruptBlockError, match=rf"{name}.*penstock inspect .* --verify"):
            get(1, 0)
    assert manager.get_rows(0, 2) == ROWS[8:10]
    assert manager.get_rows(2, 0) == ROWS[20:24]


def test_an_io_error_while_reading_names_the_file(dest: Path) -> None:
    make_unreadable(dest / BLOCK)
    with pytest.raises(PenstockError, match="block_00001"):
        BlockManager(dest).get_rows(1, 0)


def test_any_flipped_byte_of_a_block_is_seen_by_its_chunk_and_no_other(dest: Path) -> None:
    manager = BlockManager(dest, dataset_chunk_size=4, cache_bytes=0, prefetch=False)
    path = dest / BLOCK
    sound = path.read_bytes()
    for at in range(len(sound)):
        flip(path, at)
        damaged = sound[:at].count(b"\n") // 4
        for chunk_id in range(3):
            if chunk_id == damaged:
                with pytest.raises(CorruptBlockError, match=BLOCK):
                    manager.get_rows(1, chunk_id)
            else:
                assert manager.get_rows(1, chunk_id) == ROWS[10 + 4 * chunk_id : min(20, 14 + 4 * chunk_id)]
        path.write_bytes(sound)


def test_any_flipped_bit_of_an_index_gives_the_right_rows_or_an_error(dest: Path) -> None:
    manager = BlockManager(dest, dataset_chunk_size=4, cache_bytes=0, prefetch=False)
    path = dest / INDEX
    sound = path.read_bytes()
    refused = 0
    for at in range(16, len(sound)):
        for bit in (0, 7):  # the highest bit of an offset asks for more bytes than any machine has
            data = bytearray(sound)
            data[at] ^= 1 << bit
            path.write_bytes(data)
            for chunk_id in range(3):
                try:
                    assert manager.get_rows(1, chunk_id) == ROWS[10 + 4 * chunk_id : min(20, 14 + 4 * chunk_id)]
                except CorruptBlockError:
                    refused += 1
    # Four of the eleven entries bound a chunk; two of them bound two.
    assert refused == (1 + 2 + 2 + 1) * 12 * 2


def test_an_index_whose_entries_moved_is_refused(dest: Path) -> None:
    path = dest / INDEX
    sound = path.read_bytes()
    entry = 16 + 2 * 12
    path.write_bytes(sound[:entry] + sound[entry + 12 :] + sound[-12:])  # each entry is right, one is gone
    with pytest.raises(CorruptBlockError, match=INDEX):
        BlockManager(dest).get_rows(1, 0, 4)


# The manifest


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"17", b"{}", b"\xff", b'{"version":1}'])
def test_a_manifest_that_is_none_is_named(dest: Path, content: bytes) -> None:
    (dest / "block_manifest.json").write_bytes(content)
    with pytest.raises(BlockStoreError, match=r"block_manifest\.json is damaged .*: restore it"):
        BlockManager(dest).get_total_blocks()


def test_a_manifest_of_another_version_is_refused(dest: Path) -> None:
    fields = orjson.loads((dest / "block_manifest.json").read_bytes())
    (dest / "block_manifest.json").write_bytes(orjson.dumps({**fields, "version": 2}))
    with pytest.raises(BlockStoreError, match="has version 2, expected 1"):
        BlockManager(dest).get_total_blocks()


@pytest.mark.parametrize("field", ["fingerprint", "total_samples", "total_blocks", "block_size", "complete", "blocks"])
def test_a_manifest_without_a_field_names_it(dest: Path, field: str) -> None:
    fields = orjson.loads((dest / "block_manifest.json").read_bytes())
    del fields[field]
    (dest / "block_manifest.json").write_bytes(orjson.dumps(fields))
    with pytest.raises(BlockStoreError, match=rf"block_manifest\.json is damaged .*{field}"):
        BlockManager(dest).get_total_blocks()


def altered(value: Any) -> Any:
    if isinstance(value, bool | None):
        return 7
    return value + 1 if isinstance(value, int) else value + "x"


@pytest.mark.parametrize(
    "field", ["dataset_id", "block_size", "block_bytes", "text_column", "total_samples", "total_blocks"]
)
def test_an_altered_field_is_seen(dest: Path, field: str) -> None:
    fields = orjson.loads((dest / "block_manifest.json").read_bytes())
    fields[field] = altered(fields[field])
    (dest / "block_manifest.json").write_bytes(orjson.dumps(fields))
    with pytest.raises(BlockStoreError, match=r"block_manifest\.json disagrees with itself"):
        BlockManager(dest).get_total_blocks()


@pytest.mark.parametrize(
    "field", ["block_id", "file", "sample_count", "start_index", "end_index", "size_bytes", "checksum"]
)
def test_an_altered_block_entry_is_seen(dest: Path, field: str) -> None:
    fields = orjson.loads((dest / "block_manifest.json").read_bytes())
    fields["blocks"][1][field] = altered(fields["blocks"][1][field])
    (dest / "block_manifest.json").write_bytes(orjson.dumps(fields))
    with pytest.raises(BlockStoreError, match=r"block_manifest\.json disagrees with itself"):
        BlockManager(dest).get_total_blocks()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    folder = tmp_path_factory.mktemp("shared")
    ingest(write_jsonl(folder / "rows.jsonl", ROWS), folder / "out", 10)
    return folder / "out", (folder / "out/block_manifest.json").read_bytes()


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_damaged_manifest_never_gives_wrong_samples(shared: tuple[Path, bytes], data: st.DataObject) -> None:
    dest, sound = shared
    at = data.draw(st.integers(0, len(sound) - 1))
    value = data.draw(st.integers(0, 255))
    (dest / "block_manifest.json").write_bytes(sound[:at] + bytes([value]) + sound[at + 1 :])
    try:
        rows = all_rows(dest)
        texts = BlockManager(dest).get_chunk(0, 0)
    except BlockStoreError:
        return
    assert rows == ROWS
    assert texts == [row["text"] for row in ROWS[:10]]
