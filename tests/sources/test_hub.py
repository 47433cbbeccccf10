"""``hf://``: which repository, config, split and files a spec means; pinned to a commit and read like any file."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import orjson
import pyarrow as pa
import pytest

from equipment.faults import run_killed_at
from equipment.hub import Fault, Hub, hub_server
from equipment.processes import Finished, python, run
from equipment.trees import tree
from penstock.blocks import BlockManager, ingest
from penstock.errors import SourceError
from penstock.sources import Cursor, ReadOptions, open_source
from penstock.sources.hub_spec import HubSpec, parse_hub_spec
from penstock.sources.modalities import MODALITIES
from sources.making import PACKERS, jsonl_of, parquet_of, tar_of, zip_of
from sources.suite import events, read, rows_a_batch

Publish = Callable[..., str]


def rows(*names: str) -> bytes:
    """JSON lines, a name each."""
    return jsonl_of([{"text": name} for name in names])


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """A Hub that is the default one."""
    with hub_server() as hub, pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
        patch.delenv("HF_TOKEN", raising=False)
        yield hub


@pytest.fixture
def publish(hub: Hub, tmp_path: Path) -> Publish:
    """Publish files as the newest commit of a data set; returns the commit."""

    def publish(name: str, files: dict[str, bytes | str], **more: Any) -> str:
        folder = tmp_path / "repositories" / str(sum(len(found.commits) for found in hub.repositories.values()))
        for key, data in files.items():
            path = folder / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data if isinstance(data, bytes) else data.encode())
        return hub.add(name, folder, **more)

    hub.repositories.clear()
    hub.faults.clear()
    return publish


def texts(spec: str) -> list[str]:
    return [event.value["text"] for event, _ in read(open_source(spec)) if event.value]


def error_of(spec: str, **options: Any) -> str:
    with pytest.raises(SourceError) as caught:
        list(open_source(spec, **options).batches(Cursor()))
    assert "penstock-hub-" not in str(caught.value), "the folder it is laid out in is nobody's business"
    return str(caught.value)


def in_process(hub: Hub, tmp_path: Path, code: str, *args: str) -> Finished:
    """Run code in a process to which the Hub is the only one from the start, as `datasets` needs it."""
    finished = run(python(code, *args), env=environment(hub, tmp_path))
    assert finished.returncode == 0, finished.output
    return finished


def environment(hub: Hub, tmp_path: Path) -> dict[str, str]:
    home, tests = str(tmp_path / "home"), str(Path(__file__).parents[1])
    path = os.pathsep.join(filter(None, [tests, os.environ.get("PYTHONPATH")]))
    # Without torch, which `datasets` would import for nothing.
    return {"HF_ENDPOINT": hub.url, "HF_HOME": home, "USE_TORCH": "0", "PYTHONPATH": path}


# Specs


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("hf://wikitext", {"name": "wikitext"}),
        ("hf://org/name", {"name": "org/name"}),
        ("hf://datasets/org/name", {"name": "org/name"}),
        ("hf://datasets/wikitext", {"name": "wikitext"}),
        ("hf://org/name:en", {"name": "org/name", "first": "en"}),
        ("hf://org/name:en:test", {"name": "org/name", "first": "en", "split": "test"}),
        ("hf://org/name::test", {"name": "org/name", "split": "test"}),
        ("hf://org/name:en:", {"name": "org/name", "first": "en"}),
        ("hf://datasets/org/name:en:test", {"name": "org/name", "first": "en", "split": "test"}),
        ("hf://org/name@v1.0", {"name": "org/name", "revision": "v1.0"}),
        ("hf://org/name@refs/pr/7:en", {"name": "org/name", "revision": "refs/pr/7", "first": "en"}),
        ("hf://datasets/org/name@refs/pr/7:en", {"name": "org/name", "revision": "refs/pr/7", "first": "en"}),
        ("hf://org/name@a%2Fb", {"name": "org/name", "revision": "a/b"}),
        ("hf://datasets/org/name/a.csv", {"name": "org/name", "pattern": "a.csv"}),
        ("hf://datasets/org/name/a/**/[bc]?.csv", {"name": "org/name", "pattern": "a/**/[bc]?.csv"}),
        ("hf://datasets/org/name@main/a.csv", {"name": "org/name", "revision": "main", "pattern": "a.csv"}),
        (
            "hf://datasets/org/name@refs/convert/parquet/en/train/*.parquet",
            {"name": "org/name", "revision": "refs/convert/parquet", "pattern": "en/train/*.parquet"},
        ),
        ("hf://datasets/name@main/a/b.csv", {"name": "name", "revision": "main", "pattern": "a/b.csv"}),
        ("hf:///a/folder", {"name": "/a/folder"}),
        ("hf:///a/f@b[1]:en:test", {"name": "/a/f@b[1]", "first": "en", "split": "test"}),
        ("hf://./here::test", {"name": "./here", "split": "test"}),
        ("hf://..", {"name": ".."}),
        ("hf://~/data:en", {"name": "~/data", "first": "en"}),
    ],
)
def test_a_spec_is_taken_apart(text: str, parts: dict[str, str]) -> None:
    assert parse_hub_spec(text) == HubSpec(text=text, **parts)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("hf://", "'' is no name of a data set: expected hf://name"),
        ("hf://a/b/c", "'a/b/c' is no name"),
        ("hf://a b", "'a b' is no name"),
        ("hf://a:b:c:d", "3 parts behind the name"),
        ("hf://a:train[:10]", "slices are not supported: ingest the whole split, such as hf://a:train;"),
        ("hf://a:en:train[10%:]", "slices are not supported"),
        ("hf:///folder:train[:10]", "slices are not supported"),
        ("hf://a:train+test", "several splits at once"),
    ],
)
def test_a_spec_that_is_none_says_how_it_should_look(text: str, reason: str) -> None:
    with pytest.raises(SourceError) as caught:
        parse_hub_spec(text)
    assert str(caught.value).startswith(text)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("text", "stem"), [("hf://org/name:x", "name"), ("hf://name", "name"), ("hf:///a/folder:en", "folder")]
)
def test_a_data_set_is_named_after_its_repository(text: str, stem: str) -> None:
    assert parse_hub_spec(text).stem == stem


# Configs and splits

CARD = """---
configs:
- config_name: en
  data_files:
  - split: train
    path: ["en/part-*.jsonl", "en/more.jsonl"]
  - split: test
    path: en/test.jsonl
