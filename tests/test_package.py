"""What the package shows to the outside, and what it costs to look at it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import penstock
from equipment.training import counting_config, make_store
from penstock.train.run import run_training


def modules_after(code: str) -> set[str]:
    """Names of all modules loaded once `code` has run in a fresh interpreter."""
    program = f"import sys\n{code}\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    return set(done.stdout.splitlines())


def test_the_exported_names_are_these() -> None:
    assert penstock.__all__ == [
        "BlockManager",
        "ChunkTracker",
        "DistributedLoader",
        "Mix",
        "R2DatasetLoader",
        "TrainingConfig",
        "chunked_segment_rollout",
        "ingest",
        "load_bucket_secrets",
        "process_raw_dataset_to_blocks",
        "run_training",
    ]
    for name in penstock.__all__:
        assert callable(getattr(penstock, name))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Blockmanager'"):
        _ = penstock.Blockmanager  # pyright: ignore[reportAttributeAccessIssue]


def test_importing_penstock_loads_nothing_heavy() -> None:
    assert not modules_after("import penstock") & {"torch", "numpy", "obstore", "orjson", "rich", "typer", "tokenizers"}


def test_reading_data_and_settings_needs_no_torch() -> None:
    code = "import penstock as p; p.BlockManager, p.ingest, p.TrainingConfig, p.DistributedLoader, p.R2DatasetLoader"
    assert not modules_after(code) & {"torch", "safetensors", "obstore"}


def test_looking_at_buckets_and_opening_a_store_connects_to_nothing() -> None:
    code = """
import penstock
from penstock.storage import open_storage
open_storage("s3://bucket/prefix"), repr(penstock.load_bucket_secrets()["dataset"])
"""
    assert not modules_after(code) & {"obstore", "numpy", "torch"}


def test_help_loads_nothing_heavy() -> None:
    code = """
import contextlib, io
from penstock.cli.main import app
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    app(["--help"])
"""
    assert not modules_after(code) & {"torch", "numpy", "obstore", "tokenizers"}


def test_status_loads_neither_torch_nor_numpy(tmp_path: Path) -> None:
    run_training(counting_config(make_store(tmp_path), tmp_path / "run", steps=2))
    code = f"""
import contextlib, io
from penstock.cli.main import app
with contextlib.redirect_stdout(io.StringIO()):
    app(["status", {str(tmp_path / "run")!r}], standalone_mode=False)
"""
    assert not modules_after(code) & {"torch", "numpy", "obstore", "tokenizers", "pydantic"}


def test_without_torch_the_way_to_get_it_is_named() -> None:
    code = """
import sys
sys.modules["torch"] = None
import penstock
try:
    penstock.run_training
except Exception as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("MissingExtraError run_training needs torch: install it with `pip install 'torch")


def test_a_name_is_what_it_is_whatever_was_imported_before() -> None:
    code = """
import penstock.blocks.background, penstock.blocks.raw, penstock
from penstock.blocks import IngestProgress, ingest
assert callable(penstock.ingest) and callable(ingest)
"""
    modules_after(code)
