"""Streamed models in whole runs: begun, resumed, shared by ranks, stopped, killed, refused."""

from __future__ import annotations

import functools
import os
import signal
import threading
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from torch import Tensor

from equipment.hooks import Recorder
from equipment.ranks import exit_codes, meeting_place, ranks_of, wait_for_steps
from equipment.training import start_training
from penstock.errors import ConfigError, TrainError
from penstock.observe.proof import prove
from penstock.observe.run_folder import RunFolder
from penstock.storage import LocalStorage
from penstock.train.checkpoints import Checkpoints
from penstock.train.config import TrainingConfig
from penstock.train.events import Planned
from penstock.train.exporting import export_run
from penstock.train.run import run_training
from penstock.train.stopping import StopRequest
from penstock.train.streamed import planning

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("model")
    transformers.Qwen2Config(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=320,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    ).save_pretrained(folder)
    return str(folder)


def config_of(store: Path, run_dir: Path, model: str, **changes: Any) -> TrainingConfig:
    settings: dict[str, Any] = {
        "dataset_file": str(store),
        "run_dir": str(run_dir),
        "model": model,
        "vocab_size": 300,
        "batch_size": 3,
        "max_seq_len": 16,
        "dataset_chunk_size": 5,
        "plan": "strided",
        "steps": 8,
        "device": "cpu",
        "streamed": True,
    }
    return TrainingConfig(**{**settings, **changes})


def state_of(run_dir: Path) -> dict[str, Tensor]:
    last = RunFolder(run_dir).ledger.last_commit()
    assert last is not None
    return Checkpoints(LocalStorage(run_dir)).read(last.checkpoint_id, last.digest)


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def furthest(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    weights = [name for name in one if name.startswith("model.")]
    return max(float((one[name] - other[name]).abs().max()) for name in weights)


def streaming_threads() -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if "optimizer" in name or "loader" in name or "visit" in name]


def left_behind(before: set[Path]) -> list[Path]:
    """What came into /dev/shm and nobody who lives has open: other programs of this machine may use it too.

    Semaphores are theirs: streaming has none.
    """
    new, used = {path for path in Path("/dev/shm").iterdir() if not path.name.startswith("sem.")} - before, ""
    for process in Path("/proc").glob("[0-9]*") if new else ():
        try:
            used += (process / "maps").read_text(errors="replace")
            used += " ".join(str(file.readlink()) for file in (process / "fd").iterdir())
        except OSError:
            continue  # ended meanwhile
    return [path for path in new if path.exists() and str(path) not in used]


@pytest.fixture(scope="module")
def whole(store: Path, model: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], dict[str, Tensor]]:
    """The losses and the end of a run of one process that was never interrupted."""
    folder, recorder = tmp_path_factory.mktemp("whole"), Recorder()
    run_training(config_of(store, folder, model), [recorder])
    return [event["loss"] for event in recorder.of("step")], state_of(folder)


@pytest.mark.parametrize("file_bytes", [1 << 30, 9_000])
def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(
    store: Path, model: str, tmp_path: Path, whole: Any, monkeypatch: pytest.MonkeyPatch, file_bytes: int
) -> None:
    """Also where its checkpoints are of many files."""
    monkeypatch.setattr("penstock.train.parts.Checkpoints", functools.partial(Checkpoints, file_bytes=file_bytes))
    for steps in (3, 5, 8):
        run_training(config_of(store, tmp_path, model, steps=steps))
    assert same_bits(state_of(tmp_path), whole[1])
    files = len(list(tmp_path.glob("checkpoints/00000008/*.safetensors")))
    assert files == 2 if file_bytes > 9_000 else files > 10


def test_a_run_goes_on_streamed_and_not_streamed_in_turn(store: Path, model: str, tmp_path: Path, whole: Any) -> None:
    for steps, streamed in ((2, False), (5, True), (8, False)):
        run_training(config_of(store, tmp_path, model, steps=steps, streamed=streamed))
    found = state_of(tmp_path)
    assert found.keys() == whole[1].keys()
    assert furthest(found, whole[1]) < 1e-5


def test_ranks_share_the_weights_and_learn_as_one_does_also_after_a_resume(
    store: Path, model: str, tmp_path: Path, whole: Any
) -> None:
    for steps in (4, 8):
        with ranks_of(config_of(store, tmp_path, model, steps=steps), 2) as processes:
            assert exit_codes(processes) == [0, 0]
    losses = [event["loss"] for event in RunFolder(tmp_path).events() if event["event"] == "step"]
    assert losses == pytest.approx(whole[0], rel=1e-5)
    assert furthest(state_of(tmp_path), whole[1]) < 1e-5


def test_machines_hold_a_copy_each_and_learn_as_one_does(store: Path, model: str, tmp_path: Path, whole: Any) -> None:
    """Two ranks that are told to be alone on their machine share no memory."""
    config = config_of(store, tmp_path, model, steps=3)
    with meeting_place(2) as environments:
        processes = [start_training(config, {**each, "LOCAL_WORLD_SIZE": "1"}) for each in environments]
        codes = exit_codes(processes)
        for process in processes:
            process.kill()
    assert codes == [0, 0]
    losses = [event["loss"] for event in RunFolder(tmp_path).events() if event["event"] == "step"]
    assert losses == pytest.approx(whole[0][:3], rel=1e-5)


