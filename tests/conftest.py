"""What every test has: caches of its own, so that none reads or leaves anything in the user's."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def own_caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("caches")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_CACHE", str(folder / "penstock"))
        patch.setenv("HF_HOME", str(folder / "hub"))
        for name in [name for name in os.environ if name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_ENDPOINT")]:
            patch.delenv(name)
        yield
