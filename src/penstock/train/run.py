"""A training run from its settings to its end: begin or resume, train, say why it stopped."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

from penstock.blocks import BlockManager, prepare_blocks
from penstock.blocks.manifest import MANIFEST_KEY
from penstock.errors import ConfigError, ObjectNotFound
from penstock.feed import choose_engine, train_tokenizer
from penstock.feed.loading import find_tokenizer, first_texts, is_on_hub, make_tokenizer
from penstock.feed.tokenizer_files import NamedTokenizer
from penstock.feed.world import launched_world
from penstock.ledger import Commit, has_ledger, open_ledger, without_secrets
from penstock.storage import LocalStorage, Storage, open_storage
from penstock.train.alone import CommitAlone
from penstock.train.checkpoints import Checkpoints
from penstock.train.committing import Committer, StopReason
from penstock.train.config import RunConfig, TrainingConfig, resolve
from penstock.train.events import Events, Hook, MetricsFile
from penstock.train.following import Outset, follow, make_job
from penstock.train.heartbeat import Heartbeat
from penstock.train.job import Keeper
from penstock.train.parts import TOKENIZER_KEY, RunParts, embedded_ledger
from penstock.train.ranks import Ranks, joined_ranks
from penstock.train.replica import Replica
from penstock.train.result import RunResult
from penstock.train.stopping import STOP_FILE, SignalsStop, StopRequest
from penstock.train.supervisor import Supervisor
from penstock.train.trainer import State

_TOKENIZER_SAMPLE_CHARS = 8_000_000
"""How much text a tokenizer is trained on: enough for a small vocabulary, in seconds."""
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
        return _train_first(config, hooks, stop, Ranks())


def run_as_rank(
    config: TrainingConfig, hooks: Iterable[Hook], stop: StopRequest, on_progress: Callable[[], None] = lambda: None
) -> RunResult:
    """Train as one rank of a job; rank 0 alone uses the run's folder."""
    with SignalsStop(stop, grace_s=_SIGNAL_GRACE_S), joined_ranks(timeout_s=config.rank_timeout_s) as ranks:
        if ranks.is_first:
            return _train_first(config, hooks, stop, ranks, on_progress)
        return follow(ranks, stop, on_progress)


def _train_first(
    config: TrainingConfig,
    hooks: Iterable[Hook],
    stop: StopRequest,
    ranks: Ranks,
    on_progress: Callable[[], None] = lambda: None,
) -> RunResult:
    """Train with the run's folder in hand: alone, over workers, or as rank 0."""
    with ExitStack() as held:
        begun: list[_Run] = []

        def begin() -> dict[str, Any]:
            parts = _open_run(config, stop, held)
            begun.append(_Run(parts, list(hooks), stop, ranks, on_progress, held))
            return begun[0].begin()

        ranks.prepare_first(begin)
        return begun[0].run()


def _open_run(config: TrainingConfig, stop: StopRequest, held: ExitStack) -> RunParts:
    """The parts of a run, begun or taken up again, with its folder locked for as long as `held` lasts."""
    config = replace(config, dataset_file=prepare_blocks(config.dataset_file, config.samples_per_block))
    blocks = BlockManager(config.dataset_file, config.samples_per_block, config.dataset_chunk_size)
    header = blocks.manifest.header
    if header.text_column is None and header.token_column is None:
        raise ConfigError(
            f"{config.dataset_file} has no text column: only text can be trained on; ingest it with --text-column"
        )
    if header.token_column is not None and not config.tokenizer:
        raise ConfigError(
            f"{config.dataset_file} came tokenised: name the tokenizer it was made with (--tokenizer tokenizer.json)"
        )
    if not blocks.manifest.complete:
        raise ConfigError(f"{config.dataset_file} is not complete: finish `penstock ingest` first")
    if not blocks.manifest.total_samples:
        raise ConfigError(f"{config.dataset_file} holds no samples: there is nothing to train on")
    storage = open_storage(config.run_dir or Path("runs", header.dataset_name))
    if not isinstance(storage, LocalStorage):
        raise ConfigError(f"the run folder {storage.url} is not local: expected a path")
    if storage.exists(MANIFEST_KEY):
        raise ConfigError(f"the run folder {storage.url} is a data set: name another folder with --run")
    held.enter_context(storage.exclusive("run", purpose="training"))
    storage.discard_unfinished()
    stop.watch(storage.root / STOP_FILE)
    before = RunConfig.load(storage)
    named = config.ledger or (before.training.ledger if before else "")
    ledger = named or embedded_ledger(storage)
    _settle_config(replace(config, ledger=named), blocks, storage, ledger)
    return RunParts(storage, ledger)


