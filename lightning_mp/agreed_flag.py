"""A yes or no that any rank may raise and all ranks learn of at the same step, without waiting for the device."""

import torch
import torch.distributed as dist

from lightning_mp.gradients import sum_over_ranks_
from lightning_mp.host_copy import HostCopy

__all__ = ["AgreedFlag"]


class AgreedFlag:
    """Adds up the ranks' answers when asked, and tells the sum when asked the next time.

    Example:
        >>> import torch
        >>> flag = AgreedFlag()
        >>> flag.ask(False, torch.device("cpu")), flag.ask(True, torch.device("cpu"))  # one process knows at once
        (False, True)
    """

    def __init__(self) -> None:
        self._on_its_way: HostCopy | None = None

    def ask(self, answer: bool, device: torch.device) -> bool:
        """Whether a rank said yes: now on one process, when this was asked before on several. To be called on all."""
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return answer
        known = self._on_its_way is not None and self._on_its_way.read()[0] > 0
        self._on_its_way = HostCopy(sum_over_ranks_(torch.full((1,), float(answer), device=device)))
        return known