- config_name: de
  data_files: de/*.jsonl
  default: true
- config_name: test
  data_files: odd.jsonl
---
"""
CARDED = {
    "README.md": CARD,
    "en/part-1.jsonl": rows("en1"),
    "en/part-0.jsonl": rows("en0"),
    "en/more.jsonl": rows("more"),
    "en/test.jsonl": rows("entest"),
    "de/x.jsonl": rows("de"),
    "odd.jsonl": rows("odd"),
}


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("hf://org/name", ["de"]),
        ("hf://org/name:de", ["de"]),
        ("hf://org/name:en", ["en0", "en1", "more"]),
        ("hf://org/name:en:train", ["en0", "en1", "more"]),
        ("hf://org/name:en:test", ["entest"]),
        ("hf://org/name:train", ["de"]),
        ("hf://org/name::train", ["de"]),
        ("hf://org/name:test", ["odd"]),
        ("hf://datasets/org/name:en:test", ["entest"]),
    ],
)
def test_the_card_says_which_files_are_which(publish: Publish, spec: str, expected: list[str]) -> None:
    publish("org/name", CARDED)
    assert texts(spec) == expected


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("hf://org/name:fr", ["no config or split 'fr'", "its configs are en, de, test", "hf://org/name:de:train"]),
        ("hf://org/name:fr:train", ["no config 'fr'", "its configs are en, de, test", "hf://org/name:en:train"]),
        (
            "hf://org/name:en:dev",
            ["split 'dev'", "the splits of config 'en' are train, test", "hf://org/name:en:train"],
        ),
        ("hf://org/name::dev", ["split 'dev'", "the splits of config 'de' are train"]),
    ],
)
def test_what_is_not_there_lists_what_is(publish: Publish, spec: str, words: list[str]) -> None:
    publish("org/name", CARDED)
    error = error_of(spec)
    assert all(word in error for word in words), error


def test_several_configs_without_a_default_have_to_be_chosen_from(publish: Publish) -> None:
    publish("org/name", {**CARDED, "README.md": CARD.replace("  default: true\n", "")})
    for spec in ("hf://org/name", "hf://org/name::train"):
        assert "it has several configs: its configs are en, de, test: name one, such as hf://org/name:en" in error_of(
            spec
        )
    assert "no config or split 'train'" in error_of("hf://org/name:train")
    assert texts("hf://org/name:en") == ["en0", "en1", "more"]


def test_several_splits_without_train_have_to_be_chosen_from(publish: Publish) -> None:
    publish("org/name", {"validation.jsonl": rows("v"), "test.jsonl": rows("t")})
    assert "it has several splits: the splits of config 'default' are validation, test" in error_of("hf://org/name")
    assert texts("hf://org/name:test") == texts("hf://org/name:default:test") == ["t"]


@pytest.mark.parametrize(
    "files",
    [
        {"train.jsonl": rows("a"), "test.jsonl": rows("b")},
        {"data/train-00000-of-00001.jsonl": rows("a"), "data/test-00000-of-00001.jsonl": rows("b")},
        {"train/x.jsonl": rows("a"), "test/y.jsonl": rows("b")},
        {"data/train/x.jsonl": rows("a"), "data/test/y.jsonl": rows("b")},
        {"README.md": "# Words alone", "my_train_file.jsonl": rows("a"), "my_test_file.jsonl": rows("b")},
    ],
)
def test_without_a_card_names_of_files_and_folders_tell_splits(publish: Publish, files: dict[str, bytes]) -> None:
    publish("org/name", files)
    assert texts("hf://org/name") == texts("hf://org/name:train") == ["a"]
    assert texts("hf://org/name:test") == texts("hf://org/name::test") == ["b"]


def test_without_any_such_names_everything_is_train(publish: Publish) -> None:
    publish("org/name", {"b.jsonl": rows("b"), "a.jsonl.gz": PACKERS[".gz"](rows("a")), "c/d.jsonl": rows("d")})
    assert sorted(texts("hf://org/name")) == ["a", "b", "d"]
    assert texts("hf://org/name:train") == texts("hf://org/name")


def test_a_repository_holds_one_format_and_the_others_are_told(
    publish: Publish, caplog: pytest.LogCaptureFixture
) -> None:
    publish("org/name", {"a.jsonl": rows("a"), "b.jsonl": rows("b"), "c.csv": "text\nc\n", "notes.md": "words"})
    with caplog.at_level(logging.WARNING):
        assert texts("hf://org/name") == ["a", "b"]
    assert "org/name: left out 1 files that are no part of its splits: c.csv" in caplog.text
    caplog.clear()
    publish("org/name", {"train.jsonl": rows("a"), "test.jsonl": rows("b"), "README.md": "words"})
    with caplog.at_level(logging.WARNING):
        assert texts("hf://org/name") == ["a"]
    assert caplog.text == "", "another split is not left out"


def test_tabs_and_commas_are_told_by_the_suffix(publish: Publish) -> None:
    publish("org/name", {"a.tsv": "text\tn\na,b\t1\n"})
    assert texts("hf://org/name") == ["a,b"]


def test_lines_of_text_are_samples_blank_ones_too(publish: Publish) -> None:
    publish("org/name", {"a.txt": "one\n\nthree"})
    assert texts("hf://org/name") == ["one", "", "three"]


@pytest.mark.parametrize("many", [False, True])
def test_zip_files_are_looked_into(publish: Publish, many: bool) -> None:
    archives = {f"{number:02d}.zip": zip_of({"in/a.jsonl": rows(f"{number}")}) for number in range(20 if many else 1)}
    publish("org/name", {**archives, "README.md": "words"})
    assert texts("hf://org/name") == [str(number) for number in range(len(archives))]


def test_zip_files_may_be_splits(publish: Publish) -> None:
    train = zip_of({"x/1.csv": b"text\na\n", "__MACOSX/1.csv": b""})
    publish("org/name", {"train.zip": train, "test.zip": zip_of({"2.csv": b"text\nb\n"})})
    assert texts("hf://org/name") == ["a"]
    assert texts("hf://org/name:test") == ["b"]


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"README.md": "words"}, "doesn't contain any data files"),
        ({"a.bin": b"\1\0"}, "No (supported) data files found"),
        ({"a.zip": b"no archive"}, "not a zip file"),
        ({"a.zip": zip_of({"a.exe": b""})}, "No (supported) data files found"),
        ({"README.md": "---\nconfigs: [\n---\n", "a.jsonl": rows("a")}, "while parsing"),
        ({"README.md": "---\nconfigs: 5\n---\n", "a.jsonl": rows("a")}, "layout is not understood"),
        ({"README.md": "---\nconfigs:\n- 5\n---\n", "a.jsonl": rows("a")}, "layout is not understood"),
        ({"README.md": CARD, "a.jsonl": rows("a")}, "layout is not understood"),
        ({"README.md": b"---\n\xff\xfe\n---\n", "a.jsonl": rows("a")}, "layout is not understood"),
    ],
)
def test_a_layout_that_is_not_understood_says_why_and_what_to_do(
    publish: Publish, files: dict[str, bytes | str], words: str
) -> None:
    publish("org/name", files)
    error = error_of("hf://org/name")
    assert "org/name: its layout is not understood: " in error
    assert words in error
    assert "name its files, such as hf://datasets/OWNER/NAME/data/*.parquet" in error


def test_a_repository_with_a_script_names_its_conversion_and_runs_nothing(publish: Publish, tmp_path: Path) -> None:
    publish("org/name", {"name.py": f"open({str(tmp_path / 'ran')!r}, 'w')", "a.jsonl": rows("a")})
    assert "hf://datasets/OWNER/NAME@refs/convert/parquet/CONFIG/SPLIT/*.parquet" in error_of("hf://org/name")
    assert not (tmp_path / "ran").exists()
    assert texts("hf://datasets/org/name/a.jsonl") == ["a"]


# Files by name


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("a.jsonl", ["a"]),
        ("data/*.jsonl", ["b", "c"]),
        ("**/*.jsonl", ["a", "b", "c", "d"]),
        ("data/**", ["b", "c", "d"]),
        ("data", ["b", "c", "d"]),
        ("data/", ["b", "c", "d"]),
        ("data/deep", ["d"]),
        ("data/[b].jsonl", ["b"]),
        ("dat?/c.jsonl", ["c"]),
        ("*", ["a"]),
    ],
)
def test_files_can_be_named(publish: Publish, pattern: str, expected: list[str]) -> None:
    files = {"a.jsonl": "a", "data/b.jsonl": "b", "data/c.jsonl": "c", "data/deep/d.jsonl": "d"}
    publish("org/name", {key: rows(text) for key, text in files.items()})
    assert texts(f"hf://datasets/org/name/{pattern}") == expected
    assert texts(f"hf://datasets/org/name@main/{pattern}") == expected


