"""`penstock search` against a Hub on loopback."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from equipment.hub import Fault, Hub, hub_server
from penstock.cli.main import app
from penstock.errors import SourceError


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_server() as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        for name, tags in (
            ("writers/stories", ["modality:text", "language:en"]),
            ("painters/stories-in-pictures", ["modality:image"]),
            ("readers/scanned-stories", ["modality:document"]),
            ("someone/stories-untagged", []),
            ("writers/poems", ["modality:text"]),
        ):
            (tmp_path / name).mkdir(parents=True)
            hub.add(name, tmp_path / name, tags=tags)
        yield hub


def search(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["search", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_a_search_says_what_can_be_trained_on(hub: Hub) -> None:
    found = {entry["spec"]: entry for entry in json.loads(search("stories", "--json"))}
    assert {spec: entry["can_train"] for spec, entry in found.items()} == {
        "hf://writers/stories": True,
        "hf://painters/stories-in-pictures": False,
        "hf://readers/scanned-stories": False,
        "hf://someone/stories-untagged": None,
    }
    assert found["hf://writers/stories"]["modalities"] == ["text"]
    told = search("stories")
    assert "hf://writers/stories" in told
    assert "poems" not in told


def test_a_search_can_be_for_one_modality_and_says_what_it_is_good_for(hub: Hub) -> None:
    assert [entry["spec"] for entry in json.loads(search("stories", "--modality", "text", "--json"))] == [
        "hf://writers/stories"
    ]
    told = search("stories", "--modality", "document")
    assert "hf://readers/scanned-stories" in told
    assert "has to become text first" in told
    assert "nothing on the Hub matches 'stories'" in search("stories", "--modality", "3d")


def test_every_modality_of_the_hub_can_be_asked_for_and_only_text_is_supported() -> None:
    table = json.loads(search("--support", "--json"))
    assert {entry["modality"]: entry["support"] for entry in table} == {
        "text": "full support",
        "audio": "not yet",
        "image": "not yet",
        "video": "not yet",
        "tabular": "not yet",
        "document": "text extraction needed",
        "geospatial": "not yet",
        "timeseries": "not yet",
        "3d": "not yet",
    }
    assert all(entry["tag"] == f"modality:{entry['modality']}" for entry in table)
    assert "modality:geospatial" in search("--support")


def test_a_hub_that_asks_to_wait_is_waited_for(hub: Hub) -> None:
    hub.faults.append(Fault("api/datasets", 2, 429, {"Retry-After": "0"}))
    assert len(json.loads(search("stories", "--json"))) == 4


def test_a_hub_that_is_not_understood_is_told(hub: Hub) -> None:
    hub.faults.append(Fault("api/datasets", 1, 400))
    with pytest.raises(SourceError, match="search for 'stories': the server answered 400"):
        search("stories")
