"""The disk cache: the same bytes as from afar, within its budget, whoever crashes or comes between."""

from __future__ import annotations

import logging
import os
import random
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from equipment.faults import run_killed_at
from equipment.processes import held_open, python, run
from penstock.errors import ConfigError
from penstock.storage.disk_cache import MARKER, PIECE_BYTES, CachedObject, DiskCache

SIZE = 3 * PIECE_BYTES + 1234
CONTENT = random.Random(5).randbytes(SIZE)
OBJECT = CachedObject("s3://bucket/object", '"etag"', SIZE)
PLENTY = 1 << 30

# Reads ranges of objects made from their number, in a process of its own; prints ready, and at the end ok.
READ = """
import logging, random, sys
from pathlib import Path
from penstock.storage.disk_cache import PIECE_BYTES, CachedObject, DiskCache
logging.basicConfig()
folder, capacity, seed, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
contents = [random.Random(number).randbytes(2 * PIECE_BYTES + 77) for number in range(4)]
cache, chance = DiskCache(Path(folder), capacity), random.Random(seed)
print("ready", flush=True)
for _ in range(rounds):
    number = chance.randrange(len(contents))
    start = chance.randrange(len(contents[number]))
    stop = start + chance.randrange(2 * PIECE_BYTES)
    of = CachedObject(f"s3://bucket/{number}", "etag", len(contents[number]))
    got = cache.read(of, start, stop, lambda a, b: contents[number][a:b])
    assert got == contents[number][start:stop], (number, start, stop)
print("ok", flush=True)
"""


class Remote:
    """An object far away, and what was asked of it."""

    def __init__(self, content: bytes = CONTENT) -> None:
        self.content = content
        self.asked: list[tuple[int, int]] = []

    def __call__(self, start: int, stop: int) -> bytes:
        self.asked.append((start, stop))
        return self.content[start:stop]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def pieces(folder: Path) -> list[Path]:
    return sorted(folder.glob("??/*"))


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in pieces(folder))


def counted(folder: Path) -> int:
    return int((folder / "used").read_text().split()[1])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(start=st.integers(0, SIZE + 5), length=st.integers(0, SIZE), fill=st.booleans())
def test_any_range_is_what_it_is_afar(folder: Path, start: int, length: int, fill: bool) -> None:
    cache = DiskCache(folder, PLENTY)
    assert cache.read(OBJECT, start, start + length, Remote(), fill=fill) == CONTENT[start : start + length]


def test_what_was_read_is_not_asked_for_again_by_anyone(folder: Path) -> None:
    remote = Remote()
    DiskCache(folder, PLENTY).read(OBJECT, 100, 2 * PIECE_BYTES, remote)
    assert remote.asked == [(0, 2 * PIECE_BYTES)], "one request for all that is missing"
    assert DiskCache(folder, PLENTY).read(OBJECT, 5, 900, remote) == CONTENT[5:900]
    assert len(remote.asked) == 1
    DiskCache(folder, PLENTY).read(OBJECT, PIECE_BYTES, SIZE, remote)
    assert remote.asked[1:] == [(2 * PIECE_BYTES, SIZE)], "only what is missing"


def test_a_small_read_that_is_not_to_fill_asks_for_itself_alone(folder: Path) -> None:
    remote, cache = Remote(), DiskCache(folder, PLENTY)
    assert cache.read(OBJECT, 10, 20, remote, fill=False) == CONTENT[10:20]
    assert remote.asked == [(10, 20)]
    assert pieces(folder) == []


@pytest.mark.parametrize(
    "changed", [CachedObject(OBJECT.url, '"new"', SIZE), CachedObject("s3://other/object", '"etag"', SIZE)]
)
def test_another_version_or_another_object_is_not_served_from_it(folder: Path, changed: CachedObject) -> None:
    cache = DiskCache(folder, PLENTY)
    cache.read(OBJECT, 0, SIZE, Remote())
    other = Remote(bytes(SIZE))
    assert cache.read(changed, 0, SIZE, other) == bytes(SIZE)
    assert cache.read(OBJECT, 0, SIZE, other) == CONTENT


