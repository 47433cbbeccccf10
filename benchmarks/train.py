"""What feeding and committing cost a training run.

    python benchmarks/train.py waiting [--device cuda] [--batch-size 32] [--sequence-length 1024] [--text FILE] [--json]
    python benchmarks/train.py commits [--seconds 620] [--model small] [--json]

Needs no network: text is made of made-up words unless a file is given (a line a sample, or JSONL).

waiting   A model of GPT-2's size learns raw text: read, tokenised and packed on the way, by the loop of `penstock
          train` with its ledger. Beside it, interleaved, the same loop on tokens that lie on the device already. Told:
          the share of time spent waiting for data, and tokens per second against that limit. Medians over rounds.
commits   A run on the CPU as `penstock train` does it, at the default cadence: the share of time spent in calls of the
          ledger and in commits, checkpoints included.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import numpy as np
import orjson
import torch

from penstock.blocks import ingest
from penstock.feed import pack_window
from penstock.ledger import Ledger, Session, open_ledger
from penstock.storage import open_storage
from penstock.train.config import TrainingConfig
from penstock.train.device_batch import DeviceBatch, to_device
from penstock.train.events import Event, Events
from penstock.train.parts import RunParts, embedded_ledger
from penstock.train.replica import Replica
from penstock.train.run import run_training
from penstock.train.staging import Excluded, Staging
from penstock.train.stopping import StopRequest
from penstock.train.trainer import Trainer
from penstock.types import ChunkRef

GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 50_257,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def make_text(path: Path, samples: int, words: int) -> Path:
    """Made-up words with the frequencies of a language, a sample of very different lengths a line."""
    rng = random.Random(7)
    syllables = [a + b for a in "bdfgklmnprstvz" for b in ("a", "e", "i", "o", "u", "ar", "en", "is", "on", "ul")]
    vocabulary = ["".join(rng.choices(syllables, k=rng.randint(1, 4))) for _ in range(20_000)]
    weights = [1.0 / rank for rank in range(1, len(vocabulary) + 1)]
    drawn = rng.choices(vocabulary, weights, k=1_000_000)
    with path.open("wb") as file:
        for _ in range(samples):
            start, count = rng.randrange(len(drawn) - 10 * words), int(rng.lognormvariate(0, 0.8) * words * 0.73) + 1
            file.write(orjson.dumps({"text": " ".join(drawn[start : start + min(count, 10 * words)])}) + b"\n")
    return path


class Recorder:
    """Keeps step and commit events, with the moment they came."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, Event]] = []
        self.commits: list[Event] = []

    def on_event(self, event: Event) -> None:
        if event["event"] == "step":
            self.steps.append((time.perf_counter(), event))
        elif event["event"] == "commit":
            self.commits.append(event)


# -- waiting for data --------------------------------------------------------------------------------------------------


