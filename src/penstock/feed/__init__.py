"""The feed: from a plan's samples to batches.

    claims plan:   BlockManager.get_chunk ──► Tokenizer.encode ──► pack_window ──► batches of one leased chunk
    strided plan:  TokenCache ──► a window's samples, gathered in order ──► sequences ──► global batches, [rank::world]
                   BlockManager ──► texts of a batch's samples                              (DistributedLoader)

Packing is a pure function of a window's samples, so a feed has no buffer to save: a resumed one packs its window again
and goes on at a sequence offset. Below: `blocks`, `plans`. Above: `train`, which makes tensors of it; so do
`torch_adapter` and `torch_workers`, for loops of one's own. They import torch, and nothing here imports them.
"""

from typing import TYPE_CHECKING

from penstock.exports import opening_lazily

if TYPE_CHECKING:
    from penstock.feed.chunks import ChunkFeed
    from penstock.feed.engines import EngineName, choose_engine
    from penstock.feed.loader import DistributedLoader
    from penstock.feed.mix import Mix
    from penstock.feed.packing import IGNORED_LABEL, Batch, PackedWindow, pack_window
    from penstock.feed.token_cache import TokenCache
    from penstock.feed.tokenizer import Tokenizer, train_tokenizer

__all__ = [
    "IGNORED_LABEL",
    "Batch",
    "ChunkFeed",
    "DistributedLoader",
    "EngineName",
    "Mix",
    "PackedWindow",
    "TokenCache",
    "Tokenizer",
    "choose_engine",
    "pack_window",
    "train_tokenizer",
]

__getattr__ = opening_lazily(
    __name__,
    {
        "Batch": "packing",
        "ChunkFeed": "chunks",
        "DistributedLoader": "loader",
        "EngineName": "engines",
        "IGNORED_LABEL": "packing",
        "Mix": "mix",
        "PackedWindow": "packing",
        "TokenCache": "token_cache",
        "Tokenizer": "tokenizer",
        "choose_engine": "engines",
        "pack_window": "packing",
        "train_tokenizer": "tokenizer",
    },
)
