"""Workers of an exchange as processes: forked from one that has imported everything, so that a start costs nothing.

Each runs the `penstock` command with an environment of its own. The nursery never uses an object store itself.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import orjson

_CODE = """
import logging, os, signal, sys, traceback
import obstore, obstore.store, orjson, pyarrow.parquet, torch
import penstock.exchange.aggregator, penstock.exchange.miner, penstock.exchange.validator
import penstock.pages.loader, penstock.storage.objects
from penstock import faults
from penstock.cli.main import main
torch.set_num_threads(1)
print("ready", flush=True)
for line in sys.stdin:
    command = orjson.loads(line)
    if "wait" in command:
        pid, status = os.waitpid(command["wait"], os.WNOHANG)
        print(orjson.dumps(os.waitstatus_to_exitcode(status) if pid else None).decode(), flush=True)
        continue
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setsid()
            log = os.open(command["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            for fd in (1, 2):
                os.dup2(log, fd)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.environ.update(command["env"])
            faults.arm()
            if "LOG_ALL" in os.environ:
                logging.basicConfig(level=logging.DEBUG)
            sys.argv = ["penstock", *command["args"]]
            main()
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    print(child, flush=True)
"""


@dataclass
class Worker:
    """A process; it outlives nothing."""

    name: str
    pid: int
    log: Path
    nursery: Nursery
    code: int | None = None

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.wait(30.0)

    def poll(self) -> int | None:
        if self.code is None:
            self.code = self.nursery.asked({"wait": self.pid})
        return self.code

    def wait(self, timeout_s: float) -> int:
        """Its exit code; negative for a signal."""
        deadline = time.monotonic() + timeout_s
        while self.poll() is None:
            assert time.monotonic() < deadline, f"{self.name} did not end within {timeout_s} s:\n{self.told()}"
            time.sleep(0.05)
        assert self.code is not None
        return self.code

    def told(self) -> str:
        return self.log.read_text(errors="replace")[-4000:] if self.log.exists() else ""


@dataclass
class Nursery:
    process: subprocess.Popen[bytes]
    folder: Path
    workers: list[Worker] = field(default_factory=list)

    def asked(self, command: Mapping[str, object]) -> int | None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(orjson.dumps(command) + b"\n")
        self.process.stdin.flush()
        return orjson.loads(self.process.stdout.readline())

    def start(self, name: str, args: Sequence[str], env: Mapping[str, str]) -> Worker:
        """Run `penstock` with these arguments; what it prints goes to a log of that name."""
        log = self.folder / f"{name}.log"
        pid = self.asked({"args": list(args), "env": dict(env), "log": str(log)})
        assert pid is not None
        worker = Worker(name, pid, log, self)
        self.workers.append(worker)
        return worker

    def logs(self) -> str:
        """All that any worker printed."""
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("*.log")))


@contextmanager
def nursery(folder: Path) -> Iterator[Nursery]:
    folder.mkdir(parents=True, exist_ok=True)
    quiet = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", _CODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **quiet}
    )
    assert process.stdin is not None
    assert process.stdout is not None
    made = Nursery(process, folder)
    try:
        assert process.stdout.readline() == b"ready\n"
        yield made
    finally:
        for worker in made.workers:
            if worker.poll() is None:
                worker.kill()
        process.stdin.close()
        process.wait(60)
        process.stdout.close()
