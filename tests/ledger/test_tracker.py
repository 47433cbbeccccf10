"""`ChunkTracker` does what its first description promises: no duplicates, epochs, resume, a state file."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

import pytest

from equipment.processes import python, run
from penstock import ChunkTracker
from penstock.errors import LeaseLost, LedgerError

Open = Callable[[], ChunkTracker]


@pytest.fixture(params=["sqlite", "postgresql"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Opens trackers over one store, as other processes would."""
    if request.param == "sqlite":
        return lambda: ChunkTracker(tmp_path / "brain", session_timeout_s=60)
    url = f"{request.getfixturevalue('postgres')}&run=tracker_{uuid4().hex}"
    return lambda: ChunkTracker(url, session_timeout_s=60)


def train(tracker: ChunkTracker, block_id: int, total_chunks: int, gpu_id: int, step: int = 0) -> list[int]:
    """Train what is left of a block; which chunks that was."""
    trained = []
    while (chunk_id := tracker.get_next_untrained_chunk(block_id, total_chunks, gpu_id)) is not None:
        trained.append(chunk_id)
        tracker.mark_chunk_complete(block_id, chunk_id, gpu_id, step + len(trained), 4000)
    return trained


def test_gpus_that_share_a_tracker_train_no_chunk_twice(opened: Open) -> None:
    tracker = opened()
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda gpu_id: train(tracker, 0, 60, gpu_id), range(4)))
    assert sorted(chunk_id for chunks in found for chunk_id in chunks) == list(range(60))
    assert tracker.get_progress_stats()["total_chunks_trained"] == 60


def test_processes_that_share_a_tracker_train_no_chunk_twice(tmp_path: Path) -> None:
    code = """
import sys
from penstock import ChunkTracker
with ChunkTracker(sys.argv[1]) as tracker:
    while (chunk_id := tracker.get_next_untrained_chunk(0, 40, int(sys.argv[2]))) is not None:
        tracker.mark_chunk_complete(0, chunk_id, int(sys.argv[2]), 1, 10)
        print(chunk_id)
"""
    with ThreadPoolExecutor(3) as pool:
        ended = list(pool.map(lambda gpu: run(python(code, str(tmp_path), str(gpu))), range(3)))
    assert [finished.returncode for finished in ended] == [0, 0, 0], ended
    assert sorted(int(line) for finished in ended for line in finished.output.split()) == list(range(40))


def test_an_epoch_is_complete_when_every_chunk_of_every_block_is(opened: Open) -> None:
    tracker = opened()
    assert not tracker.check_epoch_complete(None)
    train(tracker, 0, 2, 0)
    assert not tracker.check_epoch_complete(2)
    assert tracker.get_next_untrained_chunk(1, 2, 0) == 0
    tracker.mark_chunk_complete(1, 0, 0, 3, 10)
    assert not tracker.check_epoch_complete(2)
    with pytest.raises(LedgerError, match="no epoch was seen complete"):
        tracker.start_new_epoch()
    train(tracker, 1, 2, 0)
    assert tracker.check_epoch_complete(2)
    assert tracker.get_progress_stats()["blocks_this_epoch"] == 2


def test_an_epoch_advances_once_however_many_saw_its_end_and_trains_everything_again(opened: Open) -> None:
    one, two = opened(), opened()
    train(one, 0, 3, 0)
    assert one.check_epoch_complete(1)
    assert two.check_epoch_complete(1)
    assert [one.start_new_epoch(), two.start_new_epoch(), one.start_new_epoch()] == [1, 1, 1]
    assert one.get_progress_stats()["blocks_this_epoch"] == 0
    assert train(two, 0, 3, 1) == [0, 1, 2]
    assert two.get_progress_stats()["total_chunks_trained"] == 6


def test_completing_twice_counts_once(opened: Open) -> None:
    tracker = opened()
    chunk_id = tracker.get_next_untrained_chunk(0, 2, 0)
    assert chunk_id == 0
    for _ in range(3):
        tracker.mark_chunk_complete(0, 0, 0, 125, 4000)
    stats = tracker.get_progress_stats()
    assert (stats["total_chunks_trained"], stats["total_samples_trained"], stats["total_steps"]) == (1, 4000, 125)


def test_a_chunk_of_another_gpu_cannot_be_completed(opened: Open) -> None:
    tracker = opened()
    tracker.get_next_untrained_chunk(0, 2, 0)
    with pytest.raises(LeaseLost, match="chunk 0 of block 0 is not claimed by GPU 1"):
        tracker.mark_chunk_complete(0, 0, 1, 1, 1)
    with pytest.raises(LeaseLost):
        tracker.mark_chunk_complete(0, 1, 0, 1, 1)


