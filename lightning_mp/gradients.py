"""Pure functions over the gradients of one optimizer: norm, non-finite check, scaling, clipping.

They take lists that may mix plain tensors and DTensors of several meshes and placements. All work happens on the local
shards; numbers that must agree on all ranks go through one all-reduce of a small vector (:func:`sum_over_ranks_`).

A *pass* is every gradient byte read or written once. :func:`shard_norms` costs one pass, :func:`multiply_` and
:func:`clamp_` cost two.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.optim import Optimizer

from lightning_mp import seams

__all__ = [
    "accumulation_dtype",
    "any_nonfinite",
    "clamp_",
    "clip_coefficient",
    "local_shard",
    "multiply_",
    "parameters_with_gradient",
    "reduce_partial_gradients_",
    "replicas",
    "scaled_clamp_",
    "shard_norms",
    "square_sum",
    "sum_over_ranks_",
    "unscale_",
]


def parameters_with_gradient(optimizer: Optimizer) -> list[Tensor]:
    """The optimizer's parameters that hold a gradient, in the order of its parameter groups."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def reduce_partial_gradients_(parameters: Iterable[Tensor]) -> None:
    """Replaces gradients that are still sums to be made (``Partial`` DTensors) by the finished sums.

    Finite partial sums do not promise a finite sum, and a norm of parts is not the norm of the whole.
    """
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and any(isinstance(p, Partial) for p in gradient.placements):
            finished = [Replicate() if isinstance(p, Partial) else p for p in gradient.placements]
            parameter.grad = gradient.redistribute(placements=finished)


