from __future__ import annotations

from pathlib import Path

import pytest

from equipment.training import make_store


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small block store that no test changes."""
    return make_store(tmp_path_factory.mktemp("data"))
