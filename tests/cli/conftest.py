from __future__ import annotations

from collections.abc import Iterator

import pytest

from equipment.training import forked_workers as forked


@pytest.fixture(scope="module")
def forked_workers() -> Iterator[None]:
    """Trainings in this process have workers that are quick to start."""
    with forked():
        yield
