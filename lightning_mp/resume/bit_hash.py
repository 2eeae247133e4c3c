"""A hash of tensors that stays on their device until it is read."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_mp.core.nested_tensors import tensors_in

# Odd, from Knuth's multiplicative hashing (TAOCP volume 3, section 6.4).
_MULTIPLIER = 2654435761
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def bit_hash(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """An int64 scalar of the bits of tensors, in their order; any one bit that changes changes it.

    Elements are read as integers of at most 32 bits, each is multiplied by an odd number of its place, and all are
    summed modulo 2^64: the sum has no order, so that it is the same on every device and in every run.

    Example:
        >>> cpu = torch.device("cpu")
        >>> int(bit_hash([torch.tensor([0.0])], cpu)) == int(bit_hash([torch.tensor([-0.0])], cpu))
        False
        >>> int(bit_hash([torch.ones(3)], cpu)) == int(bit_hash([torch.ones(3)], cpu))
        True
    """
    total = torch.zeros((), dtype=torch.int64, device=device)
    for number, tensor in enumerate(tensors, start=1):
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        plain = own.detach().to_dense().contiguous().reshape(-1)
        if not plain.numel():
            continue
        size = min(plain.element_size(), 4)
        words = (plain.view(torch.uint8) if plain.dtype is torch.bool else plain.view(_INTEGERS[size])).to(torch.int64)
        places = torch.arange(1, words.numel() + 1, device=words.device, dtype=torch.int64)
        # + 1: zeros count as well
        total += ((words + 1) * (places * (2 * _MULTIPLIER) + (2 * number + 1))).sum().to(device)
    return total


def bit_hash_of_nested(value: Any, device: torch.device) -> Tensor:
    """The same of all tensors in a batch, wherever they are in it."""
    return bit_hash(tensors_in(value), device)
