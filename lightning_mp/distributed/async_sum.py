"""A few numbers added over all ranks, known to all of them the next time, so that nothing waits for the device."""

from collections.abc import Sequence

import torch

from lightning_mp.core.host_copy import HostCopy
from lightning_mp.core.ranks import world_size
from lightning_mp.gradients.gradient_ops import accumulation_dtype, sum_over_ranks_


class AsyncAllReduce:
    """Adds up what ranks hand in, and gives it out at their next call. One process knows at once.

    >>> import torch
    >>> AsyncAllReduce(2).add([1.0, 0.5], torch.device("cpu"))
    [1.0, 0.5]
    """

    def __init__(self, size: int) -> None:
        self._sums = [0.0] * size
        self._on_its_way: HostCopy | None = None

    def add(self, numbers: Sequence[float], device: torch.device) -> list[float]:
        """Hands in numbers and returns the sums of the call before. To be called on all ranks."""
        before = self.arrived()
        if world_size() == 1:
            # What several ranks had handed in before a resume is still to be told.
            self._sums = [0.0] * len(before)
            return [number + left for number, left in zip(numbers, before, strict=True)]
        dtype = accumulation_dtype(device)
        # `full` is a kernel; `torch.tensor(numbers, device=...)` would make the host wait for the device.
        local = torch.stack([torch.full((), number, dtype=dtype, device=device) for number in numbers])
        self._on_its_way = HostCopy(sum_over_ranks_(local))
        return before

    def arrived(self) -> list[float]:
        """The sums of the last call."""
        if self._on_its_way is not None:
            self._sums = self._on_its_way.read()
            self._on_its_way = None
        return self._sums

    def load(self, sums: Sequence[float]) -> None:
        """Continues from saved sums."""
        self._on_its_way, self._sums = None, list(sums)


class AsyncAnyRank:
    """Adds up the ranks' answers when called, and returns the sum at the next call.

    >>> import torch
    >>> flag = AsyncAnyRank()
    >>> flag.ask(False, torch.device("cpu")), flag.ask(True, torch.device("cpu"))  # one process knows at once
    (False, True)
    """

    def __init__(self) -> None:
        self._answers = AsyncAllReduce(1)

    def ask(self, answer: bool, device: torch.device) -> bool:
        """Whether a rank said yes: now on one process, when this was asked before on several. To be called on all."""
        return self._answers.add([float(answer)], device)[0] > 0
