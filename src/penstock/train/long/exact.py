"""A sequence learned in chunks of tokens, with the gradients of the whole.

    forward   chunk 0, 1, ... n-2   keys and values into memory; nothing else is kept, so that several go at once
    backward  chunk n-1, ... 1, 0   computed again with a graph, its loss taken back through it; what it owes to the
                                    keys and values of earlier chunks waits in memory until their turn

Activations live for one chunk, logits for part of one. The forward pass is paid twice, as with activation
checkpointing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor

from penstock.train.device_batch import DeviceBatch
from penstock.train.long.attention import ChunkAttention
from penstock.train.long.chunkable import Chunkable
from penstock.train.long.cross_entropy import loss_and_gradient
from penstock.train.long.dice import Dice
from penstock.train.long.documents import Documents
from penstock.train.long.host_memory import HostMemory
from penstock.train.long.memory import DeviceMemory, Memory
from penstock.train.long.tokens import LongTokens
from penstock.train.models.transformer import summed_cross_entropy
from penstock.train.trainer import Computing

_LOGITS_BYTES = 1 << 29
"""Logits computed at a time, in fp32."""

_LAYERS_A_CHUNK = 4
"""A model of so many layers reads one chunk at a time without a graph, one of twice as many two, and so on."""


class ExactChunks:
    """Learns batches of long sequences; holds the memory that one batch after another uses."""

    def __init__(self, model: Chunkable, chunk_size: int, *, cpu_offload: bool = False) -> None:
        """Take a model.

        Args:
            model: What learns.
            chunk_size: Tokens a chunk.
            cpu_offload: Keep keys, values and their gradients in host memory; two layers of them are on the device.
        """
        self._model = model
        self._chunk_size = chunk_size
        self._cpu_offload = cpu_offload
        self._memory: Memory | None = None

    def learn(self, batch: DeviceBatch, rows: slice, weight: float, computing: Computing = nullcontext) -> Tensor:
        """Add the gradients of some sequences' summed loss over `weight`; returns that loss."""
        return self.learn_tokens(*rows_of(batch, rows), weight, computing)

    def learn_tokens(
        self, tokens: LongTokens, documents: np.ndarray, weight: float, computing: Computing = nullcontext
    ) -> Tensor:
        """The same of sequences that came by themselves.

        Args:
            tokens: On the device.
            documents: Their documents, on the host.
            weight: What the loss is divided by.
            computing: Within it the model computes in the precision that is wanted.
        """
        read = self._read(tokens, documents)
        dice = Dice(read.device)
        *earlier, last = read.chunks
        with torch.no_grad(), computing():
            for piece in read.pieces(earlier, dice):
                read.hidden(piece)
        total = torch.zeros((), dtype=torch.float64, device=read.device)
        with computing():  # around all: weights cast to another type are cast once
            for chunk in (last, *reversed(earlier)):
                with dice.as_noted(chunk.start):
                    hidden = read.hidden(chunk)
                total += self._backward(hidden, read.labels[:, chunk], weight)
        return total

    def loss_sum(self, batch: DeviceBatch, rows: slice) -> Tensor:
        """The summed loss of some sequences; nothing is learned."""
        return self.loss_of_tokens(*rows_of(batch, rows))

    @torch.no_grad()
    def loss_of_tokens(self, tokens: LongTokens, documents: np.ndarray) -> Tensor:
        """The same of sequences that came by themselves."""
        read = self._read(tokens, documents)
        total = torch.zeros((), dtype=torch.float64, device=read.device)
        for piece in read.pieces(read.chunks, Dice(read.device)):
            for tile, labels in self._tiles(read.hidden(piece), read.labels[:, piece]):
                total += summed_cross_entropy(self._model.logits(tile), labels)
        return total

    def _backward(self, hidden: Tensor, labels: Tensor, weight: float) -> Tensor:
        """Take a chunk's loss back: to its hidden states tile by tile, then through its layers at once."""
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        grads: list[Tensor] = []
        for tile, wanted in self._tiles(hidden.detach(), labels):
            logits = self._model.logits(tile.requires_grad_())
            loss, grad = loss_and_gradient(logits, wanted, weight)
            with torch.autocast(hidden.device.type, enabled=False):
                logits.backward(grad)
            total += loss
            del logits, grad  # before there are those of the tile that follows
            assert tile.grad is not None
            grads.append(tile.grad)
        if hidden.requires_grad:  # else what made it is frozen, and the head alone learns
            with torch.autocast(hidden.device.type, enabled=False):
                torch.autograd.backward(hidden, torch.cat(grads, 1))
        return total

    def _tiles(self, hidden: Tensor, labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Hidden states and labels of as many tokens at a time as there may be logits of."""
        most = max(1, _LOGITS_BYTES // (4 * self._model.vocab_size * len(hidden)))
        tiles = -(-hidden.shape[1] // most)
        tokens = -(-hidden.shape[1] // tiles)  # all nearly equal
        yield from zip(hidden.split(tokens, 1), labels.split(tokens, 1), strict=True)

    def _read(self, tokens: LongTokens, documents: np.ndarray) -> _Reading:
        if self._memory is None:
            device = tokens.input_ids.device
            self._memory = HostMemory(device) if self._cpu_offload and device.type == "cuda" else DeviceMemory()
        return _Reading(self._model, tokens, documents, self._memory, self._chunk_size)


def rows_of(batch: DeviceBatch, rows: slice) -> tuple[LongTokens, np.ndarray]:
    """Some sequences of a batch, and their documents on the host."""
    tokens = LongTokens(
        input_ids=batch.input_ids[rows],
        labels=batch.labels[rows],
        position_ids=batch.position_ids[rows],
        document_ids=batch.document_ids[rows],
    )
    return tokens, batch.source.document_ids[rows]


class _Reading:
    """Sequences, read in chunks."""

    def __init__(
        self, model: Chunkable, tokens: LongTokens, documents: np.ndarray, memory: Memory, chunk_size: int
    ) -> None:
        self._model = model
        self._memory = memory
        self._input_ids = tokens.input_ids
        self.labels = tokens.labels
        self.device = tokens.input_ids.device
        sequences, length = tokens.input_ids.shape
        apart = model.keeps_documents_apart
        self._position_ids = tokens.position_ids
        if not apart:  # then positions are those in the sequence
            self._position_ids = torch.arange(length, device=self.device).expand_as(tokens.input_ids)
        self._documents = Documents(documents, self.device, apart=apart)
        self.chunks = [slice(start, min(start + chunk_size, length)) for start in range(0, length, chunk_size)]
        memory.begin(sequences, length)

    def pieces(self, chunks: list[slice], dice: Dice) -> Iterator[slice]:
        """Chunks to be read without a graph: several at a time, unless random numbers are drawn for each.

        Such a piece holds the activations of one layer, a chunk with a graph those of all.
        """
        together = max(1, self._model.depth // _LAYERS_A_CHUNK)
        done = 0
        while done < len(chunks):
            count = together if dice.idle else 1  # the first chunk shows whether any are drawn
            piece = slice(chunks[done].start, chunks[min(done + count, len(chunks)) - 1].stop)
            with dice.noted(piece.start):
                yield piece
            done += count

    def hidden(self, chunk: slice) -> Tensor:
        """What the model makes of a chunk; all before it must have been read."""
        attention = ChunkAttention(memory=self._memory, documents=self._documents, start=chunk.start, stop=chunk.stop)
        return self._model.hidden(self._input_ids[:, chunk], self._position_ids[:, chunk], attention)
