"""`penstock tokenize` and `penstock bench feed`."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from penstock.cli.output import TOKENIZER_HELP, console, print_facts, print_json

bench = typer.Typer(help="Measure on your own data and machine.", no_args_is_help=True)


def tokenize(
    dataset: Annotated[str, typer.Argument(help="A block store, a file, a folder, a glob, hf://... or s3://...")],
    tokenizer: Annotated[str, typer.Option(help=TOKENIZER_HELP)],
    folder: Annotated[str | None, typer.Option(help="Where the cache goes; else beside the data set.")] = None,
    learn: Annotated[str, typer.Option(help="all, or assistant: chats, of which only its turns are learned.")] = "all",
    chat_template: Annotated[str | None, typer.Option(help="chatml, llama3, plain or a Jinja template.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Tokenise a data set ahead of training, into its token cache; goes on where it was interrupted."""
    from rich.progress import Progress

    from penstock.blocks import BlockManager, prepare_blocks
    from penstock.cli.data import ingest_bar
    from penstock.errors import ConfigError
    from penstock.feed import TokenCache
    from penstock.feed.chat import ChatFormat
    from penstock.feed.loading import load_tokenizer

    with ingest_bar(quiet=as_json) as on_progress:
        blocks = BlockManager(prepare_blocks(dataset, on_progress=on_progress))
    made = load_tokenizer(tokenizer, blocks)
    if learn not in ("all", "assistant"):
        raise ConfigError(f"--learn {learn} is unknown: expected all or assistant")
    chat = ChatFormat(made, chat_template) if learn == "assistant" else None
    cache = TokenCache(blocks, made, chat=chat, folder=folder)
    screen = console(stderr=True)
    began = time.monotonic()
    with Progress(console=screen, transient=True, disable=as_json or not screen.is_terminal) as bar:
        task = bar.add_task("tokenising", total=cache.chunk_count)
        cache.build(lambda done, total: bar.update(task, completed=done, total=total))
    tokens = int(cache.token_counts().sum())
    told: dict[str, object] = {
        "folder": str(cache.folder),
        "tokenizer": made.fingerprint,
        "engine": made.engine,
        "samples": blocks.manifest.total_samples,
        "tokens": tokens,
        "seconds": round(time.monotonic() - began, 3),
    }
    if as_json:
        print_json(told)
    else:
        print_facts(f"tokens of {dataset}", told)


@bench.command()
def feed(
    dataset: Annotated[str, typer.Argument(help="A block store, a file, a folder, a glob, hf://... or s3://...")],
    tokenizer: Annotated[str | None, typer.Option(help=f"{TOKENIZER_HELP} Without, texts are fed.")] = None,
    batch_size: Annotated[int, typer.Option(help="Sequences, or texts, a batch.")] = 8,
    sequence_length: Annotated[int, typer.Option(help="Tokens a sequence.")] = 2048,
    order: Annotated[str, typer.Option(help="sequential, shuffled, shard-local or numpy.")] = "shard-local",
    batches: Annotated[int | None, typer.Option(help="Stop after so many batches; else after an epoch.")] = None,
    packing: Annotated[str, typer.Option(help="concatenate, best-fit, pad or ragged.")] = "concatenate",
    learn: Annotated[str, typer.Option(help="all, or assistant: chats, of which only its turns are learned.")] = "all",
    chat_template: Annotated[str | None, typer.Option(help="chatml, llama3, plain or a Jinja template.")] = None,
    all_fields: Annotated[bool, typer.Option("--all-fields", help="Labels, positions and documents too.")] = False,
    seed: Annotated[int, typer.Option(help="Of the order.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Feed a data set as a training would, and say how fast: loading included."""
    from penstock.blocks import BlockManager, prepare_blocks
    from penstock.cli.data import ingest_bar
    from penstock.feed import DistributedLoader
    from penstock.feed.loading import load_tokenizer
    from penstock.feed.rows import FIELDS

    with ingest_bar(quiet=as_json) as on_progress:
        blocks = BlockManager(prepare_blocks(dataset, on_progress=on_progress))
    more: dict[str, Any] = {}
    if tokenizer is not None:
        made = load_tokenizer(tokenizer, blocks)
        more = {"tokenizer": made, "sequence_length": sequence_length, "packing": packing}
        more |= {"learn": learn, "chat_template": chat_template}
        more["fields"] = FIELDS[:4] if all_fields else ("input_ids",)
    loader = DistributedLoader(blocks, batch_size, seed, order=order, **more)  # pyright: ignore[reportArgumentType]
    told = _measure(loader, batches)
    if as_json:
        print_json(told)
    else:
        facts: dict[str, object] = {name: f"{value:,.6g}" for name, value in told.items()}
        print_facts(f"feeding {dataset}", facts)


def _measure(loader: Any, batches: int | None) -> dict[str, float]:
    import resource

    import numpy as np

    began = time.perf_counter()
    first_s = 0.0
    times, tokens, samples, characters = [], 0, 0, 0
    last = began
    for batch in loader:
        now = time.perf_counter()
        first_s = first_s or now - began
        times.append(now - last)
        last = now
        samples += len(batch["sample_ids"])
        tokens += batch["input_ids"].size if "input_ids" in batch else 0
        characters += sum(map(len, batch.get("text", ())))
        if batches is not None and len(times) >= batches:
            break
    elapsed = time.perf_counter() - began
    spread = np.array(times) if times else np.zeros(1)
    return {
        "batches": len(times),
        "samples_per_s": samples / elapsed,
        **({"tokens_per_s": tokens / elapsed} if tokens else {"characters_per_s": characters / elapsed}),
        "first_batch_s": first_s,
        "total_s": elapsed,
        "batch_p50_s": float(np.percentile(spread, 50)),
        "batch_p99_s": float(np.percentile(spread, 99)),
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        **{name: value for name, value in loader.timings().items() if name != "batches"},
    }
