"""How many processes work together, and what each of them knows."""

from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

_Known = TypeVar("_Known")


def world_size(group: dist.ProcessGroup | None = None) -> int:
    """Ranks of a process group, None being all of them; 1 where nothing is distributed.

    >>> world_size()
    1
    """
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def all_gathered(known: _Known, group: dist.ProcessGroup | None = None) -> list[_Known]:
    """What every rank of a group knows, in rank order, by pickle. To be called on all of them.

    >>> all_gathered("one process")
    ['one process']
    """
    size = world_size(group)
    if size == 1:
        return [known]
    everybody = [known] * size
    dist.all_gather_object(everybody, known, group=group)
    return everybody


def sum_over_ranks_(values: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Adds a small tensor over the ranks of a group, None for all, in place; on one process it returns at once."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1:
        dist.all_reduce(values, group=group)
    return values