def test_another_number_of_chunks_for_a_block_is_refused(opened: Open) -> None:
    tracker = opened()
    tracker.get_next_untrained_chunk(0, 2, 0)
    with pytest.raises(LedgerError, match="block 0 has 2 chunks, got total_chunks=3"):
        tracker.get_next_untrained_chunk(0, 3, 0)


def test_a_tracker_that_is_closed_gives_back_what_it_has_not_completed(opened: Open) -> None:
    one, two = opened(), opened()
    assert one.get_next_untrained_chunk(0, 1, 0) == 0
    assert two.get_next_untrained_chunk(0, 1, 1) is None
    one.close()
    assert two.get_next_untrained_chunk(0, 1, 1) == 0


def test_a_killed_process_loses_its_chunk_to_whoever_asks_next(tmp_path: Path) -> None:
    code = """
import signal, sys
from penstock import ChunkTracker
print(ChunkTracker(sys.argv[1], session_timeout_s=3600).get_next_untrained_chunk(0, 1, 0), flush=True)
signal.pause()
"""
    process = subprocess.Popen(python(code, str(tmp_path)), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "0\n"
    tracker = ChunkTracker(tmp_path)
    assert tracker.get_next_untrained_chunk(0, 1, 0) is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert tracker.get_next_untrained_chunk(0, 1, 0) == 0


def test_a_resumed_tracker_goes_on_where_it_was(opened: Open) -> None:
    with opened() as tracker:
        assert tracker.get_next_untrained_chunk(0, 3, 0) == 0
        tracker.mark_chunk_complete(0, 0, 0, 100, 4000)
    tracker = opened()
    assert tracker.total_steps == 100
    assert train(tracker, 0, 3, 0, step=198) == [1, 2]
    assert tracker.total_steps == 200


def test_the_state_file_has_the_schema_and_begins_a_new_ledger(tmp_path: Path) -> None:
    tracker = ChunkTracker(tmp_path / "one")
    train(tracker, 0, 2, 0, step=124)
    assert tracker.get_next_untrained_chunk(1, 2, 1) == 0
    tracker.mark_chunk_complete(1, 0, 1, 127, 3999)
    tracker.save()
    file = tmp_path / "one" / "chunk_tracker_state.json"
    assert json.loads(file.read_text()) == {
        "completed_chunks": [
            {"block_id": 0, "chunk_id": 0, "gpu_id": 0, "step": 125, "samples_trained": 4000},
            {"block_id": 0, "chunk_id": 1, "gpu_id": 0, "step": 126, "samples_trained": 4000},
            {"block_id": 1, "chunk_id": 0, "gpu_id": 1, "step": 127, "samples_trained": 3999},
        ],
        "current_epoch": 0,
        "blocks_this_epoch": [0, 1],
        "total_steps": 127,
    }
    other = tmp_path / "two" / "chunk_tracker_state.json"
    other.parent.mkdir()
    other.write_bytes(file.read_bytes())
    again = ChunkTracker(other)
    assert again.state() == tracker.state()
    assert train(again, 0, 2, 5) == []
    assert train(again, 1, 2, 5) == [1]


def test_chunks_that_a_state_file_left_out_are_trained(tmp_path: Path) -> None:
    entry = {"block_id": 0, "chunk_id": 2, "gpu_id": 0, "step": 9, "samples_trained": 1}
    state = {"completed_chunks": [entry], "current_epoch": 3, "blocks_this_epoch": [0], "total_steps": 9}
    (tmp_path / "chunk_tracker_state.json").write_text(json.dumps(state))
    tracker = ChunkTracker(tmp_path)
    assert tracker.get_progress_stats()["current_epoch"] == 3
    assert sorted(train(tracker, 0, 4, 0)) == [0, 1, 3]


@pytest.mark.parametrize("text", ["{", "[]", '{"completed_chunks": [{}], "current_epoch": 0, "total_steps": 0}'])
def test_a_state_file_that_cannot_be_understood_is_refused_and_left_as_it_is(tmp_path: Path, text: str) -> None:
    file = tmp_path / "chunk_tracker_state.json"
    file.write_text(text)
    with pytest.raises(LedgerError, match="is no state of a chunk tracker"):
        ChunkTracker(tmp_path).get_next_untrained_chunk(0, 1, 0)
    assert file.read_text() == text


def test_making_a_tracker_touches_nothing(tmp_path: Path) -> None:
    ChunkTracker(tmp_path / "new")
    assert list(tmp_path.iterdir()) == []
