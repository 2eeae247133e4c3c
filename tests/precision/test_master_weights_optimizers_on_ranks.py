"""Optimizers x strategies x windows x clipped and skipped steps on two processes: to the bit a loop by hand."""

from functools import partial
from typing import Any

import pytest
import torch
from gloo import run_same_ranks as run_ranks
from lightning.pytorch.strategies import DDPStrategy
from lion_pytorch import Lion
from master_loops import LoopByHand, clip_by_hand, counted_casts, master_weights
from schedulefree import AdamWScheduleFree
from small_models import Regression, fit, regression_batches
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Muon

from lightning_mp import FSDP2Strategy, JointOptimizer

# torch warns of in-place operations on a sharded layer's output; there are none here.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")

STEPS = 6
BATCHES = {rank: regression_batches(2 * STEPS)[STEPS * rank : STEPS * rank + STEPS] for rank in (0, 1)}


def joint(parameters: Any) -> JointOptimizer:
    parameters = list(parameters)
    matrices = [p for p in parameters if p.ndim == 2]
    return JointOptimizer([Muon(matrices, 1e-2), AdamW([p for p in parameters if p.ndim != 2], 1e-2)])


MAKE: dict[str, Any] = {
    "joint": joint,
    "adamw": lambda p: AdamW(p, 1e-2, foreach=True),
    "adamw_fused": lambda p: AdamW(p, 1e-3, fused=True),
    "sgd_momentum": lambda p: SGD(p, 0.05, momentum=0.9),
    "lion": lambda p: Lion(p, 1e-3),
    "schedule_free": lambda p: AdamWScheduleFree(p, 1e-3),
}
OVERFLOWS_AT = 2  # the batch of rank 1 whose loss is inf


class Trained(Regression):
    """Has a norm, and a weight of its own that no forward of FSDP would gather."""

    def __init__(self, optimizer: Any, *, trains_its_own: bool, overflows: bool) -> None:
        super().__init__(optimizer)
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 1))
        self.temperature = nn.Parameter(torch.zeros(1), requires_grad=trains_its_own)
        self.trains_its_own, self.has_inf = trains_its_own, overflows

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx) * self.temperature.exp().squeeze()
        return loss * torch.inf if self.has_inf and batch_idx == OVERFLOWS_AT else loss


def full(module: nn.Module) -> list[Tensor]:
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for p in module.parameters()]


def _means(loops: list[LoopByHand], *, in_fp32: bool) -> dict[int, Tensor]:
    """Takes the gradients of both ranks, by the number of their parameter; DDP adds them in 16 bit."""
    means = {}
    for number, pair in enumerate(zip(*(loop.module.parameters() for loop in loops), strict=True)):
        holders: Any = [loop.leaves.get(p, p) for loop, p in zip(loops, pair, strict=True)]
        own = [holder.grad for holder in holders]
        if own[0] is not None:
            first, second = (gradient.float() if in_fp32 else gradient for gradient in own)
            means[number] = (first / 2 + second / 2).float()
        for holder in holders:
            holder.grad = None
    return means


def by_hand(make: Any, window: int, limit: Any) -> list[Tensor]:
    """Two copies in one process; ``limit`` clips the mean of their gradients.

    DDP averages at the end of a window, what was added up in 16 bit; FSDP in each micro-batch, and adds up in fp32.
    """
    modules = [make(overflows=False), make(overflows=make.keywords["overflows"])]
    in_fp32 = not modules[0].trains_its_own
    loops = [LoopByHand(module) for module in modules]
    optimizers: list[Any] = [module.configure_optimizers() for module in modules]
    sums: dict[int, Tensor] = {}
    _switch(optimizers, "train")
    for index in range(STEPS):
        for rank, (loop, module) in enumerate(zip(loops, modules, strict=True)):
            if index % window == 0:
                loop.cast()
            loop.backward(loop.forward(module.training_step, BATCHES[rank][index], index) / window)
        is_last = (index + 1) % window == 0
        if in_fp32 or is_last:
            means = _means(loops, in_fp32=in_fp32)
            sums = {number: sums[number] + mean if number in sums else mean for number, mean in means.items()}
        if not is_last:
            continue
        if all(bool(gradient.isfinite().all()) for gradient in sums.values()):
            for module, optimizer in zip(modules, optimizers, strict=True):
                for number, parameter in enumerate(module.parameters()):
                    parameter.grad = sums[number].clone() if number in sums else None
                limit(list(module.parameters()), optimizer)
                optimizer.step()
        sums = {}
        for loop in loops:
            loop.clear()
    _switch(optimizers, "eval")
    return full(modules[0])


def _switch(optimizers: list[Any], mode: str) -> None:
    for optimizer in optimizers:
        getattr(optimizer, mode, lambda: None)()


def by_norm(parameters: list[Tensor], optimizer: Any) -> None:
    clip_by_hand(parameters, 0.1, fused=bool(optimizer.defaults.get("fused")))


def by_value(parameters: list[Any], optimizer: Any) -> None:
    nn.utils.clip_grad_value_(parameters, 0.01)


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("how", ["plain", "clipped", "skipped"])
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.parametrize("optimizer", MAKE)
def test_every_optimizer_on_ranks_equals_a_loop_by_hand(optimizer: str, strategy: str, window: int, how: str) -> None:
    """Clipped by norm under DDP, and by value under FSDP2, where a norm is a sum over shards in another order."""
    lends = strategy == "ddp"
    make = partial(Trained, MAKE[optimizer], trains_its_own=lends, overflows=how == "skipped")
    algorithm, limit, value = ("norm", by_norm, 0.1) if lends else ("value", by_value, 0.01)
    clipping = {"gradient_clip_val": value, "gradient_clip_algorithm": algorithm} if how == "clipped" else {}

    def train(rank: int) -> tuple[list[Tensor], list[Tensor], set[int]]:
        module = make(overflows=how == "skipped" and rank == 1)
        start = full(module)
        shards = FSDP2Strategy(shard=["net.*"], process_group_backend="gloo")
        with counted_casts() as casts:
            fit(
                module,
                BATCHES[rank],
                devices=2,
                strategy=DDPStrategy(process_group_backend="gloo") if lends else shards,
                plugin=master_weights(weight_by=None),
                accumulate_grad_batches=window,
                **clipping,
            )
        return full(module), start, set(casts.values())

    expected = by_hand(make, window, limit if how == "clipped" else lambda *_: None)
    for ours, start, casts in run_ranks(train, 2):
        assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
        assert not all(torch.equal(a, b) for a, b in zip(ours, start, strict=True))
        assert casts == ({STEPS // window + 1} if lends else set())  # one more when DDP is made
