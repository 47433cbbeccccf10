from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from equipment.training import forked_workers as forked
from equipment.training import make_store


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small block store that no test changes."""
    return make_store(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For tensors so small that threads would mostly wait for one another, all the more on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def forked_workers() -> Iterator[None]:
    """Trainings in this process have workers that are quick to start."""
    with forked():
        yield
