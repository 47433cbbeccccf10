"""Sequences learned in chunks have the loss and the gradients that they have as a whole."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock import chunked_segment_rollout
from penstock.errors import ConfigError
from penstock.feed import IGNORED_LABEL, Batch
from penstock.train.device_batch import DeviceBatch, to_device
from penstock.train.long import kernels
from penstock.train.long.chunkable import chunkable
from penstock.train.long.exact import ExactChunks
from penstock.train.long.measuring import SavedBytes
from penstock.train.models import CountingModel, Learner, Transformer
from penstock.train.models.huggingface import CausalLM
from penstock.train.models.transformer import Shape
from penstock.train.trainer import computing

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY = 61
CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SIZES},
    "qwen2": {"model_type": "qwen2", **SIZES},
    "gpt2": GPT2,
    "deep llama, of which several chunks are read at once": {"model_type": "llama", **SIZES, "num_hidden_layers": 9},
    "mistral with a window": {"model_type": "mistral", **SIZES, "sliding_window": 9},
    "gemma2: windows, soft caps": {"model_type": "gemma2", **SIZES, "head_dim": 8, "sliding_window": 9},
    "qwen3": {"model_type": "qwen3", **SIZES, "head_dim": 8},
    "mixtral": {"model_type": "mixtral", **SIZES, "num_local_experts": 3},
    "granite: scaled logits": {"model_type": "granite", **SIZES, "logits_scaling": 2.0},
    "opt: a mask of its own": {
        "model_type": "opt",
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "word_embed_proj_dim": 32,
        "dropout": 0.0,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
}


def hugging_face(config: dict[str, Any], **more: Any) -> CausalLM:
    torch.manual_seed(0)
    return CausalLM(json.dumps({**config, **more}), vocab_size=VOCABULARY)


def built_in(*, layers: int = 2, across_documents: bool = False) -> Transformer:
    torch.manual_seed(0)
    shape = Shape(dim=32, layers=layers, heads=2)
    return Transformer(shape, vocab_size=VOCABULARY, across_documents=across_documents)


def batch(
    sequences: int, length: int, *, cuts: int = 3, padding: int = 0, left: bool = False, seed: int = 0
) -> DeviceBatch:
    """Random documents packed into sequences, with padding behind or before them, labels and positions as a feed's."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, VOCABULARY, (sequences, length))
    documents = np.sort(rng.integers(0, cuts + 1, (sequences, length)), axis=1)
    documents[:, slice(0, padding) if left else slice(length - padding, length)] = -1
    begins = np.ones_like(documents, np.bool_)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    indices = np.arange(length)
    labels = np.full_like(ids, IGNORED_LABEL)
    labels[:, :-1] = np.where(begins[:, 1:] | (documents[:, 1:] < 0), IGNORED_LABEL, ids[:, 1:])
    made = Batch(
        input_ids=ids,
        labels=labels,
        position_ids=indices - np.maximum.accumulate(np.where(begins, indices, 0), axis=1),
        document_ids=documents,
        sample_ids=np.zeros(0, np.int64),
        spans=np.zeros((0, 3), np.int64),
        start_offset=0,
        stop_offset=sequences,
        samples_done=0,
    )
    return to_device(made, CPU)


def gradients(model: Learner) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for parameter in model.parameters():
        parameter.grad = None
    return found


def learned_whole(model: Learner, fed: DeviceBatch) -> tuple[float, dict[str, Tensor]]:
    loss = model.loss_sum(fed, slice(None)) / max(1, fed.num_tokens)
    loss.backward()
    return float(loss.detach()), gradients(model)


def learned_in_chunks(model: Learner, fed: DeviceBatch, chunk_size: int) -> tuple[float, dict[str, Tensor]]:
    loss = ExactChunks(chunkable(model), chunk_size).learn(fed, slice(None), max(1, fed.num_tokens))
    return float(loss), gradients(model)


def check_same(found: tuple[float, dict[str, Tensor]], expected: tuple[float, dict[str, Tensor]]) -> None:
    assert abs(found[0] - expected[0]) < 1e-6
    assert found[1].keys() == expected[1].keys()
    largest = max(float(grad.norm()) for grad in expected[1].values())
    for name, grad in expected[1].items():
        # Some are 0 but for rounding, as those of a bias that shifts all scores alike: they are held to the largest.
        assert float((found[1][name] - grad).norm()) <= 1e-5 * max(float(grad.norm()), 1e-3 * largest), name


