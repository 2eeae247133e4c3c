"""Masters taken apart into a bf16 weight and 16 or 8 bits, over every class of bit pattern."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_mp.precision.masters.bf16_remainder import join, round_to_24_bits, split, split_24_bits
from lightning_mp.precision.masters.store import make_store

HIGH_HALVES = torch.arange(2**16, dtype=torch.int32)
# Zero, the tie and its neighbours, the ends, what is a tie once it is rounded to 24 bits, and some others.
LOW_HALVES = [0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x0AF5, 0x5555, 0xAAAA, 0xF00F]
LOW_HALVES = torch.tensor([*LOW_HALVES, 0x0100, 0x7F01, 0x7F80, 0x80FF, 0xFF01, 0xFF80]).int()
EVERY_CLASS = ((HIGH_HALVES[:, None] << 16) | LOW_HALVES).flatten().view(torch.float32)


def bits(numbers: Tensor) -> Tensor:
    return numbers.view(torch.int32 if numbers.dtype == torch.float32 else torch.int16)


CLASSES = {
    "normal": lambda x: x.isfinite() & (x.abs() >= torch.finfo(torch.float32).tiny),
    "subnormal": lambda x: (x != 0) & (x.abs() < torch.finfo(torch.float32).tiny),
    "zero": lambda x: x == 0,
    "infinity": lambda x: x.isinf(),
}


@pytest.mark.parametrize("name", CLASSES)
def test_numbers_come_back_to_the_bit(name: str) -> None:
    numbers = EVERY_CLASS[CLASSES[name](EVERY_CLASS)]
    assert numbers.numel() >= 2
    assert (numbers.signbit().any(), (~numbers.signbit()).any()) == (True, True)
    working, remainder = split(numbers)
    assert (working.dtype, remainder.dtype) == (torch.bfloat16, torch.int16)
    assert torch.equal(bits(join(working, remainder)), bits(numbers))


def test_nan_stays_nan_with_its_sign() -> None:
    """CUDA's own nan is 0x7fffffff; plain integer rounding would make -0.0 of it."""
    nans = torch.cat([EVERY_CLASS[EVERY_CLASS.isnan()], torch.tensor([0x7FFFFFFF, -1]).int().view(torch.float32)])
    working, remainder = split(nans)
    assert working.isnan().all()
    assert join(working, remainder).isnan().all()
    assert torch.equal(working.signbit(), nans.signbit())


def test_the_bf16_number_is_torchs_but_for_ties() -> None:
    numbers = EVERY_CLASS[~EVERY_CLASS.isnan()]
    ours, theirs = split(numbers)[0], numbers.to(torch.bfloat16)
    tie = (bits(numbers) & 0xFFFF) == 0x8000
    assert torch.equal(bits(ours[~tie]), bits(theirs[~tie]))
    assert (ours[tie].abs().float() >= numbers[tie].abs()).all(), "ties go away from zero"


def test_what_is_left_of_a_changed_weight_rounds_to_it() -> None:
    numbers = EVERY_CLASS[EVERY_CLASS.isfinite()]
    _, remainder = split(numbers)
    changed = torch.tensor([0.0, -0.0, 1.0, -3.0, 2.0**-130, 1e38]).to(torch.bfloat16)
    joined = join(changed[:, None].expand(-1, numbers.numel()).contiguous(), remainder.expand(len(changed), -1))
    assert torch.equal(split(joined)[0], changed[:, None].expand_as(joined))
    assert joined.isfinite().all()


def test_any_shape_and_layout() -> None:
    for numbers in (torch.tensor(1.1), torch.randn(0), torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)):
        assert torch.equal(join(*split(numbers)), numbers)


STEPS = [0, 1, 2**40]


def is_nearly_infinite(numbers: Tensor) -> Tensor:
    return numbers.isfinite() & (bits(numbers.abs()) > 0x7F7FFF00)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", CLASSES)
def test_24_bits_are_off_by_less_than_the_last_of_them(name: str, step: int) -> None:
    numbers = EVERY_CLASS[CLASSES[name](EVERY_CLASS)]
    working, remainder = split_24_bits(numbers, step)
    assert (working.dtype, remainder.dtype) == (torch.bfloat16, torch.int8)
    rounded = join(working, remainder)
    assert torch.equal(bits(rounded), bits(round_to_24_bits(numbers, step)))
    assert torch.equal(rounded.signbit(), numbers.signbit())
    assert (bits(rounded) & 0xFF == 0).all()
    in_range = ~is_nearly_infinite(numbers)
    error = (rounded.double() - numbers.double()).abs()[in_range & numbers.isfinite()]
    # a power of two that no finite number is below, and 2^-126 where numbers are subnormal
    power = 2.0 ** (torch.frexp(numbers.double()).exponent - 1).clamp(min=-126).double()
    assert (error < 2.0**-15 * power[in_range & numbers.isfinite()]).all()
    if name in ("zero", "infinity"):
        assert torch.equal(rounded, numbers)


