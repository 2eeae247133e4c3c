"""Hashes of each step of a run, in a file of JSON lines, and the first step at which two runs part."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_mp.ground.core.nested_tensors import tensors_in

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
    """The same of all tensors in a batch, at any depth."""
    return bit_hash(tensors_in(value), device)


#: What is hashed of a step, in the order in which it comes about.
RECORDED_KINDS = ("batch", "loss", "gradients", "weights", "state")

Records = Mapping[int, Mapping[str, int]]


@dataclass(frozen=True)
class Parting:
    """The first step at which two runs part, and the kinds that differ in it, in the order of computation."""

    batch: int  # number of the training batch, counted from 0 over all epochs
    step: int  # optimizer step that the batch belongs to
    kinds: tuple[str, ...]  # of :data:`RECORDED_KINDS`; empty if the runs are equal
    num_compared: int  # batches that both runs recorded


def write_record(file: Path, batch: int, step: int, hashes: Mapping[str, int]) -> None:
    """Appends one line."""
    with file.open("a") as lines:
        lines.write(json.dumps({"batch_number": batch, "step": step, **hashes}) + "\n")


def read_records(file: Path) -> dict[int, dict[str, int]]:
    """Hashes by batch number; what a resumed run did again counts as it was done last.

    A last line that a kill has cut short is left out.
    """
    records: dict[int, dict[str, int]] = {}
    text = file.read_text()
    lines = text.splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            batch = record.pop("batch_number")
            if not all(type(value) is int for value in (batch, *record.values())):
                raise TypeError
        except (ValueError, KeyError, TypeError, AttributeError):
            if number == len(lines) and not text.endswith("\n"):
                break
            raise ValueError(
                f"{file}, line {number}: not a record of ExactResume(record=...): {line[:60]!r}. Give the file that the"
                " run wrote."
            ) from None
        records[batch] = record
    return records


def first_parting(first: Records, second: Records) -> Parting:
    """Compares the batches that both runs have recorded.

    Example:
        >>> a = {0: {"step": 0, "batch": 1, "loss": 5}, 1: {"step": 1, "batch": 2, "loss": 6}}
        >>> b = {0: {"step": 0, "batch": 1, "loss": 5}, 1: {"step": 1, "batch": 2, "loss": 7}}
        >>> first_parting(a, b)
        Parting(batch=1, step=1, kinds=('loss',), num_compared=2)
    """
    common = sorted(first.keys() & second.keys())
    if not common:
        raise ValueError("The two files have no batch in common: they record other parts of a run.")
    for batch in common:
        left, right = first[batch], second[batch]
        kinds = tuple(kind for kind in RECORDED_KINDS if left.get(kind) != right.get(kind))
        if kinds or left.get("step") != right.get("step"):
            return Parting(batch, left.get("step", 0), kinds or ("step",), len(common))
    return Parting(common[-1], first[common[-1]].get("step", 0), (), len(common))
