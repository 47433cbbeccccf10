"""Blocks: any source becomes numbered samples in files of bounded size, and chunks come out of them.

    Source ──► ingest ──► BlockWriter ──► blocks/block_00000.jsonl + .idx     a block is visible only when whole
                             │
                             └─► Journal: one marker a block, with the source's cursor     (`.ingest/`)
                                    └─► block_manifest.json, once, at the end; the journal goes

    raw source ──► background ingest into the cache ──► BlockManager reads its first blocks meanwhile

    BlockStore ──► one chunk = one range of the index + one range of the block, checked by CRC ──► BlockManager
       far away:   indexes in memory, one request a chunk, through a disk cache that the machine's processes share

Below: `sources` gives the rows, `storage` keeps the bytes. Above: `feed` reads chunks through `BlockManager`. Nothing
here knows who trains what: that is the ledger's.
"""

from typing import TYPE_CHECKING

from penstock.exports import opening_lazily

if TYPE_CHECKING:
    from penstock.blocks.cutting import IngestProgress
    from penstock.blocks.ingesting import ingest, process_raw_dataset_to_blocks
    from penstock.blocks.manager import Block, BlockManager
    from penstock.blocks.manifest import BlockEntry, Manifest
    from penstock.blocks.places import cache_folder
    from penstock.blocks.raw import prepare_blocks
    from penstock.blocks.store import BlockStore
    from penstock.blocks.verify import verify_blocks

__all__ = [
    "Block",
    "BlockEntry",
    "BlockManager",
    "BlockStore",
    "IngestProgress",
    "Manifest",
    "cache_folder",
    "ingest",
    "prepare_blocks",
    "process_raw_dataset_to_blocks",
    "verify_blocks",
]

__getattr__ = opening_lazily(
    __name__,
    {
        "Block": "manager",
        "BlockEntry": "manifest",
        "BlockManager": "manager",
        "BlockStore": "store",
        "IngestProgress": "cutting",
        "Manifest": "manifest",
        "cache_folder": "places",
        "ingest": "ingesting",
        "prepare_blocks": "raw",
        "process_raw_dataset_to_blocks": "ingesting",
        "verify_blocks": "verify",
    },
)
