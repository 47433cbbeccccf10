"""Long texts that a dictionary holds once and many rows use: memory is what they take once, and tokens."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from equipment.processes import python, run
from pages.making import put_shards, shard_bytes
from penstock.pages import PagedDataset
from penstock.pages.catalog import Part
from penstock.pages.choice import Page
from penstock.pages.data_pages import Texts
from penstock.pages.reading import PageReader, PageSource
from penstock.pages.requests import Requests
from penstock.storage import LocalStorage

TEXTS = [f"{number} " * 50_000 for number in range(10, 16)]
"""150 kB each."""
ROWS, ROWS_PER_PAGE = 2_000, 40
"""300 MB when spelled out, of which a page is 6 MB."""
BUDGET = 128 << 20


@pytest.fixture(scope="module")
def shard() -> bytes:
    return shard_bytes([TEXTS[row % len(TEXTS)] for row in range(ROWS)], group_rows=ROWS)


READS = """
import hashlib, json, sys
import numpy as np
from penstock import R2DatasetLoader
from penstock.pages import footers

class Quarter:
    eos_token_id, vocab_size = 0, 256
    def encode(self, text, **_):
        return np.frombuffer(text.encode(), dtype=np.uint8)[::4]

def memory(name):
    line = next(line for line in open("/proc/self/status") if line.startswith(name))
    return int(line.split()[1]) * 1024

folder, is_told, budget, rows, rows_per_page = json.loads(sys.argv[1])
if not is_told:
    footers._SIZED_FOOTER_BYTES = 0
R2DatasetLoader.TOKEN_CACHE_BYTES, R2DatasetLoader.PREFETCH_BYTES = 0, budget
first = R2DatasetLoader.create(1, 4096, [("web", 0, "train")], Quarter(), dataset=folder, num_rows_per_page=1)
list(first)  # so that all libraries are there
pages = [("web", row, "train") for row in range(0, rows // 2, rows_per_page)]
loader = R2DatasetLoader.create(64, 4096, pages, Quarter(), dataset=folder, num_rows_per_page=rows_per_page)
digest, before = hashlib.sha256(), memory("VmRSS")
for batch in loader.batches():
    digest.update(batch.input_ids[batch.mask].astype(np.uint8).tobytes())
print(json.dumps({"more": memory("VmHWM") - before, "digest": digest.hexdigest()}))
"""


@pytest.mark.parametrize("is_told", [True, False])
def test_the_budget_holds_where_a_dictionary_holds_long_texts_once(tmp_path: Path, shard: bytes, is_told: bool) -> None:
    folder = put_shards(tmp_path / "set", {"web/0.parquet": shard})
    assert len(shard) < 1 << 20
    ended = run(python(READS, json.dumps([str(folder), is_told, BUDGET, ROWS, ROWS_PER_PAGE])))
    assert ended.returncode == 0, ended.output
    told = json.loads(ended.output.splitlines()[-1])
    expected = hashlib.sha256()
    for row in range(ROWS // 2):
        expected.update(TEXTS[row % len(TEXTS)].encode()[::4] + b"\0")
    assert told["digest"] == expected.hexdigest()
    assert told["more"] < BUDGET, "while the texts of one data page, spelled out, would be 300 MB"


def located(reader: PageReader, part: Part, requests: Requests) -> PageSource:
    return reader.locate(Page.of("web", 0, "train", ROWS_PER_PAGE), part, requests)


def reader_of(folder: Path) -> tuple[PageReader, Part]:
    dataset = PagedDataset(LocalStorage(folder))
    return PageReader(dataset, text_column=None, buffer_bytes=4 << 20), dataset.catalog().part("web", "train")


def test_how_large_texts_are_is_told_by_the_footer(tmp_path: Path, shard: bytes) -> None:
    reader, part = reader_of(put_shards(tmp_path / "set", {"web/0.parquet": shard}))
    with Requests(1) as requests:
        source = located(reader, part, requests)
        texts = reader.texts(source, requests)
    size = sum(len(TEXTS[row % len(TEXTS)]) for row in range(ROWS_PER_PAGE))
    assert texts.size_bytes == source.text_bytes == size
    assert len({id(text) for text in texts.rows}) == len(TEXTS), "each is there once"


def test_without_its_word_a_first_page_claims_the_most_and_those_after_it_what_came(
    tmp_path: Path, shard: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.pages.footers._SIZED_FOOTER_BYTES", 0)
    reader, part = reader_of(put_shards(tmp_path / "set", {"web/0.parquet": shard}))
    with Requests(1) as requests:
        first = located(reader, part, requests)
        texts: Texts = reader.texts(first, requests)
        second = located(reader, part, requests)
    assert first.text_bytes > 5 * texts.size_bytes
    assert 0 <= second.text_bytes - texts.size_bytes < 10_000


def test_a_struct_around_them_changes_nothing_but_the_claim(tmp_path: Path) -> None:
    import pyarrow as pa

    from pages.making import table_bytes

    rows = [{"text": TEXTS[row % len(TEXTS)]} for row in range(60)]
    data: Any = table_bytes(pa.table({"doc": rows}), group_rows=60)
    folder = put_shards(tmp_path / "set", {"web/0.parquet": data}, text_column="doc.text")
    dataset = PagedDataset(LocalStorage(folder))
    reader = PageReader(dataset, text_column="doc.text", buffer_bytes=4 << 20)
    part = dataset.catalog().part("web", "train")
    with Requests(1) as requests:
        source = located(reader, part, requests)
        texts = reader.texts(source, requests)
    assert texts.rows == [TEXTS[row % len(TEXTS)] for row in range(ROWS_PER_PAGE)]
    assert source.size_bytes > 60 * len(TEXTS[0]), "all that is spelled out"
