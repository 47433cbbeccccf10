"""What a miner or a newcomer finds in the run's own buckets may be damaged, or somebody's who broke in there."""

from __future__ import annotations

import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from exchange.local_run import LocalRun
from penstock.errors import ArtifactRejected, ExchangeError
from penstock.exchange.artifacts import HEADER_BYTES, pack, unpack
from penstock.exchange.opening import open_run
from penstock.exchange.places import needed, open_places

WIDE = {"values": ("I8", (4 << 20,))}


def framed(told: bytes, body: bytes = b"") -> bytes:
    return len(told).to_bytes(8, "little") + told + body


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> LocalRun:
    """Three windows were closed; checkpoints after each."""
    made = LocalRun.begin(
        tmp_path_factory.mktemp("sound"), miners=["a"], seats=1, checkpoint_every=1, keep_checkpoints=8
    )
    thread = made.close(3)
    for window in range(3):
        replica = made.opened.replica()
        while replica.learned < window:
            replica.catch_up()
        made.contribute("a", window, replica.base, seed=window)
    thread.join(60)
    return made


@pytest.fixture
def run(sound: LocalRun, tmp_path: Path) -> LocalRun:
    """A copy of it, to be damaged."""
    shutil.copytree(sound.folder / "buckets", tmp_path / "buckets")
    return LocalRun(tmp_path, open_run(open_places("aggregator", str(tmp_path / "buckets")), "run"))


def rewrite(where: LocalRun, key: str, **changed: Any) -> None:
    """Change fields of a JSON object in the aggregator bucket."""
    storage = where.opened.places.aggregator
    storage.put(key, orjson.dumps({**orjson.loads(storage.get(key)), **changed}))


# Contributions


def test_a_header_that_would_take_many_times_its_size_is_not_read() -> None:
    bomb = b'{"__metadata__":{"penstock":"{}"},"values":[' + b"[]," * (1 << 20) + b"[]]}"
    data = framed(bomb)
    tracemalloc.start()
    try:
        with pytest.raises(ArtifactRejected, match=r"its header has 3,145,[0-9]+ bytes, expected at most 16,384"):
            unpack(data, WIDE)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("length", [0, 1, 7, 8, HEADER_BYTES + 1, (1 << 63) - 1, (1 << 64) - 1])
def test_a_header_s_length_that_cannot_be_is_refused(length: int) -> None:
    with pytest.raises(ArtifactRejected, match="malformed"):
        unpack(length.to_bytes(8, "little") + b"{}", WIDE)


