"""TokenStore among others: what they delete, grow or write anew is let go of; what is closed writes nowhere."""

from __future__ import annotations

import errno
import gc
import logging
import os
from pathlib import Path

import numpy as np
import pytest

from equipment.processes import Finished, python, run
from penstock.feed import token_store
from penstock.feed.token_store import TokenChunk, TokenStore

DTYPE = np.dtype("<u2")
COUNT = 60


def open_store(folder: Path, max_bytes: int | None = None) -> TokenStore:
    return TokenStore(folder, chunk_count=COUNT, dtype=DTYPE, max_bytes=max_bytes)


def chunk_of(number: int, size: int = 1_000) -> TokenChunk:
    return TokenChunk(np.arange(number, number + size, dtype=DTYPE), np.arange(0, size + 1, 10, dtype=np.int64))


def ids_of(store: TokenStore, number: int) -> list[int] | None:
    found = store.get(number)
    return None if found is None else found.ids.tolist()


def mapped_files(folder: Path) -> list[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line.partition(str(folder))[2] for line in lines if str(folder / "segments") in line]


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_a_bounded_store_lets_go_of_what_it_has_deleted(tmp_path: Path) -> None:
    store = open_store(tmp_path, max_bytes=20_000)
    for _ in range(2):
        for number in range(COUNT):
            if store.get(number) is None:
                store.put(number, chunk_of(number))
            assert ids_of(store, number) == chunk_of(number).ids.tolist()
    assert len(list((tmp_path / "segments").iterdir())) < COUNT // 2
    assert not [path for path in mapped_files(tmp_path) if "deleted" in path]  # its disk would not be free


def test_a_reader_lets_go_of_what_others_have_deleted(tmp_path: Path) -> None:
    writer, reader = open_store(tmp_path, max_bytes=20_000), open_store(tmp_path)
    for number in range(COUNT):
        writer.put(number, chunk_of(number))
        assert ids_of(reader, number) == chunk_of(number).ids.tolist()
    assert len([path for path in mapped_files(tmp_path) if "deleted" in path]) <= 1


def test_reading_behind_a_writer_takes_no_descriptor_a_chunk(tmp_path: Path) -> None:
    writer, reader = open_store(tmp_path), open_store(tmp_path)
    before = descriptors()
    for number in range(COUNT):
        writer.put(number, chunk_of(number, 10_000))
        assert reader.get(number) is not None
    assert descriptors() <= before + 3
    assert all(ids_of(reader, number) == chunk_of(number, 10_000).ids.tolist() for number in range(COUNT))


def test_chunks_that_are_held_stay_what_they_were_when_their_segment_grows_or_goes(tmp_path: Path) -> None:
    writer, reader = open_store(tmp_path), open_store(tmp_path)
    held = []
    for number in range(COUNT):
        writer.put(number, chunk_of(number))
        held.append(reader.get(number))
    for path in (tmp_path / "segments").iterdir():
        path.unlink()
    reader.close()
    assert [chunk.ids.tolist() for chunk in held if chunk] == [chunk_of(number).ids.tolist() for number in range(COUNT)]


def test_another_segment_of_the_same_name_is_seen(tmp_path: Path) -> None:
    reader, first = open_store(tmp_path), open_store(tmp_path)
    first.put_all((number, chunk_of(number)) for number in range(10))
    assert ids_of(reader, 3) == chunk_of(3).ids.tolist()
    first.close()
    for path in (tmp_path / "segments").iterdir():
        path.unlink()
    open_store(tmp_path).put_all((number, chunk_of(number + 500)) for number in range(10))
    assert [path.name for path in (tmp_path / "segments").iterdir()] == ["00000000"]
    assert ids_of(reader, 5) == chunk_of(505).ids.tolist()


def test_a_store_that_was_closed_writes_to_no_other_file(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    with store.making(3) as mine:
        assert mine
        store.close()
        others = [(tmp_path / f"other{number}").open("w+b") for number in range(8)]
        with pytest.raises(OSError, match="it was closed meanwhile"):
            store.put(3, chunk_of(3))
    with store.making(4) as mine:
        assert mine
    for other in others:
        other.seek(0)
        assert other.read() == b""
        other.close()


def test_a_chunk_whose_segment_was_let_go_of_meanwhile_is_not_remembered(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.put(3, chunk_of(3))
    forget = store._forget
    found = store.get(3)
    assert found is not None
    forget(0)
    store._remember(3, found, 0)  # as a thread does that was at it
    assert not store._recent
    assert not store._recent_of


AT_THE_END = """
import atexit, sys
from pathlib import Path
import numpy as np

def write_still():
    store.put(0, TokenChunk(np.arange(6, dtype="<u2"), np.array([0, 6])))
    print(store.get(0).ids.tolist())

atexit.register(write_still)  # as a thread does that is given time to end
from penstock.feed.token_store import TokenChunk, TokenStore
store = TokenStore(Path(sys.argv[1]), chunk_count=1, dtype=np.dtype("<u2"), max_bytes=None)
"""


def test_it_can_be_written_until_the_interpreter_has_ended(tmp_path: Path) -> None:
    assert run(python(AT_THE_END, str(tmp_path))) == Finished(0, "[0, 1, 2, 3, 4, 5]\n")


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS])
def test_without_locks_everybody_makes_what_he_needs_and_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(token_store.fcntl, "lockf", refuse)
    store = open_store(tmp_path)
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            with store.making(number) as mine, store.making(number) as again:
                assert mine
                assert not again  # threads of one process still share the work
                store.put(number, chunk_of(number))
    assert [ids_of(store, number) for number in range(3)] == [chunk_of(number).ids.tolist() for number in range(3)]
    assert len(caplog.records) == 1
    assert f"{tmp_path}: the file system has no locks" in caplog.text


def test_other_troubles_with_locks_are_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    store = open_store(tmp_path)
    monkeypatch.setattr(token_store.fcntl, "lockf", fail)
    with pytest.raises(OSError, match="Input/output error"), store.making(1):
        pass
    assert not store._making


@pytest.mark.parametrize("max_bytes", [None, 4_000])
def test_a_store_that_nobody_holds_lets_go_of_its_files_at_once(tmp_path: Path, max_bytes: int | None) -> None:
    gc.disable()  # no cycle holds it
    try:
        before = descriptors()
        store = TokenStore(tmp_path, chunk_count=40, dtype=np.dtype("<u2"), max_bytes=max_bytes)
        for number in range(40):
            store.put(number, TokenChunk(np.arange(200, dtype="<u2"), np.array([0, 200])))
        assert store.get(39) is not None
        assert descriptors() > before
        del store
        assert descriptors() == before
    finally:
        gc.enable()
