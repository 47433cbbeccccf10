"""Child processes: one a measurement, with a time-out, reporting one line of JSON. A failure is told, not raised."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from feed_peers.material import log

CONTENDER = Path(__file__).with_name("contender.py")
PEER_PACKAGES = [
    "mosaicml-streaming",
    "litdata",
    "datasets",
    "grain",
    "webdataset",
    "torchdata",
    "tokenizers",
    "numpy<2.3",
    "torch==2.13.0",  # a plain torch would bring gigabytes of CUDA along
]
PEERS = ("torchdata", "litdata", "grain", "hf", "webdataset", "mosaic")
Result = dict[str, Any]


@dataclass(frozen=True)
class Children:
    """Starts contenders: peers with the interpreter of their own environment, the others with this one."""

    peer_python: Path | None
    home: Path
    """Where the libraries' caches go, so that none outlives the benchmark."""

    @property
    def peers(self) -> tuple[str, ...]:
        return PEERS if self.peer_python else ()

    def start(self, name: str, action: str, task: Result, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        python = str(self.peer_python) if name in PEERS else sys.executable
        quiet = {
            "HOME": str(self.home),
            "HF_HOME": str(self.home / "hf"),
            "HF_DATASETS_OFFLINE": "1",
            "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
            "DATA_OPTIMIZER_CACHE_FOLDER": str(self.home / "litdata"),
            "PENSTOCK_CACHE": str(self.home / "penstock"),
            "PYTHONWARNINGS": "ignore",
            "TOKENIZERS_PARALLELISM": "true",
        }
        return subprocess.Popen(
            [python, str(CONTENDER), name, action, json.dumps(task)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **quiet, **(env or {})},
            start_new_session=True,
        )

    def run(self, name: str, action: str, task: Result, *, timeout_s: float = 180.0) -> Result:
        """What the child reported; ``{"error": ...}`` where it failed or took too long."""
        started = time.perf_counter()
        told = self.finish(self.start(name, action, task), timeout_s)
        if "at" in told:
            told["since_exec_s"] = told.pop("at") - started
        if "error" in told:
            log(f"  {name} {action}: {told['error']}")
        return told

    @staticmethod
    def finish(child: subprocess.Popen[str], timeout_s: float) -> Result:
        try:
            out, err = child.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            kill(child)
            child.communicate()
            return {"error": f"took longer than {timeout_s:.0f} s"}
        lines = [line for line in out.splitlines() if line.startswith("{")]
        if child.returncode == 0 and lines:
            return json.loads(lines[-1])
        said = [line for line in err.splitlines() if line.strip()]
        return {"error": f"ended with {child.returncode}: {said[-1][:300] if said else 'no word'}"}


def kill(child: subprocess.Popen[str]) -> None:
    """A child and the workers it has started: they have a session of their own."""
    with suppress(ProcessLookupError):  # it was done already
        os.killpg(child.pid, signal.SIGKILL)


def set_up_peers(folder: Path) -> None:
    """An environment of the peers' own: they want other versions than Penstock does."""
    log(f"installing the peers into {folder}; this takes some minutes")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "pip"), "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", *PEER_PACKAGES], check=True)
    # One that does not go with torch for the CPU would fail the libraries that look for it.
    subprocess.run([*pip, "uninstall", "--yes", "torchvision"], check=True)
