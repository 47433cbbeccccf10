"""From what rank 0 says to a rank that takes part: its parts, its course, its loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import orjson
import torch

from penstock.feed import Tokenizer
from penstock.ledger import Commit
from penstock.storage import open_storage
from penstock.train.config import RunConfig
from penstock.train.courses import ClaimsCourse, Course, StridedCourse, loader_span_of
from penstock.train.job import Job, Keeper
from penstock.train.parts import TOKENIZER_KEY, RunParts
from penstock.train.ranks import Ranks
from penstock.train.result import RunResult
from penstock.train.stopping import StopRequest
from penstock.train.trainer import Trainer, closing_trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Outset:
    """Where a job sets out from, the same on all ranks: no other rank reads the run's folder or its ledger."""

    run_dir: str
    config: dict[str, Any]
    """The fields of `RunConfig`."""
    tokenizer: str
    """Its definition."""
    model_config: str
    """Of a model that is not built in."""
    total_steps: int
    next_step: int
    loader_state: str | None
    exclusions: int
    """Entries of the exclusion journal that the loader's state holds."""
    over: bool
    """Whether there is nothing to do."""

    @classmethod
    def of(cls, parts: RunParts, commit: Commit, *, over: bool) -> Outset:
        span = loader_span_of(parts.ledger, commit) if parts.config.plan == "strided" else None
        return cls(
            run_dir=parts.storage.url,
            config=asdict(parts.run_config),
            tokenizer=parts.storage.get(TOKENIZER_KEY).decode(),
            model_config=parts.model_config,
            total_steps=commit.total_steps,
            next_step=commit.next_step,
            loader_state=span.state if span else None,
            exclusions=span.exclusions if span else 0,
            over=over,
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def follow(ranks: Ranks, device: torch.device, stop: StopRequest, on_progress: Callable[[], None]) -> RunResult:
    """Take part as a rank that is not the first."""
    outset = Outset(**ranks.from_first(dict))
    if not outset.over:
        parts = RunParts(open_storage(outset.run_dir), "")
        parts.run_config = RunConfig(**outset.config)
        parts.tokenizer = Tokenizer(
            outset.tokenizer,
            end_of_text=parts.run_config.end_of_text or None,
            engine=parts.run_config.tokenizer_engine,
        )
        parts.model_config = outset.model_config
        parts.limit_threads(ranks.local_world)
        with closing_trainer(parts.trainer(device, ranks)) as trainer:
            trainer.begin(None, ranks)
            make_job(parts, ranks, outset, trainer, stop, on_progress, None).run()
    return RunResult(**ranks.from_first(dict))


def make_job(
    parts: RunParts,
    ranks: Ranks,
    outset: Outset,
    trainer: Trainer,
    stop: StopRequest,
    on_progress: Callable[[], None],
    keeper: Keeper | None,
) -> Job:
    """The loop of one rank, whose trainer is where the last commit was; `keeper` is rank 0's."""
    return Job(
        ranks=ranks,
        config=parts.config,
        trainer=trainer,
        course=_course(parts, ranks, outset, keeper),
        keeper=keeper,
        total_steps=outset.total_steps,
        stop=stop,
        on_progress=on_progress,
    )


def _course(parts: RunParts, ranks: Ranks, outset: Outset, keeper: Keeper | None) -> Course:
    ledger, session = (parts.ledger, keeper.session) if keeper else (None, None)
    if parts.config.plan == "claims":
        told = {"on_chunk": keeper.tell_chunk} if keeper else {}
        return ClaimsCourse(parts.feed, ranks, parts.config, ledger=ledger, session=session, **told)
    loader = parts.loader(ranks.rank, ranks.world)
    if outset.loader_state is not None:
        loader.load_state_dict(orjson.loads(outset.loader_state))
    blocks = parts.blocks.manifest.blocks
    return StridedCourse(
        loader,
        ledger=ledger,
        session=session,
        next_step=outset.next_step,
        exclusions=outset.exclusions,
        start_of=lambda block_id: (
            blocks[block_id].start_index if block_id < len(blocks) else parts.blocks.manifest.total_samples
        ),
    )
