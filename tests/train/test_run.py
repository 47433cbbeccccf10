"""One worker from beginning to end: epochs, stops, resumes, refusals."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import orjson
import pytest

from equipment.hooks import Recorder
from equipment.training import SAMPLES, assert_learned_exactly, counting_config, make_store, weights
from penstock.blocks import ingest
from penstock.errors import CheckpointError, ConfigError, LedgerMismatch, StorageBusy, StorageError, TrainError
from penstock.feed import train_tokenizer
from penstock.observe.run_folder import RunFolder
from penstock.storage import LocalStorage
from penstock.train.config import TrainingConfig
from penstock.train.run import run_training
from penstock.train.stopping import StopRequest


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"


def test_an_epoch_ends_when_every_sample_is_learned_once(store: Path, run_dir: Path) -> None:
    result = run_training(counting_config(store, run_dir))
    assert (result.reason, result.epoch) == ("epoch", 0)
    assert_learned_exactly(run_dir)


def test_steps_are_the_runs_total_and_a_resume_repeats_nothing(store: Path, run_dir: Path) -> None:
    first = run_training(counting_config(store, run_dir, steps=10))
    assert (first.reason, first.total_steps) == ("steps", 10)
    second = run_training(counting_config(store, run_dir, steps=20))
    assert (second.reason, second.total_steps) == ("steps", 20)
    counts = weights(run_dir)["model.counts"]
    assert counts.max() == 1
    assert 0 < counts.sum() < SAMPLES
    assert run_training(counting_config(store, run_dir)).reason == "epoch"
    assert_learned_exactly(run_dir)


def test_steps_stop_in_the_middle_of_a_chunk_and_go_on_there(store: Path, run_dir: Path) -> None:
    for steps in range(1, 8):
        assert run_training(counting_config(store, run_dir, steps=steps, dataset_chunk_size=25)).total_steps == steps
    recorder = Recorder()
    run_training(counting_config(store, run_dir, dataset_chunk_size=25), [recorder])
    assert recorder.of("step")[0]["step"] == 8
    assert_learned_exactly(run_dir)


def test_iterate_goes_on_into_the_next_epoch(store: Path, run_dir: Path) -> None:
    per_epoch = run_training(counting_config(store, run_dir)).total_steps
    result = run_training(counting_config(store, run_dir, iterate=True, steps=2 * per_epoch))
    assert (result.reason, result.epoch) == ("steps", 1)
    assert_learned_exactly(run_dir, times=2)


def test_stop_after_epoch_stops_although_iterate_would_go_on(store: Path, run_dir: Path) -> None:
    result = run_training(counting_config(store, run_dir, iterate=True, stop_after_epoch=True))
    assert (result.reason, result.epoch) == ("epoch", 0)


def test_a_finished_run_has_nothing_left_to_do(store: Path, run_dir: Path) -> None:
    before = run_training(counting_config(store, run_dir))
    recorder = Recorder()
    assert run_training(counting_config(store, run_dir), [recorder]) == before
    assert not recorder.of("step")


def test_a_wish_to_stop_commits_first_and_the_rest_is_learned_later(store: Path, run_dir: Path) -> None:
    stop = StopRequest()
    recorder = Recorder().when("step", 5, lambda _: stop.set())
    result = run_training(counting_config(store, run_dir), [recorder], stop=stop)
    assert (result.reason, result.total_steps) == ("signal", 5)
    assert run_training(counting_config(store, run_dir)).reason == "epoch"
    assert_learned_exactly(run_dir)


def test_commits_come_by_time_too_and_in_the_middle_of_a_chunk(store: Path, tmp_path: Path) -> None:
    seldom = counting_config(store, tmp_path / "seldom", model="tiny", dataset_chunk_size=25, commit_every_chunks=99)
    often = counting_config(store, tmp_path / "often", model="tiny", dataset_chunk_size=25, commit_every_chunks=99)
    often.commit_every_s = 1e-9
    recorder = Recorder()
    run_training(seldom)
    run_training(often, [recorder])
    assert len(recorder.of("commit")) == len(recorder.of("step"))
    expected, found = weights(tmp_path / "seldom"), weights(tmp_path / "often")
    assert all(found[name].equal(expected[name]) for name in expected)


def test_weights_change_at_every_step(store: Path, run_dir: Path) -> None:
    seen = []
    for steps in range(1, 7):
        run_training(counting_config(store, run_dir, model="tiny", steps=steps))
        seen.append(weights(run_dir))
    for before, after in pairwise(seen):
        assert all(not before[name].equal(after[name]) for name in before)


def test_the_loss_falls(store: Path, run_dir: Path) -> None:
    recorder = Recorder()
    config = counting_config(store, run_dir, model="tiny", learning_rate=1e-2, iterate=True, steps=120)
    run_training(config, [recorder])
    losses = [event["loss"] for event in recorder.of("step")]
    assert sum(losses[-10:]) < 0.7 * sum(losses[:10])


@pytest.mark.parametrize(
    ("setting", "value"),
    [("batch_size", 3), ("seed", 1), ("max_seq_len", 32), ("model", "tiny"), ("learning_rate", 0.5), ("merge", "mean")],
)
def test_a_changed_setting_is_refused_by_name_on_resume(
    store: Path, run_dir: Path, setting: str, value: object
) -> None:
    run_training(counting_config(store, run_dir, steps=3))
    with pytest.raises(ConfigError, match=f"{setting}: got {value!r}, expected"):
        run_training(counting_config(store, run_dir, **{setting: value}))
    run_training(counting_config(store, run_dir))
    assert_learned_exactly(run_dir)


def test_a_changed_chunk_size_is_refused_by_name_on_resume(store: Path, run_dir: Path) -> None:
    run_training(counting_config(store, run_dir, steps=3))
    with pytest.raises(ConfigError, match="dataset_chunk_size: got 6, expected 5"):
        run_training(counting_config(store, run_dir, dataset_chunk_size=6))


def test_other_data_is_refused_on_resume(store: Path, run_dir: Path, tmp_path: Path) -> None:
    run_training(counting_config(store, run_dir, steps=3))
    (tmp_path / "other").mkdir()
    other = make_store(tmp_path / "other", samples=SAMPLES + 1)
    with pytest.raises(
        ConfigError, match=r"other/store is not what .* was begun with, which is .*/store \(its dataset_id"
    ):
        run_training(counting_config(other, run_dir))


def test_a_raw_source_that_changed_is_told_as_such_and_the_run_goes_on_with_what_it_was(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    raw = tmp_path / "raw.txt"
    lines = [f"line {number} of a raw file" for number in range(20)]
    raw.write_text("\n".join(lines))
    run_training(counting_config(raw, run_dir, steps=3))
    raw.write_text("\n".join([*lines, "one more"]))
    with pytest.raises(
        ConfigError, match=r"raw.txt has changed since .*leave --dataset-file away.*blocks are in .*cache"
    ):
        run_training(counting_config(raw, run_dir))
    run_training(replace(TrainingConfig(**RunFolder(run_dir).settings), steps=4))
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(ConfigError, match=r"raw.txt has changed since .*put it back as it was to go on"):
        run_training(replace(TrainingConfig(**RunFolder(run_dir).settings), steps=5))
    raw.write_text("\n".join(lines))
    run_training(replace(TrainingConfig(**RunFolder(run_dir).settings), steps=None))
    assert_learned_exactly(run_dir)


def test_an_altered_block_is_refused_on_resume(run_dir: Path, tmp_path: Path) -> None:
    store = make_store(tmp_path)
    run_training(counting_config(store, run_dir, steps=3))
    manifest = store / "block_manifest.json"
    block = store / "blocks" / "block_00000.jsonl"
    block.write_bytes(block.read_bytes().replace(b"sample", b"simple"))
    from penstock.blocks.manifest import BlockEntry, Manifest  # rewritten as a careless copy tool would

    fields = orjson.loads(manifest.read_bytes())
    entry = BlockEntry(**{**fields["blocks"][0], "checksum": "sha256:0"})
    read = Manifest.from_json(manifest.read_bytes(), "test")
    altered = Manifest(header=read.header, complete=True, blocks=[entry, *read.blocks[1:]])
    manifest.write_bytes(altered.to_json())
    with pytest.raises(LedgerMismatch, match="block 0 has changed"):
        run_training(counting_config(store, run_dir))


def test_another_tokenizer_is_refused_on_resume(store: Path, run_dir: Path, tmp_path: Path) -> None:
    run_training(counting_config(store, run_dir, steps=3))
    other = tmp_path / "tokenizer.json"
    other.write_bytes((run_dir / "tokenizer.json").read_bytes() + b" ")
    with pytest.raises(ConfigError, match="begun with other settings: tokenizer_fingerprint: got"):
        run_training(counting_config(store, run_dir, tokenizer=str(other)))
    run_training(counting_config(store, run_dir))
    assert_learned_exactly(run_dir)


def test_a_lost_tokenizer_can_be_named_again_and_no_other_takes_its_place(
    store: Path, run_dir: Path, tmp_path: Path
) -> None:
    run_training(counting_config(store, run_dir, steps=3))
    kept = tmp_path / "kept.json"
    (run_dir / "tokenizer.json").rename(kept)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"has lost its tokenizer\.json: restore it, or name it with --tokenizer"):
            run_training(counting_config(store, run_dir))
    run_training(counting_config(store, run_dir, tokenizer=str(kept)))
    assert_learned_exactly(run_dir)


@pytest.mark.parametrize("lose", [Path.unlink, lambda path: path.write_bytes(b"")], ids=["deleted", "emptied"])
def test_a_run_that_lost_its_ledger_is_left_as_it_is(
    store: Path, run_dir: Path, lose: Callable[[Path], object]
) -> None:
    run_training(counting_config(store, run_dir, steps=15))
    before = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    for name in ("ledger.sqlite-wal", "ledger.sqlite-shm"):
        (run_dir / name).unlink(missing_ok=True)
    lose(run_dir / "ledger.sqlite")
    with pytest.raises(ConfigError, match=r"has checkpoints .* and no ledger that knows them: restore .*ledger.sqlite"):
        run_training(counting_config(store, run_dir))
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == before


def test_a_run_that_lost_its_config_is_refused(store: Path, run_dir: Path) -> None:
    run_training(counting_config(store, run_dir, steps=15))
    (run_dir / "config.toml").unlink()
    with pytest.raises(ConfigError, match=r"has a ledger .*and no config\.toml: restore it"):
        run_training(counting_config(store, run_dir, max_seq_len=8))


@pytest.mark.parametrize("damage", [b"settings = 3\n", b"[settings]\nmodel = 'tiny'\n", b"\xff", b"[", b""])
def test_a_damaged_config_is_named(store: Path, run_dir: Path, damage: bytes) -> None:
    run_training(counting_config(store, run_dir, steps=3))
    (run_dir / "config.toml").write_bytes(damage)
    with pytest.raises(ConfigError, match=r"config\.toml is damaged"):
        run_training(counting_config(store, run_dir))
    with pytest.raises(ConfigError, match=r"config\.toml (is damaged|cannot be read)"):
        _ = RunFolder(run_dir).settings


def test_a_refused_setting_leaves_no_trace(store: Path, run_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"model='\./nope' is not there"):
        run_training(counting_config(store, run_dir, model="./nope"))
    run_training(counting_config(store, run_dir))
    assert_learned_exactly(run_dir)


def test_the_data_sets_own_folder_is_no_run_folder(store: Path) -> None:
    with pytest.raises(ConfigError, match="is a data set: name another folder"):
        run_training(counting_config(store, store))


def test_an_empty_data_set_is_refused(tmp_path: Path, run_dir: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    ingest(tmp_path / "empty.jsonl", tmp_path / "store")
    with pytest.raises(ConfigError, match="holds no samples"):
        run_training(counting_config(tmp_path / "store", run_dir))
    assert not run_dir.exists()


def test_a_raw_file_is_trained_on_and_resumed_by_its_own_name(tmp_path: Path, run_dir: Path) -> None:
    raw = tmp_path / "raw.jsonl"
    raw.write_bytes(b"".join(orjson.dumps({"text": f"sample {number}"}) + b"\n" for number in range(SAMPLES)))
    config = counting_config(raw, run_dir, samples_per_block=25)
    run_training(replace(config, steps=3))
    assert run_training(config).reason == "epoch"
    assert_learned_exactly(run_dir)


def test_data_that_came_tokenised_is_trained_on_with_its_tokenizer_named(tmp_path: Path, run_dir: Path) -> None:
    np.save(tmp_path / "tokens.npy", np.arange(SAMPLES * 8, dtype=np.uint16).reshape(SAMPLES, 8) % 300)
    ingest(tmp_path / "tokens.npy", tmp_path / "tokens", 25)
    config = counting_config(tmp_path / "tokens", run_dir)
    with pytest.raises(ConfigError, match=r"came tokenised: name the tokenizer it was made with"):
        run_training(config)
    (tmp_path / "tokenizer.json").write_text(train_tokenizer(["a few words"], vocab_size=300).definition)
    config.tokenizer = str(tmp_path / "tokenizer.json")
    with pytest.raises(ConfigError, match=r"sample \d+ holds token \d+, the tokenizer has 2\d\d"):
        run_training(config)
    np.save(tmp_path / "tokens.npy", np.arange(SAMPLES * 8, dtype=np.uint16).reshape(SAMPLES, 8) % 200)
    ingest(tmp_path / "tokens.npy", tmp_path / "others", 25)
    run_training(replace(config, dataset_file=str(tmp_path / "others"), run_dir=str(tmp_path / "again")))
    assert_learned_exactly(tmp_path / "again")


def test_a_store_without_text_is_refused(tmp_path: Path, run_dir: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'{"pixels": [1, 2]}\n')
    ingest(tmp_path / "rows.jsonl", tmp_path / "store", no_text=True)
    with pytest.raises(ConfigError, match="no text column"):
        run_training(counting_config(tmp_path / "store", run_dir))


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("steps", 0),
        ("batch_size", 0),
        ("dataset_file", ""),
        ("workers", 2),
        ("merge", "median"),
        ("model", ""),
        ("seed", 10**23),
        ("learning_rate", float("nan")),
        ("max_seq_len", 10**12),
        ("vocab_size", 10**21),
        ("dataset_chunk_size", 10**23),
        ("session_timeout_s", 0.0),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(store: Path, run_dir: Path, setting: str, value: object) -> None:
    with pytest.raises(ConfigError, match=setting):
        run_training(counting_config(store, run_dir, **{setting: value}))


def test_a_run_in_use_is_left_alone(store: Path, run_dir: Path) -> None:
    with LocalStorage(run_dir).exclusive("run", purpose="training"), pytest.raises(StorageBusy, match="in use"):
        run_training(counting_config(store, run_dir))


def test_a_damaged_checkpoint_gives_way_to_the_one_before_it(
    store: Path, run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_training(counting_config(store, run_dir, steps=15))
    last = RunFolder(run_dir).ledger.last_commit()
    assert last is not None
    damaged = run_dir / "checkpoints" / last.checkpoint_id / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    with caplog.at_level(logging.WARNING):
        result = run_training(counting_config(store, run_dir))
    assert f"checkpoint {last.checkpoint_id}: model.safetensors is damaged" in caplog.text
    assert result.reason == "epoch"
    assert_learned_exactly(run_dir)


def test_without_a_sound_checkpoint_nothing_is_touched(store: Path, run_dir: Path) -> None:
    run_training(counting_config(store, run_dir, steps=15))
    for seal in (run_dir / "checkpoints").glob("*/checkpoint.json"):
        seal.write_bytes(b"{}")
    before = RunFolder(run_dir).ledger.commits()
    with pytest.raises(CheckpointError, match=r"none of the .* commits"):
        run_training(counting_config(store, run_dir))
    assert RunFolder(run_dir).ledger.commits() == before


def test_a_loss_that_is_not_a_number_stops_and_names_the_samples(store: Path, run_dir: Path) -> None:
    config = counting_config(store, run_dir, model="tiny", learning_rate=1e30, max_grad_norm=0.0)
    with pytest.raises(TrainError, match=r"the loss is .* and the gradients' norm nan on samples \d+ to \d+"):
        run_training(config)


def test_only_the_newest_checkpoints_stay(store: Path, run_dir: Path) -> None:
    run_training(counting_config(store, run_dir, keep_checkpoints=2))
    kept = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert kept == [commit.checkpoint_id for commit in RunFolder(run_dir).ledger.commits()[-2:]]


def test_metrics_are_kept_over_resumes_and_a_torn_line_is_closed(store: Path, run_dir: Path) -> None:
    run_training(counting_config(store, run_dir, steps=3))
    metrics = run_dir / "metrics.jsonl"
    with metrics.open("ab") as file:
        file.write(b'{"event": "st')
    run_training(counting_config(store, run_dir, steps=6))
    events = list(RunFolder(run_dir).events())
    assert [event["step"] for event in events if event["event"] == "step"] == [1, 2, 3, 4, 5, 6]
    assert {event["generation"] for event in events} == {1, 2}


def test_a_metrics_file_that_cannot_be_written_is_named(store: Path, run_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"metrics file /dev/null/x\.jsonl cannot be written"):
        run_training(counting_config(store, run_dir, log_file="/dev/null/x.jsonl"))
    with pytest.raises(StorageError, match="metrics file /dev/full cannot be written: No space left"):
        run_training(counting_config(store, run_dir, log_file="/dev/full"))
    run_training(counting_config(store, run_dir))
    assert_learned_exactly(run_dir)


def test_split_batches_learn_the_same(store: Path, tmp_path: Path) -> None:
    whole = counting_config(store, tmp_path / "whole", model="tiny", batch_size=6, steps=5)
    split = counting_config(store, tmp_path / "split", model="tiny", batch_size=6, steps=5)
    split.gradient_accumulation_steps = 4
    run_training(whole)
    run_training(split)
    expected, found = weights(tmp_path / "whole"), weights(tmp_path / "split")
    assert all(found[name].allclose(expected[name], atol=1e-5) for name in expected)
