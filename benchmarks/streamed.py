"""The streamed trainer beside FSDP2 with CPU offload, the all-resident model, and what the machine itself can do.

    python benchmarks/streamed.py speed [--rounds 2] [--tokens 2048 8192 32768] [--only streamed] [--budget-gib 24]
    python benchmarks/streamed.py large [--steps 10] [--layers N] [--budget-gib 24]
    python benchmarks/streamed.py speed --shape tiny --device cpu

Needs no network: models have random weights, tokens are random. Each result is printed as a line of JSON as soon as it
is there, so that one who is interrupted loses nothing; the last line has the medians.

speed    Tokens per second of a 3.09 B-parameter model at several batch sizes, the contenders in turns, one at a time
         (together they do not fit); the machine's limits first. All begin with the same weights and batches, so that
         their first losses tell whether they compute the same.
large    The streamed trainer alone, with a model of up to 6.7 B parameters, as many layers of it as the host has memory
         for: ten steps on a batch that can be learned by heart.

With --hard-limit the GPU gives the streamed trainer no more than its budget.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import traceback
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from long import make_batch
from measuring import Result, log, ratio
from penstock.feed import Batch
from penstock.train.device_batch import DeviceBatch, to_device
from streamed_contenders import CONTENDERS, Contender, Setup
from streamed_limits import limits
from streamed_memory import GIB, available_gib, forget_peaks, free_all, limit, rss_peak_gib, synchronize, unlimit

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "model_type": "qwen2",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1_000,
        "tie_word_embeddings": True,
    },
    "3B": {
        "model_type": "qwen2",
        "hidden_size": 2_048,
        "intermediate_size": 11_008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "vocab_size": 151_936,
        "tie_word_embeddings": True,
    },
    "7B": {
        "model_type": "llama",
        "hidden_size": 4_096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 32_000,
        "tie_word_embeddings": False,
    },
}
LENGTHS = {"tiny": 64, "3B": 2_048, "7B": 2_048}
_HOST_BYTES = 16
"""Of a parameter: master, two moments, the bf16 image, and gradients on their way."""
_HOST_SPARE_GIB = 12
WARM_UP = 3
"""Steps: what is left of a budget is looked at after each of the first."""
_OVERLAPPING = ("compute", "link", "optimizer")


def tell(**result: Any) -> Result:
    """One result, as one line, at once."""
    print(json.dumps(result), flush=True)
    return result


def _device(name: str) -> torch.device:
    device = torch.device(name)
    return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device


def speed(args: argparse.Namespace) -> None:
    shape = args.shape or "3B"
    length = args.length or LENGTHS[shape]
    setup = Setup(config=SHAPES[shape], device=_device(args.device), budget_gib=args.budget_gib)
    if wrong := [tokens for tokens in args.tokens or () if tokens < length or tokens % length]:
        raise SystemExit(
            f"--tokens {wrong[0]}: expected whole sequences of {length} tokens; --length makes them others"
        )
    batches = {
        tokens: make_batch(length, setup.config["vocab_size"], setup.device, sequences=tokens // length)
        for tokens in args.tokens or [length, 4 * length, 16 * length]
    }
    tell(what="limits", **limits(setup.device))
    results: list[Result] = []
    for number in range(1, args.rounds + 1):
        for name in args.only or CONTENDERS:
            results += [tell(round=number, contender=name, **told) for told in _round(name, setup, batches, args)]
    _summarise(results, list(batches), args.only or list(CONTENDERS))


def _round(name: str, setup: Setup, batches: dict[int, DeviceBatch], args: argparse.Namespace) -> Iterator[Result]:
    """Make a contender, measure it with every batch, and be rid of it. A failure is told, not raised."""
    free_all()
    available, began, tokens = available_gib(), time.perf_counter(), 0
    forget_peaks(setup.device)
    contender: Contender | None = None
    try:
        contender = CONTENDERS[name](setup)
        synchronize(setup.device)
        made_s = round(time.perf_counter() - began, 1)
        if args.hard_limit and name == "streamed":
            limit(setup.device, setup.budget_gib)
        first: list[float] = []
        for tokens, batch in batches.items():
            told = _measure(contender, batch, args.seconds, first)
            told |= {"host_used_gib": round(available - available_gib(), 1), "rss_peak_gib": rss_peak_gib()}
            if name == "streamed" and "reserved_gib" in told:
                told["within_budget"] = told["reserved_gib"] <= setup.budget_gib
            yield {"tokens": tokens, "made_s": made_s, "first_losses": first, **told}
    except Exception as error:  # noqa: BLE001 - told, and the other contenders are measured
        log(traceback.format_exc())
        yield {"tokens": tokens, "error": f"{type(error).__name__}: {error}"[:500]}
    finally:
        unlimit(setup.device)
        if contender is not None:
            contender.close()


def _measure(contender: Contender, batch: DeviceBatch, seconds: float, first: list[float]) -> Result:
    """Steps for some seconds, three at least and after those that warm up.

    A step is what passes between the ends of two: what a contender puts off is counted with the next, and the last is
    waited for.
    """
    for _ in range(WARM_UP):
        contender.step(batch)
        if len(first) < 2:
            first.append(round(contender.loss, 5))
    synchronize(contender.device)
    if contender.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(contender.device)
    ends, terms = [time.perf_counter()], list[dict[str, float]]()
    while len(ends) < 4 or ends[-1] - ends[0] < seconds:
        contender.step(batch)
        terms.append(contender.terms())
        ends.append(time.perf_counter())
    synchronize(contender.device)
    ends[-1] = time.perf_counter()
    steps = [after - before for before, after in pairwise(ends)]
    median = statistics.median(steps)
    tokens = batch.input_ids.numel()
    told: Result = {
        "tokens_per_s": round(tokens / median),
        "step_s": round(median, 4),
        "mean_step_s": round(statistics.mean(steps), 4),
        "steps": len(steps),
        "loss": round(contender.loss, 5),
        **contender.peak_gib,
    }
    if terms[-1]:
        middle = {term: statistics.median(each[term] for each in terms) for term in terms[-1]}
        told["terms_s"] = {term: round(value, 4) for term, value in middle.items()}
        told["overlap"] = _overlap([middle[term] for term in _OVERLAPPING if term in middle], median)
    return told


def _overlap(terms: list[float], step: float) -> float | None:
    """How much of what could be hidden behind the longest term was: 1 is all of it, 0 one term after the other.

    Less than 0: the step also spent time on what no term tells of.
    """
    hideable = sum(terms) - max(terms, default=0.0)
    return round(min(1.0, (sum(terms) - step) / hideable), 3) if hideable else None


def _summarise(results: list[Result], tokens: list[int], names: list[str]) -> None:
    medians: dict[str, dict[int, float]] = {}
    for name in names:
        for count in tokens:
            found = [
                told["tokens_per_s"]
                for told in results
                if (told["contender"], told["tokens"]) == (name, count) and "error" not in told
            ]
            if found:
                medians.setdefault(name, {})[count] = float(statistics.median(found))
    ours = medians.get("streamed", {})
    compared = {
        f"streamed_of_{peer}": {count: _rounded(ratio(ours.get(count), rates.get(count))) for count in tokens}
        for peer, rates in medians.items()
        if peer != "streamed" and ours
    }
    tell(what="medians", torch=torch.__version__, tokens_per_s=medians, **compared)


def _rounded(number: float | None) -> float | None:
    return None if number is None else round(number, 2)


def large(args: argparse.Namespace) -> None:
    device = _device(args.device)
    shape = SHAPES[args.shape or "7B"]
    length = args.length or LENGTHS[args.shape or "7B"]
    layers = args.layers or _layers_that_fit(shape)
    config = {**shape, "num_hidden_layers": layers}
    parameters = layers * _layer_parameters(config) + _embedding_parameters(config)
    tell(
        what="large",
        layers=layers,
        parameters=parameters,
        state_gib=round(_HOST_BYTES * parameters / GIB, 1),
        available_gib=round(available_gib(), 1),
    )
    setup = Setup(config=config, device=device, budget_gib=args.budget_gib, learning_rate=args.learning_rate)
    batch = _pattern(length, args.sequences, config["vocab_size"], device)
    began = time.perf_counter()
    contender = CONTENDERS["streamed"](setup)
    try:
        if args.hard_limit:
            limit(device, setup.budget_gib)
        tell(made_s=round(time.perf_counter() - began, 1), making_rss_peak_gib=rss_peak_gib())
        forget_peaks(device)
        losses, steps = list[float](), list[float]()
        for number in range(1, args.steps + 1):
            began = time.perf_counter()
            contender.step(batch)
            steps.append(time.perf_counter() - began)
            losses.append(contender.loss)
            terms = {term: round(value, 4) for term, value in contender.terms().items()}
            tell(step=number, loss=round(contender.loss, 5), step_s=round(steps[-1], 3), terms_s=terms)
        synchronize(device)
        median = statistics.median(steps[2:] or steps)
        tell(
            what="large",
            parameters=parameters,
            loss_fell=losses[-1] < losses[0],
            losses=[round(loss, 4) for loss in losses],
            tokens=batch.input_ids.numel(),
            tokens_per_s=round(batch.input_ids.numel() / median),
            step_s=round(median, 3),
            **contender.peak_gib,
            host_available_gib=round(available_gib(), 1),
            rss_peak_gib=rss_peak_gib(),
        )
    finally:
        unlimit(device)
        contender.close()


def _layer_parameters(config: dict[str, Any]) -> int:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    keys = hidden // heads * config["num_key_value_heads"]
    return 2 * hidden * hidden + 2 * hidden * keys + 3 * hidden * config["intermediate_size"] + 2 * hidden


def _embedding_parameters(config: dict[str, Any]) -> int:
    return config["vocab_size"] * config["hidden_size"] * (1 if config["tie_word_embeddings"] else 2)


def _layers_that_fit(shape: dict[str, Any]) -> int:
    room = (available_gib() - _HOST_SPARE_GIB) * GIB / _HOST_BYTES - _embedding_parameters(shape)
    layers = min(shape["num_hidden_layers"], int(room // _layer_parameters(shape)))
    if layers < 1:
        raise SystemExit(f"{available_gib():.0f} GiB of host memory are available: too few for one layer")
    return layers


def _pattern(length: int, sequences: int, vocab_size: int, device: torch.device) -> DeviceBatch:
    """A few tokens in an order that comes again and again: a batch that can be learned by heart."""
    tokens = np.random.default_rng(0).integers(0, vocab_size, 64)
    ids = np.tile(tokens, sequences * length // len(tokens) + 1)[: sequences * length].reshape(sequences, length)
    labels = np.full_like(ids, -100)
    labels[:, :-1] = ids[:, 1:]
    source = Batch(
        input_ids=ids,
        labels=labels,
        position_ids=np.tile(np.arange(length), (sequences, 1)),
        document_ids=np.zeros_like(ids),
        spans=np.array([[0, 0, length]]),
        sample_ids=np.array([0]),
        start_offset=0,
        stop_offset=sequences,
        samples_done=1,
    )
    return to_device(source, device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["speed", "large"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", choices=list(SHAPES), help="by default 3B for speed, 7B for large")
    parser.add_argument("--length", type=int, help="tokens of a sequence")
    parser.add_argument("--tokens", type=int, nargs="+", help="of a step, as many as it takes")
    parser.add_argument("--only", choices=list(CONTENDERS), nargs="+")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=5.0, help="of steps for each figure")
    parser.add_argument("--budget-gib", type=float, default=24.0)
    parser.add_argument("--hard-limit", action="store_true")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=3e-5)
    args = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    {"speed": speed, "large": large}[args.what](args)


if __name__ == "__main__":
    main()
