"""A data set repository of the Hugging Face Hub, at one commit: objects are its files, to read."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, BinaryIO, cast
from urllib.parse import quote

from penstock.errors import MissingExtraError, ObjectNotFound, StorageError
from penstock.storage.base import ObjectInfo
from penstock.storage.retry import METADATA, with_retries
from penstock.storage.web import TIMEOUT_S, WebFile, refuse_bad_status, translated

if TYPE_CHECKING:
    import httpx2

_BUFFER_BYTES = 256 << 10
_DENIED = (
    "the repository does not exist, or it is private or gated: check its name, ask for access on its page, "
    "and log in with `hf auth login` or set HF_TOKEN"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HubStorage:
    """The files of a data set repository at a commit. Read-only; safe for threads and spawned processes.

    A commit never changes, so neither does anything read from here. The list of files is fetched once, when opened.
    """

    endpoint: str
    name: str
    """As the Hub spells it: ``owner/name``, or a bare name of old."""
    commit: str
    tags: tuple[str, ...] = ()
    files: Mapping[str, ObjectInfo] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"hf://datasets/{self.name}@{self.commit}"

    def get(self, key: str) -> bytes:
        with self.reader(key) as file:
            return file.read()

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        with self.reader(key, start) as file:
            return file.read(max(0, stop - start))

    def reader(self, key: str, start: int = 0) -> BinaryIO:
        path = f"datasets/{self.name}/resolve/{quote(self.commit, safe='')}/{quote(key)}"
        raw = WebFile(
            _session,
            f"{self.endpoint}/{path}",
            what=f"{self.name}/{key}",
            size_bytes=self.head(key).size_bytes,
            headers=_headers,
            start=start,
            when_denied=_DENIED,
        )
        return cast(BinaryIO, io.BufferedReader(raw, _BUFFER_BYTES))

    def head(self, key: str) -> ObjectInfo:
        found = self.files.get(key)
        if found is None:
            raise ObjectNotFound(f"{self.url} has no file {key}")
        return found

    def exists(self, key: str) -> bool:
        return key in self.files

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        for key in sorted(self.files):
            if key.startswith(prefix):
                yield self.files[key]


def open_hub_repository(name: str, revision: str | None = None, *, endpoint: str | None = None) -> HubStorage:
    """Find a data set repository, pin the commit that `revision` (a branch, a tag, a commit) stands for, list its
    files. Costs one request, and one a thousand files."""
    endpoint = (endpoint or default_endpoint()).rstrip("/")
    path = f"api/datasets/{quote(name)}" + (f"/revision/{quote(revision, safe='')}" if revision else "")
    told = get_json(f"{endpoint}/{path}", what=f"data set {name}{f' at {revision}' if revision else ''}").json()
    if not isinstance(told, dict) or not isinstance(told.get("sha"), str):
        raise StorageError(f"the Hub's answer about {name} names no commit: got {str(told)[:200]!r}")
    found = told.get("id") if isinstance(told.get("id"), str) else name
    tags = tuple(tag for tag in told.get("tags") or () if isinstance(tag, str))
    assert isinstance(found, str)
    files = {info.key: info for info in _tree(endpoint, found, told["sha"])}
    return HubStorage(endpoint=endpoint, name=found, commit=told["sha"], tags=tags, files=files)


def _tree(endpoint: str, name: str, commit: str) -> Iterator[ObjectInfo]:
    path = f"api/datasets/{quote(name)}/tree/{quote(commit, safe='')}"
    url: str | None = f"{endpoint}/{path}?recursive=true&expand=false"
    while url is not None:
        answer = get_json(url, what=f"files of {name}")
        for entry in answer.json():
            if entry["type"] == "file":
                yield _object(entry)
        url = answer.links.get("next", {}).get("url")


def _object(entry: dict[str, Any]) -> ObjectInfo:
    """A file as the Hub tells of it; a name that leads out of its repository is none."""
    key = entry["path"]
    if key.startswith("/") or "\0" in key or ".." in PurePosixPath(key).parts:
        raise StorageError(f"the Hub lists a file named {key!r}: expected a path inside the repository")
    return ObjectInfo(key=key, size_bytes=int(entry["size"]), version=str(entry.get("lfs", entry)["oid"]))


def get_json(url: str, *, what: str) -> httpx2.Response:
    """One request to the Hub's API, tried again as long as that makes sense."""

    def ask() -> httpx2.Response:
        with translated(what):
            answer = _session().get(url, headers=_headers(), timeout=TIMEOUT_S, follow_redirects=True)
        refuse_bad_status(answer, what, when_denied=_DENIED)
        try:
            answer.json()
        except ValueError as error:
            raise StorageError(f"{what}: the Hub answered with something that is no JSON: {error}") from error
        return answer

    return with_retries(ask, METADATA, what)


def default_endpoint() -> str:
    """Where the Hub is: HF_ENDPOINT, or the public one."""
    require_hub()
    from huggingface_hub import constants

    return constants.ENDPOINT


def require_hub() -> None:
    """Refuse to go on without the parts that talk to the Hub."""
    try:
        import httpx2  # noqa: F401 - what huggingface_hub speaks since version 2
        import huggingface_hub  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(f"hf:// needs the hub extra ({error}): pip install 'penstock[hub]'") from error


def _session() -> httpx2.Client:
    from huggingface_hub import constants, get_session

    if constants.is_offline_mode():
        raise StorageError("HF_HUB_OFFLINE is set, so the Hub is not asked: unset it, or use a local copy")
    return get_session()


def _headers() -> dict[str, str]:
    from huggingface_hub.utils import build_hf_headers

    return build_hf_headers(library_name="penstock")
