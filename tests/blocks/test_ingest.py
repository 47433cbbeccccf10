"""Ingest: what it refuses, what it skips, and how it goes on where it stopped."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blocks.data import all_rows, damages, leftovers, numbered, write_jsonl
from equipment.processes import held_open, python
from equipment.trees import tree
from penstock.blocks import BlockManager, IngestProgress, ingest
from penstock.errors import AccessDenied, BadRowError, BlockStoreError, ConfigError, SourceError, StorageBusy
from penstock.sources import open_source
from sources.suite import rows_a_batch


def stamps(folder: Path) -> dict[str, tuple[int, int]]:
    """Which files these are and when they were written: the same again only where nothing was written."""
    found = {path: path.stat() for path in folder.rglob("*")}
    return {str(path): (stat.st_ino, stat.st_mtime_ns) for path, stat in found.items()}


# Complete stores


def test_ingesting_again_changes_nothing_and_says_so(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", numbered(12))
    first = ingest(source, tmp_path / "out", 5)
    before = stamps(tmp_path / "out")
    states: list[IngestProgress] = []
    assert ingest(source, tmp_path / "out", 5, on_progress=states.append) == first
    files = {path: stamp for path, stamp in stamps(tmp_path / "out").items() if Path(path).is_file()}
    assert files == {path: before[path] for path in files}
    assert [(state.state, state.samples, state.blocks) for state in states] == [("already complete", 12, 3)]


def test_how_the_source_was_spelled_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jsonl(tmp_path / "rows.jsonl", numbered(12))
    first = ingest(tmp_path / "rows.jsonl", tmp_path / "out", 5)
    monkeypatch.chdir(tmp_path)
    assert ingest("./rows.jsonl", "out", 5, text_column="text") == first
    assert ingest(open_source("rows.jsonl"), f"file://{tmp_path}/out", 5) == first


@pytest.mark.parametrize("complete", [True, False])
@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"block_size": 6}, "block_size: got 6, expected 5"),
        ({"block_bytes": 100}, "block_bytes: got 100, expected None"),
        ({"text_column": "title"}, "text_column: got 'title', expected 'text'"),
        ({"no_text": True}, "text_column: got None, expected 'text'"),
        ({"dataset_name": "other"}, "dataset_name: got 'other', expected 'rows'"),
    ],
)
def test_other_options_are_refused_by_name(tmp_path: Path, options: dict[str, Any], field: str, complete: bool) -> None:
    rows = [{"text": str(number), "title": "t"} for number in range(12)]
    source = write_jsonl(tmp_path / "rows.jsonl", rows if complete else [*rows, b"?"])
    if complete:
        ingest(source, tmp_path / "out", 5)
    else:
        with pytest.raises(BadRowError):
            ingest(source, tmp_path / "out", 5)
    before = tree(tmp_path / "out")
    with pytest.raises(BlockStoreError, match=field):
        ingest(source, tmp_path / "out", **{"block_size": 5, **options})
    assert tree(tmp_path / "out") == before


@pytest.mark.parametrize("complete", [True, False])
def test_a_changed_source_is_refused(tmp_path: Path, complete: bool) -> None:
    rows: list[Any] = numbered(12) if complete else [*numbered(12), b"?"]
    source = write_jsonl(tmp_path / "rows.jsonl", rows)
    if complete:
        ingest(source, tmp_path / "out", 5)
    else:
        with pytest.raises(BadRowError):
            ingest(source, tmp_path / "out", 5)
    before = tree(tmp_path / "out")
    write_jsonl(source, [*rows[:-1], {"text": "mended"}])
    with pytest.raises(BlockStoreError, match=r"dataset_id: .*its files have changed, or other files are taken"):
        ingest(source, tmp_path / "out", 5, on_bad_row="skip")
    assert tree(tmp_path / "out") == before


# Bad settings


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 0}, "block_size=0"),
        ({"block_size": -5}, "block_size=-5"),
        ({"block_bytes": 0}, "block_bytes=0"),
        ({"on_bad_row": "ignore"}, "on_bad_row='ignore' is unknown: expected 'stop' or 'skip'"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_before_anything_is_written(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", numbered(3))
    with pytest.raises(ConfigError, match=message):
        ingest(source, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_a_missing_text_column_is_told_before_anything_is_written(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", [{"id": "1", "label": "a"}])
    with pytest.raises(SourceError, match=r"rows\.jsonl: no text column found among 'id', 'label'"):
        ingest(source, tmp_path / "out")
    with pytest.raises(SourceError, match=r"rows\.jsonl: no column 'txt': the rows have 'id', 'label'"):
        ingest(source, tmp_path / "out", text_column="txt")
    assert not (tmp_path / "out").exists()


def test_the_named_column_is_the_text(tmp_path: Path) -> None:
    rows = [{"text": "wrong", "title": "right"}]
    ingest(write_jsonl(tmp_path / "rows.jsonl", rows), tmp_path / "out", text_column="title")
    assert BlockManager(tmp_path / "out").get_chunk(0, 0) == ["right"]
    assert BlockManager(tmp_path / "out").get_rows(0, 0) == rows


# Where it writes


def test_a_folder_with_blocks_that_are_not_ours_is_refused(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", numbered(3))
    for name in ("blocks/block_00000.jsonl", ".ingest/block_00000.json"):
        dest = tmp_path / name.split("/")[0]
        (dest / name).parent.mkdir(parents=True)
        (dest / name).write_bytes(b"precious")
        before = tree(dest)
        with pytest.raises(BlockStoreError, match="not a block store that penstock began; choose another folder"):
            ingest(source, dest)
        assert tree(dest) == before


def test_a_manifest_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", numbered(3))
    (tmp_path / "out").mkdir()
    (tmp_path / "out/block_manifest.json").write_bytes(b'{"made by": "somebody else"}')
    with pytest.raises(BlockStoreError, match=r"block_manifest\.json is damaged .*version"):
        ingest(source, tmp_path / "out")
    assert tree(tmp_path / "out") == {"block_manifest.json": b'{"made by": "somebody else"}'}


def test_other_files_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", numbered(3))
    foreign = {
        "README.md": b"a user's",
        ".object.tmp": b"a user's",
        # A token cache being written by another process, under a lock of its own.
        "tokens/gpt2/.ids.bin.7.abcdef.penstock-tmp": b"unfinished",
    }
    for name, data in foreign.items():
        (tmp_path / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / name).write_bytes(data)
    for _ in range(2):
        ingest(source, tmp_path / "out")
        found = tree(tmp_path / "out")
        assert {name: found[name] for name in foreign} == foreign


def test_a_file_in_place_of_the_folder_is_told(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", numbered(3))
    (tmp_path / "out").write_bytes(b"a file")
    with pytest.raises(AccessDenied, match=f"{tmp_path}/out"):
        ingest(source, tmp_path / "out")


def test_output_inside_the_input_is_never_read(tmp_path: Path) -> None:
    rows = numbered(12)
    write_jsonl(tmp_path / "rows.jsonl", rows)
    first = ingest(tmp_path, tmp_path / "out", 5)
    assert all_rows(tmp_path / "out") == rows
    assert ingest(tmp_path, tmp_path / "out", 5) == first


INGEST_AND_WAIT = """
import sys
from penstock.blocks import ingest
def wait(progress):
    if progress.state == "running":
        print("ready", flush=True)
        sys.stdin.read()
