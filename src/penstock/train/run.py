"""A training run from its settings to its end: begin or resume, train, say why it stopped."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from penstock.blocks import BlockManager, Manifest, prepare_blocks
from penstock.blocks.manifest import MANIFEST_KEY
from penstock.errors import ConfigError
from penstock.ledger import Commit
from penstock.storage import LocalStorage, open_storage
from penstock.train.alone import CommitAlone
from penstock.train.committing import Committer, StopReason
from penstock.train.config import RunConfig, TrainingConfig
from penstock.train.devices import choose_devices
from penstock.train.events import Events, Hook, MetricsFile
from penstock.train.parts import RunParts, embedded_ledger
from penstock.train.replica import Replica
from penstock.train.settling import first_weights, own_tokenizer, settle_config
from penstock.train.stopping import SignalsStop, StopRequest
from penstock.train.supervisor import Supervisor
from penstock.train.trainer import State


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """How a run ended."""

    run_dir: str
    reason: StopReason
    total_steps: int
    epoch: int
    checkpoint_id: str


def run_training(config: TrainingConfig, hooks: Iterable[Hook] = (), *, stop: StopRequest | None = None) -> RunResult:
    """Train as `config` says; where its run folder holds a run, resume that run from its last commit.

    Args:
        config: Read once, at the start.
        hooks: See every event of the run.
        stop: Set it from another thread to end the run after the current step, committed.
    """
    config.check()
    if config.ddp:
        raise ConfigError("ddp is not there yet: use parallel_independent (--parallel-independent)")
    devices = choose_devices(config)
    config = replace(config, dataset_file=prepare_blocks(config.dataset_file, config.samples_per_block))
    if config.eval_file:
        config.eval_file = prepare_blocks(config.eval_file, config.samples_per_block)
        _check_trainable(BlockManager(config.eval_file).manifest, config, config.eval_file)
    manifest = BlockManager(config.dataset_file, config.samples_per_block).manifest
    _check_trainable(manifest, config, config.dataset_file)
    storage = open_storage(config.run_dir or Path("runs", manifest.header.dataset_name))
    if not isinstance(storage, LocalStorage):
        raise ConfigError(f"the run folder {storage.url} is not local: expected a path")
    if storage.exists(MANIFEST_KEY):
        raise ConfigError(f"the run folder {storage.url} is a data set: name another folder with --run")
    _check_writable(storage)
    stop = stop or StopRequest()
    with storage.exclusive("run", purpose="training"), SignalsStop(stop):
        storage.discard_unfinished()
        before = RunConfig.load(storage)
        named = config.ledger or (before.training.ledger if before else "")
        ledger = named or embedded_ledger(storage)
        settle_config(replace(config, ledger=named), manifest, storage, ledger, devices)
        return _Run(RunParts(storage, ledger), list(hooks), stop, devices).run()


def _check_writable(storage: LocalStorage) -> None:
    try:
        storage.root.mkdir(parents=True, exist_ok=True)
        writable = os.access(storage.root, os.W_OK | os.X_OK)
    except OSError as error:
        raise ConfigError(
            f"the run folder {storage.url} cannot be made: {error.strerror}: name another with --run"
        ) from error
    if not writable:
        raise ConfigError(
            f"the run folder {storage.url} cannot be written: name another with --run, or give it to yourself"
        )


def _check_trainable(manifest: Manifest, config: TrainingConfig, name: str) -> None:
    header = manifest.header
    if header.text_column is None and header.token_column is None:
        raise ConfigError(f"{name} has no text column: only text can be trained on; ingest it with --text-column")
    if header.token_column is not None and not (config.tokenizer or own_tokenizer(config.model)):
        raise ConfigError(f"{name} came tokenised: name the tokenizer it was made with (--tokenizer tokenizer.json)")
    if not manifest.complete:
        raise ConfigError(f"{name} is not complete: finish `penstock ingest` first")
    if not manifest.total_samples:
        raise ConfigError(f"{name}, made from {header.source}, holds no samples: there is nothing to train on")


class _Run:
    """One run under its folder's lock."""

    def __init__(self, parts: RunParts, hooks: list[Hook], stop: StopRequest, devices: list[torch.device]) -> None:
        self._parts = parts
        self._hooks = hooks
        self._stop = stop
        self._devices = devices
        self._committer = Committer(parts.ledger, parts.checkpoints, parts.config)

    def run(self) -> RunResult:
        self._parts.ledger.check_blocks()
        self._parts.drop_submitted()
        state, commit, generation = self._begin_or_go_back()
        metrics = MetricsFile(self._metrics_path())
        events = Events([metrics, *self._hooks], generation)
        try:
            self._tell_start(events, commit)
            reason = self._committer.stop_reason(stop_requested=False)
            if reason is None:
                reason = self._train(events, state, commit)
            return self._end(events, reason)
        finally:
            metrics.close()

    def _begin_or_go_back(self) -> tuple[State, Commit, int]:
        found = self._committer.go_back()
        if found is not None:
            return found
        # The first commit has learned nothing: every worker and every restart sets out from these very weights.
        state = self._parts.trainer(weights=first_weights(self._parts.config)).state()
        commit = self._committer.commit(state, [])
        return state, commit, self._parts.ledger.restore(commit.checkpoint_id)

    def _train(self, events: Events, state: State, commit: Commit) -> StopReason:
        config = self._parts.config
        if config.parallel_independent:
            devices = [str(device) for device in self._devices]
            supervisor = Supervisor(
                self._parts, self._committer, events, self._stop, base=state, commit=commit, devices=devices
            )
            supervisor.run()
            assert supervisor.reason is not None
            self._evaluate_end(events, commit, supervisor.reason)
            return supervisor.reason
        trainer = self._parts.trainer(self._devices[0])
        trainer.load_state(state)
        evaluation = self._parts.evaluation(events, commit.total_steps)
        boundary = CommitAlone(self._committer, events, self._stop)
        Replica(
            worker="worker-0",
            generation=events.generation,
            config=config,
            ledger=self._parts.ledger,
            staging=self._parts.staging(trainer.device),
            trainer=trainer,
            boundary=boundary,
            events=events,
            evaluation=evaluation,
        ).run()
        assert boundary.reason is not None
        if evaluation is not None and boundary.reason != "signal":
            evaluation.at_end(trainer, self._parts.ledger.status().total_steps, self._stop.requested)
        return boundary.reason

    def _evaluate_end(self, events: Events, before: Commit, reason: StopReason) -> None:
        """Evaluate what the workers have made together; not for somebody who wants the run to stop."""
        evaluation = self._parts.evaluation(events, before.total_steps)
        last = self._parts.ledger.last_commit()
        if evaluation is None or last is None or reason == "signal":
            return
        trainer = self._parts.trainer(self._devices[0])
        trainer.load_state(self._parts.checkpoints.read(last.checkpoint_id, last.digest))
        evaluation.at_end(trainer, last.total_steps, self._stop.requested)

    def _tell_start(self, events: Events, commit: Commit) -> None:
        config, blocks = self._parts.config, self._parts.blocks
        events.emit(
            "run_started",
            run_dir=self._parts.storage.url,
            dataset=blocks.manifest.header.dataset_name,
            total_samples=blocks.manifest.total_samples,
            total_blocks=len(blocks.manifest.blocks),
            samples_per_block=blocks.manifest.header.block_size,
            dataset_chunk_size=config.dataset_chunk_size,
            workers=len(self._devices),
            devices=[str(device) for device in self._devices],
            precision=config.precision,
            model=config.model,
            steps=config.steps,
            iterate=config.iterate,
            total_steps=commit.total_steps,
            next_step=commit.next_step,
            samples_committed=self._parts.ledger.status().samples_committed,
            epoch=commit.epoch,
        )

    def _end(self, events: Events, reason: StopReason) -> RunResult:
        status = self._parts.ledger.status()
        last = status.last_commit
        assert last is not None
        events.emit("run_stopped", reason=reason, total_steps=status.total_steps, epoch=status.epoch)
        return RunResult(
            run_dir=self._parts.storage.url,
            reason=reason,
            total_steps=status.total_steps,
            epoch=status.epoch,
            checkpoint_id=last.checkpoint_id,
        )

    def _metrics_path(self) -> Path:
        if self._parts.config.log_file:
            return Path(self._parts.config.log_file)
        assert isinstance(self._parts.storage, LocalStorage)
        return self._parts.storage.root / "metrics.jsonl"