def test_a_named_folder_is_read_as_a_local_one_is(publish: Publish) -> None:
    publish("org/name", {"data/a.jsonl": rows("a"), "data/.hidden.jsonl": b"?", "data/b.png": b"?", "data/LICENSE": ""})
    assert texts("hf://datasets/org/name/data") == ["a"]
    assert "b.png: no reader for '.png'" in error_of("hf://datasets/org/name/data/b.png")


def test_files_that_are_not_there_are_told(publish: Publish) -> None:
    publish("org/name", {"a.jsonl": rows("a")})
    for pattern in ("b.jsonl", "*.csv", "a.jsonl/x", "A.jsonl"):
        assert f"matches '{pattern}'" in error_of(f"hf://datasets/org/name/{pattern}")


def test_files_of_tokens_and_archives_can_be_named(publish: Publish) -> None:
    publish("org/name", {"t.bin": bytes(range(8)), "a.tar.gz": PACKERS[".gz"](tar_of({"x.jsonl": rows("x")}))})
    source = open_source("hf://datasets/org/name/t.bin", options=ReadOptions(tokens_per_sample=2))
    lines = [line for batch in source.batches(Cursor()) for line in batch.lines]
    assert lines == [b'{"input_ids":[256,770]}\n', b'{"input_ids":[1284,1798]}\n']
    assert texts("hf://datasets/org/name/a.tar.gz") == ["x"]


