"""Acts to be killed in: one ledger operation, or a whole run, in a process of its own."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from equipment.processes import pickled, python
from ledger.clocked import SqliteStage
from ledger.stage import TIMEOUT_S, claim, learn, learn_all, whole
from penstock.errors import LedgerError
from penstock.ledger import Lease, Ledger, Progress, Session, SkipRange
from penstock.types import ChunkRef


def command(function: Callable[..., object], *args: object) -> list[str]:
    """A command that calls a function of an importable module."""
    return python(_CALL, pickled((function, args)))


_CALL = """
import pickle, sys
function, args = pickle.loads(bytes.fromhex(sys.argv[1]))
function(*args)
"""


@dataclass(frozen=True, slots=True)
class Scene:
    """A ledger with a history, closed, and who acts in it."""

    ledger: Ledger
    session: Session
    lease: Lease
    """Held by the session, half of it recorded."""


def set_scene(path: Path, *, end_of_epoch: bool = False) -> Scene:
    """A ledger in the middle of an epoch: a commit, a worker with chunks trained and in hand, and a silent one."""
    stage = SqliteStage(path)
    ledger = stage.open()
    generation = ledger.restore(None)
    silent = ledger.join("silent", generation=generation)
    stage.clock.now += TIMEOUT_S / 2
    session = ledger.join("worker", generation=generation)
    learn(ledger, session)
    ledger.commit("a", "digest", [session.session_id])
    if end_of_epoch:
        lease = claim(ledger, session)[0]
        ledger.complete(lease, whole(lease))
        learn_all(ledger, session)
        ledger.commit("b", "digest", [session.session_id])
    else:
        claim(ledger, silent)
        learn(ledger, session)
        lease = claim(ledger, session)[0]
        stage.clock.now += TIMEOUT_S / 2
    ledger.close()
    return Scene(ledger, session, lease)


ACTS: dict[str, Callable[[Scene], object]] = {
    "join": lambda scene: scene.ledger.join("new", generation=1),
    "heartbeat": lambda scene: scene.ledger.heartbeat(scene.session),
    "leave": lambda scene: scene.ledger.leave(scene.session),
    "fence_silent": lambda scene: scene.ledger.fence_silent(),
    "claim": lambda scene: scene.ledger.claim(scene.session, 2),
    "record": lambda scene: scene.ledger.record(scene.lease, Progress(samples=1, offset=1, steps=1)),
    "complete": lambda scene: scene.ledger.complete(scene.lease, whole(scene.lease)),
    "take_step": lambda scene: scene.ledger.take_step(scene.session, 9),
    "commit": lambda scene: scene.ledger.commit("c", "digest", [scene.session.session_id]),
    "restore": lambda scene: scene.ledger.restore("a"),
    "advance_epoch": lambda scene: scene.ledger.advance_epoch(0),
    "prioritise": lambda scene: scene.ledger.prioritise({ChunkRef(1, 0): 1.0}),
    "exclude": lambda scene: scene.ledger.exclude([SkipRange(block_id=1, start=1, stop=4)], "noise"),
}
"""Every operation that writes; creating a ledger is the one that needs no scene."""


def act(name: str, scene: Scene) -> object:
    return ACTS[name](scene)


def create(ledger: Ledger) -> None:
    ledger.open()


def train(ledger: Ledger, folder: Path) -> None:
    """A run from its last commit to the end of its epoch; a checkpoint is the list of the samples it has learned."""
    ledger.open()
    last = ledger.last_commit()
    learned: list[list[int]] = json.loads((folder / last.checkpoint_id).read_text()) if last else []
    generation = ledger.restore(last.checkpoint_id if last else None)
    session = ledger.join("worker", generation=generation)
    while isinstance(claimed := ledger.claim(session, 2), list):
        for lease in claimed:
            half = lease.start + (lease.samples - lease.start) // 2
            learned += _samples(lease, lease.start, half)
            ledger.record(lease, Progress(samples=half, offset=half, steps=1))
            if half % 2:
                _commit(ledger, folder, session, learned)
            learned += _samples(lease, half, lease.samples)
            ledger.complete(lease, whole(lease))
        _commit(ledger, folder, session, learned)


def fill(ledger: Ledger, session: Session, limit_bytes: int) -> None:
    """Claim and complete until no file may grow further; prints how much was completed and what the ledger said."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
    completed = 0
    try:
        while True:
            lease = claim(ledger, session)[0]
            ledger.complete(lease, whole(lease))
            completed += 1
    except LedgerError as error:
        sys.stdout.write(f"{completed}\n{error}\n")


def _samples(lease: Lease, start: int, stop: int) -> list[list[int]]:
    return [[lease.ref.block_id, lease.ref.chunk_id, place] for place in range(start, stop)]


def _commit(ledger: Ledger, folder: Path, session: Session, learned: list[list[int]]) -> None:
    checkpoint_id = f"{session.session_id}-{len(learned)}"
    (folder / checkpoint_id).write_text(json.dumps(learned))
    ledger.commit(checkpoint_id, "digest", [session.session_id])
