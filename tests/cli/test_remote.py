"""The commands on ``s3://``, as a person or a script meets them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from equipment.buckets import use_key
from equipment.commands import Told
from equipment.commands import penstock as run
from equipment.servers import S3Server
from equipment.training import SAMPLES, assert_learned_exactly, counting_config, make_store
from penstock.blocks import ingest
from penstock.cli.main import app
from penstock.feed import train_tokenizer
from penstock.storage import open_storage

pytestmark = pytest.mark.usefixtures("forked_workers")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def penstock(*arguments: str | Path, check: int = 0) -> Told:
    """Run a command in a process of its own, as a shell would; no secret comes out of it."""
    done = run(*arguments)
    told = done.stdout + done.stderr
    assert done.returncode == check, told
    assert os.environ["AWS_SECRET_ACCESS_KEY"] not in told
    return done


def test_ingest_again_inspect_and_verify(tmp_path: Path, bucket: str) -> None:
    raw = make_store(tmp_path).parent / "raw.jsonl"
    told = json.loads(penstock("ingest", raw, bucket, "--block-size", "25", "--json").stdout)
    assert (told["total_samples"], told["total_blocks"], told["complete"]) == (SAMPLES, 3, True)
    assert told == json.loads((tmp_path / "store/block_manifest.json").read_text())
    assert "already complete" in penstock("ingest", raw, bucket, "--block-size", "25").stderr
    assert "every file is what was written" in penstock("inspect", bucket, "--verify").stdout
    storage = open_storage(bucket)
    storage.put("blocks/block_00001.jsonl", storage.get("blocks/block_00001.jsonl").replace(b"says", b"said"))
    storage.delete("blocks/block_00002.idx")
    broken = penstock("inspect", bucket, "--verify", check=3).stderr.replace("\n", " ")
    assert f"bad {bucket}/blocks/block_00001.jsonl: its bytes have changed" in broken
    assert "block_00002.idx: missing" in broken


def test_from_files_in_a_bucket_to_tokens_and_a_feed(
    tmp_path: Path, bucket: str, cache: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_store(tmp_path)
    open_storage(f"{bucket}/raw").put("a.jsonl", (tmp_path / "raw.jsonl").read_bytes())
    (tmp_path / "tokenizer.json").write_text(train_tokenizer(["sample says word"], vocab_size=300).definition)
    penstock("ingest", f"{bucket}/raw/*.jsonl", f"{bucket}/store", "--block-size", "25", "--json")
    use_key(monkeypatch, "reader", s3.url)
    tokens = json.loads(
        penstock("tokenize", f"{bucket}/store", "--tokenizer", tmp_path / "tokenizer.json", "--json").stdout
    )
    assert tokens["samples"] == SAMPLES
    assert Path(tokens["folder"]).is_relative_to(cache)
    texts = json.loads(penstock("bench", "feed", f"{bucket}/store", "--json").stdout)
    assert texts["batches"] == -(-SAMPLES // 8)
    refused = penstock("ingest", tmp_path / "raw.jsonl", f"{bucket}/other", check=1)
    assert "cannot be written, and nothing was" in refused.stderr.replace("\n", " ")


def test_training_from_a_bucket_learns_every_sample_once(tmp_path: Path, bucket: str) -> None:
    make_store(tmp_path)
    ingest(tmp_path / "raw.jsonl", bucket, 25)
    run = tmp_path / "run"
    settings = counting_config(tmp_path / "store", run)
    options = ("vocab_size", "dataset_chunk_size", "batch_size", "max_seq_len", "commit_every_chunks", "merge", "model")
    told = [word for name in options for word in (f"--{name.replace('_', '-')}", str(getattr(settings, name)))]
    told += ["--parallel-independent", "--workers", "2", "--json"]
    done = CliRunner().invoke(
        app, ["train", "--dataset-file", bucket, "--run", str(run), *told], catch_exceptions=False
    )
    assert done.exit_code == 0, done.output
    assert_learned_exactly(run)
    assert f'dataset_file = "{bucket}"' in (run / "config.toml").read_text()
    written = [path.read_bytes() for path in run.rglob("*") if path.is_file()]
    assert not [data for data in written if b"tester-secret" in data]
