"""The audit counts what brute force would count, whatever the spans: overlaps, gaps and samples that do not exist."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from penstock.ledger import EpochAudit, Exclusion, Span, audit_epoch
from penstock.types import ChunkRef

CHUNK_SIZE = 4


@st.composite
def spans(draw: st.DrawFn) -> Span:
    start = draw(st.integers(0, CHUNK_SIZE))
    return Span(
        commit=draw(st.integers(1, 3)),
        epoch=0,
        ref=ChunkRef(draw(st.integers(0, 2)), draw(st.integers(0, 1))),
        start=start,
        stop=draw(st.integers(start, CHUNK_SIZE)),
        start_offset=0,
        stop_offset=0,
        steps=1,
        session=draw(st.integers(1, 3)),
        exclusions=draw(st.integers(0, 3)),
    )


@st.composite
def journals(draw: st.DrawFn) -> list[Exclusion]:
    return [
        Exclusion(
            seq=seq,
            epoch=draw(st.integers(2, 4)),
            step=1,
            block_id=draw(st.integers(0, 2)),
            start=(start := draw(st.integers(0, 8))),
            stop=start + draw(st.integers(1, 4)),
            reason="noise",
            excluded_at=0.0,
        )
        for seq in range(1, draw(st.integers(1, 4)))
    ]


def span(block_id: int, chunk_id: int, start: int, stop: int, session: int = 1) -> Span:
    ref = ChunkRef(block_id, chunk_id)
    return Span(
        commit=1, epoch=0, ref=ref, start=start, stop=stop, start_offset=0, stop_offset=0, steps=1, session=session
    )


@given(st.lists(spans(), max_size=20), st.lists(st.integers(0, 9), max_size=3), journals())
def test_the_audit_counts_as_brute_force_does(
    found: list[Span], block_samples: list[int], journal: list[Exclusion]
) -> None:
    counts: Counter[tuple[int, int]] = Counter()
    by_session: Counter[int] = Counter()
    for item in found:
        first = item.ref.chunk_id * CHUNK_SIZE
        for place in range(first + item.start, first + item.stop):
            if not _names(journal[: item.exclusions], item.ref.block_id, place):
                counts[item.ref.block_id, place] += 1
                by_session[item.session] += 1
    now = [entry for entry in journal if entry.epoch <= 3]
    samples = {(block_id, place) for block_id, size in enumerate(block_samples) for place in range(size)}
    skipped = {sample for sample in samples if counts[sample] == 0 and _names(now, *sample)}
    audit = audit_epoch(3, iter(found), block_samples, CHUNK_SIZE, journal)
    assert audit == EpochAudit(
        epoch=3,
        samples=len(samples),
        once=sum(counts[sample] == 1 for sample in samples),
        excluded=len(skipped),
        missing=sum(counts[sample] == 0 for sample in samples - skipped),
        twice=sum(counts[sample] > 1 for sample in samples),
        foreign=sum(count > 0 and sample not in samples for sample, count in counts.items()),
        by_session=dict(by_session),
    )
    once = {sample for sample, count in counts.items() if count}
    assert audit.holds == (once == samples - skipped and set(counts.values()) <= {0, 1})


def _names(journal: list[Exclusion], block_id: int, place: int) -> bool:
    return any(entry.block_id == block_id and entry.start <= place < entry.stop for entry in journal)


@given(st.lists(st.integers(1, 14), max_size=4), st.data())
def test_an_epoch_learned_once_in_any_pieces_and_any_order_holds(block_samples: list[int], data: st.DataObject) -> None:
    pieces: list[Span] = []
    for block_id, size in enumerate(block_samples):
        for chunk_id in range(-(-size // CHUNK_SIZE)):
            here = min(CHUNK_SIZE, size - chunk_id * CHUNK_SIZE)
            cuts = sorted({0, here, *data.draw(st.sets(st.integers(0, here)))})
            pieces += [span(block_id, chunk_id, *ends) for ends in pairwise(cuts)]
    pieces = data.draw(st.permutations(pieces))
    assert audit_epoch(0, pieces, block_samples, CHUNK_SIZE).holds
    if pieces:
        assert not audit_epoch(0, pieces[1:], block_samples, CHUNK_SIZE).holds
        assert not audit_epoch(0, [*pieces, pieces[0]], block_samples, CHUNK_SIZE).holds


def test_memory_and_time_go_with_spans_and_not_with_samples() -> None:
    size = 10**15
    halves = [
        Span(
            commit=1,
            epoch=0,
            ref=ChunkRef(0, half),
            start=0,
            stop=size,
            start_offset=0,
            stop_offset=0,
            steps=1,
            session=1,
        )
        for half in range(2)
    ]
    audit = audit_epoch(0, halves, [2 * size], size)
    assert audit.holds
    assert audit.by_session == {1: 2 * size}


def test_an_empty_data_set_holds() -> None:
    assert audit_epoch(0, [], [], CHUNK_SIZE).holds


def test_a_sample_learned_three_times_is_learned_twice_too_often_and_counted_once() -> None:
    audit = audit_epoch(
        0, [span(0, 0, 0, 2), span(0, 0, 1, 3, session=2), span(0, 0, 1, 2, session=3)], [3], CHUNK_SIZE
    )
    assert (audit.once, audit.twice, audit.missing, audit.foreign) == (2, 1, 0, 0)
    assert audit.by_session == {1: 2, 2: 2, 3: 1}
