"""Several matrices in one weight, which Muon orthogonalises apart."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.optim import Optimizer

from lightning_mp.ground.core import private_optimizer_api
from lightning_mp.training.checkpoints.fused_qkv import FusedOrder

#: The setting of a parameter group whose weights are orthogonalised by blocks. Its value is a :data:`Blocks`.
BLOCKS = "blocks"

Ranges = tuple[tuple[int, int], ...]
#: Along which dimension, and for each block the ranges of it that belong to it, one after the other. Saved with its
#: group, and made of what checkpoints may hold.
Blocks = tuple[int, tuple[Ranges, ...]]


def blocks_of(size: int, parts: int | Sequence[int], dim: int, order: FusedOrder | None = None) -> Blocks:
    """How a dimension divides: into so many equal blocks, or into blocks of these sizes, repeated until it is used up.

    Args:
        size: of the dimension.
        parts: the number of blocks, or their sizes.
        dim: which dimension it is.
        order: in which order the ranks of tensor parallelism hold it.

    Raises:
        ValueError: if it does not divide so; the message continues a sentence that begins with "The weight has".

    Example:
        >>> blocks_of(6, 3, dim=0)
        (0, (((0, 2),), ((2, 4),), ((4, 6),)))
        >>> blocks_of(6, (2, 1), dim=0)
        (0, (((0, 2), (3, 5)), ((2, 3), (5, 6))))
    """
    given = parts
    if isinstance(parts, int) and not isinstance(parts, bool) and parts > 1 and size % parts == 0:
        parts = [size // parts] * parts
    if isinstance(parts, int) or len(parts) < 2 or min(parts) < 1 or size % sum(parts):
        raise ValueError(
            f"{size} outputs, which do not divide as {given!r} says. Give a number above 1 that divides them, or at"
            " least two sizes above 0 whose sum does."
        )
    owner = torch.cat([torch.full((length,), block) for block, length in enumerate(parts)])
    owner = owner.repeat(size // sum(parts))
    if order is not None:
        owner = FusedOrder(order.ranks, 0).by_rank(owner)
    return dim, tuple(_ranges(owner == block) for block in range(len(parts)))


def _ranges(chosen: Tensor) -> Ranges:
    """Where a row of truth values is true."""
    edges = torch.diff(chosen.int(), prepend=torch.zeros(1, dtype=torch.int), append=torch.zeros(1, dtype=torch.int))
    starts, ends = (edges == 1).nonzero().flatten().tolist(), (edges == -1).nonzero().flatten().tolist()
    return tuple(zip(starts, ends, strict=True))


def orthogonalized(whole: Tensor, group: Mapping[str, Any]) -> Tensor:
    """A whole matrix after Muon's iteration, or its blocks after one each."""
    if BLOCKS not in group:
        return private_optimizer_api.orthogonalized(whole, group)
    dim, blocks = group[BLOCKS]
    result: Tensor | None = None
    for ranges in blocks:
        block = torch.cat([whole.narrow(dim, start, end - start) for start, end in ranges], dim)
        block = private_optimizer_api.orthogonalized(block, group)
        result = torch.empty_like(whole, dtype=block.dtype) if result is None else result
        position = 0
        for start, end in ranges:
            result.narrow(dim, start, end - start).copy_(block.narrow(dim, position, end - start))
            position += end - start
    assert result is not None
    return result


def learning_rates(group: Mapping[str, Any], shape: torch.Size) -> list[tuple[float, int, Ranges]]:
    """The rates that Muon takes for a matrix of this shape, and for which ranges of which dimension each is."""
    lr, adjust = float(group["lr"]), group["adjust_lr_fn"]
    if BLOCKS not in group:
        return [(private_optimizer_api.muon_learning_rate(lr, adjust, shape), 0, ((0, shape[0]),))]
    dim, blocks = group[BLOCKS]
    rates: dict[float, Ranges] = {}
    for ranges in blocks:
        block = list(shape)
        block[dim] = sum(end - start for start, end in ranges)
        rate = private_optimizer_api.muon_learning_rate(lr, adjust, torch.Size(block))
        rates[rate] = (*rates.get(rate, ()), *ranges)
    if len(rates) == 1:
        return [(rate, dim, ((0, shape[dim]),)) for rate in rates]
    return [(rate, dim, ranges) for rate, ranges in rates.items()]


def refuse_unknown_blocks(optimizers: Iterable[Optimizer], *, knows: type[Optimizer] | None = None) -> None:
    """Refuses optimizers that would leave the blocks of a group aside; ``knows`` is a type that does not.

    Raises:
        MisconfigurationException: names the optimizer.
    """
    for optimizer in optimizers:
        if type(optimizer) is not knows and any(BLOCKS in group for group in optimizer.param_groups):
            raise MisconfigurationException(
                f"{type(optimizer).__name__}: matrices_and_rest(split=...) was given, and only torch.optim.Muon inside"
                " of a JointOptimizer orthogonalises by blocks: JointOptimizer([Muon(matrices), AdamW(rest)]). Leave"
                " split out for other optimizers."
            )
