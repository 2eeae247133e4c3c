"""Exponent histograms: how far the values of a tensor lie from the ends of a number format.

A value x lies in bin e if ``2^e <= abs(x) < 2^(e+1)``. The bins are those of fp32, -149 to 127, and one more at each
end for fp64. Zeros and non-finite values are counted apart.

The counts are made on the tensor's own device, and nothing here waits for it but :meth:`ExponentHistogram.of`. The
exact powers of two in each bin are counted apart: every limit of rounding to zero is one, so that what is lost is known
to the last value, ties included.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mp.ground.core.bit_layouts import FORMATS, FP32, NumberFormat
from lightning_mp.ground.core.devices import accumulation_dtype, sent_to
from lightning_mp.ground.core.number_formats import FormatLike, FractionLost, number_format
from lightning_mp.ground.core.ranks import sum_over_ranks_, world_size
from lightning_mp.training.gradients import gradient_ops

#: Exponent of fp32's smallest subnormal number.
LOWEST_EXPONENT = -149
#: Exponent of fp32's largest number.
HIGHEST_EXPONENT = 127

# slot 0: zeros; slot 1: non-finite; then for every bin the exact powers of two and the rest, in turn.
_FIRST_SLOT = 2
_NUM_BINS = HIGHEST_EXPONENT - LOWEST_EXPONENT + 3
#: Length of the vector that :func:`count_exponents` returns.
NUM_SLOTS = _FIRST_SLOT + 2 * _NUM_BINS

_CHUNK_VALUES = 2**22  # about 100 MB of temporaries
_VALUES_PER_COPY = 4096
_MAX_COPIES = 256


@torch.no_grad()
def count_exponents(values: Tensor, factor: Tensor | float | None = None) -> tuple[Tensor, Tensor]:
    """Counts the exponents of ``values * factor`` on the device, without waiting for it."""
    flat = gradient_ops.local_shard(values.detach()).reshape(-1)
    wide = torch.float64 if flat.dtype == torch.float64 else torch.float32
    if isinstance(factor, Tensor):
        factor = sent_to(factor.detach(), flat.device, wide)
    if not flat.numel():
        return flat.new_zeros(NUM_SLOTS, dtype=torch.int64), flat.new_zeros((), dtype=wide)
    # Large tensors come in several chunks; the others, the most, are to cost few operations.
    counted = [_count_chunk(chunk, wide, factor) for chunk in flat.split(_CHUNK_VALUES)]
    if len(counted) == 1:
        return counted[0]
    return torch.stack([counts for counts, _ in counted]).sum(0), torch.stack([top for _, top in counted]).amax()


def _count_chunk(chunk: Tensor, wide: torch.dtype, factor: Tensor | float | None) -> tuple[Tensor, Tensor]:
    magnitude = chunk.to(wide).abs()
    if factor is not None:
        magnitude = magnitude * factor
    nonfinite = (magnitude < math.inf).logical_not_()  # also where it is nan
    return _histogram(_slots(magnitude, nonfinite)), magnitude.masked_fill(nonfinite, 0.0).amax()


def _slots(magnitude: Tensor, nonfinite: Tensor) -> Tensor:
    mantissa, exponent = torch.frexp(magnitude)  # magnitude = mantissa 2^exponent, mantissa in [1/2, 1)
    first = (exponent * 2).add_(_FIRST_SLOT - 2 * LOWEST_EXPONENT).clamp_(_FIRST_SLOT, NUM_SLOTS - 2)
    slots = first.add_(mantissa != 0.5)
    return slots.masked_fill_(magnitude == 0.0, 0).masked_fill_(nonfinite, 1)


def _histogram(slots: Tensor) -> Tensor:
    """Like ``torch.bincount``, which waits for the device, and exact, unlike ``torch.histc`` past 2^24.

    Several copies of the histogram are filled side by side, so that a GPU's atomic additions seldom meet.
    """
    num_copies = max(1, min(_MAX_COPIES, slots.numel() // _VALUES_PER_COPY))
    index = slots.long()
    if num_copies > 1:
        index = index * num_copies + torch.arange(slots.numel(), device=slots.device) % num_copies
    counts = torch.zeros(NUM_SLOTS * num_copies, dtype=torch.int64, device=slots.device)
    ones = torch.ones((), dtype=torch.int64, device=slots.device).expand_as(index)
    counts.scatter_add_(0, index, ones)
    return counts if num_copies == 1 else counts.view(NUM_SLOTS, num_copies).sum(1)


@dataclass(frozen=True)
class ExponentHistogram:
    """How many values have which exponent, on the host."""

    counts: dict[int, int] = field(default_factory=dict)
    """Number of finite non-zero values by exponent; empty bins are left out. -150 and 128 include all beyond."""
    powers_of_two: dict[int, int] = field(default_factory=dict)  # how many of these are exactly `2^exponent`
    num_zeros: int = 0  # number of exact zeros
    num_nonfinite: int = 0  # number of infs and nans
    largest: float = 0.0  # largest finite magnitude

    @classmethod
    def of(cls, values: Tensor, scale: float = 1.0) -> Self:
        """The histogram of ``values * scale``; waits for the device."""
        counts, largest = count_exponents(values, None if scale == 1.0 else scale)
        return cls.from_slots(counts.tolist(), largest.item())

    @classmethod
    def from_slots(cls, slots: Sequence[float], largest: float) -> Self:
        """From what :func:`count_exponents` counted."""
        powers = dict(enumerate(map(int, slots[_FIRST_SLOT:NUM_SLOTS:2]), LOWEST_EXPONENT - 1))
        others = enumerate(map(int, slots[_FIRST_SLOT + 1 : NUM_SLOTS : 2]), LOWEST_EXPONENT - 1)
        counts = {exponent: number for exponent, other in others if (number := powers[exponent] + other)}
        powers = {exponent: number for exponent, number in powers.items() if number}
        return cls(counts, powers, int(slots[0]), int(slots[1]), float(largest))

    @classmethod
    def sum_of(cls, histograms: "Iterable[ExponentHistogram]") -> Self:
        """One histogram of the values of several."""
        parts, counts, powers = list(histograms), Counter[int](), Counter[int]()
        for histogram in parts:
            counts.update(histogram.counts)
            powers.update(histogram.powers_of_two)
        return cls(
            dict(sorted(counts.items())),
            dict(sorted(powers.items())),
            sum(histogram.num_zeros for histogram in parts),
            sum(histogram.num_nonfinite for histogram in parts),
            max((histogram.largest for histogram in parts), default=0.0),
        )

    @property
    def num_finite(self) -> int:
        """Number of finite values that are not zero."""
        return sum(self.counts.values())

    @property
    def num_values(self) -> int:
        """Number of all values."""
        return self.num_finite + self.num_zeros + self.num_nonfinite

    @property
    def zero_fraction(self) -> float:
        """Share of exact zeros among all values."""
        return self.num_zeros / self.num_values if self.num_values else 0.0

    def fraction_lost(self, target: FormatLike, scale: float = 1.0) -> FractionLost:
        """What rounding to a format does to ``values * scale``.

        It is what :func:`lightning_mp.ground.core.number_formats.fraction_lost` says of a value.

        ``zero`` is exact. ``subnormal`` counts what is below the smallest normal number before rounding. ``overflow``
        leaves out the values above the largest finite number that share its exponent (65520 to 65536 in fp16).
        """
        row = narrow_format(target)
        shift = _exponent_of_power(scale)
        zero_below = math.frexp(row.largest_rounded_to_zero)[1] - 1 - shift
        normal_from = math.frexp(row.smallest_normal)[1] - 1 - shift
        top = math.frexp(row.largest_finite)[1] - 1 - shift
        tie = self.powers_of_two.get(zero_below, 0)
        zero = sum(number for e, number in self.counts.items() if e < zero_below) + tie
        subnormal = sum(number for e, number in self.counts.items() if zero_below <= e < normal_from) - tie
        overflow = sum(number for e, number in self.counts.items() if e > top) + self.num_nonfinite
        count = self.num_finite + self.num_nonfinite
        divisor = max(count, 1)
        return FractionLost(zero / divisor, subnormal / divisor, overflow / divisor, count)

    def headroom_doublings(self, target: FormatLike) -> float:
        """How often all values can be doubled before the largest overflows; negative if it overflows already.

        -inf if a value is not finite, inf if all are zero.
        """
        row = narrow_format(target)
        if self.num_nonfinite:
            return -math.inf
        if self.largest == 0.0:
            return math.inf
        mantissa, exponent = math.frexp(self.largest)
        limit_mantissa, limit_exponent = math.frexp(row.largest_rounded_to_finite)
        # mantissa 2^(exponent + k) must be below the limit; the tie at the limit is inf where there are infs.
        fits = mantissa < limit_mantissa or (mantissa == limit_mantissa and not row.has_infinities)
        return float(limit_exponent - exponent - (not fits))


def suggested_scale(
    histogram: ExponentHistogram,
    target: FormatLike,
    scale: float = 1.0,
    *,
    margin_doublings: int = 1,
    min_scale: float = 2.0**-24,
    max_scale: float = 2.0**24,
) -> float | None:
    """The largest power of two as loss scale at which the largest gradient seen stays finite, with a margin.

    As high as possible, because only small values are lost at a low scale (Micikevicius et al. 2017, section 3.2:
    "choose a value so that its product with the maximum absolute gradient value is below 65,504").

    References:
        Micikevicius et al., "Mixed Precision Training", 2017, section 3.2, https://arxiv.org/abs/1710.03740

    >>> import torch
    >>> suggested_scale(ExponentHistogram.of(torch.tensor([1e-9, 3.0])), "fp16")
    8192.0
    """
    headroom = histogram.headroom_doublings(target)
    if headroom == math.inf:
        return None
    doublings = -1 if headroom == -math.inf else int(headroom) - margin_doublings
    return min(max(2.0 ** (math.frexp(scale)[1] - 1 + doublings), min_scale), max_scale)


def narrow_format(target: FormatLike) -> NumberFormat:
    """A format whose limits lie within fp32's bins.

    >>> narrow_format(torch.float16).name
    'fp16'
    """
    row = number_format(target)
    if row.mantissa_bits >= FP32.mantissa_bits:
        narrow = ", ".join(name for name, other in FORMATS.items() if other.mantissa_bits < FP32.mantissa_bits)
        raise ValueError(
            f"The exponent histogram has the bins of fp32 and cannot tell what {row.name} would lose."
            f" Use one of {narrow}."
        )
    return row


def _exponent_of_power(scale: float) -> int:
    mantissa, exponent = math.frexp(scale)
    if mantissa != 0.5 or not math.isfinite(scale):
        raise ValueError(
            f"`scale` must be a power of two, got {scale!r}: bins cannot be moved by less."
            " Make the histogram of the values times the scale instead: ExponentHistogram.of(values, scale)."
        )
    return exponent - 1


class ExponentTable:
    """One histogram per name."""

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self.names = list(names)
        self._row_of = {name: row for row, name in enumerate(self.names)}
        self._counts = torch.zeros(len(self.names), NUM_SLOTS, dtype=torch.int64, device=device)
        self._largest = torch.zeros(len(self.names), dtype=accumulation_dtype(device), device=device)
        self.seen: set[str] = set()

    def add(self, name: str, values: Tensor, factor: Tensor | float | None = None) -> None:
        """Counts into a row, as :func:`lightning_mp.monitors.diagnostics.underflow.exponents.count_exponents` does."""
        counts, largest = count_exponents(values, factor)
        row = self._row_of[name]
        self._counts[row].add_(sent_to(counts, self._counts.device))
        here = sent_to(largest, self._largest.device, self._largest.dtype)
        self._largest[row].clamp_(min=here)
        self.seen.add(name)

    def sum_over_ranks_(self, copies: Sequence[int], group: dist.ProcessGroup | None = None) -> None:
        """Adds the counts of the ranks of a group, each value once; call it on every one of them."""
        sum_over_ranks_(self._counts, group)
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
