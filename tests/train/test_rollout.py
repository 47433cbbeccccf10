"""Long sequences through models with a carry: the same as read whole, in the memory of a chunk."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import penstock
from penstock.errors import ConfigError
from penstock.feed import IGNORED_LABEL
from penstock.train.long.measuring import SavedBytes
from penstock.train.long.rollout import Rollout, chunked_segment_rollout
from penstock.train.long.tokens import long_tokens
from penstock.train.models.act import ActShape
from train.long_models import CPU, VOCABULARY, Case, GruModel, gradients, recurrent

pytestmark = pytest.mark.usefixtures("one_thread")

cases = st.builds(
    Case,
    seed=st.integers(0, 2**20),
    sequences=st.integers(1, 3),
    length=st.integers(2, 90),
    documents=st.integers(1, 5),
    padding=st.integers(0, 1),
    left=st.booleans(),
)


def of_kind(kind: str) -> nn.Module:
    if kind == "gru":
        torch.manual_seed(0)
        return GruModel().double()
    return recurrent(halt_max_steps=3 if kind == "pondering" else 1, across_documents=kind == "across documents")


def learned(
    model: nn.Module, batch: Any, chunk_size: int, bptt_chunks: int | Literal["all"] = "all", **more: Any
) -> tuple[Rollout, dict[str, Tensor]]:
    result = chunked_segment_rollout(model, batch, 5, chunk_size, bptt_chunks=bptt_chunks, **more)
    return result, gradients(model)


@pytest.mark.parametrize("kind", ["recurrent", "pondering", "across documents", "gru"])
@settings(max_examples=10, deadline=None)
@given(case=cases, chunk_size=st.integers(1, 60))
def test_chunks_with_all_of_the_past_give_the_loss_and_the_gradients_of_the_whole(
    kind: str, case: Case, chunk_size: int
) -> None:
    model = of_kind(kind)
    whole, expected = learned(model, case.batch(), chunk_size=10_000)
    found, got = learned(model, case.batch(), chunk_size=max(chunk_size, case.length // 8))
    assert len(whole.segments) == 1
    assert found.num_tokens == whole.num_tokens
    assert found.loss_sum.item() == pytest.approx(whole.loss_sum.item(), rel=1e-10)
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        assert got[name].allclose(gradient, atol=1e-9), name
    for name, tensor in whole.carry.items():
        assert found.carry[name].allclose(tensor, atol=1e-10), name


def test_the_whole_in_one_chunk_is_what_the_model_says_of_itself() -> None:
    model = recurrent(halt_max_steps=3)
    batch = Case(seed=1, sequences=2, length=50, documents=2, padding=3, left=False).batch()
    tokens = long_tokens(batch)
    logits = model(tokens.input_ids, tokens.position_ids, tokens.document_ids)
    expected = nn.functional.cross_entropy(
        logits.flatten(0, 1), tokens.labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
    )
    found, _ = learned(model, batch, chunk_size=7)
    assert (found.loss_sum - found.ponder_loss_sum).item() == pytest.approx(expected.item(), rel=1e-10)
    assert found.ponder_loss_sum > 0


def test_gradients_go_back_as_far_as_asked_and_no_further() -> None:
    model = recurrent()
    batch = {"input_ids": torch.randint(VOCABULARY, (2, 64), generator=torch.Generator().manual_seed(0))}
    by_reach = {reach: learned(model, batch, 16, reach) for reach in (1, 2, "all")}
    assert len({result.loss_sum.item() for result, _ in by_reach.values()}) == 1  # remembering does not depend on it
    name = "fast.layers.0.key.weight"
    one, two, every = (found[name] for _, found in by_reach.values())
    assert not one.allclose(two)
    assert not two.allclose(every)
    more, found = learned(model, batch, 16, 4)
    assert found[name].equal(every)
    assert more.num_tokens == 2 * 63


def test_gradients_of_one_chunk_at_a_time_are_those_with_the_carry_held_fixed() -> None:
    model = recurrent()
    ids = torch.randint(VOCABULARY, (1, 40), generator=torch.Generator().manual_seed(0))
    tokens = long_tokens({"input_ids": ids})
    carry = model.initial_carry(1, CPU)
    for start in range(0, 40, 10):
        piece = tokens.piece(start, start + 10, CPU)
        output = model.forward_chunk(piece.input_ids, piece.position_ids, piece.document_ids, carry)
        (model.loss_of(output.hidden, piece.labels) / 39).backward()
        carry = {name: tensor.detach() for name, tensor in output.carry.items()}
    expected = gradients(model)
    _, found = learned(model, {"input_ids": ids}, 10, 1)
    assert all(found[name].allclose(expected[name], atol=1e-12) for name in expected)


def test_a_token_of_the_first_chunk_is_seen_in_the_fourth() -> None:
    model = recurrent(halt_max_steps=2)
    ids = torch.randint(VOCABULARY, (1, 64), generator=torch.Generator().manual_seed(3))
    other = ids.clone()
    other[0, 5] = (ids[0, 5] + 1) % VOCABULARY

    def fourth(tokens: Tensor, *, cut: bool) -> Tensor:
        carry = model.initial_carry(1, CPU)
        hidden = torch.empty(0)
        for start in range(0, 64, 16):
            if cut:
                carry = model.initial_carry(1, CPU)
            piece = long_tokens({"input_ids": tokens}).piece(start, start + 16, CPU)
            output = model.forward_chunk(piece.input_ids, piece.position_ids, piece.document_ids, carry)
            carry, hidden = output.carry, output.hidden
        return (hidden @ model.embed.weight.T).detach()

    assert (fourth(ids, cut=False) - fourth(other, cut=False)).abs().max() > 1e-4
    assert fourth(ids, cut=True).equal(fourth(other, cut=True))


@pytest.mark.parametrize("kind", ["recurrent", "pondering", "gru"])
@settings(max_examples=8, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4), chunk_size=st.integers(1, 30))
def test_the_loss_does_not_depend_on_the_side_of_the_padding(kind: str, lengths: list[int], chunk_size: int) -> None:
    model = of_kind(kind)
    chance = torch.Generator().manual_seed(len(lengths))
    rows = [torch.randint(VOCABULARY, (length,), generator=chance) for length in lengths]
    longest = max(lengths) + 3

    def padded(left: bool) -> dict[str, Tensor]:
        ids, mask = torch.full((len(rows), longest), 7), torch.zeros(len(rows), longest, dtype=torch.int64)
        for number, row in enumerate(rows):
            place = slice(longest - len(row), longest) if left else slice(0, len(row))
            ids[number, place], mask[number, place] = row, 1
        return {"input_ids": ids, "attention_mask": mask}

    size = max(chunk_size, longest // 6)
    (right, expected), (left, found) = (learned(model, padded(side), size) for side in (False, True))
    assert left.num_tokens == right.num_tokens == sum(lengths) - len(lengths)
    assert left.loss_sum.item() == pytest.approx(right.loss_sum.item(), rel=1e-10)
    assert found.keys() == expected.keys()
    assert all(found[name].allclose(expected[name], atol=1e-9) for name in expected)


def test_positions_go_on_from_chunk_to_chunk_and_begin_again_with_a_document() -> None:
    model = GruModel()
    documents = torch.tensor([[0] * 7 + [1] * 5])
    chunked_segment_rollout(model, {"input_ids": torch.zeros_like(documents), "document_ids": documents}, 1, 5)
    assert torch.cat(model.positions, 1).tolist() == [[0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4]]


def test_labels_are_the_next_token_of_the_document_and_never_the_token_itself() -> None:
    ids, apart = torch.tensor([[1, 2, 3, 4, 5]]), torch.tensor([[0, 0, 0, 1, 1]])
    none = IGNORED_LABEL
    assert long_tokens({"input_ids": ids}).labels.tolist() == [[2, 3, 4, 5, none]]
    assert long_tokens({"input_ids": ids, "document_ids": apart}).labels.tolist() == [[2, 3, none, 5, none]]
    by_position = long_tokens({"input_ids": ids, "position_ids": torch.tensor([[0, 1, 2, 0, 1]])})
    assert by_position.labels.tolist() == [[2, 3, none, 5, none]]
    masked = long_tokens({"input_ids": ids.numpy().astype(np.uint16), "attention_mask": [[0, 1, 1, 1, 0]]})
    assert masked.labels.tolist() == [[none, 3, 4, none, none]]
    own = torch.tensor([[2, none, 4, 5, 9]])  # the feed's: the last one is of the sequence that follows
    assert long_tokens({"input_ids": ids, "labels": own}).labels.equal(own)
    with pytest.raises(ConfigError, match="labels are the input tokens themselves, which would teach copying"):
        long_tokens({"input_ids": ids, "labels": ids})
    same = torch.full((1, 4), 3)
    assert long_tokens({"input_ids": same, "labels": same}).labels.equal(same)  # nothing tells these apart


def test_a_weight_scales_gradients_and_leaves_the_loss() -> None:
    model = recurrent()
    batch = Case(seed=4, sequences=2, length=30, documents=2, padding=0, left=False).batch()
    mean, expected = learned(model, batch, 8)
    summed, found = learned(model, batch, 8, weight=1.0)
    assert summed.loss_sum.equal(mean.loss_sum)
    for name, gradient in expected.items():
        assert found[name].allclose(gradient * mean.num_tokens, atol=1e-9)


def test_sequences_that_go_on_elsewhere_are_read_on() -> None:
    model = recurrent(halt_max_steps=2).eval()
    ids = torch.randint(VOCABULARY, (2, 50), generator=torch.Generator().manual_seed(0))
    tokens = long_tokens({"input_ids": ids})
    with torch.no_grad():
        whole = chunked_segment_rollout(model, tokens, chunk_size=10)
        first = chunked_segment_rollout(model, tokens.piece(0, 23, CPU), chunk_size=10)
        second = chunked_segment_rollout(model, tokens.piece(23, 50, CPU), chunk_size=10, carry=first.carry)
    assert (first.loss_sum + second.loss_sum).item() == pytest.approx(whole.loss_sum.item(), rel=1e-10)
    assert gradients(model) == {}


def test_what_is_kept_on_the_host_gives_the_same_gradients() -> None:
    model = recurrent(halt_max_steps=2)
    batch = Case(seed=4, sequences=2, length=70, documents=2, padding=2, left=True).batch()
    expected, found = learned(model, batch, 16, 2), learned(model, batch, 16, 2, cpu_offload=True)
    assert found[0].loss_sum.equal(expected[0].loss_sum)
    assert all(found[1][name].equal(expected[1][name]) for name in expected[1])


def peak_of(model: nn.Module, length: int, chunk_size: int, **more: Any) -> tuple[int, Rollout]:
    ids = torch.randint(VOCABULARY, (1, length), generator=torch.Generator().manual_seed(0))
    with SavedBytes(*model.parameters()) as saved:
        result = chunked_segment_rollout(model, {"input_ids": ids}, 5, chunk_size, **more)
    assert saved.alive == 0
    return saved.peak, result


def test_memory_does_not_grow_with_the_sequence() -> None:
    shape = ActShape(dim=32, heads=2, fast_layers=1, slow_layers=1, cycles=1)
    model = recurrent(dtype=torch.float32, shape=shape)
    short, _ = peak_of(model, 2_048, 256)
    long, result = peak_of(model, 16_384, 256)
    carried = sum(tensor.nbytes for tensor in result.carry.values())
    token_ids = (16_384 - 2_048) * 8
    assert len(result.segments) == 64
    assert long - short <= token_ids + carried
    assert short > 1 << 20  # it is no small thing that does not grow
    everything, _ = peak_of(model, 2_048, 256, bptt_chunks="all")
    assert everything > 6 * short  # and what is not let go is seen


def test_the_instrument_sees_what_is_kept_and_when_it_is_let_go() -> None:
    weight = torch.ones(1000, requires_grad=True)
    with SavedBytes() as saved:
        product = (weight * weight).exp()  # keeps the weight once, though twice, and its own result
        assert saved.alive == 2 * 4000
        product.sum().backward()
        del product
        assert (saved.alive, saved.peak) == (0, 8000)
        saved.restart()
        assert saved.peak == 0
    with SavedBytes(weight) as saved:
        _ = (weight * weight).exp()
        assert saved.peak == 4000


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"chunk_size": 0}, "chunk_size=0 cannot work: expected a number of 1 or more"),
    ({"chunk_size": 2.5}, r"chunk_size=2\.5 cannot work"),
    ({"max_segments": 0}, "max_segments=0 cannot work"),
    ({"bptt_chunks": 0}, "bptt_chunks=0 cannot work: expected a number of 1 or more, or 'all'"),
    ({"weight": 0.0}, "weight=0.0 cannot divide a loss"),
    ({"batch": {"labels": [[1]]}}, "has no input_ids: got labels"),
    ({"batch": {"input_ids": [[1, 2], [3]]}}, "input_ids cannot be a tensor: .* pad rows to one length"),
    ({"batch": {"input_ids": torch.zeros(3, dtype=torch.int64)}}, r"input_ids are 3: expected \(sequences, length\)"),
    ({"batch": {"input_ids": torch.zeros(1, 0, dtype=torch.int64)}}, "input_ids are 1x0"),
    ({"batch": {"input_ids": torch.zeros(1, 3)}}, "input_ids are no whole numbers: got torch.float32"),
    (
        {"batch": {"input_ids": [[1, 2, 3]], "labels": [[1, 2]]}},
        "labels are 1x2 and input_ids 1x3: expected the same",
    ),
    (
        {"batch": {"input_ids": [[1, 2, 3]], "attention_mask": [[1, 0, 1]]}},
        "attention_mask has padding between tokens",
    ),
]


@pytest.mark.parametrize(("changed", "message"), REFUSED)
def test_what_cannot_work_is_refused_in_a_sentence(changed: dict[str, Any], message: str) -> None:
    chosen: dict[str, Any] = {"batch": {"input_ids": [[1, 2, 3]]}, **changed}
    with pytest.raises(ConfigError, match=message):
        penstock.chunked_segment_rollout(model=recurrent(), **chosen)


def test_a_model_without_a_carry_is_told_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"Linear has no carry .* is no model of transformers: .* --model act"):
        chunked_segment_rollout(nn.Linear(2, 2), {"input_ids": [[1, 2, 3]]})


def test_nothing_to_learn_is_no_error() -> None:
    result, found = learned(recurrent(), {"input_ids": [[1, 2]], "attention_mask": [[1, 0]]}, 1)
    assert (result.num_tokens, result.loss.item(), found) == (0, 0.0, {})
