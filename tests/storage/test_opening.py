"""The backend is chosen by URL."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.storage import LocalStorage, open_storage


def test_a_path_opens_a_folder_without_touching_it(tmp_path: Path) -> None:
    for url in (tmp_path / "new", str(tmp_path / "new"), f"file://{tmp_path}/new"):
        storage = open_storage(url)
        assert isinstance(storage, LocalStorage)
        assert storage.root == tmp_path / "new"
    assert not (tmp_path / "new").exists()


def test_a_tilde_is_the_home_folder_and_only_at_the_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_storage("~/data").url == str(tmp_path / "data")
    assert open_storage("~data").url == "~data"
    assert open_storage("a/~/data").url == "a/~/data"


def test_an_unknown_scheme_is_named() -> None:
    with pytest.raises(ConfigError, match="ftp://"):
        open_storage("ftp://somewhere/data")


def test_an_empty_path_is_refused() -> None:
    for url in ("", "file://"):
        with pytest.raises(ConfigError, match="empty"):
            open_storage(url)
