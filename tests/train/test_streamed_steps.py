"""Steps of the streamed trainer are those of the ordinary one, wherever units are stepped and whatever goes wrong."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.errors import CheckpointError, TrainError
from penstock.train.streamed import StreamedTrainer
from penstock.train.streamed.decoder import Call
from penstock.train.trainer import State, Trainer
from train.streamed_models import FAMILIES, GPT2, LLAMA, PACKED, batch, model, rows_of, schedule

pytestmark = pytest.mark.usefixtures("one_thread")
STEPS = 10
LENGTHS = ([[5, 7], [12]], [[12], [3], [4, 4]], [[6]], PACKED)

Make = Callable[..., StreamedTrainer]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes trainers that are closed in the end."""
    made: list[StreamedTrainer] = []

    def build(config: dict[str, Any] = LLAMA, *, rate: float = 1e-3, **more: Any) -> StreamedTrainer:
        made.append(StreamedTrainer(model(config), schedule=schedule(rate), **more))
        return made[-1]

    yield build
    for trainer in made:
        trainer.close()


def copied(trainer: Trainer) -> State:
    return {name: tensor.clone() for name, tensor in trainer.state().items()}


def same(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(tensor.equal(other[name]) for name, tensor in one.items())


def check_close(found: State, expected: State, begun: State) -> None:
    """What was learned is the same, to a thousandth of it."""
    assert found.keys() == expected.keys()
    for name in expected.keys() - {"rng.torch", "skips"}:
        learned = (expected[name] - begun[name]).norm() if name in begun else expected[name].norm()
        assert float((found[name] - expected[name]).norm()) <= 1e-3 * float(learned) + 1e-9, name


def batches(steps: int = STEPS) -> list[Any]:
    return [batch(LENGTHS[step % len(LENGTHS)], seed=step) for step in range(steps)]


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({}, (0, ())),
        ({"max_grad_norm": 0.05}, (2, (3,))),
        ({"accumulation": 2}, (0, (1, 3))),
        ({"accumulation": 3, "max_grad_norm": 0.0}, (4, ())),
        ({"max_grad_norm": 0.0}, (0, ())),
        ({"max_grad_norm": 0.0}, (1, (1, 2, 3))),
        ({"max_grad_norm": 0.0, "on_nan": "skip"}, (2, (3,))),
        ({"offload_activations": True}, (0, ())),
    ],
    ids=str,
)
def test_steps_are_those_of_the_ordinary_trainer(
    make: Make, settings: dict[str, Any], where: tuple[int, tuple[int, ...]]
) -> None:
    trainer = make(**settings)
    settings = {name: value for name, value in settings.items() if name != "offload_activations"}
    plain = Trainer(model(LLAMA), schedule=schedule(1e-3), **settings)
    begun = copied(plain)
    trainer.use_device(*where)
    for step, fed in enumerate(batches(), 1):
        found, expected = trainer.step(fed, step), plain.step(fed, step)
        assert found.loss == pytest.approx(expected.loss, rel=1e-5)
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
        assert (found.num_tokens, found.learning_rate) == (expected.num_tokens, expected.learning_rate)
    fed = batch(PACKED, seed=50)
    assert float(trainer.loss_sum(fed)) == pytest.approx(float(plain.loss_sum(fed).detach()), rel=1e-5)
    check_close(trainer.state(), plain.state(), begun)


