"""What feeding costs a training step on a device: the adapter, a plain loop, and the step with nothing to feed.

    python benchmarks/torch_feed.py [--device cuda] [--batch-size 64] [--sequence-length 2048] [--step-ms 5] [--json]

Needs no network: the corpus is made of made-up words. Every figure is the median over interleaved rounds. Before it
measures it proves: every value that arrives on the device is the loader's, while kernels are slow and memory is tight
enough to be given out again at once, which is where a missing wait between streams would show.

    limit       the same steps on a batch that lies on the device already
    plain       numpy ──► tensor ──► .to(device), when the batch is asked for
    pageable    the adapter without pinned memory
    adapter     the adapter as it is
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import orjson
import torch

from penstock.blocks import BlockManager, ingest
from penstock.feed import DistributedLoader, Tokenizer, choose_engine, train_tokenizer
from penstock.feed.torch_adapter import TorchBatches
from penstock.feed.torch_tensors import as_tensor

Batch = dict[str, Any]


class Work:
    """A step of about so many milliseconds: products of a matrix, and a look at what was fed."""

    def __init__(self, device: torch.device, step_ms: float) -> None:
        self.device = device
        self._matrix = torch.randn(2048, 2048, device=device) / 50
        self._products = 1
        self._products = max(1, round(step_ms / max(1e-3, self._measure_ms())))

    def __call__(self, batch: Batch) -> torch.Tensor:
        made = self._matrix
        for _ in range(self._products):
            made = made @ self._matrix
        return made[0, 0] * 0 + sum(value.sum() for value in batch.values() if isinstance(value, torch.Tensor))

    def _measure_ms(self) -> float:
        for _ in range(3):
            self({})
        synchronise(self.device)
        began = time.perf_counter()
        for _ in range(20):
            self({})
        synchronise(self.device)
        return (time.perf_counter() - began) * 50


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def make_loader(folder: Path, args: argparse.Namespace) -> Callable[[], DistributedLoader]:
    source = random.Random(7)
    words = [f"word{number}" for number in range(5000)]
    tokens = args.batch_size * args.sequence_length * (args.steps + 4)
    rows = (orjson.dumps({"text": " ".join(source.choices(words, k=500))}) + b"\n" for _ in range(tokens // 1000 + 1))
    (folder / "rows.jsonl").write_bytes(b"".join(rows))
    ingest(folder / "rows.jsonl", folder / "store")
    blocks = BlockManager(folder / "store")
    texts = blocks.get_chunk(0, 0)[:50]
    definition = train_tokenizer(texts, vocab_size=4096).definition
    tokenizer = Tokenizer(definition, engine=choose_engine(definition, texts))
    make = partial(
        DistributedLoader, blocks, args.batch_size, 1, 0, 1, tokenizer=tokenizer, sequence_length=args.sequence_length
    )
    make().token_cache.build()
    return make


def prove(make: Callable[[], DistributedLoader], device: torch.device, steps: int) -> int:
    """Compare what arrives with what was sent; returns the number of values. Raises where one differs."""
    expected = []
    for batch, _ in zip(make(), range(steps), strict=False):
        expected.append({name: int(np.asarray(value).astype(np.int64).sum()) for name, value in batch.items()})
    got: list[dict[str, torch.Tensor]] = []
    adapted = TorchBatches(make(), device=device, ahead=3)
    values = 0
    for batch in adapted:
        if device.type == "cuda":
            torch.cuda._sleep(2_000_000)  # the consumer's stream is late: whoever does not wait for it is found out
        got.append({name: value.sum() for name, value in batch.items()})
        values += sum(value.numel() for value in batch.values())
        del batch  # its memory is free to be given out, but not before the sums are done
        if len(got) == len(expected):
            break
    assert adapted.step == len(got), f"{len(got)} batches were handed out, the state says {adapted.step}"
    for place, (sums, wanted) in enumerate(zip(got, expected, strict=True)):
        found = {name: int(value) for name, value in sums.items()}
        if found != wanted:
            raise SystemExit(f"batch {place} arrived as something else: sums {found}, expected {wanted}")
    return values


def plain(loader: DistributedLoader, device: torch.device) -> Iterable[Batch]:
    for batch in loader:
        yield {name: as_tensor(value).to(device) for name, value in batch.items()}


def step_s(batches: Iterable[Batch], work: Work, steps: int, *, reads_loss: bool) -> float:
    """Seconds a step, after a few to warm up."""
    began, count = 0.0, -3
    for batch in batches:
        if count == 0:
            synchronise(work.device)
            began = time.perf_counter()
        loss = work(batch)
        if reads_loss:
            float(loss)
        count += 1
        if count == steps:
            break
    synchronise(work.device)
    return (time.perf_counter() - began) / max(1, count)


def copy_gb_per_s(device: torch.device, size_bytes: int, *, pinned: bool) -> float:
    """The bare copy of one batch's bytes: the limit of the wire."""
    host = torch.empty(size_bytes // 8, dtype=torch.int64, pin_memory=pinned)
    for _ in range(3):
        host.to(device, non_blocking=pinned)
    synchronise(device)
    began = time.perf_counter()
    for _ in range(20):
        host.to(device, non_blocking=pinned)
    synchronise(device)
    return 20 * size_bytes / (time.perf_counter() - began) / 1e9


def measure(make: Callable[[], DistributedLoader], work: Work, args: argparse.Namespace) -> dict[str, Any]:
    device = work.device
    first = {name: as_tensor(value).to(device) for name, value in next(iter(make())).items()}
    ways: dict[str, Callable[[], Iterable[Batch]]] = {
        "limit": lambda: (first for _ in range(args.steps + 4)),
        "plain": lambda: plain(make(), device),
        "adapter": lambda: TorchBatches(make(), device=device),
    }
    if device.type == "cuda":
        ways["pageable"] = lambda: TorchBatches(make(), device=device, pin_memory=False)
    told: dict[str, Any] = {}
    for reads_loss in (False, True):
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(args.rounds):
            for name, way in ways.items():
                times[name].append(step_s(way(), work, args.steps, reads_loss=reads_loss))
        medians = {name: statistics.median(taken) for name, taken in times.items()}
        told["loss read every step" if reads_loss else "loss never read"] = {
            **{f"{name} step ms": round(taken * 1e3, 4) for name, taken in medians.items()},
            "plain / limit": round(medians["plain"] / medians["limit"], 3),
            "adapter / limit": round(medians["adapter"] / medians["limit"], 3),
        }
    size_bytes = sum(value.nbytes for value in first.values())
    told["batch bytes"] = size_bytes
    if device.type == "cuda":
        told["copy GB/s"] = {
            "pinned": round(copy_gb_per_s(device, size_bytes, pinned=True), 2),
            "pageable": round(copy_gb_per_s(device, size_bytes, pinned=False), 2),
        }
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--sequence-length", type=int, default=2048)
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    device = torch.device(args.device)
    with TemporaryDirectory() as folder:
        make = make_loader(Path(folder), args)
        values = prove(make, device, args.steps)
        told = {
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "values proven equal": values,
            **measure(make, Work(device, args.step_ms), args),
        }
    if args.json:
        print(json.dumps(told, indent=2))
        return
    for name, value in told.items():
        print(f"{name:24} {json.dumps(value) if isinstance(value, dict) else value}")


if __name__ == "__main__":
    main()