def test_the_budget_holds_and_what_was_used_longest_ago_goes(folder: Path) -> None:
    capacity = 5 * PIECE_BYTES
    cache = DiskCache(folder, capacity)
    for number in range(20):
        cache.read(
            CachedObject(f"s3://bucket/{number}", "v", PIECE_BYTES), 0, PIECE_BYTES, Remote(CONTENT[:PIECE_BYTES])
        )
        assert size_of(folder) <= capacity
        assert counted(folder) == size_of(folder)
        for path in pieces(folder):
            if path.stat().st_mtime > 1e6:  # the new one: as if so many seconds had passed
                os.utime(path, (number, number))
    late = Remote(CONTENT[:PIECE_BYTES])
    cache.read(CachedObject("s3://bucket/19", "v", PIECE_BYTES), 0, PIECE_BYTES, late)
    assert late.asked == []
    cache.read(CachedObject("s3://bucket/0", "v", PIECE_BYTES), 0, PIECE_BYTES, late)
    assert len(late.asked) == 1


def test_what_is_larger_than_the_budget_is_read_and_not_kept(folder: Path) -> None:
    assert DiskCache(folder, 1000).read(OBJECT, 0, SIZE, Remote()) == CONTENT
    assert pieces(folder) == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(path.read_bytes() + b"x"),
        lambda path: path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1])),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(bytes(path.stat().st_size)),
    ],
)
def test_a_damaged_piece_is_dropped_and_fetched_again(folder: Path, damage: Callable[[Path], object]) -> None:
    cache = DiskCache(folder, PLENTY)
    cache.read(OBJECT, 0, SIZE, Remote())
    for path in pieces(folder):
        damage(path)
    assert cache.read(OBJECT, 0, SIZE, Remote()) == CONTENT
    remote = Remote()
    assert cache.read(OBJECT, 0, SIZE, remote) == CONTENT
    assert remote.asked == []


def test_one_piece_in_anothers_place_is_not_taken_for_it(folder: Path) -> None:
    cache = DiskCache(folder, PLENTY)
    cache.read(OBJECT, 0, 2 * PIECE_BYTES, Remote())
    first, second = pieces(folder)
    second.write_bytes(first.read_bytes())
    assert cache.read(OBJECT, 0, 2 * PIECE_BYTES, Remote()) == CONTENT[: 2 * PIECE_BYTES]


def test_threads_read_right_while_pieces_are_evicted_under_them(folder: Path) -> None:
    cache = DiskCache(folder, 2 * PIECE_BYTES)

    def read(seed: int) -> bool:
        chance = random.Random(seed)
        for _ in range(30):
            start = chance.randrange(SIZE)
            stop = start + chance.randrange(2 * PIECE_BYTES)
            if cache.read(OBJECT, start, stop, Remote()) != CONTENT[start:stop]:
                return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, range(4)))
    assert size_of(folder) <= 2 * PIECE_BYTES


def test_processes_fill_it_together_within_one_budget(folder: Path) -> None:
    capacity = 4 * PIECE_BYTES
    seen = []
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.005):
            total = 0
            for path in pieces(folder):
                try:
                    total += path.stat().st_size
                except FileNotFoundError:
                    continue
            seen.append(total)

    watcher = threading.Thread(target=watch)
    watcher.start()
    with ThreadPoolExecutor(3) as pool:
        done = list(pool.map(lambda seed: run(python(READ, str(folder), str(capacity), str(seed), "120")), range(3)))
    ended.set()
    watcher.join()
    assert [finished.returncode for finished in done] == [0, 0, 0], "\n".join(finished.output for finished in done)
    assert max(seen) <= capacity + PIECE_BYTES + 4096, "what is being written may not be seen to replace what went"
    assert size_of(folder) <= capacity


@pytest.mark.parametrize("point", ["storage.before_fsync", "storage.before_rename", "storage.after_rename"])
def test_whoever_is_killed_while_filling_leaves_nothing_behind_for_long(folder: Path, point: str) -> None:
    killed = run_killed_at(python(READ, str(folder), str(PLENTY), "1", "50"), point, "*", 3)
    assert killed.fired
    assert killed.finished.returncode == -signal.SIGKILL
    assert counted(folder) >= size_of(folder), "counted before it is written"
    (folder / "used").unlink()  # so that the next one looks, as it does when the budget is used up
    finished = run(python(READ, str(folder), str(PLENTY), "2", "50"))
    assert finished.returncode == 0, finished.output
    assert not [path for path in pieces(folder) if path.suffix != ".piece"]
    assert counted(folder) == size_of(folder)


