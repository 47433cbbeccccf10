"""The same pages, batches and digests in any process, with any number of workers, however they are started."""

from __future__ import annotations

import json
import multiprocessing
import pickle
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from equipment.processes import python, run
from pages.making import TOKENIZER, batches_of, choose, digest_of, loader_of
from penstock import R2DatasetLoader

TELLS = """
import hashlib, json, sys
import penstock
from penstock import R2DatasetLoader
folder, tokenizer, requests = sys.argv[1], sys.argv[2], int(sys.argv[3])
R2DatasetLoader.MAX_CONCURRENT_REQUESTS, R2DatasetLoader.PREFETCH_SIZE = requests, requests - 1
R2DatasetLoader.TOKEN_CACHE_BYTES = 0
told = []
for seed in ("me", "you", "7"):
    pages = R2DatasetLoader.next_pages(4, 9, seed, 37, dataset=folder)
    loader = R2DatasetLoader.create(3, 32, pages, tokenizer)
    batches = hashlib.sha256()
    for batch in loader:
        batches.update(batch.astype("<i8").tobytes())
    told.append([[list(page) for page in pages], batches.hexdigest(), loader.report()["digest"]])
print(json.dumps(told))
"""


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    (tmp_path / "tokenizer.json").write_text(TOKENIZER.definition)
    return str(tmp_path / "tokenizer.json")


def test_processes_of_any_hash_seed_and_concurrency_get_the_same(dataset: Path, tokenizer: str) -> None:
    told = []
    for hash_seed, requests in (("0", "1"), ("4711", "7")):
        done = run(python(TELLS, str(dataset), tokenizer, requests), env={"PYTHONHASHSEED": hash_seed})
        assert done.returncode == 0, done.output
        told.append(json.loads(done.output.splitlines()[-1]))
    assert told[0] == told[1]
    here = choose(dataset)
    loader = loader_of(here)
    assert told[0][0] == [[list(page) for page in here], digest_of(loader), loader.report()["digest"]]
    assert len({digest for _, _, digest in told[0]}) == 3


def tell(loader: R2DatasetLoader, path: str) -> None:
    Path(path).write_text(f"{digest_of(loader)} {loader.report()['digest']}")


def test_a_loader_goes_to_a_spawned_process(dataset: Path, tmp_path: Path, tokenizer: str) -> None:
    loader = loader_of(choose(dataset), tokenizer=tokenizer)
    process = multiprocessing.get_context("spawn").Process(target=tell, args=(loader, str(tmp_path / "told")))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    expected = digest_of(loader)
    assert (tmp_path / "told").read_text() == f"{expected} {loader.report()['digest']}"


def test_a_pickled_loader_and_its_pages_are_what_they_were(dataset: Path) -> None:
    pages = choose(dataset)
    loader = loader_of(pages)
    expected = batches_of(loader)
    sent_loader, sent_pages = pickle.loads(pickle.dumps((loader, pages)))  # noqa: S301 - our own
    assert batches_of(sent_loader) == batches_of(loader_of(sent_pages)) == expected
    assert [page.row_count for page in sent_pages] == [page.row_count for page in pages]


@pytest.mark.parametrize("workers", [0, 1, 7])
def test_a_torch_dataloader_gives_the_same_batches_with_any_number_of_workers(dataset: Path, workers: int) -> None:
    loader = loader_of(choose(dataset, 5))
    expected = batches_of(loader_of(choose(dataset, 5)))
    more: dict[str, Any] = {"multiprocessing_context": "spawn", "timeout": 120} if workers else {}
    items: Any = DataLoader(loader, batch_size=None, num_workers=workers, **more)  # pyright: ignore[reportArgumentType]
    assert batches_of(items) == expected
