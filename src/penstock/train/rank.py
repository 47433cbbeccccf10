"""A rank that the launcher started: `python -m penstock.train.rank FD`. Ends with it."""

from __future__ import annotations

import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from dataclasses import asdict

from penstock.errors import ConfigError, PenstockError, RankLost
from penstock.train.channel import ORPHANED, Channel, Message, die_with_parent
from penstock.train.events import Event
from penstock.train.stopping import StopRequest

_SIGN_OF_LIFE_S = 0.5


class LauncherLine:
    """The rank's end of the channel: hears the wish to stop, and ends the process with the line."""

    def __init__(self, channel: Channel, stop: StopRequest) -> None:
        self._channel = channel
        self._stop = stop
        self._orders: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._progress = 0
        threading.Thread(target=self._listen, name="launcher", daemon=True).start()
        threading.Thread(target=self._show_life, name="signs of life", daemon=True).start()

    def order(self) -> Message:
        return self._orders.get()

    def send(self, message: Message) -> None:
        self._channel.send(message)

    def on_event(self, event: Event) -> None:
        self.send({"kind": "event", "fields": event})

    def on_progress(self) -> None:
        self._progress += 1

    def _show_life(self) -> None:
        while self._channel.send({"kind": "alive", "progress": self._progress}):
            time.sleep(_SIGN_OF_LIFE_S)

    def _listen(self) -> None:
        while (messages := self._channel.receive()) is not None:
            for message in messages:
                if message["kind"] == "stop":
                    self._stop.set()
                else:
                    self._orders.put(message)
        os._exit(ORPHANED)  # the launcher is gone, and whoever asked for this job with it


def main() -> None:
    """Serve one launcher as one rank.

    Ends at once when all is said: what is committed is durable, and threads of libraries that are still about when the
    interpreter is taken down have been seen to abort a process that had nothing left to do.
    """
    code = _serve()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _serve() -> int:
    die_with_parent()
    stop = StopRequest()
    line = LauncherLine(Channel(socket.socket(fileno=int(sys.argv[1]))), stop)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())  # until the run takes them over
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        # Imported here, so that signs of life and the launcher's end do not wait for torch.
        from penstock.train.config import TrainingConfig
        from penstock.train.run import run_as_rank

        result = run_as_rank(TrainingConfig(**line.order()["config"]), [line], stop, line.on_progress)
    except PenstockError as error:
        lost, refused = isinstance(error, RankLost), isinstance(error, ConfigError)
        line.send({"kind": "failed", "error": str(error), "lost_others": lost, "refused": refused})
        return 1
    except Exception as error:  # noqa: BLE001 - told to the launcher and on stderr, and the end of this process
        traceback.print_exc()
        told = f"{type(error).__name__}: {error}"
        line.send({"kind": "failed", "error": told, "lost_others": False, "refused": False})
        return 1
    if os.environ["RANK"] == "0":
        line.send({"kind": "result", "result": asdict(result)})
    return 0


if __name__ == "__main__":
    main()
