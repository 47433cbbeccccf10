"""`penstock bench storage`."""

from __future__ import annotations

import csv
import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pages.making import SIZES, TOKENIZER, fill
from penstock.cli.main import app
from penstock.observe.bars import Bar, draw_bars
from penstock.storage import open_storage

SVG = "{http://www.w3.org/2000/svg}"
FIGURES = {"tokens_per_s", "mb_per_s", "total_s", "first_batch_s", "batch_p50_s", "batch_p99_s", "peak_memory_mb"}


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    fill(open_storage(tmp_path / "data"), SIZES)
    (tmp_path / "tokenizer.json").write_text(TOKENIZER.definition)
    return tmp_path / "data"


def invoke(*arguments: str | Path | int):
    return CliRunner().invoke(app, ["bench", "storage", *map(str, arguments)], catch_exceptions=False)


def test_every_combination_is_measured_told_written_and_drawn(dataset: Path, tmp_path: Path) -> None:
    done = invoke(
        *(dataset, "--tokenizer", tmp_path / "tokenizer.json", "--pages", 4, "--rows", 20, "--rounds", 1),
        *("--requests", "1,3", "--batch-size", "2", "--sequence-length", "16"),
        *("--csv", tmp_path / "a.csv", "--plot", tmp_path / "a.svg", "--json"),
    )
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)["settings"]
    assert [setting["requests"] for setting in told] == [1, 3]
    assert all(setting.keys() >= FIGURES and setting["tokens_per_s"] > 0 < setting["mb_per_s"] for setting in told)
    with (tmp_path / "a.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [{name: float(value) for name, value in row.items()} for row in rows] == told
    drawn = ET.parse(tmp_path / "a.svg").getroot()
    words = " ".join(text.text or "" for text in drawn.iter(f"{SVG}text"))
    assert "3 requests, batch 2 x 16, 4 MB" in words


def test_what_is_no_list_of_numbers_is_refused(dataset: Path, tmp_path: Path) -> None:
    done = invoke(dataset, "--tokenizer", tmp_path / "tokenizer.json", "--requests", "4,x")
    assert done.exit_code == 2
    assert "whole numbers above 0" in done.output


@pytest.mark.parametrize("option", ["--rounds", "--pages", "--rows"])
def test_measuring_nothing_is_refused(dataset: Path, tmp_path: Path, option: str) -> None:
    done = invoke(dataset, "--tokenizer", tmp_path / "tokenizer.json", option, 0)
    assert done.exit_code == 2
    assert option in done.output


def test_the_largest_bar_is_on_top_and_the_longest() -> None:
    drawn = ET.fromstring(draw_bars("a & b", "things", [Bar("small", 5.0), Bar("large", 20_000.0, "so <large>")]))
    words = [text.text for text in drawn.iter(f"{SVG}text")]
    assert words[:2] == ["a & b", "things"]
    assert words.index("large") < words.index("small")
    assert "20,000   so <large>" in words
    first, second = [float(box.get("width", 0)) for box in drawn.iter(f"{SVG}rect")][1:]
    assert first > second
