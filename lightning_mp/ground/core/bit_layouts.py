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
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


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
    torch_name: str | None  # what torch calls it; None for a format that exists only inside matrix multiplications
    source: str  # where the layout is defined

    @property
    def torch_dtype(self) -> "torch.dtype | None":
        """The torch dtype, if there is one."""
        import torch

        return None if self.torch_name is None else getattr(torch, self.torch_name)

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


IEEE_754 = "IEEE 754-2008, table 3.5 (binary interchange formats)"
OCP_FP8 = "OCP 8-bit Floating Point Specification (OFP8) 1.0, section 5; Micikevicius et al. 2022, arXiv:2209.05433"

FP64 = NumberFormat("fp64", 11, 52, 64, True, "float64", IEEE_754)
FP32 = NumberFormat("fp32", 8, 23, 32, True, "float32", IEEE_754)
TF32 = NumberFormat(
    "tf32", 8, 10, 32, True, None, "NVIDIA A100 Tensor Core GPU Architecture whitepaper (2020), TensorFloat-32"
)
BF16 = NumberFormat(
    "bf16",
    8,
    7,
    16,
    True,
    "bfloat16",
    "Intel, BFLOAT16 Hardware Numerics Definition (2018); Google, Cloud TPU bfloat16",
)
FP16 = NumberFormat("fp16", 5, 10, 16, True, "float16", IEEE_754)
FP8_E4M3FN = NumberFormat("fp8_e4m3fn", 4, 3, 8, False, "float8_e4m3fn", OCP_FP8)
FP8_E5M2 = NumberFormat("fp8_e5m2", 5, 2, 8, True, "float8_e5m2", OCP_FP8)

FORMATS: Mapping[str, NumberFormat] = MappingProxyType(
    {row.name: row for row in (FP64, FP32, TF32, BF16, FP16, FP8_E4M3FN, FP8_E5M2)}
)
"""Every format by name, widest first."""
