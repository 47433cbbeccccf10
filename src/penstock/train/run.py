"""A training run from its settings to its end: begin or resume, train, say why it stopped."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from penstock.errors import ConfigError
from penstock.feed.world import launched_world
from penstock.ledger import Commit
from penstock.storage import LocalStorage
from penstock.train.alone import CommitAlone
from penstock.train.committing import Committer, StopReason
from penstock.train.config import TrainingConfig
from penstock.train.devices import choose_devices, device_of_rank
from penstock.train.events import Events, Hook, MetricsFile
from penstock.train.following import Outset, follow, make_job
from penstock.train.heartbeat import Heartbeat
from penstock.train.job import Keeper
from penstock.train.opening import open_run
from penstock.train.parts import RunParts
from penstock.train.ranks import Ranks, joined_ranks
from penstock.train.replica import Replica
from penstock.train.result import RunResult
from penstock.train.settling import first_weights
from penstock.train.stopping import SignalsStop, StopRequest
from penstock.train.supervisor import Supervisor
from penstock.train.trainer import State, Trainer, closing_trainer

_SIGNAL_GRACE_S = 2.0
"""A launcher passes on the Ctrl-C that its ranks had from the terminal: within this time it is the same wish."""


def run_training(config: TrainingConfig, hooks: Iterable[Hook] = (), *, stop: StopRequest | None = None) -> RunResult:
    """Train as `config` says; where its run folder holds a run, resume that run from its last commit.

    With `ddp` under a launcher such as torchrun every rank calls this, and every one gets the same result; without a
    launcher it starts the ranks itself. Hooks see the events of rank 0.

    Args:
        config: Read once, at the start.
        hooks: See every event of the run.
        stop: Set it from another thread to end the run after the current step, committed.
    """
    config.check()
    stop, launched = stop or StopRequest(), launched_world()
    config = _with_ranks_where_several_stream(config, launched)
    if config.ddp and launched is None:
        from penstock.train.launching import launch_ranks

        return launch_ranks(config, hooks, stop)
    if config.ddp:
        return run_as_rank(config, hooks, stop)
    if launched is not None and launched[1] > 1:
        raise ConfigError(
            f"this process is RANK={launched[0]} of WORLD_SIZE={launched[1]}, and each would train a run of its own: "
            "add --ddp to train one together"
        )
    with SignalsStop(stop):
        return _train_first(config, hooks, stop, Ranks(), choose_devices(config))


def _with_ranks_where_several_stream(config: TrainingConfig, launched: tuple[int, int] | None) -> TrainingConfig:
    """Several devices, workers or launched processes of a streamed run are ranks, said or not."""
    several = max(config.workers, len(config.cuda_indices), launched[1] if launched else 1) > 1
    return replace(config, ddp=True) if config.streamed and several else config


def run_as_rank(
    config: TrainingConfig, hooks: Iterable[Hook], stop: StopRequest, on_progress: Callable[[], None] = lambda: None
) -> RunResult:
    """Train as one rank of a job; rank 0 alone uses the run's folder."""
    device = device_of_rank(config, int(os.environ.get("LOCAL_RANK", "0")))
    meeting = joined_ranks(device, timeout_s=config.rank_timeout_s, on_wait=on_progress)
    with SignalsStop(stop, grace_s=_SIGNAL_GRACE_S), meeting as ranks:
        if ranks.is_first:
            return _train_first(config, hooks, stop, ranks, [device], on_progress)
        return follow(ranks, device, stop, on_progress)


def _train_first(
    config: TrainingConfig,
    hooks: Iterable[Hook],
    stop: StopRequest,
    ranks: Ranks,
    devices: list[torch.device],
    on_progress: Callable[[], None] = lambda: None,
) -> RunResult:
    """Train with the run's folder in hand: alone, over workers, or as rank 0."""
    with ExitStack() as held:
        begun: list[_Run] = []

        def begin() -> dict[str, Any]:
            parts = open_run(config, devices, stop, held)
            begun.append(_Run(parts, list(hooks), stop, ranks, devices, on_progress, held))
            return begun[0].begin()

        ranks.from_first(begin)
        return begun[0].run()


