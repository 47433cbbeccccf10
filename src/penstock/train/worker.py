"""A worker process: `python -m penstock.train.worker FD`, started by the supervisor and ending with it."""

from __future__ import annotations

import os
import queue
import signal
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING

from penstock.errors import PenstockError
from penstock.train.channel import ORPHANED, Channel, Message, WorkerOrder, die_with_parent
from penstock.train.events import Event, Events

if TYPE_CHECKING:
    from penstock.ledger import Session
    from penstock.train.parts import RunParts
    from penstock.train.trainer import Trainer

_SIGN_OF_LIFE_S = 0.5


class SupervisorLine:
    """The worker's end of the channel: keeps answers until they are asked for, and ends the process with the line."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._round = self._called_round = 0
        self._answers: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._progress = 0
        threading.Thread(target=self._listen, name="supervisor", daemon=True).start()
        threading.Thread(target=self._show_life, name="signs of life", daemon=True).start()

    def is_called(self) -> bool:
        """Whether the supervisor wants this worker at the boundary."""
        return self._called_round >= self._round > 0

    def order(self) -> WorkerOrder:
        """What this worker is started with."""
        return WorkerOrder(**self._answers.get()["order"])

    def answer(self) -> Message:
        """The answer at a boundary, which begins the next round; the supervisor's death ends the wait, and all."""
        answer = self._answers.get()
        self._round = answer.get("round", self._round)  # a call that came right behind it is to this round, and stands
        return answer

    def send(self, message: Message) -> None:
        self._channel.send(message)

    def note_progress(self) -> None:
        """The main thread came past a step."""
        self._progress += 1

    def on_event(self, event: Event) -> None:
        self.send({"kind": "event", "fields": event})

    def _show_life(self) -> None:
        while self._channel.send({"kind": "alive", "progress": self._progress}):
            time.sleep(_SIGN_OF_LIFE_S)

    def _listen(self) -> None:
        while (messages := self._channel.receive()) is not None:
            for message in messages:
                if message["kind"] == "meet":
                    self._called_round = message["round"]
                else:
                    self._answers.put(message)
        os._exit(ORPHANED)  # the supervisor is gone: nobody would ever merge or commit this replica


class MeetSupervisor:
    """The boundary of one worker among several: hand in the replica, take up what was made of all."""

    def __init__(self, line: SupervisorLine, parts: RunParts) -> None:
        self._line = line
        self._parts = parts

    def stop_requested(self) -> bool:
        self._line.note_progress()
        return False  # the supervisor ends a run at a boundary, to which it calls

    def is_due(self) -> bool:
        return self._line.is_called()

    def meet(self, trainer: Trainer, session: Session) -> bool:
        return self._exchange(trainer, session, self._parts.submit(session, trainer.state()))

    def rejoin(self, trainer: Trainer, session: Session) -> bool:
        return self._exchange(trainer, session, "")

    def _exchange(self, trainer: Trainer, session: Session, key: str) -> bool:
        self._line.send({"kind": "submitted", "session": session.session_id, "state": key})
        return self._take_up(trainer) is not None

    def enter(self, trainer: Trainer) -> int | None:
        """Ask to take part, and take up the state that this round began with: its steps. None where the run is over."""
        self._line.send({"kind": "ready"})
        return self._take_up(trainer)

    def _take_up(self, trainer: Trainer) -> int | None:
        answer = self._line.answer()
        if answer["kind"] == "end":
            return None
        trainer.load_state(self._parts.checkpoints.read(answer["checkpoint_id"], answer["digest"]))
        return int(answer["checkpoint_id"])


def main() -> None:
    """Serve one supervisor until it says that the run is over."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # these reach the whole group; the supervisor decides
    die_with_parent()
    line = SupervisorLine(Channel(socket.socket(fileno=int(sys.argv[1]))))
    try:
        _work(line, line.order())
    except PenstockError as error:
        line.send({"kind": "failed", "error": str(error)})
        sys.exit(1)
    except Exception as error:
        line.send({"kind": "failed", "error": f"{type(error).__name__}: {error}"})
        raise


def _work(line: SupervisorLine, order: WorkerOrder) -> None:
    # Imported here, so that signs of life and the parent's end do not wait for torch.
    import torch

    from penstock.storage import open_storage
    from penstock.train.parts import RunParts
    from penstock.train.replica import Replica

    parts = RunParts(open_storage(order.run_dir), order.ledger)
    parts.limit_threads(order.workers)
    trainer, boundary = parts.trainer(torch.device(order.device)), MeetSupervisor(line, parts)
    begun_at = boundary.enter(trainer)
    if begun_at is None:
        return
    events = Events([line], order.generation)
    Replica(
        worker=order.worker,
        generation=order.generation,
        config=parts.config,
        ledger=parts.ledger,
        staging=parts.staging(trainer.device),
        trainer=trainer,
        boundary=boundary,
        events=events,
        # One of them is enough, and the others go on meanwhile.
        evaluation=parts.evaluation(events, begun_at) if order.worker == "worker-0" else None,
    ).run()


if __name__ == "__main__":
    main()
