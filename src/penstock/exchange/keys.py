"""The key layout: where everything of a run lies, by run, version, worker and window.

    gradients     <run>/v2/<uid>/<window>.safetensors         a miner's contribution; a miner writes below its uid alone
                  <run>/v2/<uid>/presence                     written when it starts: its key may write here
                  <run>/v2/clock                              written to compare the store's clocks
    aggregator    <run>/v2/run.json                           settings, what the data and the model are; written once
                  <run>/v2/tokenizer.json                     the run's tokenizer
                  <run>/v2/members.json                       who may contribute
                  <run>/v2/clock                              written to read the store's clock
                  <run>/v2/windows/<window>.json              the manifest of a window, put only where there is none
                  <run>/v2/aggregates/<window>-<digest>.safetensors
                  <run>/v2/scores/<validator>/<window>.json   a validator's word; it writes below its name alone
                  <run>/v2/scores/<validator>/latest.json
    checkpoints   <run>/v2/<windows learned>.json             names the file below; put only where there is none
                  <run>/v2/<windows learned>-<digest>.safetensors

Windows are numbers of eight digits, so that keys sort as windows do. `v2` is the version of the formats.
"""

from __future__ import annotations

import re

from penstock.errors import ConfigError

VERSION = "v2"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")
_WINDOW = re.compile(r"[0-9]{8,}", re.ASCII)
_DIGEST_DIGITS = 16


def check_name(name: str, what: str) -> str:
    """Refuse a run's or a worker's name that could lead elsewhere in a bucket."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{what} {name!r} is no name: expected 1 to 63 letters, digits, - and _")
    return name


def window_in(name: str) -> int | None:
    """The window that a key's last part tells of; None where somebody else put something there."""
    return int(name) if _WINDOW.fullmatch(name) else None


class Keys:
    """The keys of one run."""

    def __init__(self, run: str) -> None:
        self.run = check_name(run, "run")
        self._top = f"{run}/{VERSION}"

    @property
    def settings(self) -> str:
        return f"{self._top}/run.json"

    @property
    def tokenizer(self) -> str:
        return f"{self._top}/tokenizer.json"

    @property
    def members(self) -> str:
        return f"{self._top}/members.json"

    @property
    def clock(self) -> str:
        return f"{self._top}/clock"

    def contribution(self, uid: str, window: int) -> str:
        return f"{self._top}/{check_name(uid, 'uid')}/{window:08d}.safetensors"

    def presence(self, uid: str) -> str:
        return f"{self._top}/{check_name(uid, 'uid')}/presence"

    def manifest(self, window: int) -> str:
        return f"{self._top}/windows/{window:08d}.json"

    def aggregate(self, window: int, digest: str) -> str:
        return f"{self._top}/aggregates/{window:08d}-{digest[:_DIGEST_DIGITS]}.safetensors"

    def aggregates_of(self, window: int) -> str:
        """What the keys of a window's aggregates begin with: of a crashed aggregator there may be one more."""
        return f"{self._top}/aggregates/{window:08d}-"

    def scores(self, validator: str, window: int | None = None) -> str:
        name = "latest" if window is None else f"{window:08d}"
        return f"{self._top}/scores/{check_name(validator, 'validator')}/{name}.json"

    def checkpoint(self, learned: int) -> str:
        return f"{self._top}/{learned:08d}.json"

    def weights(self, learned: int, digest: str) -> str:
        return f"{self._top}/{learned:08d}-{digest[:_DIGEST_DIGITS]}.safetensors"

    @property
    def checkpoints(self) -> str:
        """What all keys in the checkpoints bucket begin with."""
        return f"{self._top}/"
