"""The recurrent model: what a token sees, how long it is pondered; it trains, resumes and leaves as others do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from equipment.hooks import Recorder
from equipment.training import counting_config, weights
from penstock.errors import ConfigError
from penstock.observe.run_folder import RunFolder
from penstock.train.exporting import export_run, load_exported_act
from penstock.train.models import build_model
from penstock.train.models.act import PONDER_COST, ActShape, RecurrentModel
from penstock.train.models.carrying import CarryModel, ChunkOutput
from penstock.train.run import run_training
from penstock.train.schedule import Schedule
from penstock.train.trainer import Trainer
from train.long_models import CPU, SMALL, VOCABULARY, recurrent
from train.test_trainer import batch_of

pytestmark = pytest.mark.usefixtures("one_thread", "forked_workers")

IDS = torch.randint(VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(0))


def read(model: RecurrentModel, ids: Tensor = IDS, documents: Tensor | None = None) -> ChunkOutput:
    documents = torch.zeros_like(ids) if documents is None else documents
    return model.forward_chunk(ids, ids, documents, model.initial_carry(len(ids), CPU))


def steps_of(output: ChunkOutput) -> Tensor:
    """How many ponder steps each token was given, weighted by how much of it halted where."""
    assert output.ponder_cost is not None
    return output.ponder_cost / PONDER_COST + 1


@pytest.mark.parametrize("halt_max_steps", [1, 3])
def test_a_token_sees_itself_and_earlier_ones_and_nothing_else(halt_max_steps: int) -> None:
    model = recurrent(halt_max_steps=halt_max_steps)
    other = IDS.clone()
    other[:, 17] = (IDS[:, 17] + 1) % VOCABULARY
    one, two = read(model).hidden, read(model, other).hidden
    assert one[:, :17].equal(two[:, :17])
    different = (one - two).abs().amax(-1)[:, 17:]
    assert (different > 0).all()


@pytest.mark.parametrize("halt_max_steps", [1, 3])
def test_documents_of_one_sequence_do_not_see_each_other_unless_they_may(halt_max_steps: int) -> None:
    documents = (torch.arange(40) >= 20).long().expand(2, -1)
    other = IDS.where(documents == 1, (IDS + 1) % VOCABULARY)
    apart = recurrent(halt_max_steps=halt_max_steps)
    one, two = (read(apart, ids, documents).hidden[:, 20:] for ids in (IDS, other))
    assert one.equal(two)
    alone = read(apart, IDS[:, 20:]).hidden
    assert one.allclose(alone, atol=1e-12)  # nothing is left of the first, not even that it was there
    together = recurrent(halt_max_steps=halt_max_steps, across_documents=True)
    one, two = (read(together, ids, documents).hidden[:, 20:] for ids in (IDS, other))
    assert not one.allclose(two, atol=1e-4)


def test_a_document_that_comes_back_under_the_same_number_is_another_one() -> None:
    documents = torch.tensor([[5] * 10 + [6] * 10 + [5] * 20]).expand(2, -1)
    model = recurrent()
    assert read(model, IDS, documents).hidden[:, 20:].allclose(read(model, IDS[:, 20:]).hidden, atol=1e-12)


def test_tokens_are_pondered_as_long_as_they_need() -> None:
    model = recurrent(halt_max_steps=3)
    steps = steps_of(read(model))
    assert steps.min() >= 1
    assert steps.max() <= 3
    assert steps.std() > 0.1
    segments = []
    carry = model.initial_carry(1, CPU)
    for token in IDS[:1].unbind(1):
        output = model.forward_chunk(token[None], token[None], torch.zeros(1, 1, dtype=torch.int64), carry)
        carry = output.carry
        segments.append(output.segments)
    assert set(segments) == {
        1,
        2,
        3,
    }  # that leaving steps out changes nothing, the rollout's tests say


def test_halting_leaves_the_carry_alone() -> None:
    model = recurrent(halt_max_steps=2)
    assert model.halt is not None
    before = read(model).carry
    uses = SMALL.uses
    assert before["memories"][:, uses:].abs().amax() > 0
    with torch.no_grad():
        model.halt.weight.zero_()
        model.halt.bias.fill_(50.0)  # from here on every token halts at once
    documents = torch.zeros_like(IDS)
    after = model.forward_chunk(IDS, IDS, documents, before)
    assert after.segments == 1
    assert after.carry["memories"][:, uses:].equal(before["memories"][:, uses:])
    assert not after.carry["memories"][:, :uses].allclose(before["memories"][:, :uses])
    hasty = read(model).carry["memories"][:, :uses]
    assert hasty.allclose(before["memories"][:, :uses], atol=1e-12)  # what is remembered of step 1 is not by halting
    ended = model.forward_chunk(IDS, IDS, documents + 1, before).carry
    assert not ended["memories"][:, uses:].any()  # another document has nothing of it


def test_the_halting_head_learns_and_pays_for_every_step() -> None:
    model = recurrent(halt_max_steps=3)
    assert model.halt is not None
    output = read(model)
    assert output.ponder_cost is not None
    (of_cost,) = torch.autograd.grad(output.ponder_cost.sum(), model.halt.bias, retain_graph=True)
    assert of_cost < 0  # halting sooner costs less
    of_loss = torch.autograd.grad(model.loss_of(output.hidden, IDS), list(model.halt.parameters()))
    assert all(gradient.abs().max() > 1e-6 for gradient in of_loss)


def test_one_step_needs_no_head_and_costs_nothing() -> None:
    output = read(recurrent(halt_max_steps=1))
    assert recurrent(halt_max_steps=1).halt is None
    assert output.segments == 1
    assert output.ponder_cost is not None
    assert not output.ponder_cost.any()


def test_fewer_segments_than_the_model_has_are_all_there_are() -> None:
    model = recurrent(halt_max_steps=3)
    carry = model.initial_carry(2, CPU)
    bounded = model.forward_chunk(IDS, IDS, torch.zeros_like(IDS), carry, max_segments=1)
    assert bounded.segments == 1
    assert steps_of(bounded).eq(1).all()
    assert not bounded.carry["memories"][:, SMALL.uses :].any()


def test_a_shape_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="dim a multiple of heads"):
        ActShape(dim=10, heads=4)
    with pytest.raises(ConfigError, match="halt_max_steps=0 computes nothing"):
        recurrent(halt_max_steps=0)


def trainer(precision: str = "fp32") -> Trainer:
    model = recurrent(halt_max_steps=2, dtype=torch.float32)
    assert isinstance(model, CarryModel)
    return Trainer(model, schedule=Schedule(learning_rate=1e-2), precision="bf16" if precision == "bf16" else "fp32")


def test_bf16_computes_what_fp32_does_nearly() -> None:
    batch = batch_of(list(range(1, 25)), list(range(24, 0, -1)), length=16)
    exact, rough = trainer(), trainer("bf16")
    losses = [[subject.step(batch, number).loss for number in range(1, 7)] for subject in (exact, rough)]
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=0.05)
    assert losses[0][-1] < losses[0][0]


def test_padding_teaches_nothing() -> None:
    short, long = trainer(), trainer()
    results = [short.step(batch_of([1, 2, 3, 4], length=4), 1), long.step(batch_of([1, 2, 3, 4], length=12), 1)]
    assert results[0].num_tokens == results[1].num_tokens == 3
    assert results[0].loss == pytest.approx(results[1].loss, rel=1e-5)
    assert results[0].grad_norm == pytest.approx(results[1].grad_norm, rel=1e-4)


def test_matrices_decay_and_shares_norms_and_biases_do_not() -> None:
    subject = trainer()
    decay = {id(p): group["weight_decay"] for group in subject.optimizer.param_groups for p in group["params"]}
    for name, parameter in subject.model.named_parameters():
        plain = any(word in name for word in ("norm", "bias", "shares"))
        assert decay[id(parameter)] == (0.0 if plain else 0.1), name


def test_a_resumed_run_is_bit_identical_and_its_export_says_the_same(store: Path, tmp_path: Path) -> None:
    settings = {"model": "act", "merge": "mean", "halt_max_steps": 2}
    run_training(counting_config(store, tmp_path / "whole", steps=6, **settings))
    for steps in (2, 6):
        result = run_training(counting_config(store, tmp_path / "parts", steps=steps, **settings))
    expected, found = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(found[name].equal(expected[name]) for name in expected)
    assert "model.halt.weight" in expected
    assert export_run(str(tmp_path / "parts"), str(tmp_path / "out")) == result.checkpoint_id
    exported = load_exported_act(str(tmp_path / "out"))
    assert exported.halt_max_steps == 2
    for name, tensor in exported.state_dict().items():
        assert tensor.equal(expected[f"model.{name}"])
    assert exported(IDS, IDS, torch.zeros_like(IDS)).isfinite().all()
    with pytest.raises(ConfigError, match="was begun with other settings: halt_max_steps: got 3, expected 2"):
        run_training(counting_config(store, tmp_path / "parts", steps=8, **{**settings, "halt_max_steps": 3}))


@pytest.mark.parametrize("way", [{"parallel_independent": True, "workers": 2}, {"ddp": True, "workers": 2}])
def test_several_workers_train_it(store: Path, tmp_path: Path, way: dict[str, object]) -> None:
    recorder = Recorder()
    config = counting_config(store, tmp_path, model="act", merge="mean", halt_max_steps=2, steps=6, **way)
    assert run_training(config, [recorder]).total_steps == 6
    assert all(event["loss"] < 10 for event in recorder.of("step"))
    torch.manual_seed(config.seed)
    vocab_size = RunFolder(tmp_path).config["vocab_size"]
    begun = build_model("act", vocab_size=vocab_size, total_samples=1, halt_max_steps=2).state_dict()
    learned = weights(tmp_path)
    assert learned.keys() == {f"model.{name}" for name in begun}
    assert all(not learned[f"model.{name}"].equal(tensor) for name, tensor in begun.items())
