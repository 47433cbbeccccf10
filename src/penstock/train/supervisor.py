"""Several workers, each with its own replica: starts them, merges what they hand in, commits, goes on without the dead.

A round begins with the last commit. Whoever has its state takes part, also one that comes in the middle of a round, and
the round ends when every living one of these has handed in its replica. Then the replicas become one state, that state
and the chunks behind it are committed, and every worker takes it up. A worker that dies before its round is committed
takes nothing with it: its chunks come back and somebody else learns them.
"""

from __future__ import annotations

import logging
import selectors
import subprocess
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from penstock.errors import LeaseLost, LedgerError, TrainError
from penstock.ledger import Commit, Session
from penstock.train.alone import tell_commit
from penstock.train.channel import Message, WorkerOrder
from penstock.train.committing import Committer, StopReason
from penstock.train.events import Events
from penstock.train.joining import JoinRequests
from penstock.train.outer import outer_step
from penstock.train.parts import RunParts
from penstock.train.processes import WorkerProcess, start_process
from penstock.train.stopping import StopRequest
from penstock.train.trainer import State, merge

_log = logging.getLogger(__name__)

_POLL_S = 0.2
_START_S = 300.0
"""How long a worker may take to load its libraries."""
_GOODBYE_S = 30.0


@dataclass(slots=True, eq=False)
class Worker:
    """A worker as the supervisor sees it."""

    index: int
    run: WorkerProcess
    is_late: bool
    """Whether it came when the others had begun."""
    ready: bool = False
    """It can begin as soon as it is told where."""
    admitted: bool = False
    """It was told: it has the state of this round, and the round waits for it."""
    session: int = 0
    """Its session in the ledger; 0 until it has joined."""
    submitted: str | None = None
    """Key of the replica it handed in for this round; empty where it has nothing to hand in."""

    @property
    def name(self) -> str:
        return self.run.name


