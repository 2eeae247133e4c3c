"""Number formats: how many bits, how far they reach, where they stop.

Each row states the bit layout and where that layout is defined. Every other figure follows from the layout, so no
number is typed twice:

==================  ==========================================================================
bias                2^(exponent_bits - 1) - 1
smallest normal     2^(1 - bias)
smallest subnormal  2^(1 - bias - mantissa_bits)
epsilon             2^-mantissa_bits, the step from 1.0 to the next number
largest finite      (2 - 2^-mantissa_bits) 2^bias, where the top exponent means inf and NaN
largest finite      (2 - 2^(1 - mantissa_bits)) 2^(bias + 1), where only its last pattern is NaN
==================  ==========================================================================
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from lightning_mp.core.arguments import positive_number


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """A binary floating-point format with one sign bit and round-to-nearest-even."""

    name: str  # short name, the key in `FORMATS`
    exponent_bits: int  # bits of the biased exponent
    mantissa_bits: int  # stored fraction bits, without the implicit leading one
    storage_bits: int  # bits that one number takes in memory. More than `bits` for TF32, which is stored as fp32.
    has_infinities: bool
    """False where the top exponent holds ordinary numbers. What is too large then becomes NaN or the largest finite
    number, as the cast chooses (OFP8 section 5.2.1 allows both; torch 2.13 takes the largest number)."""
    torch_dtype: torch.dtype | None  # the torch dtype, None for a format that exists only inside matrix multiplications
    source: str  # where the layout is defined

    @property
    def bits(self) -> int:
        """Bits that carry information: sign, exponent and mantissa."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def significant_bits(self) -> int:
        """Precision of a normal number in bits, the implicit leading one included."""
        return self.mantissa_bits + 1

    @property
    def bias(self) -> int:
        """What is subtracted from the stored exponent."""
        return int(2 ** (self.exponent_bits - 1)) - 1

    @property
    def largest_finite(self) -> float:
        """Largest finite magnitude."""
        if self.has_infinities:
            return (2.0 - self.epsilon) * 2.0**self.bias
        return (2.0 - 2.0 * self.epsilon) * 2.0 ** (self.bias + 1)

    @property
    def smallest_normal(self) -> float:
        """Smallest magnitude with full precision."""
        return float(2.0 ** (1 - self.bias))

    @property
    def smallest_subnormal(self) -> float:
        """Smallest magnitude above zero. Hardware that flushes subnormals stops at :attr:`smallest_normal`."""
        return float(2.0 ** (1 - self.bias - self.mantissa_bits))

    @property
    def epsilon(self) -> float:
        """Distance from 1.0 to the next larger number."""
        return float(2.0**-self.mantissa_bits)

    @property
    def largest_rounded_to_zero(self) -> float:
        """Largest magnitude that becomes 0: half the smallest subnormal, the tie goes to the even zero."""
        return self.smallest_subnormal / 2

    @property
    def largest_rounded_to_subnormal(self) -> float:
        """Half a subnormal step below the smallest normal; the tie itself already rounds up to a normal number."""
        return self.smallest_normal - self.smallest_subnormal / 2

    @property
    def largest_rounded_to_finite(self) -> float:
        """Half a step above the largest finite number. The tie itself overflows where there are infinities."""
        exponent = self.bias if self.has_infinities else self.bias + 1
        return self.largest_finite + 2.0**exponent * self.epsilon / 2


FormatLike = str | torch.dtype | NumberFormat
"""A number format, by its name, by its torch dtype or itself."""

IEEE_754 = "IEEE 754-2008, table 3.5 (binary interchange formats)"
OCP_FP8 = "OCP 8-bit Floating Point Specification (OFP8) 1.0, section 5; Micikevicius et al. 2022, arXiv:2209.05433"

