"""How fast blocks are written and read, as ratios to the plain loop that does the least possible, in one run.

    python benchmarks/blocks.py [--samples 200000] [--rounds 5] [--json]

Every figure is the median of interleaved rounds: the limit and Penstock take turns, so that a noisy machine is noisy
for both. Memory is the peak of a process that does nothing else, at 1x and 4x the data.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson
import pyarrow as pa
from pyarrow import parquet

from penstock.blocks import BlockManager, BlockStore, ingest

TARGETS = {
    "jsonl ingest / plain loop": 0.5,
    "parquet ingest / pyarrow + orjson": 0.5,
    "get_chunk / orjson.loads": 0.75,
}


def timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def ratio(limit: Callable[[], Any], ours: Callable[[], Any], rounds: int) -> float:
    """Median of limit / ours over interleaved rounds: 1 is as fast as the limit."""
    return statistics.median([timed(limit) / timed(ours) for _ in range(rounds)])


def make_rows(samples: int) -> list[dict[str, Any]]:
    source = random.Random(7)
    words = [f"word{number}" for number in range(5000)]
    return [
        {"id": number, "text": " ".join(source.choices(words, k=source.randint(20, 200))), "url": f"https://e/{number}"}
        for number in range(samples)
    ]


def plain_jsonl(path: Path, out: Path) -> None:
    with path.open("rb") as lines, out.open("wb") as target:
        for line in lines:
            orjson.loads(line)
            target.write(line)


def plain_parquet(path: Path, out: Path) -> None:
    with out.open("wb") as target:
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                target.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))


def ingest_anew(path: Path, dest: Path) -> None:
    shutil.rmtree(dest, ignore_errors=True)
    ingest(path, dest, block_size=100_000)


def peak_mb(action: str, path: Path) -> float:
    """Peak resident memory of a process that ingests a file or reads a store, in MB."""
    done = subprocess.run(
        [sys.executable, __file__, "--child", action, str(path)], capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def child(action: str, path: Path) -> None:
    if action == "ingest":
        with TemporaryDirectory(dir=path.parent) as folder:
            ingest(path, Path(folder, "store"), block_size=20_000)
    else:
        manager = BlockManager(path)
        for block_id in range(manager.get_total_blocks() or 0):
            for chunk_id in range(manager.get_block(block_id).chunk_count(4000)):
                manager.get_chunk(block_id, chunk_id)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000)


def measure(folder: Path, samples: int, rounds: int) -> dict[str, float]:
    rows = make_rows(samples)
    jsonl, table = folder / "rows.jsonl", folder / "rows.parquet"
    jsonl.write_bytes(b"".join(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in rows))
    parquet.write_table(pa.Table.from_pylist(rows), table, row_group_size=20_000)
    out, dest = folder / "out", folder / "store"
    found = {
        "jsonl ingest / plain loop": ratio(lambda: plain_jsonl(jsonl, out), lambda: ingest_anew(jsonl, dest), rounds),
        "parquet ingest / pyarrow + orjson": ratio(
            lambda: plain_parquet(table, out), lambda: ingest_anew(table, dest), rounds
        ),
    }
    ingest_anew(jsonl, dest)
    found |= measure_chunks(dest, rounds)
    found |= measure_memory(folder, jsonl)
    return found


def measure_chunks(dest: Path, rounds: int) -> dict[str, float]:
    store, manager = BlockStore.open(dest), BlockManager(dest, cache_bytes=0, prefetch=False)
    places = [(block.block_id, chunk) for block in store.manifest.blocks for chunk in range(block.sample_count // 4000)]
    random.Random(3).shuffle(places)
    results: dict[tuple[int, int], float] = {}
    for block_id, chunk_id in places[: 4 * rounds]:
        lines = store.lines(block_id, chunk_id * 4000, (chunk_id + 1) * 4000)
        results[block_id, chunk_id] = ratio(
            lambda lines=lines: [orjson.loads(line) for line in lines],
            lambda block_id=block_id, chunk_id=chunk_id: manager.get_chunk(block_id, chunk_id),
            rounds,
        )
    last = store.manifest.blocks[0].sample_count // 4000 - 1
    first_to_last = ratio(lambda: manager.get_chunk(0, 0), lambda: manager.get_chunk(0, last), 4 * rounds)
    return {"get_chunk / orjson.loads": statistics.median(results.values()), "first chunk / last chunk": first_to_last}


def measure_memory(folder: Path, jsonl: Path) -> dict[str, float]:
    fourfold = folder / "fourfold.jsonl"
    with fourfold.open("wb") as target:
        for _ in range(4):
            target.write(jsonl.read_bytes())
    ingest(jsonl, folder / "store-1", block_size=20_000)
    ingest(fourfold, folder / "store-4", block_size=20_000)
    return {
        "peak memory, ingest 4x / 1x": peak_mb("ingest", fourfold) / peak_mb("ingest", jsonl),
        "peak memory, reading 4x / 1x": peak_mb("read", folder / "store-4") / peak_mb("read", folder / "store-1"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child[0], Path(options.child[1]))
        return
    with TemporaryDirectory() as folder:
        found = measure(Path(folder), options.samples, options.rounds)
    if options.json:
        print(json.dumps(found, indent=2))
        return
    for name, value in found.items():
        wanted = f"  (asked: {TARGETS[name]} or more)" if name in TARGETS else ""
        print(f"{name:40s} {value:6.2f}{wanted}")


if __name__ == "__main__":
    main()
