"""How long commands take to start, beside the least that is possible: the interpreter, and its command-line library.

    python benchmarks/startup.py [--rounds 9] [--json]

Medians of interleaved rounds, in seconds of wall time; asked: `penstock --help` and `penstock status` below 0.5 s.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import orjson

from penstock import TrainingConfig, ingest, run_training


def make_run(folder: Path) -> Path:
    """A small finished run to ask the status of."""
    rows = (orjson.dumps({"text": f"row {number} of some words"}) for number in range(200))
    (folder / "rows.jsonl").write_bytes(b"\n".join(rows))
    ingest(folder / "rows.jsonl", folder / "store")
    config = TrainingConfig(dataset_file=str(folder / "store"), run_dir=str(folder / "run"), dataset_chunk_size=20)
    config.vocab_size = 300
    run_training(config)
    return folder / "run"


def seconds(command: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def measure(run: Path, rounds: int) -> dict[str, float]:
    penstock = [sys.executable, "-m", "penstock"]
    commands = {
        "python -c pass": [sys.executable, "-c", "pass"],
        "python -c 'import typer, rich.table'": [sys.executable, "-c", "import typer, rich.table, rich.console"],
        "penstock --help": [*penstock, "--help"],
        "penstock status RUN": [*penstock, "status", str(run)],
        "penstock status RUN --json": [*penstock, "status", str(run), "--json"],
        "python -c 'import torch'": [sys.executable, "-c", "import torch"],
    }
    taken: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name, command in commands.items():
            taken[name].append(seconds(command))
    return {name: statistics.median(times) for name, times in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        found = measure(make_run(Path(folder)), options.rounds)
    if options.json:
        print(json.dumps(found, indent=2))
        return
    for name, value in found.items():
        print(f"{name:40s} {value:6.2f} s")


if __name__ == "__main__":
    main()