FP64 = NumberFormat("fp64", 11, 52, 64, True, torch.float64, IEEE_754)
FP32 = NumberFormat("fp32", 8, 23, 32, True, torch.float32, IEEE_754)
TF32 = NumberFormat(
    "tf32", 8, 10, 32, True, None, "NVIDIA A100 Tensor Core GPU Architecture whitepaper (2020), TensorFloat-32"
)
BF16 = NumberFormat(
    "bf16",
    8,
    7,
    16,
    True,
    torch.bfloat16,
    "Intel, BFLOAT16 Hardware Numerics Definition (2018); Google, Cloud TPU bfloat16",
)
FP16 = NumberFormat("fp16", 5, 10, 16, True, torch.float16, IEEE_754)
FP8_E4M3FN = NumberFormat("fp8_e4m3fn", 4, 3, 8, False, torch.float8_e4m3fn, OCP_FP8)
FP8_E5M2 = NumberFormat("fp8_e5m2", 5, 2, 8, True, torch.float8_e5m2, OCP_FP8)

FORMATS: Mapping[str, NumberFormat] = MappingProxyType(
    {row.name: row for row in (FP64, FP32, TF32, BF16, FP16, FP8_E4M3FN, FP8_E5M2)}
)
"""Every format by name, widest first."""


def number_format(key: FormatLike) -> NumberFormat:
    """Look a format up by its short name or its torch dtype.

    >>> number_format("bf16") is number_format(torch.bfloat16)
    True
    """
    if isinstance(key, NumberFormat):
        return key
    if isinstance(key, torch.dtype):
        for row in FORMATS.values():
            if row.torch_dtype is key:
                return row
    elif isinstance(key, str) and key in FORMATS:
        return FORMATS[key]
    dtypes = ", ".join(str(row.torch_dtype) for row in FORMATS.values() if row.torch_dtype is not None)
    raise ValueError(f"Unknown number format {key!r}. Use one of {', '.join(FORMATS)}, or one of the dtypes {dtypes}.")


def dtype_label(dtype: torch.dtype) -> str:
    """The short name of a format, else torch's.

    >>> dtype_label(torch.bfloat16), dtype_label(torch.int64)
    ('bf16', 'int64')
    """
    names = (row.name for row in FORMATS.values() if row.torch_dtype is dtype)
    return next(names, str(dtype).removeprefix("torch."))


@dataclass(frozen=True, slots=True)
class FractionLost:
    """What rounding to a narrow format does to the non-zero values of a tensor, as shares between 0 and 1.

    The share that keeps full precision is ``1 - zero - subnormal - overflow``.
    """

    zero: float  # share that becomes exactly 0
    subnormal: float  # share that becomes a subnormal number: kept, with fewer significant bits
    overflow: float  # share beyond the largest finite number, inf and NaN included. See `NumberFormat.has_infinities`.
    count: int  # number of non-zero values that the shares refer to. With 0 every share is 0.


def fraction_lost(values: Tensor, target: FormatLike, scale: float = 1.0) -> FractionLost:
    """Share of ``values * scale`` that a number format cannot hold at full precision.

    With x = abs(value) * scale, round-to-nearest-even gives::

        x <= smallest_subnormal / 2                     zero
        x <  smallest_normal - smallest_subnormal / 2   subnormal
        x <  largest_finite + half a step               normal
        otherwise                                       overflow

    Compared in fp64, so that neither the scale nor the comparison rounds. The result is read on the host.
    """
    row = number_format(target)
    positive_number(scale, "scale")
    if not values.is_floating_point():
        raise ValueError(f"`values` must be a floating-point tensor, got dtype {values.dtype}. Call `.float()` first.")
    magnitude = values.detach().to(torch.float64).abs() * scale
    non_zero = values.detach() != 0  # before scaling: what the scale itself makes 0 was lost as well
    # The tie above the largest number goes to the even pattern: inf, but the largest number itself in e4m3fn.
    limit = row.largest_rounded_to_finite
    finite = magnitude < limit if row.has_infinities else magnitude <= limit
    counts = torch.stack(
        [
            non_zero.sum(),
            (non_zero & (magnitude <= row.largest_rounded_to_zero)).sum(),
            (magnitude.gt(row.largest_rounded_to_zero) & magnitude.lt(row.largest_rounded_to_subnormal)).sum(),
            (non_zero & ~finite).sum(),
        ]
    )
    count, zero, subnormal, overflow = (int(entry) for entry in counts.tolist())
    divisor = max(count, 1)
    return FractionLost(zero / divisor, subnormal / divisor, overflow / divisor, count)