ingest(sys.argv[1], sys.argv[2], 5, on_progress=wait)
"""


def test_a_second_writer_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    rows = numbered(12)
    source = write_jsonl(tmp_path / "rows.jsonl", rows)
    dest = tmp_path / "out"
    with held_open(python(INGEST_AND_WAIT, str(source), str(dest))) as writer:
        with pytest.raises(StorageBusy, match=f"{dest} is in use by process {writer.pid} for ingesting"):
            ingest(source, dest, 5)
        assert all_rows(dest) == rows[:10]
    assert writer.returncode == 0
    assert all_rows(dest) == rows
    assert ingest(source, dest, 5).complete


# Bad rows

MIXED: list[Any] = [*numbered(13), b"?", {"text": 5}, *numbered(4), b"[]", *numbered(3), {"other": "x"}, b""]
"""Bad rows at lines 14, 15, 20 and 24."""


def test_a_bad_row_stops_the_ingest_and_keeps_the_blocks_before_it(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", MIXED)
    with pytest.raises(BadRowError, match=r"rows\.jsonl:14: not JSON: .*the 2 blocks before it are kept"):
        ingest(source, tmp_path / "out", 5)
    assert all_rows(tmp_path / "out") == numbered(13)[:10]
    assert leftovers(tmp_path / "out") == []


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (b"[1]", "a JSON array, expected an object"),
        (b'{"text":5}', "column 'text' holds int, expected a string"),
        (b'{"id":1}', "no column 'text': the row has 'id'"),
        (b'{"text":NaN}', "not JSON: NaN is no number in JSON"),
        (b'{"text":"\xff"}', "not UTF-8: byte 0xff at offset 9: name its encoding with --encoding"),
    ],
)
def test_a_bad_row_is_named_with_its_place_and_reason(tmp_path: Path, row: bytes, reason: str) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", [*numbered(2), b"", row, {"text": "after"}])
    with pytest.raises(BadRowError, match=rf"rows\.jsonl:4: {reason}.*--on-bad-row skip"):
        ingest(source, tmp_path / "out")


def test_skipped_rows_are_counted_and_listed(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", MIXED)
    manifest = ingest(source, tmp_path / "out", 5, on_bad_row="skip")
    assert all_rows(tmp_path / "out") == [*numbered(13), *numbered(4), *numbered(3)]
    assert manifest.skipped_count == 4
    assert [row.position for row in manifest.skipped_rows] == [f"rows.jsonl:{line}" for line in (14, 15, 20, 24)]
    assert [row.reason for row in manifest.skipped_rows][1:] == [
        "column 'text' holds int, expected a string",
        "a JSON array, expected an object",
        "no column 'text': the row has 'other'",
    ]


def test_the_last_block_is_the_last_whatever_was_skipped(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", [*numbered(2), *[b"?"] * 20, *numbered(5), *[b"?"] * 20])
    ingest(source, tmp_path / "out", 3, on_bad_row="skip")
    manager = BlockManager(tmp_path / "out")
    assert [manager.get_block(block_id).sample_count for block_id in range(3)] == [3, 3, 1]
    assert [manager.is_last_block(block_id) for block_id in range(3)] == [False, False, True]


def test_a_source_of_nothing_but_bad_rows_is_an_empty_data_set(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", [b"?", b"[]"])
    manifest = ingest(source, tmp_path / "out", on_bad_row="skip")
    assert (manifest.total_samples, manifest.skipped_count) == (0, 2)
    assert list(tree(tmp_path / "out")) == ["block_manifest.json"]


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(st.sampled_from([{"text": "a"}, {"text": "bb"}, {"text": 1}, b"?", b""]), max_size=25),
    block_size=st.integers(1, 5),
    block_bytes=st.none() | st.integers(1, 40),
    first=st.sampled_from([1, 30, 1 << 20]),
    then=st.sampled_from([1, 30, 1 << 20]),
)
def test_going_on_with_skip_ends_like_skipping_from_the_start(
    rows: list[Any], block_size: int, block_bytes: int | None, first: int, then: int
) -> None:
    with TemporaryDirectory() as folder:
        source = write_jsonl(Path(folder, "rows.jsonl"), [{"text": "first"}, *rows])
        ingest(source, Path(folder, "whole"), block_size, block_bytes, on_bad_row="skip")
        stopped = Path(folder, "stopped")
        with rows_a_batch(first):
            try:
                ingest(source, stopped, block_size, block_bytes)
            except BadRowError:
                kept = stamps(stopped / "blocks")
            else:
                kept = {}
        with rows_a_batch(then):
            ingest(source, stopped, block_size, block_bytes, on_bad_row="skip")
        assert tree(stopped) == tree(Path(folder, "whole"))
        now = stamps(stopped / "blocks")
        assert {path: now[path] for path in kept} == kept, "what was kept is not written again"


def test_only_the_first_thousand_skipped_rows_are_listed(tmp_path: Path) -> None:
    rows = [*numbered(3), *[b"?"] * 600, *numbered(3), *[b"?"] * 600, *numbered(3)]
    source = write_jsonl(tmp_path / "rows.jsonl", rows)
    with rows_a_batch(1000):
        manifest = ingest(source, tmp_path / "out", 3, on_bad_row="skip")
        assert manifest.skipped_count == 1200
        assert len(manifest.skipped_rows) == 1000
        assert manifest.skipped_rows[-1].position == f"rows.jsonl:{3 + 600 + 3 + 400}"
        with pytest.raises(BadRowError):
            ingest(source, tmp_path / "stopped", 3)
        ingest(source, tmp_path / "stopped", 3, on_bad_row="skip")
    assert tree(tmp_path / "stopped") == tree(tmp_path / "out")


# Interrupted


def interrupt_after(calls: int) -> Callable[[IngestProgress], None]:
    left = [calls]

    def on_progress(_: IngestProgress) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt

    return on_progress


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(0, 20),
    block_size=st.integers(1, 6),
    interrupts=st.lists(st.tuples(st.integers(0, 8), st.sampled_from([1, 30, 200])), max_size=4),
)
def test_an_interrupted_ingest_goes_on_and_ends_the_same(
    count: int, block_size: int, interrupts: list[tuple[int, int]]
) -> None:
    with TemporaryDirectory() as folder:
        rows: list[Any] = numbered(count)
        source = write_jsonl(Path(folder, "rows.jsonl"), [*rows[:7], b"?", b"", *rows[7:]])
        dest = Path(folder, "out")
        for calls, group_bytes in interrupts:
            with rows_a_batch(group_bytes):
                try:
                    ingest(source, dest, block_size, on_bad_row="skip", on_progress=interrupt_after(calls))
                except KeyboardInterrupt:
                    assert leftovers(dest) == []
                    assert all_rows(dest) == rows[: len(all_rows(dest))]
        ingest(source, dest, block_size, on_bad_row="skip")
        ingest(source, Path(folder, "whole"), block_size, on_bad_row="skip")
        assert tree(dest) == tree(Path(folder, "whole"))
        assert damages(dest) == {}


def test_progress_tells_what_was_resumed_and_how_far_it_is(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", numbered(12))
    size_bytes = source.stat().st_size
    states: list[IngestProgress] = []
    with rows_a_batch(1):
        with pytest.raises(KeyboardInterrupt):
            ingest(source, tmp_path / "out", 5, on_progress=interrupt_after(7))
        ingest(source, tmp_path / "out", 5, on_progress=states.append)
    assert (states[0].state, states[0].samples, states[0].blocks) == ("resumed", 5, 1)
    assert [state.samples for state in states[1:-1]] == list(range(6, 13))
    assert (states[-1].state, states[-1].samples, states[-1].blocks) == ("complete", 12, 3)
    read = [state.bytes_read or 0 for state in states]
    assert read == sorted(read)
    assert read[-1] == states[-1].bytes_total == size_bytes


@pytest.mark.parametrize("name", ["header.json", "block_00000.json"])
@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"entry":{}}', b"\xff"])
def test_a_damaged_journal_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", [*numbered(12), b"?"])
    with pytest.raises(BadRowError):
        ingest(source, tmp_path / "out", 5)
    (tmp_path / "out/.ingest" / name).write_bytes(content)
    for use in (lambda: ingest(source, tmp_path / "out", 5), BlockManager(tmp_path / "out").get_total_blocks):
        with pytest.raises(BlockStoreError, match=rf"\.ingest/{name} is damaged .*ingest again into a new folder"):
            use()


# Memory


def test_memory_does_not_grow_with_the_source(tmp_path: Path) -> None:
    line = b'{"text":"' + b"x" * 4000 + b'"}\n'
    source = tmp_path / "rows.jsonl"
    source.write_bytes(line * 12_000)
    tracemalloc.start()
    try:
        ingest(source, tmp_path / "out")
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert source.stat().st_size > 48_000_000
    assert peak_bytes < 16_000_000
