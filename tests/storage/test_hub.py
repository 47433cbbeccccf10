"""A repository of the Hub as a store: its files at one commit, read through whatever the Hub answers."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from equipment.hub import Fault, Hub, Repository, hub_server
from equipment.processes import pickled, python, run
from penstock.errors import AccessDenied, ConfigError, ObjectNotFound, StorageError, TransientStoreError
from penstock.storage import HubStorage, ObjectInfo, open_hub_repository
from penstock.storage import hub as hub_module
from penstock.storage.retry import RetryBudget

TOKEN = "hf_secretsecretsecret"
FILES = {
    "README.md": b"---\n---\n",
    "a b/ünï.txt": b"odd names",
    "data/a.txt": b"0123456789",
    "data/b.txt": b"",
    "data/c#?%.txt": b"odder names",
    "data/deep/er/d.txt": b"deep",
    "z.txt": b"last",
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub that is the default one."""
    with hub_server() as hub:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield hub


@pytest.fixture
def folder(tmp_path: Path, hub: Hub) -> Path:
    for name, data in FILES.items():
        path = tmp_path / "repo" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    hub.add("org/name", tmp_path / "repo", tags=["modality:text", "size:small"])
    return tmp_path / "repo"


@pytest.fixture
def storage(folder: Path) -> HubStorage:
    return open_hub_repository("org/name")


def error_of(action: Callable[[], object]) -> StorageError:
    """What an action fails with; no secret is told by it."""
    with pytest.raises(StorageError) as caught:
        action()
    assert TOKEN not in str(caught.value)
    return caught.value


# Finding a repository


def test_it_is_pinned_to_the_commit_of_the_branch(hub: Hub, folder: Path) -> None:
    commit = hub.repositories["org/name"].branches["main"]
    storage = open_hub_repository("org/name")
    assert storage.commit == commit
    assert storage.url == f"hf://datasets/org/name@{commit}"
    assert storage.tags == ("modality:text", "size:small")
    (folder / "z.txt").write_bytes(b"newer")
    hub.repositories["org/name"].commits["f" * 40] = folder
    hub.repositories["org/name"].branches |= {"main": "f" * 40, "refs/convert/parquet": "e" * 40}
    hub.repositories["org/name"].commits["e" * 40] = folder
    assert open_hub_repository("org/name").commit == "f" * 40
    for revision, found in [("main", "f" * 40), (commit, commit), ("refs/convert/parquet", "e" * 40)]:
        assert open_hub_repository("org/name", revision).commit == found


def test_its_list_comes_in_pages_and_is_sorted(hub: Hub, storage: HubStorage) -> None:
    assert [info.key for info in storage.list()] == sorted(FILES)
    assert [info.size_bytes for info in storage.list()] == [len(FILES[key]) for key in sorted(FILES)]
    assert [info.key for info in storage.list("data/")] == [key for key in sorted(FILES) if key.startswith("data/")]
    assert [info.key for info in storage.list("data/d")] == ["data/deep/er/d.txt"]
    tree = next(path for path in hub.requests if "/tree/" in path)
    assert hub.requests[tree] == 4, "eleven entries, folders among them, three a page"


def test_files_have_versions_and_large_ones_that_of_their_content(hub: Hub, folder: Path) -> None:
    large = {"type": "file", "path": "large.bin", "size": 1 << 40, "oid": "pointer", "lfs": {"oid": "content"}}
    hub.listed = [large, {**large, "path": "other.bin", "lfs": None}]
    storage = open_hub_repository("org/name")
    assert storage.head("large.bin") == ObjectInfo("large.bin", 1 << 40, "content")
    assert storage.head("other.bin").version == "pointer"
    versions = {info.version for info in storage.list()}
    assert len(versions) == len(FILES) + 2


def test_a_renamed_repository_is_found_under_its_new_name(hub: Hub, folder: Path) -> None:
    hub.renamed["old"] = "org/name"
    storage = open_hub_repository("old")
    assert storage.name == "org/name"
    assert storage.get("z.txt") == b"last"
    assert open_hub_repository("old", "main") == storage


