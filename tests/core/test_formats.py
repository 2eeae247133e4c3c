"""Number formats against torch.finfo, every bit pattern, and real casts."""

import math
from typing import get_args

import pytest
import torch

from lightning_mp.ground.core.bit_layouts import FORMATS, FP16, TF32, NumberFormat
from lightning_mp.ground.core.number_formats import FractionLost, fraction_lost, number_format
from lightning_mp.ground.core.precisions import PRECISIONS, PrecisionName

TORCH_FORMATS = [row for row in FORMATS.values() if row.torch_dtype is not None]
NARROW_FORMATS = [row for row in TORCH_FORMATS if row.storage_bits <= 16]


def by_name(row: NumberFormat) -> str:
    return row.name


def every_value(row: NumberFormat) -> torch.Tensor:
    """All bit patterns of an 8- or 16-bit format, as fp64. Shape [2**bits]."""
    integers = {8: torch.uint8, 16: torch.int16}[row.storage_bits]
    patterns = torch.arange(2**row.storage_bits, dtype=torch.int32).to(integers)
    return patterns.view(row.torch_dtype).to(torch.float64)


@pytest.mark.parametrize("row", TORCH_FORMATS, ids=by_name)
def test_figures_equal_torch_finfo(row: NumberFormat) -> None:
    info = torch.finfo(row.torch_dtype)
    assert row.storage_bits == row.bits == info.bits
    assert row.largest_finite == info.max
    assert row.smallest_normal == info.smallest_normal
    assert row.epsilon == info.eps


@pytest.mark.parametrize("row", NARROW_FORMATS, ids=by_name)
def test_figures_equal_what_all_bit_patterns_say(row: NumberFormat) -> None:
    values = every_value(row)
    finite = values[values.isfinite()]
    positive = finite[finite > 0].unique()  # sorted
    assert row.largest_finite == positive[-1]
    assert row.smallest_subnormal == positive[0]
    assert row.has_infinities == bool(values.isinf().any())
    above_one = positive[positive > 1.0][0].item()
    assert row.epsilon == above_one - 1.0
    # Subnormals are the evenly spaced numbers at the bottom: 2^mantissa_bits - 1 of them, then the smallest normal.
    steps = positive.diff()
    first_wider = int((steps > row.smallest_subnormal).nonzero()[0])
    assert row.smallest_normal * 2 == positive[first_wider]
    assert int((positive < row.smallest_normal).sum()) == 2**row.mantissa_bits - 1


@pytest.mark.parametrize("row", NARROW_FORMATS, ids=by_name)
def test_rounding_limits_equal_real_casts(row: NumberFormat) -> None:
    def cast(value: float) -> float:
        single = torch.tensor(value, dtype=torch.float32)
        return float(single.to(row.torch_dtype).to(torch.float64))

    def above(value: float) -> float:
        return float(torch.nextafter(torch.tensor(value), torch.tensor(math.inf)))

    def below(value: float) -> float:
        return float(torch.nextafter(torch.tensor(value), torch.tensor(0.0)))

    assert cast(row.largest_rounded_to_zero) == 0.0
    assert cast(above(row.largest_rounded_to_zero)) == row.smallest_subnormal
    assert cast(row.largest_rounded_to_subnormal) == row.smallest_normal
    assert cast(below(row.largest_rounded_to_subnormal)) == row.smallest_normal - row.smallest_subnormal
    assert cast(below(row.largest_rounded_to_finite)) == row.largest_finite
    if row.has_infinities:
        assert cast(row.largest_rounded_to_finite) == math.inf
    else:  # the even neighbour is the largest number; beyond the tie a cast may clamp or give NaN
        assert cast(row.largest_rounded_to_finite) == row.largest_finite
        beyond = cast(above(row.largest_rounded_to_finite))
        assert math.isnan(beyond) or beyond == row.largest_finite


def test_tf32_has_the_range_of_fp32_and_the_precision_of_fp16() -> None:
    fp32 = number_format("fp32")
    assert (TF32.bits, TF32.storage_bits, TF32.torch_dtype) == (19, 32, None)
    assert TF32.smallest_normal == fp32.smallest_normal
    assert TF32.epsilon == FP16.epsilon
    # The largest TF32 number is the largest fp32 number with its low 13 mantissa bits cleared.
    cleared = torch.tensor(0x7F7FE000, dtype=torch.int32).view(torch.float32)
    assert TF32.largest_finite == cleared.item()


@pytest.mark.parametrize("row", FORMATS.values(), ids=by_name)
def test_each_row_names_its_source(row: NumberFormat) -> None:
    assert FORMATS[row.name] is row
    assert any(body in row.source for body in ("IEEE 754", "OCP", "NVIDIA", "Intel"))


def share_by_casting(values: torch.Tensor, row: NumberFormat, scale: float) -> FractionLost:
    """The reference: multiply, cast, look."""
    kept = values[values != 0]
    scaled = (kept.to(torch.float64) * scale).to(torch.float32)
    cast = scaled.to(row.torch_dtype).to(torch.float64)
    subnormal = (cast != 0) & (cast.abs() < row.smallest_normal)
    # e4m3fn casts may clamp: 448 is the largest number, the next one would be 480
    overflow = ~cast.isfinite() if row.has_infinities else (scaled.abs() > (448 + 480) / 2)
    share = [float(mask.to(torch.float64).mean()) for mask in (cast == 0, subnormal, overflow)]
    return FractionLost(*share, count=kept.numel())


@pytest.mark.parametrize("scale", [1.0, 2.0**8, 2.0**16, 2.0**-6])
@pytest.mark.parametrize("row", NARROW_FORMATS, ids=by_name)
def test_fraction_lost_equals_casting(row: NumberFormat, scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    exponents = torch.rand(20_000, generator=generator, dtype=torch.float64) * 80 - 50
    signs = torch.randint(0, 2, (20_000,), generator=generator) * 2 - 1
    edges = [row.largest_rounded_to_zero, row.largest_rounded_to_subnormal, row.largest_rounded_to_finite, 0.0]
    values = torch.cat([signs * 2**exponents, torch.tensor(edges, dtype=torch.float64) / scale]).float()
    expected = share_by_casting(values, row, scale)
    assert fraction_lost(values, row, scale) == expected
    assert (expected.zero > 0 and expected.overflow > 0) or row.exponent_bits == 8


def test_values_that_are_already_non_finite_count_as_overflow() -> None:
    values = torch.tensor([math.inf, math.nan, 1.0, 0.0])
    assert fraction_lost(values, "fp16") == FractionLost(0.0, 0.0, 2 / 3, 3)


def test_what_the_scale_itself_makes_zero_is_lost() -> None:
    tiny = torch.tensor([1e-300], dtype=torch.float64)
    assert fraction_lost(tiny, "fp64", scale=1e-100) == FractionLost(1.0, 0.0, 0.0, 1)


def test_only_zeros_and_empty_tensors_lose_nothing() -> None:
    nothing = FractionLost(0.0, 0.0, 0.0, 0)
    assert fraction_lost(torch.zeros(3), "fp16") == nothing
    assert fraction_lost(torch.empty(0), "fp16") == nothing


def test_the_type_of_a_precision_has_the_names_of_the_table():
    assert list(get_args(PrecisionName)) == list(PRECISIONS)
