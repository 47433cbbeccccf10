"""The contenders of `streamed.py`: one model, wherever its weights are kept, and one step of the same mathematics.

    resident   weights, gradients and moments on the GPU: what a step costs where memory is no question
    fsdp2      torch's `fully_shard` with CPU offload, moments and optimizer on the host
    streamed   Penstock's own, within a budget of GPU memory

Each computes in bf16 over an fp32 master and fp32 moments, recomputes every layer, takes the loss in tiles of tokens,
clips by the exact norm of all gradients, and steps AdamW in one fused kernel. Peers are told of no positions or masks:
sequences are one document, and so `transformers` takes its fastest attention.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from penstock.train.device_batch import DeviceBatch
from penstock.train.long.cross_entropy import loss_and_gradient
from penstock.train.models.huggingface import CausalLM
from penstock.train.optimizers import AdamSettings
from penstock.train.schedule import Schedule
from streamed_memory import free_all, gpu_peaks_gib

ADAM = AdamSettings()
MAX_GRAD_NORM = 1.0
_TILE_TOKENS = 4_096


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What every contender is given."""

    config: dict[str, Any]
    """The model's."""
    device: torch.device
    budget_gib: float
    """Of GPU memory; heeded by the streamed trainer alone."""
    learning_rate: float = 1e-5


def make_model(setup: Setup) -> CausalLM:
    """Random weights, made on the device, which is fast there; the same for every contender."""
    torch.manual_seed(0)
    with setup.device:
        return CausalLM(json.dumps(setup.config), vocab_size=setup.config["vocab_size"])


class Contender(ABC):
    """A model that can be trained. Nothing is left of it once it is closed."""

    def __init__(self, setup: Setup) -> None:
        self.device = setup.device
        self.loss = float("nan")
        """Of the last step."""

    @abstractmethod
    def step(self, batch: DeviceBatch) -> None:
        """Learn a batch; the loss is known when this returns, the last of the optimizer's work may go on."""

    def terms(self) -> dict[str, float]:
        """Seconds of the last step by term, where they are told."""
        return {}

    @property
    def peak_gib(self) -> dict[str, float]:
        """The most GPU memory since peaks were forgotten."""
        return gpu_peaks_gib(self.device)

    def close(self) -> None:
        """Give back all memory."""
        kept = ("device", "loss")
        for name in [name for name in vars(self) if name not in kept]:
            delattr(self, name)
        free_all()