class _Run:
    """One run under its folder's lock."""

    def __init__(
        self,
        parts: RunParts,
        hooks: list[Hook],
        stop: StopRequest,
        ranks: Ranks,
        on_progress: Callable[[], None],
        held: ExitStack,
    ) -> None:
        self._parts = parts
        self._hooks = hooks
        self._stop = stop
        self._ranks = ranks
        self._on_progress = on_progress
        self._held = held
        self._committer = Committer(parts.ledger, parts.checkpoints, parts.config)

    def begin(self) -> dict[str, Any]:
        """Go to the last commit; what the other ranks have to know."""
        self._parts.ledger.check_blocks()
        self._parts.drop_submitted()
        self._state, self._commit, generation = self._begin_or_go_back()
        metrics = MetricsFile(self._metrics_path())
        self._held.callback(metrics.close)
        self._events = Events([metrics, *self._hooks], generation)
        self._tell_start()
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

    def _begin_or_go_back(self) -> tuple[State, Commit, int]:
        found = self._committer.go_back()
        if found is not None:
            return found
        # The first commit has learned nothing: every worker and every restart sets out from these very weights.
        state = self._parts.trainer().state()
        commit = self._committer.commit(state, [])
        return state, commit, self._parts.ledger.restore(commit.checkpoint_id)

    @property
    def _outset(self) -> Outset:
        return Outset.of(self._parts, self._commit, over=self._reason is not None)

    def _run_job(self) -> StopReason:
        ledger, config = self._parts.ledger, self._parts.config
        session = ledger.join("ranks", generation=self._events.generation, pid=os.getpid())
        keeper = Keeper(self._committer, self._events, session, self._stop)
        with Heartbeat(ledger, session, every_s=config.session_timeout_s / 4):
            state = self._ranks.state_from_first(self._state)
            job = make_job(self._parts, self._ranks, self._outset, state, self._stop, self._on_progress, keeper)
            reason = job.run()
            ledger.leave(session)
        return reason

    def _train(self) -> StopReason:
        config = self._parts.config
        if config.parallel_independent:
            supervisor = Supervisor(
                self._parts, self._committer, self._events, self._stop, base=self._state, commit=self._commit
            )
            supervisor.run()
            assert supervisor.reason is not None
            return supervisor.reason
        trainer = self._parts.trainer()
        trainer.load_state(self._state)
        boundary = CommitAlone(self._committer, self._events, self._stop)
        Replica(
            worker="worker-0",
            generation=self._events.generation,
            config=config,
            ledger=self._parts.ledger,
            feed=self._parts.feed,
            trainer=trainer,
            boundary=boundary,
            events=self._events,
        ).run()
        assert boundary.reason is not None
        return boundary.reason

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
            workers=self._ranks.world if self._follows_a_course else config.workers,
            plan=config.plan,
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


def _settle_config(config: TrainingConfig, blocks: BlockManager, storage: Storage, ledger: str) -> None:
    """Write the run's config.toml, or check that the run being resumed has the same one where it matters."""
    before = RunConfig.load(storage) if _has_begun(storage, ledger) else None
    named = _find_tokenizer(config, blocks, storage, before)
    try:
        engine = before.tokenizer_engine if before else choose_engine(named.definition, first_texts(blocks))
    except ConfigError as error:
        raise ConfigError(f"{named.origin}: {error}") from error
    tokenizer = make_tokenizer(named, engine)
    resolved = resolve(
        replace(config, tokenizer=config.tokenizer or (before.training.tokenizer if before else "")),
        before=before,
        identity=blocks.identity(),
        name=blocks.manifest.header.dataset_name,
        total_samples=blocks.manifest.total_samples,
        tokenizer=tokenizer,
    )
    if before is not None:
        resolved.refuse_changes(before, storage.url)
    storage.put(TOKENIZER_KEY, named.definition.encode())
    resolved.save(storage)


def _has_begun(storage: Storage, ledger: str) -> bool:
    """Whether a run has committed here; refused where what is left of one is too little to go on from."""
    commits = open_ledger(ledger).commits() if has_ledger(ledger) else []
    if commits and RunConfig.load(storage) is None:
        raise ConfigError(
            f"{storage.url} has a ledger ({without_secrets(ledger)}) and no config.toml: "
            "restore it, or name another run folder"
        )
    trained = [checkpoint_id for checkpoint_id in Checkpoints(storage).ids() if int(checkpoint_id) > 0]
    if trained and not commits:
        raise ConfigError(
            f"{storage.url} has checkpoints ({', '.join(trained)}) and no ledger that knows them: "
            f"restore {without_secrets(ledger)}, or name another run folder; nothing was changed"
        )
    return bool(commits)


def _find_tokenizer(
    config: TrainingConfig, blocks: BlockManager, storage: Storage, before: RunConfig | None
) -> NamedTokenizer:
    """The tokenizer the user names, else the one the run has, else one trained on the data.

    A model of the Hub is looked up once, when the run begins: a branch that moved since, or a Hub that cannot be
    reached, is nothing to a run that has its copy.
    """
    origin = f"{storage.url}/{TOKENIZER_KEY}"
    as_before = before is not None and config.tokenizer == before.training.tokenizer and storage.exists(TOKENIZER_KEY)
    try:
        if config.tokenizer and not (as_before and is_on_hub(config.tokenizer)):
            return find_tokenizer(config.tokenizer)
        if before is not None:
            definition = storage.get(TOKENIZER_KEY).decode()
            return NamedTokenizer(definition=definition, end_of_text=before.end_of_text or None, origin=origin)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{storage.url}/{TOKENIZER_KEY} is not UTF-8: expected a tokenizer.json") from error
    except ObjectNotFound as error:
        raise ConfigError(
            f"{storage.url} has lost its {TOKENIZER_KEY}: restore it, or name it with --tokenizer"
        ) from error
    trained = train_tokenizer(_some_texts(blocks), vocab_size=config.vocab_size)
    return NamedTokenizer(definition=trained.definition, end_of_text=trained.end_of_text, origin=origin)


def _some_texts(blocks: BlockManager) -> Iterator[str]:
    """Text from chunks spread over the whole data set, up to a fixed amount; the same for the same data set."""
    chunks = [
        (block.block_id, chunk_id)
        for block in (blocks.get_block(block_id) for block_id in range(len(blocks.manifest.blocks)))
        for chunk_id in range(block.chunk_count(blocks.dataset_chunk_size))
    ]
    left = _TOKENIZER_SAMPLE_CHARS
    stride = max(1, len(chunks) // 64)
    for block_id, chunk_id in islice(chunks, 0, None, stride):
        for text in blocks.get_chunk(block_id, chunk_id):
            yield text[:left]
            left -= len(text)
            if left <= 0:
                return
