"""`penstock exchange status`, `picture` and `admit`: what they say, and that they start without torch."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import xml.etree.ElementTree as Xml
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from exchange.local_run import LocalRun
from penstock.cli.main import app
from penstock.errors import ConfigError, PenstockError
from penstock.exchange.opening import open_run
from penstock.exchange.places import needed, open_places
from penstock.exchange.retention import Retention
from penstock.exchange.settings import ExchangeSettings
from penstock.exchange.status import read_status

Says = Callable[..., str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> LocalRun:
    """Three windows: one with all, one with a rejection, one with somebody missing."""
    run = LocalRun.begin(tmp_path_factory.mktemp("status"), miners=["a", "b", "c"], seats=3, window_s=3600.0)
    replica = run.opened.replica()
    replica.catch_up()
    for window, scales in enumerate([(1.0, 1.0, 1.0), (1.0, 1.0, 1000.0)]):
        for uid, scale in zip("abc", scales, strict=True):
            run.contribute(uid, window, replica.base, seed=ord(uid), scale=scale)
        run.close(window + 1).join(60)
        replica.catch_up()
    last = run.opened.chain.read(1)
    assert last is not None
    missing = replace(last, window=2, base=last.digest, rejected=(), missing=("c",))
    run.opened.chain.publish(run.opened.places.aggregator, missing)
    return run


@pytest.fixture
def says(run: LocalRun, capsys: pytest.CaptureFixture[str]) -> Says:
    def say(*args: str) -> str:
        app(["exchange", *args, "--buckets", str(run.folder / "buckets")], standalone_mode=False)
        return capsys.readouterr().out

    return say


def test_status_tells_windows_contributors_rejections_and_bytes(run: LocalRun, says: Says) -> None:
    told: dict[str, Any] = json.loads(says("status", "run", "--json"))
    assert told["windows_closed"] == 3
    assert [window["contributors"] for window in told["windows"]] == [["a", "b", "c"], ["a", "b"], ["a", "b"]]
    assert [window["missing"] for window in told["windows"]] == [[], [], ["c"]]
    (rejected,) = told["windows"][1]["rejected"]
    assert (rejected["uid"], rejected["window"], rejected["reason"]) == ("c", 1, "norm")
    assert rejected["told"].startswith("its norm is")
    assert told["rejections"] == {"norm": 1}
    assert told["bytes"]["dense"] == 7 * 4 * run.opened.facts.num_weights
    assert told["bytes"]["contributions"] == sum(window["bytes"] for window in told["windows"])
    assert told["bytes"]["ratio"] > 10
    assert [member["standing"] for member in told["members"]] == ["peer"] * 3
    assert told["members"][2] | {"score": None} == {
        "uid": "c",
        "standing": "peer",
        "score": None,
        "flags": [],
        "contributions": 1,
        "missing": 1,
        "rejected": {"norm": 1},
    }


def test_status_for_people(says: Says) -> None:
    told = says("status", "run")
    assert "windows closed" in told
    assert "c (1) norm" in told


def test_status_of_some_windows_alone(says: Says) -> None:
    assert [window["window"] for window in json.loads(says("status", "run", "--last", "2", "--json"))["windows"]] == [
        1,
        2,
    ]


def test_the_picture_has_a_cell_a_miner_and_window(says: Says, tmp_path: Path) -> None:
    target = tmp_path / "contributions.svg"
    assert str(target) in says("picture", "run", "--to", str(target))
    titles = [each.text or "" for each in Xml.parse(target).iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == 9
    assert any(title.startswith("window 1, c: norm") for title in titles)
    assert "window 2, c: missing" in titles


@pytest.fixture
def damaged(run: LocalRun, tmp_path: Path) -> LocalRun:
    """A copy of it, to be damaged."""
    shutil.copytree(run.folder / "buckets", tmp_path / "buckets")
    return LocalRun(tmp_path, open_run(open_places("aggregator", str(tmp_path / "buckets")), "run"))


def refusal_of(run: LocalRun, *args: str) -> str:
    with pytest.raises(PenstockError) as error:
        app(["exchange", *args, "--buckets", str(run.folder / "buckets")], standalone_mode=False)
    return str(error.value)


@pytest.mark.parametrize("junk", [b"", b"[]", b"{}", b"null", b'{"version": "v2"}'])
def test_status_of_a_run_whose_settings_are_damaged_says_so(damaged: LocalRun, junk: bytes) -> None:
    damaged.opened.places.aggregator.put(damaged.opened.keys.settings, junk)
    assert "run/v2/run.json" in refusal_of(damaged, "status", "run")


@pytest.mark.parametrize(
    "changed",
    [
        {"aggregate": {"key": "k", "digest": "d"}},
        {"aggregate": {"key": "k", "digest": "d", "size_bytes": "7"}},
        {"rejected": [{"uid": "a", "window": 0, "reason": ["norm"], "told": "none"}]},
        {"rejected": [{"uid": "a", "window": 0, "reason": "norm", "told": 3}]},
    ],
)
def test_status_and_picture_of_a_damaged_window_say_so(damaged: LocalRun, changed: dict[str, Any]) -> None:
    storage, key = damaged.opened.places.aggregator, damaged.opened.keys.manifest(1)
    storage.put(key, json.dumps({**json.loads(storage.get(key)), **changed}).encode())
    for args in (["status", "run", "--json"], ["picture", "run", "--to", str(damaged.folder / "drawn.svg")]):
        assert "windows/00000001.json is damaged" in refusal_of(damaged, *args)


@pytest.mark.parametrize("junk", [{"members": ["a", "b", "a"]}, {"members": "abc"}, {"members": ["../a"]}, []])
def test_members_that_are_none_or_named_twice_are_refused(damaged: LocalRun, junk: object) -> None:
    damaged.opened.places.aggregator.put(damaged.opened.keys.members, json.dumps(junk).encode())
    assert "run/v2/members.json is damaged" in refusal_of(damaged, "status", "run")


def test_what_else_lies_in_the_buckets_stops_nobody(damaged: LocalRun) -> None:
    for name in ("windows/notes.txt", "windows/00000009.json.old", "windows/x.json", "aggregates/notes"):
        damaged.opened.places.aggregator.put(f"run/v2/{name}", b"somebody's")
    needed(damaged.opened.places.checkpoints).put("run/v2/notes.json", b"{}")
    Retention(damaged.opened).after_checkpoint()
    assert damaged.opened.checkpoints.numbers() == [0]
    assert read_status(damaged.opened.places, "run").closed == 3
    assert damaged.opened.places.aggregator.exists("run/v2/aggregates/notes")


def test_status_starts_without_torch(run: LocalRun) -> None:
    code = f"""