def test_the_bound_of_the_error_is_a_tight_one() -> None:
    numbers = 1 + 2.0**-23 * torch.arange(1, 256)
    errors = torch.stack([(round_to_24_bits(numbers, step) - numbers).abs() for step in range(256)])
    assert errors.max() > 0.98 * 2**-15
    assert errors.min(0).values.max() <= 2**-16


@pytest.mark.parametrize("step", STEPS)
def test_24_bits_stay_as_they_are(step: int) -> None:
    """What was read from a checkpoint, and what a skipped step leaves."""
    kept = round_to_24_bits(EVERY_CLASS, 5)
    assert torch.equal(bits(round_to_24_bits(kept, step)), bits(kept))


@pytest.mark.parametrize("step", STEPS)
def test_the_weight_is_the_nearest_to_24_bits(step: int) -> None:
    numbers = EVERY_CLASS[EVERY_CLASS.isfinite()]
    assert torch.equal(bits(split_24_bits(numbers, step)[0]), bits(split(round_to_24_bits(numbers, step))[0]))


def test_a_nan_of_24_bits_stays_a_nan_with_its_sign() -> None:
    nans = torch.cat([EVERY_CLASS[EVERY_CLASS.isnan()], torch.tensor([0x7FFFFFFF, -1]).int().view(torch.float32)])
    working, remainder = split_24_bits(nans, 3)
    assert working.isnan().all()
    assert join(working, remainder).isnan().all()
    assert torch.equal(working.signbit(), nans.signbit())


@pytest.mark.parametrize("dtype", [torch.int16, torch.int8])
@pytest.mark.parametrize("step", STEPS)
def test_few_kernels_over_many_weights_do_what_is_done_to_one(dtype: torch.dtype, step: int) -> None:
    store = make_store("remainder" if dtype == torch.int16 else "24bit")
    weights = [nn.Parameter(torch.zeros(number).bfloat16()) for number in (EVERY_CLASS.numel(), 3)]
    store.steps = step
    lent = store.swap_in(weights)
    with torch.no_grad():
        lent[0].copy_(EVERY_CLASS)
    store.write_back(weights, lent)
    working, remainder = split(EVERY_CLASS) if dtype == torch.int16 else split_24_bits(EVERY_CLASS, step)
    number = ~EVERY_CLASS.isnan()
    # Torch rounds ties to even, as the nearest weight; no tie is left where the remainder has all 16 bits.
    assert torch.equal(bits(weights[0].detach()[number]), bits(working[number]))
    (again, _) = store.swap_in(weights)
    assert torch.equal(bits(again.detach()[number]), bits(join(working, remainder)[number]))
    assert weights[0][~number].isnan().all()
    assert again[~number].isnan().all()


@settings(max_examples=200, deadline=None)
@given(pattern=st.integers(0, 2**32 - 1), step=st.integers(0, 2**50))
def test_any_number_of_24_bits_is_one_of_its_two_neighbours(pattern: int, step: int) -> None:
    number = torch.tensor([pattern - 2**32 if pattern >= 2**31 else pattern], dtype=torch.int32).view(torch.float32)
    rounded = join(*split_24_bits(number, step))
    if number.isnan():
        assert rounded.isnan().all()
        return
    below = pattern & ~0xFF
    neighbours = {below, below if pattern & 0xFF == 0 else below + 0x100}
    assert int(bits(rounded)) % 2**32 in neighbours


@pytest.mark.parametrize("update", [2.0**-22, 2.0**-20, -3e-6])
def test_updates_below_the_last_bit_add_up_on_average(update: float) -> None:
    """To nearest, a weight of 1 would never move."""
    before = 1 + 2.0**-15 * torch.randint(1, 2**15, (2000,), generator=torch.Generator().manual_seed(0))
    moved = []
    for run in range(4):
        master = before
        for step in range(250):
            master = round_to_24_bits(master + update, 1000 * run + step)
        moved.append((master.double() - before.double()).mean() / (250 * update))
    assert torch.stack(moved).mean() == pytest.approx(1, abs=0.15)
