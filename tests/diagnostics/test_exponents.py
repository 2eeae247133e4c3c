"""Exponent histograms against numpy's frexp, lightning_mp.ground.core.number_formats and real casts."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_mp.ground.core.bit_layouts import FORMATS, FP16
from lightning_mp.ground.core.number_formats import fraction_lost
from lightning_mp.monitors.diagnostics.underflow import exponents
from lightning_mp.monitors.diagnostics.underflow.exponents import (
    ExponentHistogram,
    ExponentTable,
    count_exponents,
    suggested_scale,
)

NARROW = ("bf16", "fp16", "fp8_e4m3fn", "fp8_e5m2", "tf32")
BITS = {torch.float16: np.uint16, torch.bfloat16: np.uint16, torch.float32: np.uint32, torch.float64: np.uint64}


def as_numpy(values: torch.Tensor) -> np.ndarray:
    """Exact: numpy has no bf16."""
    return (values.float() if values.dtype == torch.bfloat16 else values).numpy()


def reference(values: np.ndarray) -> ExponentHistogram:
    """The histogram by numpy, in other steps than ours."""
    values = values.reshape(-1)
    finite = np.abs(values[np.isfinite(values)])
    nonzero = finite[finite != 0]
    mantissas, powers = np.frexp(nonzero)
    bins = np.clip(powers - 1, -150, 128)
    return ExponentHistogram(
        counts={int(e): int(n) for e, n in zip(*np.unique(bins, return_counts=True), strict=True)},
        powers_of_two={
            int(e): int(n) for e, n in zip(*np.unique(bins[mantissas == 0.5], return_counts=True), strict=True)
        },
        num_zeros=int((values == 0).sum()),
        num_nonfinite=int((~np.isfinite(values)).sum()),
        largest=float(finite.max()) if finite.size else 0.0,
    )


def of_bits(bits: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    signed = {2: np.int16, 4: np.int32, 8: np.int64}[bits.dtype.itemsize]
    return torch.from_numpy(bits.view(signed).copy()).view(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_all_16_bit_patterns_equal_numpy(dtype: torch.dtype) -> None:
    values = of_bits(np.arange(2**16, dtype=np.uint16), dtype)
    histogram = ExponentHistogram.of(values)
    assert histogram == reference(as_numpy(values))
    assert histogram.num_zeros == 2
    assert histogram.num_values == 2**16
    assert min(histogram.counts) == (-24 if dtype == torch.float16 else -133)


@pytest.mark.parametrize("dtype", list(BITS))
@given(data=st.data())
def test_any_bits_equal_numpy(dtype: torch.dtype, data: st.DataObject) -> None:
    bits = data.draw(st_numpy.arrays(BITS[dtype], st.integers(0, 40)))
    values = of_bits(bits, dtype)
    assert ExponentHistogram.of(values) == reference(as_numpy(values))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zeros_subnormals_infs_and_nans(dtype: torch.dtype) -> None:
    smallest = 2.0**-149 if dtype == torch.float32 else 5e-324
    values = torch.tensor([0.0, -0.0, smallest, -3e-40, 1e-310, math.inf, -math.inf, math.nan, 1.0], dtype=dtype)
    histogram = ExponentHistogram.of(values)
    assert histogram == reference(as_numpy(values))
    # 1e-310 is zero in fp32; in fp64 it is below all bins, as 5e-324 is.
    lowest = {-149: 1} if dtype == torch.float32 else {-150: 2}
    assert histogram.counts == {**lowest, -132: 1, 0: 1}
    assert (histogram.num_zeros, histogram.num_nonfinite) == ((3, 3) if dtype == torch.float32 else (2, 3))


@pytest.mark.parametrize("dtype", list(BITS))
def test_many_values_equal_numpy_whatever_the_chunks(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    values = (torch.randn(300, 101) * torch.exp2(torch.randint(-30, 20, (300, 101)))).to(dtype)
    expected = reference(as_numpy(values))
    for chunk, per_copy in ((2**22, 4096), (9_999, 4096), (30_300, 100), (1, 1)):
        if chunk == 1:
            values, expected = values[:3], reference(as_numpy(values[:3]))
        monkeypatch.setattr(exponents, "_CHUNK_VALUES", chunk)
        monkeypatch.setattr(exponents, "_VALUES_PER_COPY", per_copy)
        assert ExponentHistogram.of(values) == expected
        assert ExponentHistogram.of(values.t()) == expected


@pytest.mark.parametrize("factor", [2.0**16, 1000.0, torch.tensor(2.0**-3), torch.tensor(3.0, dtype=torch.float64)])
def test_a_factor_is_multiplied_in_fp32_also_for_16_bit_values(factor: Any) -> None:
    values = torch.randn(1000).half()
    counts, largest = count_exponents(values, factor)
    histogram = ExponentHistogram.from_slots(counts.tolist(), float(largest))
    assert histogram == reference(values.float().numpy() * np.float32(float(factor)))
    assert histogram.num_nonfinite == 0


def test_nothing_in_the_counting_reads_from_the_device() -> None:
    class NoReading(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert func._schema.name not in ("aten::_local_scalar_dense", "aten::nonzero", "aten::bincount")
            return func(*args, **(kwargs or {}))

    values = torch.randn(20_000)
    with NoReading():
        count_exponents(values, torch.tensor(8.0))
        table = ExponentTable(["a"], torch.device("cpu"))
        table.add("a", values)
        table.sum_over_ranks_([1])
        table.vector()


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("power", [-20, 0, 1, 13])
def test_what_is_lost_equals_the_formats_own_count(name: str, power: int) -> None:
    """Also ties: the values are on a coarse grid, so that many are exactly half the smallest subnormal."""
    row, scale = FORMATS[name], 2.0**power
    grid = torch.randint(1, 4, (4000,)).double() * torch.exp2(torch.randint(-60, 20, (4000,)).double())
    limits = [row.largest_rounded_to_zero, row.smallest_normal, row.largest_finite, row.smallest_subnormal]
    edges = torch.tensor([limit * f / scale for limit in limits for f in (0.5, 1.0, 1.5, 2.0)], dtype=torch.float64)
    values = torch.cat([grid, edges, torch.tensor([0.0, math.inf, math.nan])])
    # bf16 and tf32 lose only what lies at the end of fp32's range.
    values = torch.cat([values, edges * 2.0**-3])
    ours, theirs = ExponentHistogram.of(values).fraction_lost(name, scale), fraction_lost(values, name, scale)
    below_bins = int((values.abs() < 2.0**-149).sum()) - 1
    assert below_bins == 0 or name in ("bf16", "tf32")
    assert ours.count == theirs.count
    assert ours.zero == pytest.approx(theirs.zero, abs=1e-12 + below_bins / ours.count)
    magnitudes = values.abs() * scale
    rounded_up = int(((magnitudes >= row.largest_rounded_to_subnormal) & (magnitudes < row.smallest_normal)).sum())
    assert ours.subnormal == pytest.approx(
        theirs.subnormal + rounded_up / ours.count, abs=1e-12 + below_bins / ours.count
    )
    assert ours.overflow <= theirs.overflow


def test_ties_are_lost_and_what_is_a_little_larger_is_not() -> None:
    tie = FP16.largest_rounded_to_zero
    values = torch.tensor([tie, tie * (1 + 2**-20), tie * (1 - 2**-20)])
    assert values.half().tolist() == [0.0, FP16.smallest_subnormal, 0.0]
    histogram = ExponentHistogram.of(values)
    assert histogram.fraction_lost("fp16").zero == 2 / 3
    assert histogram.fraction_lost("fp16", 2.0).zero == 0.0
    assert histogram.fraction_lost("fp16", 0.5).zero == 1.0


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp8_e5m2"])
@given(largest=st.floats(2.0**-40, 2.0**40, width=32))
def test_headroom_is_the_last_doubling_that_a_cast_survives(name: str, largest: float) -> None:
    row = FORMATS[name]
    doublings = int(ExponentHistogram.of(torch.tensor([largest, -largest / 3])).headroom_doublings(name))
    exact = torch.tensor(largest, dtype=torch.float64)
    assert (exact * 2.0**doublings).float().to(row.torch_dtype).float().isfinite()
    beyond = (exact * 2.0 ** (doublings + 1)).float()
    assert not beyond.to(row.torch_dtype).float().isfinite() or not beyond.isfinite()


@pytest.mark.parametrize(("largest", "doublings"), [(448.0, 0), (464.0, 0), (464.001, -1), (224.0, 1), (1.0, 8)])
def test_headroom_of_a_format_without_infinities(largest: float, doublings: int) -> None:
    assert ExponentHistogram.of(torch.tensor([largest])).headroom_doublings("fp8_e4m3fn") == doublings
    assert fraction_lost(torch.tensor([largest * 2.0**doublings]), "fp8_e4m3fn").overflow == 0.0
    assert fraction_lost(torch.tensor([largest * 2.0 ** (doublings + 1)]), "fp8_e4m3fn").overflow == 1.0


def test_headroom_without_finite_or_without_any_values() -> None:
    assert ExponentHistogram.of(torch.tensor([1.0, math.inf])).headroom_doublings("fp16") == -math.inf
    assert ExponentHistogram.of(torch.zeros(3)).headroom_doublings("fp16") == math.inf
    assert ExponentHistogram.of(torch.empty(0)) == ExponentHistogram()
    assert ExponentHistogram().fraction_lost("fp16").count == 0
    assert ExponentHistogram().zero_fraction == 0.0


@given(largest=st.floats(2.0**-7, 2.0**30, width=32), power=st.integers(-5, 20), margin=st.integers(0, 3))
def test_suggested_scale_is_the_largest_below_65504(largest: float, power: int, margin: int) -> None:
    """Micikevicius et al. 2017, section 3.2: the product with the largest gradient stays below 65504."""
    scale = 2.0**power
    histogram = ExponentHistogram.of(torch.tensor([largest]), scale)
    suggestion = suggested_scale(histogram, "fp16", scale, margin_doublings=margin)
    assert largest * suggestion * 2.0**margin < FP16.largest_rounded_to_finite
    assert suggestion == 2.0**24 or largest * suggestion * 2.0 ** (margin + 1) >= FP16.largest_rounded_to_finite


def test_suggested_scale_at_its_ends() -> None:
    assert suggested_scale(ExponentHistogram.of(torch.zeros(2)), "fp16", 8.0) is None
    assert suggested_scale(ExponentHistogram.of(torch.tensor([math.nan])), "fp16", 8.0) == 4.0
    assert suggested_scale(ExponentHistogram.of(torch.tensor([1e-30])), "fp16") == 2.0**24
    assert suggested_scale(ExponentHistogram.of(torch.tensor([1e30])), "fp16") == 2.0**-24
    assert suggested_scale(ExponentHistogram.of(torch.tensor([1.0]), 1000.0), "fp16", 1000.0) == 2.0**14


def test_sum_equals_the_histogram_of_all_values() -> None:
    first, second = torch.randn(50), torch.tensor([0.0, math.nan, 0.5, 1e9])
    total = ExponentHistogram.sum_of([ExponentHistogram.of(first), ExponentHistogram.of(second)])
    assert total == ExponentHistogram.of(torch.cat([first, second]))
    assert ExponentHistogram.sum_of([]) == ExponentHistogram()


def test_table_keeps_rows_apart() -> None:
    table = ExponentTable(["a", "b", "never"], torch.device("cpu"))
    first, second, third = torch.randn(9), torch.randn(5).half(), torch.randn(4).double()
    table.add("a", first, 4.0)
    table.add("b", second)
    table.add("a", third)
    rows = ExponentTable.decode(table.names, table.vector().tolist())
    both = ExponentHistogram.sum_of([ExponentHistogram.of(first, 4.0), ExponentHistogram.of(third)])
    assert rows == {"a": both, "b": ExponentHistogram.of(second), "never": ExponentHistogram()}
