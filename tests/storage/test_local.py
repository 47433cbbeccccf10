"""A local folder keeps the storage contract, and what only a folder can get wrong."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from equipment.faults import run_killed_at
from equipment.processes import held_open, pickled, python, run
from equipment.trees import tree
from penstock.errors import AccessDenied, ConfigError, StorageError
from penstock.storage import LocalStorage, Storage
from storage.suite import PUT, StorageSuite, keys

REPORT = """
import os, pickle, resource, sys
from pathlib import Path
storage = pickle.loads(bytes.fromhex(sys.argv[1]))
def report(do):
    try:
        print("gave", do())
    except Exception as error:
        print(type(error).__name__, error)
"""

AS_NOBODY = """
if os.getuid() == 0:
    os.setresuid(65534, 65534, 65534)  # permissions do not bind root
"""

IN_OWN_MOUNT = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
NEW_NAMESPACES = 0x00020000 | 0x10000000  # CLONE_NEWNS | CLONE_NEWUSER: what is mounted is seen here only
def mount(flags, options):
    storage.root.mkdir(exist_ok=True)
    if libc.mount(b"none", bytes(storage.root), b"tmpfs", flags, options):
        print("cannot mount:", os.strerror(ctypes.get_errno()))
        sys.exit()
user, group = os.getuid(), os.getgid()
if libc.unshare(NEW_NAMESPACES):
    print("cannot mount:", os.strerror(ctypes.get_errno()))
    sys.exit()
Path("/proc/self/uid_map").write_text(f"0 {user} 1")  # without an owner no file can be made
Path("/proc/self/setgroups").write_text("deny")
Path("/proc/self/gid_map").write_text(f"0 {group} 1")
"""

FORK_AND_HOLD = """
import os, pickle, sys, time
storage = pickle.loads(bytes.fromhex(sys.argv[1]))
with storage.exclusive("lock", purpose="testing"):
    if os.fork() == 0:
        print("ready", flush=True)
        time.sleep(60)
        os._exit(0)
    sys.stdin.read()
"""


def reported(storage: Storage, code: str, cwd: Path | None = None) -> list[str]:
    """Run code that reports with `report(lambda: ...)` in a process of its own; return what it said."""
    finished = run(python(REPORT + code, pickled(storage)), cwd=cwd)
    assert finished.returncode == 0, finished.output
    if finished.output.startswith("cannot mount"):
        pytest.skip(finished.output)
    return finished.output.splitlines()


class TestLocalStorage(StorageSuite):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        return LocalStorage(tmp_path / "root")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def storage(root: Path) -> LocalStorage:
    return LocalStorage(root)


def test_nothing_is_created_before_the_first_write(root: Path, storage: LocalStorage) -> None:
    assert list(storage.list()) == []
    assert not storage.exists("object")
    storage.delete("folder/object")
    assert not root.exists()


def test_an_object_is_a_file_and_nothing_else_remains(root: Path, storage: LocalStorage) -> None:
    storage.put("folder/object", b"x")
    storage.put_if_absent("other", b"y")
    with storage.exclusive("folder/deep/lock", purpose="testing"):
        pass
    assert tree(root) == {"folder": None, "folder/object": b"x", "other": b"y"}


def test_folders_go_with_their_last_object_but_the_root_stays(root: Path, storage: LocalStorage) -> None:
    storage.put("a/b/object", b"x")
    storage.put("a/other", b"x")
    storage.delete("a/b/object")
    assert tree(root) == {"a": None, "a/other": b"x"}
    storage.delete("a/other")
    assert tree(root) == {}
    assert root.is_dir()


def test_an_unfinished_write_leaves_no_folder(root: Path, storage: LocalStorage) -> None:
    with pytest.raises(ZeroDivisionError), storage.writer("a/b/object"):
        raise ZeroDivisionError
    assert tree(root) == {}
    run_killed_at(python(PUT, pickled(storage), "a/b/object"), "storage.before_fsync")
    assert len(tree(root)) == 3
    assert storage.discard_unfinished() == 1
    assert tree(root) == {}


