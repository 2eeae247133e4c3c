"""Sums of a few numbers over all ranks, returned by the next call, so that nothing waits for the device."""

from collections.abc import Sequence

import torch

from lightning_mp.ground.core.devices import accumulation_dtype
from lightning_mp.ground.core.host_copy import HostCopy
from lightning_mp.ground.core.ranks import sum_over_ranks_, world_size


class AsyncAllReduce:
    """Sums the numbers of all ranks; each call returns the sums of the call before. With one process, its own sums.

    >>> import torch
    >>> AsyncAllReduce(2).add([1.0, 0.5], torch.device("cpu"))
    [1.0, 0.5]
    """

    def __init__(self, size: int) -> None:
        self._sums = [0.0] * size
        self._on_its_way: HostCopy | None = None

    def add(self, numbers: Sequence[float], device: torch.device) -> list[float]:
        """Starts a sum and returns those of the call before. Call it on all ranks."""
        before = self.arrived()
        if world_size() == 1:
            # A run on several ranks may have saved sums that it had not returned yet.
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
    """Whether any rank says yes; each call returns the result of the call before. With one process, its own answer.

    >>> import torch
    >>> flag = AsyncAnyRank()
    >>> flag.ask(False, torch.device("cpu")), flag.ask(True, torch.device("cpu"))  # one process
    (False, True)
    """

    def __init__(self) -> None:
        self._answers = AsyncAllReduce(1)

    def ask(self, answer: bool, device: torch.device) -> bool:
        """Starts a reduction and returns whether any rank said yes at the call before. Call it on all ranks."""
        return self._answers.add([float(answer)], device)[0] > 0
