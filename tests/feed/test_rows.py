"""Rows of a window, however documents are laid into them: every token once, and learned once or not at all."""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feed.windows import Documents, documents, sequence_lengths
from penstock.errors import ConfigError
from penstock.feed.labels import IGNORED_LABEL, MASKED
from penstock.feed.laying import make_rows
from penstock.feed.pieces import PACKINGS, Packing, best_fit, count_rows
from penstock.feed.rows import FIELDS, Rows, merge
from penstock.feed.windows import Window

PAD = 7
packings = st.sampled_from(PACKINGS)
examples = settings(deadline=None)


def rows_of(made: Documents, packing: Packing, length: int, *, every: int = 0) -> Rows:
    """Rows over documents; every so many-th token is marked as not to be learned."""
    ids = np.array(made.tokens, dtype=np.uint32)
    if every:
        ids[::every] |= MASKED
    offsets = np.concatenate([[0], np.cumsum(made.lengths, dtype=np.int64)])
    window = Window(np.array(made.sample_ids), ids, offsets)
    return make_rows(window, packing, length=length, pad_id=PAD, masked=bool(every))


def flat(rows: Rows, chosen: range | None = None) -> dict[str, np.ndarray]:
    """All fields of some rows, one entry a place."""
    batch = merge([rows.fields(FIELDS, chosen if chosen is not None else range(len(rows)))])
    shapeless = ("spans", "sample_ids", "cu_seqlens", "num_tokens")
    return {name: array if name in shapeless else array.reshape(-1) for name, array in batch.items()}


@examples
@given(made=documents, packing=packings, length=sequence_lengths)
def test_every_token_stands_in_one_place_with_its_document_and_position(
    made: Documents, packing: Packing, length: int
) -> None:
    rows = rows_of(made, packing, length)
    got = flat(rows)
    real = got["document_ids"] >= 0
    assert sorted(got["input_ids"][real].tolist()) == made.tokens
    assert (got["input_ids"][~real] == PAD).all()
    assert got["attention_mask"].tolist() == real.astype(int).tolist()
    document = dict(zip(made.tokens, made.document_of_token, strict=True))
    for place in np.flatnonzero(real).tolist():
        token = int(got["input_ids"][place])
        assert got["document_ids"][place] == document[token]
        if got["position_ids"][place]:
            assert got["input_ids"][place - 1] == token - 1
            assert got["position_ids"][place - 1] == got["position_ids"][place] - 1
    assert (got["position_ids"] < length).all()
    assert int(got["num_tokens"].sum()) == len(made.tokens)
    assert rows.token_counts(range(len(rows))).tolist() == got["num_tokens"].tolist()
    assert count_rows(np.array(made.lengths), length, packing) == len(rows)


@examples
@given(made=documents, packing=packings, length=sequence_lengths, every=st.integers(0, 3))
def test_every_token_but_a_documents_first_is_learned_once_unless_it_is_marked(
    made: Documents, packing: Packing, length: int, every: int
) -> None:
    got = flat(rows_of(made, packing, length, every=every))
    learned = got["labels"] != IGNORED_LABEL
    assert (got["labels"][learned] == got["input_ids"][learned] + 1).all()
    marked = set(made.tokens[::every]) if every else set()
    expected = [
        token for token, place in zip(made.tokens, made.place_in_document, strict=True) if place and token not in marked
    ]
    assert sorted(got["labels"][learned].tolist()) == expected


@examples
@given(made=documents, packing=packings, length=sequence_lengths)
def test_spans_and_sample_ids_tell_what_a_batch_holds(made: Documents, packing: Packing, length: int) -> None:
    rows = rows_of(made, packing, length)
    samples: list[int] = []
    tokens: list[tuple[int, int]] = []
    for row in range(len(rows)):
        got = flat(rows, range(row, row + 1))
        samples += got["sample_ids"].tolist()
        mine = [(int(sample), place) for sample, first, stop in got["spans"] for place in range(first, stop)]
        assert len(mine) == int((got["document_ids"] >= 0).sum())
        tokens += mine
        ends = {sample for sample, first, stop in got["spans"] if stop == made.lengths[sample - made.sample_ids[0]]}
        assert ends <= set(got["sample_ids"].tolist())
    assert sorted(samples) == made.sample_ids
    assert sorted(tokens) == [
        (sample, place)
        for sample, length_of in zip(made.sample_ids, made.lengths, strict=True)
        for place in range(length_of)
    ]


