"""`penstock demo`: the whole way, on text every machine has, with a worker killed half way."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.output import CHECK_FAILED, console, counted
from penstock.errors import ConfigError

_MARK = ".penstock-demo"
_MAX_FILE_BYTES = 24 << 10
_NOT_SOURCES = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def demo(
    folder: Annotated[Path, typer.Argument(help="Where the demo works; made anew each time.")] = Path("penstock-demo"),
    workers: Annotated[int, typer.Option(min=2, help="How many workers train.")] = 2,
    samples: Annotated[int | None, typer.Option(min=100, help="So many of the sources only: a shorter demo.")] = None,
) -> None:
    """Ingest the standard library's sources, train an epoch, kill a worker half way, and prove the epoch."""
    from penstock.blocks import ingest
    from penstock.cli.progress import TrainingProgress
    from penstock.cli.run import print_audits
    from penstock.cli.train import load_run_training
    from penstock.observe.picture import draw_run
    from penstock.observe.proof import prove
    from penstock.observe.run_folder import RunFolder
    from penstock.train.config import TrainingConfig

    run_training = load_run_training()
    say = console().print
    began = time.monotonic()
    _make_anew(folder)
    say("1. ingesting the standard library's sources, a file a sample")
    sources = standard_library(lambda place: samples is None or place < samples)
    manifest = ingest(sources, folder / "data", block_size=128, on_bad_row="skip")
    say(f"   {counted(manifest.total_samples, 'sample')} in {counted(len(manifest.blocks), 'block')}")
    say(f"2. training an epoch with {workers} workers; half way, one is killed with SIGKILL")
    config = TrainingConfig(
        dataset_file=str(folder / "data"),
        run_dir=str(folder / "run"),
        dataset_chunk_size=8,
        vocab_size=1024,
        batch_size=32,
        max_seq_len=128,
        learning_rate=3e-3,
        parallel_independent=True,
        workers=workers,
        commit_every_chunks=4 * workers,
        stop_after_epoch=True,
    )
    killer = _KillHalfWay()
    with TrainingProgress() as progress:
        result = run_training(config, [progress, killer])
    say(f"   {counted(result.total_steps, 'step')}")
    say("3. the proof: what the checkpoint has learned, held against the data set")
    run = RunFolder(folder / "run")
    audits = prove(run)
    print_audits(audits)
    picture = draw_run(run, folder / "picture.svg")
    say(f"4. the picture: {picture}")
    say(f"   done in {time.monotonic() - began:.0f} s; look around with `penstock status {run.path}`")
    if not audits[-1].holds or not killer.killed:
        console(stderr=True).print("the demo did not hold", style="red")
        raise typer.Exit(CHECK_FAILED)


class _KillHalfWay:
    """A hook that kills a worker in mid-chunk once half of the samples are learned."""

    def __init__(self) -> None:
        self._pids: dict[int, int] = {}
        self._half = 0
        self._learned = 0
        self.killed = 0

    def on_event(self, event: dict[str, Any]) -> None:
        if event["event"] == "run_started":
            self._half = event["total_samples"] // 2
        elif event["event"] == "worker_started":
            self._pids[event["session"]] = event["pid"]
        elif event["event"] == "chunk":
            self._learned += event["samples"]
        elif event["event"] == "step" and self._learned >= self._half and not self.killed:
            self.killed = self._pids[event["session"]]
            os.kill(self.killed, signal.SIGKILL)


def standard_library(keep: Callable[[int], bool] = lambda _: True) -> Any:
    """The running interpreter's own sources as a source: tests and very long modules left out, to keep it short.

    Args:
        keep: Which of them, by number, where not all.
    """
    from penstock.sources import FileSource
    from penstock.storage import LocalStorage

    root = Path(sysconfig.get_path("stdlib"))
    keys = [
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if not _NOT_SOURCES & set(path.relative_to(root).parts) and path.stat().st_size <= _MAX_FILE_BYTES
    ]
    # By the hash of their names: in the order of folders, alike files follow each other and the loss goes up and down.
    keys.sort(key=lambda key: hashlib.sha256(key.encode()).digest())
    kept = [key for place, key in enumerate(keys) if keep(place)]
    return FileSource(spec=str(root), name="standard library", storage=LocalStorage(root), keys=kept)


def _make_anew(folder: Path) -> None:
    """Empty the demo's own folder; any other is left alone."""
    if folder.exists() and any(folder.iterdir()):
        if not (folder / _MARK).exists():
            raise ConfigError(f"{folder} is not empty and not a demo's folder: name another one")
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _MARK).touch()
