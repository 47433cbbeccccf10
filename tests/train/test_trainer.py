"""One step, one state, and how several states become one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from penstock.errors import CheckpointError, TrainError
from penstock.feed import Batch, pack_window
from penstock.train.device_batch import DeviceBatch, to_device
from penstock.train.models import Transformer, build_model
from penstock.train.models.transformer import SHAPES
from penstock.train.schedule import Schedule
from penstock.train.trainer import OnNan, State, Trainer, merge


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


def test_bf16_computes_what_fp32_does_nearly_and_keeps_weights_in_fp32() -> None:
    batch = batch_of([1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    torch.manual_seed(0)
    model = build_model("tiny", vocab_size=50, total_samples=4)
    torch.manual_seed(0)
    twin = build_model("tiny", vocab_size=50, total_samples=4)
    exact = Trainer(model, schedule=Schedule(learning_rate=1e-3))
    rough = Trainer(twin, schedule=Schedule(learning_rate=1e-3), precision="bf16")
    losses = [[subject.step(batch, number).loss for number in range(1, 9)] for subject in (exact, rough)]
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    floats = [tensor for name, tensor in rough.state().items() if name.startswith(("model.", "optimizer."))]
    assert {tensor.dtype for tensor in floats} == {torch.float32}


def test_a_learning_rate_too_small_for_bf16_weights_still_changes_every_matrix() -> None:
    torch.manual_seed(0)
    model = build_model("tiny", vocab_size=50, total_samples=4)
    subject = Trainer(model, schedule=Schedule(learning_rate=1e-6), precision="bf16")
    before = subject.state()
    for number in range(1, 4):
        subject.step(batch_of([1, 2, 3, 4, 5, 6, 7, 8, 9, 10]), number)
    after = subject.state()
    changed = [(after[n] != before[n]).float().mean().item() for n in before if n.startswith("model.layers.0.qkv")]
    assert min(changed) > 0.9


def test_the_learning_rate_is_the_schedules_at_the_number_of_the_step() -> None:
    schedule = Schedule(learning_rate=1e-2, kind="cosine", warmup_steps=2, total_steps=9)
    model = build_model("tiny", vocab_size=50, total_samples=4)
    subject = Trainer(model, schedule=schedule)
    for number in (7, 1, 100):
        result = subject.step(batch_of([1, 2, 3, 4]), number)
        assert result.learning_rate == schedule.at(number)
        assert {group["lr"] for group in subject.optimizer.param_groups} == {schedule.at(number)}


def test_matrices_decay_and_norms_do_not() -> None:
    subject = trainer()
    decay = {id(p): group["weight_decay"] for group in subject.optimizer.param_groups for p in group["params"]}
    found = {name: decay[id(parameter)] for name, parameter in subject.model.named_parameters()}
    assert {found[name] for name in found if "norm" in name} == {0.0}
    assert {found[name] for name in found if "norm" not in name} == {0.1}


def test_gradients_are_clipped_and_their_norm_is_told_as_it_was() -> None:
    batch = batch_of([1, 2, 3, 4, 5])
    for limit in (1e-3, 0.0):
        torch.manual_seed(0)
        model = build_model("tiny", vocab_size=50, total_samples=4)
        subject = Trainer(model, schedule=Schedule(learning_rate=1e-3), max_grad_norm=limit)
        told = subject.step(batch, 1).grad_norm
        left = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm().item()
        assert told > 0.01
        assert left == pytest.approx(limit or told, rel=1e-3)


class Broken(Transformer):
    """A transformer whose loss is not a number where token 7 is."""

    def loss_sum(self, batch: DeviceBatch, rows: slice) -> torch.Tensor:
        return super().loss_sum(batch, rows) * (float("nan") if (batch.input_ids == 7).any() else 1.0)


def broken(on_nan: OnNan) -> Trainer:
    torch.manual_seed(0)
    return Trainer(Broken(SHAPES["tiny"], vocab_size=50), schedule=Schedule(learning_rate=1e-2), on_nan=on_nan)


def test_a_skipped_batch_leaves_weights_and_optimizer_as_they_were() -> None:
    subject = broken("skip")
    subject.step(batch_of([1, 2, 3, 4]), 1)
    before = subject.state()
    result = subject.step(batch_of([1, 7, 3, 4]), 2)
    assert result.skipped
    after = subject.state()
    assert int(after.pop("skips")) == 1
    assert all(torch.equal(before[name], after[name]) for name in after)
    assert not subject.step(batch_of([1, 2, 3, 4]), 3).skipped
    assert int(subject.state()["skips"]) == 0


def test_a_model_that_learns_nothing_any_more_stops_even_where_batches_are_skipped() -> None:
    subject = broken("skip")
    for number in range(1, 20):
        assert subject.step(batch_of([1, 7, 3, 4]), number).skipped
    with pytest.raises(TrainError, match="20 batches in a row: this is the model, not the data"):
        subject.step(batch_of([1, 7, 3, 4]), 20)


def test_batches_that_cannot_be_learned_are_counted_over_resumes_and_in_vain_only_where_all_replicas_fail() -> None:
    subject = broken("skip")
    for number in range(1, 13):
        subject.step(batch_of([1, 7, 3, 4]), number)
    resumed = broken("skip")
    resumed.load_state(subject.state())
    for number in range(13, 20):
        resumed.step(batch_of([1, 7, 3, 4]), number)
    with pytest.raises(TrainError, match="20 batches in a row"):
        resumed.step(batch_of([1, 7, 3, 4]), 20)
    well, base = broken("skip"), broken("skip").state()
    well.step(batch_of([1, 2, 3, 4]), 1)
    assert int(merge(base, [(1.0, subject.state()), (1.0, resumed.state())], "mean")["skips"]) == 12
    assert int(merge(base, [(1.0, subject.state()), (1.0, well.state())], "mean")["skips"]) == 0
    of_before = {name: tensor for name, tensor in base.items() if name != "skips"}
    resumed.load_state(of_before)
    assert int(resumed.state()["skips"]) == 0


class TwoRanks:
    """The other rank of two, which has learned its share already: its sums are added."""

    def __init__(self, weight: float, loss: float, tokens: int, gradients: list[torch.Tensor]) -> None:
        self.expected = 0
        self._answers = [[weight], [loss, tokens]]
        self._gradients = gradients

    def total(self, numbers: Sequence[float]) -> list[float]:
        return [a + b for a, b in zip(numbers, self._answers.pop(0), strict=True)]

    def expect_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        self.expected += 1

    def sum_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        for parameter, other in zip(parameters, self._gradients, strict=True):
            parameter.grad = other if parameter.grad is None else parameter.grad + other


def test_a_batch_shared_by_two_ranks_is_learned_as_one_rank_would() -> None:
    whole = batch_of([1, 2, 3, 4, 5, 6, 7, 8], [9, 8, 7], length=4)
    halves = [batch_of([1, 2, 3, 4, 5, 6, 7, 8], [9, 8, 7], length=4) for _ in range(2)]
    arrays = ("input_ids", "labels", "position_ids", "document_ids")
    first, second = (
        replace(half, **{name: getattr(half, name)[rank::2] for name in arrays}) for rank, half in enumerate(halves)
    )
    alone, other, subject = trainer(), trainer(), trainer()
    expected = alone.step(whole, 1)
    fed = to_device(second, other.device)
    loss = other.model.loss_sum(fed, slice(None)) / whole.num_tokens
    loss.backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in other.model.parameters()]
    together = TwoRanks(second.num_tokens, loss.item(), second.num_tokens, gradients)
    found = subject.step(first, 1, together)
    assert found.loss == pytest.approx(expected.loss, abs=1e-6)
    assert (found.num_tokens, found.grad_norm) == (expected.num_tokens, pytest.approx(expected.grad_norm, rel=1e-4))
    assert together.expected == 1, "once, before the last of its parts"


def test_averaging_replicas_from_one_start_lowers_the_loss_round_by_round() -> None:
    chance = np.random.default_rng(0)

    def noisy_batch() -> Batch:
        """Counting by ones, twos and threes, with every fifth token at random."""
        rows = []
        for _ in range(6):
            begin, stride = chance.integers(50), 1 + chance.integers(3)
            row = (begin + stride * np.arange(24)) % 50
            row[chance.random(24) < 0.2] = chance.integers(50)
            rows.append(row.tolist())
        return batch_of(*rows, length=24)

    held_out = [to_device(noisy_batch(), torch.device("cpu")) for _ in range(8)]
    judge = trainer(seed=99)

    def loss_of(state: State) -> float:
        judge.load_state(state)
        with torch.no_grad():
            return float(sum(judge.model.loss_sum(batch, slice(0, len(batch))) for batch in held_out))

    state = trainer().state()
    judge.load_state(state)
    for number in range(1, 31):  # past the very beginning, where any step helps
        judge.step(noisy_batch(), number)
    state = judge.state()
    for _ in range(3):
        replicas = []
        for number in range(4):
            subject = trainer(seed=number)
            subject.load_state(state)
            for step in range(1, 7):
                subject.step(noisy_batch(), step)
            replicas.append((1.0, subject.state()))
        before, state = loss_of(state), merge(state, replicas, "mean")
        assert loss_of(state) < before
        assert loss_of(state) < sum(loss_of(each) for _, each in replicas) / len(replicas)
