"""A repository of the Hugging Face Hub, of data or of a model, at one commit: objects are its files, to read."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, cast
from urllib.parse import quote, urlencode, urlsplit

from penstock.errors import ConfigError, MissingExtraError, ObjectNotFound, StorageError
from penstock.storage.base import ObjectInfo
from penstock.storage.retry import METADATA, with_retries
from penstock.storage.web import TIMEOUT_S, WebFile, refuse_bad_status, translated

if TYPE_CHECKING:
    import httpx2

RepositoryKind = Literal["datasets", "models"]

_BUFFER_BYTES = 256 << 10
_SHA256_LENGTH = 64
_WORDS: dict[RepositoryKind, str] = {"datasets": "data set", "models": "model"}
_DENIED = (
    "the repository does not exist, or it is private or gated: check its name, ask for access on its page, "
    "and log in with `hf auth login` or set HF_TOKEN"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HubStorage:
    """The files of a repository at a commit. Read-only; safe for threads and spawned processes.

    A commit never changes, so neither does anything read from here. The list of files is fetched once, when opened.
    """

    endpoint: str
    name: str
    """As the Hub spells it: ``owner/name``, or a bare name of old."""
    commit: str
    tags: tuple[str, ...] = ()
    files: Mapping[str, ObjectInfo] = field(default_factory=dict)
    kind: RepositoryKind = "datasets"

    @property
    def url(self) -> str:
        return f"hf://{_below(self.kind)}{self.name}@{self.commit}"

    def get(self, key: str) -> bytes:
        with self.reader(key) as file:
            return file.read()

    def get_with_info(self, key: str) -> tuple[bytes, ObjectInfo]:
        return self.get(key), self.head(key)

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        if not 0 <= start <= stop:
            raise ConfigError(f"bytes {start} to {stop} of {key} are no range: expected 0 <= start <= stop")
        # Bounded by what is there: a range from a damaged index must not become a request for memory.
        stop = min(stop, self.head(key).size_bytes)
        with self.reader(key, start) as file:
            return file.read(max(0, stop - start))

    def reader(self, key: str, start: int = 0) -> BinaryIO:
        if start < 0:
            raise ConfigError(f"offset {start} is not in {key}: expected 0 or more")
        path = f"{_below(self.kind)}{quote(self.name)}/resolve/{quote(self.commit, safe='')}/{quote(key)}"
        raw = WebFile(
            _session,
            f"{self.endpoint}/{path}",
            what=f"{self.name}/{key}",
            size_bytes=self.head(key).size_bytes,
            headers=_headers,
            start=start,
            when_denied=_DENIED,
        )
        has_hash = len(self.head(key).version or "") == _SHA256_LENGTH
        checked = _Checked(raw, self.head(key)) if start == 0 and has_hash else raw
        return cast(BinaryIO, io.BufferedReader(checked, _BUFFER_BYTES))

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


class _Checked(io.RawIOBase):
    """A large file of the Hub, which lists its SHA-256: compared with it where it is read from start to end."""

    def __init__(self, inner: WebFile, info: ObjectInfo) -> None:
        super().__init__()
        self._inner = inner
        self._info = info
        self._next = 0
        self._digest = hashlib.sha256()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._inner.tell()

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        return self._inner.seek(offset, whence)

    def readinto(self, buffer: Any, /) -> int:
        place = self._inner.tell()
        count = self._inner.readinto(buffer)
        if place == self._next:
            self._digest.update(memoryview(buffer).cast("B")[:count])
            self._next += count
            is_whole = self._next == self._info.size_bytes and count
            if is_whole and self._digest.hexdigest() != self._info.version:
                raise StorageError(
                    f"{self._info.key}: its bytes are not those the Hub lists (SHA-256 {self._digest.hexdigest()}, "
                    f"expected {self._info.version}): a proxy or a mirror may have changed it; try another endpoint"
                )
        return count

    def close(self) -> None:
        self._inner.close()
        super().close()


def open_hub_repository(
    name: str, revision: str | None = None, *, endpoint: str | None = None, kind: RepositoryKind = "datasets"
) -> HubStorage:
    """Find a repository, pin the commit that `revision` (a branch, a tag, a commit) stands for, list its files. Costs
    one request, and one a thousand files."""
    endpoint = (endpoint or default_endpoint()).rstrip("/")
    path = f"api/{kind}/{quote(name)}" + (f"/revision/{quote(revision, safe='')}" if revision else "")
    what = f"{_WORDS[kind]} {name}{f' at {revision}' if revision else ''}"
    told = get_json(f"{endpoint}/{path}", what=what).json()
    if not isinstance(told, dict) or not isinstance(told.get("sha"), str):
        raise StorageError(f"the Hub's answer about {name} names no commit: got {str(told)[:200]!r}")
    found = told.get("id") if isinstance(told.get("id"), str) else name
    listed = told.get("tags")
    tags = tuple(tag for tag in listed if isinstance(tag, str)) if isinstance(listed, list) else ()
    assert isinstance(found, str)
    files = {info.key: info for info in _tree(endpoint, kind, found, told["sha"])}
    return HubStorage(endpoint=endpoint, name=found, commit=told["sha"], tags=tags, files=files, kind=kind)


def search_hub(
    query: str, *, tags: Sequence[str] = (), limit: int = 20, endpoint: str | None = None
) -> list[dict[str, Any]]:
    """Data sets of the Hub by words in their names and by tags, the most downloaded first, as the Hub tells of them."""
    endpoint = (endpoint or default_endpoint()).rstrip("/")
    asked = [("search", query), *(("filter", tag) for tag in tags), ("sort", "downloads"), ("direction", "-1")]
    url = f"{endpoint}/api/datasets?{urlencode([*asked, ('limit', limit), ('full', 'true')])}"
    found = get_json(url, what=f"search for {query!r}").json()
    if not isinstance(found, list) or not all(isinstance(entry, dict) and "id" in entry for entry in found):
        raise StorageError(f"search for {query!r}: the Hub answered with something else: {str(found)[:200]!r}")
    return found[:limit]


def _below(kind: RepositoryKind) -> str:
    """Models are at the Hub's root, data sets in a folder of theirs."""
    return "" if kind == "models" else f"{kind}/"


