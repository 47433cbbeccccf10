"""A training run from its settings to its end: begin or resume, train, say why it stopped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from penstock.blocks import BlockManager, prepare_blocks
from penstock.blocks.manifest import MANIFEST_KEY
from penstock.errors import ConfigError, ObjectNotFound
from penstock.feed import choose_engine, train_tokenizer
from penstock.feed.loading import find_tokenizer, first_texts, is_on_hub, make_tokenizer
from penstock.feed.tokenizer_files import NamedTokenizer
from penstock.ledger import Commit, has_ledger, open_ledger, without_secrets
from penstock.storage import LocalStorage, Storage, open_storage
from penstock.train.alone import CommitAlone
from penstock.train.checkpoints import Checkpoints
from penstock.train.committing import Committer, StopReason
from penstock.train.config import RunConfig, TrainingConfig, resolve
from penstock.train.events import Events, Hook, MetricsFile
from penstock.train.parts import TOKENIZER_KEY, RunParts, embedded_ledger
from penstock.train.replica import Replica
from penstock.train.stopping import SignalsStop, StopRequest
from penstock.train.supervisor import Supervisor
from penstock.train.trainer import State

_TOKENIZER_SAMPLE_CHARS = 8_000_000
"""How much text a tokenizer is trained on: enough for a small vocabulary, in seconds."""


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
    stop = stop or StopRequest()
    with storage.exclusive("run", purpose="training"), SignalsStop(stop):
        storage.discard_unfinished()
        before = RunConfig.load(storage)
        named = config.ledger or (before.training.ledger if before else "")
        ledger = named or embedded_ledger(storage)
        _settle_config(replace(config, ledger=named), blocks, storage, ledger)
        return _Run(RunParts(storage, ledger), list(hooks), stop).run()


class _Run:
    """One run under its folder's lock."""

    def __init__(self, parts: RunParts, hooks: list[Hook], stop: StopRequest) -> None:
        self._parts = parts
        self._hooks = hooks
        self._stop = stop
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
        state = self._parts.trainer().state()
        commit = self._committer.commit(state, [])
        return state, commit, self._parts.ledger.restore(commit.checkpoint_id)

    def _train(self, events: Events, state: State, commit: Commit) -> StopReason:
        config = self._parts.config
        if config.parallel_independent:
            supervisor = Supervisor(self._parts, self._committer, events, self._stop, base=state, commit=commit)
            supervisor.run()
            assert supervisor.reason is not None
            return supervisor.reason
        trainer = self._parts.trainer()
        trainer.load_state(state)
        boundary = CommitAlone(self._committer, events, self._stop)
        Replica(
            worker="worker-0",
            generation=events.generation,
            config=config,
            ledger=self._parts.ledger,
            feed=self._parts.feed,
            trainer=trainer,
            boundary=boundary,
            events=events,
        ).run()
        assert boundary.reason is not None
        return boundary.reason

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
            workers=config.workers,
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
