"""Needle recall beyond a chunk: a recurrent model with its carry, beside the same one with the carry cut.

    python benchmarks/needle.py [--length 2048] [--chunk-size 256] [--steps 150] [--device cuda] [--json]

Rows of filling hold pairs of key and value at random places. Later each key stands there again, alone, and its value
is to be said: only who remembers knows it. Some are asked for within the chunk, most of them chunks later; told is how
often the answer beyond a chunk is right, on rows of the trained length and on longer ones. The ways differ in nothing
but what is handed on: the carry with gradients through all chunks, the carry with gradients through one, no carry.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from measuring import log
from penstock import chunked_segment_rollout
from penstock.feed import IGNORED_LABEL
from penstock.train.long.tokens import LongTokens, long_tokens
from penstock.train.models.act import ActShape, RecurrentModel

KEYS, VALUES, VOCABULARY = 64, 64, 512
PAIRS = 16
SHAPE = ActShape(dim=128, heads=4, fast_layers=1, slow_layers=1, cycles=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How a sequence is read while it is learned, and when it is judged."""

    bptt_chunks: int | Literal["all"]
    cut: bool = False


WAYS = {
    "carry, gradients through all chunks": Way(bptt_chunks="all"),
    "carry, gradients through 1 chunk": Way(bptt_chunks=1),
    "carry cut at every chunk": Way(bptt_chunks=1, cut=True),
}


@dataclass(frozen=True, slots=True)
class Rows:
    tokens: LongTokens
    distance: Tensor
    """From each question back to its pair; 0 where nothing is asked."""


def haystack(sequences: int, length: int, chance: torch.Generator) -> Rows:
    """Each pair in some stretch of a row, its key once more in a later stretch.

    A stretch has two places for every pair, so that nothing stands in the place of anything else.
    """
    ids = torch.randint(KEYS + VALUES, VOCABULARY, (sequences, length), generator=chance)
    labels, distance = torch.full_like(ids, IGNORED_LABEL), torch.zeros_like(ids)
    keys = torch.rand(sequences, KEYS, generator=chance).argsort(1)[:, :PAIRS]
    values = torch.randint(KEYS, KEYS + VALUES, (sequences, PAIRS), generator=chance)
    stretch = 2 * PAIRS
    last = length // stretch - 1
    stands, further = torch.rand(2, sequences, PAIRS, generator=chance)
    first = (stands * last).long()
    later = first + 1 + (further * (last - first)).long()
    place, asked = (stretch * at + 2 * torch.arange(PAIRS) for at in (first, later))
    ids.scatter_(1, place, keys).scatter_(1, place + 1, values).scatter_(1, asked, keys)
    labels.scatter_(1, asked, values)
    distance.scatter_(1, asked, asked - place)
    return Rows(long_tokens({"input_ids": ids, "labels": labels}), distance)


def read_as(way: Way, tokens: LongTokens, chunk_size: int) -> LongTokens:
    """With the carry cut, every chunk is a document of its own."""
    if not way.cut:
        return tokens
    chunks = torch.arange(len(tokens)).div(chunk_size, rounding_mode="floor")
    return replace(tokens, document_ids=chunks.expand_as(tokens.input_ids))


def train(way: Way, options: argparse.Namespace) -> tuple[RecurrentModel, float]:
    """A model that has learned this way, and tokens a second."""
    torch.manual_seed(0)
    chance = torch.Generator().manual_seed(1)
    model = RecurrentModel(SHAPE, vocab_size=VOCABULARY).to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    began = time.perf_counter()
    for step in range(options.steps):
        optimizer.param_groups[0]["lr"] = options.learning_rate * min(1.0, (step + 1) / 20)
        optimizer.zero_grad()
        tokens = read_as(way, haystack(options.batch_size, options.length, chance).tokens, options.chunk_size)
        found = chunked_segment_rollout(model, tokens, 1, options.chunk_size, bptt_chunks=way.bptt_chunks)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 49:
            log(f"step {step + 1}: loss {found.loss.item():.3f}")
    return model, options.steps * options.batch_size * options.length / (time.perf_counter() - began)


@torch.no_grad()
def recall(model: RecurrentModel, way: Way, length: int, options: argparse.Namespace) -> float:
    """How often the answer is right where it is asked for beyond a chunk, on rows that were not learned."""
    rows = haystack(max(4, 16 * 4096 // length), length, torch.Generator().manual_seed(2))
    tokens = read_as(way, rows.tokens, options.chunk_size)
    carry = model.initial_carry(len(tokens.input_ids), torch.device(options.device))
    right = asked = 0
    for start in range(0, length, options.chunk_size):
        piece = tokens.piece(start, start + options.chunk_size, torch.device(options.device))
        output = model.forward_chunk(piece.input_ids, piece.position_ids, piece.document_ids, carry)
        carry = output.carry
        beyond = rows.distance[:, start : start + options.chunk_size].to(options.device) > options.chunk_size
        said = (output.hidden[beyond] @ model.embed.weight.T).argmax(-1)
        right += int((said == piece.labels[beyond]).sum())
        asked += int(beyond.sum())
    return right / asked


def measure(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    results: dict[str, dict[str, float]] = {}
    for name, way in WAYS.items():
        log(name)
        model, speed = train(way, options)
        lengths = [options.length * factor for factor in (1, 4, 16)]
        results[name] = {f"{length:,} tokens": recall(model, way, length, options) for length in lengths}
        results[name]["tokens a second"] = speed
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--chunk-size", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results = measure(options)
    if options.json:
        print(json.dumps(results, indent=2))
        return
    columns = list(next(iter(results.values())))
    print(f"| way | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    for name, found in results.items():
        told = [f"{value:,.0f}" if value > 1 else f"{value:.3f}" for value in found.values()]
        print(f"| {name} | {' | '.join(told)} |")


if __name__ == "__main__":
    main()
