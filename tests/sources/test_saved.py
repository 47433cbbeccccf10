"""Folders written by ``save_to_disk``: the files they name, in their order, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pytest

from penstock.errors import SourceError
from penstock.sources import open_source
from sources.making import arrow_stream_of
from sources.suite import Event, events


def save(folder: Path, shards: int, **state: Any) -> Path:
    """The layout by hand: shards of two rows in Arrow's stream format, and two JSON files beside them."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05d}-of-{shards:05d}.arrow" for number in range(shards)]
    for number, name in enumerate(names):
        table = pa.table({"text": [f"{number} a", f"{number} b"]})
        (folder / name).write_bytes(arrow_stream_of(table))
    told = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "1a2b", "_split": "train", **state}
    (folder / "state.json").write_bytes(orjson.dumps(told))
    (folder / "dataset_info.json").write_bytes(b'{"features":{}}')
    return folder


def test_a_saved_data_set_is_its_shards(tmp_path: Path) -> None:
    source = open_source(save(tmp_path / "wiki", 2))
    assert source.name == "wiki"
    first, second = "data-00000-of-00002.arrow", "data-00001-of-00002.arrow"
    assert events(source) == [
        Event(f"{first}:1", {"text": "0 a"}),
        Event(f"{first}:2", {"text": "0 b"}),
        Event(f"{second}:1", {"text": "1 a"}),
        Event(f"{second}:2", {"text": "1 b"}),
    ]


def test_the_order_is_the_one_the_state_tells(tmp_path: Path) -> None:
    names = ["data-00001-of-00002.arrow", "data-00000-of-00002.arrow"]
    folder = save(tmp_path / "wiki", 2, _data_files=[{"filename": name} for name in names])
    assert [event.value["text"] for event in events(open_source(folder)) if event.value] == ["1 a", "1 b", "0 a", "0 b"]


def test_files_beside_the_shards_are_not_read(tmp_path: Path) -> None:
    folder = save(tmp_path / "wiki", 1)
    (folder / "cache-123.arrow").write_bytes(arrow_stream_of(pa.table({"text": ["cached"]})))
    assert len(events(open_source(folder))) == 2


def test_several_splits_are_refused_by_name(tmp_path: Path) -> None:
    for split in ("train", "test"):
        save(tmp_path / "wiki" / split, 1)
    (tmp_path / "wiki/dataset_dict.json").write_bytes(b'{"splits":["train","test"]}')
    with pytest.raises(SourceError, match=r"wiki holds several splits \(train, test\): name one, such as .*wiki/train"):
        open_source(tmp_path / "wiki")
    assert len(events(open_source(tmp_path / "wiki" / "test"))) == 2


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"splits":[]}', b'{"splits":5}'])
def test_damaged_splits_are_told(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "dataset_dict.json").write_bytes(content)
    with pytest.raises(SourceError, match=str(tmp_path)):
        open_source(tmp_path)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"_data_files":5}', b'{"_data_files":[5]}', b"\xff"])
def test_a_damaged_state_is_told(tmp_path: Path, content: bytes) -> None:
    folder = save(tmp_path / "wiki", 1)
    (folder / "state.json").write_bytes(content)
    with pytest.raises(SourceError, match=r"state\.json .*save the data set again"):
        open_source(folder)


def test_a_selection_by_index_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "wiki", 1, _indices_data_files=[{"filename": "indices.arrow"}])
    with pytest.raises(SourceError, match="selects rows by an index"):
        open_source(folder)


def test_a_shard_that_is_missing_or_cut_is_told(tmp_path: Path) -> None:
    folder = save(tmp_path / "wiki", 2)
    shard = folder / "data-00001-of-00002.arrow"
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(SourceError, match=r"data-00001-of-00002\.arrow: not a sound Arrow file: .*truncated"):
        events(open_source(folder))
    shard.unlink()
    with pytest.raises(SourceError, match=r"data-00001-of-00002\.arrow.*does not exist"):
        events(open_source(folder))
