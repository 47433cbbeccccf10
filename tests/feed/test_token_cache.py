"""The token cache: the tokenizer's own ids, whatever happens to its files and whoever shares it."""

from __future__ import annotations

import errno
import logging
import os
import pickle
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from equipment.processes import pickled, python, run
from equipment.scarcity import CANNOT_MOUNT
from penstock.blocks import BlockManager, ingest
from penstock.errors import ConfigError, StorageError
from penstock.feed import Tokenizer, token_cache, token_segments, token_store, train_tokenizer
from penstock.feed.chunk_texts import ChunkTexts
from penstock.feed.known_tokenizer import KnownTokenizer
from penstock.feed.token_cache import TokenCache
from penstock.feed.token_store import TokenChunk, TokenStore

TEXTS = [f"sample {number}: " + "word " * (number * 7 % 23) for number in range(203)]
for place in range(0, len(TEXTS), 11):
    TEXTS[place] = ""


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_cache, "CHUNK_BYTES", 700)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(TEXTS, vocab_size=300)


@pytest.fixture
def blocks(tmp_path: Path) -> BlockManager:
    (tmp_path / "a.jsonl").write_bytes(b"".join(orjson.dumps({"text": text}) + b"\n" for text in TEXTS))
    ingest(tmp_path / "a.jsonl", tmp_path / "store", block_size=40)
    return BlockManager(tmp_path / "store")


@pytest.fixture
def cache(blocks: BlockManager, tokenizer: Tokenizer | KnownTokenizer) -> TokenCache:
    return TokenCache(blocks, tokenizer)


def samples_of(cache: TokenCache) -> list[list[int]]:
    found = []
    for chunk in cache.chunks(range(cache.chunk_count)):
        found += [piece.tolist() for piece in np.split(chunk.ids, chunk.offsets[1:-1])]
    return found


def expected(tokenizer: Tokenizer | KnownTokenizer) -> list[list[int]]:
    encoded = tokenizer.encode(TEXTS)
    return [piece.tolist() for piece in np.split(encoded.ids, encoded.offsets[1:-1])]


def full_disk(*_: object) -> int:
    raise OSError(28, "No space left on device")


def segments(cache: TokenCache) -> list[Path]:
    assert cache.folder is not None
    return sorted((cache.folder / "segments").iterdir())


def test_it_holds_the_tokenizers_own_ids(cache: TokenCache, tokenizer: Tokenizer) -> None:
    assert cache.chunk_count > 10
    assert samples_of(cache) == expected(tokenizer)
    assert samples_of(TokenCache(cache.blocks, tokenizer)) == expected(tokenizer)
    assert cache.token_counts().sum() == len(tokenizer.encode(TEXTS).ids)
    assert cache.dtype == np.uint16


