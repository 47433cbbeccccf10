"""Every named fault point on the way is killed once; the resumed run has learned every sample exactly once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from equipment.training import assert_learned_exactly, counting_config, train_in_process, weights
from penstock import faults
from penstock.train.config import TrainingConfig


@dataclass(frozen=True)
class Kill:
    """A place to die at: the nth hit of a fault point whose subject matches a pattern."""

    point: str
    pattern: str
    nth: int


def trace_of(config: TrainingConfig, folder: Path) -> list[tuple[str, str]]:
    trace = folder / f"trace of {Path(config.run_dir).name}"
    assert train_in_process(config, {"PENSTOCK_FAULT_TRACE": str(trace)}) == 0
    hits = (line.split("\t") for line in trace.read_text(encoding="utf-8").splitlines())
    return [(point, subject) for point, subject in hits]


def kinds(hits: list[tuple[str, str]], workers: int = 1) -> Iterator[Kill]:
    """One kill for the first and one for a later hit of every kind; numbers in names do not make a kind.

    The later one is half way through the hits of the worker that has most, however they were shared out.
    """
    grouped: dict[tuple[str, str], int] = {}
    for point, subject in hits:
        kind = (point, re.sub(r"\d+", "*", subject))
        grouped[kind] = grouped.get(kind, 0) + 1
    for (point, pattern), count in sorted(grouped.items()):
        yield Kill(point, pattern, 1)
        if count > 2 * workers:
            yield Kill(point, pattern, count // (2 * workers) + 1)


def kill_and_resume(kill: Kill, config: TrainingConfig, once: Path) -> None:
    """Kill one process of a run there, resume until it ends, and ask the weights."""
    environment = {"PENSTOCK_FAULT": f"{kill.point}|{kill.pattern}|{kill.nth}", "PENSTOCK_FAULT_ONCE": str(once)}
    train_in_process(config, environment)
    assert train_in_process(config) == 0
    assert_learned_exactly(Path(config.run_dir))


@pytest.mark.timeout(600)
def test_killed_at_every_fault_point_one_worker_learns_every_sample_once(store: Path, tmp_path: Path) -> None:
    hits = trace_of(counting_config(store, tmp_path / "clean"), tmp_path)
    assert {point for point, _ in hits} == {point for point in faults.POINTS if not point.startswith("exchange.")}, (
        "a declared point is not on the way"
    )
    kills = list(kinds(hits))

    def attempt(place: int) -> None:
        once = tmp_path / f"once-{place}"
        kill_and_resume(kills[place], counting_config(store, tmp_path / f"run-{place}"), once)
        assert once.exists(), f"{kills[place]} was never reached"

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(attempt, range(len(kills))))


@pytest.mark.timeout(600)
def test_killed_at_every_fault_point_two_workers_learn_every_sample_once(store: Path, tmp_path: Path) -> None:
    together = {"parallel_independent": True, "workers": 2}
    alone = set(trace_of(counting_config(store, tmp_path / "alone"), tmp_path))
    hits = trace_of(counting_config(store, tmp_path / "clean", **together), tmp_path)
    known = {(point, re.sub(r"\d+", "*", subject)) for point, subject in alone}
    shared = re.compile(r"(claim|complete|take_step|commit|leave|join|replicas/.*|checkpoints/.*/checkpoint.json|)")
    kills = [
        kill
        for kill in kinds(hits, workers=2)
        if (kill.point, kill.pattern) not in known or (shared.fullmatch(kill.pattern) and kill.nth > 1)
    ]
    assert len(kills) > 20, kills

    def attempt(place: int) -> None:
        once = tmp_path / f"once-{place}"
        kill_and_resume(kills[place], counting_config(store, tmp_path / f"run-{place}", **together), once)
        assert once.exists(), f"{kills[place]} was never reached"

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(attempt, range(len(kills))))


@pytest.mark.timeout(300)
def test_one_worker_killed_and_resumed_ends_with_the_same_bits(store: Path, tmp_path: Path) -> None:
    def config(name: str) -> TrainingConfig:
        return counting_config(store, tmp_path / name, model="tiny", merge="mean")

    assert train_in_process(config("whole")) == 0
    expected = weights(tmp_path / "whole")
    for place, point in enumerate(("train.after_step", "train.before_checkpoint", "train.before_commit")):
        name = f"killed-{place}"
        fault = {"PENSTOCK_FAULT": f"{point}|*|3", "PENSTOCK_FAULT_ONCE": str(tmp_path / f"once-{place}")}
        assert train_in_process(config(name), fault) == -9
        assert train_in_process(config(name)) == 0
        found = weights(tmp_path / name)
        assert found.keys() == expected.keys()
        assert all(found[key].equal(expected[key]) for key in expected), f"killed at {point}"
