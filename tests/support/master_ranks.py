"""What two ranks train with master weights, and the loop by hand that they are compared with."""

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from master_loops import DTYPES, OPTIMIZERS, LoopByHand, scale_of
from small_models import Regression, regression_batches
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

STEPS = 6
BATCHES = {rank: regression_batches(2 * STEPS)[STEPS * rank : STEPS * rank + STEPS] for rank in (0, 1)}


def ddp(**arguments: Any) -> DDPStrategy:
    return DDPStrategy(process_group_backend="gloo", **arguments)


class Ranked(Regression):
    """Has a norm, and a layer that a loss may leave out."""

    trains_its_own = True

    def __init__(self, optimizer: Any = OPTIMIZERS["sgd"], *, seed: int = 0, uses_all: bool = True) -> None:
        super().__init__(optimizer)
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 1))
        self.more = nn.Linear(8, 1)
        self.temperature = nn.Parameter(torch.zeros(1), requires_grad=self.trains_its_own)  # which its steps use
        self.uses_all = uses_all

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx) * self.temperature.exp().squeeze()
        return loss + self.more(batch[0]).square().mean() if self.uses_all else loss


def full(module: nn.Module) -> list[Tensor]:
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for p in module.parameters()]


class Sharded(Ranked):
    trains_its_own = False  # no forward gathers it
    mp_policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)

    def configure_model(self) -> None:
        if not isinstance(self.more.weight, DTensor):
            mesh = self.device_mesh["data_parallel"]
            for part in (self.net[0], self.net[3], self.more):
                fully_shard(part, mesh=mesh, mp_policy=self.mp_policy)
            fully_shard(self.net[1], mesh=mesh)


class GatheredInFp32(Sharded):
    mp_policy = MixedPrecisionPolicy(cast_forward_inputs=False)


class Split(Ranked):
    def configure_model(self) -> None:
        if not isinstance(self.net[0].weight, DTensor):
            plan = {"0": ColwiseParallel(use_local_output=True), "3": RowwiseParallel()}
            del self.net[1]  # the norm
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)


def model_parallel(kind: type[Ranked], **arguments: Any) -> ModelParallelStrategy:
    data, tensor = (1, 2) if kind is Split else (2, 1)
    return ModelParallelStrategy(
        data_parallel_size=data, tensor_parallel_size=tensor, process_group_backend="gloo", **arguments
    )


def _means(loops: list[LoopByHand], scale: float, *, in_fp32: bool) -> dict[int, Tensor]:
    """Takes the gradients of both ranks, by the number of their parameter; DDP adds them in 16 bit."""
    means = {}
    for number, pair in enumerate(zip(*(loop.module.parameters() for loop in loops), strict=True)):
        holders: Any = [loop.leaves.get(p, p) for loop, p in zip(loops, pair, strict=True)]
        own = [holder.grad for holder in holders]
        if own[0] is not None:
            first, second = (gradient.float() if in_fp32 else gradient for gradient in own)
            means[number] = (first / 2 + second / 2).float() / scale
        for holder in holders:
            holder.grad = None
    return means


def two_ranks_by_hand(
    make: Callable[[], Ranked],
    precision: str = "bf16-true",
    *,
    window: int = 1,
    limit: Callable[[list[Any], Any], None] | None = None,
    overflows: tuple[int, ...] = (),
) -> list[Tensor]:
    """Two copies in one process; ``limit`` clips the mean of their gradients, and the second one's losses overflow.

    DDP averages at the end of a window, what was added up in 16 bit; FSDP in each micro-batch, and adds up in fp32.
    """
    scale, modules = scale_of(precision), [make() for _ in range(2)]
    modules[1].overflows = set(overflows)
    in_fp32 = not modules[0].trains_its_own
    loops = [LoopByHand(module, DTYPES[precision]) for module in modules]
    optimizers: list[Any] = [module.configure_optimizers() for module in modules]
    sums: dict[int, Tensor] = {}
    _switch(optimizers, "train")
    for index in range(STEPS):
        for rank, (loop, module) in enumerate(zip(loops, modules, strict=True)):
            if index % window == 0:
                loop.cast()
            loop.backward(loop.forward(module.training_step, BATCHES[rank][index], index) / window * scale)
        is_last = (index + 1) % window == 0
        if in_fp32 or is_last:
            means = _means(loops, scale, in_fp32=in_fp32)
            sums = {number: sums[number] + mean if number in sums else mean for number, mean in means.items()}
        if not is_last:
            continue
        if all(bool(gradient.isfinite().all()) for gradient in sums.values()):
            for module, optimizer in zip(modules, optimizers, strict=True):
                for number, parameter in enumerate(module.parameters()):
                    parameter.grad = sums[number].clone() if number in sums else None
                if limit is not None:
                    limit(list(module.parameters()), optimizer)
                optimizer.step()
        sums = {}
        for loop in loops:
            loop.clear()
    _switch(optimizers, "eval")
    return full(modules[0])


def _switch(optimizers: list[Any], mode: str) -> None:
    """Of schedule-free ones."""
    for optimizer in optimizers:
        getattr(optimizer, mode, lambda: None)()