# Revisions


def test_a_revision_is_a_branch_a_tag_or_a_commit(hub: Hub, publish: Publish) -> None:
    first = publish("org/name", {"a.jsonl": rows("first")})
    hub.repositories["org/name"].branches |= {"v1": first, "refs/convert/parquet": first}
    second = publish("org/name", {"a.jsonl": rows("second")})
    assert texts("hf://org/name") == ["second"]
    for revision in ("v1", first, "refs/convert/parquet", "refs%2Fconvert%2Fparquet"):
        assert texts(f"hf://org/name@{revision}") == texts(f"hf://org/name@{revision}:default:train") == ["first"]
    assert open_source("hf://org/name").pinned == second
    assert open_source("hf://org/name@v1").pinned == first
    assert "org/name at v9: there is no such thing" in error_of("hf://org/name@v9")


def test_the_content_is_the_identity_and_not_the_commit(publish: Publish) -> None:
    publish("org/name", {"a.jsonl": rows("first")})
    first = open_source("hf://org/name").revision()
    publish("org/name", {"a.jsonl": rows("first"), "README.md": "words"})
    assert open_source("hf://org/name").revision() == first
    publish("org/name", {"a.jsonl": rows("other")})
    assert open_source("hf://org/name").revision() != first


@pytest.mark.parametrize("name", ["org/nothing", "nothing"])
def test_a_repository_that_is_not_there_is_told(publish: Publish, name: str) -> None:
    assert f"hf://{name}: data set {name}: the server answered 401" in error_of(f"hf://{name}")


