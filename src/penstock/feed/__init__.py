"""The feed: from chunks to batches of token ids.

    BlockManager.get_chunk ──► Tokenizer.encode ──► pack_window ──► PackedWindow.batches ──► dict of numpy arrays
         texts                   ids + offsets        sequences        from any sequence offset

The window is the chunk: packing is a pure function of its samples, so a feed has no buffer to save. A resumed feed
packs its window again and goes on at a sequence offset. Below: `blocks`. Above: `train`, which makes tensors of it.
"""

from penstock.feed.chunks import ChunkFeed
from penstock.feed.engines import EngineName, choose_engine
from penstock.feed.packing import IGNORED_LABEL, Batch, PackedWindow, pack_window
from penstock.feed.tokenizer import Tokenizer, train_tokenizer

__all__ = [
    "IGNORED_LABEL",
    "Batch",
    "ChunkFeed",
    "EngineName",
    "PackedWindow",
    "Tokenizer",
    "choose_engine",
    "pack_window",
    "train_tokenizer",
]
