"""A replica: weights that follow the manifests, window by window, to the same bits as everybody else's."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from penstock.errors import ArtifactRejected, ExchangeError, ObjectNotFound
from penstock.exchange.artifacts import largest, unpack
from penstock.exchange.checkpoints import Checkpoint, Checkpoints
from penstock.exchange.codec import AggregateCodec
from penstock.exchange.layout import digest_of
from penstock.exchange.manifests import Manifest, ManifestChain
from penstock.exchange.places import read_limited
from penstock.storage import Storage

_log = logging.getLogger(__name__)


class Replica:
    """Weights on the CPU, as far as the manifests have come. `catch_up` first."""

    def __init__(
        self, aggregator: Storage, checkpoints: Checkpoints, chain: ManifestChain, codec: AggregateCodec
    ) -> None:
        self._storage = aggregator
        self._checkpoints = checkpoints
        self._chain = chain
        self._codec = codec
        self.learned = -1
        """Windows that are in the weights."""
        self.base = ""
        """Digest of the last of their manifests."""
        self.weights: Tensor = torch.empty(0)
        self.digest = ""
        """Of the weights, worked out here."""
        self.read_bytes = 0

    def begin_at(self, checkpoint: Checkpoint) -> None:
        self.learned, self.base, self.weights = checkpoint.learned, checkpoint.base, checkpoint.weights
        self.digest = digest_of(checkpoint.weights)
        self.read_bytes += checkpoint.weights.numel() * 4

    def catch_up(self) -> None:
        """Begin with the newest checkpoint and take every window behind it."""
        if self.learned < 0:
            self.begin_at(self._checkpoints.newest())
        while self.follow() is not None:
            pass

    def follow(self) -> Manifest | None:
        """Take the next window, where it is closed; None where it is still open."""
        manifest = self._chain.read(self.learned)
        if manifest is None:
            self._look_ahead()
            return None
        try:
            self.apply(manifest)
        except ObjectNotFound as error:
            self._skip_to_checkpoint(str(error))
        return manifest

    def apply(self, manifest: Manifest, data: bytes | memoryview | None = None) -> None:
        """The outer step: take the window's change off the weights, and see that they are what everybody has."""
        if (manifest.window, manifest.base) != (self.learned, self.base):
            raise ExchangeError(
                f"the manifest of window {manifest.window} builds on {manifest.base[:12]}, and this replica is at "
                f"window {self.learned}, {self.base[:12]}: the chain is broken; start again from a checkpoint"
            )
        key = self._chain.aggregate_of(manifest)
        try:
            if data is None:
                data = read_limited(self._storage, key, largest(self._codec.shapes))
                self.read_bytes += len(data)
            artifact = unpack(data, self._codec.shapes)
            self._codec.check(artifact.tensors)
        except ArtifactRejected as error:
            raise ExchangeError(f"the aggregate of window {manifest.window} cannot be used: {error}") from error
        if artifact.digest != manifest.aggregate["digest"]:
            raise ExchangeError(f"the aggregate {key} is not the one that its manifest names")
        self._codec.apply(self.weights, artifact.tensors)
        self.digest = digest_of(self.weights)
        if self.digest != manifest.weights:
            raise ExchangeError(
                f"after window {manifest.window} this replica's weights are {self.digest[:12]}, everybody's are "
                f"{manifest.weights[:12]}: start again from a checkpoint"
            )
        self.learned, self.base = manifest.window + 1, manifest.digest

    def _look_ahead(self) -> None:
        """A manifest that is not there may be too old to be: then a checkpoint is ahead of us."""
        if self.learned and not self._chain.exists(self.learned - 1):
            self._skip_to_checkpoint(f"the manifest of window {self.learned} is gone")

    def _skip_to_checkpoint(self, gone: str) -> None:
        newest = self._checkpoints.newest()
        if newest.learned <= self.learned:
            raise ExchangeError(f"window {self.learned} cannot be learned, and no checkpoint is ahead of it: {gone}")
        _log.warning("%s: going on from the checkpoint after window %d", gone, newest.learned - 1)
        self.begin_at(newest)
