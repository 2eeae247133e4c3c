"""What `lightning_mp.training.precision.masters.split_numbers` does, one step at a time and on copies."""

import random

import torch
from torch import Tensor

# Zero, the tie and its neighbours, the ends, what is a tie once it is rounded to 24 bits, and some others.
_LOW_HALVES = [0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x0AF5, 0x5555, 0xAAAA, 0xF00F]
_LOW_HALVES += [0x0100, 0x7F01, 0x7F80, 0x80FF, 0xFF01, 0xFF80]
#: Every upper half of a float32 number, with lower halves of every kind.
EVERY_CLASS = (
    ((torch.arange(2**16, dtype=torch.int32)[:, None] << 16) | torch.tensor(_LOW_HALVES, dtype=torch.int32))
    .flatten()
    .view(torch.float32)
)


def bits(numbers: Tensor) -> Tensor:
    """As int32, or int16."""
    return numbers.detach().contiguous().view(torch.int32 if numbers.dtype == torch.float32 else torch.int16)


def away(numbers: Tensor) -> Tensor:
    """bf16 numbers, rounded to nearest, ties away from zero."""
    pattern = bits(numbers).clone()
    pattern[(pattern & 0xFFFF) == 0x8000] += 1
    return pattern.view(torch.float32).to(torch.bfloat16)


def round_to_24_bits(numbers: Tensor, step: int) -> Tensor:
    """Stochastically, by a noise in the lowest byte of the magnitude."""
    magnitude = bits(numbers) & 0x7FFFFFFF
    offset = random.Random(step).getrandbits(16) - 0x8000
    noise = ((offset + (0x9E37 - 0x10000) * bits(numbers).to(torch.int16).long()) >> 8) & 0xFF
    magnitude = torch.where(numbers.isnan(), 0x7FC00000, (magnitude + noise.int()) & ~0xFF)
    return torch.where(numbers.signbit(), magnitude | -0x80000000, magnitude).int().view(torch.float32)
