"""What is made ahead, when its process ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from equipment.processes import python, run

AHEAD = """
import sys, time
from pathlib import Path
from penstock.feed import prefetch
from penstock.feed.prefetch import Prefetch, Soon

done, kind, takes_s = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])

def work():
    time.sleep(takes_s)
    done.write_text("done")
    yield 1

if takes_s > 30:
    prefetch._GOODBYE_S = 0.2
ahead = Soon(lambda: list(work())) if kind == "a call" else Prefetch(work(), budget_bytes=1, size_of=lambda _: 1)
"""


@pytest.mark.parametrize("kind", ["a call", "an iterator"])
def test_a_process_that_ends_waits_for_what_is_under_way(tmp_path: Path, kind: str) -> None:
    finished = run(python(AHEAD, str(tmp_path / "done"), kind, "0.5"), timeout_s=60)
    assert finished.returncode == 0, finished.output
    assert (tmp_path / "done").read_text() == "done"


@pytest.mark.parametrize("kind", ["a call", "an iterator"])
def test_a_process_that_ends_does_not_wait_for_what_does_not(tmp_path: Path, kind: str) -> None:
    finished = run(python(AHEAD, str(tmp_path / "done"), kind, "600"), timeout_s=60)
    assert finished.returncode == 0, finished.output
    assert not (tmp_path / "done").exists()
