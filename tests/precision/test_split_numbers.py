"""float32 numbers taken apart into a bf16 number and 16 or 8 bits, over every class of bit pattern."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from split_reference import EVERY_CLASS, away, bits, round_to_24_bits
from torch import Tensor

from lightning_mp.training.precision.masters.split_numbers import SplitNumbers

NANS = torch.cat([EVERY_CLASS[EVERY_CLASS.isnan()], torch.tensor([0x7FFFFFFF, -1]).int().view(torch.float32)])
CLASSES = {
    "normal": lambda x: x.isfinite() & (x.abs() >= torch.finfo(torch.float32).tiny),
    "subnormal": lambda x: (x != 0) & (x.abs() < torch.finfo(torch.float32).tiny),
    "zero": lambda x: x == 0,
    "infinity": lambda x: x.isinf(),
}
STEPS = [0, 1, 2**40]
REST_DTYPES = [torch.int16, torch.int8]


def split(numbers: Tensor, rest_dtype: torch.dtype, step: int = 0) -> SplitNumbers:
    room = SplitNumbers(numbers.numel(), rest_dtype, numbers.device)
    room.split(numbers.clone(), 0, step)
    return room


def joined(room: SplitNumbers) -> Tensor:
    return room.join(0, room.high.numel())


@pytest.mark.parametrize("name", CLASSES)
def test_numbers_return_to_the_bit_with_16_bits_of_rest(name: str) -> None:
    numbers = EVERY_CLASS[CLASSES[name](EVERY_CLASS)]
    assert (numbers.signbit().any(), (~numbers.signbit()).any()) == (True, True)
    assert torch.equal(bits(joined(split(numbers, torch.int16))), bits(numbers))


@pytest.mark.parametrize("rest_dtype", REST_DTYPES)
def test_nan_returns_as_nan(rest_dtype: torch.dtype) -> None:
    """CUDA's own nan is 0x7fffffff; rounded as an integer it would be -0.0."""
    room = split(NANS, rest_dtype, 3)
    assert room.high.isnan().all()
    assert joined(room).isnan().all()


def test_the_bf16_number_is_torchs_except_for_ties() -> None:
    numbers = EVERY_CLASS[~EVERY_CLASS.isnan()]
    ours, theirs = split(numbers, torch.int16).high, numbers.to(torch.bfloat16)
    tie = (bits(numbers) & 0xFFFF) == 0x8000
    assert torch.equal(bits(ours[~tie]), bits(theirs[~tie]))
    assert (ours[tie].abs().float() >= numbers[tie].abs()).all(), "ties go away from zero"


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", CLASSES)
def test_24_bits_differ_by_less_than_the_last_of_them(name: str, step: int) -> None:
    numbers = EVERY_CLASS[CLASSES[name](EVERY_CLASS)]
    room = split(numbers, torch.int8, step)
    rounded = joined(room)
    assert torch.equal(bits(rounded), bits(round_to_24_bits(numbers, step)))
    assert torch.equal(bits(room.high), bits(away(round_to_24_bits(numbers, step)))), "the nearest to 24 bits"
    # One last bit below infinity rounding may reach it.
    in_range = numbers.isfinite() & (bits(numbers.abs()) <= 0x7F7FFF00)
    error = (rounded.double() - numbers.double()).abs()[in_range]
    # a power of two that no finite number is below, and 2^-126 where numbers are subnormal
    power = 2.0 ** (torch.frexp(numbers.double()).exponent - 1).clamp(min=-126).double()
    assert (error < 2.0**-15 * power[in_range]).all()
    if name in ("zero", "infinity"):
        assert torch.equal(bits(rounded), bits(numbers))


def test_the_bound_of_the_error_is_a_tight_one() -> None:
    numbers = 1 + 2.0**-23 * torch.arange(1, 256)
    errors = torch.stack([(joined(split(numbers, torch.int8, step)) - numbers).abs() for step in range(256)])
    assert errors.max() > 0.98 * 2**-15
    assert errors.min(0).values.max() <= 2**-16


@pytest.mark.parametrize("step", STEPS)
def test_24_bits_stay_as_they_are(step: int) -> None:
    """What was read from a checkpoint, and what a skipped step leaves."""
    numbers = EVERY_CLASS[~EVERY_CLASS.isnan()]
    kept = joined(split(numbers, torch.int8, 5))
    assert torch.equal(bits(joined(split(kept, torch.int8, step))), bits(kept))


@pytest.mark.parametrize("rest_dtype", REST_DTYPES)
def test_a_changed_number_keeps_a_rest_below_half_its_last_bit(rest_dtype: torch.dtype) -> None:
    numbers = EVERY_CLASS[EVERY_CLASS.isfinite()]
    for value in torch.tensor([0.0, -0.0, 1.0, -3.0, 2.0**-130, 1e38]).bfloat16():
        room = split(numbers, rest_dtype)
        room.high.fill_(value)
        assert torch.equal(bits(away(joined(room))), bits(value.expand(len(numbers))))


@pytest.mark.parametrize("rest_dtype", REST_DTYPES)
def test_a_range_is_split_and_joined_alone(rest_dtype: torch.dtype) -> None:
    numbers = torch.randn(300)
    room = SplitNumbers(300, rest_dtype, numbers.device)
    for start, end in ((128, 300), (0, 128)):
        room.split(numbers[start:end].clone(), start, step=7)
    assert torch.equal(room.high, split(numbers, rest_dtype, 7).high)
    assert torch.equal(room.join(128, 256), joined(split(numbers, rest_dtype, 7))[128:256])


@settings(max_examples=200, deadline=None)
@given(pattern=st.integers(0, 2**32 - 1), step=st.integers(0, 2**50))
def test_any_number_of_24_bits_is_one_of_its_two_neighbours(pattern: int, step: int) -> None:
    number = torch.tensor([pattern - 2**32 if pattern >= 2**31 else pattern], dtype=torch.int32).view(torch.float32)
    rounded = joined(split(number, torch.int8, step))
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
            master = joined(split(master + update, torch.int8, 1000 * run + step))
        moved.append((master.double() - before.double()).mean() / (250 * update))
    assert torch.stack(moved).mean() == pytest.approx(1, abs=0.15)