class _TiledLoss(torch.autograd.Function):
    """The mean loss with its gradients, made at once in tiles of tokens: no logits are kept, none is made twice."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, labels: Tensor, weight: float) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        of_hidden = torch.empty_like(hidden)
        of_head = torch.zeros_like(head, dtype=torch.float32)
        for start in range(0, len(hidden), _TILE_TOKENS):
            part = slice(start, start + _TILE_TOKENS)
            states = hidden[part]
            loss, error = loss_and_gradient((states @ head.T)[None], labels[part][None], weight)
            total += loss
            torch.mm(error[0], head, out=of_hidden[part])
            of_head += error[0].T @ states
        ctx.save_for_backward(of_hidden, of_head.to(head.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        of_hidden, of_head = ctx.saved_tensors
        return of_hidden.mul_(grads[0]), of_head.mul_(grads[0]), None, None


class _WithLoss(nn.Module):
    """A model whose output is its loss, every layer of it recomputed when going back."""

    def __init__(self, lm: Any) -> None:
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        super().__init__()
        self.lm = lm
        layers = lm.model.layers
        for index, layer in enumerate(layers):
            layers[index] = checkpoint_wrapper(layer, preserve_rng_state=False)  # nothing in it is random

    @property
    def layers(self) -> list[Any]:
        return list(self.lm.model.layers)

    def forward(self, input_ids: Tensor, labels: Tensor, weight: float) -> Tensor:
        hidden = self.lm.model(input_ids=input_ids, use_cache=False).last_hidden_state
        head = self.lm.get_output_embeddings().weight
        loss: Any = _TiledLoss.apply
        return loss(hidden.flatten(0, 1), head, labels.flatten(), weight)


def _fused_adamw(parameters: list[nn.Parameter], learning_rate: float) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        [
            {"params": [each for each in parameters if each.ndim >= 2], "weight_decay": ADAM.weight_decay},
            {"params": [each for each in parameters if each.ndim < 2], "weight_decay": 0.0},
        ],
        lr=learning_rate,
        betas=(ADAM.beta1, ADAM.beta2),
        fused=True,
    )


class Resident(Contender):
    """Everything on the device: a bf16 model, its fp32 master, fp32 gradients and moments."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.model = _WithLoss(make_model(setup).lm)
        self.weights = list(self.model.parameters())
        self.master = [nn.Parameter(weight.detach()) for weight in self.weights]
        for weight in self.weights:  # tables of positions stay fp32
            weight.data = weight.data.bfloat16()
        self.optimizer = _fused_adamw(self.master, setup.learning_rate)

    def step(self, batch: DeviceBatch) -> None:
        loss = self.model(batch.input_ids, batch.labels, float(batch.num_tokens))
        loss.backward()
        for master, weight in zip(self.master, self.weights, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None
        norm = torch.nn.utils.clip_grad_norm_(self.master, MAX_GRAD_NORM)
        self.loss, _ = torch.stack([loss.detach(), norm.double()]).tolist()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_copy_(tuple(self.weights), tuple(self.master))  # pyright: ignore[reportPrivateImportUsage]


class Fsdp2(Contender):
    """`fully_shard` over a world of one, weights, gradients and moments in pinned or plain host memory.

    Two layers are fetched ahead in either direction; gradients come back beside the backward pass; the optimizer is
    torch's fused AdamW on all cores.
    """

    _AHEAD = 2

    def __init__(self, setup: Setup) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        super().__init__(setup)
        _join_alone(setup.device)
        self.model = _WithLoss(make_model(setup).lm)
        shard = partial(
            fully_shard,
            mesh=init_device_mesh(setup.device.type, (1,)),
            mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
            offload_policy=CPUOffloadPolicy(pin_memory=setup.device.type == "cuda"),
        )
        layers = self.model.layers
        for layer in layers:
            shard(layer, reshard_after_forward=True)
        shard(self.model)
        root: Any = self.model
        root.set_modules_to_forward_prefetch(layers[: self._AHEAD])
        root.set_modules_to_backward_prefetch(layers[-self._AHEAD :][::-1])
        for index, layer in enumerate(layers):
            layer.set_modules_to_forward_prefetch(layers[index + 1 : index + 1 + self._AHEAD])
            layer.set_modules_to_backward_prefetch(layers[max(0, index - self._AHEAD) : index][::-1])
        self.parameters = list(self.model.parameters())
        self.optimizer = _fused_adamw(self.parameters, setup.learning_rate)

    def step(self, batch: DeviceBatch) -> None:
        loss = self.model(batch.input_ids, batch.labels, float(batch.num_tokens))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, MAX_GRAD_NORM)
        self.loss = float(loss.detach())
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def close(self) -> None:
        super().close()
        torch.distributed.destroy_process_group()


def _join_alone(device: torch.device) -> None:
    """A process group of this process alone, over the loopback."""
    import torch.distributed as dist

    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")
    if dist.is_initialized():  # by one that could not be made
        return
    backend = "cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo"
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group(backend, store=store, rank=0, world_size=1)


class Streamed(Contender):
    """Penstock's own."""

    def __init__(self, setup: Setup) -> None:
        from penstock.train.streamed import StreamedTrainer

        super().__init__(setup)
        model = make_model(setup).to("cpu")  # one weight at a time: the host never has two of all
        free_all()
        self.trainer = StreamedTrainer(
            model,
            schedule=Schedule(learning_rate=setup.learning_rate),
            adam=ADAM,
            max_grad_norm=MAX_GRAD_NORM,
            precision="bf16",
            device=setup.device,
            gpu_budget_gib=setup.budget_gib,
        )
        self.number = 0

    def step(self, batch: DeviceBatch) -> None:
        self.number += 1
        self.loss = self.trainer.step(batch, self.number).loss

    def terms(self) -> dict[str, float]:
        return dict(self.trainer.timings())

    def close(self) -> None:
        self.trainer.close()
        super().close()


CONTENDERS: dict[str, type[Contender]] = {"resident": Resident, "fsdp2": Fsdp2, "streamed": Streamed}
