"""`penstock exchange export`: the model that transformers loads is the one that everybody has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from exchange.local_run import LocalRun
from penstock.cli.main import app
from penstock.errors import ExchangeError
from penstock.exchange.exporting import export_model
from penstock.exchange.layout import WeightVector
from penstock.exchange.opening import open_run
from penstock.exchange.places import open_places
from penstock.train.exporting import load_exported_act

LLAMA = {
    "model_type": "llama",
    "vocab_size": 420,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize("model", ["tiny", "tied", "untied"])
def test_the_exported_model_is_everybody_s(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "tie_word_embeddings": model == "tied"}))
    name = "tiny" if model == "tiny" else str(tmp_path / "config.json")
    run = LocalRun.begin(tmp_path, model=name, miners=["a"], seats=1, window_s=3600.0)
    run.contribute("a", 0, run.opened.facts_digest, scale=0.01)
    run.close(1).join(60)
    app(
        ["exchange", "export", "run", str(tmp_path / "out"), "--buckets", str(tmp_path / "buckets")],
        standalone_mode=False,
    )
    assert "the model after 1 window" in capsys.readouterr().out
    replica = run.opened.replica()
    replica.catch_up()
    ours, vector = run.opened.model()
    vector.write(replica.weights)
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids = torch.arange(1, 31).reshape(2, 15)
    with torch.no_grad():
        places = (torch.arange(15).expand(2, 15), torch.zeros_like(ids))
        found = ours.network.eval()(ids, *(places if model == "tiny" else ()))
        logits = found if model == "tiny" else found.logits
        assert torch.allclose(exported(ids).logits, logits, atol=1e-5)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.eos_token == run.opened.facts.end_of_text


def test_a_recurrent_model_is_read_back(tmp_path: Path) -> None:
    run = LocalRun.begin(tmp_path, model="act", miners=["a"], seats=1, window_s=3600.0)
    assert export_model(run.opened, str(tmp_path / "out")) == 0
    replica = run.opened.replica()
    replica.catch_up()
    read_back = WeightVector(load_exported_act(str(tmp_path / "out")))
    assert read_back.layout == run.opened.facts.layout
    assert read_back.read().equal(replica.weights)


def test_a_run_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ExchangeError, match="holds no run 'none'"):
        export_model(open_run(open_places("export", str(tmp_path)), "none"), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
