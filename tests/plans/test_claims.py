"""The claims plan: chunks in order, each sample in one of them, the next one found without counting."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.plans import ClaimsPlan, PlannedChunk
from penstock.types import ChunkRef

block_sizes = st.lists(st.integers(1, 30), max_size=6)
chunk_sizes = st.integers(1, 12)


def known(blocks: Sequence[int]) -> Callable[[int], int | None]:
    return lambda block_id: blocks[block_id] if block_id < len(blocks) else None


def walk(plan: ClaimsPlan, blocks: Sequence[int], last: ChunkRef | None = None) -> list[PlannedChunk]:
    """All chunks behind `last`, asked for one by one."""
    found: list[PlannedChunk] = []
    while (planned := plan.after(last, known(blocks))) is not None:
        found.append(planned)
        last = planned.ref
    return found


@given(block_sizes, chunk_sizes)
def test_every_sample_of_every_block_is_in_exactly_one_chunk(blocks: list[int], chunk_size: int) -> None:
    covered = [
        (planned.ref.block_id, planned.ref.chunk_id * chunk_size + place)
        for planned in walk(ClaimsPlan(chunk_size=chunk_size), blocks)
        for place in range(planned.sample_count)
    ]
    assert covered == [(block_id, place) for block_id, samples in enumerate(blocks) for place in range(samples)]


@given(block_sizes, chunk_sizes)
def test_only_the_last_chunk_of_a_block_is_short_and_none_is_empty(blocks: list[int], chunk_size: int) -> None:
    plan = ClaimsPlan(chunk_size=chunk_size)
    for planned in walk(plan, blocks):
        last_of_block = planned.ref.chunk_id == plan.chunk_count(blocks[planned.ref.block_id]) - 1
        assert 1 <= planned.sample_count <= chunk_size
        assert planned.sample_count == chunk_size or last_of_block


@given(block_sizes, chunk_sizes)
def test_the_chunk_count_is_that_of_the_chunks_handed_out(blocks: list[int], chunk_size: int) -> None:
    plan = ClaimsPlan(chunk_size=chunk_size)
    refs = [planned.ref for planned in walk(plan, blocks)]
    assert refs == [
        ChunkRef(block_id, chunk_id)
        for block_id, samples in enumerate(blocks)
        for chunk_id in range(plan.chunk_count(samples))
    ]
    assert refs == sorted(refs)


@given(block_sizes, chunk_sizes, st.data())
def test_a_walk_goes_on_from_any_chunk_as_if_it_had_come_there(
    blocks: list[int], chunk_size: int, data: st.DataObject
) -> None:
    plan = ClaimsPlan(chunk_size=chunk_size)
    whole = walk(plan, blocks)
    cut = data.draw(st.integers(0, len(whole)))
    last = whole[cut - 1].ref if cut else None
    assert walk(plan, blocks, last) == whole[cut:]


@given(block_sizes, st.integers(0, 6), chunk_sizes)
def test_blocks_that_arrive_later_are_walked_on_into(blocks: list[int], arrived: int, chunk_size: int) -> None:
    plan = ClaimsPlan(chunk_size=chunk_size)
    first = walk(plan, blocks[:arrived])
    last = first[-1].ref if first else None
    assert first + walk(plan, blocks, last) == walk(plan, blocks)


@given(st.lists(st.integers(0, 5), max_size=12), chunk_sizes)
def test_empty_blocks_are_passed_over(blocks: list[int], chunk_size: int) -> None:
    chunks = walk(ClaimsPlan(chunk_size=chunk_size), blocks)
    assert all(planned.sample_count > 0 for planned in chunks)
    assert sum(planned.sample_count for planned in chunks) == sum(blocks)


@pytest.mark.parametrize("block_id", [0, 10**6, 10**12])
@pytest.mark.parametrize("chunk_id", [0, 4, 24])
def test_finding_the_next_chunk_asks_for_two_blocks_at_most_wherever_it_is(block_id: int, chunk_id: int) -> None:
    asked: list[int] = []

    def block_samples(wanted: int) -> int:
        asked.append(wanted)
        return 100_000

    planned = ClaimsPlan(chunk_size=4_000).after(ChunkRef(block_id, chunk_id), block_samples)
    assert planned is not None
    assert planned.ref == (ChunkRef(block_id + 1, 0) if chunk_id == 24 else ChunkRef(block_id, chunk_id + 1))
    assert asked == ([block_id, block_id + 1] if chunk_id == 24 else [block_id])


def test_no_blocks_have_no_chunks() -> None:
    assert ClaimsPlan(chunk_size=3).after(None, known([])) is None


@pytest.mark.parametrize("chunk_size", [0, -1])
def test_a_chunk_that_cannot_hold_a_sample_is_refused(chunk_size: int) -> None:
    with pytest.raises(ConfigError, match=f"chunk_size={chunk_size} cannot hold a sample: expected 1 or more"):
        ClaimsPlan(chunk_size=chunk_size)