class _Run:
    """One run under its folder's lock."""

    def __init__(
        self,
        parts: RunParts,
        hooks: list[Hook],
        stop: StopRequest,
        ranks: Ranks,
        devices: list[torch.device],
        on_progress: Callable[[], None],
        held: ExitStack,
    ) -> None:
        self._parts = parts
        self._hooks = hooks
        self._stop = stop
        self._ranks = ranks
        self._devices = devices
        self._on_progress = on_progress
        self._held = held
        self._committer = Committer(parts.ledger, parts.checkpoints, parts.config)

    def begin(self) -> dict[str, Any]:
        """Go to the last commit; what the other ranks have to know."""
        self._parts.ledger.check_blocks()
        self._parts.drop_submitted()
        plan = self._plan()
        self._state, self._commit, generation = self._begin_or_go_back()
        metrics = MetricsFile(self._metrics_path())
        self._held.callback(metrics.close)
        self._events = Events([metrics, *self._hooks], generation)
        self._tell_start()
        if plan is not None:
            self._events.emit("plan", **plan)
        self._reason: StopReason | None = self._committer.stop_reason(stop_requested=None)
        return self._outset.as_dict() if self._follows_a_course else {}

    def run(self) -> RunResult:
        if self._follows_a_course:
            result = self._end(self._reason or self._run_job())
            self._ranks.from_first(lambda: asdict(result))
            return result
        return self._end(self._reason or self._train())

    @property
    def _follows_a_course(self) -> bool:
        """Whether this is a job of ranks, be it of one, and not replicas."""
        return self._parts.config.ddp or self._parts.config.plan == "strided"

    def _plan(self) -> dict[str, Any] | None:
        """What a streamed run will need; refused before any work where that is not there."""
        if not self._parts.config.streamed:
            return None
        from penstock.train.streamed.planning import plan_run

        plan = plan_run(
            self._parts.config,
            self._parts.model_config,
            vocab_size=self._parts.run_config.vocab_size,
            device=self._devices[0],
            world=self._ranks.world,
            ranks=self._ranks.local_world,
        )
        return plan.as_event()

    def _begin_or_go_back(self) -> tuple[State | None, Commit, int]:
        """The state to set out from; None where it is too large to be held twice, and is read when it is wanted."""
        held = not self._parts.config.streamed
        found = self._committer.go_back(read=held)
        if found is not None:
            return found
        # The first commit has learned nothing: every worker and every restart sets out from these very weights.
        state = self._parts.first_state(first_weights(self._parts.config))
        commit = self._committer.commit(state, [])
        return state if held else None, commit, self._parts.ledger.restore(commit.checkpoint_id)

    def _take_state(self) -> Iterable[State]:
        """The state to set out from, in parts; it is not kept here any longer."""
        state, self._state = self._state, None
        if state is not None:
            return [state]
        return self._parts.checkpoints.parts(self._commit.checkpoint_id, self._commit.digest)

    @property
    def _outset(self) -> Outset:
        return Outset.of(self._parts, self._commit, over=self._reason is not None)

    def _run_job(self) -> StopReason:
        ledger, config = self._parts.ledger, self._parts.config
        session = ledger.join("ranks", generation=self._events.generation, pid=os.getpid())
        evaluation = self._parts.evaluation(self._events, self._commit.total_steps)
        keeper = Keeper(self._committer, self._events, session, self._stop, evaluation, self._on_progress)
        with Heartbeat(ledger, session, every_s=config.session_timeout_s / 4):
            self._parts.limit_threads(self._ranks.local_world)
            with closing_trainer(self._parts.trainer(self._devices[0], self._ranks)) as trainer:
                trainer.begin(self._take_state(), self._ranks)
                reason = make_job(
                    self._parts, self._ranks, self._outset, trainer, self._stop, self._on_progress, keeper
                ).run()
            ledger.leave(session)
        return reason

    def _train(self) -> StopReason:
        config = self._parts.config
        if config.parallel_independent:
            devices = [str(device) for device in self._devices]
            assert self._state is not None
            supervisor = Supervisor(
                self._parts,
                self._committer,
                self._events,
                self._stop,
                base=self._state,
                commit=self._commit,
                devices=devices,
            )
            supervisor.run()
            assert supervisor.reason is not None
            self._evaluate_end(supervisor.reason)
            return supervisor.reason
        with closing_trainer(self._parts.trainer(self._devices[0])) as trainer:
            trainer.begin(self._take_state(), self._ranks)
            return self._train_alone(trainer)

    def _train_alone(self, trainer: Trainer) -> StopReason:
        evaluation = self._parts.evaluation(self._events, self._commit.total_steps)
        boundary = CommitAlone(self._committer, self._events, self._stop)
        Replica(
            worker="worker-0",
            generation=self._events.generation,
            config=self._parts.config,
            ledger=self._parts.ledger,
            staging=self._parts.staging(trainer.device),
            trainer=trainer,
            boundary=boundary,
            events=self._events,
            evaluation=evaluation,
        ).run()
        assert boundary.reason is not None
        if evaluation is not None and boundary.reason not in ("signal", "file"):
            evaluation.at_end(trainer, self._parts.ledger.status().total_steps, self._stop.requested)
        return boundary.reason

    def _evaluate_end(self, reason: StopReason) -> None:
        """Evaluate what the workers have made together; not for somebody who wants the run to stop."""
        evaluation = self._parts.evaluation(self._events, self._commit.total_steps)
        last = self._parts.ledger.last_commit()
        if evaluation is None or last is None or reason in ("signal", "file"):
            return
        trainer = self._parts.trainer(self._devices[0])
        trainer.load_state(self._parts.checkpoints.read(last.checkpoint_id, last.digest))
        evaluation.at_end(trainer, last.total_steps, self._stop.requested)

    def _tell_start(self) -> None:
        config, blocks = self._parts.config, self._parts.blocks
        self._events.emit(
            "run_started",
            run_dir=self._parts.storage.url,
            dataset=blocks.manifest.header.dataset_name,
            total_samples=blocks.manifest.total_samples,
            total_blocks=len(blocks.manifest.blocks),
            samples_per_block=blocks.manifest.header.block_size,
            dataset_chunk_size=config.dataset_chunk_size,
            workers=self._ranks.world if self._follows_a_course else len(self._devices),
            plan=config.plan,
            devices=[str(device) for device in self._devices],
            precision=config.precision,
            model=config.model,
            steps=config.steps,
            iterate=config.iterate,
            total_steps=self._commit.total_steps,
            next_step=self._commit.next_step,
            samples_committed=self._parts.ledger.status().samples_committed,
            epoch=self._commit.epoch,
        )

    def _end(self, reason: StopReason) -> RunResult:
        status = self._parts.ledger.status()
        last = status.last_commit
        assert last is not None
        self._stop.honoured()
        self._events.emit("run_stopped", reason=reason, total_steps=status.total_steps, epoch=status.epoch)
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
