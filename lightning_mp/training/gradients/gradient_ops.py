"""Pure functions over the gradients of one optimizer: norm, non-finite check, scaling, clipping.

They take lists that may mix plain tensors and DTensors of several meshes and placements. All work happens on the local
shards; numbers that must agree on all ranks go through one all-reduce of a small vector.

A *pass* is every gradient byte read or written once. :func:`shard_norms` costs one pass, :func:`multiply_` and
:func:`clamp_` cost two.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.optim import Optimizer

from lightning_mp.ground.core import private_tensor_api
from lightning_mp.ground.core.devices import accumulation_dtype, sent_to
from lightning_mp.ground.core.half_dtypes import HALF_DTYPES


def parameters_with_gradient(optimizer: Optimizer) -> list[Tensor]:
    """The optimizer's parameters that hold a gradient, in the order of its parameter groups."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def reduce_partial_gradients_(parameters: Iterable[Tensor]) -> None:
    """Replaces gradients that are still sums to be made (``Partial`` DTensors) by the finished sums.

    Finite partial sums do not promise a finite sum, and a norm of parts is not the norm of the whole. Complex gradients
    whose conjugation torch has put off are conjugated, because such memory cannot be worked on in place.
    """
    for parameter in parameters:
        gradient = parameter.grad
        if type(gradient) is Tensor and not gradient.dtype.is_complex:
            continue
        if isinstance(gradient, DTensor) and any(isinstance(p, Partial) for p in gradient.placements):
            finished = [Replicate() if isinstance(p, Partial) else p for p in gradient.placements]
            parameter.grad = gradient.redistribute(placements=finished)
        elif gradient is not None and gradient.is_conj():
            parameter.grad = gradient.resolve_conj()


def local_shard(gradient: Tensor) -> Tensor:
    """The part of a gradient that lives on this rank, sharing memory with it.

    Of a sparse gradient it is the values of the coalesced form, which replaces it: duplicate rows are summed, and
    writes to a copy would be lost. Of a nested tensor it is the concatenated parts. Complex values are viewed as pairs
    of real and imaginary parts.
    """
    if isinstance(gradient, DTensor):
        gradient = gradient.to_local()
    if gradient.is_sparse:
        if not gradient.is_coalesced():
            with torch.no_grad():
                gradient.copy_(gradient.coalesce())
        gradient = gradient.values()
    elif gradient.is_nested:
        gradient = gradient.values()
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient


def local_shards(parameters: Iterable[Tensor]) -> list[Tensor]:
    """:func:`local_shard` of every gradient that is there; plain ones cost no call, and models have thousands."""
    return [
        g if type(g) is Tensor and not (g.is_sparse or g.dtype.is_complex) else local_shard(g)
        for p in parameters
        if (g := p.grad) is not None
    ]


