"""Starting the ranks of a job on this machine: one process each, which meet as under torchrun; ends them together.

The launcher trains nothing and holds nothing. Rank 0 has the run's folder; what it tells goes through to the hooks. A
rank that dies, falls silent or hangs ends the job: the others are killed, and the job is begun again from its last
commit as often as `respawn` says.
"""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Iterable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] - documented

from penstock.errors import TrainError
from penstock.train.channel import Message
from penstock.train.config import TrainingConfig
from penstock.train.devices import choose_devices
from penstock.train.events import Events, Hook
from penstock.train.processes import WorkerProcess, start_process
from penstock.train.result import RunResult
from penstock.train.stopping import SignalsStop, StopRequest

_POLL_S = 0.1
_LAST_WORDS_S = 2.0
"""How long the other ranks are heard once one has ended: the first to fall need not be the one that failed."""
_GOODBYE_S = 30.0


def launch_ranks(config: TrainingConfig, hooks: Iterable[Hook], stop: StopRequest) -> RunResult:
    """Train with as many ranks on this machine as there are devices, or workers wanted."""
    hooks, respawns = list(hooks), config.respawn
    with SignalsStop(stop):
        while True:
            launcher = Launcher(config, hooks, stop)
            result = launcher.run()
            if result is not None:
                return result
            if respawns < 1 or stop.requested() or not launcher.has_begun:
                raise TrainError(launcher.epitaph)
            respawns -= 1


class Launcher:
    """One start of all ranks, to their end."""

    def __init__(self, config: TrainingConfig, hooks: list[Hook], stop: StopRequest) -> None:
        self._config = config
        self._world = len(choose_devices(config))
        self._events = Events(hooks, 0)
        self._stop = stop
        self._ranks: list[WorkerProcess] = []
        self._selector = selectors.DefaultSelector()
        self._result: RunResult | None = None
        self._told_to_stop = False
        self._ended: list[WorkerProcess] = []
        self.has_begun = False

    def run(self) -> RunResult | None:
        """The result; None where a rank was lost."""
        # Its port is chosen by the system, and it outlives every rank: none has to find a free one, or be first.
        timeout = timedelta(seconds=self._config.rank_timeout_s)
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
        try:
            for rank in range(self._world):
                self._start(rank, store.port)
            while self._ranks and not self._has_failed:
                self._listen(_POLL_S)
                self._pass_on_the_stop()
                self._kill_hung_ranks()
            deadline = time.monotonic() + (_LAST_WORDS_S if self._has_failed else _GOODBYE_S)
            while self._ranks and time.monotonic() < deadline:
                self._listen(_POLL_S)
            return None if self._has_failed else self._result
        finally:
            for rank in self._ranks:
                rank.process.kill()
                rank.process.wait()
            self._selector.close()

    @property
    def _has_failed(self) -> bool:
        return any(rank.process.returncode or rank.error for rank in self._ended)

    @property
    def epitaph(self) -> str:
        """What became of the ranks: the one that failed, else the first that fell."""
        told = [rank for rank in self._ended if rank.process.returncode or rank.error]
        cause = next((rank for rank in told if not rank.lost_others), told[0])
        if cause.refused:
            return cause.error
        how = cause.error or cause.how_it_ended
        return (
            f"{cause.name} of {self._world} (pid {cause.process.pid}) has ended ({how}), and with it the job: "
            "run the same command again to resume from the last commit; nothing committed is lost"
        )

    def _start(self, rank: int, port: int) -> None:
        world = str(self._world)
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": world,
            "LOCAL_WORLD_SIZE": world,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        if Path("/sys/class/net/lo").exists():
            environment["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
        process = start_process(f"rank {rank}", "penstock.train.rank", environment)
        self._ranks.append(process)
        self._selector.register(process.channel, selectors.EVENT_READ, process)
        process.channel.send({"kind": "order", "config": asdict(self._config)})

    def _listen(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            rank: WorkerProcess = key.data
            messages = rank.channel.receive()
            if messages is None:
                self._bury(rank)
                continue
            rank.heard_at = time.monotonic()
            for message in messages:
                self._hear(rank, message)

    def _hear(self, rank: WorkerProcess, message: Message) -> None:
        kind = message["kind"]
        if kind == "event":
            self.has_begun = True
            self._events.forward(message["fields"])
        elif kind == "alive":
            rank.note_progress(message["progress"])
        elif kind == "result":
            self._result = RunResult(**message["result"])
        elif kind == "failed":
            rank.error, rank.lost_others = message["error"], message["lost_others"]
            rank.refused = message["refused"]

    def _bury(self, rank: WorkerProcess) -> None:
        self._selector.unregister(rank.channel)
        rank.channel.close()
        rank.process.wait()
        self._ranks.remove(rank)
        self._ended.append(rank)

    def _pass_on_the_stop(self) -> None:
        if self._stop.requested() and not self._told_to_stop:
            self._told_to_stop = True
            for rank in self._ranks:
                rank.channel.send({"kind": "stop"})

    def _kill_hung_ranks(self) -> None:
        for rank in self._ranks:
            if not self.has_begun:
                rank.moved_at = time.monotonic()  # making blocks or a tokenizer may take hours, and is no step
            rank.kill_if_hung(silence_s=self._config.rank_timeout_s, stall_s=self._config.stall_timeout_s)
