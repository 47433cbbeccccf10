"""Pages: a Parquet data set in a bucket, fed where it lies.

    _shard_sizes.json, _metadata.yaml ──► Catalog: configs, splits, shards, rows             (index.py writes them)
    PagePlan (plans/pages.py) over the catalog ──► next_pages: what (seed, window) has to read
    page ──► token cache, or: shards' footers ──► the text column's chunks, by ranges ──► the data pages that hold the
             rows ──► texts ──► Tokenizer ──► tokens                                       (several pages at a time)
    tokens of pages, in order ──► (batch_size, sequence_length) arrays ──► R2DatasetLoader

A page is a number of consecutive rows of a config; what a row is called by is (config, split, row), whatever shards and
row groups it lies in. Nothing is converted, and nothing but what is needed is fetched. Below: `plans` says which pages,
`feed` tokenises and keeps tokens, `storage` reads, tries again and goes to the next endpoint. Above: `cli`.
"""

from typing import TYPE_CHECKING

from penstock.exports import opening_lazily

if TYPE_CHECKING:
    from penstock.pages.catalog import Catalog
    from penstock.pages.choice import Pages
    from penstock.pages.dataset import PagedDataset
    from penstock.pages.index import make_index, write_index
    from penstock.pages.loader import R2DatasetLoader
    from penstock.pages.verify import verify_window

__all__ = [
    "Catalog",
    "PagedDataset",
    "Pages",
    "R2DatasetLoader",
    "make_index",
    "verify_window",
    "write_index",
]

__getattr__ = opening_lazily(
    __name__,
    {
        "Catalog": "catalog",
        "PagedDataset": "dataset",
        "Pages": "choice",
        "R2DatasetLoader": "loader",
        "make_index": "index",
        "verify_window": "verify",
        "write_index": "index",
    },
)