def _tree(endpoint: str, kind: RepositoryKind, name: str, commit: str) -> Iterator[ObjectInfo]:
    path = f"api/{kind}/{quote(name)}/tree/{quote(commit, safe='')}"
    query, asked = "recursive=true&expand=false", set[str]()
    while query and query not in asked:
        asked.add(query)
        answer = get_json(f"{endpoint}/{path}?{query}", what=f"files of {name}")
        entries = answer.json()
        try:
            found = [_object(entry) for entry in entries if entry["type"] == "file"]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise StorageError(
                f"the Hub's list of the files of {name} is not understood ({type(error).__name__}: {error}): "
                f"got {str(entries)[:200]!r}"
            ) from error
        yield from found
        # Where the next page is said to be is not where the token goes: what was asked is asked again, further on.
        query = urlsplit(answer.links.get("next", {}).get("url", "")).query
    if query:
        raise StorageError(f"the Hub's list of the files of {name} goes round in a circle: try again later")


def _object(entry: dict[str, Any]) -> ObjectInfo:
    """A file as the Hub tells of it; a name that leads out of its repository is none."""
    key, size_bytes = entry["path"], entry["size"]
    if any(part in ("", ".", "..") for part in key.split("/")) or "\0" in key:
        raise StorageError(f"the Hub lists a file named {key!r}: expected a path inside the repository")
    if not isinstance(size_bytes, int) or size_bytes < 0:
        raise StorageError(f"the Hub lists {key} with {size_bytes!r:.40} bytes: expected 0 or more")
    return ObjectInfo(key=key, size_bytes=size_bytes, version=str((entry.get("lfs") or entry)["oid"]))


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


def missing_part(error: ImportError) -> MissingExtraError:
    """What to install for the Hub; not under this package's name, which is another project's on PyPI."""
    return MissingExtraError(f"hf:// needs more ({error}): pip install 'huggingface_hub>=2' 'datasets>=5'")


def is_offline() -> bool:
    """Whether the user wants the Hub left alone: HF_HUB_OFFLINE."""
    require_hub()
    from huggingface_hub import constants

    return constants.is_offline_mode()


def require_hub() -> None:
    """Refuse to go on without the parts that talk to the Hub."""
    try:
        import httpx2  # noqa: F401 - what huggingface_hub speaks since version 2
        import huggingface_hub  # noqa: F401
    except ImportError as error:
        raise missing_part(error) from error


def _session() -> httpx2.Client:
    from huggingface_hub import get_session

    if is_offline():
        raise StorageError("HF_HUB_OFFLINE is set, so the Hub is not asked: unset it, or use a local copy")
    return get_session()


def _headers() -> dict[str, str]:
    from huggingface_hub.utils import build_hf_headers

    return build_hf_headers(library_name="penstock")
