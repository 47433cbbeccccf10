"""`penstock bench train`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli.bench_train import print_tables
from penstock.cli.main import app
from penstock.errors import ConfigError
from penstock.train.comparing import Measured, largest_difference, sizes_up_to

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("forked_workers")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", "vocab_size": 320, "max_position_embeddings": 64, **shape}))
    return path


def bench(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["bench", "train", *map(str, arguments)], catch_exceptions=False)


def test_ranks_are_compared_by_speed_and_loss(model: Path, tmp_path: Path) -> None:
    options = ("--steps", 4, "--batch-size", 3, "--max-seq-len", 32, "--device", "cpu", "--folder", tmp_path)
    done = bench("--model", model, "--workers", 2, *options, "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert [run["world"] for run in told["runs"]] == [1, 2]
    assert [len(run["losses"]) for run in told["runs"]] == [4, 4]
    assert all(run["tokens_per_s"] > 0 and run["step_s"] > 0 for run in told["runs"])
    assert told["largest_loss_difference"] < 1e-5
    assert list(tmp_path.iterdir()) == [model]


def test_tables_say_it_to_people(capsys: pytest.CaptureFixture[str]) -> None:
    one = Measured(world=1, step_s=0.5, tokens_per_s=1000.0, mfu=0.314, losses=[4.0, 2.0])
    print_tables([one, Measured(world=2, step_s=0.26, tokens_per_s=1900.0, mfu=None, losses=[4.0, 2.002])])
    told = " ".join(capsys.readouterr().out.split())
    assert "ranks step tokens/s speed-up MFU 1 0.5 s 1,000 1.00 31.4 % 2 0.26 s 1,900 1.90" in told
    assert "step loss, 1 loss, 2 1 4.000000 4.000000 2 2.000000 2.002000" in told
    assert "largest difference of losses: 1.00e-03" in told


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--worlds", "one"), "is no list of numbers"),
        (("--worlds", "1,4", "--devices", "0,1"), "asks for 4 ranks of 2 devices"),
        (("--devices", "first"), "no list of devices"),
    ],
)
def test_what_cannot_be_compared_is_refused(model: Path, arguments: tuple[str, ...], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        bench("--model", model, *arguments)


def test_sizes_double_up_to_the_largest() -> None:
    assert [sizes_up_to(most) for most in (1, 2, 3, 4, 6, 8)] == [
        [1],
        [1, 2],
        [1, 2, 3],
        [1, 2, 4],
        [1, 2, 4, 6],
        [1, 2, 4, 8],
    ]


def test_the_largest_difference_is_relative_to_the_fewest_ranks() -> None:
    def measured(world: int, *losses: float) -> Measured:
        return Measured(world=world, step_s=1.0, tokens_per_s=1.0, mfu=None, losses=list(losses))

    assert largest_difference([measured(1, 4.0, 2.0)]) == 0
    found = [measured(1, 4.0, 2.0), measured(2, 4.0, 2.5), measured(4, 3.0, 2.0)]
    assert largest_difference(found) == 0.25