def test_ranks_end_soon_after_one_was_killed_and_leave_nothing_behind(store: Path, model: str, tmp_path: Path) -> None:
    before = set(Path("/dev/shm").iterdir())
    config = config_of(store, tmp_path, model, steps=None, iterate=True, commit_every_s=0.2)
    with ranks_of(config, 2) as processes:
        wait_for_steps(tmp_path, 4)
        assert processes[1].pid is not None
        os.kill(processes[1].pid, signal.SIGKILL)
        assert exit_codes(processes, timeout_s=30) == [1, -signal.SIGKILL]
    assert left_behind(before) == []
    last = RunFolder(tmp_path).ledger.last_commit()
    assert last is not None
    result = run_training(config_of(store, tmp_path, model, steps=last.total_steps + 2))
    assert result.reason == "steps"


def test_workers_of_a_streamed_run_are_ranks_without_being_called_so(store: Path, model: str, tmp_path: Path) -> None:
    recorder = Recorder()
    recorder.when("step", 2, lambda _: os.kill(_rank(1), signal.SIGKILL))
    with pytest.raises(TrainError, match=r"rank 1 of 2 \(pid \d+\) has ended \(killed by signal 9\)"):
        run_training(config_of(store, tmp_path, model, workers=2, steps=None, iterate=True, plan=""), [recorder])
    started = recorder.of("run_started")[0]
    assert (started["workers"], started["plan"]) == (2, "strided")


def _rank(rank: int) -> int:
    for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii").split():
        if f"RANK={rank}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            return int(child)
    raise AssertionError(f"no rank {rank} is there")


def test_an_epoch_of_chunks_is_audited_and_evaluated_as_any_other(store: Path, model: str, tmp_path: Path) -> None:
    found: list[float] = []
    for streamed in (True, False):
        run_dir, recorder = tmp_path / str(streamed), Recorder()
        config = config_of(store, run_dir, model, plan="claims", steps=None, streamed=streamed, eval_file=str(store))
        assert run_training(config, [recorder]).reason == "epoch"
        assert [audit.holds for audit in prove(RunFolder(run_dir))] == [True]
        found.append(recorder.of("eval")[0]["loss"])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_the_plan_is_told_and_steps_have_no_mfu_where_no_peak_is_known(store: Path, model: str, tmp_path: Path) -> None:
    recorder = Recorder()
    run_training(config_of(store, tmp_path, model, steps=1), [recorder])
    (plan,) = recorder.of("plan")
    assert plan.keys() - {"event", "time", "generation"} == get_type_hints(Planned).keys()
    assert (plan["layers"], plan["residents"], plan["device_budget_bytes"]) == (3, 0, None)
    assert plan["step_s"] == max(plan["compute_s"], plan["link_s"], plan["optimizer_s"])
    assert recorder.of("step")[0]["mfu"] is None
    assert streaming_threads() == []


def test_too_little_host_memory_is_told_before_any_work(
    store: Path, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "free_bytes", lambda: 1 << 20)
    with pytest.raises(ConfigError, match=r"need .* GiB of host memory .* are free: .*smaller model"):
        run_training(config_of(store, tmp_path, model))
    assert not (tmp_path / "checkpoints").exists()
    monkeypatch.undo()
    assert run_training(config_of(store, tmp_path, model, steps=1)).total_steps == 1


def test_a_loss_that_is_no_number_stops_the_run_and_its_threads(store: Path, model: str, tmp_path: Path) -> None:
    run_training(config_of(store, tmp_path, model, steps=1, learning_rate=1e28, weight_decay=0.0))
    committed = state_of(tmp_path)
    with pytest.raises(TrainError, match="step 2: the loss is nan"):
        run_training(config_of(store, tmp_path, model, learning_rate=1e28, weight_decay=0.0))
    assert streaming_threads() == []
    assert same_bits(state_of(tmp_path), committed)


def test_a_wish_to_stop_commits_first(store: Path, model: str, tmp_path: Path, whole: Any) -> None:
    stop, recorder = StopRequest(), Recorder()
    recorder.when("step", 3, lambda _: stop.set())
    result = run_training(config_of(store, tmp_path, model), [recorder], stop=stop)
    assert (result.reason, result.total_steps) == ("signal", 3)
    run_training(config_of(store, tmp_path, model))
    assert same_bits(state_of(tmp_path), whole[1])


def test_what_was_learned_streamed_loads_in_transformers(store: Path, model: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    run_training(config_of(store, tmp_path / "run", model, steps=2))
    export_run(str(tmp_path / "run"), str(tmp_path / "out"))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    state = state_of(tmp_path / "run")
    names = [name for name in state if name.startswith("model.")]
    assert len(names) > 30
    assert all(torch.equal(loaded[name.removeprefix("model.")], state[name]) for name in names)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model": "tiny"}, "built in, and cannot be streamed: name a model of transformers"),
        ({"model": "counting"}, "built in, and cannot be streamed"),
        ({"parallel_independent": True}, "share one copy without it"),
        ({"use_chunked_training": True}, "leave one away"),
        ({"gpu_budget_gib": 0.0}, "gpu_budget_gib=0.0 cannot work"),
        ({"streamed": False, "gpu_budget_gib": 8.0}, "needs --streamed"),
        ({"streamed": False, "offload_activations": True}, "needs --streamed"),
    ],
)
def test_what_cannot_be_streamed_is_refused(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        config_of(tmp_path, tmp_path, **{"model": "some/model", "plan": "", **changes}).check()