def replicas(gradient: Tensor, *, ranks_per_parameter: int, plain_replicas: int) -> int:
    """How many ranks hold the same local shard.

    >>> import torch
    >>> replicas(torch.ones(3), ranks_per_parameter=4, plain_replicas=4)
    4
    """
    if not isinstance(gradient, DTensor):
        return plain_replicas
    mesh = gradient.device_mesh
    if ranks_per_parameter % mesh.size():
        raise ValueError(
            f"GradientReplication(ranks_per_parameter={ranks_per_parameter}): it must be a multiple of {mesh.size()},"
            f" the ranks of a gradient's mesh {tuple(mesh.shape)}. Give the number of ranks of one pipeline stage, or"
            " of the process group that steps together."
        )
    copies = [mesh.size(axis) for axis, placement in enumerate(gradient.placements) if placement.is_replicate()]
    return math.prod(copies) * (ranks_per_parameter // mesh.size())


def replicas_of(gradients: Iterable[Tensor], *, ranks_per_parameter: int, plain_replicas: int) -> list[int]:
    """:func:`replicas` of each gradient; plain ones cost no call."""
    return [
        plain_replicas
        if type(g) is Tensor
        else replicas(g, ranks_per_parameter=ranks_per_parameter, plain_replicas=plain_replicas)
        for g in gradients
    ]


def shard_norms(shards: Sequence[Tensor]) -> Tensor:
    """Two-norm of each local shard, computed in float32, in one pass.

    A norm that is not finite means that the shard holds an inf or a nan, or that its squares do not fit into float32
    (norm above 1.8e19), which would put an inf into Adam's second moment.

    >>> import torch
    >>> shard_norms([torch.tensor([3.0, 4.0]), torch.tensor([[1.0]])])
    tensor([5., 1.])
    """
    kinds = [(shard.device, shard.dtype) for shard in shards]
    if kinds and kinds.count(kinds[0]) == len(kinds):
        return _norms_of_one_kind(shards)
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    for index, kind in enumerate(kinds):
        groups[kind].append(index)
    norms: list[Tensor] = [torch.empty(0)] * len(shards)
    widest = torch.float64 if any(dtype == torch.float64 for _, dtype in groups) else torch.float32
    for indices in groups.values():
        group = _norms_of_one_kind([shards[i] for i in indices])
        for index, norm in zip(indices, group.unbind(), strict=True):
            norms[index] = norm.to(device=shards[0].device, dtype=widest)
    return torch.stack(norms)


def _norms_of_one_kind(shards: Sequence[Tensor]) -> Tensor:
    """Of shards of one device and dtype."""
    dtype = torch.float64 if shards[0].dtype == torch.float64 else torch.float32
    norms = torch.stack(tuple(private_tensor_api.foreach_norm(list(shards), 2, dtype=dtype)))
    # torch does not square a single number; from this one on a square does not fit.
    return norms.masked_fill_(norms >= (2.0**512 if dtype == torch.float64 else 2.0**64), torch.inf)


@dataclass(frozen=True, eq=False)
class LocalGradients:
    """What one pass over an optimizer's gradients has found on this rank."""

    parameters: list[Tensor]  # those that have a gradient
    gradients: list[Tensor]  # theirs
    norms: Tensor | None  # two-norm of each one's local shard, shape `[num_parameters]`; None if there are none


def read_gradients(optimizer: Optimizer) -> LocalGradients:
    """Reads the gradients of an optimizer on this rank (one pass); sums that are still to be made are made first."""
    parameters = parameters_with_gradient(optimizer)
    reduce_partial_gradients_(parameters)
    gradients = [p.grad for p in parameters if p.grad is not None]
    norms = shard_norms(local_shards(parameters)) if gradients else None
    return LocalGradients(parameters, gradients, norms)


def any_overflow(norms: Tensor) -> Tensor:
    """Whether a norm is not finite, or its square is not: a scalar float32 tensor, 1.0 or 0.0.

    The optimizer would put an inf into its second moment.

    >>> import torch
    >>> any_overflow(torch.tensor([1.0, 1e18])), any_overflow(torch.tensor([1.0, 1e20]))
    (tensor(0.), tensor(1.))
    """
    return (~torch.isfinite(norms.square())).any().float()


def not_below(value: Tensor, limit: float) -> Tensor:
    """1.0 where a number is not below the limit or is nan, else 0.0; float32, in two kernels.

    >>> import torch
    >>> not_below(torch.tensor([1.0, torch.inf, torch.nan]), torch.inf)
    tensor([0., 1., 1.])
    """
    return torch.logical_not(value < limit, out=torch.empty(value.shape, dtype=torch.float32, device=value.device))


#: The square of this number or a larger one overflows in float32.
LARGEST_NORM = 2.0**64 * (1 - 2.0**-25)


def square_sum(norms: Tensor, copies: Sequence[int]) -> Tensor:
    """This rank's share of the squared global norm.

    The squared norm of every shard is divided by the number of ranks that hold it, so that the plain sum over all ranks
    counts every element once: ``|g|^2 = sum over ranks of sum_i norm_i^2 / copies_i``.
    """
    squares = norms.to(accumulation_dtype(norms.device)).square()
    if copies.count(copies[0]) == len(copies):
        return squares.sum() / copies[0] if copies[0] > 1 else squares.sum()
    weights = sent_to(torch.tensor(copies, dtype=squares.dtype), squares.device)
    return (squares / weights).sum()


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """``min(1, max_norm / (norm + 1e-6))``, as in :func:`torch.nn.utils.clip_grad_norm_`.

    >>> import torch
    >>> clip_coefficient(torch.tensor(4.0), max_norm=1.0)
    tensor(0.2500)
    """
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def multiply_(shards: Sequence[Tensor], factor: Tensor) -> None:
    """Multiplies all local shards by one scalar tensor in place, in float32 at least (two passes)."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for shard in shards:
        groups[shard.device, shard.dtype].append(shard)
    for (device, dtype), members in groups.items():
        # On CUDA, lists of several dtypes and factors of another dtype are multiplied tensor by tensor.
        # From a GPU to offloaded gradients the host waits: without, it would read what the factor's memory held before.
        here = factor.to(device=device, dtype=torch.promote_types(dtype, torch.float32))
        if dtype == torch.float16 or (dtype == torch.bfloat16 and device.type == "cpu"):
            # The one kernel that takes a float32 factor for 16-bit tensors: 16 bits would round the factor.
            private_tensor_api.amp_unscale_(members, torch.zeros((), dtype=torch.float32, device=device), here)
        elif dtype == torch.bfloat16:
            _multiply_wide_(members, here)  # CUDA's has no bf16: pytorch/pytorch#127176
        else:
            private_tensor_api.foreach_mul_(members, here)


def _multiply_wide_(shards: Sequence[Tensor], factor: Tensor) -> None:
    """Multiplies in the dtype of the factor and rounds once, tensor by tensor."""
    for shard in shards:
        # A factor without dimensions would be rounded to the dtype of the shard.
        shard.mul_(factor.reshape([1] * shard.dim()))


def scaled_clamp_(shards: Sequence[Tensor], factor: float, bound: float) -> None:
    """``factor * clamp(shard, -bound, bound)`` for all local shards, in place (two passes)."""
    for shard in shards:
        if shard.dtype in HALF_DTYPES:
            # The factor itself may not fit into 16 bits.
            shard.copy_(shard.float().clamp_(-bound, bound).mul_(factor))
        else:
            private_tensor_api.scaled_clamp_(shard, factor, bound)


def clamp_(shards: Sequence[Tensor], bound: Tensor) -> None:
    """Limits every element of the local shards to ``[-bound, bound]`` in place (two passes)."""
    for shard in shards:
        limit = bound.to(device=shard.device, dtype=shard.dtype)
        shard.clamp_(min=-limit, max=limit)
