"""What a tokenizer may be called by: paths, folders and models; and what its files say about its end of text."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.feed import train_tokenizer
from penstock.feed.loading import find_tokenizer, load_tokenizer
from penstock.feed.tokenizer_name import HubName, parse_tokenizer_name

TEXTS = ["the quick brown fox jumps over the lazy dog\n" * 3, "naïve café"]


@pytest.fixture(scope="module")
def definition() -> str:
    """Knows two ends of text: <|endoftext|> is 0, <|im_end|> the last."""
    fields = json.loads(train_tokenizer(TEXTS, vocab_size=300).definition)
    last = {**fields["added_tokens"][0], "id": len(fields["model"]["vocab"]), "content": "<|im_end|>"}
    fields["added_tokens"].append(last)
    return json.dumps(fields)


@pytest.fixture
def folder(tmp_path: Path, definition: str) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/tokenizer.json").write_text(definition)
    return tmp_path / "model"


def put(folder: Path, name: str, value: Any) -> None:
    (folder / name).write_text(value if isinstance(value, str) else json.dumps(value))


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name", "revision"),
    [
        ("gpt2", "gpt2", None),
        ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B", None),
        ("Qwen/Qwen2.5-0.5B@main", "Qwen/Qwen2.5-0.5B", "main"),
        ("owner/name@refs/pr/3", "owner/name", "refs/pr/3"),
        ("hf://gpt2@v1.0", "gpt2", "v1.0"),
        ("hf://owner/name.json", "owner/name.json", None),
    ],
)
def test_a_name_that_is_no_path_is_a_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, name: str, revision: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_tokenizer_name(text).place == HubName(name, revision)


@pytest.mark.parametrize(
    "text", ["/a/b", "./a", "../a/b", "~/a", "a/b/c", "tokenizer.json", "a/tokenizer.json", "x.tiktoken", "a\\b", ".a"]
)
def test_what_is_spelled_like_a_path_is_one_though_nothing_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert isinstance(parse_tokenizer_name(text).place, Path)
    with pytest.raises(
        ConfigError, match=r"cannot be read: No such file or directory: expected tokenizer\.json, a folder"
    ):
        find_tokenizer(text)


def test_a_path_that_is_there_goes_before_the_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    assert parse_tokenizer_name("model").place == Path("model")
    assert parse_tokenizer_name("hf://model").place == HubName("model")
    assert find_tokenizer("model").end_of_text is None
    (folder / "tokenizer.json").unlink()
    with pytest.raises(
        ConfigError, match=r"model has no tokenizer\.json: .* \(a folder here goes .*: hf://model is the"
    ):
        find_tokenizer("model")


def test_options_stand_behind_a_question_mark(tmp_path: Path) -> None:
    found = parse_tokenizer_name("a/b@main?end_of_text=<|im_end|>=x&encoding=gpt2")
    assert (found.place, found.end_of_text, found.encoding) == (HubName("a/b", "main"), "<|im_end|>=x", "gpt2")
    odd = tmp_path / "a?b.json"
    odd.write_text("{}")
    assert parse_tokenizer_name(str(odd)).place == odd
    for wrong in ("a/b?eos=x", "a/b?end_of_text=", "a/b?encoding=a&encoding=b", "a/b?x"):
        with pytest.raises(ConfigError, match=r"is not understood: expected encoding=\.\.\. or end_of_text=\.\.\."):
            parse_tokenizer_name(wrong)


@pytest.mark.parametrize("text", ["", "s3://bucket/x", "hf://", "hf://a/b/c", "hf://a b", "hf://../x", "hf://a@"])
def test_names_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected"):
        parse_tokenizer_name(text)


# -- the end of text ---------------------------------------------------------------------------------------------------


def test_the_settings_decide_what_ends_a_document(folder: Path) -> None:
    assert load_tokenizer(str(folder)).end_of_text == "<|endoftext|>"
    put(folder, "tokenizer_config.json", {"eos_token": "<|im_end|>"})
    put(folder, "special_tokens_map.json", {"eos_token": "<|endoftext|>"})
    put(folder, "generation_config.json", {"eos_token_id": 0})
    for spec in (folder, folder / "tokenizer.json"):
        tokenizer = load_tokenizer(str(spec))
        assert tokenizer.end_of_text == "<|im_end|>"
        assert tokenizer.encode(["a"]).ids[-1] == tokenizer.end_of_text_id == tokenizer.vocab_size - 1
    put(folder, "tokenizer_config.json", {"eos_token": {"content": "<|im_end|>", "lstrip": False}})
    assert load_tokenizer(str(folder)).end_of_text == "<|im_end|>"


def test_the_user_has_the_last_word(folder: Path) -> None:
    put(folder, "tokenizer_config.json", {"eos_token": "<|im_end|>"})
    assert load_tokenizer(str(folder), end_of_text="<|endoftext|>").end_of_text == "<|endoftext|>"
    assert load_tokenizer(f"{folder}?end_of_text=<|endoftext|>").end_of_text == "<|endoftext|>"
    assert load_tokenizer(f"{folder}?end_of_text=a", end_of_text="b").end_of_text == "b"


def test_lesser_files_are_asked_where_the_settings_say_nothing(folder: Path, definition: str) -> None:
    last = load_tokenizer(str(folder)).vocab_size - 1
    put(folder, "tokenizer_config.json", {"eos_token": None})
    put(folder, "generation_config.json", {"eos_token_id": [last, 0]})
    assert load_tokenizer(str(folder)).end_of_text == "<|endoftext|>", "one of two is no hint"
    put(folder, "generation_config.json", {"eos_token_id": last})
    assert load_tokenizer(str(folder)).end_of_text == "<|im_end|>"
    put(folder, "generation_config.json", {"eos_token_id": [last]})
    assert load_tokenizer(str(folder)).end_of_text == "<|im_end|>"
    put(folder, "special_tokens_map.json", {"eos_token": {"content": "<|endoftext|>"}})
    assert load_tokenizer(str(folder)).end_of_text == "<|endoftext|>"


def test_an_end_of_text_that_the_definition_does_not_know_is_refused(folder: Path) -> None:
    put(folder, "tokenizer_config.json", {"eos_token": "<eos>"})
    with pytest.raises(ConfigError, match=r"knows none of <eos>: name its .* \(tokenizer_config\.json names it\)"):
        load_tokenizer(str(folder))


def test_a_definition_under_another_name_says_nothing_about_its_neighbours(folder: Path) -> None:
    put(folder, "tokenizer_config.json", {"eos_token": "<|im_end|>"})
    (folder / "tokenizer.json").rename(folder / "other.json")
    assert load_tokenizer(str(folder / "other.json")).end_of_text == "<|endoftext|>"


# -- chat templates ----------------------------------------------------------------------------------------------------


def test_chat_templates_are_kept_and_travel_along(folder: Path) -> None:
    plain = load_tokenizer(str(folder))
    put(folder, "tokenizer_config.json", {"chat_template": [{"name": "tool_use", "template": "T"}]})
    put(folder, "chat_template.jinja", "{{ messages }}")
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.chat_templates == {"tool_use": "T", "default": "{{ messages }}"}
    copy = pickle.loads(pickle.dumps(tokenizer))  # noqa: S301 - our own
    assert (copy.chat_templates, copy.origin) == (tokenizer.chat_templates, str(folder / "tokenizer.json"))
    assert tokenizer.fingerprint == plain.fingerprint, "a template changes no id"
    put(folder, "tokenizer_config.json", {"chat_template": "C"})
    (folder / "chat_template.jinja").unlink()
    assert load_tokenizer(str(folder)).chat_templates == {"default": "C"}


# -- what is not there, or not right -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ([], "nothing that is one"),
        (["tokenizer.model"], "only tokenizer.model, of a slow tokenizer"),
        (["vocab.json", "merges.txt"], "only vocab.json and merges.txt, of a slow tokenizer"),
    ],
)
def test_a_folder_without_a_definition_is_refused_with_what_it_has(tmp_path: Path, files: list[str], told: str) -> None:
    for name in files:
        (tmp_path / name).write_bytes(b"\n\x0e\n\x05<unk>\x15\x00\x00")
    with pytest.raises(ConfigError, match=rf"has no tokenizer\.json: {told}.* or make one with transformers: AutoTok"):
        find_tokenizer(str(tmp_path))


def test_llamas_tokenizer_model_is_a_tiktoken_file(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"IQ== 0\nIg== 1\n")
    for spec in (tmp_path, tmp_path / "tokenizer.model"):
        with pytest.raises(ConfigError, match="has no token for 254 of the 256 bytes"):
            find_tokenizer(f"{spec}?encoding=llama3")


def test_several_tiktoken_files_are_not_chosen_from(tmp_path: Path) -> None:
    for name in ("a.tiktoken", "b.tiktoken"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ConfigError, match=r"several tiktoken files \(a\.tiktoken, b\.tiktoken\): name one"):
        find_tokenizer(str(tmp_path))


@pytest.mark.parametrize(("content", "told"), [("{", "is not JSON"), ("[]", "is a JSON list, expected an object")])
def test_settings_that_cannot_be_read_are_refused(folder: Path, content: str, told: str) -> None:
    put(folder, "tokenizer_config.json", content)
    with pytest.raises(ConfigError, match=rf"tokenizer_config\.json {told}.*: mend or remove it"):
        find_tokenizer(str(folder))


def test_an_encoding_is_refused_where_it_means_nothing(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json is no tiktoken file: leave encoding=gpt2 away"):
        find_tokenizer(f"{folder}?encoding=gpt2")


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"tokenizer\.json is not UTF-8"):
        find_tokenizer(str(tmp_path))
