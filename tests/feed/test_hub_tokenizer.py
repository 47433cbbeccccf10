"""Tokenizers of the Hub: a few files, at one commit, fetched once; and a run that has its copy asks for nothing."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest

from equipment.hub import Fault, Hub, hub_server
from equipment.training import make_store
from penstock.errors import AccessDenied, ConfigError, ObjectNotFound, StorageError
from penstock.feed import train_tokenizer
from penstock.feed.loading import find_tokenizer, load_tokenizer
from penstock.storage import hub as hub_module
from penstock.storage.retry import RetryBudget
from penstock.train.config import TrainingConfig
from penstock.train.run import run_training

DEFINITION = train_tokenizer(["a few words to learn from"], vocab_size=300).definition.replace("<|endoftext|>", "<fin>")
TOKEN = "hf_secretsecretsecret"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_server() as hub:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(hub_module, "METADATA", RetryBudget(attempts=3, first_wait_s=0.01))
        monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.chdir(tmp_path)
        yield hub


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "published"
    (folder / "onnx").mkdir(parents=True)
    (folder / "tokenizer.json").write_text(DEFINITION)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<fin>", "chat_template": "C"}))
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "onnx/tokenizer.json").write_text("{}")
    return folder


def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def fetched(hub: Hub) -> list[str]:
    """The files that were asked for."""
    return sorted({path.partition("/resolve/")[2].partition("/")[2] for path in hub.requests if "/resolve/" in path})


def in_their_cache(tmp_path: Path, name: str, commit: str, files: list[Path], branch: str = "main") -> None:
    """Lay files where huggingface_hub keeps them: blobs, and links to them by name."""
    root = tmp_path / "hf/hub" / ("models--" + name.replace("/", "--"))
    for folder in ("blobs", f"snapshots/{commit}", "refs"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    (root / "refs" / branch).write_text(commit)
    for file in files:
        shutil.copy(file, root / "blobs" / file.name)
        (root / "snapshots" / commit / file.name).symlink_to(f"../../blobs/{file.name}")


# -- fetching ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "owner/name"])
def test_only_the_tokenizers_files_are_fetched_and_only_once(hub: Hub, model: Path, name: str) -> None:
    commit = hub.add(name, model, model=True)
    tokenizer = load_tokenizer(name)
    assert (tokenizer.end_of_text, tokenizer.chat_templates) == ("<fin>", {"default": "C"})
    assert tokenizer.origin == f"hf://{name}@{commit}/tokenizer.json"
    assert fetched(hub) == ["tokenizer.json", "tokenizer_config.json"]
    hub.requests.clear()
    assert load_tokenizer(name).fingerprint == tokenizer.fingerprint
    assert fetched(hub) == []
    assert hub.requests.total() <= 4, "what the branch stands for, and what the commit holds"
    hub.requests.clear()
    assert load_tokenizer(f"{name}@{commit}").fingerprint == tokenizer.fingerprint
    assert hub.requests.total() == 0, "a commit that is here does not change"


def test_lesser_files_are_fetched_only_where_they_are_needed(hub: Hub, model: Path) -> None:
    (model / "special_tokens_map.json").write_text('{"eos_token": "<fin>"}')
    (model / "generation_config.json").write_text('{"eos_token_id": 0}')
    hub.add("a/one", model, model=True)
    load_tokenizer("a/one")
    assert fetched(hub) == ["tokenizer.json", "tokenizer_config.json"]
    (model / "tokenizer_config.json").unlink()
    hub.add("a/two", model, model=True)
    assert load_tokenizer("a/two").end_of_text == "<fin>"
    assert "special_tokens_map.json" in fetched(hub)


def test_a_revision_is_another_tokenizer(hub: Hub, model: Path, tmp_path: Path) -> None:
    first = hub.add("a/b", model, model=True)
    newer = tmp_path / "newer"
    shutil.copytree(model, newer)
    (newer / "tokenizer.json").write_text(DEFINITION + " ")
    second = hub.add("a/b", newer, model=True)
    hub.models["a/b"].branches["v1"] = first
    assert find_tokenizer("a/b").origin == f"hf://a/b@{second}/tokenizer.json"
    assert find_tokenizer("a/b@v1").origin == f"hf://a/b@{first}/tokenizer.json"
    assert find_tokenizer("hf://a/b@v1").definition == DEFINITION
    with pytest.raises(ObjectNotFound, match=r"model a/b at v9: there is no such thing"):
        find_tokenizer("a/b@v9")


def test_failures_that_pass_are_waited_out(hub: Hub, model: Path) -> None:
    hub.add("a/b", model, model=True)
    hub.faults += [
        Fault("api/models", 2, 503),
        Fault("resolve", 1, 429, {"Retry-After": "0"}),
        Fault("tokenizer.json", 1),
    ]
    assert load_tokenizer("a/b").end_of_text == "<fin>"


def test_a_tiktoken_file_of_a_model_is_found(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow/qwen.tiktoken").write_bytes(b"YQ== 0\n")
    hub.add("a/slow", tmp_path / "slow", model=True)
    with pytest.raises(ConfigError, match=r"hf://a/slow@\w+/qwen\.tiktoken has no token for 255 of the 256 bytes"):
        find_tokenizer("a/slow?encoding=qwen")


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_what_is_neither_here_nor_there_is_told_with_both(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(AccessDenied) as caught:
        find_tokenizer("nobody/nothing")
    told = str(caught.value)
    assert f"tokenizer 'nobody/nothing': there is no file or folder of this name in {tmp_path}" in told
    assert "the repository does not exist, or it is private or gated" in told


def test_a_gated_model_says_how_to_get_in(hub: Hub, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("a/gated", model, model=True, gated=True)
    with pytest.raises(
        AccessDenied, match="ask for access on its page, and log in with `hf auth login` or set HF_TOKEN"
    ):
        find_tokenizer("a/gated")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert find_tokenizer("a/gated").end_of_text == "<fin>"
    assert f"Bearer {TOKEN}" in {sent.get("authorization") for sent in hub.sent}


def test_a_model_with_a_slow_tokenizer_alone_is_refused(hub: Hub, model: Path) -> None:
    (model / "tokenizer.json").rename(model / "spiece.model")
    hub.add("a/slow", model, model=True)
    with pytest.raises(ConfigError, match=r"hf://a/slow@\w{40} has no tokenizer\.json: only spiece\.model, of a slow"):
        find_tokenizer("a/slow")


def test_a_file_that_is_too_large_for_a_tokenizer_is_not_fetched(
    hub: Hub, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.feed import hub_tokenizer

    monkeypatch.setattr(hub_tokenizer, "_LARGEST_BYTES", 100)
    hub.add("a/b", model, model=True)
    with pytest.raises(ConfigError, match=r"tokenizer\.json has \d+ bytes, expected a tokenizer's \(up to 100\)"):
        find_tokenizer("a/b")
    assert "tokenizer.json" not in fetched(hub)


# -- without the Hub ---------------------------------------------------------------------------------------------------


def test_offline_takes_what_was_seen_last_and_asks_for_nothing(
    hub: Hub, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("a/b", model, model=True)
    expected = find_tokenizer("a/b")
    hub.requests.clear()
    offline(monkeypatch)
    assert find_tokenizer("a/b") == expected
    assert hub.requests.total() == 0
    with pytest.raises(
        StorageError, match=r"a/c: HF_HUB_OFFLINE is set, and neither .*/cache/tokenizers nor .*/hf/hub has"
    ):
        find_tokenizer("a/c")


def test_a_hub_that_is_down_is_told_and_the_copy_is_taken(
    hub: Hub, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hub.add("a/b", model, model=True)
    expected = find_tokenizer("a/b")
    hub.faults.append(Fault("api/models", 99, 503))
    with caplog.at_level(logging.WARNING):
        assert find_tokenizer("a/b") == expected
    assert "taking the copy in the cache, of hf://a/b@" in caplog.text
    with pytest.raises(StorageError, match=r"as a model of the Hub it is not to be had: .*given up after 3 tries"):
        find_tokenizer("a/c")


def test_hugging_faces_own_cache_is_used_where_it_has_the_files(hub: Hub, model: Path, tmp_path: Path) -> None:
    commit = hub.add("a/b", model, model=True)
    in_their_cache(tmp_path, "a/b", commit, [model / "tokenizer.json", model / "tokenizer_config.json"])
    assert find_tokenizer(f"a/b@{commit}").end_of_text == "<fin>"
    assert hub.requests.total() == 0
    assert find_tokenizer("a/b").end_of_text == "<fin>"
    assert fetched(hub) == []


def test_their_cache_without_the_settings_is_completed(hub: Hub, model: Path, tmp_path: Path) -> None:
    commit = hub.add("a/b", model, model=True)
    in_their_cache(tmp_path, "a/b", commit, [model / "tokenizer.json"])
    assert find_tokenizer("a/b").end_of_text == "<fin>"
    assert fetched(hub) == ["tokenizer_config.json"]


def test_their_cache_without_the_settings_is_told_offline(
    hub: Hub, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    commit = hub.add("a/b", model, model=True)
    in_their_cache(tmp_path, "a/b", commit, [model / "tokenizer.json"])
    offline(monkeypatch)
    with caplog.at_level(logging.WARNING):
        assert find_tokenizer("a/b").end_of_text is None
    assert "the cache has no tokenizer_config.json" in caplog.text


def test_a_cache_that_cannot_be_written_costs_only_the_next_fetch(
    hub: Hub, model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hub.add("a/b", model, model=True)
    (tmp_path / "cache").write_text("no folder")
    with caplog.at_level(logging.WARNING):
        assert find_tokenizer("a/b").end_of_text == "<fin>"
    assert "tokenizer.json is not kept, and will be fetched again" in caplog.text


# -- in a run ----------------------------------------------------------------------------------------------------------


def test_a_run_keeps_its_tokenizer_and_goes_on_without_the_hub(hub: Hub, model: Path, tmp_path: Path) -> None:
    store = make_store(tmp_path)
    hub.add("a/b", model, model=True)
    config = TrainingConfig(dataset_file=str(store), run_dir=str(tmp_path / "run"), model="counting", tokenizer="a/b")
    config.steps, config.iterate = 1, True
    run_training(config)
    assert (tmp_path / "run/tokenizer.json").read_text() == DEFINITION
    assert 'end_of_text = "<fin>"' in (tmp_path / "run/config.toml").read_text()
    hub.models.clear()
    shutil.rmtree(tmp_path / "cache/tokenizers")
    hub.requests.clear()
    for steps, named in ((2, "a/b"), (3, ""), (4, "a/b")):
        config.steps, config.tokenizer = steps, named
        assert run_training(config).total_steps == steps
    assert hub.requests.total() == 0
