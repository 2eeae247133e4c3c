"""Number formats by name or dtype, and what of a tensor they lose."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_mp.ground.core.arguments import positive_number
from lightning_mp.ground.core.bit_layouts import FORMATS, NumberFormat

FormatLike = str | torch.dtype | NumberFormat
"""A number format, by its name, by its torch dtype or itself."""


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