class TokensThatAreThere(Staging):
    """Stands for the feed: the same few batches, on the device already, as long as a chunk lasts."""

    def __init__(self, parts: RunParts, device: torch.device, sequences: int) -> None:
        super().__init__(parts.feed, device)
        rows, length = parts.config.batch_size, parts.config.max_seq_len
        rng = np.random.default_rng(1)
        ids = rng.integers(0, parts.run_config.vocab_size, 4 * rows * length)
        document = max(2, sequences * length // parts.blocks.dataset_chunk_size)  # as long as those of the text
        offsets = np.append(np.arange(0, len(ids), document), len(ids))
        window = pack_window(ids, offsets, first_sample_id=0, sequence_length=length, pad_id=0)
        self._made = [to_device(batch, device) for batch in window.batches(rows)]
        self._sequences = sequences
        self._samples = int(parts.blocks.dataset_chunk_size)

    @property
    def sequence_count(self) -> int:
        return self._sequences

    def prepare(self, ref: ChunkRef, excluded: Excluded = ()) -> None:
        """Nothing is to be prepared."""

    def batches(
        self, ref: ChunkRef, start_offset: int, excluded: Excluded = ()
    ) -> Generator[tuple[DeviceBatch, float], None, None]:
        rows = self._made[0].input_ids.shape[0]
        for number, start in enumerate(range(start_offset, self._sequences, rows)):
            made = self._made[number % len(self._made)]
            stop = min(start + rows, self._sequences)
            done = self._samples if stop == self._sequences else self._samples * stop // self._sequences
            yield (
                replace(made, source=replace(made.source, start_offset=start, stop_offset=stop, samples_done=done)),
                0.0,
            )


class NeverCommit:
    """A boundary at which a measurement ends."""

    def stop_requested(self) -> bool:
        return False

    def is_due(self) -> bool:
        return False

    def meet(self, trainer: Trainer, session: Session) -> bool:
        return False

    def rejoin(self, trainer: Trainer, session: Session) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class Measured:
    tokens_per_s: float
    wait_share: float
    first_wait_s: float
    step_ms: float


def measure(parts: RunParts, trainer: Trainer, staging: Staging, steps: int, warmup: int) -> Measured:
    """The loop of `penstock train` for so many steps, without a commit; the first ones do not count."""
    ledger = parts.ledger
    last = ledger.last_commit()
    assert last is not None
    generation = ledger.restore(last.checkpoint_id)
    recorder = Recorder()
    Replica(
        worker="worker-0",
        generation=generation,
        config=replace(parts.config, steps=last.next_step - 1 + steps + warmup, commit_every_chunks=10**6),
        ledger=ledger,
        staging=staging,
        trainer=trainer,
        boundary=NeverCommit(),
        events=Events([recorder], generation),
    ).run()
    if len(recorder.steps) < steps + warmup:
        raise SystemExit(f"only {len(recorder.steps)} steps in the text, {steps + warmup} wanted: give more --samples")
    began, ended = recorder.steps[warmup - 1][0], recorder.steps[-1][0]
    counted = [event for _, event in recorder.steps[warmup:]]
    return Measured(
        tokens_per_s=sum(event["num_tokens"] for event in counted) / (ended - began),
        wait_share=sum(event["wait_s"] for event in counted) / (ended - began),
        first_wait_s=recorder.steps[0][1]["wait_s"],
        step_ms=1000 * statistics.median(event["step_s"] for event in counted),
    )


def waiting(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    source = args.text or make_text(folder / "text.jsonl", args.samples, args.words)
    ingest(source, folder / "data")
    model = args.model
    if model == "gpt2":
        (folder / "gpt2").mkdir()
        told = {**GPT2, "n_positions": max(1024, args.sequence_length), "n_layer": args.layers}
        (folder / "gpt2" / "config.json").write_text(json.dumps(told))
        model = str(folder / "gpt2")
    config = TrainingConfig(
        dataset_file=str(folder / "data"),
        run_dir=str(folder / "run"),
        model=model,
        vocab_size=args.vocab_size,
        batch_size=args.batch_size,
        max_seq_len=args.sequence_length,
        dataset_chunk_size=args.chunk_size,
        attend_across_documents=args.attend_across_documents,
        device=args.device,
        precision=args.precision,
        steps=1,
    )
    run_training(config)
    parts = RunParts(open_storage(config.run_dir), embedded_ledger(open_storage(config.run_dir)))
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    trainer = parts.trainer(device)
    sequences = parts.feed.window(ChunkRef(0, 0)).sequence_count
    makers: dict[str, Callable[[], Staging]] = {
        "text": lambda: parts.staging(device),
        "synthetic": lambda: TokensThatAreThere(parts, device, sequences),
    }
    for make in makers.values():  # kernels are chosen, memory is taken
        measure(parts, trainer, make(), args.warmup, args.warmup)
    rounds: dict[str, list[Measured]] = defaultdict(list)
    for number in range(args.rounds):
        for name in sorted(makers, reverse=bool(number % 2)):
            rounds[name].append(measure(parts, trainer, makers[name](), args.steps, args.warmup))
    text, synthetic = (statistics.median(m.tokens_per_s for m in rounds[name]) for name in ("text", "synthetic"))
    share = statistics.median(measured.wait_share for measured in rounds["text"])
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "precision": parts.config.precision,
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "engine": parts.run_config.tokenizer_engine,
        "sequences_a_chunk": sequences,
        "batch": [args.batch_size, args.sequence_length],
        "text_tokens_per_s": round(text),
        "synthetic_tokens_per_s": round(synthetic),
        "ratio": round(text / synthetic, 4),
        "wait_share": round(share, 5),
        "first_wait_s": round(rounds["text"][0].first_wait_s, 4),
        "step_ms": {name: [round(each.step_ms, 2) for each in found] for name, found in rounds.items()},
        "ratios_by_round": [
            round(one.tokens_per_s / other.tokens_per_s, 4)
            for one, other in zip(rounds["text"], rounds["synthetic"], strict=True)
        ],
        "wait_shares_by_round": [round(each.wait_share, 5) for each in rounds["text"]],
        "holds": {"wait_share < 0.01": share < 0.01, "ratio >= 0.98": text / synthetic >= 0.98},
    }


# -- ledger and commits ------------------------------------------------------------------------------------------------


class TimedLedger:
    """A ledger whose calls are timed, in the thread that trains."""

    def __init__(self, ledger: Ledger, spent: dict[str, float]) -> None:
        self._ledger = ledger
        self._spent = spent
        self._thread = threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._ledger, name)

        def timed(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*arguments, **options)
            finally:
                if threading.get_ident() == self._thread:
                    self._spent[name] += time.perf_counter() - began

        return timed


