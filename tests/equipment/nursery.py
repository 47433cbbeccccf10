"""A process that has imported everything and forks one for each ingest: a kill then costs no start of an interpreter.

It never uses an object store itself, so that its children may.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import orjson

_CODE = """
import os, sys, traceback
import obstore, obstore.store, orjson
import penstock.sources.remote, penstock.storage.objects, pyarrow.parquet
from penstock import faults
from penstock.blocks import ingest
print("ready", flush=True)
for line in sys.stdin:
    source, dest, options, env = orjson.loads(line)
    child = os.fork()
    if child == 0:
        os.environ.update(env)
        faults.arm()
        try:
            ingest(source, dest, **options)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    print(child, flush=True)
    print(os.waitpid(child, 0)[1], flush=True)
"""


@dataclass(slots=True)
class Nursery:
    process: subprocess.Popen[bytes]

    def ingest(
        self,
        source: str,
        dest: str,
        *,
        kill_after_s: float | None = None,
        env: Mapping[str, str] | None = None,
        **options: object,
    ) -> int:
        """Ingest in a process of its own, killed after so long; returns its exit code, negative for a signal."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(orjson.dumps([source, dest, options, dict(env or {})]) + b"\n")
        self.process.stdin.flush()
        child = int(self.process.stdout.readline())
        if kill_after_s is not None:
            time.sleep(kill_after_s)
            with suppress(ProcessLookupError):  # it was through already
                os.kill(child, signal.SIGKILL)
        return os.waitstatus_to_exitcode(int(self.process.stdout.readline()))


@contextmanager
def nursery(env: Mapping[str, str]) -> Iterator[Nursery]:
    """A nursery whose children have `env` added to the environment."""
    process = subprocess.Popen(
        [sys.executable, "-c", _CODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **env}
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"ready\n"
        yield Nursery(process)
    finally:
        process.stdin.close()
        process.wait(60)
        process.stdout.close()
