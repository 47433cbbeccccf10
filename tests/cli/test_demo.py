"""The demo as `make demo` runs it, with a part of its samples."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.observe.proof import prove
from penstock.observe.run_folder import RunFolder


def demo(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock", "demo", str(folder), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)


@pytest.mark.timeout(420)
def test_the_demo_kills_a_worker_and_proves_the_epoch(tmp_path: Path) -> None:
    done = demo(tmp_path / "demo", "--samples", "128")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "128 samples in 1 block" in done.stdout
    assert "killed by signal 9" in done.stderr
    audits = prove(RunFolder(tmp_path / "demo" / "run"))
    assert [audit.holds for audit in audits] == [True]
    assert "died" in (tmp_path / "demo" / "picture.svg").read_text(encoding="utf-8")


def test_the_demo_leaves_a_folder_alone_that_is_not_its_own(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    done = demo(tmp_path)
    assert done.returncode == 1
    assert "is not empty and not a demo's folder" in done.stderr
    assert (tmp_path / "thesis.tex").read_text() == "years of work"
