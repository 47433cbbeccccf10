"""What every storage backend promises: subclass `StorageSuite` and give it a `storage` fixture, empty for each test."""

from __future__ import annotations

import signal
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from equipment.faults import run_killed_at
from equipment.processes import held_open, pickled, python, run
from penstock.errors import ConfigError, ObjectNotFound, PreconditionFailed, StorageBusy
from penstock.storage import ObjectInfo, Storage

# A backend is slow to set up and cheap to reuse, so examples share the test's storage. One suite, many subclasses: that
# they share their failing examples does no harm.
examples = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
)

READS: dict[str, Callable[[Storage, str], object]] = {
    "get": lambda storage, key: storage.get(key),
    "get_with_info": lambda storage, key: storage.get_with_info(key),
    "get_if": lambda storage, key: storage.get_if(key, lambda _: None),
    "get_range": lambda storage, key: storage.get_range(key, 0, 1),
    "no bytes": lambda storage, key: storage.get_range(key, 0, 0),
    "head": lambda storage, key: storage.head(key),
    "reader": lambda storage, key: storage.reader(key),
}
WRITES: dict[str, Callable[[Storage, str], object]] = {
    "put": lambda storage, key: storage.put(key, b"x"),
    "put_if_absent": lambda storage, key: storage.put_if_absent(key, b"x"),
    "put_if_match": lambda storage, key: storage.put_if_match(key, b"x", "version"),
    "writer": lambda storage, key: storage.writer(key).__enter__(),
    "delete": lambda storage, key: storage.delete(key),
    "exists": lambda storage, key: storage.exists(key),
    "exclusive": lambda storage, key: storage.exclusive(key, purpose="testing").__enter__(),
}

HOLD = """
import pickle, sys
storage = pickle.loads(bytes.fromhex(sys.argv[1]))
with storage.exclusive(sys.argv[2], purpose="feeding the cat"):
    print("ready", flush=True)
    sys.stdin.read()
"""

COUNT_UNDER_LOCK = """
import pickle, sys
from penstock.errors import StorageBusy
storage = pickle.loads(bytes.fromhex(sys.argv[1]))
done = 0
while done < int(sys.argv[2]):
    try:
        with storage.exclusive("folder/counter", purpose="counting"):
            storage.put("count", str(int(storage.get("count")) + 1).encode())
            done += 1
    except StorageBusy:
        pass
"""

PUT = """
import pickle, sys
storage = pickle.loads(bytes.fromhex(sys.argv[1]))
storage.put(sys.argv[2], b"new" * 1000)
print(storage.url)
"""


def keys(storage: Storage, prefix: str = "") -> list[str]:
    return [info.key for info in storage.list(prefix)]


def sizes(storage: Storage) -> list[tuple[str, int]]:
    return [(info.key, info.size_bytes) for info in storage.list()]


