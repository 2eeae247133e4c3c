"""Muon on weights that are sharded, or hold several matrices.

Each sharded matrix is put together on one rank, orthogonalised there, and sent back.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.optim import Muon, Optimizer

from lightning_mp.ground.core import private_sharding_api
from lightning_mp.training.optimizers.matrix_blocks import BLOCKS, learning_rates, orthogonalized

#: What torch's Newton-Schulz iteration computes in; shards travel in it.
ITERATION_DTYPE = torch.bfloat16


def needs_own_step(optimizer: Optimizer) -> TypeGuard[Muon]:
    """Whether this is torch's Muon, and some of its matrices are DTensors, or orthogonalised by blocks."""
    if type(optimizer) is not Muon:
        return False
    return any(_is_ours(group, parameter) for group in optimizer.param_groups for parameter in group["params"])


def _is_ours(group: dict[str, Any], parameter: Tensor) -> bool:
    return BLOCKS in group or isinstance(parameter, DTensor)


@torch.no_grad()
def sharded_step(optimizer: Muon) -> None:
    r"""One step of ``torch.optim.Muon`` over DTensors, equal to the one that it makes over whole matrices.

    Orthogonalisation is the one operation of Muon that does not work element by element: it must see the whole matrix.
    Over ``W`` ranks matrices are taken ``W`` at a time. Each rank receives all shards of one of them, in bf16, in which
    Muon orthogonalises; so each matrix is orthogonalised once, and no rank holds more than one:

    .. code-block:: text

        for W matrices at a time:
            B_j <- mu B_j + (1 - mu) G_j           on shards
            U_j <- bf16((1 - mu) G_j + mu B_j)     on shards; B_j without nesterov
            rank j receives the shards of U_j      one all-to-all
            O_j <- NewtonSchulz(U_j)               torch's, on rank j
            shards of O_j return                   one all-to-all
            P_j <- (1 - lr wd) P_j - lr_j O_j      on shards, lr_j = AdjustLR(lr, shape of the whole)

    Where a matrix is sharded over several axes of a mesh (FSDP2 and tensor parallelism together), it is first gathered
    over all but the first of these, and orthogonalised once for each rank of the others. Plain matrices that are
    not split into blocks are stepped by torch. All ranks of a mesh must have gradients of the same matrices.
    """
    with _only_others(optimizer):
        optimizer.step()  # its hooks are called here
    for group in optimizer.param_groups:
        with_gradient = [p for p in group["params"] if _is_ours(group, p) and p.grad is not None]
        for matrix in with_gradient:
            if not isinstance(matrix, DTensor):
                _apply(group, matrix, orthogonalized(_momentum_update(optimizer, group, matrix), group), matrix.shape)
        sharded = [p for p in with_gradient if isinstance(p, DTensor)]
        for (mesh, _), found in groupby(sharded, lambda p: (p.device_mesh, p.placements)):
            matrices = list(found)
            size = dist.get_world_size(_exchange_group(mesh, matrices[0].placements))
            for start in range(0, len(matrices), size):
                _step_together(optimizer, group, matrices[start : start + size])


def _step_together(optimizer: Muon, group: dict[str, Any], matrices: Sequence[DTensor]) -> None:
    """Steps at most as many matrices, of one mesh and layout, as ranks exchange shards."""
    updates = [_momentum_update(optimizer, group, matrix) for matrix in matrices]
    mesh, layout = matrices[0].device_mesh, _one_sharded_axis(matrices[0].placements)
    shards = [update.redistribute(placements=layout).to_local().to(ITERATION_DTYPE) for update in updates]
    axis = next((placement.dim for placement in layout if isinstance(placement, Shard)), None)
    if axis is None:
        orthogonal = [orthogonalized(whole, group) for whole in shards]
    else:
        shapes = [update.shape for update in updates]
        orthogonal = _exchanged(shards, shapes, axis, group, _exchange_group(mesh, layout))
    for matrix, shard in zip(matrices, orthogonal, strict=True):
        whole = DTensor.from_local(
            shard, mesh, layout, run_check=False, shape=matrix.shape, stride=matrix.stride()
        ).redistribute(placements=matrix.placements)
        begins = private_sharding_api.first_element_of_shard(matrix)
        _apply(group, matrix.to_local(), whole.to_local(), matrix.shape, begins)