INGEST = """
import sys
from penstock.blocks import ingest
ingest(sys.argv[1], sys.argv[2], 10, no_text=len(sys.argv) > 3)
"""
MANY = [{"text": f"row {number}", "n": number} for number in range(35)]


@pytest.mark.parametrize("form", ["jsonl", "csv with a card"])
def test_an_ingest_goes_on_at_the_commit_it_began_with(hub: Hub, publish: Publish, tmp_path: Path, form: str) -> None:
    def files(changed: list[dict[str, Any]]) -> dict[str, bytes | str]:
        if form == "jsonl":
            return {"a.jsonl": jsonl_of(changed)}
        card = "---\nconfigs:\n- config_name: default\n  data_files: a.csv\n  sep: ;\n---\n"
        return {"README.md": card, "a.csv": "text;n\n" + "".join(f"{row['text']};{row['n']}\n" for row in changed)}

    first = publish("org/name", files(MANY))
    in_process(hub, tmp_path, INGEST, "hf://org/name", str(tmp_path / "whole"))
    command = python(INGEST, "hf://org/name", str(tmp_path / "out"))
    env = environment(hub, tmp_path)
    killed = run_killed_at(command, "storage.before_rename", "blocks/block_00002.jsonl", env=env)
    assert killed.finished.returncode == -signal.SIGKILL
    second = publish("org/name", files([{"text": "other", "n": 0} for _ in range(80)]))
    in_process(hub, tmp_path, INGEST, "hf://org/name", str(tmp_path / "out"))
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")
    manifest = orjson.loads((tmp_path / "out/block_manifest.json").read_bytes())
    assert manifest["revision"] == first != second
    assert manifest["source"] == "hf://org/name"
    assert manifest["total_samples"] == 35


# Reading on

FORMS: dict[str, Callable[[list[dict[str, Any]]], bytes]] = {
    "jsonl": jsonl_of,
    "jsonl.gz": lambda values: PACKERS[".gz"](jsonl_of(values)),
    "csv": lambda values: ("text,n\n" + "".join(f'"{row["text"]}",{row["n"]}\n' for row in values)).encode(),
    "parquet": lambda values: parquet_of(pa.Table.from_pylist(values), 3),
}