import contextlib, io, sys
from penstock.cli.main import app
with contextlib.redirect_stdout(io.StringIO()):
    app(["exchange", "status", "run", "--buckets", {str(run.folder / "buckets")!r}], standalone_mode=False)
print("\\n".join(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert not set(done.stdout.splitlines()) & {"torch", "safetensors", "obstore", "tokenizers", "numpy"}


def test_members_are_admitted_by_command(run: LocalRun, says: Says) -> None:
    assert "4 members: a, b, c, newcomer" in says("admit", "run", "newcomer")
    assert "3 members: a, b, c" in says("admit", "run", "newcomer", "--remove")


def test_admitting_a_member_again_or_removing_none_is_told(run: LocalRun, says: Says) -> None:
    assert says("admit", "run", "a", "b") == "run: a, b were members already: 3 members: a, b, c\n"
    assert says("admit", "run", "zed", "--remove") == "run: zed was no member: 3 members: a, b, c\n"
    assert says("admit", "run", "a", "newcomer") == "run: a was a member already: 4 members: a, b, c, newcomer\n"
    told = says("admit", "run", "newcomer", "zed", "yves", "--remove")
    assert told == "run: zed, yves were no members: 3 members: a, b, c\n"


def test_a_role_that_is_asked_to_stop_says_what_the_exchange_does(tmp_path: Path) -> None:
    run = LocalRun.begin(tmp_path, miners=["a"], window_s=3600.0)
    command = [sys.executable, "-m", "penstock", "exchange", "aggregator", "run", "--threads", "1"]
    command += ["--work", str(tmp_path / "work"), "--buckets", str(run.folder / "buckets")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "started" in line:
                break
        process.send_signal(signal.SIGINT)
        told = process.communicate(timeout=60)[1]
    assert process.returncode == 0
    assert "stopping: nothing that was sent is lost, and the same command goes on; once more ends at once" in told
    assert "commit" not in told


def test_a_miner_that_is_no_member_is_told_so(run: LocalRun, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "penstock", "exchange", "miner", "run", "--uid", "stranger", "--threads", "1"]
    command += ["--work", str(tmp_path), "--buckets", str(run.folder / "buckets")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "'stranger' is no member of run 'run'" in done.stderr


@pytest.mark.parametrize(
    "role", [("miner", "--uid", "a", "--work", "work"), ("validator",)], ids=["miner", "validator"]
)
@pytest.mark.parametrize(
    ("device", "told"),
    [
        ("foo", "device='foo' is unknown: expected auto, cpu, cuda or cuda:0"),
        ("cuda", "device='cuda' names a CUDA device that is not there: torch finds no CUDA device here"),
        ("cuda:1", "device='cuda:1' names a CUDA device that is not there: torch finds no CUDA device here"),
    ],
)
def test_a_device_that_is_not_there_is_refused_in_a_sentence(
    run: LocalRun, monkeypatch: pytest.MonkeyPatch, role: tuple[str, ...], device: str, told: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert told in refusal_of(run, role[0], "run", *role[1:], "--device", device)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"top_k": 7}, "top_k=7 of chunk_side=64"),
        ({"top_k": 8192}, "expected a side from 2 to 256, and a multiple of 8 up to 4096"),
        ({"codec": "gzip"}, "codec='gzip' is unknown: expected dct or topk or dense"),
        ({"seats": 0}, "seats=0 cannot be"),
        ({"window_s": float("nan")}, "window_s=nan cannot be"),
        ({"miners": ["a", "a"]}, "names somebody twice"),
        ({"miners": ["../a"]}, "is no name"),
        ({"miners": "abc"}, "miners='abc' is one text"),
        ({"grace_s": float("nan")}, "grace_s=nan cannot be"),
        ({"grace_s": float("inf")}, "grace_s=inf cannot be"),
        ({"weight_decay": float("nan")}, "weight_decay=nan cannot be"),
        ({"seed": "first"}, "seed='first' cannot be"),
        ({"momentum": 1.5}, "momentum=1.5"),
        ({"unknown": 1}, "unknown settings unknown"),
        ({"seats": "4"}, "seats='4' cannot be"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(wrong: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError) as error:
        ExchangeSettings.from_dict({"run": "run", **wrong}, "run.toml")
    assert told in str(error.value)
