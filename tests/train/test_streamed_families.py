"""A decoder that is streamed has the loss and the gradients that it has as a whole, whatever its family."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.errors import ConfigError
from penstock.train.models import Transformer
from penstock.train.models.transformer import Shape
from penstock.train.streamed import StreamedTrainer
from penstock.train.streamed.fused import Fused
from train.streamed_models import (
    FAMILIES,
    GPT2,
    LLAMA,
    PACKED,
    QWEN2,
    VOCABULARY,
    WHOLE,
    batch,
    model,
    ordinary,
    schedule,
    streamed,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def check_same(
    config: dict[str, Any], rows: list[list[int]], *, vocab_size: int = VOCABULARY, fused: bool = False, **more: Any
) -> None:
    fed = batch(rows, vocabulary=vocab_size)
    plain, own = model(config, vocab_size=vocab_size), model(config, vocab_size=vocab_size)
    torch.manual_seed(1)
    loss, expected = ordinary(plain, fed)
    trainer = StreamedTrainer(own, schedule=schedule(), max_grad_norm=1.0, **more)
    if fused:  # as on a GPU
        trainer.streaming.fused.on()
    torch.manual_seed(1)
    found_loss, found = streamed(trainer, fed)
    trainer.close()
    assert found_loss == pytest.approx(loss, rel=1e-6)
    assert found.keys() == expected.keys()
    whole = torch.stack([each.norm() for each in expected.values()]).norm()
    for name, each in expected.items():
        torch.testing.assert_close(
            found[name], each, rtol=0, atol=1e-5 * float(torch.maximum(each.norm(), 1e-3 * whole)), msg=name
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_documents_packed_and_padded_are_learned_as_by_the_whole_model(family: str) -> None:
    check_same(FAMILIES[family], PACKED)


@pytest.mark.parametrize(
    "family", ["llama", "mistral, window", "gemma3, two rotations", "falcon", "opt, a mask of its own"]
)
def test_sequences_of_one_document_need_no_mask(family: str) -> None:
    check_same(FAMILIES[family], WHOLE)


@pytest.mark.parametrize(
    ("family", "norms", "gates"),
    [
        ("llama", 7, 3),
        ("qwen2, tied", 7, 3),
        ("qwen3", 13, 3),
        ("gemma", 0, 0),  # adds 1 to weights; its gates are not of silu
        ("phi3", 7, 0),  # has gate and up in one
        ("mixtral", 7, 0),
        ("qwen3_moe, some layers dense", 13, 1),
        ("olmo2", 13, 3),
        ("gpt2", 0, 0),
    ],
)
def test_norms_and_gates_that_are_fused_compute_the_same(family: str, norms: int, gates: int) -> None:
    check_same(FAMILIES[family], PACKED, fused=True)
    found = Fused(model(FAMILIES[family]).lm)
    assert len(found) == norms + gates


def test_fused_modules_are_the_models_own_again_where_that_is_wanted() -> None:
    lm: Any = model(LLAMA).lm
    fused, norm = Fused(lm), lm.model.norm
    own = norm.forward
    fused.on()
    assert norm.forward != own
    with fused.without():
        assert norm.forward == own
    assert norm.forward != own
    fused.off()
    assert norm.forward == own
    with fused.without():
        pass
    assert norm.forward == own


@pytest.mark.parametrize(
    "config", [LLAMA, QWEN2, GPT2], ids=["untied", "tied", "tied, with positions that are learned"]
)
def test_embeddings_may_be_more_than_the_models_config_has(config: dict[str, Any]) -> None:
    check_same(config, PACKED, vocab_size=VOCABULARY + 6)


def test_parts_of_a_batch_are_added_up() -> None:
    check_same(LLAMA, PACKED, accumulation=3)


def test_dropout_draws_once_and_the_backward_pass_draws_the_same() -> None:
    check_same({**GPT2, "attn_pdrop": 0.3, "resid_pdrop": 0.3, "embd_pdrop": 0.3}, PACKED)


def test_layers_may_draw_random_numbers_where_the_first_does_not() -> None:
    fed = batch(PACKED)
    plain, own = model(GPT2), model(GPT2)
    for learner in (plain, own):
        layers: Any = learner.lm.transformer.h  # pyright: ignore
        layers[1].mlp.dropout.p = 0.3
    torch.manual_seed(1)
    _, expected = ordinary(plain, fed)
    trainer = StreamedTrainer(own, schedule=schedule())
    torch.manual_seed(1)
    _, found = streamed(trainer, fed)
    trainer.close()
    for name, each in expected.items():
        torch.testing.assert_close(found[name], each, rtol=0, atol=1e-5 * max(1e-2, float(each.norm())), msg=name)


def test_opening_a_model_draws_no_random_numbers() -> None:
    learner = model({**GPT2, "resid_pdrop": 0.3})
    before = torch.get_rng_state()
    StreamedTrainer(learner, schedule=schedule()).close()
    assert torch.equal(before, torch.get_rng_state())


def test_a_model_that_is_not_of_transformers_is_refused() -> None:
    built_in = Transformer(Shape(dim=16, layers=1, heads=2), vocab_size=VOCABULARY)
    with pytest.raises(ConfigError, match="only models of transformers can be streamed"):
        StreamedTrainer(built_in, schedule=schedule())


def test_layers_that_hand_on_more_than_states_are_refused() -> None:
    config = {"model_type": "rwkv", "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2}
    with pytest.raises(ConfigError, match=r"rwkv cannot be streamed, it cannot be taken apart.*leave --streamed away"):
        StreamedTrainer(model(config), schedule=schedule())


def test_layers_that_share_weights_are_refused() -> None:
    learner = model(LLAMA)
    layers: Any = learner.lm.model.layers  # pyright: ignore
    layers[1].mlp = layers[0].mlp
    with pytest.raises(ConfigError, match="llama cannot be streamed, layers share weights"):
        StreamedTrainer(learner, schedule=schedule())


def test_layers_that_are_handed_something_learned_are_refused() -> None:
    learner = model(LLAMA)
    base: Any = learner.lm.model  # pyright: ignore
    base.rotary_emb.register_forward_hook(lambda _, __, output: (output[0] * base.norm.weight[:8], output[1]))
    with pytest.raises(ConfigError, match="handed more than states that is learned"):
        StreamedTrainer(learner, schedule=schedule())
