"""The miner: learns its pages, sends what that came to, waits for the window's manifest, takes the outer step.

    assigned pages ──► local steps ──► codec (+ memory of what was not sent) ──► kept on disk ──► uploaded
         ▲ the next window's pages meanwhile                                                          │
         └──── weights of the next window ◄── outer step ◄── manifest, aggregate ◄── aggregator ◄─────┘

Killed at any time it goes on: weights come from checkpoint and aggregates; memory and optimizer from its work folder; a
contribution that was made and perhaps not sent is sent as it was made.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import torch

from penstock.errors import ArtifactRejected, ConfigError, ObjectNotFound, PreconditionFailed
from penstock.exchange.artifacts import LONG_HEADER_BYTES, Tensors, largest, pack, unpack
from penstock.exchange.journal import Journal
from penstock.exchange.keys import VERSION, check_name
from penstock.exchange.learning import LocalLearner
from penstock.exchange.manifests import Manifest
from penstock.exchange.members import read_members
from penstock.exchange.opening import OpenedRun
from penstock.exchange.places import needed
from penstock.exchange.standing import why_not_taken
from penstock.exchange.work_folder import hold
from penstock.faults import reach
from penstock.storage import LocalStorage
from penstock.train.devices import device_named
from penstock.train.stopping import StopRequest

_log = logging.getLogger(__name__)
_STATE = "miner.safetensors"
_PENDING = "contribution.safetensors"


@dataclass(slots=True)
class _Made:
    """A contribution as it was made."""

    window: int
    base: str
    data: bytes
    tensors: Tensors


class Miner:
    """One worker of a run. `run` goes on until it is asked to stop."""

    def __init__(
        self,
        opened: OpenedRun,
        uid: str,
        work: Path,
        *,
        stop: StopRequest,
        device: str = "cpu",
        poll_s: float = 1.0,
        until_window: int | None = None,
    ) -> None:
        self._run = opened
        self._uid = check_name(uid, "uid")
        self._work = LocalStorage(work)
        self._stop = stop
        self._device = device_named(device)
        self._poll_s = poll_s
        self._until = until_window
        self._folder = work
        self._journal = Journal(work, f"miner {uid}")
        self._memory = opened.codec.new_memory(self._device)
        self._made: _Made | None = None

    def run(self) -> int:
        """Take part; returns how many windows the weights have learned."""
        with hold(self._folder, f"miner {self._uid}", self._run.settings.run):
            return self._take_part()

    def _take_part(self) -> int:
        opened = self._run
        if self._uid not in read_members(opened.places.aggregator, opened.keys):
            raise ConfigError(
                f"{self._uid!r} is no member of run {opened.settings.run!r}: its owner adds it with "
                f"`penstock exchange admit {opened.settings.run} {self._uid}`"
            )
        needed(opened.places.gradients).put(opened.keys.presence(self._uid), b"")  # refused now, not after hours
        data = opened.data()
        model, vector = opened.model()
        learner = LocalLearner(model, vector, opened.settings, self._device)
        replica = opened.replica()
        try:
            replica.catch_up()
            self._load(learner)
            self._settle(replica, learner)
            self._journal.note("started", window=replica.learned)
            while self._goes_on() and not self._is_done(replica.learned):
                self._window(replica, learner, data)
                replica.catch_up()
            self._journal.note("stopped", window=replica.learned)
            return replica.learned
        finally:
            data.close()

    def _window(self, replica: Any, learner: LocalLearner, data: Any) -> None:
        """Contribute to the window that is open, and take the outer step once it is closed."""
        window, began = replica.learned, time.perf_counter()
        told: dict[str, Any] = {}
        if self._made is None or (self._made.window, self._made.base) != (window, replica.base):
            batches = data.assigned(self._uid, window)
            data.fetch_ahead(self._uid, window + 1)
            fetched = time.perf_counter()
            work = learner.learn(replica.weights, batches.batches, self._goes_on)
            if work is None:
                return
            learned = time.perf_counter()
            self._encode(work.delta, window, replica.base, batches.samples_digest, learner)
            told = {
                "loss": round(work.loss, 6),
                "num_tokens": work.num_tokens,
                "fetch_s": round(fetched - began, 6),
                "learn_s": round(learned - fetched, 6),
                "encode_s": round(time.perf_counter() - learned, 6),
            }
        assert self._made is not None
        closed = self._run.chain.exists(window)
        if not closed:  # else it is late, and nobody would look at it
            self._upload(self._made)
        self._journal.note(
            "contributed" if not closed else "too_late",
            window=window,
            sent_bytes=0 if closed else len(self._made.data),
            dense_bytes=4 * self._run.facts.num_weights,
            **told,
        )
        read_before, waited = replica.read_bytes, time.perf_counter()
        manifest = self._wait(replica)
        if manifest is not None:
            self._take_back(manifest, learner)
            self._journal.note(
                "window",
                window=window,
                contributors=[each.uid for each in manifest.contributions],
                was_taken=self._is_in(manifest),
                **self._why_not(manifest),
                weights=replica.digest,
                read_bytes=replica.read_bytes - read_before,
                wait_s=round(time.perf_counter() - waited, 6),
                window_s=round(time.perf_counter() - began, 6),
            )

    def _encode(self, delta: torch.Tensor, window: int, base: str, samples: str, learner: LocalLearner) -> None:
        tensors = self._run.codec.encode(delta.to(self._device), self._memory)
        header = {
            "kind": "contribution",
            "version": VERSION,
            "run": self._run.settings.run,
            "uid": self._uid,
            "window": window,
            "base": base,
            "samples_digest": samples,
        }
        _, data = pack(header, tensors)
        self._made = _Made(window, base, data, tensors)
        self._work.put(_PENDING, data)
        self._save(learner, self._made)

    def _upload(self, made: _Made) -> None:
        key = self._run.keys.contribution(self._uid, made.window)
        reach("exchange.before_upload", key)
        needed(self._run.places.gradients).put(key, made.data)  # whole or absent; a failure is an error
        reach("exchange.after_upload", key)

    def _wait(self, replica: Any) -> Manifest | None:
        settings = self._run.settings
        again_at = time.monotonic() + settings.window_s + settings.grace_s
        while True:
            manifest = replica.follow()
            if manifest is not None or not self._goes_on():
                return manifest
            if time.monotonic() >= again_at:
                again_at += settings.window_s
                self._send_again(replica.learned)
            self._stop.wait(self._poll_s)

    def _send_again(self, window: int) -> None:
        """A window that is open past its time may be waiting for what was sent and is gone, with its bucket perhaps.
        What is there stays as it is, and a key that only writes can do this."""
        if self._made is not None and self._made.window == window:
            key = self._run.keys.contribution(self._uid, window)
            with suppress(PreconditionFailed):
                needed(self._run.places.gradients).put_if_absent(key, self._made.data)
                _log.warning("%s was gone: it was sent again", key)

    def _settle(self, replica: Any, learner: LocalLearner) -> None:
        """The window of a contribution that was made before this process began may be closed by now."""
        if self._made is not None and self._made.window < replica.learned:
            manifest = self._run.chain.read(self._made.window)
            if manifest is None or manifest.base != self._made.base:
                self._made = None  # too long ago to say, or another chain's
            else:
                self._take_back(manifest, learner)

    def _take_back(self, manifest: Manifest, learner: LocalLearner) -> None:
        """What was not taken over has yet to be learned: it goes back to the memory, and that to the disk."""
        made, self._made = self._made, None
        if made is not None and made.window == manifest.window and not self._is_in(manifest) and self._memory.numel():
            total = self._run.codec.new_total()
            self._run.codec.fold(total, made.tensors)
            self._memory.add_(total.to(self._device))
            self._save(learner, made, is_settled=True)

    def _why_not(self, manifest: Manifest) -> dict[str, str]:
        """Why a window was closed without this miner, where it was."""
        if self._is_in(manifest):
            return {}
        run = self._run
        return {"why": why_not_taken(run.places.aggregator, run.keys, run.settings.validator, self._uid, manifest)}

    def _is_in(self, manifest: Manifest) -> bool:
        return any(each.uid == self._uid for each in manifest.contributions)

    def _goes_on(self) -> bool:
        return not self._stop.requested()

    def _is_done(self, learned: int) -> bool:
        return self._until is not None and learned >= self._until

    def _save(self, learner: LocalLearner, made: _Made, *, is_settled: bool = False) -> None:
        """Memory and optimizer as they are once the contribution is made; durable before it is sent. Settled is what
        went back to the memory since: it does not once more."""
        tensors = {name: each.numpy() for name, each in learner.state().items()}
        tensors["memory"] = self._memory.cpu().numpy()
        header = {
            "kind": "miner",
            "version": VERSION,
            "run": self._run.settings.run,
            "uid": self._uid,
            "window": made.window,
            "base": made.base,
            "is_settled": is_settled,
            "shapes": {name: list(each.shape) for name, each in tensors.items()},
        }
        self._work.put(_STATE, pack(header, tensors)[1])

    def _load(self, learner: LocalLearner) -> None:
        """Go on as the process before this one; a state that cannot be read is told, never passed over."""
        try:
            data = self._work.get(_STATE)
        except ObjectNotFound:
            return
        where = f"{self._work.url}/{_STATE}"
        try:
            length = int.from_bytes(data[:8], "little")
            header = orjson.loads(orjson.loads(data[8 : 8 + length])["__metadata__"]["penstock"])
            shapes = {name: ("F32", tuple(shape)) for name, shape in header["shapes"].items()}
            found = unpack(data, shapes, LONG_HEADER_BYTES)
        except (ArtifactRejected, orjson.JSONDecodeError, LookupError, TypeError, AttributeError) as error:
            raise ConfigError(f"{where} is damaged: {error}: remove it to begin with an empty memory") from error
        mine = {"kind": "miner", "version": VERSION, "run": self._run.settings.run, "uid": self._uid}
        other = [f"{name} is {header.get(name)!r}" for name, value in mine.items() if header.get(name) != value]
        if other or found.tensors["memory"].shape != tuple(self._memory.shape):
            raise ConfigError(f"{where} is another worker's ({', '.join(other)}): give each a work folder of its own")
        self._memory.copy_(torch.from_numpy(found.tensors["memory"].copy()))
        state = {name: torch.from_numpy(each.copy()) for name, each in found.tensors.items() if name != "memory"}
        if state:
            learner.load_state(state)
        if not header.get("is_settled"):
            self._made = self._pending(header["window"], header["base"])

    def _pending(self, window: int, base: str) -> _Made | None:
        """The contribution that was made last, if it is the one that the state belongs to."""
        try:
            data = self._work.get_range(_PENDING, 0, largest(self._run.codec.shapes))
            found = unpack(data, self._run.codec.shapes)
        except ObjectNotFound:
            return None
        except ArtifactRejected as error:
            _log.warning("%s/%s is damaged, so its window is learned again: %s", self._work.url, _PENDING, error)
            return None
        if (found.header.get("window"), found.header.get("base")) != (window, base):
            return None
        return _Made(window, base, data, found.tensors)