def test_pages_are_asked_of_the_hub_wherever_they_are_said_to_be(
    hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with hub_server() as other:
        hub.next_page_at = other.url
        assert len(list(open_hub_repository("org/name").list())) == len(FILES)
        assert other.sent == []


def test_a_list_without_end_is_given_up(hub: Hub, folder: Path) -> None:
    again = '<http://x/?recursive=true&expand=false>; rel="next"'
    hub.faults.append(Fault("tree", 1000, 200, {"Link": again}))
    assert "not understood" in str(error_of(lambda: open_hub_repository("org/name")))
    hub.faults[:] = []
    hub.next_page_at = "http://x/?recursive=true&expand=false#"  # whatever is asked, the first page comes again
    assert "goes round in a circle" in str(error_of(lambda: open_hub_repository("org/name")))


@pytest.mark.parametrize("key", ["../x", "/etc/passwd", "a/../../x", "a\0b", "", "a//b", "./a", "a/."])
def test_a_name_that_leads_out_of_the_repository_is_refused(hub: Hub, folder: Path, key: str) -> None:
    hub.listed = [{"type": "file", "path": key, "size": 1, "oid": "0"}]
    with pytest.raises(StorageError, match="expected a path inside the repository"):
        open_hub_repository("org/name")


@pytest.mark.parametrize(
    "entry",
    [
        {},
        {"type": "file"},
        {"type": "file", "path": "x", "size": -1, "oid": "0"},
        {"type": "file", "path": "x", "size": "big", "oid": "0"},
        {"type": "file", "path": "x", "size": 1},
        {"type": "file", "path": 5, "size": 1, "oid": "0"},
        {"type": "file", "path": "x", "size": 1, "oid": "0", "lfs": 5},
    ],
)
def test_a_list_that_makes_no_sense_is_told(hub: Hub, folder: Path, entry: dict[str, object]) -> None:
    hub.listed = [entry]
    assert "the Hub" in str(error_of(lambda: open_hub_repository("org/name")))


def test_an_answer_that_makes_no_sense_is_told(hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.faults.append(Fault("org/name", 1, 200))
    assert "names no commit" in str(error_of(lambda: open_hub_repository("org/name")))
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"{hub.url}/datasets/org/name/resolve/main/data")
    (folder / "data/api/datasets").mkdir(parents=True)
    (folder / "data/api/datasets/x").write_bytes(b"<html>a page</html>")
    assert "something that is no JSON" in str(error_of(lambda: open_hub_repository("x")))


# What the Hub refuses


def test_a_hub_in_trouble_is_asked_again(hub: Hub, folder: Path) -> None:
    wait = {"Retry-After": "0"}
    hub.faults += [Fault("tree", 2, 429, wait), Fault("org/name", 1, 503, wait), Fault("z.txt", 2, 502, wait)]
    assert open_hub_repository("org/name").get("z.txt") == b"last"


def test_a_hub_that_stays_in_trouble_is_told(hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "METADATA", RetryBudget(attempts=3, first_wait_s=0.001))
    hub.faults.append(Fault("tree", 1000, 500))
    error = error_of(lambda: open_hub_repository("org/name"))
    assert isinstance(error, TransientStoreError)
    assert "files of org/name: given up after 3 tries" in str(error)


def test_what_is_not_there_or_not_allowed_is_asked_for_once(hub: Hub, folder: Path) -> None:
    error = error_of(lambda: open_hub_repository("org/missing"))
    assert isinstance(error, AccessDenied)
    assert "data set org/missing: the server answered 401" in str(error)
    assert "hf auth login" in str(error)
    error = error_of(lambda: open_hub_repository("org/name", "v9"))
    assert isinstance(error, ObjectNotFound)
    assert "data set org/name at v9" in str(error)
    assert max(hub.requests.values()) == 1


def test_the_token_goes_to_the_hub_and_nowhere_else(
    hub: Hub, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repositories["org/secret"] = Repository({"c" * 40: folder}, {"main": "c" * 40}, private=True)
    assert isinstance(error_of(lambda: open_hub_repository("org/secret")), AccessDenied)
    assert all("authorization" not in sent for sent in hub.sent)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    storage = open_hub_repository("org/secret")
    with hub_server() as other:
        other.repositories["org/secret"] = Repository({"c" * 40: folder}, {"main": "c" * 40})
        hub.elsewhere = other.url
        hub.sent.clear()
        assert storage.get("z.txt") == b"last"
        assert [sent["authorization"] for sent in hub.sent] == [f"Bearer {TOKEN}"]
        assert other.sent
        assert all("authorization" not in sent for sent in other.sent)
        other.faults.append(Fault("z.txt", 1, 403))
        assert other.url not in str(error_of(lambda: storage.get("z.txt")))
    assert TOKEN not in repr(storage) + storage.url + str(pickle.dumps(storage))


def test_offline_means_offline(hub: Hub, storage: HubStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.requests.clear()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for action in (lambda: open_hub_repository("org/name"), lambda: storage.get("z.txt")):
        assert "HF_HUB_OFFLINE is set, so the Hub is not asked" in str(error_of(action))
    assert hub.requests.total() == 0
    assert storage.exists("z.txt"), "what is known needs no asking"


# Reading


@pytest.mark.parametrize("key", sorted(FILES))
def test_a_file_is_read_whole(storage: HubStorage, key: str) -> None:
    assert storage.exists(key)
    assert storage.get(key) == FILES[key]
    with storage.reader(key, 3) as file:
        assert file.read() == FILES[key][3:]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(start=st.integers(0, 14), length=st.integers(0, 14) | st.just(1 << 62), key=st.sampled_from(sorted(FILES)))
def test_a_range_is_a_slice_and_costs_no_more_than_what_is_there(
    storage: HubStorage, start: int, length: int, key: str
) -> None:
    assert storage.get_range(key, start, start + length) == FILES[key][start : start + length]


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (-2, -1)])
def test_a_range_that_is_none_is_refused(storage: HubStorage, start: int, stop: int) -> None:
    with pytest.raises(ConfigError, match=f"{start} to {stop}"):
        storage.get_range("data/a.txt", start, stop)


def test_a_reader_before_the_beginning_is_refused(storage: HubStorage) -> None:
    with pytest.raises(ConfigError, match="-1"):
        storage.reader("data/a.txt", -1)


@pytest.mark.parametrize("key", ["missing", "data", "data/", "../z.txt", "", "data/a.txt/x"])
def test_a_missing_file_is_named(hub: Hub, storage: HubStorage, key: str) -> None:
    hub.requests.clear()
    assert not storage.exists(key)
    for read in (storage.get, storage.head, storage.reader, lambda key: storage.get_range(key, 0, 1)):
        with pytest.raises(ObjectNotFound, match=f"has no file {key}"):
            read(key)
    assert hub.requests.total() == 0


def test_a_cut_answer_is_taken_up_where_it_broke(hub: Hub, storage: HubStorage) -> None:
    hub.faults.append(Fault("a.txt", 1))
    assert storage.get("data/a.txt") == FILES["data/a.txt"]
    assert [sent["range"] for sent in hub.sent[-2:]] == ["bytes=0-9", "bytes=5-9"]


def test_a_file_that_went_away_is_told(hub: Hub, folder: Path, storage: HubStorage) -> None:
    (folder / "z.txt").unlink()
    with pytest.raises(ObjectNotFound, match=r"org/name/z\.txt: there is no such thing"):
        storage.get("z.txt")


def test_the_files_of_a_commit_stay_while_the_branch_moves(hub: Hub, storage: HubStorage, tmp_path: Path) -> None:
    (tmp_path / "newer").mkdir()
    (tmp_path / "newer/z.txt").write_bytes(b"newer")
    hub.add("org/name", tmp_path / "newer")
    assert storage.get("z.txt") == b"last"
    assert open_hub_repository("org/name").get("z.txt") == b"newer"


def test_it_pickles_to_another_process(hub: Hub, storage: HubStorage) -> None:
    assert pickle.loads(pickle.dumps(storage)) == storage  # noqa: S301 - our own
    code = "import pickle, sys; print(pickle.loads(bytes.fromhex(sys.argv[1])).get('data/a.txt').decode())"
    finished = run(python(code, pickled(storage)), env={"HF_ENDPOINT": "http://127.0.0.1:9"})
    assert finished.output.strip() == "0123456789"


def test_without_the_extra_the_command_to_install_it_is_told(folder: Path) -> None:
    code = """
import sys
sys.modules["huggingface_hub"] = None
from penstock.errors import MissingExtraError
from penstock.sources import open_source
try:
    open_source("hf://org/name")
except MissingExtraError as error:
    print(error)
"""
    assert "pip install 'huggingface_hub>=2' 'datasets>=5'" in run(python(code)).output