def test_layers_of_different_sizes_share_slots(make: Make) -> None:
    config = FAMILIES["qwen3_moe, some layers dense"]
    trainer, plain = make(config), Trainer(model(config), schedule=schedule(1e-3))
    assert len({unit.size for unit in trainer.units[1:]}) == 2
    begun = copied(plain)
    for step, fed in enumerate(batches(5), 1):
        assert trainer.step(fed, step).loss == pytest.approx(plain.step(fed, step).loss, rel=1e-5)
    check_close(trainer.state(), plain.state(), begun)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_where_units_are_stepped_may_change_between_steps_while_threads_take_turns_at_any_time(
    make: Make, precision: str
) -> None:
    still, moving = make(precision=precision), make(precision=precision)
    before, chance = sys.getswitchinterval(), random.Random(0)
    sys.setswitchinterval(1e-6)
    try:
        for step, fed in enumerate(batches(40), 1):
            moving.use_device(chance.randrange(5), chance.sample(range(1, 4), chance.randrange(4)))
            expected, found = still.step(fed, step), moving.step(fed, step)
            assert found.loss == pytest.approx(expected.loss, rel=1e-5 if precision == "fp32" else 2e-3)
            if chance.random() < 0.2:
                moving.loss_sum(fed)
    finally:
        sys.setswitchinterval(before)
    for name, tensor in still.state().items():
        torch.testing.assert_close(moving.state()[name], tensor, rtol=0, atol=1e-2 if precision == "bf16" else 1e-4)


@pytest.mark.parametrize("norm", [0.0, 1.0])
def test_a_batch_without_sequences_is_a_step_with_gradients_of_zero(make: Make, norm: float) -> None:
    trainer = make(max_grad_norm=norm)
    result = trainer.step(rows_of(batch(PACKED), slice(0, 0)), 1)
    assert (result.loss, result.num_tokens, result.grad_norm, result.skipped) == (0.0, 0, 0.0, False)
    assert trainer.step(batch(PACKED), 2).loss > 1
    assert float(trainer.loss_sum(rows_of(batch(PACKED), slice(0, 0)))) == 0.0


# -- updates that bf16 would lose --------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", [(0, ()), (4, ()), (0, (1, 2, 3))], ids=str)
def test_small_updates_are_kept_though_computing_is_in_bf16(make: Make, where: tuple[int, tuple[int, ...]]) -> None:
    trainer, steps = make(precision="bf16", rate=1e-6, max_grad_norm=0.0, on_nan="skip"), 20
    trainer.use_device(*where)
    begun = {name: t.clone() for name, t in trainer.state().items() if name.startswith("model.")}
    exact = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in begun.items()}
    rounded = {name: torch.nn.Parameter(tensor.bfloat16()) for name, tensor in begun.items()}
    optimizers = [
        torch.optim.AdamW(
            [
                {"params": [p for p in weights.values() if p.ndim > 1], "weight_decay": 0.1},
                {"params": [p for p in weights.values() if p.ndim < 2], "weight_decay": 0.0},
            ],
            lr=1e-6,
            betas=(0.9, 0.95),
        )
        for weights in (exact, rounded)
    ]
    for step in range(1, steps + 1):
        trainer.step(batch(PACKED, seed=step), step)
        for unit in trainer.units:
            for place in unit.places:
                made = place.of(trainer.streaming.gradients_of(unit))
                exact[f"model.{place.name}"].grad = made.float()
                rounded[f"model.{place.name}"].grad = made.bfloat16()
        for optimizer in optimizers:
            optimizer.step()
    found = trainer.state()
    moved, lost = 0.0, 0.0
    for name, tensor in begun.items():
        torch.testing.assert_close(found[name], exact[name].detach(), rtol=3e-7, atol=1e-9)
        if tensor.ndim > 1:
            moved += float((found[name] != tensor).float().mean())
            lost += float((rounded[name] == tensor.bfloat16()).float().mean())
    matrices = sum(tensor.ndim > 1 for tensor in begun.values())
    assert moved / matrices > 0.99
    assert lost / matrices > 0.8, "in bf16 alone most would not have moved"


# -- states ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("where", [(0, ()), (2, ()), (0, (1, 2, 3))], ids=str)
def test_a_fresh_trainer_goes_on_with_the_same_bits(
    make: Make, precision: str, where: tuple[int, tuple[int, ...]]
) -> None:
    config = {**GPT2, "resid_pdrop": 0.2}
    trainer = make(config, precision=precision)
    trainer.use_device(*where)
    torch.manual_seed(5)
    fed = batches(7)
    for step in (1, 2, 3, 4):
        trainer.step(fed[step], step)
    kept = copied(trainer)
    expected = [trainer.step(fed[step], step) for step in (5, 6)]
    fresh = make(config, precision=precision)
    fresh.step(fed[0], 1)
    fresh.use_device(*where)
    fresh.load_state(kept)
    fresh.use_device(*where)
    assert [fresh.step(fed[step], step) for step in (5, 6)] == expected
    assert same(copied(fresh), copied(trainer))


