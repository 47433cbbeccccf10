"""Several workers, each with its own replica: starts them, merges what they hand in, commits, goes on without the dead.

A round ends when every living worker has handed in its replica. Then the replicas become one state, that state and the
chunks behind it are committed, and every worker takes it up. A worker that dies before its round is committed takes
nothing with it: its chunks come back and somebody else learns them in the next round.
"""

from __future__ import annotations

import selectors
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from penstock.errors import LeaseLost, TrainError
from penstock.ledger import Commit, Session
from penstock.train.alone import tell_commit
from penstock.train.channel import Channel, Message, WorkerOrder, channel_pair
from penstock.train.committing import Committer, StopReason
from penstock.train.events import Events
from penstock.train.parts import RunParts
from penstock.train.stopping import StopRequest
from penstock.train.trainer import State, merge

_POLL_S = 0.2
_START_S = 300.0
"""How long a worker may take to load its libraries and join."""
_GOODBYE_S = 30.0


@dataclass(slots=True, eq=False)
class Worker:
    """A worker process as the supervisor sees it."""

    name: str
    process: subprocess.Popen[bytes]
    channel: Channel
    session: int = 0
    """Its session in the ledger; 0 until it has joined."""
    submitted: str | None = None
    """Key of the replica it handed in for this round; empty where it has nothing to hand in."""
    heard_at: float = field(default_factory=time.monotonic)
    """When it last gave a sign of life."""
    error: str = ""


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
        self._selector = selectors.DefaultSelector()
        self._called = False
        self._met_at = time.monotonic()
        self._last_words = "none was started"
        self.reason: StopReason | None = None

    def run(self) -> None:
        try:
            for index in range(len(self._devices)):
                self._start(index)
            while self.reason is None:
                self._listen()
                if self._is_round_over() and not self._called:
                    self._called = True
                    self._tell_all({"kind": "meet"})
                if not self._workers:
                    if not self._stop.requested():
                        raise TrainError(self._epitaph)
                    self.reason = "signal"
                    break
                self._kill_silent_workers()
                if all(worker.submitted is not None for worker in self._workers):
                    self._end_round()
            self._dismiss()
        finally:
            for worker in self._workers:
                worker.process.kill()
                worker.process.wait()
            self._selector.close()
            self._parts.drop_submitted()

    # -- workers -------------------------------------------------------------------------------------------------------

    def _start(self, index: int) -> None:
        channel, theirs = channel_pair()
        name = f"worker-{index}"
        # Stop signals reach the whole group. A worker is born deaf to them: the supervisor decides when it stops.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-m", "penstock.train.worker", str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        worker = Worker(name, process, channel)
        self._workers.append(worker)
        self._selector.register(channel, selectors.EVENT_READ, worker)
        order = WorkerOrder(
            run_dir=str(Path(self._parts.storage.url).resolve()),
            worker=name,
            workers=len(self._devices),
            device=self._devices[index % len(self._devices)],
            generation=self._events.generation,
            checkpoint_id=self._commit.checkpoint_id,
            digest=self._commit.digest,
            ledger=self._parts.ledger_url,
        )
        channel.send({"kind": "order", "order": asdict(order)})

    def _listen(self) -> None:
        for key, _ in self._selector.select(_POLL_S):
            worker: Worker = key.data
            messages = worker.channel.receive()
            if messages is None:
                self._bury(worker)
            else:
                worker.heard_at = time.monotonic()
                for message in messages:
                    self._hear(worker, message)

    def _hear(self, worker: Worker, message: Message) -> None:
        kind = message["kind"]
        if kind == "event":
            event = message["fields"]
            if event["event"] == "worker_started":
                worker.session = event["session"]
            self._events.forward(event)
        elif kind == "submitted":
            worker.session = message["session"]
            worker.submitted = message["state"]
        elif kind == "failed":
            worker.error = message["error"]

    def _bury(self, worker: Worker) -> None:
        """A worker is dead: its chunks go back at once."""
        self._selector.unregister(worker.channel)
        worker.channel.close()
        code = worker.process.wait()
        self._workers.remove(worker)
        if worker.session:
            generation = self._events.generation
            session = Session(session_id=worker.session, worker=worker.name, generation=generation)
            self._committer.ledger.leave(session)
        how = worker.error or (f"killed by signal {-code}" if code < 0 else f"exit code {code}")
        self._last_words = f"{worker.name}: {how}"
        self._events.emit("worker_lost", worker=worker.name, session=worker.session, pid=worker.process.pid, reason=how)

    @property
    def _epitaph(self) -> str:
        return (
            f"no worker is left ({self._last_words}): run the same command again to resume from checkpoint "
            f"{self._commit.checkpoint_id}; nothing committed is lost"
        )

    def _kill_silent_workers(self) -> None:
        """A worker that is stopped must not hold up the round for ever, nor a lock it may have in its hands."""
        now = time.monotonic()
        for worker in self._workers:
            patience = self._parts.config.session_timeout_s if worker.session else _START_S
            if now - worker.heard_at > patience:
                worker.error = f"silent for {patience:.0f} s, killed"
                worker.process.kill()
                worker.heard_at = now  # its end of file is on the way

    def _tell_all(self, message: Message) -> None:
        for worker in self._workers:
            worker.channel.send(message)

    # -- rounds --------------------------------------------------------------------------------------------------------

    def _is_round_over(self) -> bool:
        """Whether workers are to hand in what they have, though there are chunks left in the round."""
        long_ago = time.monotonic() - self._met_at >= self._parts.config.commit_every_s
        return self._stop.requested() or long_ago

    def _end_round(self) -> None:
        """Everybody has handed in: make one state of it, commit it, and send everybody on with it."""
        if not self._commit_round() and not self._stop.requested():
            self._stop.wait(_POLL_S)  # nothing was trained: more blocks are on their way, or chunks come back soon
        self.reason = self._committer.stop_reason(stop_requested=self._stop.requested())
        if self.reason is not None:
            return
        self._called, self._met_at = False, time.monotonic()
        answer = {"kind": "go_on", "checkpoint_id": self._commit.checkpoint_id, "digest": self._commit.digest}
        for worker in self._workers:
            worker.submitted = None
            worker.channel.send(answer)

    def _commit_round(self) -> bool:
        """Merge and commit the replicas that have learned something; False where none has."""
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
            state = merge(self._base, replicas, self._parts.config.merge)
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
                worker.process.wait(timeout=max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.process.kill()
