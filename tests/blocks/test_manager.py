"""BlockManager: the face of a block store that training looks at."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import orjson
import pytest

from blocks.data import numbered, write_jsonl
from equipment.processes import pickled, python, run
from penstock.blocks import BlockManager, ingest
from penstock.errors import BlockStoreError, ConfigError
from penstock.types import BlockFacts, DatasetIdentity

ROWS = numbered(25)


@pytest.fixture
def dest(tmp_path: Path) -> Path:
    ingest(write_jsonl(tmp_path / "rows.jsonl", ROWS), tmp_path / "out", 10)
    return tmp_path / "out"


def test_constructing_does_no_io(tmp_path: Path) -> None:
    manager = BlockManager(tmp_path / "later")
    with pytest.raises(BlockStoreError, match=r"later is not a block store.*penstock ingest"):
        manager.get_total_blocks()
    ingest(write_jsonl(tmp_path / "rows.jsonl", ROWS), tmp_path / "later", 10)
    assert manager.get_total_blocks() == 3


def test_the_chunk_size_of_a_call_wins(dest: Path) -> None:
    manager = BlockManager(dest, dataset_chunk_size=4)
    assert manager.get_rows(1, 1) == ROWS[14:18]
    assert manager.get_rows(1, 1, 3) == ROWS[13:16]
    assert manager.get_rows(1, 1) == ROWS[14:18]


def test_the_last_chunk_of_a_block_stays_within_its_block(dest: Path) -> None:
    manager = BlockManager(dest, dataset_chunk_size=4)
    assert manager.get_rows(0, 2) == ROWS[8:10]
    assert manager.get_rows(2, 1) == ROWS[24:25]


@pytest.mark.parametrize(
    ("block_id", "chunk_id", "message"),
    [
        (3, 0, "no block 3: its blocks are 0 to 2"),
        (-1, 0, "no block -1: its blocks are 0 to 2"),
        (0, 3, "block 0 has no chunk 3: its chunks of 4 are 0 to 2"),
        (2, 2, "block 2 has no chunk 2: its chunks of 4 are 0 to 1"),
        (0, -1, "block 0 has no chunk -1"),
    ],
)
def test_what_is_not_there_is_named(dest: Path, block_id: int, chunk_id: int, message: str) -> None:
    manager = BlockManager(dest, dataset_chunk_size=4)
    for get in (manager.get_chunk, manager.get_rows):
        with pytest.raises(BlockStoreError, match=message):
            get(block_id, chunk_id)


@pytest.mark.parametrize("size", [0, -1])
def test_a_chunk_that_holds_nothing_is_refused(dest: Path, size: int) -> None:
    with pytest.raises(ConfigError, match=f"chunk size {size}"):
        BlockManager(dest, dataset_chunk_size=size)
    with pytest.raises(ConfigError, match=f"chunk size {size}"):
        BlockManager(dest).get_chunk(0, 0, size)
    with pytest.raises(ConfigError, match=f"chunk size {size}"):
        BlockManager(dest).get_block(0).chunk_count(size)
    with pytest.raises(ConfigError, match=f"samples_per_block={size}"):
        BlockManager(dest, size)


def test_a_store_without_text_gives_rows_and_refuses_chunks(tmp_path: Path) -> None:
    rows = [{"pixels": [1, 2]}, {"text": 5}, {}]
    ingest(write_jsonl(tmp_path / "rows.jsonl", rows), tmp_path / "out", no_text=True)
    manager = BlockManager(tmp_path / "out")
    assert manager.get_rows(0, 0) == rows
    with pytest.raises(BlockStoreError, match=r"has no text column: read it with get_rows"):
        manager.get_chunk(0, 0)


def test_identity_and_facts_are_what_a_ledger_binds_to(dest: Path) -> None:
    manager = BlockManager(dest, dataset_chunk_size=4)
    dataset_id = manager.manifest.header.dataset_id
    assert manager.identity() == DatasetIdentity(dataset_id=dataset_id, block_size=10, chunk_size=4)
    checksum = manager.get_block(2).checksum
    assert manager.facts(2) == BlockFacts(sample_count=5, checksum=checksum)
    assert manager.facts(3) is None
    assert manager.facts(-1) is None


def test_an_empty_data_set_has_no_blocks(tmp_path: Path) -> None:
    ingest(write_jsonl(tmp_path / "rows.jsonl", []), tmp_path / "out")
    manager = BlockManager(tmp_path / "out")
    assert manager.get_total_blocks() == 0
    assert not manager.is_last_block(0)
    assert not manager.is_last_block(-1)
    with pytest.raises(BlockStoreError, match="no block 0"):
        manager.get_block(0)


def test_leaving_it_forgets_the_store_and_using_it_opens_it_again(dest: Path) -> None:
    with BlockManager(dest) as manager:
        assert manager.get_total_blocks() == 3
    assert manager.get_rows(0, 0, 2) == ROWS[:2]


def test_threads_share_one(dest: Path) -> None:
    manager = BlockManager(dest, dataset_chunk_size=5)
    places = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)] * 20
    with ThreadPoolExecutor(8) as pool:
        came = list(pool.map(lambda place: manager.get_rows(*place), places))
    assert came == [ROWS[block * 10 + chunk * 5 :][:5] for block, chunk in places]


@pytest.mark.parametrize("opened", [False, True])
def test_it_pickles_to_another_process(dest: Path, opened: bool) -> None:
    manager = BlockManager(dest, dataset_chunk_size=5)
    if opened:
        manager.get_total_blocks()
    code = "import pickle, sys; print(pickle.loads(bytes.fromhex(sys.argv[1])).get_rows(1, 1))"
    assert run(python(code, pickled(manager))).output.strip() == str(ROWS[15:20])


def test_chats_and_instructions_come_out_as_text_and_the_rows_keep_everything(tmp_path: Path) -> None:
    chat = {"id": 1, "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
    (tmp_path / "chat.jsonl").write_bytes(orjson.dumps(chat) + b"\n" + b'{"id": 2, "messages": "?"}\n{"id": 3}\n')
    manifest = ingest(tmp_path / "chat.jsonl", tmp_path / "chat", on_bad_row="skip")
    manager = BlockManager(tmp_path / "chat")
    assert manager.get_chunk(0, 0) == ["<|user|>\nHi\n<|assistant|>\nHello\n", "?"]
    assert manager.get_rows(0, 0)[0] == chat
    assert [row.position for row in manifest.skipped_rows] == ["chat.jsonl:3"]