def test_a_state_goes_from_either_trainer_to_the_other(make: Make) -> None:
    fed = batches(8)
    plain, trainer = Trainer(model(LLAMA), schedule=schedule(1e-3)), make()
    begun = copied(plain)
    for step in (1, 2, 3):
        plain.step(fed[step], step)
    trainer.load_state(plain.state())
    assert same(trainer.state(), plain.state())
    for step in (4, 5):
        assert trainer.step(fed[step], step).loss == pytest.approx(plain.step(fed[step], step).loss, rel=1e-5)
    check_close(trainer.state(), plain.state(), begun)
    back = Trainer(model(LLAMA, seed=9), schedule=schedule(1e-3))
    back.load_state(copied(trainer))
    assert back.step(fed[6], 6).loss == pytest.approx(trainer.step(fed[6], 6).loss, rel=1e-5)
    trainer.load_state(begun)
    assert same(trainer.state(), begun), "of before the first step, too"


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(make: Make) -> None:
    trainer = make()
    before = copied(trainer)
    wrong = {name: tensor for name, tensor in before.items() if "layers.1.mlp.up_proj" not in name}
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj"):
        trainer.load_state(wrong)
    assert same(copied(trainer), before)


# -- what goes wrong ---------------------------------------------------------------------------------------------------


class Trouble:
    """In a layer, in one of its two passes: an error, or numbers that are none."""

    def __init__(self, trainer: StreamedTrainer, layer: int) -> None:
        self.at: int | None = None
        """Which pass from now, from 1."""
        self.spoil = False
        self._layer = layer
        self._right = trainer.streaming.decoder.layer
        trainer.streaming.decoder.layer = self._act

    def _act(self, number: int, states: Tensor, call: Call) -> Tensor:
        output = self._right(number, states, call)
        if number == self._layer and self.at is not None:
            self.at -= 1
            if not self.at:
                self.at = None
                if self.spoil:
                    return output * torch.nan
                raise RuntimeError("trouble")
        return output


@pytest.mark.parametrize("where", [(0, ()), (2, (3,))], ids=str)
def test_a_step_that_fails_in_either_pass_leaves_a_trainer_that_goes_on(
    make: Make, where: tuple[int, tuple[int, ...]]
) -> None:
    trainer, undisturbed = make(), make()
    fed = batches(9)
    trainer.use_device(*where)
    undisturbed.use_device(*where)
    trouble = [Trouble(trainer, layer) for layer in (0, 1, 2)]
    for step in range(1, 9):
        trouble[step % 3].at = 1 + step % 2
        with pytest.raises(RuntimeError, match="trouble"):
            trainer.step(fed[step], step)
        assert trainer.step(fed[step], step) == undisturbed.step(fed[step], step)
    trouble[1].at = 1
    with pytest.raises(RuntimeError, match="trouble"):
        trainer.loss_sum(fed[0])
    assert float(trainer.loss_sum(fed[0])) == float(undisturbed.loss_sum(fed[0]))
    assert same(copied(trainer), copied(undisturbed))


def test_a_step_that_fails_when_some_units_have_learned_is_not_gone_on_from(make: Make) -> None:
    trainer = make(max_grad_norm=0.0)
    fed, trouble = batch(PACKED), Trouble(trainer, 0)
    trainer.step(fed, 1)
    kept = copied(trainer)
    trouble.at = 2
    with pytest.raises(RuntimeError, match="trouble"):
        trainer.step(fed, 2)
    for act in (lambda: trainer.step(fed, 2), trainer.state):
        with pytest.raises(TrainError, match=r"some layers had learned and others had not.*last commit"):
            act()
    trainer.load_state(kept)
    assert same(copied(trainer), kept)
    assert not trainer.step(fed, 2).skipped


