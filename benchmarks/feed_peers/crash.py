"""Exactly once: ranks that are killed and resumed, on as many ranks or on fewer, and what they have learned by then."""

from __future__ import annotations

import socket
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from feed_peers.material import CRASH_SAMPLES, CRASH_WIDTH, Material
from measuring import Children, Result, kill, log

WORLD = 4
STOP_STEP = 151
GLOBAL_BATCH = 24
"""A multiple of both world sizes: some of the peers can do no other."""
_TIMEOUT_S = 120.0
CONTENDERS: list[tuple[str, str, Result]] = [
    ("penstock", "penstock", {"mode": "texts"}),
    ("torchdata, its distributed sampler", "torchdata", {}),
    ("litdata", "litdata", {}),
    ("grain, ElasticIterator", "grain", {}),
    ("hf, an iterable's state", "hf", {"style": "iterable"}),
    ("hf, map-style and skipping", "hf", {"style": "map"}),
    ("webdataset, skipping", "webdataset", {}),
    ("mosaic", "mosaic", {}),
]
"""Each with its documented way of going on; where there are two, with both."""


def exactly_once(children: Children, material: Material) -> dict[str, Any]:
    """Repeated and lost samples and the ranks' steps for each contender, resumed on 4 and on 3 ranks."""
    found: dict[str, Any] = {}
    for label, name, options in CONTENDERS:
        if name not in ("penstock", *children.peers):
            continue
        with TemporaryDirectory(dir=material.work, ignore_cleanup_errors=True) as folder:
            found[label] = _of(children, material, name, options, Path(folder))
        log(f"  {label}: {found[label]}")
    return found


def _of(children: Children, material: Material, name: str, options: Result, folder: Path) -> dict[str, Any]:
    task = {
        "store": str(material.crash_store),
        "rows": str(material.crash_rows),
        "width": CRASH_WIDTH,
        "folder": str(folder / "data"),
        "shard_bytes": 8_192,
        "seed": 5,
        **options,
    }
    if name not in ("penstock", "torchdata"):
        prepared = children.run(name, "prepare", task)
        if "error" in prepared:
            return prepared
    if problem := _run_until_killed(children, name, task, folder):
        return {"error": problem}
    before = [_ids(folder / f"before-{rank}.log")[:STOP_STEP] for rank in range(WORLD)]
    return {f"{world} ranks": _resumed(children, name, task, folder, world, before) for world in (WORLD, WORLD - 1)}


def _run_until_killed(children: Children, name: str, task: Result, folder: Path) -> str | None:
    """Run all ranks until each has stored its state at the step of the checkpoint and gone on; then kill them."""
    ranks = []
    env = _environment(WORLD)
    for rank in range(WORLD):
        more = {
            "rank": rank,
            "world": WORLD,
            "batch": GLOBAL_BATCH // WORLD,
            "log_file": str(folder / f"before-{rank}.log"),
            "store_file": str(folder / f"state-{rank}.pkl"),
            "stop_step": STOP_STEP,
        }
        ranks.append(children.start(name, "rank", task | more, env=env | _names(rank)))
    deadline = time.monotonic() + _TIMEOUT_S
    stored = [folder / f"state-{rank}.pkl" for rank in range(WORLD)]
    while not all(path.exists() for path in stored) and time.monotonic() < deadline:
        if any(child.poll() not in (None, 0) for child in ranks):
            break
        time.sleep(0.05)
    for child in ranks:
        kill(child)
    told = [Children.finish(child, 10.0).get("error", "") for child in ranks]
    if all(path.exists() for path in stored):
        return None
    return next((text for text in told if text and "-9" not in text), f"step {STOP_STEP} was not reached")


def _resumed(
    children: Children, name: str, task: Result, folder: Path, world: int, before: list[list[list[int]]]
) -> Result:
    ranks = []
    env = _environment(world)
    for rank in range(world):
        more = {
            "rank": rank,
            "world": world,
            "batch": GLOBAL_BATCH // world,
            "log_file": str(folder / f"after-{world}-{rank}.log"),
            "state_file": str(folder / f"state-{rank}.pkl"),
        }
        ranks.append(children.start(name, "rank", task | more, env=env | _names(rank)))
    deadline = time.monotonic() + _TIMEOUT_S
    told = [Children.finish(child, max(1.0, deadline - time.monotonic())) for child in ranks]
    if errors := [one["error"] for one in told if "error" in one]:
        return {"error": errors[0]}
    after = [_ids(folder / f"after-{world}-{rank}.log") for rank in range(world)]
    counts = Counter(sample for rank in (*before, *after) for step in rank for sample in step)
    return {
        "repeated": sum(count - 1 for count in counts.values()),
        "lost": CRASH_SAMPLES - len(counts),
        "steps after resuming": [len(rank) for rank in after],
    }


def _ids(log_file: Path) -> list[list[int]]:
    return [[int(number) for number in line.split()] for line in log_file.read_text().splitlines()]


def _environment(world: int) -> dict[str, str]:
    """How launchers tell processes of each other."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    return {
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }


def _names(rank: int) -> dict[str, str]:
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "GLOBAL_RANK": str(rank)}
