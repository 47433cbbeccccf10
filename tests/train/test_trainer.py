"""One step, one state, and how several states become one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.errors import CheckpointError
from penstock.feed import Batch, pack_window
from penstock.train.models import build_model
from penstock.train.schedule import Schedule
from penstock.train.trainer import Trainer, merge


def batch_of(*documents: list[int], length: int = 12) -> Batch:
    ids = np.concatenate([np.asarray(document, dtype=np.int64) for document in documents])
    offsets = np.cumsum([0, *(len(document) for document in documents)])
    window = pack_window(ids, offsets, first_sample_id=0, sequence_length=length, pad_id=0)
    return next(window.batches(8))


def trainer(seed: int = 0) -> Trainer:
    torch.manual_seed(seed)
    model = build_model("tiny", vocab_size=50, total_samples=4)
    return Trainer(model, schedule=Schedule(learning_rate=1e-2))


def logits(subject: Trainer, batch: Batch) -> torch.Tensor:
    arrays = (batch.input_ids, batch.position_ids, batch.document_ids)
    return subject.model(*(torch.from_numpy(array) for array in arrays)).detach()


def test_documents_of_one_sequence_do_not_see_each_other() -> None:
    subject = trainer()
    one = logits(subject, batch_of([1, 2, 3, 4], [5, 6, 7, 8]))
    other = logits(subject, batch_of([9, 9, 9, 9], [5, 6, 7, 8]))
    assert not one[0, :4].allclose(other[0, :4])
    assert torch.equal(one[0, 4:8], other[0, 4:8])


def test_a_token_sees_only_what_comes_before_it() -> None:
    subject = trainer()
    one = logits(subject, batch_of([1, 2, 3, 4, 5, 6]))
    other = logits(subject, batch_of([1, 2, 3, 9, 5, 6]))
    assert torch.equal(one[0, :3], other[0, :3])
    assert not one[0, 3:6].allclose(other[0, 3:6])


def test_padding_teaches_nothing() -> None:
    short, long = trainer(), trainer()
    results = [short.step(batch_of([1, 2, 3, 4], length=4), 1), long.step(batch_of([1, 2, 3, 4], length=12), 1)]
    assert results[0].num_tokens == results[1].num_tokens == 3
    assert results[0].loss == pytest.approx(results[1].loss, rel=1e-5)


def test_a_state_taken_up_by_another_trainer_learns_the_same_from_there() -> None:
    first = trainer()
    first.step(batch_of([1, 2, 3, 4]), 1)
    second = trainer(seed=7)
    second.load_state(first.state())
    results = [subject.step(batch_of([4, 3, 2, 1]), 1) for subject in (first, second)]
    assert results[0] == results[1]
    assert all(torch.equal(first.state()[name], second.state()[name]) for name in first.state())


def test_a_state_is_a_copy() -> None:
    subject = trainer()
    before = subject.state()
    kept = {name: tensor.clone() for name, tensor in before.items()}
    subject.step(batch_of([1, 2, 3, 4]), 1)
    assert all(torch.equal(before[name], kept[name]) for name in kept)


def test_a_state_of_another_model_is_refused() -> None:
    other = Trainer(build_model("tiny", vocab_size=60, total_samples=4), schedule=Schedule(learning_rate=1e-2))
    with pytest.raises(CheckpointError, match="does not fit the model"):
        trainer().load_state(other.state())


def test_the_mean_weighs_replicas_and_the_sum_adds_their_changes() -> None:
    base = {"model.w": torch.tensor([1.0, 1.0])}
    replicas = [(1.0, {"model.w": torch.tensor([2.0, 1.0])}), (3.0, {"model.w": torch.tensor([1.0, 5.0])})]
    assert merge(base, replicas, "mean")["model.w"].tolist() == [1.25, 4.0]
    assert merge(base, replicas, "sum")["model.w"].tolist() == [2.0, 5.0]


def test_the_sum_leaves_optimizer_state_an_average() -> None:
    base = {"optimizer.0.exp_avg_sq": torch.tensor([1.0])}
    replicas = [
        (1.0, {"optimizer.0.exp_avg_sq": torch.tensor([0.3])}),
        (1.0, {"optimizer.0.exp_avg_sq": torch.tensor([0.5])}),
    ]
    assert merge(base, replicas, "sum")["optimizer.0.exp_avg_sq"].item() == pytest.approx(0.4)


def test_merging_one_replica_changes_no_bit() -> None:
    subject = trainer()
    base = subject.state()
    subject.step(batch_of([1, 2, 3, 4]), 1)
    state = subject.state()
    for how in ("mean", "sum"):
        merged = merge(base, [(5.0, state)], how)
        assert all(torch.equal(merged[name], state[name]) for name in state)


def test_optimizer_state_that_only_some_replicas_have_is_merged_too() -> None:
    base = {"model.w": torch.zeros(1)}
    replicas = [
        (1.0, {"model.w": torch.ones(1), "optimizer.0.step": torch.tensor(3.0), "optimizer.0.exp_avg": torch.ones(1)}),
        (1.0, {"model.w": torch.zeros(1)}),
    ]
    merged = merge(base, replicas, "mean")
    assert merged["optimizer.0.step"].item() == 3.0
    assert merged["model.w"].item() == 0.5
