"""The figures, a function a section. Contenders take turns, round by round; a figure is the median of the rounds."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from feed_peers.children import PEERS
from feed_peers.material import HUGE_BLOCK_SAMPLES, HUGE_BLOCKS, WIDTH, Material
from measuring import Children, Result, interleaved, log, ratio

BATCH = 8
SEED = 3
CONFIGURATIONS: dict[str, list[Result]] = {
    "torchdata": [{"workers": 0}, {"workers": 1}, {"workers": 2}],
    "litdata": [{"workers": 0}, {"workers": 1}, {"workers": 2}],
    "grain": [
        {"source": "memmap", "threads": 0},
        {"source": "memmap", "threads": 2, "ahead": 16},
        {"source": "arrayrecord", "threads": 0},
        {"source": "arrayrecord", "threads": 16, "ahead": 500},
    ],
    "hf": [{"style": "map"}],
    "webdataset": [{"workers": 0}, {"workers": 1}, {"workers": 2}],
    "mosaic": [{"workers": 0}, {"workers": 1}, {"workers": 2}],
}
"""What is tried for loading rows; the fastest of them is measured."""


@dataclass(frozen=True)
class Bench:
    """What the sections share."""

    children: Children
    material: Material
    rounds: int
    seconds: float

    def interleaved(self, contenders: dict[str, Callable[[], Result]], figure: str) -> dict[str, Any]:
        return interleaved(contenders, figure, self.rounds)

    def rows_task(self, name: str, **more: Any) -> Result:
        """What a contender needs to load rows."""
        material = self.material
        return {
            "rows": str(material.rows),
            "width": WIDTH,
            "batch": BATCH,
            "seed": SEED,
            "folder": str(material.work / f"{name}-{material.text_mb}mb-{material.copies}"),
            "tokenizer": str(material.tokenizer),
            **more,
        }

    def prepared_peers(self) -> list[str]:
        """The peers whose own format of the rows is there."""
        ready = []
        for name in self.children.peers:
            task = self.rows_task(name)
            marker = Path(task["folder"] + ".done")
            if name != "torchdata" and not marker.exists():
                log(f"preparing {name}")
                if "error" in self.children.run(name, "prepare", task, timeout_s=600):
                    continue
                marker.touch()
            ready.append(name)
        return ready


def best_peer(found: dict[str, Any], choose: Callable[..., float]) -> float | None:
    values = [value for name, value in found.items() if name in PEERS and isinstance(value, float)]
    return choose(values) if values else None


# -- A: from raw text --------------------------------------------------------------------------------------------------


def raw_text(bench: Bench) -> dict[str, Any]:
    """Raw text to packed batches, nothing cached: tokens a second, opening included."""
    material, children = bench.material, bench.children
    task = {
        "texts": str(material.texts),
        "store": str(material.store),
        "tokenizer": str(material.tokenizer),
        "width": WIDTH,
        "batch": BATCH,
        "seed": SEED,
    }

    def penstock(**more: bool) -> Result:
        with TemporaryDirectory(dir=material.work) as fresh:
            return children.run("penstock", "cold", task | {"fresh": fresh} | more)

    contenders: dict[str, Callable[[], Result]] = {
        "gigatoken alone": lambda: children.run("gigatoken", "alone", task),
        "gigatoken alone, its loading included": lambda: children.run("gigatoken", "alone", task | {"load": True}),
        "penstock, from blocks": penstock,
        "penstock, from the file": lambda: penstock(ingest=True),
    }
    for name in ("hf", "torchdata"):
        if name in children.peers:
            peer_task = task | {"texts": str(material.peer_texts)}
            contenders[name] = lambda name=name, task=peer_task: children.run(name, "cold", task)
    found = bench.interleaved(contenders, "tokens_per_s")
    ours = found["penstock, from blocks"]
    return {
        "tokens a second": found,
        "ratios": {
            "penstock from blocks / HF streaming (asked: 20)": ratio(ours, found.get("hf")),
            "penstock from the file / HF streaming": ratio(found["penstock, from the file"], found.get("hf")),
            "penstock from blocks / gigatoken alone (asked: 0.5)": ratio(ours, found["gigatoken alone"]),
            "penstock from blocks / gigatoken alone, loading included on both sides": ratio(
                ours, found["gigatoken alone, its loading included"]
            ),
        },
    }


# -- B: from the token cache -------------------------------------------------------------------------------------------


def rows(bench: Bench) -> dict[str, Any]:
    """Shuffled rows of tokens that are there already: tokens a second after the first batch."""
    material, children = bench.material, bench.children
    chosen = {name: fastest_configuration(bench, name) for name in bench.prepared_peers()}
    documents, fixed = str(material.tokenised_store(material.copies)), str(material.rows_store)

    def rate(name: str, **more: Any) -> Callable[[], Result]:
        task = bench.rows_task(name, seconds=bench.seconds, **more)
        return lambda: children.run(name, "rate", task)

    contenders = {
        "bare loop": rate("bare"),
        "penstock, rows": rate("penstock", store=fixed),
        "penstock, rows, fully shuffled": rate("penstock", store=fixed, order="shuffled"),
        "penstock, documents": rate("penstock", store=documents),
        "penstock, documents, fully shuffled": rate("penstock", store=documents, order="shuffled"),
        **{name: rate(name, **config) for name, config in chosen.items() if config is not None},
    }
    if "torchdata" in chosen:
        contenders["torchdata, a row at a time"] = rate("torchdata", fetch="a row")
    found = bench.interleaved(contenders, "tokens_per_s")
    fastest = best_peer(found, max)
    ours, bare = found["penstock, rows"], found["bare loop"]
    return {
        "tokens a second": found,
        "configurations": chosen,
        "ratios": {
            "penstock rows / fastest peer (asked: 5)": ratio(ours, fastest),
            "penstock rows / bare loop (asked: 0.8)": ratio(ours, bare),
            "penstock documents / fastest peer": ratio(found["penstock, documents"], fastest),
            "penstock documents / bare loop": ratio(found["penstock, documents"], bare),
        },
    }


def fastest_configuration(bench: Bench, name: str) -> Result | None:
    """Each configuration of a peer once, for a short while; the first again, which may have waited for disks."""
    rates = []
    for config in [CONFIGURATIONS[name][0], *CONFIGURATIONS[name]]:
        task = bench.rows_task(name, seconds=bench.seconds / 2, **config)
        told = bench.children.run(name, "rate", task)
        if "error" not in told:
            rates.append((told["tokens_per_s"], config))
            log(f"  {name} {config}: {told['tokens_per_s'] / 1e6:.1f} M tokens/s, {told['dtype']}")
    return max(rates, key=lambda pair: pair[0])[1] if rates else None


# -- C: until the first batch ------------------------------------------------------------------------------------------


def first_batch(bench: Bench) -> dict[str, Any]:
    """Seconds from the start of a process to its first batch, from the beginning and at 90 % of the epoch."""
    material, children = bench.material, bench.children
    store = material.tokenised_store(material.copies)
    tasks = {"penstock": bench.rows_task("penstock", store=str(store))}
    tasks |= {name: bench.rows_task(name, **CONFIGURATIONS[name][0]) for name in bench.prepared_peers()}
    files = [str(path) for path in material.token_files(store)]
    contenders: dict[str, Callable[[], Result]] = {
        "import numpy and open": lambda: children.run("bare", "opened", bench.rows_task("bare", files=files))
    }
    for name, task in tasks.items():
        contenders[name] = lambda name=name, task=task: children.run(name, "first", task)
        state_file = str(material.work / f"state-{name}.pkl")
        share = {"share": 0.9, "batches": material.row_count // BATCH, "state_file": state_file}
        told = children.run(name, "state", task | share, timeout_s=600)
        if "error" not in told:
            resumed = task | {"state_file": state_file}
            contenders[f"{name}, resumed"] = lambda name=name, task=resumed: children.run(name, "first", task)
    found = bench.interleaved(contenders, "since_exec_s")
    ours, again, limit = found["penstock"], found.get("penstock, resumed"), found["import numpy and open"]
    others = [value for name, value in found.items() if name.split(",")[0] in PEERS and isinstance(value, float)]
    return {
        "seconds": found,
        "penstock imports torch": children.run("penstock", "first", tasks["penstock"]).get("torch"),
        "ratios": {
            "penstock / import numpy and open (asked: at most 2)": ratio(ours, limit),
            "resumed / from the beginning (asked: at most 1.2)": ratio(again, ours),
            "penstock / quickest peer (asked: below 1)": ratio(ours, min(others)) if others else None,
        },
    }


# -- D: memory ---------------------------------------------------------------------------------------------------------


def memory(bench: Bench) -> dict[str, Any]:
    """Peak memory of an epoch, at so much data and at four times as much."""
    material = bench.material
    figures: dict[str, dict[str, float]] = {}
    for name, copies in (("1x", material.memory_copies), ("4x", 4 * material.memory_copies)):
        store = material.tokenised_store(copies)
        told = [
            bench.children.run("penstock", "memory", bench.rows_task("penstock", store=str(store)), timeout_s=600)
            for _ in range(min(3, bench.rounds))
        ]
        kept = [one for one in told if "error" not in one]
        if not kept:
            return {"error": told[0]["error"]}
        figures[name] = {key: statistics.median(one[key] for one in kept) for key in ("rss_mb", "anon_mb", "tokens")}
        log(f"  {name}: {figures[name]}")
    return {
        "figures": figures,
        "ratios": {
            "peak RSS, 4x / 1x": figures["4x"]["rss_mb"] / figures["1x"]["rss_mb"],
            "peak RSS without mapped files, 4x / 1x (asked: at most 1.1)": figures["4x"]["anon_mb"]
            / figures["1x"]["anon_mb"],
        },
    }


# -- F: size -----------------------------------------------------------------------------------------------------------


def huge(bench: Bench) -> dict[str, Any]:
    """A store of 10**9 samples: from the start of the process to the first batch at 99 % of the epoch."""
    found: dict[str, Any] = {"samples": HUGE_BLOCKS * HUGE_BLOCK_SAMPLES}
    for order in ("shard-local", "shuffled"):
        task = {
            "store": str(bench.material.huge_store),
            "batch": BATCH,
            "seed": SEED,
            "order": order,
            "share": 0.99,
        }
        told = [bench.children.run("penstock", "seek", task) for _ in range(bench.rounds)]
        kept = [one for one in told if "error" not in one]
        found[order] = {name: statistics.median(one[name] for one in kept) for name in kept[0]} if kept else told[0]
        log(f"  {order}: {found[order]}")
    return found


# -- G: order ----------------------------------------------------------------------------------------------------------


def order(bench: Bench) -> dict[str, Any]:
    """Indices a second of a plan's orders, on one core, beside numpy's permutation of as many as it can hold."""
    task = {"seconds": bench.seconds / 2, "count": 1_000_000, "samples": 10_000_000}
    contenders: dict[str, Callable[[], Result]] = {
        "numpy's permutation of 10**7": lambda: bench.children.run("bare", "indices", task)
    }
    for name in ("shuffled", "shard-local"):
        for power in (7, 12):
            mine = task | {"order": name, "samples": 10**power}
            contenders[f"{name} of 10**{power}"] = lambda mine=mine: bench.children.run("penstock", "indices", mine)
    found = bench.interleaved(contenders, "indices_per_s")
    slowest = min(value for name, value in found.items() if not name.startswith("numpy"))
    return {"indices a second": found, "slowest, millions (asked: 5)": slowest / 1e6}
