"""What a run begins with: settings settled for good, tokenizer and model found, all of it kept in the run's folder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch

from penstock.blocks import BlockManager, Manifest
from penstock.errors import ConfigError, ObjectNotFound
from penstock.feed import choose_engine, train_tokenizer
from penstock.feed.loading import find_tokenizer, first_texts, make_tokenizer
from penstock.feed.tokenizer_files import NamedTokenizer
from penstock.ledger import has_ledger, open_ledger, without_secrets
from penstock.storage import Storage
from penstock.train.checkpoints import Checkpoints
from penstock.train.chunk_size import choose_chunk_size
from penstock.train.config import MODELS, RunConfig, TrainingConfig, resolve
from penstock.train.devices import choose_precision
from penstock.train.models import build_model
from penstock.train.parts import MODEL_KEY, TOKENIZER_KEY
from penstock.train.trainer import State, computing

_TOKENIZER_SAMPLE_CHARS = 8_000_000
"""How much text a tokenizer is trained on: enough for a small vocabulary, in seconds."""


def settle_config(
    config: TrainingConfig, manifest: Manifest, storage: Storage, ledger: str, devices: list[torch.device]
) -> None:
    """Write the run's config.toml, or check that the run being resumed has the same one where it matters."""
    before = RunConfig.load(storage) if _has_begun(storage, ledger) else None
    config = _settled(config, before.training if before else None, manifest, devices)
    model = _find_model(config) if before is None else ""
    assert config.dataset_chunk_size != "auto"
    blocks = BlockManager(config.dataset_file, config.samples_per_block, config.dataset_chunk_size)
    named = _find_tokenizer(config, blocks, storage, before)
    try:
        engine = before.tokenizer_engine if before else choose_engine(named.definition, first_texts(blocks))
    except ConfigError as error:
        raise ConfigError(f"{named.origin}: {error}") from error
    tokenizer = make_tokenizer(named, engine)
    if config.use_chunked_training and config.chunk_size == "auto":
        config = replace(config, chunk_size=_try_chunk_sizes(config, model, tokenizer.vocab_size, devices))
    resolved = resolve(
        config,
        identity=blocks.identity(),
        name=manifest.header.dataset_name,
        total_samples=manifest.total_samples,
        tokenizer=tokenizer,
    )
    if before is not None:
        _refuse_other_data(resolved, before, storage.url)
        resolved.refuse_changes(before, storage.url)
    elif model:
        _check_fit(config, model, tokenizer.vocab_size)
        storage.put(MODEL_KEY, model.encode())
    storage.put(TOKENIZER_KEY, named.definition.encode())
    resolved.save(storage)


def _refuse_other_data(resolved: RunConfig, before: RunConfig, where: str) -> None:
    """A run stays with its data: say whether it is the same source that has changed, or another one."""
    got, expected = resolved.dataset["dataset_id"], before.dataset["dataset_id"]
    if got == expected:
        return
    now, then = resolved.training, before.training
    named, begun_with = (config.dataset_source or config.dataset_file for config in (now, then))
    ids = f"its dataset_id is {got[:19]}..., expected {expected[:19]}..."
    if named != begun_with:
        raise ConfigError(
            f"{named} is not what {where} was begun with, which is {begun_with} ({ids}): leave --dataset-file away to "
            "go on with that, or name another run folder"
        )
    kept = now.dataset_file != then.dataset_file and Path(then.dataset_file).exists()
    go_on = (
        f"leave --dataset-file away to go on with it as it was (its blocks are in {then.dataset_file})"
        if kept
        else "put it back as it was to go on"
    )
    raise ConfigError(
        f"{named} has changed since {where} was begun ({ids}): {go_on}, or name another run folder to begin anew with "
        "it as it is now"
    )


def first_weights(config: TrainingConfig) -> State | None:
    """The weights a run begins with where its model came with some; None where they are random."""
    if config.model in MODELS:
        return None
    from penstock.train.models.huggingface import find_model, load_weights

    found = find_model(config.model, fresh_weights=config.fresh_weights)
    return load_weights(found) if found.has_weights else None


def own_tokenizer(model: str) -> str:
    """Where the tokenizer of a model is: with it, on the Hub or in its folder; empty where it has none."""
    if model in MODELS:
        return ""
    path = Path(model).expanduser()
    if path.is_dir():
        return str(path) if (path / "tokenizer.json").exists() else ""
    return "" if path.exists() or path.suffix == ".json" else model


def _settled(
    config: TrainingConfig, before: TrainingConfig | None, manifest: Manifest, devices: list[torch.device]
) -> TrainingConfig:
    """What was left open gets its value: that of the run being resumed, else one found out now, and kept."""
    given = before or config
    tokenizer = config.tokenizer or (before.tokenizer if before else own_tokenizer(config.model))
    chunk_size = config.dataset_chunk_size
    if chunk_size == "auto":
        chunk_size = given.dataset_chunk_size
    if chunk_size == "auto":
        chunk_size = choose_chunk_size(manifest, len(devices))
    precision = config.precision if config.precision != "auto" else given.precision
    sequence_chunk = config.chunk_size if config.chunk_size != "auto" else given.chunk_size
    schedule_steps = config.schedule_steps or (before.schedule_steps if before else None)
    if schedule_steps is None and config.lr_schedule != "constant":
        schedule_steps = config.steps
    plan = config.plan or (before.plan if before else "") or ("strided" if config.ddp else "claims")
    if plan == "strided" and config.parallel_independent:
        raise ConfigError("this run follows the strided plan, which has no independent workers: go on with --ddp")
    return replace(
        config,
        plan=plan,
        tokenizer=tokenizer,
        dataset_chunk_size=chunk_size,
        chunk_size=sequence_chunk,
        precision=choose_precision(precision, devices[0]),
        schedule_steps=schedule_steps,
    )


