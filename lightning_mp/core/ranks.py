"""How many processes work together."""

import torch.distributed as dist


def world_size(group: dist.ProcessGroup | None = None) -> int:
    """Ranks of a process group, None being all of them; 1 where nothing is distributed.

    >>> world_size()
    1
    """
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1
