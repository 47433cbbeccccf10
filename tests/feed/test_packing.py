"""Packing: every token once, every label the next token, and the same sequences however they are asked for."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from feed.windows import FIRST_SAMPLE, PAD, Documents, batch_sizes, documents, sequence_lengths
from penstock.errors import ConfigError
from penstock.feed import IGNORED_LABEL, Batch, PackedWindow

ARRAYS = ("input_ids", "labels", "position_ids", "document_ids")


def stacked(batches: list[Batch], name: str) -> np.ndarray:
    """One array of all batches' sequences."""
    return np.concatenate([getattr(batch, name) for batch in batches])


def all_batches(window: PackedWindow, batch_size: int, start_offset: int = 0) -> list[Batch]:
    return list(window.batches(batch_size, start_offset))


# -- tokens, labels, positions ----------------------------------------------------------------------------------------


@given(documents, sequence_lengths, batch_sizes)
def test_every_token_stands_in_exactly_one_sequence_in_order(window: Documents, length: int, batch_size: int) -> None:
    batches = all_batches(window.packed(length), batch_size)
    real = stacked(batches, "document_ids") >= 0
    assert stacked(batches, "input_ids")[real].tolist() == window.tokens


@given(documents, sequence_lengths, batch_sizes)
def test_a_label_is_the_next_token_of_the_document_and_none_behind_its_end(
    window: Documents, length: int, batch_size: int
) -> None:
    batches = all_batches(window.packed(length), batch_size)
    owner = [*window.document_of_token, None]
    following = [
        window.tokens[place + 1] if owner[place] == owner[place + 1] else IGNORED_LABEL
        for place in range(len(window.tokens))
    ]
    labels = stacked(batches, "labels").reshape(-1).tolist()
    padding = len(labels) - len(following)
    assert labels == following + [IGNORED_LABEL] * padding


@given(documents, sequence_lengths, batch_sizes)
def test_every_token_but_a_documents_first_is_learned_exactly_once(
    window: Documents, length: int, batch_size: int
) -> None:
    batches = all_batches(window.packed(length), batch_size)
    labels = stacked(batches, "labels")
    learned = Counter(labels[labels != IGNORED_LABEL].tolist())
    firsts = {token for token, place in zip(window.tokens, window.place_in_document, strict=True) if place == 0}
    assert learned == Counter(token for token in window.tokens if token not in firsts)
    assert sum(batch.num_tokens for batch in batches) == len(window.tokens) - len(firsts)


@given(documents, sequence_lengths, batch_sizes)
def test_positions_count_from_where_a_document_or_its_continuation_starts(
    window: Documents, length: int, batch_size: int
) -> None:
    batches = all_batches(window.packed(length), batch_size)
    positions = stacked(batches, "position_ids").reshape(-1)[: len(window.tokens)]
    expected = [min(place % length, inside) for place, inside in enumerate(window.place_in_document)]
    assert positions.tolist() == expected


@given(documents, sequence_lengths, batch_sizes)
def test_document_ids_tell_which_document_a_token_belongs_to(window: Documents, length: int, batch_size: int) -> None:
    found = stacked(all_batches(window.packed(length), batch_size), "document_ids").reshape(-1)
    assert found[: len(window.tokens)].tolist() == window.document_of_token


@given(documents, sequence_lengths, batch_sizes)
def test_only_the_last_sequence_is_filled_up_and_the_filling_is_marked(
    window: Documents, length: int, batch_size: int
) -> None:
    batches = all_batches(window.packed(length), batch_size)
    missing = -len(window.tokens) % length
    filling = stacked(batches, "document_ids").reshape(-1) == -1
    assert filling.tolist() == [False] * len(window.tokens) + [True] * missing
    for name, fill in (("input_ids", PAD), ("labels", IGNORED_LABEL), ("position_ids", 0)):
        assert stacked(batches, name).reshape(-1)[filling].tolist() == [fill] * missing


