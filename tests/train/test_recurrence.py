"""The gated delta rule in blocks is the one token by token; the loss without logits is the one with them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as nnf
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.feed import IGNORED_LABEL
from penstock.train.models import vocabulary_loss as losses
from penstock.train.models.recurrence import delta_rule
from penstock.train.models.vocabulary_loss import vocabulary_loss

pytestmark = pytest.mark.usefixtures("one_thread")


def token_by_token(
    query: Tensor, key: Tensor, value: Tensor, log_keep: Tensor, strength: Tensor, documents: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """As the module's docstring says it."""
    found = []
    current = torch.zeros_like(documents[:, 0])
    for at in range(query.shape[1]):
        memory = memory * (documents[:, at] == current)[:, None, None, None]
        current = documents[:, at]
        memory = memory * log_keep[:, at].exp()[..., None, None]
        said = torch.einsum("shkv,shk->shv", memory, key[:, at])
        change = strength[:, at, :, None] * (value[:, at] - said)
        memory = memory + key[:, at][..., None] * change[..., None, :]
        found.append(torch.einsum("shkv,shk->shv", memory, query[:, at]))
    return torch.stack(found, 1), memory


@settings(max_examples=25, deadline=None)
@given(
    length=st.integers(1, 150),
    documents=st.integers(1, 6),
    strongest=st.sampled_from([0.0, 0.5, 1.0]),
    forgetting=st.sampled_from([0.0, 0.01, 1.0, 30.0]),
    seed=st.integers(0, 2**20),
)
def test_blocks_and_single_tokens_give_the_same_with_the_same_gradients(
    length: int, documents: int, strongest: float, forgetting: float, seed: int
) -> None:
    chance = torch.Generator().manual_seed(seed)

    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=chance, dtype=torch.float64)

    query, key, value = some(2, length, 2, 4), nnf.normalize(some(2, length, 2, 4), dim=-1), some(2, length, 2, 3)
    log_keep, strength = -forgetting * some(2, length, 2).abs(), strongest * some(2, length, 2).sigmoid()
    memory = some(2, 2, 4, 3)
    inputs = [tensor.requires_grad_() for tensor in (query, key, value, log_keep, strength, memory)]
    numbers = torch.randint(documents, (2, length), generator=chance).sort(1).values
    out, after = delta_rule(query, key, value, log_keep=log_keep, strength=strength, documents=numbers, memory=memory)
    expected_out, expected_after = token_by_token(query, key, value, log_keep, strength, numbers, memory)
    assert out.allclose(expected_out, atol=1e-10)
    assert after.allclose(expected_after, atol=1e-10)
    weights = some(*out.shape), some(*after.shape)
    found = torch.autograd.grad((out * weights[0]).sum() + (after * weights[1]).sum(), inputs)
    expected = torch.autograd.grad(
        (expected_out * weights[0]).sum() + (expected_after * weights[1]).sum(), inputs, allow_unused=True
    )
    for one, other in zip(found, expected, strict=True):
        assert one.allclose(torch.zeros_like(one) if other is None else other, atol=1e-9)


@pytest.mark.parametrize("autocast", [False, True])
def test_the_loss_without_logits_is_the_one_with_them(autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "_LOGITS_BYTES", 4 * 50 * 7)  # seven tokens at a time
    torch.manual_seed(0)
    hidden = torch.randn(3, 11, 8, requires_grad=True)
    embeddings = torch.randn(50, 8, requires_grad=True)
    labels = torch.randint(50, (3, 11)).where(torch.rand(3, 11) < 0.7, IGNORED_LABEL)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        found = vocabulary_loss(hidden, embeddings, labels)
        logits = (hidden @ embeddings.T).flatten(0, 1).float()
        expected = nnf.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum")
    assert found.dtype == torch.float64
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    for one, other in zip(
        torch.autograd.grad(3 * found, [hidden, embeddings]),
        torch.autograd.grad(3 * expected, [hidden, embeddings]),
        strict=True,
    ):
        assert one.allclose(other, atol=0.15 if autocast else 1e-5)
