"""A real task for the carry: what stood in the first chunk is asked for in the third."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.feed import IGNORED_LABEL
from penstock.train.long.rollout import chunked_segment_rollout
from penstock.train.long.tokens import LongTokens, long_tokens
from penstock.train.models.act import ActShape, RecurrentModel

pytestmark = pytest.mark.usefixtures("one_thread")

KEYS, VALUES, FILLING, VOCABULARY = 8, 8, 16, 40
"""Keys are tokens 0 to 7, values 8 to 15, all else is filling."""
PAIRS, CHUNK, LENGTH = 4, 32, 96


def haystack(sequences: int, chance: torch.Generator) -> dict[str, Tensor]:
    """Pairs of key and value at the beginning of a row; each key once more at its end, where the value is the label.

    The value itself does not stand there again: only who remembers knows it.
    """
    ids = torch.randint(FILLING, VOCABULARY, (sequences, LENGTH), generator=chance)
    labels = torch.full_like(ids, IGNORED_LABEL)
    keys = torch.rand(sequences, KEYS, generator=chance).argsort(1)[:, :PAIRS]
    values = torch.randint(KEYS, KEYS + VALUES, (sequences, PAIRS), generator=chance)
    ids[:, 0 : 2 * PAIRS : 2], ids[:, 1 : 2 * PAIRS : 2] = keys, values
    asked = 2 * CHUNK + torch.rand(sequences, LENGTH - 2 * CHUNK, generator=chance).argsort(1)[:, :PAIRS]
    ids.scatter_(1, asked, keys)
    labels.scatter_(1, asked, values)
    return {"input_ids": ids, "labels": labels}


def with_the_carry_cut(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every chunk a document of its own: nothing is handed on."""
    chunks = torch.arange(LENGTH).div(CHUNK, rounding_mode="floor")
    return {**batch, "document_ids": chunks.expand_as(batch["input_ids"])}


def recall(*, cut: bool, most_steps: int) -> tuple[float, int]:
    """Train a model until it is sure; how often it is then right on rows it has not seen, and the steps that took."""
    torch.manual_seed(0)
    chance = torch.Generator().manual_seed(1)
    shape = ActShape(dim=32, heads=2, fast_layers=1, slow_layers=1, cycles=1)
    model = RecurrentModel(shape, vocab_size=VOCABULARY)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)

    def rows(sequences: int) -> dict[str, Tensor]:
        made = haystack(sequences, chance)
        return with_the_carry_cut(made) if cut else made

    loss, step = 9.0, 0
    while step < most_steps and loss > 0.1:
        step += 1
        optimizer.param_groups[0]["lr"] = 7e-3 * min(1.0, step / 10)
        optimizer.zero_grad()
        loss = chunked_segment_rollout(model, rows(16), 1, CHUNK, bptt_chunks="all").loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return accuracy(model, long_tokens(rows(128))), step


@torch.no_grad()
def accuracy(model: RecurrentModel, tokens: LongTokens) -> float:
    logits = model(tokens.input_ids, tokens.position_ids, tokens.document_ids)
    asked = tokens.labels != IGNORED_LABEL
    return (logits.argmax(-1) == tokens.labels)[asked].double().mean().item()


def test_a_needle_is_found_again_beyond_a_chunk_with_the_carry_and_by_guessing_without() -> None:
    found, steps = recall(cut=False, most_steps=300)
    assert found > 0.9
    guessed, _ = recall(cut=True, most_steps=steps)
    assert guessed < 0.3  # one in eight is chance
