"""Taking part in a run: what ``run.json`` says, as a tokenizer, a model and codecs; and how a run begins."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson
import torch

from penstock.errors import ConfigError, ExchangeError, ObjectNotFound, PreconditionFailed, differences
from penstock.exchange.checkpoints import Checkpoint, Checkpoints, checkpoints_of
from penstock.exchange.codec import AggregateCodec, ContributionCodec, make_codec
from penstock.exchange.data import WindowData
from penstock.exchange.keys import Keys
from penstock.exchange.layout import WeightVector
from penstock.exchange.manifests import ManifestChain, digest_of
from penstock.exchange.members import begin_members
from penstock.exchange.places import Places, needed
from penstock.exchange.replica import Replica
from penstock.exchange.settings import ExchangeSettings, RunFacts
from penstock.feed.loading import find_tokenizer
from penstock.feed.tokenizer import Tokenizer
from penstock.pages import R2DatasetLoader
from penstock.pages.places import open_dataset
from penstock.train.config import MODELS
from penstock.train.models import Learner, build_model


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedRun:
    """All that a role needs of a run."""

    places: Places
    keys: Keys
    facts: RunFacts
    facts_digest: str
    """What window 0 builds on."""
    tokenizer: Tokenizer
    codec: ContributionCodec
    aggregate_codec: AggregateCodec
    chain: ManifestChain
    checkpoints: Checkpoints

    @property
    def settings(self) -> ExchangeSettings:
        return self.facts.settings

    def replica(self) -> Replica:
        return Replica(self.places.aggregator, self.checkpoints, self.chain, self.aggregate_codec)

    def data(self) -> WindowData:
        data = WindowData(self.facts, self.places.dataset(self.settings.dataset_subfolder), self.tokenizer)
        data.check()
        return data

    def model(self) -> tuple[Learner, WeightVector]:
        """A model of the run's kind, with whatever weights, and the way to its weights."""
        model = _built(self.settings, self.facts.model_config, self.facts.vocab_size)
        vector = WeightVector(model.network)
        vector.refuse_other(self.facts.layout, f"run {self.settings.run!r}")
        return model, vector


def open_run(places: Places, run: str) -> OpenedRun:
    """Open a run that somebody has begun."""
    keys = Keys(run)
    try:
        data = places.aggregator.get(keys.settings)
    except ObjectNotFound:
        raise ExchangeError(
            f"{places.aggregator.url} holds no run {run!r}: start its aggregator first, with --config"
        ) from None
    facts = RunFacts.from_bytes(data, keys.settings)
    definition = places.aggregator.get(keys.tokenizer)
    if hashlib.sha256(definition).hexdigest() != facts.tokenizer_sha256:
        raise ExchangeError(f"{keys.tokenizer} is not the tokenizer that the run was begun with")
    chain = ManifestChain(places.aggregator, keys)
    return OpenedRun(
        places=places,
        keys=keys,
        facts=facts,
        facts_digest=digest_of(data),
        tokenizer=Tokenizer(definition.decode(), end_of_text=facts.end_of_text),
        codec=make_codec(facts.settings, facts.num_weights),
        aggregate_codec=AggregateCodec(facts.num_weights, eight_bit=facts.settings.aggregate_codec == "int8"),
        chain=chain,
        checkpoints=Checkpoints(needed(places.checkpoints), keys, facts.layout),
    )


def begin_run(places: Places, settings: ExchangeSettings) -> OpenedRun:
    """Begin a run, or go on with one that has the same settings. Of two that begin it at once, one does."""
    keys = Keys(settings.run)
    numbers = checkpoints_of(needed(places.checkpoints), keys)  # before run.json is looked for, which is written first
    if not places.aggregator.exists(keys.settings):
        if numbers:
            raise ExchangeError(
                f"{keys.settings} is gone from {places.aggregator.url}, and there are checkpoints of the run up to "
                f"window {numbers[-1]}: begun anew, its windows would be closed a second time, with other content; "
                "restore what was there, or name another run"
            )
        _write_run(places, keys, settings)
    opened = open_run(places, settings.run)
    _refuse_changes(settings, opened.settings)
    begin_members(places.aggregator, keys, settings.miners)
    if not opened.checkpoints.numbers():
        weights = _first_weights(opened)
        first = Checkpoint(learned=0, base=opened.facts_digest, weights=weights)
        opened.checkpoints.write(needed(places.checkpoints), first)
    return opened


def read_settings(path: Path) -> ExchangeSettings:
    """Settings from a TOML file."""
    import tomllib

    try:
        told = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: the settings cannot be read: {error}: expected TOML") from error
    settings = ExchangeSettings.from_dict(told, str(path))
    if settings.tokenizer and (path.parent / settings.tokenizer).exists():
        settings = replace(settings, tokenizer=str((path.parent / settings.tokenizer).resolve()))
    return settings


def _write_run(places: Places, keys: Keys, settings: ExchangeSettings) -> None:
    if not settings.tokenizer:
        raise ConfigError("tokenizer is not set: name one, as `penstock train --tokenizer` takes it")
    named = find_tokenizer(settings.tokenizer)
    definition = named.definition.encode()
    tokenizer = Tokenizer(named.definition, end_of_text=named.end_of_text)
    dataset = open_dataset(
        places.dataset(settings.dataset_subfolder),
        subfolder=settings.dataset_subfolder,
        region=R2DatasetLoader.CF_REGION_NAME,
    )
    model_config = _model_config(settings)
    model = _built(settings, model_config, tokenizer.vocab_size)
    facts = RunFacts(
        settings=settings,
        dataset_id=dataset.catalog().dataset_id,
        tokenizer_sha256=hashlib.sha256(definition).hexdigest(),
        end_of_text=tokenizer.end_of_text,
        vocab_size=tokenizer.vocab_size,
        model_config=model_config,
        layout=WeightVector(model.network).layout,
    )
    places.aggregator.put(keys.tokenizer, definition)
    try:
        places.aggregator.put_if_absent(keys.settings, orjson.dumps(facts.as_dict(), option=orjson.OPT_SORT_KEYS))
    except PreconditionFailed:
        return  # another began it: its settings are compared with ours


def _refuse_changes(wanted: ExchangeSettings, begun: ExchangeSettings) -> None:
    got, expected = wanted.as_dict(), begun.as_dict()
    for name in ("miners", "tokenizer"):  # who takes part is told by members.json; the tokenizer is kept
        got.pop(name)
        expected.pop(name)
    different = differences(got, expected)
    if different:
        raise ConfigError(
            f"run {wanted.run!r} was begun with other settings: {'; '.join(different)}: go back to those, or name "
            "another run"
        )


def _model_config(settings: ExchangeSettings) -> str:
    if settings.model in MODELS:
        if settings.model == "counting":
            raise ConfigError("model='counting' has nothing to exchange: expected a language model")
        return ""
    from penstock.train.models.huggingface import find_model

    return find_model(settings.model, fresh_weights=False).config_json


def _built(settings: ExchangeSettings, model_config: str, vocab_size: int) -> Learner:
    return build_model(settings.model, vocab_size=vocab_size, total_samples=0, config_json=model_config)


def _first_weights(opened: OpenedRun) -> Any:
    """The weights a run begins with: a model's own, else random ones. Everybody reads them as a checkpoint."""
    settings = opened.settings
    torch.manual_seed(settings.seed)
    model, vector = opened.model()
    if settings.model not in MODELS:
        from penstock.train.models.huggingface import find_model, load_weights

        found = find_model(settings.model, fresh_weights=False)
        if found.has_weights:
            model.network.load_state_dict(load_weights(found))
    return vector.read()
