"""The picture of a run."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from equipment.training import counting_config, make_store
from penstock.errors import StorageError
from penstock.observe.drawing import ChunkCell, LossPoint, Picture
from penstock.observe.picture import draw_run
from penstock.observe.run_folder import RunFolder
from penstock.train.run import run_training

SVG = "{http://www.w3.org/2000/svg}"


def texts(path: Path) -> str:
    return "\n".join("".join(element.itertext()) for element in ElementTree.parse(path).iter(f"{SVG}text"))


def titles(path: Path) -> list[str]:
    return ["".join(element.itertext()) for element in ElementTree.parse(path).iter(f"{SVG}title")]


def test_every_chunk_is_drawn_with_who_learned_it(tmp_path: Path) -> None:
    run_training(counting_config(make_store(tmp_path), tmp_path / "run"))
    drawn = draw_run(RunFolder(tmp_path / "run"), tmp_path / "picture.svg")
    assert len(titles(drawn)) == 12
    assert titles(drawn)[0] == "block 0, chunk 0: worker-0 5 of 5 samples"
    assert "60 samples: 60 learned once, 0 missing, 0 twice" in texts(drawn)


def test_an_unfinished_run_shows_what_is_missing(tmp_path: Path) -> None:
    run_training(counting_config(make_store(tmp_path), tmp_path / "run", steps=4))
    drawn = draw_run(RunFolder(tmp_path / "run"), tmp_path / "picture.svg")
    assert any(title.endswith("nothing yet of 5 samples") for title in titles(drawn))


def test_a_run_without_steps_is_drawn_too(tmp_path: Path) -> None:
    run_training(counting_config(make_store(tmp_path), tmp_path / "run"))
    (tmp_path / "run" / "metrics.jsonl").unlink()
    assert "no steps yet" in texts(draw_run(RunFolder(tmp_path / "run"), tmp_path / "picture.svg"))


def test_a_picture_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    run_training(counting_config(make_store(tmp_path), tmp_path / "run", steps=2))
    with pytest.raises(StorageError, match=r"the picture .* cannot be written: No such file"):
        draw_run(RunFolder(tmp_path / "run"), tmp_path / "nowhere" / "picture.svg")


def test_very_many_chunks_stay_a_picture_of_one_page() -> None:
    cells = [[ChunkCell(block, chunk, 4000, {"<w>": 4000}, False) for chunk in range(25)] for block in range(2000)]
    picture = Picture(
        title="a & b",
        verdict="all",
        colour="#000000",
        cells=cells,
        points=[LossPoint(step, 1.0, "<w>") for step in range(100_000)],
        lost=[],
        workers=["<w>"],
    )
    drawn = ElementTree.fromstring(picture.svg())
    assert float(drawn.attrib["height"]) < 2000
    assert len(list(drawn.iter(f"{SVG}circle"))) <= 2500
