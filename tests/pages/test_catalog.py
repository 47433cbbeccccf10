"""What a data set holds is read from its index files, whoever wrote them; what does not add up is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from pages.making import batches_of, choose, loader_of, make_dataset, put_shards, shard_bytes, texts_of
from penstock import R2DatasetLoader
from penstock.errors import SourceError
from penstock.pages import Catalog, PagedDataset, make_index, write_index
from penstock.pages.catalog import parse_catalog
from penstock.pages.index import _place
from penstock.storage import LocalStorage, open_storage

ROOT = ("bucket", "some", "folder")


def entry(*shards: tuple[str, int], **more: Any) -> dict[str, Any]:
    return {"shards": [{"path": path, "num_rows": rows} for path, rows in shards], **more}


def parse(sizes: Any, metadata: str | None = None) -> Catalog:
    data = sizes if isinstance(sizes, bytes) else orjson.dumps(sizes)
    return parse_catalog(data, metadata.encode() if metadata is not None else None, where="set", root=ROOT)


def told(catalog: Catalog) -> dict[str, int]:
    return {f"{part.config}/{part.split}": part.num_rows for part in catalog.parts}


# -- reading -----------------------------------------------------------------------------------------------------------


def test_configs_have_the_split_they_are_said_to_have() -> None:
    sizes = {"a": entry(("a/0", 5)), "b": entry(("b/0", 7), split="validation"), "c": entry(("c/0", 1), split="test")}
    assert told(parse(sizes)) == {"a/train": 5, "b/valid": 7, "c/test": 1}


def test_a_shard_may_be_of_another_split_than_its_config() -> None:
    sizes = {"a": {"shards": [{"path": "0", "num_rows": 5}, {"path": "1", "num_rows": 2, "split": "test"}]}}
    assert told(parse(sizes)) == {"a/train": 5, "a/test": 2}


def test_only_configs_that_the_metadata_names_are_meant(caplog: pytest.LogCaptureFixture) -> None:
    sizes = {"a": entry(("a/0", 5)), "b": entry(("b/0", 7))}
    listed = "configs:\n- config_name: default\n- config_name: b\n  data_files:\n  - split: train\n    path: b/*\n"
    assert told(parse(sizes, listed)) == {"b/train": 7}
    assert "'a' are left out" in caplog.text
    assert told(parse(sizes, "license: mit\n")) == told(parse(sizes)) == {"a/train": 5, "b/train": 7}


def test_a_config_that_stands_for_all_others_is_not_read_twice() -> None:
    one, two = ("a/0", 5), ("b/0", 7)
    assert told(parse({"default": entry(one, two), "a": entry(one), "b": entry(two)})) == {"a/train": 5, "b/train": 7}
    assert told(parse({"default": entry(one, two)})) == {"default/train": 12}


@pytest.mark.parametrize(
    "path",
    [
        "a/0.parquet",
        "./a/0.parquet",
        "bucket/some/folder/a/0.parquet",
        "some/folder/a/0.parquet",
        "s3://bucket/some/folder/a/0.parquet",
        "another-bucket/some/folder/a/0.parquet",
        "s3://another-bucket/folder/a/0.parquet",
    ],
)
def test_a_path_may_be_written_from_the_bucket_or_from_the_folder(path: str) -> None:
    (part,) = parse({"a": entry((path, 5))}).parts
    assert part.shards[0].path == "a/0.parquet"


def test_folders_named_like_the_data_set_are_folders_all_the_same() -> None:
    sizes = {"a": entry(("folder/a/0", 5)), "b": entry(("folder/b/0", 5))}

    def paths(**more: Any) -> list[str]:
        data = orjson.dumps({name: {**fields, **more} for name, fields in sizes.items()})
        found = parse_catalog(data, None, where="set", root=ROOT, exists=lambda path: path in there)
        return [part.shards[0].path for part in found.parts]

    there = {"folder/a/0", "folder/b/0", "a/0"}
    assert paths() == paths(relative=True) == ["folder/a/0", "folder/b/0"]
    there = {"a/0", "b/0"}
    assert paths() == ["a/0", "b/0"]
    assert paths(relative=True) == ["folder/a/0", "folder/b/0"]


def test_the_identity_goes_by_what_is_there_and_not_by_where_or_in_what_order() -> None:
    sizes = {"b": entry(("b/0", 7)), "a": entry(("a/0", 5), ("a/1", 0))}
    folder = "bucket/some/folder"
    same = {
        "a": entry((f"{folder}/a/0", 5), (f"{folder}/a/1", 0), total_rows=5),
        "b": entry((f"{folder}/b/0", 7), split="train"),
    }
    assert parse(sizes).dataset_id == parse(same).dataset_id
    for other in (
        {**sizes, "c": entry(("c/0", 1))},
        {**sizes, "a": entry(("a/1", 0), ("a/0", 5))},
        {**sizes, "b": entry(("b/0", 8))},
        {**sizes, "b": entry(("b/0", 7), split="test")},
        {**sizes, "b": entry(("b/1", 7))},
    ):
        assert parse(other).dataset_id != parse(sizes).dataset_id


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [
        (b"{", "not JSON"),
        (b"\xff", "not JSON"),
        ([], "expected an object of configs"),
        ({"a": 5}, "expected an object of configs"),
        ({"a": {}}, "config 'a' has no list of shards"),
        ({"a": entry(split=3)}, "config 'a' has split=3, a split that is no name"),
        ({"a": entry(("x", 1), split="")}, "config 'a' has split='', a split that is no name"),
        ({"a": entry(("x", 1), total_rows="1")}, "config 'a' has total_rows='1': expected a count"),
        ({"a": {"shards": [{"path": "x", "num_rows": 1, "split": ""}]}}, "split=''"),
        ({"a": entry(*((f"x{k}", 2**53) for k in range(1100)))}, "tells of .* rows: expected 9007199254740992 or"),
        ({"a": {"shards": [5]}}, "shard 0 of config 'a' is not understood"),
        ({"a": {"shards": [{"path": "x"}]}}, "shard 0 of config 'a' has path='x', num_rows=None"),
        ({"a": entry(("x", -1))}, "num_rows=-1"),
        ({"a": {"shards": [{"path": "x", "num_rows": True}]}}, "num_rows=True"),
        ({"a": {"shards": [{"path": "x", "num_rows": 1, "size_bytes": "y"}]}}, "size_bytes='y'"),
        ({"a": {"shards": [{"path": "x", "num_rows": 1, "split": 2}]}}, "split=2"),
        ({"a": entry(("../x", 1))}, "expected a path below the data set's folder"),
        ({"a": entry(("", 1))}, "expected a path below"),
        ({"a": entry(("x", 1), total_rows=2)}, "config 'a' is said to have 2 rows, its shards have 1"),
        (
            {"a": entry(("x", 1)), "b": entry(("x", 1))},
            "x is in a/train and in b/train, so its rows would be read twice",
        ),
        ({"a": entry(("x", 1), ("x", 1))}, "would be read twice"),
        ({"a": entry(("x", 0))}, "tells of no rows"),
        ({}, "tells of no rows"),
    ],
)
def test_sizes_that_do_not_add_up_are_refused(sizes: Any, problem: str) -> None:
    with pytest.raises(SourceError, match=problem):
        parse(sizes)


@pytest.mark.parametrize(
    "metadata", ["{", "configs: 3", "configs: []", "configs:\n- name: x\n", "a: !!python/none x", "d: 2013-99-99"]
)
def test_metadata_that_is_not_understood_is_refused(metadata: str) -> None:
    with pytest.raises(SourceError, match=r"_metadata\.yaml is not .*penstock pages index"):
        parse({"a": entry(("x", 1))}, metadata)


# -- making ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "config", "split"),
    [
        ("web/0001.parquet", "web", "train"),
        ("web/train-00000-of-00002.parquet", "web", "train"),
        ("web/validation-00000-of-00001.parquet", "web", "valid"),
        ("web/test/0.parquet", "web", "test"),
        ("data/web/0.parquet", "web", "train"),
        ("data/train-0.parquet", "default", "train"),
        ("data/test/0.parquet", "default", "test"),
        ("0.parquet", "default", "train"),
        ("dev.parquet", "default", "valid"),
        ("train/0.parquet", "default", "train"),
        ("testing/0.parquet", "testing", "train"),
        ("CC-MAIN-2013-20/000_00000.parquet", "CC-MAIN-2013-20", "train"),
        ("web/a/b/c.parquet", "web", "train"),
    ],
)
def test_a_shards_path_tells_its_config_and_split(key: str, config: str, split: str) -> None:
    assert _place(key) == (config, split)


def test_the_index_is_the_same_whoever_makes_it_and_written_once(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path / "set", {"b": 150, "a": 100})
    storage = open_storage(folder)
    first = {name: (folder / name).read_bytes() for name in ("_shard_sizes.json", "_metadata.yaml")}
    stamps = {name: (folder / name).stat().st_mtime_ns for name in first}
    for requests in (1, 7):
        assert not write_index([storage], make_index(storage, max_requests=requests)[0])
    assert {name: (folder / name).stat().st_mtime_ns for name in first} == stamps
    assert first["_metadata.yaml"] == b"configs:\n- config_name: a\n- config_name: b\n"
    assert orjson.loads(first["_shard_sizes.json"])["a"]["shards"][1]["num_rows"] == 10


def test_hidden_and_other_files_are_no_shards(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path / "set", {"a": 10})
    for name in ("_tmp/0.parquet", ".cache/0.parquet", "a/readme.md", "a/.0.parquet", "a/_temporary/x.parquet"):
        open_storage(folder).put(name, b"x")
    assert make_index(open_storage(folder))[1].as_dict()["rows"] == 10


def test_nothing_to_index_is_told(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"no \.parquet files below it"):
        make_index(open_storage(tmp_path))


# -- a data set with less, or other, than it should have ---------------------------------------------------------------


def test_without_sizes_the_way_to_make_them_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"has no _shard_sizes\.json.*penstock pages index"):
        choose(tmp_path / "nothing")


def test_without_metadata_all_configs_are_taken(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path / "set", {"a": 50, "b": 40})
    expected = choose(folder, 3, 30)
    (folder / "_metadata.yaml").unlink()
    again = R2DatasetLoader.next_pages(4, 3, "me", 30, dataset=PagedDataset(LocalStorage(folder)))
    assert list(again) == list(expected)
    assert batches_of(loader_of(again)) == batches_of(loader_of(expected))


def test_an_index_that_is_written_again_is_seen_when_pages_are_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.pages.dataset.FRESH_S", 0.0)
    folder = make_dataset(tmp_path / "set", {"a": 50})
    before = choose(folder, 5, 10)
    put_shards(folder, {"a/9999.parquet": shard_bytes(texts_of("a", 30))})
    after = choose(folder, 8, 10)
    assert len(after) == 8
    assert before != after[:5]
    assert batches_of(loader_of(list(before), dataset=before.dataset)) == batches_of(loader_of(before))
