"""Exponent histograms of many tensors, on the device until one transfer brings all of them to the host."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mp.core.devices import sent_to
from lightning_mp.core.ranks import world_size
from lightning_mp.diagnostics.underflow.exponents import NUM_SLOTS, ExponentHistogram, count_exponents
from lightning_mp.gradients import gradient_ops


class ExponentTable:
    """One histogram per name."""

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self.names = list(names)
        self._row_of = {name: row for row, name in enumerate(self.names)}
        self._counts = torch.zeros(len(self.names), NUM_SLOTS, dtype=torch.int64, device=device)
        self._largest = torch.zeros(len(self.names), dtype=gradient_ops.accumulation_dtype(device), device=device)
        self.seen: set[str] = set()

    def add(self, name: str, values: Tensor, factor: Tensor | float | None = None) -> None:
        """Counts into a row, as :func:`lightning_mp.diagnostics.underflow.exponents.count_exponents` does."""
        counts, largest = count_exponents(values, factor)
        row = self._row_of[name]
        self._counts[row].add_(sent_to(counts, self._counts.device))
        here = sent_to(largest, self._largest.device, self._largest.dtype)
        self._largest[row].clamp_(min=here)
        self.seen.add(name)

    def sum_over_ranks_(self, copies: Sequence[int], group: dist.ProcessGroup | None = None) -> None:
        """Adds the counts of the ranks of a group, each value once; every one of them has to call it."""
        gradient_ops.sum_over_ranks_(self._counts, group)
        if world_size(group) > 1:
            dist.all_reduce(self._largest, op=dist.ReduceOp.MAX, group=group)
        divisor = sent_to(torch.tensor(copies, dtype=torch.int64), self._counts.device)
        self._counts //= divisor[:, None]

    def vector(self) -> Tensor:
        """Everything in one vector, shape ``[num_rows * (NUM_SLOTS + 1)]``; counts are exact up to 2^53."""
        return torch.cat([self._counts.to(self._largest.dtype), self._largest[:, None]], 1).reshape(-1)

    @staticmethod
    def width(names: Sequence[str]) -> int:
        """Length of the :meth:`vector` of a table with these rows."""
        return len(names) * (NUM_SLOTS + 1)

    @staticmethod
    def decode(names: Sequence[str], numbers: Sequence[float]) -> dict[str, ExponentHistogram]:
        """The histograms in a :meth:`vector` that was brought to the host."""
        width = NUM_SLOTS + 1
        assert len(numbers) == ExponentTable.width(names)
        rows = (numbers[start : start + width] for start in range(0, len(numbers), width))
        return {name: ExponentHistogram.from_slots(row, row[-1]) for name, row in zip(names, rows, strict=True)}