def local_shard(gradient: Tensor) -> Tensor:
    """The part of a gradient that lives on this rank, sharing memory with it.

    Sparse gradients give the values of their coalesced form.
    """
    if isinstance(gradient, DTensor):
        gradient = gradient.to_local()
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def replicas(gradient: Tensor, *, world_size: int, plain_replicas: int) -> int:
    """How many ranks hold the same local shard.

    Args:
        gradient: plain tensor or DTensor.
        world_size: number of ranks that step together.
        plain_replicas: ranks that hold the same plain tensor: all of them under DDP, one under FSDP1, whose plain
            gradients are shards.

    Example:
        >>> import torch
        >>> replicas(torch.ones(3), world_size=4, plain_replicas=4)
        4
    """
    if not isinstance(gradient, DTensor):
        return plain_replicas
    mesh = gradient.device_mesh
    copies = [mesh.size(axis) for axis, placement in enumerate(gradient.placements) if placement.is_replicate()]
    return math.prod(copies) * (world_size // mesh.size())


def accumulation_dtype(device: torch.device) -> torch.dtype:
    """Where sums of squares and token counts are kept: float64, but float32 on MPS, which has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def shard_norms(shards: Sequence[Tensor]) -> Tensor:
    """Two-norm of each local shard, computed in float32, in one pass.

    A norm that is not finite means that the shard holds an inf or a nan, or that its squares do not fit into float32
    (norm above 1.8e19), which would put an inf into Adam's second moment.

    Args:
        shards: local gradients, any shapes, devices and dtypes.

    Returns:
        Tensor of shape ``[num_shards]`` on the device of the first shard, float32 (float64 if a shard is float64).

    Example:
        >>> import torch
        >>> shard_norms([torch.tensor([3.0, 4.0]), torch.tensor([[1.0]])])
        tensor([5., 1.])
    """
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    for index, shard in enumerate(shards):
        groups[shard.device, shard.dtype].append(index)
    norms: list[Tensor] = [torch.empty(0)] * len(shards)
    for (_, dtype), indices in groups.items():
        norm_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        group = torch.stack(tuple(seams.foreach_norm([shards[i] for i in indices], 2, norm_dtype)))
        # torch does not square a single number.
        group = torch.where(group.square().isinf(), torch.inf, group)
        for index, norm in zip(indices, group.unbind(), strict=True):
            norms[index] = norm
    if len(groups) > 1:
        widest = torch.float64 if any(dtype == torch.float64 for _, dtype in groups) else torch.float32
        norms = [norm.to(device=shards[0].device, dtype=widest, non_blocking=True) for norm in norms]
    return torch.stack(norms)


def unscale_(shards: Sequence[Tensor], inverse_scale: Tensor) -> Tensor:
    """Multiplies all local shards by the inverse loss scale in place and says whether one was not finite (two passes).

    Returns:
        Scalar float32 tensor on the device of ``inverse_scale``: 1.0 if any element was inf or nan, else 0.0.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for shard in shards:
        groups[shard.device, shard.dtype].append(shard)
    found = torch.zeros((), dtype=torch.float32, device=inverse_scale.device)
    for (device, _), members in groups.items():
        found_here = torch.zeros((), dtype=torch.float32, device=device)
        seams.amp_unscale_(members, found_here, inverse_scale.to(device=device, non_blocking=True))
        found = torch.maximum(found, found_here.to(found.device, non_blocking=True))
    return found


def any_nonfinite(shards: Sequence[Tensor]) -> Tensor:
    """Whether any element is inf or nan, as a scalar float32 tensor (one pass).

    Example:
        >>> import torch
        >>> any_nonfinite([torch.ones(2), torch.tensor([float("nan")])])
        tensor(1.)
    """
    filled = [shard for shard in shards if shard.numel()]
    if not filled:
        return torch.zeros((), dtype=torch.float32, device=shards[0].device if shards else None)
    finite = [torch.isfinite(norm).to(filled[0].device) for norm in seams.foreach_norm(filled, math.inf)]
    return (~torch.stack(finite)).any().float()


def square_sum(norms: Tensor, copies: Sequence[int]) -> Tensor:
    """This rank's share of the squared global norm.

    The squared norm of every shard is divided by the number of ranks that hold it, so that the plain sum over all ranks
    counts every element once: ``|g|^2 = sum over ranks of sum_i norm_i^2 / copies_i``.

    Args:
        norms: two-norms of the local shards, shape ``[num_shards]``.
        copies: for each shard the number of ranks that hold it (:func:`replicas`).

    Returns:
        Scalar tensor, float64 where the device has it.
    """
    squares = norms.to(accumulation_dtype(norms.device)).square()
    if all(number == copies[0] for number in copies):
        return squares.sum() / copies[0]
    weights = torch.tensor(copies, dtype=squares.dtype).to(squares.device, non_blocking=True)
    return (squares / weights).sum()


def sum_over_ranks_(values: Tensor) -> Tensor:
    """Adds a small tensor over all ranks in place; on a single process it returns at once."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(values)
    return values


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """``min(1, max_norm / (norm + 1e-6))``, as in :func:`torch.nn.utils.clip_grad_norm_`.

    Example:
        >>> import torch
        >>> clip_coefficient(torch.tensor(4.0), max_norm=1.0)
        tensor(0.2500)
    """
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def multiply_(shards: Sequence[Tensor], factor: Tensor) -> None:
    """Multiplies all local shards by one scalar tensor in place (two passes)."""
    groups: dict[tuple[torch.device, bool], list[Tensor]] = defaultdict(list)
    for shard in shards:
        groups[shard.device, shard.dtype == torch.float64].append(shard)
    for (device, is_double), members in groups.items():
        # Another dtype than the members' makes torch leave the fused kernel.
        dtype = torch.float64 if is_double else torch.float32
        seams.foreach_mul_(members, factor.to(device=device, dtype=dtype, non_blocking=True))


def scaled_clamp_(shards: Sequence[Tensor], factor: float, bound: float) -> None:
    """``factor * clamp(shard, -bound, bound)`` for all local shards, in place (two passes).

    Example:
        >>> import torch
        >>> shard = torch.tensor([1.0, -8.0])
        >>> scaled_clamp_([shard], factor=0.5, bound=4.0)
        >>> shard
        tensor([ 0.5000, -2.0000])
    """
    for shard in shards:
        if shard.dtype in (torch.float16, torch.bfloat16):
            # The factor itself may not fit into 16 bits.
            shard.copy_(shard.float().clamp_(-bound, bound).mul_(factor))
        else:
            seams.scaled_clamp_(shard, factor, bound)


def clamp_(shards: Sequence[Tensor], bound: Tensor) -> None:
    """Limits every element of the local shards to ``[-bound, bound]`` in place (two passes)."""
    for shard in shards:
        limit = bound.to(device=shard.device, dtype=shard.dtype, non_blocking=True)
        shard.clamp_(min=-limit, max=limit)