def test_a_write_is_durable_down_to_every_new_folder(
    root: Path, storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def noting_fsync(fd: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{fd}").readlink()))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noting_fsync)
    storage.put("a/b/object", b"x")
    *folders_above, temp, folder = synced
    assert folders_above == [str(root.parent), str(root), str(root / "a")]
    assert temp.startswith(str(root / "a/b/.object."))
    assert folder == str(root / "a/b")
    synced.clear()
    storage.put("a/b/object", b"y")
    assert synced[1:] == [str(root / "a/b")]


# Names


@pytest.mark.parametrize("key", ["a.penstock-tmp", "folder/a.penstock-lock"])
def test_names_of_its_own_files_are_no_keys(storage: LocalStorage, key: str) -> None:
    with pytest.raises(ConfigError, match="reserved"):
        storage.put(key, b"x")


def test_discarding_leaves_foreign_files_alone(tmp_path: Path, root: Path, storage: LocalStorage) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / ".object.1.ab.penstock-tmp").write_bytes(b"another store's")
    root.mkdir()
    (root / "linked").symlink_to(outside)
    (root / "notes.penstock-tmp").write_bytes(b"a user's")
    (root / ".object.tmp").write_bytes(b"a user's")
    before = tree(tmp_path)
    assert storage.discard_unfinished() == 0
    assert tree(tmp_path) == before


def test_what_is_no_file_is_no_object(root: Path, storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    storage.put("object", b"x")
    (root / "dangling").symlink_to("nowhere")
    (root / "loop").symlink_to("loop")
    os.mkfifo(root / "fifo")
    monkeypatch.chdir(root)  # the path of a socket must be short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        assert not storage.exists("fifo")
        assert not storage.exists("dangling")
        assert not storage.exists("loop")
        assert keys(storage) == ["object"]


def test_a_planted_link_is_not_written_through(tmp_path: Path, root: Path, storage: LocalStorage) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    root.mkdir()
    (root / "object").symlink_to(victim)
    (root / "lock.penstock-lock").symlink_to(victim)
    storage.put("object", b"new")
    with pytest.raises(StorageError, match="lock"), storage.exclusive("lock", purpose="testing"):
        pytest.fail("locked somebody else's file")
    assert victim.read_bytes() == b"precious"
    assert storage.get("object") == b"new"


# Locks


def test_no_lock_file_is_left(root: Path, storage: LocalStorage) -> None:
    root.mkdir()
    with storage.exclusive("folder/lock", purpose="testing"):
        assert len(tree(root)) == 2
    assert tree(root) == {}


def test_the_lock_file_of_a_killed_holder_goes_with_the_next(root: Path, storage: LocalStorage) -> None:
    with held_open(python(FORK_AND_HOLD, pickled(storage))) as holder:
        holder.kill()
        holder.wait(30)
        assert [name for name in tree(root) if "lock" in name] != []
        # Its forked child lives on, and does not hold what the parent held.
        with storage.exclusive("lock", purpose="testing"):
            pass
        os.killpg(holder.pid, 9)
    assert tree(root) == {}


def test_whoever_lost_its_lock_file_removes_no_other_ones(root: Path, storage: LocalStorage) -> None:
    with storage.exclusive("lock", purpose="testing"):
        for path in root.iterdir():
            path.unlink()
        theirs = root / "lock.penstock-lock"
        theirs.write_bytes(b"somebody else's by now")
    assert theirs.read_bytes() == b"somebody else's by now"


# Errors


def test_a_folder_in_place_of_a_file_is_an_access_error(storage: LocalStorage) -> None:
    storage.put("folder/object", b"x")
    with pytest.raises(AccessDenied, match="folder"):
        storage.put("folder", b"x")
    assert keys(storage) == ["folder/object"]
    assert storage.discard_unfinished() == 0


def test_a_file_in_place_of_a_folder_is_an_access_error(root: Path, storage: LocalStorage) -> None:
    storage.put("object", b"x")
    for key in ("object/below", "object/far/below"):
        with pytest.raises(AccessDenied, match=f"{root}/{key}.*{root}/object"):
            storage.put(key, b"x")
    with pytest.raises(AccessDenied, match="object"), storage.exclusive("object/below", purpose="testing"):
        pytest.fail("locked below a file")
    assert tree(root) == {"object": b"x"}


def test_a_root_that_is_a_file_has_no_objects_and_takes_none(root: Path, storage: LocalStorage) -> None:
    root.write_bytes(b"a file")
    assert list(storage.list()) == []
    assert not storage.exists("object")
    with pytest.raises(AccessDenied, match=str(root)):
        storage.put("object", b"x")
    assert root.read_bytes() == b"a file"


def test_a_refused_permission_is_an_access_error(root: Path, storage: LocalStorage) -> None:
    storage.put("secret", b"x")
    storage.put("closed/object", b"x")
    root.chmod(0o755)
    (root / "secret").chmod(0)
    (root / "closed").chmod(0)
    said = reported(
        LocalStorage(Path()),  # from inside: the folders above are private, and the reader may be nobody
        AS_NOBODY
        + """
report(lambda: storage.get("secret"))
report(lambda: storage.reader("secret"))
report(lambda: storage.exists("closed/object"))
report(lambda: list(storage.list()))
report(lambda: list(storage.list("closed/")))
report(lambda: storage.put("closed/object", b"y"))
""",
        cwd=root,
    )
    (root / "closed").chmod(0o755)
    assert [line.split()[0] for line in said] == ["AccessDenied"] * 6, said
    assert ["secret" in line for line in said] == [True, True, False, False, False, False]
    assert ["closed" in line for line in said] == [False, False, True, True, True, True]


def test_a_full_disk_is_told_and_leaves_nothing(storage: LocalStorage) -> None:
    said = reported(
        storage,
        IN_OWN_MOUNT
        + """
mount(0, b"size=256k")
storage.put("object", b"old")
report(lambda: storage.put("object", b"x" * (8 << 20)))
report(lambda: storage.put("folder/other", b"x" * (300 << 10)))
report(lambda: sorted(path.name for path in storage.root.rglob("*")))
report(lambda: storage.get("object"))
""",
    )
    assert [line.split()[0] for line in said[:2]] == ["StorageFull", "StorageFull"], said
    assert str(storage.root / "object") in said[0]
    assert said[2:] == ["gave ['object']", "gave b'old'"]


def test_a_read_only_file_system_is_an_access_error(storage: LocalStorage) -> None:
    said = reported(storage, IN_OWN_MOUNT + 'mount(1, b"")\nreport(lambda: storage.put("object", b"x"))')
    assert said[0].startswith("AccessDenied")
    assert "read-only" in said[0]


def test_a_file_that_may_not_grow_is_told_and_leaves_nothing(storage: LocalStorage) -> None:
    said = reported(
        storage,
        """
storage.put("object", b"old")
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
report(lambda: storage.put("object", b"x" * (8 << 20)))
report(lambda: storage.put("folder/other", b"x" * (8 << 20)))
report(lambda: sorted(path.name for path in storage.root.rglob("*")))
report(lambda: storage.get("object"))
""",
    )
    assert [line.split()[0] for line in said[:2]] == ["StorageError", "StorageError"], said
    assert "too large" in said[0]
    assert said[2:] == ["gave ['object']", "gave b'old'"]


def test_a_read_error_is_told_and_never_taken_for_the_end(root: Path, storage: LocalStorage) -> None:
    root.mkdir()
    (root / "broken").symlink_to("/proc/self/mem")  # opens like a file; reading its first byte is an I/O error
    with pytest.raises(StorageError, match=r"broken.*Input/output"):
        storage.get("broken")
    with storage.reader("broken") as file:
        for read in (file.read, file.readlines, lambda: file.read(1)):
            with pytest.raises(StorageError, match=r"broken.*Input/output"):
                read()


def test_a_name_too_long_is_a_storage_error(storage: LocalStorage) -> None:
    with pytest.raises(StorageError, match="too long"):
        storage.put("x" * 300, b"x")