@pytest.mark.parametrize("where", [(0, ()), (2, (3,))], ids=str)
@pytest.mark.parametrize("norm", [0.0, 1.0])
def test_a_batch_that_is_skipped_leaves_weights_and_moments_alone(
    make: Make, norm: float, where: tuple[int, tuple[int, ...]]
) -> None:
    trainer = make(on_nan="skip", max_grad_norm=norm)
    trainer.use_device(*where)
    fed, trouble = batches(5), Trouble(trainer, 1)
    trouble.spoil = True
    trainer.step(fed[1], 1)
    before = copied(trainer)
    trouble.at = 1
    result = trainer.step(fed[2], 2)
    assert result.skipped
    after = copied(trainer)
    assert int(after.pop("skips")) == 1 + int(before.pop("skips"))
    assert same(after, before)
    assert not trainer.step(fed[3], 3).skipped
    assert int(trainer.state()["skips"]) == 0


def test_a_batch_that_cannot_be_learned_stops_the_run(make: Make) -> None:
    trainer = make()
    trouble = Trouble(trainer, 1)
    before, trouble.spoil, trouble.at = copied(trainer), True, 1
    with pytest.raises(TrainError, match=r"step 1: the loss is nan"):
        trainer.step(batch(PACKED), 1)
    assert {name: t for name, t in copied(trainer).items() if name != "skips"}.keys() == before.keys() - {"skips"}
    assert all(tensor.equal(before[name]) for name, tensor in trainer.state().items() if name != "skips")
    at_once = make(max_grad_norm=0.0)
    trouble = Trouble(at_once, 1)
    trouble.spoil, trouble.at = True, 1
    with pytest.raises(TrainError, match=r"step 1: the loss is nan"):
        at_once.step(batch(PACKED), 1)
    with pytest.raises(TrainError, match="some layers had learned"):
        at_once.state()


def test_an_error_of_the_optimizers_thread_reaches_who_trains(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, fed = make(), batch(PACKED)
    trainer.step(fed, 1)
    trainer.state()  # everything is stepped

    def fail(*_: Any) -> None:
        raise ValueError("no step today")

    monkeypatch.setattr(trainer.streaming.optimizer, "_step", fail)
    trainer.step(fed, 2)  # its weights are stepped behind it
    with pytest.raises(ValueError, match="no step today"):
        trainer.step(fed, 3)
    with pytest.raises(ValueError, match="no step today"):
        trainer.state()


def test_closing_ends_all_threads_and_what_is_asked_for_then_is_refused() -> None:
    before = set(threading.enumerate())
    trainer = StreamedTrainer(model(LLAMA), schedule=schedule())
    trainer.step(batch(PACKED), 1)
    trainer.close()
    trainer.close()
    assert set(threading.enumerate()) <= before
    with pytest.raises(TrainError, match="closed"):
        trainer.step(batch(PACKED), 2)
    with pytest.raises(TrainError, match="closed"):
        trainer.loss_sum(batch(PACKED))


@pytest.mark.parametrize("residents", [0, 2])
def test_where_memory_is_short_residents_leave_and_the_step_is_made_without_them(
    make: Make, monkeypatch: pytest.MonkeyPatch, residents: int
) -> None:
    trainer, other, fed = make(), make(), batch(PACKED)
    trainer.use_device(residents)
    layer, calls = trainer.streaming.decoder.layer, [0]

    def short_once(number: int, states: Tensor, call: Call) -> Tensor:
        calls[0] += 1
        if calls[0] == 5:  # in the backward pass
            raise torch.OutOfMemoryError("no room for that")
        return layer(number, states, call)

    monkeypatch.setattr(trainer.streaming.decoder, "layer", short_once)
    if not residents:
        with pytest.raises(TrainError, match=r"do not fit cpu \(no room for that\).*--gradient-accumulation-steps"):
            trainer.step(fed, 1)
    else:
        trainer.step(fed, 1)
        assert not trainer.streaming.residents
        other.step(fed, 1)
        assert same(copied(trainer), copied(other))