@examples
@given(made=documents, packing=packings, length=sequence_lengths)
def test_sequence_bounds_are_where_positions_begin_again(made: Documents, packing: Packing, length: int) -> None:
    got = flat(rows_of(made, packing, length))
    bounds = got["cu_seqlens"].tolist()
    assert bounds[0] == 0
    assert bounds[-1] == len(got["input_ids"])
    assert bounds == sorted(set(bounds))
    for first, stop in pairwise(bounds):
        inside = got["position_ids"][first:stop]
        assert len(set(got["document_ids"][first:stop].tolist())) == 1
        if got["document_ids"][first] >= 0:
            assert inside.tolist() == list(range(stop - first))
    assert got["cu_seqlens"].dtype == np.int32


@examples
@given(made=documents, packing=packings, length=sequence_lengths, world=st.integers(1, 4), data=st.data())
def test_every_worlds_share_of_any_rows_is_those_rows(
    made: Documents, packing: Packing, length: int, world: int, data: st.DataObject
) -> None:
    rows = rows_of(made, packing, length)
    start = data.draw(st.integers(0, len(rows)))
    stop = data.draw(st.integers(start, len(rows)))
    alone = [flat(rows, range(row, row + 1)) for row in range(len(rows))]
    for rank in range(world):
        mine = range(min(stop, start + rank), stop, world)
        got = flat(rows, mine)
        for name in FIELDS:
            if name == "cu_seqlens":
                continue
            expected = [alone[row][name] for row in mine]
            assert np.array_equal(got[name], np.concatenate(expected) if expected else got[name][:0]), name
        assert got["sample_ids"].tolist() == [i for row in mine for i in alone[row]["sample_ids"].tolist()]


@examples
@given(made=documents, length=sequence_lengths, packing=st.sampled_from(["best-fit", "pad"]))
def test_a_document_that_fits_a_row_is_not_split(made: Documents, length: int, packing: Packing) -> None:
    rows = rows_of(made, packing, length)
    rows_with: dict[int, set[int]] = {}
    for row in range(len(rows)):
        for sample, _, _ in flat(rows, range(row, row + 1))["spans"].tolist():
            rows_with.setdefault(sample, set()).add(row)
    for sample, size in zip(made.sample_ids, made.lengths, strict=True):
        assert len(rows_with.get(sample, ())) == -(-size // length)


@examples
@given(lengths=st.lists(st.integers(0, 30), max_size=60), room=st.integers(30, 64))
def test_best_fit_is_best_fit_decreasing(lengths: list[int], room: int) -> None:
    rows = best_fit(np.array(lengths, dtype=np.int64), room)
    left: list[int] = []  # the textbook's way, a piece at a time
    for size in sorted(filter(None, lengths), reverse=True):
        place = bisect_left(left, size)
        space = left.pop(place) if place < len(left) else room
        insort(left, space - size)
    used = np.bincount(rows[rows >= 0], weights=np.array(lengths)[rows >= 0]) if any(lengths) else np.empty(0)
    assert sorted(room - used.astype(int)) == left
    if any(lengths):
        assert (rows >= 0).all()


def test_best_fit_wastes_little_of_what_people_really_have() -> None:
    lengths = np.random.default_rng(0).lognormal(5.5, 1.0, 20_000).astype(np.int64).clip(1, 2048)
    rows = best_fit(lengths, 2048)
    assert lengths.sum() / ((rows.max() + 1) * 2048) > 0.99


def test_best_fit_leaves_rows_in_the_plans_order() -> None:
    """No length comes first: rows stand where the piece that opened them stood."""
    lengths = np.random.default_rng(0).integers(1, 100, 3_000)
    rows = best_fit(lengths, 100)
    firsts = [int(lengths[rows == row].max()) for row in range(int(rows.max()) + 1)]
    halves = np.mean(firsts[: len(firsts) // 2]), np.mean(firsts[len(firsts) // 2 :])
    assert abs(halves[0] - halves[1]) < 3


def test_sequences_of_one_token_are_refused() -> None:
    with pytest.raises(ConfigError, match="sequence_length=1 leaves nothing to predict"):
        rows_of(Documents([3]), "pad", 1)
