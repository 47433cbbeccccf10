"""An ingest killed anywhere goes on, and ends byte for byte like one that was never killed."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from blocks.data import all_rows, damages, numbered, write_jsonl
from equipment.faults import each_hit, run_killed_at, trace
from equipment.processes import python
from equipment.trees import tree
from penstock.blocks import ingest
from penstock.errors import BlockStoreError
from penstock.faults import POINTS

ROWS = numbered(25)
INGEST = "import sys; from penstock.blocks import ingest; ingest(sys.argv[1], sys.argv[2], 10, on_bad_row='skip')"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "rows.jsonl", [*ROWS[:13], b"a bad row", *ROWS[13:]])


@pytest.fixture
def whole(tmp_path: Path, source: Path) -> Path:
    ingest(source, tmp_path / "whole", 10, on_bad_row="skip")
    return tmp_path / "whole"


def command(source: Path, dest: Path) -> list[str]:
    return python(INGEST, str(source), str(dest))


def readable_rows(dest: Path) -> int:
    """How many rows a reader finds in whatever a killed ingest left; they must be the first ones, and sound."""
    if not (dest / "block_manifest.json").exists() and not (dest / ".ingest/header.json").exists():
        with pytest.raises(BlockStoreError, match="is not a block store"):
            all_rows(dest)
        return 0
    rows = all_rows(dest)
    assert rows == ROWS[: len(rows)]
    assert damages(dest) == {}
    return len(rows)


def test_killed_at_any_point_it_ends_like_one_never_killed(tmp_path: Path, source: Path, whole: Path) -> None:
    hits = trace(command(source, tmp_path / "traced"))
    assert tree(tmp_path / "traced") == tree(whole)
    assert {point for point, _ in hits} == {point for point in POINTS if point.startswith("storage.")}
    # A header, three blocks with index and marker, a manifest; then the journal goes, a header and three markers.
    assert len(hits) == 4 * (1 + 3 * 3 + 1) + 4

    def kill_and_rerun(number: int, point: str, subject: str, nth: int) -> int:
        dest = tmp_path / str(number)
        killed = run_killed_at(command(source, dest), point, subject, nth)
        assert killed.fired, f"never came to {point} {subject} {nth}"
        assert killed.finished.returncode == -signal.SIGKILL
        left = readable_rows(dest)
        ingest(source, dest, 10, on_bad_row="skip")
        assert tree(dest) == tree(whole), f"differs after a kill at {point} {subject} {nth}"
        return left

    places = [(number, *hit) for number, hit in enumerate(each_hit(hits))]
    with ThreadPoolExecutor(2) as pool:
        left = list(pool.map(lambda place: kill_and_rerun(*place), places))
    assert left == sorted(left), "a later kill leaves no less"
    assert set(left) == {0, 10, 20, 25}


def test_killed_again_and_again_it_still_arrives(tmp_path: Path, source: Path, whole: Path) -> None:
    dest = tmp_path / "out"
    kept = []
    # Far enough for one block a run: the block, its index and its marker are put before the fourth rename.
    while (killed := run_killed_at(command(source, dest), "storage.before_rename", "*", 4)).fired:
        kept.append(readable_rows(dest))
    assert killed.finished.returncode == 0, killed.finished.output
    assert kept == [0, 10, 20, 25]  # the first run puts a header as well, the last one but a manifest
    assert tree(dest) == tree(whole)


def test_a_kill_costs_only_the_block_that_was_open(tmp_path: Path, source: Path) -> None:
    dest = tmp_path / "out"
    assert run_killed_at(command(source, dest), "storage.before_rename", "blocks/block_00002.jsonl").fired
    kept = {path: path.stat().st_mtime_ns for path in (dest / "blocks").glob("block_0000[01].*")}
    assert len(kept) == 4
    ingest(source, dest, 10, on_bad_row="skip")
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