def test_what_is_there_is_not_tokenised_again(
    cache: TokenCache, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    cache.build(lambda done, total: seen.append((done, total)))
    assert len(seen) > 1
    assert seen == sorted(set(seen))
    assert seen[-1] == (cache.chunk_count, cache.chunk_count)
    monkeypatch.setattr(Tokenizer, "encode", None)
    assert samples_of(TokenCache(cache.blocks, tokenizer)) == samples_of(cache)


@pytest.mark.parametrize("failing", ["rows", "tokens"])
def test_a_chunk_that_cannot_be_made_stops_nobody_else(
    cache: TokenCache, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    monkeypatch.setattr(token_cache, "_CHUNKS_TOGETHER", 2)
    really = getattr(ChunkTexts, failing)

    def fails(self: ChunkTexts, number: int | list[int], *more: Any) -> Any:
        if 7 in np.atleast_1d(number):
            raise OSError("no luck")
        return really(self, number, *more)

    monkeypatch.setattr(ChunkTexts, failing, fails)
    with pytest.raises(OSError, match="no luck"):
        cache.build()
    assert (cache.token_counts()[:6] >= 0).all()
    with pytest.raises(OSError, match="no luck"):
        cache.chunks(range(cache.chunk_count))
    monkeypatch.setattr(ChunkTexts, failing, really)
    assert samples_of(cache) == expected(tokenizer)  # nobody holds the right to make any of them


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete", "index", "all"])
def test_what_is_damaged_is_made_anew(cache: TokenCache, tokenizer: Tokenizer, damage: str) -> None:
    cache.build()
    cache.close()
    (segment,) = segments(cache)
    index = segment.parents[1] / "index.bin"
    if damage == "flip":
        data = bytearray(segment.read_bytes())
        data[len(data) // 2] ^= 1
        segment.write_bytes(data)
    elif damage == "truncate":
        os.truncate(segment, segment.stat().st_size // 2)
    elif damage == "delete":
        segment.unlink()
    elif damage == "index":
        data = bytearray(index.read_bytes())
        data[40] ^= 1
        index.write_bytes(data)
    else:
        index.unlink()
        segment.unlink()
    again = TokenCache(cache.blocks, tokenizer)
    assert samples_of(again) == expected(tokenizer)
    assert (again.token_counts() >= 0).all()


def test_other_data_or_another_tokenizer_has_a_cache_of_its_own(
    cache: TokenCache, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    other = train_tokenizer(TEXTS[:9], vocab_size=290)
    cache.build()
    beside = TokenCache(cache.blocks, other)
    assert samples_of(beside) == expected(other)
    assert beside.folder != cache.folder
    TokenCache(cache.blocks, tokenizer, folder=tmp_path / "here").build()
    with pytest.raises(ConfigError, match="is the token cache of other data or of another tokenizer"):
        TokenCache(cache.blocks, other, folder=tmp_path / "here").build()


def test_threads_share_the_work(cache: TokenCache, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    encode, calls = Tokenizer.encode, []

    def counting(self: Tokenizer, texts: list[str], *more: Any) -> object:
        calls.append(len(texts))
        return encode(self, texts, *more)

    monkeypatch.setattr(Tokenizer, "encode", counting)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: samples_of(cache), range(8)))
    monkeypatch.undo()
    assert found == [expected(tokenizer)] * 8
    assert sum(calls) == len(TEXTS)


def test_waiting_for_others_is_given_up_only_when_nothing_comes_any_more(
    cache: TokenCache, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_cache, "_BUSY_TIMEOUT_S", 0.3)
    really, last = ChunkTexts.tokens, cache.chunk_count - 1

    def slow(self: ChunkTexts, numbers: list[int], *more: Any) -> list[TokenChunk]:
        time.sleep(0.5 if 0 in numbers else 0.0)
        return really(self, numbers, *more)

    monkeypatch.setattr(ChunkTexts, "tokens", slow)
    store = cache._open().store
    assert store is not None
    with ThreadPoolExecutor(1) as pool:
        with store.making(last):
            found = pool.submit(samples_of, cache)
            while (cache.token_counts() < 0).sum() > 1:
                time.sleep(0.01)
            time.sleep(0.1)  # all others took longer than anybody waits, and the last one takes a little more
        assert found.result(timeout=10) == expected(tokenizer)


@pytest.mark.parametrize("trouble", ["none", "full disk", "little room"])
def test_of_many_chunks_only_those_that_are_not_on_disk_stay_in_memory(
    blocks: BlockManager, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    monkeypatch.setattr(token_cache, "_CHUNKS_HELD", 3)
    monkeypatch.setattr(token_cache, "_CHUNKS_TOGETHER", 2)
    cache = TokenCache(blocks, tokenizer, max_bytes=2400 if trouble == "little room" else None)
    if trouble == "full disk":
        monkeypatch.setattr(token_store.os, "pwritev", full_disk)
    chunks = cache.chunks(range(cache.chunk_count))
    in_memory = sum(chunk.mapped is None for chunk in chunks)
    assert in_memory == 0 if trouble == "none" else in_memory > len(chunks) // 2
    assert samples_of(cache) == expected(tokenizer)
    found = [piece.tolist() for chunk in chunks for piece in np.split(chunk.ids, chunk.offsets[1:-1])]
    assert found == expected(tokenizer)


def test_a_chunk_that_nobody_finishes_is_told(cache: TokenCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_cache, "_BUSY_TIMEOUT_S", 0.05)
    store = cache._open().store
    assert store is not None
    with store.making(0), pytest.raises(StorageError, match="chunk 0 has been in the making elsewhere"):
        cache.chunks([0])


BUILD = """
import pickle, sys
from penstock.feed import token_cache
token_cache.CHUNK_BYTES = 700
cache = pickle.loads(bytes.fromhex(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
cache.build()
print(cache.token_counts().sum())
"""


def test_processes_share_one_and_killed_ones_leave_nothing_half(cache: TokenCache, tokenizer: Tokenizer) -> None:
    command = python(BUILD, pickled(cache))
    for wait_s in (0.0, 0.002, 0.005, 0.02):
        started = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8")
            for _ in range(2)
        ]
        for process in started:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in started:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        time.sleep(wait_s)
        started[0].send_signal(signal.SIGKILL)
        out, _ = started[1].communicate(timeout=60)
        assert int(out) == len(tokenizer.encode(TEXTS).ids)
        started[0].wait()
        for pipe in (started[0].stdin, started[0].stdout):
            assert pipe is not None
            pipe.close()
        assert samples_of(TokenCache(cache.blocks, tokenizer)) == expected(tokenizer)
        for path in (cache.folder or Path()).rglob("*"):
            if path.is_file() and path.name != "header.json":
                path.unlink()  # once more, from nothing


def test_it_stays_within_its_size_and_old_segments_go_first(
    blocks: BlockManager, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_segments, "SEGMENT_BYTES", 600)
    cache = TokenCache(blocks, tokenizer, max_bytes=2400)
    for _ in range(3):
        assert samples_of(cache) == expected(tokenizer)
        total = sum(path.stat().st_size for path in segments(cache))
        assert total <= 2400 + 600
    assert (cache.token_counts() >= 0).all()  # counts stay though their tokens have gone


def test_a_disk_that_takes_no_more_is_told_and_everything_goes_on(
    cache: TokenCache, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(token_store.os, "pwritev", full_disk)
    with caplog.at_level(logging.WARNING):
        assert samples_of(cache) == expected(tokenizer)
    assert [record.message for record in caplog.records] == [
        f"{cache.folder}: tokens are not kept: No space left on device"
    ]


def test_a_data_set_that_cannot_be_written_has_its_cache_elsewhere(
    blocks: BlockManager, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "elsewhere"))
    (tmp_path / "store/tokens").write_text("in the way")  # root may write anywhere: so no folder can be made here
    cache = TokenCache(blocks, tokenizer)
    assert samples_of(cache) == expected(tokenizer)
    assert cache.folder is not None
    assert cache.folder.is_relative_to(tmp_path / "elsewhere")
    (tmp_path / "nowhere").write_text("in the way")
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "nowhere"))
    without = TokenCache(blocks, tokenizer)
    assert samples_of(without) == expected(tokenizer)
    assert without.folder is None
    with pytest.raises(StorageError, match="has no folder that can be written"):
        without.build()
    with pytest.raises(StorageError, match="the token cache cannot be kept there"):
        TokenCache(blocks, tokenizer, folder=tmp_path / "nowhere" / "tokens").build()


def test_it_pickles(cache: TokenCache, tokenizer: Tokenizer) -> None:
    cache.build()
    copy = pickle.loads(pickle.dumps(cache))  # noqa: S301 - our own
    assert samples_of(copy) == expected(tokenizer)


def test_large_vocabularies_have_wider_numbers(blocks: BlockManager) -> None:
    fields = orjson.loads(train_tokenizer(TEXTS, vocab_size=300).definition)
    fields["model"]["vocab"]["far"] = 70_000
    wide = TokenCache(blocks, Tokenizer(orjson.dumps(fields).decode()))
    assert wide.dtype == np.uint32
    assert samples_of(wide) == expected(wide.tokenizer)


def test_a_full_cache_that_cannot_be_written_is_read(
    tmp_path: Path, blocks: BlockManager, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    TokenCache(blocks, tokenizer, folder=tmp_path / "cache").build()
    really_open = os.open

    def read_only(path: Any, flags: int, *mode: int) -> int:
        if flags & os.O_RDWR:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return really_open(path, flags, *mode)

    monkeypatch.setattr(token_store.os, "open", read_only)
    monkeypatch.setattr(ChunkTexts, "tokens", None)  # not to be asked
    cache = TokenCache(blocks, tokenizer, folder=tmp_path / "cache")
    assert samples_of(cache) == expected(tokenizer)
    assert cache.folder == tmp_path / "cache"


FULL = """
import sys
from pathlib import Path
from equipment.scarcity import Disk
folder = Path(sys.argv[1])
disk = Disk([folder], 64 << 10)
import numpy as np  # which starts threads
from penstock.feed.token_store import TokenStore
try:
    store = TokenStore(folder / "tokens", chunk_count=10_000, dtype=np.dtype("<u2"), max_bytes=None)
    disk.exhaust()
    print("no chunk:", store.get(5_000))
except OSError as error:
    print("told:", error.strerror)
"""


def test_an_index_that_does_not_fit_the_disk_is_told_when_it_is_made_and_kills_nobody(tmp_path: Path) -> None:
    tests = Path(__file__).parents[1]
    done = run(python(FULL, str(tmp_path / "small")), env={"PYTHONPATH": str(tests)})
    if done.returncode == CANNOT_MOUNT:
        pytest.skip("no right to mount a file system")
    assert done.output == "told: No space left on device\n", done


def test_chunks_written_together_are_whole_over_segments_and_short_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chunk(number: int) -> TokenChunk:
        lengths = [number % 7, 0, 3 + number] if number % 3 else [16] * 5
        ids = np.arange(sum(lengths)) * (number + 1) % 50_000
        return TokenChunk(ids.astype(np.uint16), np.concatenate([[0], np.cumsum(lengths)]))

    written = token_store.os.pwritev
    calls: list[int] = []

    def some(fd: int, parts: list[Any], at: int) -> int:
        calls.append(len(parts))
        return written(fd, [memoryview(parts[0])[: 1 + len(calls) % 5]], at)

    monkeypatch.setattr(token_segments, "_UNBOUNDED_SEGMENT_BYTES", 700)
    store = TokenStore(tmp_path, chunk_count=40, dtype=np.dtype("<u2"), max_bytes=None)
    monkeypatch.setattr(token_segments, "_PARTS", 3)
    monkeypatch.setattr(token_store.os, "pwritev", some)
    store.put_all((number, chunk(number)) for number in range(20))
    monkeypatch.setattr(token_store.os, "pwritev", written)
    store.put_all((number, chunk(number)) for number in range(20, 23))
    assert max(calls) == 3
    assert len(list((tmp_path / "segments").iterdir())) > 2
    again = TokenStore(tmp_path, chunk_count=40, dtype=np.dtype("<u2"), max_bytes=None)
    for number in range(23):
        found = again.get(number)
        assert found is not None, number
        assert found.ids.tolist() == chunk(number).ids.tolist()
        assert found.offsets.tolist() == chunk(number).offsets.tolist()
    assert again.get(23) is None
