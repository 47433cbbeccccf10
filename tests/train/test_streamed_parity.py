"""Before it learns, a streamed model is compared with itself as a whole; one that differs is not trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.errors import TrainError
from penstock.train.optimizers import AdamSettings
from penstock.train.streamed import StreamedTrainer
from penstock.train.streamed.decoder import Call, Decoder
from penstock.train.trainer import Precision
from train.streamed_models import FAMILIES, GPT2, LLAMA, PACKED, QWEN2, batch, model, schedule

pytestmark = pytest.mark.usefixtures("one_thread")
BOTH = pytest.mark.parametrize("precision", ["fp32", "bf16"])


def trainer_of(config: dict[str, Any], **more: Any) -> StreamedTrainer:
    return StreamedTrainer(model(config), schedule=schedule(), **more)


@BOTH
@pytest.mark.parametrize(
    "family", ["qwen2, tied", "gemma2, soft caps and windows", "mixtral", "opt, a mask of its own", "llama, one layer"]
)
def test_models_that_are_taken_apart_rightly_pass(family: str, precision: Precision) -> None:
    trainer = trainer_of(FAMILIES[family], precision=precision)
    trainer.check_parity()
    trainer.close()


@BOTH
@pytest.mark.parametrize("family", ["llama", "qwen3", "olmo2"])
def test_models_with_fused_modules_are_held_against_themselves_without(
    family: str, precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(FAMILIES[family], precision=precision)
    trainer.streaming.fused.on()  # as on a GPU
    trainer.check_parity()
    monkeypatch.setattr(torch.nn.functional, "rms_norm", lambda states, *_: 2 * states)
    with pytest.raises(TrainError, match="streamed"):
        trainer.check_parity()
    trainer.close()


@BOTH
def test_the_check_leaves_no_trace(precision: Precision) -> None:
    config = {**GPT2, "resid_pdrop": 0.3, "embd_pdrop": 0.3}
    checked, other = (trainer_of(config, precision=precision) for _ in range(2))
    fed = batch(PACKED)
    for step in (1, 2, 3):
        torch.manual_seed(step)
        expected = other.step(fed, step)
        torch.manual_seed(step)
        checked.check_parity()
        assert checked.step(fed, step) == expected
        if step == 2:
            checked.use_device(2, (3,))
            other.use_device(2, (3,))
    assert all(module.training for module in checked.model.lm.modules())
    assert all(a.equal(b) for a, b in zip(checked.state().values(), other.state().values(), strict=True))
    checked.close()
    other.close()


@BOTH
@pytest.mark.parametrize("wrong", ["mask", "residual", "rotation", "gradient"])
def test_a_model_that_computes_something_else_is_refused(
    precision: Precision, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Decoder.layer

    def layer(self: Decoder, number: int, states: Tensor, call: Call) -> Tensor:
        kwargs = dict(call.kwargs)
        if wrong == "mask":
            kwargs["attention_mask"] = None
        if wrong == "rotation":
            kwargs["position_embeddings"] = tuple(each.flip(1) for each in kwargs["position_embeddings"])
        out = right(self, number, states, Call(call.args, kwargs))
        if wrong == "residual" and number == 1:
            return out - states
        return out.detach() + states - states.detach() if wrong == "gradient" and number == 1 else out

    monkeypatch.setattr(Decoder, "layer", layer)
    trainer = trainer_of(LLAMA, precision=precision)
    before = {name: tensor.clone() for name, tensor in trainer.state().items()}
    with pytest.raises(
        TrainError, match=r"streamed, the (model's loss|gradient of model\.\S+) on a small batch.*expected"
    ):
        trainer.check_parity()
    assert all(tensor.equal(before[name]) for name, tensor in trainer.state().items())
    monkeypatch.undo()
    trainer.check_parity()
    trainer.close()


def test_the_refusal_names_the_gradient_that_is_worst(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of(QWEN2)
    found = trainer.streaming.gradients_of

    def altered(unit: Any) -> Tensor:
        gradients = found(unit).clone()
        for place in unit.places:
            if place.name == "model.layers.1.mlp.up_proj.weight":
                place.of(gradients).mul_(1.01)
        return gradients

    monkeypatch.setattr(trainer.streaming, "gradients_of", altered)
    with pytest.raises(
        TrainError, match=r"gradient of model\.layers\.1\.mlp\.up_proj\.weight.*norm [\d.]+, expected [\d.]+"
    ):
        trainer.check_parity()
    trainer.close()


def test_gradients_that_are_not_numbers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of(QWEN2)
    monkeypatch.setattr(trainer.streaming, "gradients_of", lambda unit: torch.full((unit.size,), torch.nan))
    with pytest.raises(TrainError, match=r"has norm nan"):
        trainer.check_parity()
    trainer.close()


def with_spare(*, trained: bool) -> Any:
    """A model with a matrix in a layer that takes no part."""
    learner = model(LLAMA)
    mlp: Any = learner.lm.model.layers[1].mlp  # pyright: ignore
    mlp.spare = torch.nn.Parameter(torch.ones(4, 4), requires_grad=trained)
    return learner


def test_weights_without_a_part_in_the_loss_are_refused_where_they_would_decay() -> None:
    trainer = StreamedTrainer(with_spare(trained=True), schedule=schedule())
    with pytest.raises(TrainError, match=r"layers\.1\.mlp\.spare of llama take no part in its loss.*weight_decay=0"):
        trainer.check_parity()
    trainer.close()
    trainer = StreamedTrainer(with_spare(trained=True), schedule=schedule(), adam=AdamSettings(weight_decay=0.0))
    trainer.check_parity()
    trainer.step(batch(PACKED), 1)
    assert trainer.state()["model.model.layers.1.mlp.spare"].equal(torch.ones(4, 4))
    trainer.close()


def test_weights_that_are_not_trained_stay_what_they_are() -> None:
    from penstock.train.trainer import Trainer

    fed = batch(PACKED)
    plain, trainer = (
        Trainer(with_spare(trained=False), schedule=schedule()),
        StreamedTrainer(with_spare(trained=False), schedule=schedule()),
    )
    trainer.check_parity()
    for step in (1, 2):
        assert trainer.step(fed, step).loss == pytest.approx(plain.step(fed, step).loss, rel=1e-6)
    found, expected = trainer.state(), plain.state()
    assert found["model.model.layers.1.mlp.spare"].equal(torch.ones(4, 4))
    assert found.keys() == expected.keys()
    for name in expected.keys() - {"rng.torch"}:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-3, atol=1e-4)
    trainer.close()