@pytest.mark.parametrize(
    "values",
    [
        {"dtype": "I8", "shape": [-4], "data_offsets": [0, -4]},
        {"dtype": "I8", "shape": [4], "data_offsets": [4, 0]},
        {"dtype": "I8", "shape": [4], "data_offsets": [-4, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "I8", "shape": [2, 2], "data_offsets": [0, 4]},
        {"dtype": "I8", "shape": [1e300], "data_offsets": [0, 4]},
        {"dtype": ["I8"], "shape": {"4": 4}, "data_offsets": [0, 4]},
        {"data_offsets": [0, 4]},
        [0, 4],
        None,
    ],
)
def test_tensors_that_are_told_of_wrongly_are_refused(values: object) -> None:
    told = orjson.dumps({"__metadata__": {"penstock": "{}"}, "values": values})
    with pytest.raises(ArtifactRejected):
        unpack(framed(told, bytes(4)), {"values": ("I8", (4,))})


@pytest.mark.parametrize("depth", [200, 900, 1_000])
@pytest.mark.parametrize(
    "told",
    [
        '{"dtype":"I8","shape":DEEP,"data_offsets":[0,4]}',
        '{"dtype":DEEP,"shape":[4],"data_offsets":[0,4]}',
        '{"dtype":"I8","shape":[4],"data_offsets":[0,DEEP]}',
        '{"dtype":"I8","shape":[4],"data_offsets":DEEP}',
        "DEEP",
    ],
)
def test_json_that_is_nested_deeply_is_refused_as_anything_else_is(told: str, depth: int) -> None:
    deep = told.replace("DEEP", "[" * depth + "]" * depth)
    data = framed(f'{{"__metadata__":{{"penstock":"{{}}"}},"a":{deep},"b":{deep}}}'.encode(), bytes(4))
    with pytest.raises(ArtifactRejected):
        unpack(data, {"a": ("I8", (4,)), "b": ("I8", (4,))})


def test_what_a_stranger_wrote_is_no_command_to_a_terminal() -> None:
    data = pack({}, {"\x1b[2J\x07": np.zeros(4, np.int8)})[1]
    with pytest.raises(ArtifactRejected) as error:
        unpack(data, {"values": ("I8", (4,))})
    assert error.value.told.isprintable()
    told = orjson.dumps(
        {"__metadata__": {"penstock": "{}"}, "values": {"dtype": "\x1b[31m" * 99, "shape": [4], "data_offsets": [0, 4]}}
    )
    with pytest.raises(ArtifactRejected) as error:
        unpack(framed(told, bytes(4)), {"values": ("I8", (4,))})
    assert error.value.told.isprintable()
    assert len(error.value.told) < 200


# Manifests and aggregates


@pytest.mark.parametrize(
    "changed",
    [
        {"aggregate": ["key"]},
        {"aggregate": {"key": 1, "digest": "0", "size_bytes": 1}},
        {"aggregate": {"key": "../../run.json", "digest": "0" * 64, "size_bytes": 1}},
        {"weights": None},
        {"base": 7},
        {"contributions": [{"uid": "a"}]},
        {"contributions": 3},
        {"missing": [["a"]]},
        {"opened_at": "yesterday"},
        {"window": 1},
        {"run": "another"},
        {"version": "v9"},
        {"base": "0" * 64},
        {"weights": "0" * 64},
    ],
)
def test_a_manifest_that_was_altered_stops_a_replica_and_says_why(run: LocalRun, changed: dict[str, Any]) -> None:
    rewrite(run, run.opened.keys.manifest(0), **changed)
    replica = run.opened.replica()
    replica.begin_at(run.opened.checkpoints.read(0))
    with pytest.raises(ExchangeError, match=r"run/v2/windows/00000000\.json|window 0|window 1"):
        replica.follow()


@pytest.mark.parametrize("junk", [b"", b"[" * 100_000, b"null", b"[]", b'"text"', bytes(17 << 20)])
def test_a_manifest_that_is_none_stops_a_replica_and_says_why(run: LocalRun, junk: bytes) -> None:
    run.opened.places.aggregator.put(run.opened.keys.manifest(2), junk)
    replica = run.opened.replica()
    replica.begin_at(run.opened.checkpoints.read(2))
    with pytest.raises(ExchangeError, match=r"00000002\.json is damaged: .*: nobody can go on behind it"):
        replica.follow()


def test_an_aggregate_of_another_shape_is_refused(run: LocalRun) -> None:
    manifest = run.opened.chain.read(0)
    assert manifest is not None
    digest, data = pack({"kind": "aggregate"}, {"change": np.zeros(7, np.float32)})
    key = run.opened.keys.aggregate(0, digest)
    run.opened.places.aggregator.put(key, data)
    rewrite(run, run.opened.keys.manifest(0), aggregate={"key": key, "digest": digest, "size_bytes": len(data)})
    replica = run.opened.replica()
    replica.begin_at(run.opened.checkpoints.read(0))
    before = replica.digest
    with pytest.raises(ExchangeError, match="the aggregate of window 0 cannot be used: shape"):
        replica.follow()
    assert (replica.learned, replica.digest) == (0, before)


# Checkpoints


@pytest.mark.parametrize("what", ["name", "not json", "weights", "short", "gone"])
def test_behind_a_damaged_checkpoint_the_one_before_it_leads_as_far(
    run: LocalRun, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    storage, keys = needed(run.opened.places.checkpoints), run.opened.keys
    told = orjson.loads(storage.get(keys.checkpoint(3)))
    expected = run.opened.checkpoints.read(3).weights
    data = storage.get(told["file"])
    match what:
        case "name":
            storage.put(keys.checkpoint(3), orjson.dumps({**told, "file": keys.weights(2, told["digest"])}))
        case "not json":
            storage.put(keys.checkpoint(3), b"{")
        case "weights":
            storage.put(told["file"], data[:-1] + bytes([data[-1] ^ 1]))
        case "short":
            storage.put(told["file"], data[:-4])
        case _:
            storage.delete(told["file"])
    replica = run.opened.replica()
    replica.catch_up()
    assert replica.learned == 3
    assert replica.weights.equal(expected)
    assert what == "gone" or "trying the one before it" in caplog.text


def test_where_every_checkpoint_is_damaged_that_is_an_error(run: LocalRun) -> None:
    storage = needed(run.opened.places.checkpoints)
    for number in run.opened.checkpoints.numbers():
        storage.put(run.opened.keys.checkpoint(number), b"{}")
    with pytest.raises(ExchangeError, match=r"run/v2/00000003\.json is damaged: .*: the run's owner removes it"):
        run.opened.replica().catch_up()


@pytest.mark.parametrize(
    "junk", [b"", b"[]", b"{}", b"null", b'{"version": "v2"}', b'{"version": "v2", "settings": 3}']
)
def test_a_run_whose_settings_are_damaged_is_not_opened(run: LocalRun, junk: bytes) -> None:
    run.opened.places.aggregator.put(run.opened.keys.settings, junk)
    with pytest.raises(Exception, match=r"run/v2/run\.json") as error:
        open_run(run.opened.places, "run")
    assert type(error.value).__module__ == "penstock.errors"