def test_a_window_shorter_than_a_sequence_is_one_sequence_filled_up() -> None:
    [batch] = Documents([2, 1]).packed(6).batches(4)
    assert batch.input_ids.tolist() == [[1000, 1001, 1002, PAD, PAD, PAD]]
    assert batch.labels.tolist() == [[1001, -100, -100, -100, -100, -100]]
    assert batch.position_ids.tolist() == [[0, 1, 0, 0, 0, 0]]
    assert batch.document_ids.tolist() == [[0, 0, 1, -1, -1, -1]]
    assert batch.sample_ids.tolist() == [FIRST_SAMPLE, FIRST_SAMPLE + 1]


def test_a_document_longer_than_a_sequence_goes_on_in_the_next_with_nothing_lost() -> None:
    batch = Documents([5]).packed(2).batch(0, 3)
    assert batch.input_ids.tolist() == [[1000, 1001], [1002, 1003], [1004, PAD]]
    assert batch.labels.tolist() == [[1001, 1002], [1003, 1004], [-100, -100]]
    assert batch.position_ids.tolist() == [[0, 1], [0, 1], [0, 0]]


def test_a_document_that_fills_its_sequence_exactly_keeps_its_last_token() -> None:
    batch = Documents([3, 3]).packed(3).batch(0, 2)
    assert batch.input_ids.tolist() == [[1000, 1001, 1002], [1003, 1004, 1005]]
    assert batch.labels.tolist() == [[1001, 1002, -100], [1004, 1005, -100]]


# -- samples and spans ------------------------------------------------------------------------------------------------


@given(documents, sequence_lengths, batch_sizes)
def test_every_sample_ends_in_one_batch_in_order_empty_ones_too(
    window: Documents, length: int, batch_size: int
) -> None:
    batches = all_batches(window.packed(length), batch_size)
    assert np.concatenate([batch.sample_ids for batch in batches]).tolist() == window.sample_ids


@given(documents, sequence_lengths, batch_sizes)
def test_a_sample_ends_where_its_last_token_stands(window: Documents, length: int, batch_size: int) -> None:
    ends = dict(zip(window.document_of_token, window.tokens, strict=True))
    for batch in window.packed(length).batches(batch_size):
        for sample_id in batch.sample_ids.tolist():
            document = sample_id - FIRST_SAMPLE
            assert document not in ends or ends[document] in batch.input_ids


@given(documents, sequence_lengths, batch_sizes)
def test_samples_done_counts_up_to_all_of_them(window: Documents, length: int, batch_size: int) -> None:
    done = 0
    for batch in window.packed(length).batches(batch_size):
        assert batch.samples_done == done + len(batch.sample_ids)
        done = batch.samples_done
    assert done == len(window.lengths)


@given(documents, sequence_lengths, batch_sizes)
def test_spans_cover_every_token_once_in_the_batch_where_it_stands(
    window: Documents, length: int, batch_size: int
) -> None:
    starts = np.concatenate([[0], np.cumsum(window.lengths)])
    for batch in window.packed(length).batches(batch_size):
        told = [
            window.tokens[starts[sample_id - FIRST_SAMPLE] + place]
            for sample_id, start, stop in batch.spans.tolist()
            for place in range(start, stop)
        ]
        assert told == batch.input_ids[batch.document_ids >= 0].tolist()


# -- however they are asked for ---------------------------------------------------------------------------------------


@given(documents, sequence_lengths, batch_sizes, batch_sizes)
def test_the_batch_size_does_not_change_the_sequences(window: Documents, length: int, one: int, other: int) -> None:
    packed = window.packed(length)
    for name in ARRAYS:
        ones, others = (stacked(all_batches(packed, size), name) for size in (one, other))
        np.testing.assert_array_equal(ones, others)


