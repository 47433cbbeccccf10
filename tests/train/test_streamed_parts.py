"""The parts of the streamed trainer, each by itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from penstock.errors import TrainError
from penstock.train.optimizers import AdamSettings, adamw
from penstock.train.ranks import Ranks
from penstock.train.streamed import due as due_steps
from penstock.train.streamed.background import Background
from penstock.train.streamed.collecting import Collector
from penstock.train.streamed.due import Due, DueStep, StepOrder, parts_of
from penstock.train.streamed.halves import joined, split
from penstock.train.streamed.host import HostGradients, HostState
from penstock.train.streamed.lanes import Lanes
from penstock.train.streamed.layout import ALIGNMENT, Unit, lay_out
from penstock.train.streamed.loading import Loader
from penstock.train.streamed.resident import Resident
from penstock.train.streamed.sharing import Sharing
from penstock.train.streamed.stepping import HostAdam
from penstock.train.streamed.visiting import VisitingAdam

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
SHAPES = [[(7, 5), (3,), (4, 2, 3), ()], [(11, 13), (13,)], [(6,), (2, 2)], [(64, 3), (1,)]]
"""Of the parameters of some units."""
PATIENCE_S = 60.0


def make_units(shapes: list[list[tuple[int, ...]]] = SHAPES, world: int = 1) -> list[Unit]:
    torch.manual_seed(0)
    return [
        lay_out(
            index,
            f"unit {index}",
            [(f"{index}.{n}", nn.Parameter(torch.randn(shape))) for n, shape in enumerate(own)],
            world,
        )
        for index, own in enumerate(shapes)
    ]


def host_of(units: list[Unit], image: torch.dtype = torch.float32) -> HostState:
    state = HostState(units, image_dtype=image, pinned=False)
    for unit, arrays in zip(units, state.units, strict=True):
        for place in unit.places:
            place.of(arrays.weights).copy_(place.parameter.detach())
    state.make_images()
    return state


# -- layout ------------------------------------------------------------------------------------------------------------

shapes = st.lists(st.integers(1, 70), min_size=0, max_size=3).map(tuple)


@given(own=st.lists(shapes, max_size=6), world=st.integers(1, 9))
def test_parameters_lie_apart_and_shares_cover_a_unit_once(own: list[tuple[int, ...]], world: int) -> None:
    parameters = [nn.Parameter(torch.empty(shape), requires_grad=n % 4 != 3) for n, shape in enumerate(own)]
    unit = lay_out(1, "unit", [(str(n), parameter) for n, parameter in enumerate(parameters)], world)
    assert {place.name for place in unit.places} == {str(n) for n in range(len(own))}
    ends = [0] + [place.end for place in unit.places]
    for end, place in zip(ends, unit.places, strict=False):
        assert place.start >= end
        assert place.start % ALIGNMENT == 0
        decays = place.parameter.ndim >= 2 and place.parameter.requires_grad
        assert (place.end <= unit.decaying) if decays else (place.start >= unit.decaying)
    assert unit.size >= max(1, ends[-1])
    shares = [unit.share(rank, world) for rank in range(world)]
    assert [place for part in shares for place in range(part.start, part.stop)] == list(range(unit.size))
    for part in shares:
        assert part.start % ALIGNMENT == 0
        pieces = unit.segments(part)
        assert [place for piece, _ in pieces for place in range(piece.start, piece.stop)] == list(
            range(part.start, part.stop)
        )
        assert all(
            (piece.stop <= unit.decaying) if decays else (piece.start >= unit.decaying) for piece, decays in pieces
        )


# -- halves ------------------------------------------------------------------------------------------------------------


def halves(weights: Tensor) -> tuple[Tensor, Tensor]:
    upper, lower = torch.empty(weights.shape, dtype=torch.bfloat16), torch.empty(weights.shape, dtype=torch.int16)
    split(weights, upper, lower)
    return upper, lower


def test_every_pattern_of_bits_comes_back_from_its_halves() -> None:
    lower = torch.arange(1 << 16, dtype=torch.int32)
    for upper in [*range(0, 1 << 16, 251), 0x7F7F, 0x7F80, 0x7FFF, 0x8000, 0xFF7F, 0xFF80, 0xFFFF]:
        bits = (lower | (upper << 16 if upper < 1 << 15 else (upper - (1 << 16)) << 16)).to(torch.int32)
        weights = bits.view(torch.float32)
        assert torch.equal(joined(*halves(weights)).view(torch.int32), bits), hex(upper)


def test_the_upper_half_is_the_nearest_bf16() -> None:
    weights = torch.randn(100_000) * 10 ** torch.empty(100_000).uniform_(-20, 20)
    upper, _ = halves(weights)
    ties = (weights.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(upper[~ties], weights.bfloat16()[~ties])


# -- optimizers --------------------------------------------------------------------------------------------------------


class Stepped:
    """Units that are stepped, by some means."""

    def __init__(self, units: list[Unit], image: torch.dtype, gradients: torch.dtype, adam: AdamSettings) -> None:
        self.units = units
        self.host = host_of(units, image)
        self.gradients = HostGradients(units, lambda _: gradients, pinned=False)
        self.sharing = Sharing(Ranks(), len(units))
        self.adam = adam

    def write(self, made: dict[str, Tensor]) -> None:
        for unit in self.units:
            for place in unit.places:
                place.of(self.gradients.units[unit.index]).copy_(made[place.name])


def by_host(stepped: Stepped) -> Callable[[StepOrder], None]:
    optimizer = HostAdam(stepped.units, stepped.host, [stepped.gradients], stepped.sharing, stepped.adam)
    return lambda order: _help(stepped, order, lambda due: optimizer.help_with(due, 999), optimizer)


def by_visits(stepped: Stepped) -> Callable[[StepOrder], None]:
    optimizer = VisitingAdam(stepped.host, stepped.gradients, stepped.sharing, stepped.adam, Lanes(CPU), piece=50)
    return lambda order: _help(stepped, order, optimizer.help_with, optimizer)


def by_both(stepped: Stepped) -> Callable[[StepOrder], None]:
    host = HostAdam(stepped.units, stepped.host, [stepped.gradients], stepped.sharing, stepped.adam)
    visits = VisitingAdam(stepped.host, stepped.gradients, stepped.sharing, stepped.adam, Lanes(CPU), piece=50)

    def help_with(due: Due) -> None:
        host.help_with(due, 999)
        visits.help_with(due)

    return lambda order: _help(stepped, order, help_with, host, visits)


def _help(stepped: Stepped, order: StepOrder, help_with: Callable[[Due], None], *optimizers: Any) -> None:
    due = Due()
    for unit in stepped.units:
        parts = parts_of(stepped.sharing.share(unit))
        assert len(parts) > 1
        stepped.sharing.will_step(unit, len(parts))
        for part in parts:
            due.put(DueStep(unit=unit, part=part, order=order, arrived=None, may_visit=True))
    help_with(due)
    for unit in stepped.units:
        stepped.sharing.until_stepped(unit)
    for optimizer in optimizers:
        optimizer.wait()
        if order.number == 10:
            optimizer.close()


def by_residents(stepped: Stepped) -> Callable[[StepOrder], None]:
    dtype = stepped.gradients.units[0].dtype
    residents = [Resident(unit, stepped.host.units[unit.index], CPU, dtype) for unit in stepped.units]

    def step(order: StepOrder) -> None:
        for unit, resident in zip(stepped.units, residents, strict=True):
            resident.room().copy_(stepped.gradients.units[unit.index])
            resident.step(order, stepped.adam)
            resident.give_back()

    return step


@pytest.mark.parametrize("by", [by_host, by_visits, by_both, by_residents])
@pytest.mark.parametrize("image", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gradients", [torch.float32, torch.bfloat16], ids=str)
def test_ten_steps_are_those_of_torchs_adamw(
    by: Callable[[Stepped], Callable[[StepOrder], None]],
    image: torch.dtype,
    gradients: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(due_steps, "PART", 37)
    units, adam = make_units(), AdamSettings(weight_decay=0.3, beta1=0.8, beta2=0.9)
    stepped = Stepped(units, image, gradients, adam)
    network = nn.ParameterDict(
        {place.name.replace(".", "_"): place.parameter.detach().clone() for unit in units for place in unit.places}
    )
    expected, step = adamw(network, adam), by(stepped)
    for number in range(1, 11):
        scale, rate = 1.0 if number % 3 else 0.37, 1e-2 / number
        made = {place.name: torch.randn(place.parameter.shape).to(gradients) for unit in units for place in unit.places}
        stepped.write(made)
        for name, gradient in made.items():
            network[name.replace(".", "_")].grad = gradient.float() * scale
        for group in expected.param_groups:
            group["lr"] = rate
        expected.step()
        step(StepOrder(number=number, learning_rate=rate, scale=scale))
    for unit in units:
        arrays = stepped.host.units[unit.index]
        for place in unit.places:
            parameter = network[place.name.replace(".", "_")]
            torch.testing.assert_close(place.of(arrays.weights), parameter.detach(), rtol=3e-6, atol=1e-7)
            state = expected.state[parameter]
            torch.testing.assert_close(place.of(arrays.mean), state["exp_avg"], rtol=3e-6, atol=1e-7)
            torch.testing.assert_close(place.of(arrays.square), state["exp_avg_sq"], rtol=3e-6, atol=1e-7)
        torch.testing.assert_close(
            arrays.image.float(), arrays.weights, rtol=2**-8 if image != torch.float32 else 0, atol=0
        )


# -- collecting --------------------------------------------------------------------------------------------------------


def test_gradients_are_packed_added_up_and_measured_and_missing_ones_are_zeros() -> None:
    units = make_units()
    host = HostGradients(units, lambda _: torch.float32, pinned=False)
    for array in host.units:
        array.fill_(torch.nan)
    collector = Collector(units, host, Lanes(CPU), slots=2)
    squared = 0.0
    for unit in units[::-1]:
        collector.begin(unit)
        for _ in range(2):
            for place in unit.places[1:]:
                place.parameter.grad = torch.full(place.parameter.shape, 2.0)
            collector.add(unit)
        assert all(place.parameter.grad is None for place in unit.places)
        collector.end(unit, measured=True)
        assert not place_of(unit, 0, host).any(), "no gradient"
        for place in unit.places[1:]:
            assert (place.of(host.units[unit.index]) == 4).all()
            squared += 16 * place.parameter.numel()
        assert float(host.units[unit.index].square().sum()) == pytest.approx(
            sum(16 * place.parameter.numel() for place in unit.places[1:])
        )
    assert float(collector.norm_squared) == pytest.approx(squared)
    collector.begin(units[1])
    collector.forget()
    assert float(collector.norm_squared) == 0
    for _ in range(3):
        collector.begin(units[1])
        collector.end(units[1], measured=False)


def place_of(unit: Unit, number: int, host: HostGradients) -> Tensor:
    return unit.places[number].of(host.units[unit.index])


# -- loading -----------------------------------------------------------------------------------------------------------


@contextmanager
def loader_of(until_stepped: Callable[[Unit], None] = lambda _: None) -> Iterator[tuple[Loader, HostState]]:
    units = make_units()
    host, size = host_of(units), max(unit.size for unit in units[1:])
    loader = Loader(units, host, Lanes(CPU), until_stepped, slots=2, size=size)
    try:
        yield loader, host
    finally:
        loader.close()


def test_units_come_in_the_order_they_are_wanted_and_no_more_than_there_are_slots() -> None:
    begun: list[int] = []
    with loader_of(lambda unit: begun.append(unit.index)) as (loader, host):
        order = [0, 1, 2, 3, 2, 1, 3, 0]
        loader.expect(order)
        for wanted, unit in enumerate(order):
            found = loader.get(unit)
            assert torch.equal(found[: len(host.units[unit].image)], host.units[unit].image)
            assert len(begun) <= wanted + 3, "two slots, and the edge's own"
            loader.release(unit)
        assert begun == order


def test_a_unit_is_loaded_only_once_it_is_stepped() -> None:
    stepped = threading.Event()

    def wait(unit: Unit) -> None:
        assert unit.index != 2 or stepped.wait(PATIENCE_S)

    with loader_of(wait) as (loader, host):
        loader.expect([1, 2])
        loader.get(1)
        host.units[2].weights.fill_(7.0)
        stepped.set()
        assert (loader.get(2)[: len(host.units[2].weights)] == 7).all()


@pytest.mark.parametrize("rounds", [5])
def test_what_was_on_its_way_when_forgotten_is_not_handed_out(rounds: int) -> None:
    at, go = threading.Semaphore(0), threading.Semaphore(0)
    held = threading.Event()

    def wait(_: Unit) -> None:
        if held.is_set():
            at.release()
            assert go.acquire(timeout=PATIENCE_S)

    with loader_of(wait) as (loader, host):
        for number in range(rounds):
            held.set()
            loader.expect([1, 2, 3])
            assert at.acquire(timeout=PATIENCE_S)
            held.clear()
            loader.forget()  # unit 1 is under way
            go.release()
            host.units[1].weights.fill_(float(number))
            loader.expect([1, 2, 3])
            for unit in (1, 2, 3):
                found = loader.get(unit)
                assert unit != 1 or (found[: len(host.units[1].weights)] == number).all()
                loader.release(unit)


def test_an_error_of_loading_is_raised_where_the_unit_is_asked_for() -> None:
    def fail(_: Unit) -> None:
        raise ValueError("no such luck")

    with loader_of(fail) as (loader, _):
        loader.expect([1])
        with pytest.raises(ValueError, match="no such luck"):
            loader.get(1)


def test_a_closed_loader_hands_out_nothing() -> None:
    with loader_of() as (loader, _):
        loader.close()
        with pytest.raises(TrainError, match="closed"):
            loader.get(1)


# -- background --------------------------------------------------------------------------------------------------------


def test_work_is_done_in_order_and_its_error_is_raised_where_somebody_waits() -> None:
    done: list[int] = []
    told: list[BaseException] = []
    thread = Background("worker", on_failure=told.append)
    for number in range(100):
        thread.give(lambda number=number: done.append(number))
    thread.wait()
    assert done == list(range(100))

    def fail() -> None:
        raise ValueError("enough")

    thread.give(fail)
    for _ in range(2):
        with pytest.raises(ValueError, match="enough"):
            thread.wait()
    with pytest.raises(ValueError, match="enough"):
        thread.give(fail)
    thread.close()
    assert [str(error) for error in told] == ["enough"]


def test_a_closed_thread_takes_no_work() -> None:
    thread = Background("worker")
    thread.give(lambda: None)
    thread.close()
    with pytest.raises(TrainError, match="closed"):
        thread.give(lambda: None)
