"""A full disk under a miner: a sentence, a try in vain, and once there is space the weights are as they would be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch

from equipment.forks import ended, start_process
from equipment.scarcity import CANNOT_MOUNT, Disk, on_small_disks
from exchange.local_run import LocalRun
from penstock.errors import PenstockError, StorageError
from penstock.exchange.journal import METRICS_FILE, Journal
from penstock.exchange.miner import Miner
from penstock.train.stopping import StopRequest

WINDOWS = 4
SETTINGS = {"miners": ["a"], "seats": 1, "inner": "adamw", "inner_learning_rate": 1e-3, "window_s": 3600.0}


def mine(run: LocalRun, work: Path) -> int:
    return Miner(run.opened, "a", work, stop=StopRequest(), poll_s=0.02, until_window=WINDOWS).run()


def run_out_of_space(place: str, disk: Disk) -> None:
    """Have space run out at a place, in the third window."""
    note, put, encode, upload = Journal.note, Miner._save, Miner._encode, Miner._upload

    def note_at_length(self: Journal, event: str, **told: Any) -> None:
        note(self, event, **told, padding="x" * 5000)  # longer than what is left of the file's last page

    def full_before(act: Any, name: str) -> None:
        def act_in_vain(self: Miner, *args: Any, **more: Any) -> None:
            calls.append(name)
            if calls.count(name) == 3:
                disk.exhaust()
            act(self, *args, **more)

        setattr(Miner, name, act_in_vain)

    calls: list[str] = []
    Journal.note = note_at_length
    full_before(*{"contribution": (encode, "_encode"), "state": (put, "_save"), "metrics": (upload, "_upload")}[place])


def mine_with_too_little_space(disk: Disk, place: str, folder: Path, answer: Path) -> None:
    """Mine until space runs out, once more in vain, and to the end once there is some."""
    torch.set_num_threads(1)
    weights: list[str] = []
    told: list[str] = []
    for name in ("undisturbed", "disturbed"):
        run = LocalRun.begin(folder / name, **SETTINGS)
        aggregator = run.close(WINDOWS)
        if name == "undisturbed":
            mine(run, folder / name / "work")
        else:
            run_out_of_space(place, disk)
            for _ in range(2):
                try:
                    mine(run, folder / "work")
                except PenstockError as error:
                    told.append(str(error))
            disk.relieve()
            assert mine(run, folder / "work") == WINDOWS
        aggregator.join(60)
        replica = run.opened.replica()
        replica.catch_up()
        assert replica.learned == WINDOWS
        weights.append(replica.digest)
    lines = (folder / "work" / METRICS_FILE).read_text(encoding="utf-8").splitlines()
    events = [json.loads(line)["event"] for line in lines]
    left = sorted(path.name for path in (folder / "work").iterdir())
    answer.write_bytes(orjson.dumps({"told": told, "weights": weights, "events": events, "left": left}))


@pytest.mark.parametrize("place", ["contribution", "state", "metrics"])
def test_a_disk_that_fills_up_under_a_miner_loses_nothing(tmp_path: Path, place: str) -> None:
    answer = tmp_path / "answer"
    process = start_process(
        on_small_disks, [tmp_path / "work"], __name__, mine_with_too_little_space.__name__, place, tmp_path, answer
    )
    code = ended(process, 100)
    if code == CANNOT_MOUNT:
        pytest.skip("no right to mount a file system")
    assert code == 0
    found = orjson.loads(answer.read_bytes())
    first, second = found["told"]
    files = {"contribution": "contribution.safetensors", "state": "miner.safetensors", "metrics": METRICS_FILE}
    assert files[place] in first
    for told in (first, second):
        assert "space left" in told
        assert "run the same command again" in told
    assert found["weights"][0] == found["weights"][1]
    assert found["events"].count("started") in (2, 3)
    assert found["events"].count("window") >= WINDOWS - 1
    assert found["left"] == ["contribution.safetensors", METRICS_FILE, "miner.safetensors"]


def test_a_line_that_a_killed_process_left_unfinished_spoils_no_other(tmp_path: Path) -> None:
    (tmp_path / METRICS_FILE).write_bytes(b'{"event": "win')
    Journal(tmp_path, "miner a").note("started", window=3)
    _, last = (tmp_path / METRICS_FILE).read_bytes().splitlines()
    assert orjson.loads(last)["event"] == "started"


def test_a_journal_that_cannot_be_written_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / METRICS_FILE).mkdir()
    with pytest.raises(StorageError, match=r"metrics\.jsonl cannot be written: .*: mend that and run the same command"):
        Journal(tmp_path, "miner a").note("started", window=3)