class Supervisor:
    """Runs a parallel-independent training to its end."""

    def __init__(
        self,
        parts: RunParts,
        committer: Committer,
        events: Events,
        stop: StopRequest,
        *,
        base: State,
        commit: Commit,
        devices: list[str],
    ) -> None:
        self._parts = parts
        self._devices = devices
        self._committer = committer
        self._events = events
        self._stop = stop
        self._base = base
        self._commit = commit
        self._workers: list[Worker] = []
        self._started = 0
        self._respawns_left = parts.config.respawn
        self._joins = JoinRequests(Path(parts.storage.url))
        self._selector = selectors.DefaultSelector()
        self._burials: list[threading.Thread] = []
        self._round = 1
        self._called = False
        self._met_at = time.monotonic()
        self._last_words = "none was started"
        self.reason: StopReason | None = None

    def run(self) -> None:
        try:
            for _ in self._devices:
                self._start(self._started, is_late=False)
            while self.reason is None:
                self._listen()
                if not self._workers and not self._stop.requested():
                    raise TrainError(self._epitaph)
                for _ in range(self._joins.take()):
                    self._start(self._started, is_late=True)
                self._admit()
                self._call_if_due()
                self._kill_hung_workers()
                self._end_round_if_all_are_there()
            self._dismiss()
        finally:
            for worker in self._workers:
                worker.run.process.kill()
                worker.run.process.wait()
            self._selector.close()
            for burial in self._burials:
                burial.join(_GOODBYE_S)
            self._parts.drop_submitted()

    # -- workers -------------------------------------------------------------------------------------------------------

    def _start(self, index: int, *, is_late: bool) -> None:
        worker = Worker(index, start_process(f"worker-{index}", "penstock.train.worker"), is_late)
        self._started = max(self._started, index + 1)
        self._workers.append(worker)
        self._selector.register(worker.run.channel, selectors.EVENT_READ, worker)
        order = WorkerOrder(
            run_dir=str(Path(self._parts.storage.url).resolve()),
            worker=worker.name,
            workers=len(self._devices),
            device=self._devices[index % len(self._devices)],
            generation=self._events.generation,
            ledger=self._parts.ledger_url,
        )
        worker.run.channel.send({"kind": "order", "order": asdict(order)})

    def _admit(self) -> None:
        """Give those that are ready the state of this round. The first ones begin together, so that none is far behind
        before it has begun; once a round is called to its end, a new one waits for the next."""
        starting = [worker for worker in self._workers if not worker.is_late and not worker.ready]
        if starting or self._called:
            return
        for worker in self._workers:
            if worker.ready and not worker.admitted:
                worker.admitted = True
                worker.run.channel.send(self._answer)

    @property
    def _answer(self) -> Message:
        commit = self._commit
        return {"kind": "go_on", "round": self._round, "checkpoint_id": commit.checkpoint_id, "digest": commit.digest}

    def _listen(self) -> None:
        for key, _ in self._selector.select(_POLL_S):
            worker: Worker = key.data
            messages = worker.run.channel.receive()
            if messages is None:
                self._bury(worker)
            else:
                worker.run.heard_at = time.monotonic()
                for message in messages:
                    self._hear(worker, message)

    def _hear(self, worker: Worker, message: Message) -> None:
        kind = message["kind"]
        if kind == "event":
            event = message["fields"]
            if event["event"] == "worker_started":
                worker.session = event["session"]
            self._events.forward(event)
        elif kind == "ready":
            worker.ready = True
        elif kind == "alive":
            worker.run.note_progress(message["progress"])
        elif kind == "submitted":
            worker.session = message["session"]
            worker.submitted = message["state"]
        elif kind == "failed":
            worker.run.error = message["error"]

    def _bury(self, worker: Worker) -> None:
        """A worker is dead: its chunks go back at once, and by choice another takes its place."""
        self._selector.unregister(worker.run.channel)
        worker.run.channel.close()
        worker.run.process.wait()
        self._workers.remove(worker)
        how = worker.run.error or worker.run.how_it_ended
        self._last_words = f"{worker.name}: {how}"
        if worker.session:
            # In a thread: another worker may be stopped with the ledger's lock in its hands, and is yet to be killed.
            generation = self._events.generation
            session = Session(session_id=worker.session, worker=worker.name, generation=generation)
            burial = threading.Thread(target=self._give_back, args=(session,), name="give back", daemon=True)
            self._burials = [other for other in self._burials if other.is_alive()] + [burial]
            burial.start()
        pid = worker.run.process.pid
        self._events.emit("worker_lost", worker=worker.name, session=worker.session, pid=pid, reason=how)
        if self._respawns_left and not self._stop.requested():
            self._respawns_left -= 1
            self._start(worker.index, is_late=True)

    def _give_back(self, session: Session) -> None:
        try:
            self._committer.ledger.leave(session)
        except LedgerError as error:
            _log.warning("chunks of %s come back when its time is over: %s", session.worker, error)
        finally:
            self._committer.ledger.close()

    @property
    def _epitaph(self) -> str:
        return (
            f"no worker is left ({self._last_words}): run the same command again to resume from checkpoint "
            f"{self._commit.checkpoint_id}; nothing committed is lost"
        )

    def _kill_hung_workers(self) -> None:
        """A worker that is stopped must not hold up the round for ever, nor a lock it may have in its hands."""
        config = self._parts.config
        for worker in self._workers:
            if not worker.admitted or worker.submitted is not None:
                worker.run.moved_at = time.monotonic()  # it waits for us
            patience = config.session_timeout_s if worker.session else _START_S
            worker.run.kill_if_hung(silence_s=patience, stall_s=config.stall_timeout_s)

    def _tell_all(self, message: Message) -> None:
        for worker in self._workers:
            worker.run.channel.send(message)

    # -- rounds --------------------------------------------------------------------------------------------------------

    def _call_if_due(self) -> None:
        """Have workers hand in what they have, though there are chunks left in the round."""
        long_ago = time.monotonic() - self._met_at >= self._parts.config.commit_every_s
        if not self._called and (self._stop.requested() or long_ago):
            self._called = True
            self._tell_all({"kind": "meet", "round": self._round})

    def _end_round_if_all_are_there(self) -> None:
        """Once everybody has handed in: make one state of it, commit it, and send everybody on with it."""
        taking_part = [worker for worker in self._workers if worker.admitted]
        if any(worker.submitted is None for worker in taking_part):
            return
        if not taking_part and not self._stop.requested():
            self._called, self._met_at = False, time.monotonic()  # whoever is on the way begins this round
            return
        if not self._commit_round() and not self._stop.requested():
            self._stop.wait(_POLL_S)  # nothing was trained: more blocks are on their way, or chunks come back soon
        self.reason = self._committer.stop_reason(stop_requested=self._stop.requested_by())
        if self.reason is not None:
            return
        self._round += 1
        self._called, self._met_at = False, time.monotonic()
        for worker in taking_part:
            worker.submitted = None
            worker.run.channel.send(self._answer)

    def _commit_round(self) -> bool:
        """Merge and commit the replicas that have learned something; False where none has."""
        config = self._parts.config
        while True:
            handed_in = {worker.session: worker for worker in self._workers if worker.submitted}
            work = [done for done in self._committer.ledger.pending() if done.session_id in handed_in and done.steps]
            if not work:
                return False
            began = time.perf_counter()
            replicas = [
                (float(max(done.samples, 1)), self._parts.submitted(handed_in[done.session_id].submitted or ""))
                for done in work
            ]
            merged = merge(self._base, replicas, config.merge)
            state = outer_step(
                self._base, merged, learning_rate=config.outer_learning_rate, momentum=config.outer_momentum
            )
            try:
                commit = self._committer.commit(state, [done.session_id for done in work])
            except LeaseLost:
                continue  # somebody was fenced meanwhile: merge again without it
            self._base, self._commit = state, commit
            tell_commit(self._events, commit, sum(done.samples for done in work), [done.worker for done in work], began)
            return True

    def _dismiss(self) -> None:
        """The run is over: let the workers go, and do not wait for ever."""
        self._tell_all({"kind": "end"})
        deadline = time.monotonic() + _GOODBYE_S
        for worker in self._workers:
            try:
                worker.run.process.wait(timeout=max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.run.process.kill()
