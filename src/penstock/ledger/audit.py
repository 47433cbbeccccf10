"""The audit: were all samples of an epoch learned once? Recomputed from the spans, not from counters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from penstock.ledger.exclusions import Exclusion, Exclusions
from penstock.ledger.state import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochAudit:
    """Counts of samples in one epoch."""

    epoch: int
    samples: int
    once: int
    excluded: int
    """Not learned, because they were excluded in this epoch or before it."""
    missing: int
    twice: int
    """Learned more than once."""
    foreign: int
    """Learned though the data set has no such sample."""
    by_session: dict[int, int]

    @property
    def holds(self) -> bool:
        return self.once + self.excluded == self.samples and not (self.missing or self.twice or self.foreign)


def audit_epoch(
    epoch: int,
    spans: Iterable[Span],
    block_samples: list[int],
    chunk_size: int,
    exclusions: Iterable[Exclusion] = (),
) -> EpochAudit:
    """Count how often each sample was learned, span by span: memory and time go with spans, not with samples."""
    journal = Exclusions(exclusions)
    edges: dict[int, list[tuple[int, int, int]]] = {}
    by_session: Counter[int] = Counter()
    for span in spans:
        for start, stop in learned(span, chunk_size, journal):
            edges.setdefault(span.ref.block_id, []).extend([(start, 1, 0), (stop, -1, 0)])
            by_session[span.session] += stop - start
    holding = Exclusions(entry for entry in journal.entries if entry.epoch <= epoch)
    for block_id in {entry.block_id for entry in holding.entries} & set(range(len(block_samples))):
        for start, stop in holding.within(block_id, 0, block_samples[block_id]):
            edges.setdefault(block_id, []).extend([(start, 0, 1), (stop, 0, -1)])
    once = twice = foreign = excluded = 0
    for block_id, changes in edges.items():
        inside = block_samples[block_id] if block_id < len(block_samples) else 0
        depth = skipped = place = 0
        for position, change, skip in sorted(changes):
            known = max(0, min(position, inside) - min(place, inside))
            once += known if depth == 1 else 0
            twice += known if depth > 1 else 0
            excluded += known if skipped and not depth else 0
            foreign += (position - place - known) if depth else 0
            place, depth, skipped = position, depth + change, skipped + skip
    total = sum(block_samples)
    return EpochAudit(
        epoch=epoch,
        samples=total,
        once=once,
        excluded=excluded,
        missing=total - once - twice - excluded,
        twice=twice,
        foreign=foreign,
        by_session={session: samples for session, samples in by_session.items() if samples},
    )


def learned(span: Span, chunk_size: int, journal: Exclusions) -> Iterator[tuple[int, int]]:
    """The samples of a block that a span has learned: all of it but what was excluded when its chunk was begun."""
    place, stop = span.ref.chunk_id * chunk_size + span.start, span.ref.chunk_id * chunk_size + span.stop
    for low, high in journal.within(span.ref.block_id, place, stop, span.exclusions):
        if place < low:
            yield place, low
        place = high
    if place < stop:
        yield place, stop