@pytest.mark.parametrize("suffix", FORMS)
def test_any_place_can_be_gone_on_from(hub: Hub, publish: Publish, suffix: str) -> None:
    publish("org/name", {f"a.{suffix}": FORMS[suffix](MANY[:8]), f"b.{suffix}": FORMS[suffix](MANY[8:12])})
    hub.faults.append(Fault(f"b.{suffix}", 2, 503, {"Retry-After": "0"}))
    source = open_source("hf://org/name")
    with rows_a_batch(20):
        came = list(read(source))
        expected = [event for event, _ in came]
        assert [event.value["text"] for event in expected if event.value] == [row["text"] for row in MANY[:12]]
        for index, (_, cursor) in enumerate(came):
            assert cursor is not None
            stored = Cursor(**orjson.loads(orjson.dumps(cursor.as_dict())))
            assert events(source, stored) == expected[index + 1 :]
        assert events(open_source("hf://org/name"), came[5][1]) == expected[6:]


def test_progress_is_told_by_bytes(publish: Publish) -> None:
    publish("org/name", {"a.jsonl": jsonl_of(MANY), "b.jsonl": jsonl_of(MANY)})
    source = open_source("hf://org/name")
    with rows_a_batch(20):
        passed = [source.position_bytes(cursor) for _, cursor in read(source) if cursor]
    assert source.size_bytes() == 2 * len(jsonl_of(MANY))
    assert passed == sorted(passed)  # pyright: ignore[reportArgumentType]


def test_a_file_that_breaks_off_is_told_and_keeps_what_was_finished(hub: Hub, publish: Publish, tmp_path: Path) -> None:
    publish("org/name", {"a.jsonl": jsonl_of(MANY), "b.jsonl": jsonl_of(MANY)})
    hub.faults.append(Fault("b.jsonl", 1, 403))
    with pytest.raises(SourceError, match=r"b\.jsonl: cannot be read: .*answered 403"):
        ingest("hf://org/name", tmp_path / "out", 10)
    assert not (tmp_path / "out/block_manifest.json").exists()
    ingest("hf://org/name", tmp_path / "out", 10)
    ingest("hf://org/name", tmp_path / "whole", 10)
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


# What only `datasets` can read

STREAM = """
import sys
import orjson
from penstock.errors import SourceError
from penstock.sources import open_source, streamed
from sources.suite import events, read
streamed.BATCH_ROWS = 3
try:
    source = open_source(sys.argv[1])
    came = list(read(source))
    expected = [event for event, _ in came]
    for index, (_, cursor) in enumerate(came):
        assert events(source, cursor) == expected[index + 1:], cursor
    assert events(open_source(sys.argv[1]), came[3][1]) == expected[4:]
    rows = [event.value for event, _ in came]
    positions = [event.position for event, _ in came]
    told = dict(kind=type(source).__name__, rows=rows, positions=positions, revision=source.revision())
except SourceError as error:
    told = dict(error=str(error))
print("told", orjson.dumps(told).decode())
"""


def streamed(hub: Hub, tmp_path: Path, spec: str) -> dict[str, Any]:
    output = in_process(hub, tmp_path, STREAM, spec).output
    return orjson.loads(output.rpartition("told ")[2])


def card(settings: str, files: str) -> str:
    return f"---\nconfigs:\n- config_name: default\n  data_files: {files}\n  {settings}\n---\n"


def test_settings_in_the_card_are_heeded(hub: Hub, publish: Publish, tmp_path: Path) -> None:
    content = "text;n\n" + "".join(f"row {number};{number}\n" for number in range(8))
    publish("org/name", {"README.md": card("sep: ;", "a.csv"), "a.csv": content})
    told = streamed(hub, tmp_path, "hf://org/name")
    assert told["kind"] == "StreamedSource"
    assert told["rows"] == [{"text": f"row {number}", "n": number} for number in range(8)]
    assert told["positions"] == [f"name[train]:{number + 1}" for number in range(8)]
    publish("org/name", {"README.md": card("sep: ','", "a.csv"), "a.csv": content})
    assert open_source("hf://org/name").revision()["kind"] == "files", "what the card says is what is usual"
    publish("org/name", {"README.md": card("sep: '|'", "a.csv"), "a.csv": content})
    other = open_source("hf://org/name").revision()
    assert other["files"] == told["revision"]["files"]
    assert other != told["revision"], "another setting makes other rows"


