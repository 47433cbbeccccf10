"""What a streamed run needs is known before it begins, and what does not fit is told with what would."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.train.streamed.planning import Plan, Task, make_plan, require_fit
from penstock.train.streamed.sizes import ModelSizes, sizes_of
from penstock.train.streamed.speeds import Speeds, peak_of

pytest.importorskip("transformers")

GIB = 2**30
QWEN_3B: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32768,
}
H200 = Speeds(flops=760e12, link_bytes=55e9, memory_bytes=140e9)
TASK = Task(batch_size=4, length=2048, parts=1, bf16=True, offload=False, world=1, ranks=1)


def sizes(ranks: int = 1, **changes: Any) -> ModelSizes:
    return sizes_of(json.dumps({**QWEN_3B, **changes}), vocab_size=1000, ranks=ranks)


@pytest.fixture(scope="module")
def qwen() -> ModelSizes:
    return sizes()


def plan_of(model: ModelSizes, task: Task = TASK, *, budget: float | None = 24, host: float = 120) -> Plan:
    room = None if budget is None else int(budget * GIB)
    return make_plan(model, task, speeds=H200, budget=room, host_free=int(host * GIB))


def test_sizes_are_known_without_building_the_model(qwen: ModelSizes) -> None:
    assert qwen.parameters == pytest.approx(3.086e9, rel=1e-3)
    assert len(qwen.units) == 37
    assert qwen.at_work == qwen.parameters  # tied: the embeddings are the head
    apart = sizes(tie_word_embeddings=False)
    assert apart.parameters - apart.at_work == 2048 * 151936


def test_a_token_meets_the_experts_it_is_sent_to() -> None:
    mixtral = {
        "model_type": "mixtral",
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 512,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }
    found = sizes_of(json.dumps(mixtral), vocab_size=512, ranks=1)
    experts = 2 * 8 * 3 * 64 * 256
    assert found.parameters - found.at_work == experts * 6 / 8 + 64 * 512


def test_the_host_holds_sixteen_bytes_a_parameter_and_each_rank_adds_its_gradients(qwen: ModelSizes) -> None:
    assert plan_of(qwen).host_bytes / qwen.parameters == pytest.approx(16.8, abs=1.0)
    two = plan_of(sizes(ranks=2), replace(TASK, world=2, ranks=2)).host_bytes
    more = two - plan_of(qwen).host_bytes
    assert more / qwen.parameters == pytest.approx(2 + 4, abs=0.5)  # gradients in bf16, and their sums


def test_what_the_budget_leaves_keeps_units_on_the_device_but_for_ranks(qwen: ModelSizes) -> None:
    kept = [plan_of(qwen, budget=budget).residents for budget in (10, 24, 48, 140)]
    assert kept == sorted(kept)
    assert kept[0] < kept[1] < kept[3] == 37
    assert plan_of(qwen, replace(TASK, world=2, ranks=2)).residents == 0
    assert plan_of(qwen, budget=None).residents == 0


def test_few_tokens_wait_for_the_host_and_many_for_the_device(qwen: ModelSizes) -> None:
    few = plan_of(qwen, replace(TASK, batch_size=1), budget=10)
    many = plan_of(qwen, replace(TASK, batch_size=32, parts=8), budget=24)
    assert (few.binds, many.binds) == ("link", "compute")
    assert many.compute_s == pytest.approx(8 * qwen.parameters * 65536 / 760e12)
    assert few.step_s == few.link_s > few.optimizer_s > few.compute_s
    shared = plan_of(sizes(ranks=2), replace(TASK, batch_size=1, world=2, ranks=2))
    assert shared.binds == "optimizer"  # of ranks nothing is stepped on the device


def test_a_model_too_large_for_the_host_is_refused_with_how_many_layers_would_fit(qwen: ModelSizes) -> None:
    with pytest.raises(ConfigError, match=r"3\.09 B parameters need .* 20 GiB are free: .* of its 36 layers") as told:
        require_fit(plan_of(qwen, host=20), qwen, TASK)
    found = re.search(r"with (\d+) of its", str(told.value))
    assert found is not None
    smaller = sizes(num_hidden_layers=int(found[1]))
    require_fit(plan_of(smaller, host=20), smaller, TASK)


@pytest.mark.parametrize("budget", [10.0, 7.5, 7.0])
def test_a_batch_too_large_for_the_device_is_refused_with_what_would_fit(qwen: ModelSizes, budget: float) -> None:
    task = replace(TASK, batch_size=16)
    with pytest.raises(ConfigError, match=r"sequences of 2048 tokens at a time need about .* would fit") as told:
        require_fit(plan_of(qwen, task, budget=budget), qwen, task)
    found = re.search(r"--gradient-accumulation-steps (\d+)", str(told.value))
    assert found is not None
    fits = replace(task, parts=int(found[1]), offload="--offload-activations" in str(told.value))
    require_fit(plan_of(qwen, fits, budget=budget), qwen, fits)


def test_a_budget_that_nothing_fits_says_the_least_there_is(qwen: ModelSizes) -> None:
    with pytest.raises(ConfigError, match=r"still needs .* GiB: raise --gpu-budget-gib"):
        require_fit(plan_of(qwen, budget=1), qwen, TASK)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA RTX A4000", None),
        ("Something else", None),
    ],
)
def test_peaks_are_known_by_name(name: str, peak: float | None) -> None:
    assert peak_of(name) == peak