class StorageSuite:
    leftovers = 1
    """How many things a writer leaves that is killed just before its object becomes visible."""
    races = 5
    """How often several try to be the one; fewer where the server is slow to tell."""
    unusable: tuple[str, ...] = ()
    """Keys that the server at hand mistakes for others."""

    @pytest.fixture
    def storage(self) -> Storage:
        raise NotImplementedError("give a storage without objects")

    def test_it_has_every_method_of_the_contract(self, storage: Storage) -> None:
        assert isinstance(storage, Storage)

    # Reading and writing whole objects

    @pytest.mark.parametrize("data", [b"", b"x", b"\0\xff\r\n", b"many" * 500_000])
    def test_what_was_put_is_read_back(self, storage: Storage, data: bytes) -> None:
        storage.put("folder/object", data)
        assert storage.get("folder/object") == data
        info = storage.head("folder/object")
        assert (info.key, info.size_bytes) == ("folder/object", len(data))
        assert storage.exists("folder/object")

    @pytest.mark.parametrize(
        "key", ["a", "a/b/c/d", ".hidden/.name", "with space", "ünï/cödé", "a..b/c.", "back\\slash"]
    )
    def test_any_relative_path_is_a_key(self, storage: Storage, key: str) -> None:
        if key in self.unusable:
            pytest.skip("the server takes it for another key")
        storage.put(key, b"x")
        assert keys(storage) == [key]
        assert storage.get(key) == b"x"

    def test_a_put_replaces_the_object_before_it(self, storage: Storage) -> None:
        storage.put("object", b"a longer one")
        storage.put("object", b"short")
        assert storage.get("object") == b"short"

    def test_putting_the_same_twice_is_like_putting_it_once(self, storage: Storage) -> None:
        storage.put("object", b"same")
        storage.put("object", b"same")
        assert sizes(storage) == [("object", 4)]

    def test_readers_see_one_object_or_the_other_while_it_is_replaced(self, storage: Storage) -> None:
        versions = [bytes([letter]) * 200_000 for letter in b"abcdefgh"]
        storage.put("object", versions[0])

        def write() -> None:
            for version in versions * 4:
                storage.put("object", version)

        with ThreadPoolExecutor() as pool:
            writing = pool.submit(write)
            seen = [storage.get("object")]
            while not writing.done():
                seen.append(storage.get("object"))
                assert keys(storage) == ["object"]
            writing.result()
        assert all(data in versions for data in seen)

    @pytest.mark.parametrize("size", [0, 1000, 20 << 20])  # the last comes in pieces
    def test_what_will_do_is_read_with_what_it_is(self, storage: Storage, size: int) -> None:
        data = bytes(range(250)) * (size // 250)
        storage.put("object", data)
        seen: list[ObjectInfo] = []
        got, info = storage.get_if("object", seen.append)
        assert got == data
        assert got.readonly
        head = storage.head("object")
        assert [(each, each.modified) for each in (*seen, info)] == 2 * [(head, head.modified)]

    def test_what_will_not_do_is_not_read(self, storage: Storage) -> None:
        storage.put("object", bytes(30 << 20))

        def refuse(info: ObjectInfo) -> None:
            raise KeyError(info.size_bytes)

        tracemalloc.start()
        try:
            with pytest.raises(KeyError, match=str(30 << 20)):
                storage.get_if("object", refuse)
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()
        assert storage.get_range("object", 0, 3) == bytes(3)  # and the next is answered

    def test_put_if_absent_writes_where_nothing_is(self, storage: Storage) -> None:
        storage.put_if_absent("folder/object", b"first")
        assert storage.get("folder/object") == b"first"
        assert keys(storage) == ["folder/object"]

    def test_put_if_absent_changes_nothing_where_something_is(self, storage: Storage) -> None:
        storage.put("object", b"first")
        with pytest.raises(PreconditionFailed, match="object"):
            storage.put_if_absent("object", b"second")
        assert storage.get("object") == b"first"
        assert keys(storage) == ["object"]

    def test_of_many_that_put_if_absent_one_wins(self, storage: Storage) -> None:
        def attempt(name: bytes) -> bytes | None:
            try:
                storage.put_if_absent("folder/object", name)
            except PreconditionFailed:
                return None
            return name

        for _ in range(self.races):
            with ThreadPoolExecutor(8) as pool:
                winners = [name for name in pool.map(attempt, [b"%d" % n for n in range(8)]) if name is not None]
            assert winners == [storage.get("folder/object")]
            storage.delete("folder/object")

    # Replacing what was seen

    def test_what_is_still_as_it_was_seen_is_replaced(self, storage: Storage) -> None:
        storage.put("object", b"first")
        data, info = storage.get_with_info("object")
        assert (data, info.key, info.size_bytes) == (b"first", "object", 5)
        assert info.version
        second = storage.put_if_match("object", b"second", info.version)
        assert storage.get_with_info("object") == (b"second", second)
        assert second.version
        storage.put_if_match("object", b"third", second.version)
        assert storage.get("object") == b"third"
        assert keys(storage) == ["object"]

    def test_what_put_if_absent_wrote_can_be_replaced_without_looking(self, storage: Storage) -> None:
        info = storage.put_if_absent("folder/object", b"first")
        assert info.version
        storage.put_if_match("folder/object", b"second", info.version)
        assert storage.get("folder/object") == b"second"

    def test_what_changed_since_it_was_seen_stays(self, storage: Storage) -> None:
        storage.put("object", b"first")
        version = storage.get_with_info("object")[1].version
        assert version
        storage.put("object", b"second")
        with pytest.raises(PreconditionFailed, match="object"):
            storage.put_if_match("object", b"third", version)
        assert storage.get("object") == b"second"

    @pytest.mark.parametrize("key", ["object", "no/such/folder"])
    def test_what_is_gone_since_it_was_seen_stays_gone(self, storage: Storage, key: str) -> None:
        version = storage.put_if_absent(key, b"first").version
        assert version
        storage.delete(key)
        with pytest.raises(PreconditionFailed, match=key):
            storage.put_if_match(key, b"second", version)
        assert keys(storage) == []

    def test_of_many_that_replace_none_overwrites_another(self, storage: Storage) -> None:
        storage.put("folder/count", b"0")

        def count(_: int) -> None:
            done = 0
            while done < 10:
                data, info = storage.get_with_info("folder/count")
                assert info.version
                try:
                    storage.put_if_match("folder/count", str(int(data) + 1).encode(), info.version)
                    done += 1
                except PreconditionFailed:
                    pass

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(count, range(4)))
        assert storage.get("folder/count") == b"40"
        assert keys(storage) == ["folder/count"]

    # Reading parts

    @examples
    @given(data=st.binary(max_size=40), start=st.integers(0, 50), length=st.integers(0, 50))
    def test_a_range_is_a_slice(self, storage: Storage, data: bytes, start: int, length: int) -> None:
        storage.put("object", data)
        assert storage.get_range("object", start, start + length) == data[start : start + length]

    def test_a_range_far_past_the_end_costs_no_more_than_the_object(self, storage: Storage) -> None:
        storage.put("object", b"small")
        assert storage.get_range("object", 2, 1 << 62) == b"all"
        assert storage.get_range("object", 1 << 63, 1 << 64) == b""

    @pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (-2, -1)])
    def test_a_range_that_is_none_is_refused(self, storage: Storage, start: int, stop: int) -> None:
        storage.put("object", b"small")
        with pytest.raises(ConfigError, match=f"{start} to {stop}"):
            storage.get_range("object", start, stop)

    @examples
    @given(data=st.binary(max_size=40), start=st.integers(0, 50))
    def test_a_reader_reads_on_from_its_offset(self, storage: Storage, data: bytes, start: int) -> None:
        storage.put("object", data)
        with storage.reader("object", start) as file:
            assert file.read(3) + file.read() == data[start:]
            assert file.read() == b""

    def test_a_reader_gives_lines(self, storage: Storage) -> None:
        storage.put("object", b"one\ntwo\nthree")
        with storage.reader("object", 4) as file:
            assert file.readlines() == [b"two\n", b"three"]

    def test_a_reader_can_seek(self, storage: Storage) -> None:
        data = bytes(number % 251 for number in range(3_000_000))
        storage.put("object", data)
        with storage.reader("object", 1000) as file:
            assert file.tell() == 1000
            assert file.read(10) == data[1000:1010]
            assert file.seek(2_900_000) == 2_900_000
            assert file.read(5) == data[2_900_000:2_900_005]
            assert file.seek(-7, 2) == len(data) - 7
            assert file.read() == data[-7:]
            file.seek(0)
            assert file.read() == data
            assert file.seek(len(data) + 5) == len(data) + 5
            assert file.read() == b""
            with pytest.raises(OSError, match="Invalid argument"):
                file.seek(-1)

    def test_a_reader_before_the_beginning_is_refused(self, storage: Storage) -> None:
        storage.put("object", b"x")
        with pytest.raises(ConfigError, match="-1"):
            storage.reader("object", -1)

    # Writing piece by piece

    def test_pieces_become_one_object_at_the_end(self, storage: Storage) -> None:
        with storage.writer("folder/object") as writer:
            writer.write(b"one ")
            writer.write(b"")
            writer.write(b"object")
            assert not storage.exists("folder/object")
            assert keys(storage) == []
        assert storage.get("folder/object") == b"one object"

    def test_the_object_before_it_stays_until_the_end(self, storage: Storage) -> None:
        storage.put("object", b"old")
        with storage.writer("object") as writer:
            writer.write(b"new" * 1_000_000)
            assert storage.get("object") == b"old"
        assert storage.get("object") == b"new" * 1_000_000

    def test_an_exception_leaves_nothing_and_passes(self, storage: Storage) -> None:
        storage.put("kept", b"old")

        def fail_while_writing(key: str) -> None:
            with storage.writer(key) as writer:
                writer.write(b"new" * 1_000_000)
                raise ZeroDivisionError

        for key in ("kept", "folder/none"):
            with pytest.raises(ZeroDivisionError):
                fail_while_writing(key)
        assert sizes(storage) == [("kept", 3)]
        assert storage.get("kept") == b"old"
        assert storage.discard_unfinished() == 0

    def test_two_writers_of_one_object_do_not_mix(self, storage: Storage) -> None:
        with storage.writer("object") as first, storage.writer("object") as second:
            first.write(b"aa")
            second.write(b"bb")
            first.write(b"aa")
        assert storage.get("object") == b"aaaa"  # the outer one ends last
        assert keys(storage) == ["object"]

    def test_a_writer_holds_no_more_than_its_pieces(self, storage: Storage) -> None:
        piece = b"x" * (1 << 20)
        tracemalloc.start()
        try:
            with storage.writer("object") as writer:
                for _ in range(64):
                    writer.write(piece)
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert storage.head("object").size_bytes == 64 << 20
        assert peak_bytes < 16 << 20

    # What is not there

    @pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
    @pytest.mark.parametrize("key", ["missing", "folder", "folder/object/below", "no/such/folder"])
    def test_a_missing_object_is_named(
        self, storage: Storage, read: Callable[[Storage, str], object], key: str
    ) -> None:
        storage.put("folder/object", b"x")
        with pytest.raises(ObjectNotFound, match=key):
            read(storage, key)
        assert not storage.exists(key)

    @pytest.mark.parametrize("operation", [*READS.values(), *WRITES.values()], ids=[*READS.keys(), *WRITES.keys()])
    @pytest.mark.parametrize(
        "key", ["", "/", "/etc/passwd", "a//b", "a/", "./a", "a/./b", "..", "../a", "a/../b", "a\0b"]
    )
    def test_a_bad_key_is_refused(
        self, storage: Storage, operation: Callable[[Storage, str], object], key: str
    ) -> None:
        with pytest.raises(ConfigError, match="key"):
            operation(storage, key)

    # Listing

    def test_a_list_is_sorted_by_key(self, storage: Storage) -> None:
        # Sorted as strings, "a-b" and "a.b" come before "a/b"; sorted folder by folder they would not.
        put = ["b", "a/b", "a-b", "a.b", "a/c/d", "a/c-d", "B", "ä", "a0"]
        for key in put:
            storage.put(key, key.encode())
        assert sizes(storage) == [(key, len(key.encode())) for key in sorted(put)]

    @examples
    @given(
        put=st.sets(st.sampled_from(["a1", "a2/b", "a2/c/d", "a2/c/e", "a2/cc", "a3/b", ".a/b"])),
        prefix=st.sampled_from(["", "a", "a2", "a2/", "a2/c", "a2/c/", "a2/c/d", "a2/c/d/", ".", "z", "a3/bb", "a1/"]),
    )
    def test_a_prefix_is_the_beginning_of_a_key(self, storage: Storage, put: set[str], prefix: str) -> None:
        for key in keys(storage):
            storage.delete(key)
        for key in put:
            storage.put(key, b"")
        assert keys(storage, prefix) == sorted(key for key in put if key.startswith(prefix))

    @pytest.mark.parametrize("prefix", ["../", "/", "a/../../", "/etc/", "a//", "\0"])
    def test_a_prefix_never_leads_out(self, storage: Storage, prefix: str) -> None:
        with pytest.raises(ConfigError, match="not valid"):
            list(storage.list(prefix))
        with pytest.raises(ConfigError, match="not valid"):
            storage.discard_unfinished(prefix)

    def test_a_list_goes_on_while_objects_go(self, storage: Storage) -> None:
        names = [f"folder{n % 5}/{n:03d}" for n in range(100)]
        for name in names:
            storage.put(name, b"x")
        with ThreadPoolExecutor() as pool:
            deleting = pool.submit(lambda: [storage.delete(name) for name in names[10:]])
            while not deleting.done():
                assert set(keys(storage)) >= set(names[:10])
            deleting.result()
        assert keys(storage) == sorted(names[:10])

    # Deleting

    def test_a_deleted_object_is_gone_and_its_neighbours_stay(self, storage: Storage) -> None:
        storage.put("folder/a", b"x")
        storage.put("folder/b", b"x")
        storage.delete("folder/a")
        assert keys(storage) == ["folder/b"]
        assert not storage.exists("folder/a")

    @pytest.mark.parametrize("key", ["missing", "folder", "folder/object/below", "no/such/folder"])
    def test_deleting_what_is_not_there_does_nothing(self, storage: Storage, key: str) -> None:
        storage.put("folder/object", b"x")
        storage.delete(key)
        storage.delete(key)
        assert keys(storage) == ["folder/object"]

    # Killed writers

    def test_what_a_killed_writer_left_is_unseen_and_can_be_discarded(self, storage: Storage) -> None:
        storage.put("folder/object", b"old")
        storage.put("folder/other", b"other")
        for key in ("folder/object", "top"):
            killed = run_killed_at(python(PUT, pickled(storage), key), "storage.before_rename")
            assert killed.fired
            assert killed.finished.returncode == -signal.SIGKILL
        assert keys(storage) == ["folder/object", "folder/other"]
        assert storage.get("folder/object") == b"old"
        assert [storage.discard_unfinished(prefix) for prefix in ("other/", "folder/p", "folder/object/")] == [0, 0, 0]
        assert storage.discard_unfinished("folder/o") == self.leftovers
        assert storage.discard_unfinished() == self.leftovers
        assert storage.discard_unfinished() == 0
        assert [storage.get("folder/object"), storage.get("folder/other")] == [b"old", b"other"]

    def test_a_put_that_returned_survives_its_killed_process(self, storage: Storage) -> None:
        killed = run_killed_at(python(PUT, pickled(storage), "folder/object"), "storage.after_put")
        assert killed.fired
        assert storage.get("folder/object") == b"new" * 1000
        assert storage.discard_unfinished() == 0

    def test_discarding_keeps_every_object(self, storage: Storage) -> None:
        put = ["a", "folder/b", ".hidden/c.tmp", "folder/d.lock"]
        for key in put:
            storage.put(key, b"x")
        assert storage.discard_unfinished() == 0
        assert keys(storage) == sorted(put)

    # Locks

    def test_a_lock_is_held_against_other_processes(self, storage: Storage) -> None:
        with held_open(python(HOLD, pickled(storage), "folder/lock")) as holder:
            refused = f"process {holder.pid} for feeding the cat"
            with pytest.raises(StorageBusy, match=refused), storage.exclusive("folder/lock", purpose="testing"):
                pytest.fail("two hold one lock")
            with storage.exclusive("folder/another", purpose="testing"):
                pass
        with storage.exclusive("folder/lock", purpose="testing"):
            pass

    def test_a_lock_ends_with_its_killed_holder(self, storage: Storage) -> None:
        with held_open(python(HOLD, pickled(storage), "folder/lock")) as holder:
            holder.kill()
            holder.wait(30)
            with storage.exclusive("folder/lock", purpose="testing"):
                pass

    def test_a_lock_is_held_against_other_threads(self, storage: Storage) -> None:
        def attempt(_: int) -> bool:
            try:
                with storage.exclusive("lock", purpose="testing"):
                    return True
            except StorageBusy:
                return False

        with ThreadPoolExecutor(4) as pool, storage.exclusive("lock", purpose="testing"):
            assert list(pool.map(attempt, range(4))) == [False] * 4
        assert attempt(0)

    def test_a_lock_ends_with_an_exception(self, storage: Storage) -> None:
        with pytest.raises(ZeroDivisionError), storage.exclusive("lock", purpose="testing"):
            raise ZeroDivisionError
        with storage.exclusive("lock", purpose="testing"):
            pass

    def test_a_lock_is_no_object(self, storage: Storage) -> None:
        with storage.exclusive("folder/lock", purpose="testing"):
            assert keys(storage) == []
            assert storage.discard_unfinished() == 0
        assert keys(storage) == []

    def test_no_two_are_ever_inside_a_lock(self, storage: Storage) -> None:
        storage.put("count", b"0")
        count = python(COUNT_UNDER_LOCK, pickled(storage), "40")
        with ThreadPoolExecutor(3) as pool:
            finished = list(pool.map(run, [count] * 3))
        assert [process.returncode for process in finished] == [0] * 3, finished
        assert storage.get("count") == b"120"
        assert keys(storage) == ["count"]

    # Threads and processes

    def test_threads_share_an_instance(self, storage: Storage) -> None:
        def work(worker: int) -> None:
            for turn in range(25):
                key = f"folder/inner/{worker}"  # each delete may empty the folder another is about to write into
                storage.put(key, b"%d" % turn)
                assert storage.get(key) == b"%d" % turn
                storage.delete(key)

        with ThreadPoolExecutor(6) as pool:
            list(pool.map(work, range(6)))
        assert keys(storage) == []

    def test_it_pickles_to_another_process(self, storage: Storage) -> None:
        finished = run(python(PUT, pickled(storage), "object"))
        assert finished.returncode == 0, finished.output
        assert finished.output.strip() == storage.url
        assert storage.get("object") == b"new" * 1000