def _find_model(config: TrainingConfig) -> str:
    """The config of a model of `transformers`, as JSON; empty for a built-in one."""
    if config.model in MODELS:
        return ""
    from penstock.train.models.huggingface import find_model

    return find_model(config.model, fresh_weights=config.fresh_weights).config_json


def _check_fit(config: TrainingConfig, config_json: str, vocab_size: int) -> None:
    """Refuse a tokenizer or sequences that the model has no embeddings for."""
    from penstock.train.models.huggingface import largest_position, vocabulary

    known, longest = vocabulary(config_json), largest_position(config_json)
    if vocab_size > known and not config.resize_embeddings:
        raise ConfigError(
            f"model={config.model!r} has embeddings for {known} tokens, the tokenizer has {vocab_size}: name the "
            "model's own tokenizer (--tokenizer), a smaller --vocab-size, or add to them with --resize-embeddings"
        )
    if longest is not None and config.max_seq_len > longest:
        raise ConfigError(
            f"max_seq_len={config.max_seq_len} is more than model={config.model!r} has positions for: "
            f"expected {longest} or less"
        )


def _try_chunk_sizes(config: TrainingConfig, config_json: str, vocab_size: int, devices: list[torch.device]) -> int:
    """Tokens a chunk of a sequence, found out by learning some on the device."""
    from penstock.train.chunk_size import free_bytes
    from penstock.train.long.choosing import Trial, choose_chunk_size
    from penstock.train.long.learning import ChunkSettings

    device = devices[0]
    ranks = len(devices) if config.ddp else 1
    model = build_model(
        config.model,
        vocab_size=vocab_size,
        total_samples=0,
        config_json=config_json,
        across_documents=config.attend_across_documents,
        halt_max_steps=config.halt_max_steps,
    )
    precision = "bf16" if config.precision == "bf16" else "fp32"
    trial = Trial(
        model=model.to(device),
        length=config.max_seq_len,
        sequences=-(-config.batch_size // (ranks * config.gradient_accumulation_steps)),
        vocab_size=vocab_size,
        computing=lambda: computing(device, precision),
        settings=ChunkSettings(bptt_chunks=config.bptt_chunks, cpu_offload=config.cpu_offload),
    )
    return choose_chunk_size(trial, device, free_bytes())


def _has_begun(storage: Storage, ledger: str) -> bool:
    """Whether a run has committed here; refused where what is left of one is too little to go on from."""
    commits = open_ledger(ledger).commits() if has_ledger(ledger) else []
    if commits and RunConfig.load(storage) is None:
        raise ConfigError(
            f"{storage.url} has a ledger ({without_secrets(ledger)}) and no config.toml: "
            "restore it, or name another run folder"
        )
    trained = [checkpoint_id for checkpoint_id in Checkpoints(storage).ids() if int(checkpoint_id) > 0]
    if trained and not commits:
        raise ConfigError(
            f"{storage.url} has checkpoints ({', '.join(trained)}) and no ledger that knows them: "
            f"restore {without_secrets(ledger)}, or name another run folder; nothing was changed"
        )
    return bool(commits)


def _find_tokenizer(
    config: TrainingConfig, blocks: BlockManager, storage: Storage, before: RunConfig | None
) -> NamedTokenizer:
    """The tokenizer the user names, else the one the run has, else one trained on the data.

    A tokenizer is looked up once, when the run begins: a file that moved since, or a Hub that cannot be reached, is
    nothing to a run that has its copy.
    """
    origin = f"{storage.url}/{TOKENIZER_KEY}"
    as_before = before is not None and config.tokenizer == before.training.tokenizer and storage.exists(TOKENIZER_KEY)
    try:
        if config.tokenizer and not as_before:
            return find_tokenizer(config.tokenizer)
        if before is not None:
            definition = storage.get(TOKENIZER_KEY).decode()
            return NamedTokenizer(definition=definition, end_of_text=before.end_of_text or None, origin=origin)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{storage.url}/{TOKENIZER_KEY} is not UTF-8: expected a tokenizer.json") from error
    except ObjectNotFound as error:
        raise ConfigError(
            f"{storage.url} has lost its {TOKENIZER_KEY}: restore it, or name it with --tokenizer"
        ) from error
    trained = train_tokenizer(_some_texts(blocks), vocab_size=config.vocab_size)
    return NamedTokenizer(definition=trained.definition, end_of_text=trained.end_of_text, origin=origin)


def _some_texts(blocks: BlockManager) -> Iterator[str]:
    """Text from chunks spread over the whole data set, up to a fixed amount; the same for the same data set."""
    chunks = [
        (block.block_id, chunk_id)
        for block in (blocks.get_block(block_id) for block_id in range(len(blocks.manifest.blocks)))
        for chunk_id in range(block.chunk_count(blocks.dataset_chunk_size))
    ]
    left = _TOKENIZER_SAMPLE_CHARS
    stride = max(1, len(chunks) // 64)
    for block_id, chunk_id in islice(chunks, 0, None, stride):
        for text in blocks.get_chunk(block_id, chunk_id):
            yield text[:left]
            left -= len(text)
            if left <= 0:
                return
