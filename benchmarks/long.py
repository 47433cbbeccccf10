"""Long sequences learned in chunks of tokens: memory by length, speed against the whole sequence at once, and parity.

    python benchmarks/long.py parity [--device cuda]
    python benchmarks/long.py memory [--device cuda] [--lengths 8192 ...] [--chunk-size 2048]
    python benchmarks/long.py speed  [--device cuda] [--rounds 3] [--chunk-sizes 2048 4096] [--length N] [--longest N]

Needs no network: models have random weights, tokens are random.

parity   Gradients of a small model in bf16, in chunks and as a whole, each against the whole in fp32: chunks may be no
         further away than the whole is.
memory   The greatest memory of a step (weights, gradients and optimizer included) of a 130 M-parameter model, in
         chunks, in chunks with keys and values on the host, and as a whole without and with activation checkpointing.
speed    Tokens per second of a 1.5 B-parameter model, interleaved: in chunks, with and without offload, and as a whole
         with activation checkpointing, all with AdamW; then the longest sequence, in chunks alone.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch

from penstock.feed import Batch
from penstock.train.device_batch import DeviceBatch, to_device
from penstock.train.long.chunkable import chunkable
from penstock.train.long.exact import ExactChunks
from penstock.train.models.huggingface import CausalLM
from penstock.train.schedule import Schedule
from penstock.train.trainer import Trainer

GIB = 1 << 30
How = Literal["whole", "checkpointed", "chunks", "offload"]
CHUNKED: tuple[How, ...] = ("chunks", "offload")

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1_000,
    },
    "130M": {
        "hidden_size": 768,
        "intermediate_size": 2_048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "vocab_size": 32_000,
    },
    "0.5B": {
        "hidden_size": 896,
        "intermediate_size": 4_864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151_936,
        "tie_word_embeddings": True,
    },
    "1.5B": {
        "hidden_size": 1_536,
        "intermediate_size": 8_960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151_936,
        "tie_word_embeddings": True,
    },
}


def make_model(shape: str, device: torch.device, **more: Any) -> CausalLM:
    """A Qwen2 of some shape, with random weights."""
    config = {"model_type": "qwen2", "max_position_embeddings": 1 << 20, **SHAPES[shape], **more}
    torch.manual_seed(0)
    with device:
        return CausalLM(json.dumps(config), vocab_size=config["vocab_size"])


def make_batch(length: int, vocab_size: int, device: torch.device, *, sequences: int = 1, cuts: int = 0) -> DeviceBatch:
    """Random tokens, in one document a sequence or in several."""
    rng = np.random.default_rng(length + cuts)
    ids = rng.integers(0, vocab_size, (sequences, length))
    documents = np.zeros((sequences, length), np.int64)
    for row in documents:
        for cut in rng.integers(1, length, cuts):
            row[cut:] += 1
    begins = np.ones_like(documents, np.bool_)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    indices = np.arange(length)
    positions = indices - np.maximum.accumulate(np.where(begins, indices, 0), axis=1)
    labels = np.full_like(ids, -100)
    labels[:, :-1] = np.where(begins[:, 1:], -100, ids[:, 1:])
    arrays = {"input_ids": ids, "labels": labels, "position_ids": positions, "document_ids": documents}
    source = Batch(
        **arrays,
        spans=np.array([[0, 0, length]]),
        sample_ids=np.array([0]),
        start_offset=0,
        stop_offset=sequences,
        samples_done=1,
    )
    return to_device(source, device)


def make_trainer(model: CausalLM, how: How, chunk_size: int, precision: Literal["fp32", "bf16"] = "bf16") -> Trainer:
    if how == "checkpointed":
        model.lm.gradient_checkpointing_enable()  # pyright: ignore
    in_chunks = how in CHUNKED
    return Trainer(
        model,
        schedule=Schedule(learning_rate=1e-5),
        precision=precision,
        in_chunks=ExactChunks(chunkable(model), chunk_size, cpu_offload=how == "offload") if in_chunks else None,
        device=next(model.parameters()).device,
    )


def peak_gib(work: Callable[[], object], device: torch.device) -> float:
    """The greatest memory while working."""
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) / GIB


def free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def parity(args: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(args.device)
    told: dict[str, Any] = {}
    windows: dict[str, dict[str, Any]] = {
        "full": {},
        "window": {"use_sliding_window": True, "sliding_window": 300, "max_window_layers": 2},
    }
    for name, more in windows.items():
        model = make_model("tiny", device, **more)
        for cuts in (0, 9):
            batch = make_batch(2_000, 1_000, device, sequences=3, cuts=cuts)
            exact = _gradients(model, batch, "whole", args.chunk_size, "fp32")
            for how in ("whole", "chunks", "offload"):
                for precision in ("fp32", "bf16"):
                    found = _gradients(model, batch, how, 384, precision)
                    far = max(float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True))
                    told[f"{name}, {cuts + 1} documents, {how}, {precision}"] = f"{far:.2e}"
        del model
        free()
    return told


def _gradients(
    model: CausalLM, batch: DeviceBatch, how: How, chunk_size: int, precision: Literal["fp32", "bf16"]
) -> list[torch.Tensor]:
    trainer = make_trainer(model, how, chunk_size, precision)
    model.zero_grad()
    trainer._learn(batch, slice(None), float(batch.num_tokens))  # pyright: ignore[reportPrivateUsage]
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def memory(args: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(args.device)
    shape = SHAPES["130M"]
    cache = 2 * 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * 64  # keys and values, bf16, a token
    parameters = sum(parameter.numel() for parameter in make_model("130M", device).parameters())
    free()
    told: dict[str, Any] = {
        "keys and values of 8192 tokens, GiB": round(cache * 8192 / GIB, 3),
        "weights, gradients and moments, GiB": round(16 * parameters / GIB, 3),
    }
    ways: tuple[How, ...] = ("chunks", "offload", "checkpointed", "whole")
    for how in ways:
        whole = how not in CHUNKED
        told[how] = {
            length: _peak_of_step(how, length, args.chunk_size, device)
            for length in args.lengths
            if not (whole and length > 65_536)
        }
        if how != "checkpointed":
            told[f"{how}, 4 sequences of 32768"] = _peak_of_step(how, 32_768, args.chunk_size, device, sequences=4)
            told[f"{how}, 0.5B, 32768"] = _peak_of_step(how, 32_768, args.chunk_size, device, shape="0.5B")
    return told


def _peak_of_step(
    how: How, length: int, chunk_size: int, device: torch.device, *, sequences: int = 1, shape: str = "130M"
) -> float | str:
    """The peak of a step that is not the first, in GiB."""
    free()  # what the step before left behind
    trainer = make_trainer(make_model(shape, device), how, chunk_size)
    batch = make_batch(length, SHAPES[shape]["vocab_size"], device, sequences=sequences)
    try:
        trainer.step(batch, 1)
        return round(peak_gib(lambda: trainer.step(batch, 2), device), 3)
    except torch.OutOfMemoryError:
        return "does not fit"


def speed(args: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(args.device)
    vocab_size = SHAPES["1.5B"]["vocab_size"]
    model = make_model("1.5B", device)
    told: dict[str, Any] = {"parameters": sum(parameter.numel() for parameter in model.parameters())}
    trainer = make_trainer(model, "whole", 0)
    batch = make_batch(args.length, vocab_size, device)
    ways: list[tuple[How, int]] = [("checkpointed", 0), *(("chunks", size) for size in args.chunk_sizes)]
    ways.append(("offload", args.chunk_sizes[-1]))
    results: dict[tuple[How, int], list[tuple[float, float]]] = {way: [] for way in ways}
    learning = {way: _in_chunks(model, *way) for way in ways}
    for number in range(args.rounds + 1):  # the first warms up
        for way in ways:
            free()
            result = _step(trainer, model, batch, way[0], learning[way])
            if number:
                results[way].append(result)
    peer = [seconds for seconds, _ in results["checkpointed", 0]]
    for (how, size), found in results.items():
        seconds = [took for took, _ in found]
        told[f"{how} {size or ''}".strip()] = {
            **_told(args.length, statistics.median(seconds), found[-1][1]),
            "of checkpointed": round(statistics.median(a / b for a, b in zip(peer, seconds, strict=True)), 3),
        }
    learning.clear()
    batch = make_batch(args.longest, vocab_size, device)
    smallest, largest = min(args.chunk_sizes), max(args.chunk_sizes)
    longest: list[tuple[How, int]] = [("chunks", smallest), ("offload", smallest), ("offload", largest)]
    for how, size in longest:
        free()
        chunks = _in_chunks(model, how, size)
        _step(trainer, model, batch, how, chunks)
        told[f"longest, {how} {size}"] = _told(args.longest, *_step(trainer, model, batch, how, chunks))
        del chunks
    return told


def _in_chunks(model: CausalLM, how: How, size: int) -> ExactChunks | None:
    return ExactChunks(chunkable(model), size, cpu_offload=how == "offload") if how in CHUNKED else None


def _step(
    trainer: Trainer, model: CausalLM, batch: DeviceBatch, how: How, in_chunks: ExactChunks | None
) -> tuple[float, float]:
    """Seconds and peak GiB of a step; endless where it does not fit."""
    lm: Any = model.lm
    trainer._in_chunks = in_chunks  # pyright: ignore[reportPrivateUsage]
    if how == "checkpointed":
        lm.gradient_checkpointing_enable()
    try:
        torch.cuda.synchronize(trainer.device)
        began = time.perf_counter()
        peak = peak_gib(lambda: trainer.step(batch, 1), trainer.device)
        return time.perf_counter() - began, peak
    except torch.OutOfMemoryError:
        model.zero_grad()
        return float("inf"), float("inf")
    finally:
        lm.gradient_checkpointing_disable()


def _told(length: int, seconds: float, peak: float) -> dict[str, Any]:
    return {
        "tokens": length,
        "seconds": round(seconds, 3),
        "tokens_per_s": round(length / seconds),
        "peak_gib": round(peak, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["parity", "memory", "speed"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--chunk-size", type=int, default=2_048)
    parser.add_argument("--chunk-sizes", type=int, nargs="+", default=[2_048, 4_096])
    parser.add_argument("--lengths", type=int, nargs="+", default=[8_192, 16_384, 32_768, 65_536, 131_072])
    parser.add_argument("--length", type=int, default=32_768)
    parser.add_argument("--longest", type=int, default=131_072)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    told = {"parity": parity, "memory": memory, "speed": speed}[args.what](args)
    print(json.dumps({"what": args.what, "torch": torch.__version__, **told}, indent=1))


if __name__ == "__main__":
    main()