def commits(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    source = args.text or make_text(folder / "text.jsonl", args.samples, args.words)
    ingest(source, folder / "data")
    config = TrainingConfig(
        dataset_file=str(folder / "data"), run_dir=str(folder / "run"), model=args.model, device="cpu", iterate=True
    )
    run_training(replace(config, steps=1))  # the tokenizer is trained, the first commit is made: once a run
    spent: dict[str, float] = defaultdict(float)
    recorder, stop = Recorder(), StopRequest()

    def open_timed(*arguments: Any, **options: Any) -> Any:
        return TimedLedger(open_ledger(*arguments, **options), spent)

    with mock.patch("penstock.train.parts.open_ledger", open_timed):
        timer = threading.Timer(args.seconds, stop.set)
        timer.start()
        run_training(config, [recorder], stop=stop)
        timer.cancel()
    took = recorder.steps[-1][0] - recorder.steps[0][0]
    in_loop = {name: seconds for name, seconds in spent.items() if name in ("take_step", "claim", "record", "complete")}
    committing = sum(event["commit_s"] for event in recorder.commits)
    step_s = statistics.median(event["step_s"] for _, event in recorder.steps)
    per_commit = committing / max(1, len(recorder.commits))
    share = (sum(in_loop.values()) + committing) / (took + committing)
    return {
        "model": args.model,
        "seconds": round(took, 1),
        "steps": len(recorder.steps),
        "step_ms": round(1000 * step_s, 2),
        "ledger_us_a_step": round(1e6 * sum(in_loop.values()) / len(recorder.steps), 1),
        "ledger_s": {name: round(seconds, 4) for name, seconds in in_loop.items()},
        "commits": len(recorder.commits),
        "commit_s": round(per_commit, 4),
        "share": round(share, 5),
        "share_at_300_s": round(sum(in_loop.values()) / took + per_commit / config.commit_every_s, 5),
        "holds": {"share < 0.01": share < 0.01},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["waiting", "commits"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--model", default=None, help="gpt2 or small for waiting (gpt2); tiny or small (small)")
    parser.add_argument("--layers", type=int, default=12, help="of gpt2: fewer, to try it on a CPU")
    parser.add_argument("--attend-across-documents", action="store_true")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--sequence-length", type=int, default=1024)
    parser.add_argument("--chunk-size", type=int, default=4_000)
    parser.add_argument("--vocab-size", type=int, default=16_384, help="of the tokenizer, which is trained here")
    parser.add_argument("--text", default=None, help="a file of text; else some is made")
    parser.add_argument("--samples", type=int, default=40_000)
    parser.add_argument("--words", type=int, default=250, help="of a sample, about")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--seconds", type=float, default=620.0, help="of commits: a few of its 300 s, or the last one rules"
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    args.model = args.model or {"waiting": "gpt2", "commits": "small"}[args.what]
    with TemporaryDirectory() as folder:
        found = (waiting if args.what == "waiting" else commits)(args, Path(folder))
    told = {"torch": torch.__version__, "python": platform.python_version(), **found}
    if args.json:
        print(json.dumps(told, indent=2))
        return
    for name, value in told.items():
        print(f"{name:24} {json.dumps(value) if isinstance(value, dict | list) else value}")


if __name__ == "__main__":
    main()
