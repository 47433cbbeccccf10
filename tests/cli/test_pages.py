"""`penstock pages`: an index that can be made, looked at, and a window that anyone can verify."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import orjson
import pytest

from equipment.commands import penstock as run
from equipment.servers import S3Server
from pages.making import SIZES, choose, digest_of, fill, loader_of, make_dataset, shard_bytes, texts_of
from penstock import R2DatasetLoader
from penstock.errors import ConfigError
from penstock.pages.verify import window_of
from penstock.storage import open_storage


def penstock(*args: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    done = run(*args, env=env)
    return done.returncode, done.stdout + done.stderr


def told(*args: str) -> Any:
    code, output = penstock(*args, "--json")
    assert code in (0, 3), output
    return json.loads(output)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("paged") / "set")


@pytest.fixture
def report(folder: Path, tmp_path: Path) -> Path:
    """What a worker hands in."""
    loader = loader_of(choose(folder))
    digest_of(loader)
    (tmp_path / "report.json").write_bytes(orjson.dumps(loader.report()))
    return tmp_path / "report.json"


def test_index_writes_both_files_and_says_what_is_there(tmp_path: Path) -> None:
    storage = open_storage(tmp_path / "set")
    for config, count in SIZES.items():
        storage.put(f"{config}/0.parquet", shard_bytes(texts_of(config, count)))
    first = told("pages", "index", str(tmp_path / "set"))
    assert first["written"]
    assert {entry["config"]: entry["rows"] for entry in first["configs"]} == SIZES
    assert not told("pages", "index", str(tmp_path / "set"))["written"]
    assert told("pages", "inspect", str(tmp_path / "set"))["dataset_id"] == first["dataset_id"]
    code, output = penstock("pages", "inspect", str(tmp_path / "set"))
    assert code == 0
    assert "books" in output
    assert f"{sum(SIZES.values())}" in output


def test_choose_tells_the_pages_that_the_loader_reads(folder: Path) -> None:
    got = told(
        "pages", "choose", str(folder), "--seed", "me", "--offset", "4", "--n-pages", "9", "--rows-per-page", "37"
    )
    pages = choose(folder)
    loader = loader_of(pages)
    digest_of(loader)
    assert [tuple(page[:3]) for page in got["pages"]] == list(pages)
    assert got["digest"] == loader.report()["digest"]


def test_what_was_read_holds(folder: Path, report: Path) -> None:
    code, output = penstock("pages", "verify", str(folder), "--report", str(report))
    assert code == 0, output
    assert "holds: 9 pages" in output
    digest = json.loads(report.read_text())["digest"]
    window = ("--seed", "me", "--offset", "4", "--n-pages", "9", "--rows-per-page", "37")
    assert penstock("pages", "verify", str(folder), "--digest", digest, *window)[0] == 0


def test_whatever_else_was_read_does_not(folder: Path, report: Path, tmp_path: Path) -> None:
    whole = json.loads(report.read_text())
    others = [
        {**whole, "window": {**whole["window"], "seed": "another"}},
        {**whole, "window": {**whole["window"], "offset": 5}},
        {**whole, "page_digests": whole["page_digests"][:-1]},
        {**whole, "page_digests": [*whole["page_digests"], "00"]},
        {**whole, "dataset_id": "sha256:0"},
        {**whole, "digest": "00"},
        {**whole, "samples": 0},
        {**whole, "complete": False},
        {**whole, "pages": []},
        {**whole, "window": {**whole["window"], "n_pages": 0}, "pages": [], "samples": 0, "page_digests": []},
    ]
    for number, other in enumerate(others):
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps(other))
        code, output = penstock("pages", "verify", str(folder), "--report", str(path), "--json")
        verdict = json.loads(output)
        assert (code, verdict["holds"]) == (3, False), other
        assert verdict["problems"]
    code, output = penstock("pages", "verify", str(folder), "--report", str(tmp_path / "2.json"))
    assert code == 3
    assert "number 8 of the window, was not read" in output


def test_half_a_window_is_not_the_window(folder: Path, tmp_path: Path) -> None:
    loader = loader_of(choose(folder))
    batches = iter(loader)
    for _ in range(20):
        next(batches)
    report = loader.report()
    batches.close()
    assert not report["complete"]
    (tmp_path / "report.json").write_text(json.dumps(report))
    assert penstock("pages", "verify", str(folder), "--report", str(tmp_path / "report.json"))[0] == 3


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ((), "what is to be verified"),
        (("--digest", "00"), "give --seed, --offset and --n-pages"),
        (("--report", "no such file"), "the report cannot be read"),
        (("--digest", "00", "--seed", "1", "--offset", "0", "--n-pages", "1", "--rows-per-page", "0"), "holds no row"),
        (("--digest", "00", "--seed", "\udcff", "--offset", "0", "--n-pages", "1"), "no text that can be written down"),
    ],
)
def test_what_cannot_be_verified_is_told(folder: Path, args: tuple[str, ...], problem: str) -> None:
    code, output = penstock("pages", "verify", str(folder), *args)
    assert code == 1
    assert problem in output


@pytest.mark.parametrize("window", [{"split": 3}, {"split": None}, {"seed": 7}, {"offset": True}, {"n_pages": "1"}])
def test_a_report_with_a_window_that_is_none_is_refused(window: dict[str, Any]) -> None:
    whole = {"seed": "1", "offset": 0, "n_pages": 1, "split": "train", "num_rows_per_page": 10}
    assert window_of({"window": whole}, seed="2").seed == "2"
    with pytest.raises(ConfigError, match="the report's window is"):
        window_of({"window": {**whole, **window}})


def test_a_report_of_pages_made_by_hand_is_verified_by_a_window_that_is_given(report: Path, folder: Path) -> None:
    whole = json.loads(report.read_text())
    del whole["window"]
    report.write_text(json.dumps(whole))
    window = ("--seed", "me", "--offset", "4", "--n-pages", "9", "--rows-per-page", "37")
    code, output = penstock("pages", "verify", str(folder), "--report", str(report), *window)
    assert code == 0, output
    code, output = penstock("pages", "verify", str(folder), "--report", str(report))
    assert code == 1
    assert "tells of no window" in output


def test_the_environments_bucket_is_indexed_with_its_key_to_write(
    bucket: str, place: str, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(R2DatasetLoader, "DATASET_SUBFOLDER", place)
    storage = open_storage(bucket)
    fill(storage)
    for name in ("_shard_sizes.json", "_metadata.yaml"):
        storage.delete(name)
    variables = {"R2_DATASET_ENDPOINT_URL": s3.url, "R2_DATASET_BUCKET_NAME": "data"}
    for purpose, key in (("READ", "reader"), ("WRITE", "writer")):
        variables[f"R2_DATASET_{purpose}_ACCESS_KEY_ID"] = key
        variables[f"R2_DATASET_{purpose}_SECRET_ACCESS_KEY"] = f"{key}-secret"
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    from typer.testing import CliRunner

    from penstock.cli.main import app

    done = CliRunner().invoke(app, ["pages", "index", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["written"]
    pages = R2DatasetLoader.next_pages(4, 9, "me", 37)
    assert len(pages) == 9
