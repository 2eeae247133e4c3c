"""Parameters of the whole model, whichever part of them a rank holds."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from lightning_mp.ground.core import private_sharding_api
from lightning_mp.ground.core.ranks import world_size
from lightning_mp.ground.modules.stage_placeholder import full_model

#: How Lightning's own strategies and ours name the dimension of a device mesh over which layers are split.
TENSOR_PARALLEL = "tensor_parallel"


@dataclass(frozen=True)
class WholeParameter:
    """One parameter of the model before it was split; tied ones are one."""

    shape: torch.Size  # the whole one
    element_bytes: int  # of one number
    learns: bool  # whether it needs a gradient
    owners: tuple[nn.Module, ...]  # modules that hold it
    # of what a rank works with while the data-parallel shards are gathered: all of it, or its tensor-parallel part
    data_parallel_bytes: int

    @property
    def elements(self) -> int:
        """How many numbers it has."""
        return self.shape.numel()


def whole_parameters(module: nn.Module) -> list[WholeParameter]:
    """All parameters of a model with their whole shapes, the same on every rank, without communication.

    Flat parameters of FSDP1 are taken apart, shards of FSDP2 and of tensor parallelism have their whole shape, and of
    a pipeline's stage the modules of the other stages count, too.
    """
    with full_model(module):
        flat = [
            part
            for unit in FullyShardedDataParallel.fsdp_modules(module)
            for part in private_sharding_api.flat_parts(unit)
        ]
        found = [
            WholeParameter(
                part.shape, part.element_bytes, part.learns, part.owners, part.shape.numel() * part.element_bytes
            )
            for part in flat
        ]
        return found + list(_unflattened(module, {id(p) for part in flat for p in part.held_as}))


def _unflattened(module: nn.Module, taken: set[int]) -> Iterator[WholeParameter]:
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    for owner in module.modules():
        for parameter in owner.parameters(recurse=False):
            if id(parameter) not in taken:
                owners.setdefault(parameter, []).append(owner)
    for parameter, holders in owners.items():
        if private_sharding_api.is_flat_shard(parameter):
            raise ValueError(
                f"The parameters of {type(module).__name__} are flat shards of FSDP1, whose full shapes only the unit"
                " around it knows. Give the wrapped model, trainer.strategy.model, or count before the fit."
            )
        if is_lazy(parameter):
            raise ValueError(
                f"A parameter of {type(holders[0]).__name__} has no shape yet: lazy modules get theirs with the first"
                " batch. Run one batch through the model before trainer.fit, in configure_model for instance."
            )
        element_bytes = parameter.element_size()
        whole_bytes = parameter.numel() * element_bytes
        parts = tensor_parallel_parts(parameter)
        yield WholeParameter(
            parameter.shape, element_bytes, parameter.requires_grad, tuple(holders), -(-whole_bytes // parts)
        )


def tensor_parallel_parts(parameter: Tensor, dim: int | None = None) -> int:
    """Over how many ranks tensor parallelism splits a parameter, along one of its dimensions or along any.

    What FSDP2 shards is whole when it is used.
    """
    if not isinstance(parameter, DTensor):
        return 1
    mesh = parameter.device_mesh
    return math.prod(
        mesh.size(number)
        for number, (name, placement) in enumerate(zip(mesh.mesh_dim_names or (), parameter.placements, strict=False))
        if name == TENSOR_PARALLEL and placement.is_shard(dim)
    )


def agreed_count(count: int, device: torch.device, what: str) -> int:
    """Checks that all ranks found the same number, and returns it. Call it on all ranks."""
    if world_size() == 1:
        return count
    ends = torch.tensor([count, -count], dtype=torch.int64, device=device)
    dist.all_reduce(ends, op=dist.ReduceOp.MAX)
    largest, smallest = int(ends[0]), -int(ends[1])
    if largest != smallest:
        raise ValueError(
            f"Ranks count different {what}: {smallest:,} on one and {largest:,} on another, so they do not train the"
            " same model. Build the same modules on every rank, or give the number yourself."
        )
    return count
