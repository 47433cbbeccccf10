"""A run on folders, in this process: what a single role does, step by step."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from exchange.material import SUBFOLDER, fill_dataset, index_dataset, write_config
from penstock.exchange.aggregator import Aggregator
from penstock.exchange.artifacts import pack
from penstock.exchange.opening import OpenedRun, begin_run, read_settings
from penstock.exchange.places import needed, open_places, store_time
from penstock.storage import open_storage
from penstock.train.stopping import StopRequest


@dataclass
class LocalRun:
    """Contributions made by hand, and an aggregator in a thread."""

    folder: Path
    opened: OpenedRun
    stop: StopRequest = field(default_factory=StopRequest)

    @classmethod
    def begin(cls, folder: Path, **settings: Any) -> LocalRun:
        dataset = folder / "buckets" / "dataset"
        fill_dataset(open_storage(dataset))
        index_dataset(open_storage(dataset / SUBFOLDER))
        config = write_config(folder, top_k=8, chunk_side=16, **settings)
        return cls(folder, begin_run(open_places("aggregator", str(folder / "buckets")), read_settings(config)))

    def contribute(self, uid: str, window: int, base: str, *, seed: int = 0, scale: float = 1.0, **header: Any) -> None:
        """Something that passes every check, whatever it is worth."""
        count = self.opened.facts.num_weights
        change = scale * torch.randn(count, generator=torch.Generator().manual_seed(seed))
        tensors = self.opened.codec.encode(change, self.opened.codec.new_memory())
        self.put(uid, window, base, tensors, header)

    def put(
        self, uid: str, window: int, base: str, tensors: dict[str, np.ndarray], header: dict[str, Any] | None = None
    ) -> None:
        told = {"kind": "contribution", "version": "v2", "run": self.opened.settings.run, "uid": uid, "window": window}
        told |= {"base": base, "samples_digest": "0" * 64, **(header or {})}
        data = pack(told, tensors)[1]
        needed(self.opened.places.gradients).put(self.opened.keys.contribution(uid, window), data)

    def date_first(self, uid: str, after_s: float) -> None:
        """Have a contribution to window 0 be written so long after it opened, however slow this machine is."""
        opened_at = store_time(self.opened.places.aggregator.head(self.opened.keys.settings))
        path = self.folder / "buckets" / "gradients" / self.opened.keys.contribution(uid, 0)
        os.utime(path, (opened_at + after_s, opened_at + after_s))

    def until_closed(self, window: int) -> None:
        deadline = time.monotonic() + 60
        while not self.opened.chain.exists(window):
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def close(self, windows: int, **options: Any) -> threading.Thread:
        """An aggregator that closes windows up to a number."""
        aggregator = Aggregator(self.opened, stop=self.stop, poll_s=0.02, until_window=windows, **options)
        thread = threading.Thread(target=aggregator.run)
        thread.start()
        return thread
