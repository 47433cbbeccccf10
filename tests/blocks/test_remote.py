"""Ingesting onto an object store: written once whatever happens, the same bytes as on a disk, nothing left over."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from blocks.data import all_rows, damages, numbered, write_jsonl
from blocks.remote_stores import files, objects
from equipment.buckets import use_key
from equipment.faults import each_hit
from equipment.nursery import Nursery, nursery
from equipment.proxy import faulty_proxy
from equipment.servers import S3Server
from penstock.blocks import IngestProgress, ingest
from penstock.blocks.ingesting import write_blocks
from penstock.blocks.request import IngestRequest
from penstock.errors import AccessDenied, BadRowError, BlockStoreError, StorageBusy
from penstock.sources import open_source
from penstock.storage import open_storage

ROWS = numbered(25)
SKIP = {"block_size": 10, "on_bad_row": "skip"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "rows.jsonl", [*ROWS[:13], b"a bad row", *ROWS[13:]])


@pytest.fixture
def whole(tmp_path: Path, source: Path) -> dict[str, bytes]:
    """What an ingest into a folder writes."""
    ingest(source, tmp_path / "whole", 10, on_bad_row="skip")
    return files(tmp_path / "whole")


@pytest.fixture(scope="module")
def forks(s3: S3Server) -> Iterator[Nursery]:
    keys = {"AWS_ACCESS_KEY_ID": "tester", "AWS_SECRET_ACCESS_KEY": "tester-secret", "AWS_REGION": "us-east-1"}
    with nursery({**keys, "AWS_ENDPOINT_URL": s3.url}) as ready:
        yield ready


def test_it_writes_what_it_writes_into_a_folder_and_says_so_again(
    source: Path, whole: dict[str, bytes], bucket: str
) -> None:
    ingest(source, bucket, 10, on_bad_row="skip")
    assert objects(bucket) == whole
    assert all_rows(bucket) == ROWS
    assert damages(bucket) == {}
    told: list[IngestProgress] = []
    ingest(source, bucket, 10, on_bad_row="skip", on_progress=told.append)
    assert [progress.state for progress in told] == ["already complete"]
    assert objects(bucket) == whole


def test_large_blocks_go_up_in_parts(
    tmp_path: Path, bucket: str, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(3)
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": chance.randbytes(500_000).hex()} for _ in range(24)])
    ingest(source, tmp_path / "out", 20)
    with faulty_proxy(s3.url) as proxy:
        use_key(monkeypatch, "tester", proxy.url)
        ingest(source, bucket, 20)
        parts = [path for method, path, _ in proxy.requests if method == "PUT" and "partNumber" in path]
    assert len(parts) > 2
    use_key(monkeypatch, "tester", s3.url)
    assert objects(bucket) == files(tmp_path / "out")
    assert all_rows(bucket) == all_rows(tmp_path / "out")


# Kills


def test_killed_at_any_point_it_ends_like_one_never_killed(
    forks: Nursery, source: Path, whole: dict[str, bytes], bucket: str
) -> None:
    with TemporaryDirectory() as folder:
        trace = Path(folder, "trace")
        assert forks.ingest(str(source), f"{bucket}/traced", env={"PENSTOCK_FAULT_TRACE": str(trace)}, **SKIP) == 0
        hits = [tuple(line.split("\t")) for line in trace.read_text().splitlines()]
        # A header, three blocks with index and marker, a manifest; then the journal goes, a header and three markers.
        assert len(hits) == 2 * (1 + 3 * 3 + 1) + 4
        for number, (point, subject, nth) in enumerate(each_hit(hits)):  # pyright: ignore[reportArgumentType]
            dest, once = f"{bucket}/{number}", Path(folder, str(number))
            fault = {"PENSTOCK_FAULT": f"{point}|{subject}|{nth}", "PENSTOCK_FAULT_ONCE": str(once)}
            assert forks.ingest(str(source), dest, env=fault, **SKIP) == -signal.SIGKILL
            assert once.exists(), f"never came to {point} {subject} {nth}"
            assert forks.ingest(str(source), dest, **SKIP) == 0
            assert objects(dest) == whole, f"differs after a kill at {point} {subject} {nth}"


def test_killed_at_random_moments_it_ends_like_one_never_killed(forks: Nursery, tmp_path: Path, bucket: str) -> None:
    rows = [{"text": f"sample {number} " + "x" * (number % 900), "id": number} for number in range(6_000)]
    rows += [{"text": random.Random(number).randbytes(400_000).hex()} for number in range(12)]  # a block in parts
    source = write_jsonl(tmp_path / "rows.jsonl", rows)
    ingest(source, tmp_path / "whole", 300)
    seed = random.SystemRandom().randrange(1 << 32)
    chance, kills, dest = random.Random(seed), 0, 0
    while kills < 12:
        killed = forks.ingest(str(source), f"{bucket}/{dest}", kill_after_s=chance.uniform(0.02, 0.25), block_size=300)
        assert killed in (0, -signal.SIGKILL)
        kills += killed != 0
        dest += killed == 0  # this one is through: begin another
    for number in range(dest + 1):
        assert forks.ingest(str(source), f"{bucket}/{number}", block_size=300) == 0
        assert objects(f"{bucket}/{number}") == files(tmp_path / "whole"), f"seed {seed}"
    assert damages(f"{bucket}/{dest}") == {}


# Two writers


def write_without_lock(source: Path, url: str) -> None:
    """What a writer does that has lost its lock and does not know it yet."""
    request = IngestRequest(block_size=10, on_bad_row="skip")
    opened = open_source(source)
    write_blocks(open_storage(url), opened, request.header(opened), "skip", None, lambda: None)


def test_two_writers_of_the_same_data_end_with_one_store(source: Path, whole: dict[str, bytes], bucket: str) -> None:
    for turn in range(4):
        with ThreadPoolExecutor(2) as pool:
            for done in [pool.submit(write_without_lock, source, f"{bucket}/{turn}") for _ in range(2)]:
                done.result()
        assert objects(f"{bucket}/{turn}") == whole


def test_a_second_writer_is_told_who_is_at_it(source: Path, whole: dict[str, bytes], bucket: str) -> None:
    with open_storage(bucket).exclusive(".ingest/writer", purpose="ingesting"):
        with pytest.raises(StorageBusy, match=r"in use by process \d+ for ingesting"):
            ingest(source, bucket, 10, on_bad_row="skip")
        assert list(objects(bucket)) == [".ingest/writer.penstock-lock"]
    ingest(source, bucket, 10, on_bad_row="skip")
    assert objects(bucket) == whole


def test_a_writer_that_lost_its_lock_stops_before_its_next_block(source: Path, bucket: str) -> None:
    request, opened = IngestRequest(block_size=10, on_bad_row="skip"), open_source(source)

    def lost() -> None:
        raise StorageBusy("lost")

    with pytest.raises(StorageBusy):
        write_blocks(open_storage(bucket), opened, request.header(opened), "skip", None, lost)
    assert list(objects(bucket)) == [".ingest/header.json"]


@pytest.mark.parametrize("finished", [True, False])
def test_a_writer_of_other_data_is_refused(tmp_path: Path, source: Path, bucket: str, finished: bool) -> None:
    other = write_jsonl(tmp_path / "other.jsonl", numbered(30))
    if finished:
        ingest(source, bucket, 10, on_bad_row="skip")
    else:
        with pytest.raises(BadRowError, match="rows"):
            ingest(source, bucket, 10)
    before = objects(bucket)
    with pytest.raises(BlockStoreError, match="holds another data set"):
        ingest(other, bucket, 10)
    with pytest.raises(BlockStoreError, match="holds another data set"):
        write_without_lock(other, bucket)
    assert objects(bucket) == before


def test_a_manifest_of_other_data_that_came_in_between_is_not_replaced(source: Path, bucket: str) -> None:
    storage = open_storage(bucket)

    def on_progress(progress: IngestProgress) -> None:
        if progress.state == "running":
            storage.put_if_absent("block_manifest.json", b"another's")

    with pytest.raises(BlockStoreError, match="finished meanwhile by another writer"):
        ingest(source, bucket, 10, on_bad_row="skip", on_progress=on_progress)
    assert objects(bucket)["block_manifest.json"] == b"another's"


# Permissions and trouble


def test_a_key_that_may_only_read_is_refused_before_anything_is_written(
    source: Path, whole: dict[str, bytes], bucket: str, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_key(monkeypatch, "reader", s3.url)
    with pytest.raises(AccessDenied, match=r"cannot be written, and nothing was.*refused.*403") as caught:
        ingest(source, bucket, 10, on_bad_row="skip")
    assert "secret" not in str(caught.value)
    use_key(monkeypatch, "tester", s3.url)
    assert objects(bucket) == {}
    ingest(source, bucket, 10, on_bad_row="skip")
    use_key(monkeypatch, "reader", s3.url)
    assert all_rows(bucket) == ROWS
    told: list[IngestProgress] = []
    ingest(source, bucket, 10, on_bad_row="skip", on_progress=told.append)
    assert [progress.state for progress in told] == ["already complete"], "nothing is to be written"


def test_a_writers_key_is_enough(
    source: Path, whole: dict[str, bytes], bucket: str, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_key(monkeypatch, "writer", s3.url)
    ingest(source, bucket, 10, on_bad_row="skip")
    assert objects(bucket) == whole


@pytest.mark.usefixtures("quick_retries")
def test_through_refusals_cut_answers_and_stalls_it_arrives(
    source: Path, whole: dict[str, bytes], bucket: str, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with faulty_proxy(s3.url, status=0.2, cut=0.05, lost=0.05, stall=0.02, stall_s=0.5) as proxy:
        use_key(monkeypatch, "tester", proxy.url)
        ingest(source, bucket, 10, on_bad_row="skip")
        assert all_rows(bucket) == ROWS
        assert damages(bucket) == {}
        assert proxy.made["status"] > 3
    use_key(monkeypatch, "tester", s3.url)
    assert objects(bucket) == whole
