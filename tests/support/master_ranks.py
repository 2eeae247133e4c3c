"""What two ranks train with master weights: a module, its sharded and its split form, and their batches."""

from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from master_loops import OPTIMIZERS
from small_models import Regression, regression_batches
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

BATCHES = {rank: regression_batches(12)[6 * rank : 6 * rank + 6] for rank in (0, 1)}


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
