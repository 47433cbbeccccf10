"""Miners that send what no miner should. They write with keys of their own, as anybody could."""

from __future__ import annotations

import base64
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import torch
from obstore.store import S3Store

from exchange.stage import Stage, store_of
from penstock.exchange.artifacts import Tensors, pack, unpack
from penstock.exchange.learning import LocalLearner
from penstock.exchange.opening import OpenedRun
from penstock.exchange.replica import Replica

OVERSIZED_BYTES = 200 << 20


class Bomb:
    """What a pickle can do to whoever opens it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


class Enemies:
    """Contributions of every bad kind, made from the weights of the window that is open."""

    def __init__(self, stage: Stage, opened: OpenedRun) -> None:
        self.stage = stage
        self.opened = opened
        self.replica: Replica = opened.replica()
        self.data = opened.data()
        model, vector = opened.model()
        self.learner = LocalLearner(model, vector, opened.settings, torch.device("cpu"))
        self.trap = stage.folder / "executed"
        self.sent_large = False

    def put(self, uid: str, window: int, data: bytes) -> None:
        store_of(self.stage.url, "gradients", uid).put(self.stage.keys.contribution(uid, window), data)

    def send(self, uid: str, kind: str, window: int) -> None:
        """One contribution of a kind to the window that the replica stands at."""
        if kind == "locked":
            self._put_locked(uid, window)
            return
        make: Callable[[str, int], bytes] = getattr(self, f"_{kind}")
        self.put(uid, window, make(uid, window))

    def packed(self, uid: str, window: int, tensors: Tensors, **header: Any) -> bytes:
        told = {
            "kind": "contribution",
            "version": "v2",
            "run": self.stage.run,
            "uid": uid,
            "window": window,
            "base": self.replica.base,
            "samples_digest": self.data.expected_digest(uid, window),
            **header,
        }
        return pack(told, tensors)[1]

    def honest(self, pages_of: str, window: int) -> Tensors:
        """What learning somebody's pages comes to."""
        work = self.learner.learn(self.replica.weights, self.data.assigned(pages_of, window).batches, lambda: True)
        assert work is not None
        return self.opened.codec.encode(work.delta, self.opened.codec.new_memory())

    def stolen(self, window: int) -> Tensors:
        """The content of the first miner's contribution."""
        data = store_of(self.stage.url, "gradients").get(self.stage.keys.contribution("m0", window))
        return unpack(data, self.opened.codec.shapes).tensors

    def _nan(self, uid: str, window: int) -> bytes:
        tensors = self.honest(uid, window)
        tensors["scales"] = tensors["scales"] * np.float32("nan")
        return self.packed(uid, window, tensors)

    def _shape(self, uid: str, window: int) -> bytes:
        tensors = self.honest(uid, window)
        return self.packed(uid, window, {**tensors, "values": tensors["values"][:, :8].copy()})

    def _index(self, uid: str, window: int) -> bytes:
        tensors = self.honest(uid, window)
        return self.packed(uid, window, {**tensors, "places": np.full_like(tensors["places"], 255)})

    def _oversized(self, uid: str, window: int) -> bytes:
        if self.sent_large:
            return bytes(1 << 20)
        self.sent_large = True
        return bytes(OVERSIZED_BYTES)

    def _pickle(self, uid: str, window: int) -> bytes:
        return pickle.dumps(Bomb(self.trap))

    def _norm(self, uid: str, window: int) -> bytes:
        tensors = self.honest(uid, window)
        return self.packed(uid, window, {**tensors, "scales": tensors["scales"] * np.float32(1000)})

    def _put_locked(self, uid: str, window: int) -> None:
        """Encrypted by the store with a key that only this miner has: neither its head nor its body can be had."""
        store = S3Store(
            "gradients",
            endpoint=self.stage.url,
            access_key_id=uid,
            secret_access_key=f"{uid}-secret",
            region="us-east-1",
            client_options={"allow_http": True},
            server_side_encryption="sse-c",
            sse_customer_key_base64=base64.b64encode(bytes(range(32))).decode(),
        )
        obstore.put(store, self.stage.keys.contribution(uid, window), b"unreadable")

    def _early(self, uid: str, window: int) -> bytes:
        self.put(uid, window + 1, self.packed(uid, window + 1, self.honest(uid, window)))
        return b"nothing"

    def _copied(self, uid: str, window: int) -> bytes:
        return self.packed(uid, window, self.stolen(window))

    def _twisted(self, uid: str, window: int) -> bytes:
        """A copy that is not the same to the bit."""
        tensors = self.stolen(window)
        return self.packed(uid, window, {**tensors, "scales": tensors["scales"] * np.float32(1.01)})

    def _elsewhere(self, uid: str, window: int) -> bytes:
        """Other pages than it had to read, under the digest of those."""
        return self.packed(uid, window, self.honest("somebody-else", window))

    def _samples(self, uid: str, window: int) -> bytes:
        """Other pages, told as they are."""
        digest = self.data.expected_digest("somebody-else", window)
        return self.packed(uid, window, self.honest("somebody-else", window), samples_digest=digest)