def test_a_local_folder_with_settings_is_streamed_too(hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "local"
    folder.mkdir()
    (folder / "README.md").write_text(card("field: data", "a.json"), encoding="utf-8")
    (folder / "a.json").write_bytes(orjson.dumps({"data": MANY[:5]}))
    told = streamed(hub, tmp_path, f"hf://{folder}")
    assert told["rows"] == MANY[:5]
    (folder / "a.json").write_bytes(orjson.dumps({"data": MANY[1:6]}))
    changed = open_source(f"hf://{folder}").revision()
    assert changed != told["revision"], "a changed file of the same size is a changed source"


def test_samples_of_several_files_each_are_rows(hub: Hub, publish: Publish, tmp_path: Path) -> None:
    members = {f"{number}.{suffix}": b'{"k":%d}' % number for number in range(7) for suffix in ("txt", "json")}
    publish("org/name", {"a.tar": tar_of(members)}, tags=["modality:image"])
    told = streamed(hub, tmp_path, "hf://org/name")
    assert [row["json"] for row in told["rows"]] == [{"k": number} for number in range(7)]
    assert [row["txt"] for row in told["rows"]] == [f'{{"k":{number}}}' for number in range(7)]
    in_process(hub, tmp_path, INGEST, "hf://org/name", str(tmp_path / "out"), "no text")
    assert BlockManager(tmp_path / "out").get_rows(0, 0) == told["rows"]


def test_what_cannot_be_streamed_is_told_without_secrets(hub: Hub, publish: Publish, tmp_path: Path) -> None:
    publish("org/name", {"README.md": card("sep: ;", "a.csv"), "a.csv": "text;n\na;1\n"})
    code = f"import sys; sys.argv[1:] = ['hf://org/name']\n{STREAM}"
    hub.faults.append(Fault("a.csv", 1000, 403))
    error = orjson.loads(in_process(hub, tmp_path, code).output.rpartition("told ")[2])["error"]
    assert "name[train]: cannot be read after row 0" in error
    assert "?" not in error


# Kinds of data


@pytest.mark.parametrize(
    "kind", [kind for kind in MODALITIES.values() if not kind.can_train], ids=lambda kind: kind.name
)
def test_a_data_set_without_text_is_refused_with_the_reason(publish: Publish, tmp_path: Path, kind: Any) -> None:
    publish("org/name", {"a.jsonl": jsonl_of([{"label": "x", "text": "y"}])}, tags=[kind.tag, "license:mit"])
    with pytest.raises(SourceError) as caught:
        ingest("hf://org/name", tmp_path / "out")
    assert kind.reason in str(caught.value)
    assert f"holds no text ({kind.tag})" in str(caught.value)
    assert "--no-text" in str(caught.value)
    assert "--text-column" in str(caught.value)
    assert not (tmp_path / "out").exists()
    assert ingest("hf://org/name", tmp_path / "rows", no_text=True).total_samples == 1
    assert ingest("hf://org/name", tmp_path / "named", text_column="label").header.text_column == "label"


@pytest.mark.parametrize(
    "tags", [[], ["modality:text"], ["modality:image", "modality:text"], ["modality:smell"], ["x"]]
)
def test_a_data_set_that_may_hold_text_is_let_through(publish: Publish, tmp_path: Path, tags: list[str]) -> None:
    publish("org/name", {"a.jsonl": rows("a")}, tags=tags)
    assert ingest("hf://org/name", tmp_path / "out").header.text_column == "text"


# A folder like a repository


def test_a_local_folder_is_read_like_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "data@home"
    for key, data in CARDED.items():
        (folder / key).parent.mkdir(parents=True, exist_ok=True)
        (folder / key).write_bytes(data if isinstance(data, bytes) else data.encode())
    assert texts(f"hf://{folder}") == ["de"]
    assert texts(f"hf://{folder}:en:test") == ["entest"]
    assert texts(f"hf://{folder}:en") == ["en0", "en1", "more"]
    source = open_source(f"hf://{folder}:en")
    assert (source.name, source.pinned) == ("data@home", None)
    monkeypatch.chdir(tmp_path)
    assert texts("hf://./data@home:train") == ["de"]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert texts("hf://~/data@home:train") == ["de"]
    with pytest.raises(SourceError, match=r"there is no folder .*missing: expected one laid out like a Hub repository"):
        open_source(f"hf://{tmp_path}/missing")