@pytest.mark.parametrize(
    ("name", "cuts", "padding", "left"),
    [
        *(
            (name, *case)
            for name in ("llama", "qwen2", "gpt2")
            for case in ((0, 0, False), (3, 0, False), (1, 6, True))
        ),
        *((name, 2, 5, False) for name in MODELS),
    ],
)
def test_loss_and_gradients_are_those_of_the_whole(name: str, cuts: int, padding: int, left: bool) -> None:
    model = hugging_face(MODELS[name])
    fed = batch(2, 41, cuts=cuts, padding=padding, left=left)
    check_same(learned_in_chunks(model, fed, 7), learned_whole(model, fed))


@settings(max_examples=25, deadline=None)
@given(
    length=st.integers(1, 60),
    chunk_size=st.integers(1, 70),
    sequences=st.integers(1, 3),
    cuts=st.integers(0, 6),
    padding=st.integers(0, 5),
    layers=st.sampled_from([1, 9]),
    across=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_cut_of_any_documents_gives_the_same(
    length: int, chunk_size: int, sequences: int, cuts: int, padding: int, layers: int, across: bool, seed: int
) -> None:
    model = built_in(layers=layers, across_documents=across)
    fed = batch(sequences, length, cuts=cuts, padding=min(padding, length), seed=seed)
    check_same(learned_in_chunks(model, fed, chunk_size), learned_whole(model, fed))


@pytest.mark.parametrize("name", ["mistral with a window", "gemma2: windows, soft caps"])
def test_scores_that_would_be_too_many_are_computed_in_parts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_SCORES_BYTES", 2_000)
    model = hugging_face(MODELS[name])
    fed = batch(2, 41, cuts=2, padding=4)
    check_same(learned_in_chunks(model, fed, 17), learned_whole(model, fed))


def test_evaluation_in_chunks_says_what_the_whole_does() -> None:
    model = hugging_face(MODELS["deep llama, of which several chunks are read at once"])
    fed = batch(2, 45)
    whole = model.loss_sum(fed, slice(None)).detach()
    assert float(ExactChunks(chunkable(model), 4).loss_sum(fed, slice(None))) == pytest.approx(float(whole), abs=1e-5)
    assert not gradients(model)


def test_memory_is_used_again_for_batches_of_other_sizes() -> None:
    model = built_in()
    chunks = ExactChunks(chunkable(model), 8)
    for sequences, length, seed in [(2, 40, 0), (2, 40, 1), (1, 40, 2), (3, 13, 3), (2, 40, 4)]:
        fed = batch(sequences, length, seed=seed)
        loss = chunks.learn(fed, slice(None), fed.num_tokens)
        check_same((float(loss), gradients(model)), learned_whole(model, fed))


def test_some_sequences_of_a_batch_are_learned_alone() -> None:
    model = built_in()
    fed = batch(5, 30)
    chunks = ExactChunks(chunkable(model), 8)
    loss = sum(float(chunks.learn(fed, slice(start, start + 2), fed.num_tokens)) for start in (0, 2, 4))
    check_same((loss, gradients(model)), learned_whole(model, fed))


@pytest.mark.parametrize("which", ["attn_pdrop", "resid_pdrop"])
def test_dropout_is_the_same_when_a_chunk_is_computed_again(which: str) -> None:
    """Against differences of the loss: with the same dice it is a function of the weights."""
    model = hugging_face(GPT2, **{which: 0.3}).double()
    fed = batch(2, 30)

    def loss() -> float:
        torch.manual_seed(5)
        return float(ExactChunks(chunkable(model), 7).learn(fed, slice(None), fed.num_tokens))

    before = loss()
    found = gradients(model)
    assert loss() == before
    gradients(model)
    directions = {name: torch.randn_like(parameter) for name, parameter in model.named_parameters()}
    losses: list[float] = []
    for size in (1e-6, -2e-6):  # to one side and to the other
        for name, parameter in model.named_parameters():
            parameter.data.add_(directions[name], alpha=size)
        losses.append(loss())
    expected = sum(float((found[name] * direction).sum()) for name, direction in directions.items())
    assert (losses[0] - losses[1]) / 2e-6 == pytest.approx(expected, rel=1e-5)


def test_random_numbers_go_on_as_if_each_chunk_were_computed_once() -> None:
    model = hugging_face(GPT2, resid_pdrop=0.3)
    fed = batch(1, 30)
    after: list[Tensor] = []
    for learn in (True, False):
        torch.manual_seed(5)
        chunks = ExactChunks(chunkable(model), 7)
        if learn:
            chunks.learn(fed, slice(None), fed.num_tokens)
        else:
            chunks.loss_sum(fed, slice(None))
        after.append(torch.rand(3))
    assert after[0].equal(after[1])


def test_bf16_is_as_near_in_chunks_as_it_is_as_a_whole() -> None:
    model = hugging_face(MODELS["qwen2"])
    fed = batch(2, 60)
    _, exact = learned_whole(model, fed)
    with computing(CPU, "bf16"):
        loss = model.loss_sum(fed, slice(None)) / fed.num_tokens
    loss.backward()
    whole = gradients(model)
    ExactChunks(chunkable(model), 16).learn(fed, slice(None), fed.num_tokens, lambda: computing(CPU, "bf16"))
    found = gradients(model)

    def far(grads: dict[str, Tensor]) -> float:
        return max(float((grads[name] - grad).norm() / grad.norm()) for name, grad in exact.items())

    assert 0 < far(found) < 2 * far(whole)


def test_memory_grows_by_no_more_than_keys_and_values() -> None:
    layers, heads = 2, 2
    model = hugging_face(
        {"model_type": "llama", **SIZES, "num_hidden_layers": layers, "max_position_embeddings": 1 << 13}
    )
    peaks: dict[int, int] = {}
    for length in (1_024, 8_192):
        fed = batch(1, length, cuts=0)
        with SavedBytes(*model.parameters()) as saved:
            ExactChunks(chunkable(model), 256).learn(fed, slice(None), fed.num_tokens)
        assert saved.alive == 0
        peaks[length] = saved.peak
    cache = 2 * layers * heads * 8 * 4  # keys and values, a token
    assert peaks[8_192] - peaks[1_024] <= 7_168 * cache


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "state space": (
        {"model_type": "mamba", "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 1},
        "choose a model with full or sliding attention",
    ),
    "attention of its own": (
        {"model_type": "bloom", "vocab_size": VOCABULARY, "hidden_size": 16, "n_layer": 1, "n_head": 2},
        "attends in a way of its own: leave it away, or choose a model",
    ),
    "chunked attention": (
        {"model_type": "llama4_text", **SIZES, "head_dim": 8, "attention_chunk_size": 8, "num_local_experts": 2},
        "has layers of chunked_attention",
    ),
    "stretched positions": (
        {"model_type": "llama", **SIZES, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        "expected max_seq_len of at most 256",
    ),
    "layers left out at random": (
        {**MODELS["opt: a mask of its own"], "layerdrop": 0.1},
        "set layerdrop to 0 in its config.json",
    ),
    "a window that attention is not told of, longer than what is tried": (
        {"model_type": "phimoe", **SIZES, "num_local_experts": 3, "sliding_window": 64},
        "gives other logits in chunks",
    ),
    "a mask of its own, which fresh weights leave alone": (
        {"model_type": "doge", **SIZES},
        "makes a mask of its own",
    ),
    "layers that attend more than once": (
        {"model_type": "hrm_text", **SIZES, "initializer_range": 1e-4},
        "attends more than once",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_be_cut_is_refused_with_what_to_change(name: str) -> None:
    config, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        chunkable(hugging_face(config), longest=512)


def test_stretched_positions_are_taken_where_no_sequence_is_long_enough_to_stretch_them() -> None:
    model = hugging_face(REFUSED["stretched positions"][0])
    fed = batch(1, 40)
    chunkable(model, longest=256)
    loss = ExactChunks(chunkable(model, longest=256), 9).learn(fed, slice(None), fed.num_tokens)
    check_same((float(loss), gradients(model)), learned_whole(model, fed))


def test_a_model_whose_tokens_meet_elsewhere_is_found_out() -> None:
    """A convolution over tokens, as some models have beside attention, sees nothing of the chunk before."""
    model = hugging_face(MODELS["llama"])
    first: Any = model.lm.model.layers[0].mlp  # pyright: ignore
    inner = first.forward
    first.forward = lambda hidden: inner(hidden) + hidden.roll(1, 1)  # pyright: ignore
    with pytest.raises(ConfigError, match="gives other logits in chunks than as a whole"):
        chunkable(model)


def test_layers_that_would_compute_themselves_again_give_the_same() -> None:
    """A config may ask for activation checkpointing: its second computation would come when the chunk is gone."""
    model = hugging_face(MODELS["llama"], gradient_checkpointing=True)
    fed = batch(2, 41)
    check_same(learned_in_chunks(model, fed, 7), learned_whole(model, fed))
    assert model.lm.is_gradient_checkpointing


@pytest.mark.parametrize("frozen", ["layers", "embeddings", "layers and all but a query"])
def test_frozen_weights_are_left_alone_and_the_others_learn_as_ever(frozen: str) -> None:
    model = hugging_face(MODELS["llama"])
    lm: Any = model.lm
    for parameter in (lm.model.embed_tokens if frozen == "embeddings" else lm.model).parameters():
        parameter.requires_grad_(False)
    if frozen == "layers and all but a query":
        lm.model.layers[0].self_attn.q_proj.weight.requires_grad_(True)
    fed = batch(2, 41)
    check_same(learned_in_chunks(model, fed, 7), learned_whole(model, fed))


def test_models_of_two_threads_learn_at_a_time() -> None:
    fed = batch(2, 41)
    models = [hugging_face(MODELS["llama"]) for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda model: [learned_in_chunks(model, fed, 3) for _ in range(5)], models))
    expected = learned_whole(models[0], fed)
    for learned in (*found[0], *found[1]):
        check_same(learned, expected)


def test_windows_are_as_they_were_once_a_model_is_tried() -> None:
    model = hugging_face(MODELS["gemma2: windows, soft caps"])
    layers: Any = model.lm.model.layers  # pyright: ignore
    before = [layer.self_attn.sliding_window for layer in layers]
    chunkable(model)
    assert [layer.self_attn.sliding_window for layer in layers] == before == [9, None]
    assert model.lm.config.sliding_window == 9  # pyright: ignore


def test_a_model_that_reads_no_sequences_is_refused() -> None:
    with pytest.raises(ConfigError, match="choose tiny, small, act or a model of transformers"):
        chunkable(CountingModel(3))


def test_a_model_is_left_as_it_was() -> None:
    model = hugging_face(MODELS["llama"])
    fed = batch(1, 30)
    before = learned_whole(model, fed)
    learned_in_chunks(model, fed, 7)
    check_same(learned_whole(model, fed), before)
    assert model.lm.config._attn_implementation == "sdpa"  # pyright: ignore


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_model_of_transformers_is_rolled_out_with_the_gradients_of_the_whole(name: str) -> None:
    """As users have it: the model itself, padded on one side or the other, in the middle of a loop of their own."""
    model = hugging_face(MODELS[name])
    lengths = (23, 9, 17)
    rows = [torch.randint(1, VOCABULARY, (length,)) for length in lengths]
    found: list[tuple[float, dict[str, Tensor]]] = []
    for left in (False, True):
        ids, mask = torch.zeros(3, 23, dtype=torch.int64), torch.zeros(3, 23, dtype=torch.int64)
        for number, row in enumerate(rows):
            place = slice(23 - len(row), None) if left else slice(0, len(row))
            ids[number, place], mask[number, place] = row, 1
        result = chunked_segment_rollout(model.lm, {"input_ids": ids, "attention_mask": mask}, chunk_size=5)
        assert (result.num_tokens, result.segments, result.carry) == (sum(lengths) - 3, (1,) * 5, {})
        found.append((float(result.loss), gradients(model)))
    check_same(found[1], found[0])
    total = torch.zeros((), dtype=torch.float64)
    for row in rows:
        logits = model.lm(input_ids=row[None, :-1]).logits[0]
        total = total + torch.nn.functional.cross_entropy(logits, row[1:], reduction="none").double().sum()
    (total / (sum(lengths) - 3)).backward()
    check_same(found[0], (float(total.detach()) / (sum(lengths) - 3), gradients(model)))


def test_without_gradients_a_rollout_is_the_loss_alone_and_a_carry_is_refused() -> None:
    model = hugging_face(MODELS["llama"]).eval()
    ids = torch.arange(20)[None]
    with torch.no_grad():
        alone = chunked_segment_rollout(model.lm, {"input_ids": ids}, chunk_size=6)
    assert not gradients(model)
    assert not model.lm.training
    learned = chunked_segment_rollout(model.lm, {"input_ids": ids}, chunk_size=6)
    assert float(learned.loss_sum) == pytest.approx(float(alone.loss_sum), rel=1e-6)
    with pytest.raises(ConfigError, match="has no carry to read on with"):
        chunked_segment_rollout(model.lm, {"input_ids": ids}, carry={"state": ids})
