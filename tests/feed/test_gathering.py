"""Tokens brought together from mapped chunks: the same whichever way, and never overwritten under a reader."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.feed import token_segments
from penstock.feed.buffers import Buffers
from penstock.feed.gathered import GatheredIds, GatheredRows, gather
from penstock.feed.gathering import assemble
from penstock.feed.token_store import TokenChunk, TokenStore
from penstock.feed.unmapping import wait_until_given_back

DTYPE = np.dtype("<u2")


def chunk(lengths: list[int], first: int) -> TokenChunk:
    """Samples of these lengths, whose tokens count up."""
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    return TokenChunk(np.arange(first, first + offsets[-1], dtype=DTYPE), offsets)


def expected(parts: list[TokenChunk], of_part: np.ndarray, places: np.ndarray) -> list[int]:
    pairs = zip(of_part.tolist(), places.tolist(), strict=True)
    return [
        int(i)
        for part, place in pairs
        for i in parts[part].ids[parts[part].offsets[place] : parts[part].offsets[place + 1]]
    ]


@settings(deadline=None)
@given(data=st.data(), uniform=st.booleans(), arrow=st.booleans())
def test_every_way_of_gathering_gives_the_same_tokens(data: st.DataObject, uniform: bool, arrow: bool) -> None:
    if arrow:
        import pyarrow  # noqa: F401 - once imported it is used
    one = data.draw(st.integers(1, 9))
    sizes = st.lists(st.just(one) if uniform else st.integers(0, 9), min_size=1, max_size=6)
    parts = [
        chunk(lengths, 100 * number)
        for number, lengths in enumerate(data.draw(st.lists(sizes, min_size=1, max_size=4)))
    ]
    every = [(number, place) for number, part in enumerate(parts) for place in range(len(part.offsets) - 1)]
    chosen = data.draw(st.permutations(every))[: data.draw(st.integers(1, len(every)))]
    of_part, places = (np.array(column, dtype=np.int64) for column in zip(*chosen, strict=True))
    wanted = expected(parts, of_part, places)
    placed = assemble(parts, of_part, places, DTYPE, Buffers())
    assert placed.ids.tolist() == wanted
    for gathered in (gather(parts, of_part, places, DTYPE), GatheredIds(parts, of_part, places, DTYPE)):
        assert np.array_equal(gathered.offsets, placed.offsets)
        assert len(gathered) == len(wanted)
        assert gathered.whole().tolist() == wanted
        first, last = sorted(data.draw(st.tuples(*[st.integers(0, len(wanted))] * 2)))
        assert gathered[first:last].tolist() == wanted[first:last]


def test_rows_of_one_length_are_put_so_that_a_segment_is_a_matrix_of_them(tmp_path: Path) -> None:
    store = TokenStore(tmp_path, chunk_count=6, dtype=DTYPE, max_bytes=None)
    for number in range(6):
        store.put(number, chunk([3, 1] if number == 2 else [16] * (number + 1), 50 * number))
    parts = [found for number in (0, 1, 3, 5) if (found := store.get(number))]
    of_part, places = np.array([3, 0, 1, 2, 3]), np.array([5, 0, 1, 2, 0])
    gathered = gather(parts, of_part, places, DTYPE)
    assert isinstance(gathered, GatheredRows)
    assert gathered.whole().tolist() == expected(parts, of_part, places)
    uneven = store.get(2)
    assert uneven is not None
    assert uneven.ids.tolist() == [100, 101, 102, 103]


@pytest.mark.parametrize("length", [16, 13, 1])
def test_rows_of_several_segments_are_those_of_one_matrix_too(
    tmp_path: Path, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_segments, "_UNBOUNDED_SEGMENT_BYTES", 500)
    stores = [TokenStore(tmp_path, chunk_count=24, dtype=DTYPE, max_bytes=None) for _ in range(2)]
    parts: list[TokenChunk] = []
    found = None
    for number in range(24):
        stores[number % 2].put(number, chunk([length] * (1 + number % 5), 50 * number))
        found = stores[0].get(number)  # of a segment that is mapped again as it grows
        assert found is not None
        parts.append(found)
    assert len({id(part.mapped) for part in parts}) > 4
    every = [(number, place) for number, part in enumerate(parts) for place in range(len(part.offsets) - 1)]
    of_part, places = np.random.default_rng(length).permutation(every).T
    gathered = gather(parts, of_part, places, DTYPE)
    assert isinstance(gathered, GatheredRows)
    wanted = expected(parts, of_part, places)
    del found, parts, stores
    assert gathered.whole().tolist() == wanted
    assert gathered.rows(3, 9).reshape(-1).tolist() == wanted[3 * length : 9 * length]
    assert gathered[5:-7].tolist() == wanted[5:-7]


def test_rows_that_are_not_at_whole_numbers_of_each_other_are_gathered_one_by_one() -> None:
    odd = np.zeros(65, np.uint8)[1:].view(DTYPE)
    odd[:] = np.arange(100, 132)
    parts = [chunk([16, 16], 0), TokenChunk(odd, np.array([0, 16, 32]))]
    assert parts[0].ids.ctypes.data % 2 != odd.ctypes.data % 2
    gathered = gather(parts, np.array([1, 0, 1]), np.array([1, 1, 0]), DTYPE)
    assert isinstance(gathered, GatheredIds)
    assert gathered.whole().tolist() == [*range(116, 132), *range(16, 32), *range(100, 116)]


def test_a_buffer_is_used_again_only_when_nobody_looks_at_it() -> None:
    buffers = Buffers()
    first = buffers.take(600_000, DTYPE)
    first[:] = 7
    view = first[10:20].reshape(2, 5)
    del first
    second = buffers.take(600_000, DTYPE)
    second[:] = 8
    assert (view == 7).all(), "a batch that was kept"
    address = view.__array_interface__["data"][0] - 20
    del view
    third = buffers.take(590_000, DTYPE)
    assert third.__array_interface__["data"][0] == address, "and one that was not"


def test_what_was_used_can_be_let_go_of_and_read_again(tmp_path: Path) -> None:
    store = TokenStore(tmp_path, chunk_count=3, dtype=DTYPE, max_bytes=None)
    for number in range(3):
        store.put(number, chunk([5000], 1000 * number))
    before = store.get(1)
    assert before is not None
    copied = before.ids.tolist()
    store.will_need(lambda: np.arange(3))
    store.let_go(np.arange(3))
    wait_until_given_back()
    assert before.ids.tolist() == copied
    again = store.get(1)
    assert again is not None
    assert again.ids.tolist() == copied


@pytest.mark.parametrize("flipped", [0, 40, -1])
def test_damage_is_found_when_a_chunk_is_first_read(tmp_path: Path, flipped: int) -> None:
    TokenStore(tmp_path, chunk_count=1, dtype=DTYPE, max_bytes=None).put(0, chunk([16] * 3, 5))
    segment = tmp_path / "segments" / "00000000"
    data = bytearray(segment.read_bytes())
    used = data.rindex(max(data)) if flipped < 0 else data.index(bytes([5, 0, 6, 0])) + flipped
    data[used] ^= 1
    segment.write_bytes(bytes(data))
    assert TokenStore(tmp_path, chunk_count=1, dtype=DTYPE, max_bytes=None).get(0) is None
