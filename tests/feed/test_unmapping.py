"""Mapped pages that are given back count no more, and are there again when they are touched."""

from __future__ import annotations

import mmap
import multiprocessing
from pathlib import Path

import numpy as np
import pytest

from penstock.feed.unmapping import give_back, wait_until_given_back

PAGES = 64


def mapped(path: Path) -> np.ndarray:
    with path.open("rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint8)


def resident_bytes(path: Path) -> int:
    """Of a file, in this process's page tables."""
    inside, total = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.split()[0].count("-") == 1 and not line.split()[0].endswith(":"):
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "pages"
    path.write_bytes(np.arange(PAGES * mmap.PAGESIZE // 8, dtype=np.int64).tobytes())
    return path


def test_pages_that_are_given_back_count_no_more_and_read_the_same(file: Path) -> None:
    held = mapped(file)
    total = int(held.view(np.int64).sum())
    assert resident_bytes(file) == PAGES * mmap.PAGESIZE
    give_back([])
    give_back([(held, 0, 16 * mmap.PAGESIZE), (held, 48 * mmap.PAGESIZE, 16 * mmap.PAGESIZE)])
    wait_until_given_back()
    assert resident_bytes(file) == PAGES * mmap.PAGESIZE // 2
    assert int(held.view(np.int64).sum()) == total


def test_a_file_that_nobody_else_holds_any_more_is_held_until_its_pages_are_given_back(file: Path) -> None:
    held = mapped(file)
    held.sum()
    give_back([(held, 0, held.nbytes)] * 100)
    del held
    wait_until_given_back()
    assert resident_bytes(file) == 0


def _in_a_fork(path: Path, told: multiprocessing.SimpleQueue[int]) -> None:  # pyright: ignore
    held = mapped(path)
    held.sum()
    give_back([(held, 0, held.nbytes)])
    wait_until_given_back()
    told.put(resident_bytes(path))


def test_a_fork_has_a_thread_of_its_own(file: Path) -> None:
    wait_until_given_back()
    forking = multiprocessing.get_context("fork")
    told = forking.SimpleQueue()
    child = forking.Process(target=_in_a_fork, args=(file, told))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert told.get() == 0