@given(documents, sequence_lengths, batch_sizes, st.data())
def test_from_any_offset_come_the_sequences_that_were_left(
    window: Documents, length: int, batch_size: int, data: st.DataObject
) -> None:
    packed = window.packed(length)
    offset = data.draw(st.integers(0, packed.sequence_count - 1))
    whole, rest = all_batches(packed, batch_size), all_batches(window.packed(length), batch_size, offset)
    for name in ARRAYS:
        np.testing.assert_array_equal(stacked(rest, name), stacked(whole, name)[offset:])
    before = packed.batch(0, offset).samples_done if offset else 0
    assert np.concatenate([batch.sample_ids for batch in rest]).tolist() == window.sample_ids[before:]
    assert rest[-1].samples_done == len(window.lengths)


@given(documents, sequence_lengths, batch_sizes, st.data())
def test_resumed_between_two_batches_the_rest_is_the_same_to_the_last_field(
    window: Documents, length: int, batch_size: int, data: st.DataObject
) -> None:
    whole = all_batches(window.packed(length), batch_size)
    cut = data.draw(st.integers(0, len(whole)))
    offset = whole[cut - 1].stop_offset if cut else 0
    rest = all_batches(window.packed(length), batch_size, offset)
    assert len(rest) == len(whole) - cut
    for resumed, straight in zip(rest, whole[cut:], strict=True):
        for name in (*ARRAYS, "sample_ids", "spans"):
            np.testing.assert_array_equal(getattr(resumed, name), getattr(straight, name))
        assert (resumed.start_offset, resumed.stop_offset, resumed.samples_done) == (
            straight.start_offset,
            straight.stop_offset,
            straight.samples_done,
        )


@given(documents, sequence_lengths, batch_sizes)
def test_offsets_follow_each_other_and_only_the_last_batch_is_short(
    window: Documents, length: int, batch_size: int
) -> None:
    packed = window.packed(length)
    offset = 0
    for batch in packed.batches(batch_size):
        assert (batch.start_offset, batch.stop_offset) == (offset, offset + len(batch.input_ids))
        assert len(batch.input_ids) == min(batch_size, packed.sequence_count - offset)
        offset = batch.stop_offset
    assert offset == packed.sequence_count == -(-len(window.tokens) // length)


@given(documents, sequence_lengths, batch_sizes)
def test_what_is_done_to_a_batch_stays_with_it(window: Documents, length: int, batch_size: int) -> None:
    packed = window.packed(length)
    for batch in packed.batches(batch_size):
        for name in (*ARRAYS, "sample_ids", "spans"):
            getattr(batch, name)[...] = 3
    real = stacked(all_batches(packed, batch_size), "document_ids") >= 0
    assert stacked(all_batches(packed, batch_size), "input_ids")[real].tolist() == window.tokens


@given(documents, sequence_lengths)
def test_arrays_are_int64_and_of_one_shape(window: Documents, length: int) -> None:
    for batch in window.packed(length).batches(2):
        for name in ARRAYS:
            array = getattr(batch, name)
            assert (array.dtype, array.shape) == (np.int64, (len(batch.input_ids), length))


def test_a_finished_window_has_no_batches_left() -> None:
    packed = Documents([4]).packed(2)
    assert all_batches(packed, 1, packed.sequence_count) == []


def test_a_window_without_tokens_has_no_batches() -> None:
    assert all_batches(Documents([0, 0]).packed(2), 1) == []


# -- what cannot work -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 0, -3])
def test_a_sequence_without_room_for_a_next_token_is_refused(length: int) -> None:
    with pytest.raises(ConfigError, match=f"sequence_length={length} leaves nothing to predict: expected 2 or more"):
        Documents([3]).packed(length)


@pytest.mark.parametrize("batch_size", [0, -1])
def test_a_batch_without_room_for_a_sequence_is_refused(batch_size: int) -> None:
    with pytest.raises(ConfigError, match=f"batch_size={batch_size} holds no sequence: expected 1 or more"):
        all_batches(Documents([3]).packed(2), batch_size)
