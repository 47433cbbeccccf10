"""The audit: were all samples of an epoch learned once? Recomputed from the spans, not from counters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.ledger.state import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochAudit:
    """Counts of samples in one epoch."""

    epoch: int
    samples: int
    once: int
    missing: int
    twice: int
    """Learned more than once."""
    foreign: int
    """Learned though the data set has no such sample."""
    by_session: dict[int, int]

    @property
    def holds(self) -> bool:
        return self.once == self.samples and not (self.missing or self.twice or self.foreign)


def audit_epoch(epoch: int, spans: Iterable[Span], block_samples: list[int], chunk_size: int) -> EpochAudit:
    """Count how often each sample was learned, span by span: memory and time go with spans, not with samples."""
    edges: dict[int, list[tuple[int, int]]] = {}
    by_session: Counter[int] = Counter()
    for span in spans:
        base = span.ref.chunk_id * chunk_size
        edges.setdefault(span.ref.block_id, []).extend([(base + span.start, 1), (base + span.stop, -1)])
        by_session[span.session] += span.stop - span.start
    once = twice = foreign = 0
    for block_id, changes in edges.items():
        inside = block_samples[block_id] if block_id < len(block_samples) else 0
        depth = place = 0
        for position, change in sorted(changes):
            known = max(0, min(position, inside) - min(place, inside))
            once += known if depth == 1 else 0
            twice += known if depth > 1 else 0
            foreign += (position - place - known) if depth else 0
            place, depth = position, depth + change
    total = sum(block_samples)
    return EpochAudit(
        epoch=epoch,
        samples=total,
        once=once,
        missing=total - once - twice,
        twice=twice,
        foreign=foreign,
        by_session=dict(by_session),
    )