def test_a_folder_that_is_not_its_own_is_refused_and_left_alone(folder: Path) -> None:
    folder.mkdir()
    (folder / "thesis.txt").write_text("the only copy")
    with pytest.raises(ConfigError, match=f"no disk cache of penstock.*{MARKER}.*PENSTOCK_CACHE"):
        DiskCache(folder, PLENTY).read(OBJECT, 0, 10, Remote())
    assert [path.name for path in folder.iterdir()] == ["thesis.txt"]


def test_it_deletes_nothing_but_its_own(folder: Path, tmp_path: Path) -> None:
    capacity = 2 * PIECE_BYTES
    cache = DiskCache(folder, capacity)
    cache.read(OBJECT, 0, SIZE, Remote())
    mine = pieces(folder)[0].parent
    outside = tmp_path / "outside"
    (outside / "ab").mkdir(parents=True)
    foreign = [folder / "notes.txt", mine / "notes.txt", folder / "zz", outside / "ab" / f"{'0' * 38}.piece"]
    for path in foreign:
        path.write_bytes(b"mine")
        os.utime(path, (1, 1))
    linked = next(name for name in map("{:02x}".format, range(256)) if not (folder / name).exists())
    (folder / linked).symlink_to(outside / "ab")
    for number in range(8):
        cache.read(
            CachedObject(f"s3://bucket/{number}", "v", PIECE_BYTES), 0, PIECE_BYTES, Remote(CONTENT[:PIECE_BYTES])
        )
    assert [path.read_bytes() for path in foreign] == [b"mine"] * 4


def test_where_nothing_can_be_written_reading_goes_on_with_one_warning(folder: Path) -> None:
    # A limit on the size of files stands for a full disk: some bytes go, then an error comes.
    limit = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    limit += "resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))\n"
    finished = run(python(limit + READ, str(folder), str(PLENTY), "1", "20"))
    assert finished.returncode == 0, finished.output
    assert finished.output.count("WARNING") == 1
    assert "nothing more is kept on disk: File too large; reading goes on without" in finished.output
    assert pieces(folder) == []


def test_the_last_of_the_disk_is_left_to_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(DiskCache, "_free_bytes", lambda _: 300 << 20)
    cache = DiskCache(folder, PLENTY)
    for _ in range(2):
        assert cache.read(OBJECT, 0, SIZE, Remote()) == CONTENT
    assert pieces(folder) == []
    assert [record.message.partition("disk: ")[2] for record in caplog.records] == [
        "its disk is all but full (less than 512 MiB would be left); reading goes on without"
    ]


def test_a_folder_that_cannot_be_made_is_no_reason_to_stop(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("no folder")
    cache = DiskCache(tmp_path / "file" / "cache", PLENTY)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert cache.read(OBJECT, 0, SIZE, Remote()) == CONTENT
    assert [record.message for record in caplog.records if "there is no disk cache" in record.message] != []
    assert len(caplog.records) == 1


def test_one_that_hangs_while_filling_holds_up_nobody_for_long(folder: Path) -> None:
    DiskCache(folder, PLENTY).read(OBJECT, 0, 10, Remote())
    hold = """
import fcntl, os, sys
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(fd, fcntl.LOCK_EX)
print("ready", flush=True)
sys.stdin.read()
"""
    with held_open(python(hold, str(folder / "lock.penstock-lock"))):
        remote = Remote()
        assert DiskCache(folder, PLENTY).read(OBJECT, 0, SIZE, remote) == CONTENT
        assert DiskCache(folder, PLENTY).read(OBJECT, 0, 10, remote) == CONTENT[:10], "reading takes no lock"
    assert len(pieces(folder)) == 1


def test_what_turned_out_wrong_is_forgotten(folder: Path) -> None:
    cache = DiskCache(folder, PLENTY)
    cache.read(OBJECT, 0, SIZE, Remote())
    cache.forget(OBJECT, PIECE_BYTES, 2 * PIECE_BYTES)
    remote = Remote()
    assert cache.read(OBJECT, 0, SIZE, remote) == CONTENT
    assert remote.asked == [(PIECE_BYTES, 2 * PIECE_BYTES)]
