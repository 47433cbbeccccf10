"""Models of transformers, made here from small configs: nothing is downloaded."""

from __future__ import annotations

import json
import logging
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from equipment.hooks import Recorder
from equipment.training import counting_config, make_store, weights
from penstock.errors import ConfigError, MissingExtraError
from penstock.feed import train_tokenizer
from penstock.train.exporting import export_run
from penstock.train.models.huggingface import CausalLM, find_model
from penstock.train.run import run_training
from penstock.train.schedule import Schedule
from penstock.train.trainer import Trainer
from train.test_trainer import batch_of

pytestmark = pytest.mark.usefixtures("forked_workers")

CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": 300, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "llama": {
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
    },
    "qwen2": {
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
    },
}


def config_folder(folder: Path, kind: str, **changes: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    told = {"model_type": kind, "bos_token_id": 0, "eos_token_id": 0, **CONFIGS[kind], **changes}
    (folder / "config.json").write_text(json.dumps(told))
    return folder


def model_of(folder: Path, vocab_size: int = 300) -> CausalLM:
    torch.manual_seed(0)
    return CausalLM(find_model(str(folder), fresh_weights=False).config_json, vocab_size=vocab_size)


def logits(model: CausalLM, *documents: list[int]) -> torch.Tensor:
    batch = batch_of(*documents)
    arrays = (batch.input_ids, batch.position_ids, batch.document_ids)
    model.eval()
    return model(*(torch.from_numpy(array) for array in arrays)).detach()


@pytest.mark.parametrize("kind", CONFIGS)
def test_documents_of_one_sequence_do_not_see_each_other(tmp_path: Path, kind: str) -> None:
    model = model_of(config_folder(tmp_path, kind))
    one = logits(model, [1, 2, 3, 4], [5, 6, 7, 8])
    other = logits(model, [9, 9, 9, 9], [5, 6, 7, 8])
    alone = logits(model, [5, 6, 7, 8])
    assert not one[0, :4].allclose(other[0, :4])
    assert one[0, 4:8].allclose(other[0, 4:8], atol=1e-6)
    assert one[0, 4:8].allclose(alone[0, :4], atol=1e-5)


WINDOW: dict[str, Any] = {**CONFIGS["qwen2"], "head_dim": 16, "sliding_window": 3}
EXPERTS = {"num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}


@pytest.mark.parametrize("kind", ["afmoe", "gpt_oss"])
def test_a_mask_that_keeps_documents_apart_leaves_windows_as_they_are(kind: str) -> None:
    """These take no positions for it; the one has a mask of booleans, the other adds it to scores."""
    kinds = ["sliding_attention"] * 2
    told = {"model_type": kind, **WINDOW, **EXPERTS, "layer_types": kinds}
    torch.manual_seed(0)
    model = CausalLM(json.dumps(told), vocab_size=300)
    assert model.apart == "mask"
    one, other = (logits(model, first, [5, 6, 7, 8]) for first in ([1, 2, 3, 4], [9, 9, 9, 9]))
    assert one[0, 4:8].allclose(other[0, 4:8], atol=1e-6)
    near, far = (logits(model, [1, *changed, 4, 5, 6, 7, 8]) for changed in ([2, 3], [3, 2]))
    assert not near[0, 4].allclose(far[0, 4], atol=1e-6)
    near, far = (logits(model, [changed, 2, 3, 4, 5, 6, 7, 8]) for changed in (1, 9))
    assert not near[0, 4].allclose(far[0, 4], atol=1e-6)  # two layers, two tokens back each
    assert near[0, 5:8].allclose(far[0, 5:8], atol=1e-6)


def test_a_config_with_a_number_that_json_cannot_write_is_read(tmp_path: Path) -> None:
    told = {"model_type": "mamba2", "vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 1}
    told |= {"num_heads": 4, "head_dim": 8, "state_size": 8, "n_groups": 1}
    (tmp_path / "config.json").write_text(json.dumps(told))
    assert model_of(tmp_path).lm.config.time_step_limit[1] == float("inf")  # pyright: ignore


def test_by_choice_documents_see_each_other(tmp_path: Path) -> None:
    found = find_model(str(config_folder(tmp_path, "gpt2")), fresh_weights=False)
    model = CausalLM(found.config_json, vocab_size=300, across_documents=True)
    one, other = (logits(model, first, [5, 6, 7, 8]) for first in ([1, 2, 3, 4], [9, 9, 9, 9]))
    assert not one[0, 4:8].allclose(other[0, 4:8], atol=1e-6)


def test_a_model_that_cannot_keep_documents_apart_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told = {"model_type": "mamba", "vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(told))
    with caplog.at_level(logging.WARNING):
        assert model_of(tmp_path).apart == "never"
    assert "documents of one sequence see each other: mamba" in caplog.text


@pytest.mark.parametrize("kind", CONFIGS)
def test_it_learns_and_every_weight_changes_at_every_step(tmp_path: Path, kind: str) -> None:
    subject = Trainer(model_of(config_folder(tmp_path, kind)), schedule=Schedule(learning_rate=1e-2))
    batch = batch_of([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])
    seen, losses = [subject.state()], []
    for number in range(1, 9):
        losses.append(subject.step(batch, number).loss)
        seen.append(subject.state())
    assert losses[-1] < 0.8 * losses[0]
    trained = {name for name, _ in subject.model.network.named_parameters()}
    for before, after in pairwise(seen):
        assert all(not before[name].equal(after[name]) for name in before if name.removeprefix("model.") in trained)


def test_tied_weights_are_kept_once_and_come_back_tied(tmp_path: Path) -> None:
    subject = Trainer(model_of(config_folder(tmp_path, "gpt2")), schedule=Schedule(learning_rate=1e-2))
    subject.step(batch_of([1, 2, 3, 4]), 1)
    state = subject.state()
    assert "model.lm_head.weight" not in state
    other = Trainer(model_of(tmp_path), schedule=Schedule(learning_rate=1e-2))
    other.load_state(state)
    assert torch.equal(other.model.network.get_output_embeddings().weight, state["model.transformer.wte.weight"])  # pyright: ignore


def hf_config(store: Path, run_dir: Path, model: Path, **changes: object) -> Any:
    return counting_config(store, run_dir, model=str(model), vocab_size=290, merge="mean", **changes)


def test_a_resumed_run_with_dropout_schedule_and_bf16_is_bit_identical(store: Path, tmp_path: Path) -> None:
    model = config_folder(tmp_path / "model", "gpt2", resid_pdrop=0.2, embd_pdrop=0.2)
    chosen = {"lr_schedule": "cosine", "warmup_steps": 3, "schedule_steps": 12, "precision": "bf16"}
    whole, parts = Recorder(), Recorder()
    run_training(hf_config(store, tmp_path / "whole", model, steps=12, **chosen), [whole])
    for steps in (1, 5, 12):
        run_training(hf_config(store, tmp_path / "parts", model, steps=steps, **chosen), [parts])
    told = [[(e["step"], e["loss"], e["learning_rate"]) for e in each.of("step")] for each in (whole, parts)]
    assert told[0] == told[1]
    expected, found = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(found[name].equal(expected[name]) for name in expected)
    assert expected["model.transformer.wte.weight"].dtype == torch.float32


def test_a_resume_asks_neither_the_model_nor_the_tokenizer_it_began_with(store: Path, tmp_path: Path) -> None:
    model = config_folder(tmp_path / "model", "llama")
    (model / "tokenizer.json").write_text(train_tokenizer(["a few words of text"] * 3, vocab_size=280).definition)
    run_training(counting_config(store, tmp_path / "run", model=str(model), merge="mean", steps=2))
    for file in model.iterdir():
        file.unlink()
    result = run_training(counting_config(store, tmp_path / "run", model=str(model), merge="mean", steps=4))
    assert result.total_steps == 4


def test_weights_that_come_with_a_model_are_begun_with(store: Path, tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**CONFIGS["llama"], bos_token_id=0, eos_token_id=0)
    torch.manual_seed(99)
    pretrained = transformers.LlamaForCausalLM(config)
    pretrained.save_pretrained(tmp_path / "model")
    run_training(hf_config(store, tmp_path / "run", tmp_path / "model", steps=1, learning_rate=1e-12))
    begun = weights(tmp_path / "run")["model.model.embed_tokens.weight"]
    assert begun.allclose(pretrained.state_dict()["model.embed_tokens.weight"], atol=1e-6)
    run_training(
        hf_config(store, tmp_path / "new", tmp_path / "model", steps=1, learning_rate=1e-12, fresh_weights=True)
    )
    fresh = weights(tmp_path / "new")["model.model.embed_tokens.weight"]
    assert not fresh.allclose(begun, atol=1e-6)


def test_a_larger_vocabulary_is_refused_or_added_by_choice(store: Path, tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**{**CONFIGS["llama"], "vocab_size": 100}, bos_token_id=0, eos_token_id=0)
    pretrained = transformers.LlamaForCausalLM(config)
    pretrained.save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match="has embeddings for 100 tokens, the tokenizer has 290: name"):
        run_training(hf_config(store, tmp_path / "run", tmp_path / "model", steps=1))
    run_training(
        hf_config(store, tmp_path / "run", tmp_path / "model", steps=1, resize_embeddings=True, learning_rate=1e-12)
    )
    found = weights(tmp_path / "run")["model.model.embed_tokens.weight"]
    assert found.shape[0] == 290
    assert found[:100].allclose(pretrained.state_dict()["model.embed_tokens.weight"], atol=1e-6)


def test_what_does_not_fit_is_refused_in_a_sentence(store: Path, tmp_path: Path) -> None:
    model = config_folder(tmp_path / "model", "gpt2")
    with pytest.raises(ConfigError, match=r"max_seq_len=65 is more than model=.* has positions for: expected 64"):
        run_training(hf_config(store, tmp_path / "run", model, max_seq_len=65))
    (model / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match="weights as pickle alone, which could run code"):
        run_training(hf_config(store, tmp_path / "run", model))
    (tmp_path / "t5").mkdir()
    (tmp_path / "t5" / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(ConfigError, match="is a 't5', which is no causal language model"):
        run_training(hf_config(store, tmp_path / "run", tmp_path / "t5"))
    (tmp_path / "t5" / "config.json").write_text('{"model_type": "nothing known"}')
    with pytest.raises(ConfigError, match="cannot be had"):
        run_training(hf_config(store, tmp_path / "run", tmp_path / "t5"))


def test_without_transformers_the_way_to_get_it_is_named(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'transformers>=5'"):
        run_training(hf_config(store, tmp_path / "run", config_folder(tmp_path / "model", "gpt2")))


@pytest.mark.parametrize("kind", ["tiny", "gpt2"])
def test_an_exported_run_is_read_by_transformers_and_says_the_same(store: Path, tmp_path: Path, kind: str) -> None:
    model = kind if kind == "tiny" else str(config_folder(tmp_path / "model", kind))
    config = counting_config(store, tmp_path / "run", model=model, vocab_size=290, merge="mean", steps=4)
    result = run_training(config)
    assert export_run(str(tmp_path / "run"), str(tmp_path / "out")) == result.checkpoint_id
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.eos_token == "<|endoftext|>"
    from penstock.storage import open_storage
    from penstock.train.parts import RunParts, embedded_ledger

    storage = open_storage(tmp_path / "run")
    parts = RunParts(storage, embedded_ledger(storage))
    last = parts.ledger.last_commit()
    assert last is not None
    trainer = parts.trainer()
    trainer.load_state(parts.checkpoints.read(last.checkpoint_id, last.digest))
    trainer.model.eval()
    ids = torch.tensor([tokenizer("sample 7 says word word")["input_ids"]])
    with torch.no_grad():
        expected = trainer.model(ids, torch.arange(ids.shape[1])[None], torch.zeros_like(ids))
        assert exported(ids).logits.allclose(expected, atol=1e-5)


def test_what_cannot_be_exported_is_named(store: Path, tmp_path: Path) -> None:
    run_training(counting_config(store, tmp_path / "counts", steps=1))
    with pytest.raises(ConfigError, match="the counting model predicts nothing"):
        export_run(str(tmp_path / "counts"), str(tmp_path / "out"))
    with pytest.raises(ConfigError, match="holds no run"):
        export_run(str(tmp_path), str(tmp_path / "out"))


def test_a_model_is_trained_by_several_workers(tmp_path: Path) -> None:
    model = config_folder(tmp_path / "model", "gpt2")
    store = make_store(tmp_path)
    config = hf_config(store, tmp_path / "run", model, parallel_independent=True, workers=2, steps=12)
    recorder = Recorder()
    assert run_training(config, [recorder]).total_steps == 12
    assert {event["worker"] for event in recorder.of("step")} == {"worker-0", "worker-1"}
