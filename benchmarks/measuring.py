"""Child processes: one a measurement, with a time-out, reporting one line of JSON. A failure is told, not raised."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Result = dict[str, Any]


def log(*words: object) -> None:
    print(*words, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Children:
    """Starts contenders: peers with the interpreter of their own environment, the others with this one."""

    contender: Path
    """The script they run, with a name, an action and a task."""
    peers: tuple[str, ...]
    """Those with an environment of their own, as far as it is there."""
    peer_python: Path | None
    home: Path
    """Where the libraries' caches go, so that none outlives the benchmark."""
    env: dict[str, str] = field(default_factory=dict)

    def start(self, name: str, action: str, task: Result, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        python = str(self.peer_python) if name in self.peers else sys.executable
        quiet = {
            "HOME": str(self.home),
            "HF_HOME": str(self.home / "hf"),
            "HF_DATASETS_OFFLINE": "1",
            "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
            "DATA_OPTIMIZER_CACHE_FOLDER": str(self.home / "litdata"),
            "PENSTOCK_CACHE": str(self.home / "penstock"),
            "PYTHONWARNINGS": "ignore",
            "PYTHONDONTWRITEBYTECODE": "",  # an installed package has its bytecode, and so do the peers
            "TOKENIZERS_PARALLELISM": "true",
        }
        return subprocess.Popen(
            [python, str(self.contender), name, action, json.dumps(task)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **quiet, **self.env, **(env or {})},
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


def interleaved(contenders: dict[str, Callable[[], Result]], figure: str, rounds: int) -> dict[str, Any]:
    """The median of a figure for each contender, taken in turns. One that fails is left out of the rounds to come."""
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    errors: dict[str, str] = {}
    for _ in range(rounds):
        for name, measure in contenders.items():
            if name in errors:
                continue
            told = measure()
            if "error" in told:
                errors[name] = told["error"]
            else:
                taken[name].append(told[figure])
    medians: dict[str, Any] = {name: statistics.median(values) for name, values in taken.items() if values}
    for name, values in taken.items():
        log(f"  {name:32s} " + " ".join(f"{value:.4g}" for value in values), errors.get(name, ""))
    return medians | {name: {"error": text} for name, text in errors.items() if name not in medians}


def ratio(above: Any, below: Any) -> float | None:
    numbers = isinstance(above, float) and isinstance(below, float)
    return above / below if numbers and below else None


def peer_python(folder: Path | None) -> Path | None:
    """The interpreter of the peers' environment."""
    if folder is None:
        log("no --peers: only Penstock and the limits are measured; --setup-peers FOLDER makes their environment")
        return None
    python = folder.absolute() / "bin" / "python"
    if not python.exists():
        raise SystemExit(f"{folder} has no bin/python: make it with --setup-peers {folder}")
    return python


def set_up(folder: Path, packages: list[str]) -> list[str]:
    """An environment of the peers' own: they want other versions than Penstock does. Returns its pip."""
    log(f"installing the peers into {folder}; this takes some minutes")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "pip"), "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", *packages], check=True)
    return pip


def show(name: str, value: Any, indent: int = 0) -> None:
    """Figures as lines."""
    if isinstance(value, dict):
        print(f"{'  ' * indent}{name}")
        for key, inner in value.items():
            show(key, inner, indent + 1)
    else:
        told = f"{value:,.4g}" if isinstance(value, float) else value
        print(f"{'  ' * indent}{name:60s} {told}")
