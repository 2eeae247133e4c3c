"""Masters taken apart into a bf16 weight and 16 bits, over every class of bit pattern."""

import pytest
import torch
from torch import Tensor

from lightning_mp.precision.masters.bf16_remainder import join, split

HIGH_HALVES = torch.arange(2**16, dtype=torch.int32)
# Zero, the tie and its neighbours, the ends, and some others.
LOW_HALVES = torch.tensor([0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x0AF5, 0x5555, 0xAAAA, 0xF00F]).int()
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