def _apply(
    group: dict[str, Any], part: Tensor, update: Tensor, shape: torch.Size, begins: Sequence[int] = (0, 0)
) -> None:
    """Applies the update to a matrix of this shape, or to the part of it that begins there."""
    part.mul_(1 - float(group["lr"]) * group["weight_decay"])
    for lr, dim, ranges in learning_rates(group, shape):
        for start, end in ranges:
            first, last = (min(max(0, at - begins[dim]), part.shape[dim]) for at in (start, end))
            if last > first:
                part.narrow(dim, first, last - first).add_(update.narrow(dim, first, last - first), alpha=-lr)


def _momentum_update(optimizer: Muon, group: dict[str, Any], matrix: Tensor) -> Any:
    gradient = matrix.grad
    assert gradient is not None
    state = optimizer.state[matrix]
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = torch.zeros_like(gradient, memory_format=torch.preserve_format)
    momentum = state["momentum_buffer"]
    momentum.lerp_(gradient, 1 - group["momentum"])
    return gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum


def _exchanged(
    shards: Sequence[Tensor],
    shapes: Sequence[torch.Size],
    axis: int,
    settings: dict[str, Any],
    process_group: dist.ProcessGroup,
) -> list[Tensor]:
    """This rank's shards of the orthogonalised matrices; rank ``j`` of the group orthogonalises the ``j``-th."""
    rank, size = dist.get_rank(process_group), dist.get_world_size(process_group)
    sent = [shard.numel() for shard in shards] + [0] * (size - len(shards))
    outgoing = torch.cat([shard.flatten() for shard in shards])
    parts = _shard_shapes(shapes[rank], axis, size) if rank < len(shards) else []
    received = [part.numel() for part in parts] or [0] * size
    incoming = outgoing.new_empty(sum(received))
    dist.all_to_all_single(incoming, outgoing, received, sent, group=process_group)
    if parts:
        pieces = [piece.view(part) for piece, part in zip(incoming.split(received), parts, strict=True)]
        orthogonal = orthogonalized(torch.cat(pieces, axis), settings)
        lengths = [part[axis] for part in parts]
        incoming = torch.cat([piece.flatten() for piece in orthogonal.split(lengths, axis)])
    dist.all_to_all_single(outgoing, incoming, sent, received, group=process_group)
    return [piece.view(shard.shape) for piece, shard in zip(outgoing.split(sent[: len(shards)]), shards, strict=True)]


def _shard_shapes(shape: torch.Size, axis: int, ranks: int) -> list[torch.Size]:
    """The shapes of a DTensor's shards: equal ones until nothing is left, as ``torch.chunk`` makes them."""
    length = -(-shape[axis] // ranks)
    sizes = [max(0, min(length, shape[axis] - rank * length)) for rank in range(ranks)]
    return [torch.Size([*shape[:axis], size, *shape[axis + 1 :]]) for size in sizes]


def _one_sharded_axis(placements: Sequence[Placement]) -> list[Placement]:
    """The layout with only the first of its sharded mesh axes sharded."""
    first = next((i for i, placement in enumerate(placements) if placement.is_shard()), None)
    kept = placements[first] if first is not None else None
    return [
        Shard(kept.dim) if index == first and isinstance(kept, Shard) else Replicate()
        for index, _ in enumerate(placements)
    ]


def _exchange_group(mesh: DeviceMesh, placements: Sequence[Placement]) -> dist.ProcessGroup:
    """The ranks along the first sharded axis of a mesh."""
    axis = next((i for i, placement in enumerate(placements) if placement.is_shard()), 0)
    return mesh.get_group(axis)


@contextmanager
def _only_others(optimizer: Optimizer) -> Iterator[None]:
    before = [group["params"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if not _is_ours(group, parameter)]
    try:
        yield
    finally:
        for group, parameters in zip(optimizer.param_groups, before, strict=True):
            group["params"] = parameters
