"""Splits a batch into smaller ones along its first dimension."""

import dataclasses
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from copy import copy
from enum import Enum
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

#: From a batch and a number of samples to batches of at most that many samples, in order.
SplitFunction = Callable[[Any, int], Sequence[Any]]

#: The loss of a batch is the mean of its parts' losses by what they count, or their sum.
LossForm = Literal["mean", "sum"]

_FIX = (
    " Pass MicroBatchOnOOM(split=...), a function from a batch and a size to a list of batches of at most that many"
    " samples."
)

_SHARED = (str, bytes, bool, int, float, complex, type(None), Enum, torch.dtype, torch.device)


class UnsplittableBatchError(MisconfigurationException):
    """A batch cannot be split along its first dimension."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"MicroBatchOnOOM cannot split {reason}{_FIX}")
        self.reason = reason


@dataclasses.dataclass(frozen=True)
class Microbatch:
    """A part of a micro-batch."""

    batch: Any  # of the same type as the whole
    samples: int  # how many it holds


def num_samples(batch: Any) -> int:
    """How many samples a batch holds, by the rules of :func:`split_batch`.

    >>> import torch
    >>> num_samples({"x": torch.zeros(3, 5), "names": ["a", "b", "c"], "epoch": 7})
    3
    """
    rows: dict[str, int] = {}

    def note(part: Any, path: str) -> Any:
        if (length := _rows(part, path)) is not None:
            rows[path] = length
        return part

    _map_leaves(batch, note)
    first_path, count = next(iter(rows.items()), ("", 0))
    for path, length in rows.items():
        if length != count:
            raise UnsplittableBatchError(f"this batch: {path} has {length} rows, {first_path} has {count}.")
    if not count:
        raise UnsplittableBatchError(
            f"a batch of type {type(batch).__name__!r} in which no tensor has a first dimension to split."
        )
    return count


def split_batch(batch: Any, size: int, least: int = 1) -> list[Microbatch]:
    """Splits a batch into as few and as even microbatches of at most ``size`` samples as possible.

    None has fewer than ``least``, if need be by more than ``size``.

    Tensors, TensorDicts and arrays are sliced along dimension 0 (views, nothing is copied). Dicts and other mutable
    mappings (``BatchEncoding``), dataclasses, named tuples, and lists and tuples that hold a tensor anywhere are taken
    apart and put together again. A list or tuple without tensors has one entry per sample. Numbers, strings, None and
    tensors without dimensions go to every microbatch as they are.

    A list of tensors is a container, not a list of samples: for samples of different shapes in a list give ``split=``.

    >>> import torch
    >>> [microbatch.batch for microbatch in split_batch([torch.arange(3), ("a", "b", "c")], 2)]
    [[tensor([0, 1]), ('a', 'b')], [tensor([2]), ('c',)]]
    """
    samples = num_samples(batch)
    number = max(min(-(-samples // size), samples // least), 1)
    if number == 1:
        return [Microbatch(batch, samples)]
    bounds = pairwise(-(-samples * index // number) for index in range(number + 1))
    return [
        Microbatch(_map_leaves(batch, partial(_slice, part=slice(start, stop))), stop - start) for start, stop in bounds
    ]


def split_by(split: SplitFunction, batch: Any, size: int) -> list[Microbatch]:
    """Splits a batch by a user's function; ``len(split(batch, 1))`` counts samples."""
    samples = len(split(batch, 1))
    microbatches = [Microbatch(part, len(split(part, 1))) for part in split(batch, size)]
    sizes = [microbatch.samples for microbatch in microbatches]
    if not microbatches or max(sizes) > size or sum(sizes) != samples or min(sizes) == 0:
        raise MisconfigurationException(
            f"MicroBatchOnOOM(split=...): split(batch, {size}) gave microbatches of {sizes} samples for a batch of"
            f" {samples}. Every microbatch must hold 1 to {size} samples, and all of them together the whole batch."
            " (Samples are counted as len(split(batch, 1)).)"
        )
    return microbatches


def copied_containers(batch: Any) -> Any:
    """The same tensors in copies of what holds them, to which a training step may write.

    >>> import torch
    >>> batch = {"x": [torch.ones(2)]}
    >>> _ = copied_containers(batch)["x"].pop()
    >>> len(batch["x"])
    1
    """
    return _map_leaves(batch, lambda leaf, _: leaf if _is_array(leaf) else copy(leaf))


@dataclasses.dataclass
class SplitState:
    """How the batches of a run are split: the settings of ``MicroBatchOnOOM``, and what the run has found out."""

    split: SplitFunction | None  # a user's function
    min_size: int
    least: int = 1  # rows in a part: two where layers normalise over them
    size: int | None = None  # samples in a part at most; None while everything has fitted
    form: LossForm | None = None  # None before the first split

    def parts_of(self, batch: Any) -> list[Microbatch]:
        """The batch, or its parts; a training step may write to the containers of each."""
        batch = copied_containers(batch)
        if self.size is None:
            return [Microbatch(batch, 1)]
        return (
            split_batch(batch, self.size, self.least) if self.split is None else split_by(self.split, batch, self.size)
        )

    def samples_of(self, batch: Any) -> int:
        """How many samples a batch holds."""
        return num_samples(batch) if self.split is None else len(self.split(batch, 1))


# -- taking apart and putting together ---------------------------------------------------------------------------------


def _map_leaves(value: Any, visit: Callable[[Any, str], Any], path: str = "batch") -> Any:
    """The same containers with what ``visit`` makes of each thing in them and its path; numbers and texts stay."""
    if isinstance(value, _SHARED):
        return value
    if _is_array(value):
        return visit(value, path)
    if isinstance(value, MutableMapping):
        rebuilt = copy(value)  # its constructor may take other arguments
        for key, part in value.items():
            rebuilt[key] = _map_leaves(part, visit, f"{path}[{key!r}]")
        return rebuilt
    if _is_sequence(value) and (hasattr(value, "_fields") or _holds_array(value)):
        parts = [_map_leaves(part, visit, f"{path}[{index}]") for index, part in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if not _is_dataclass(value):
        return visit(value, path)
    rebuilt = copy(value)
    for field in dataclasses.fields(value):
        # A frozen dataclass has no other way.
        part = _map_leaves(getattr(value, field.name), visit, f"{path}.{field.name}")
        object.__setattr__(rebuilt, field.name, part)
    return rebuilt


def _rows(value: Any, path: str) -> int | None:
    """How many samples something in a batch has; None where it goes to every microbatch as it is."""
    problem = ""
    if isinstance(value, Tensor) and (value.is_nested or value.layout != torch.strided):
        problem = "a nested or sparse tensor"
    elif not (_is_array(value) or _is_sequence(value)):
        problem = f"of type {type(value).__name__!r}"
    elif getattr(value, "batch_size", None) == ():
        problem = f"a {type(value).__name__} without a batch dimension"
    if problem:
        raise UnsplittableBatchError(f"this batch: {path} is {problem}.")
    has_rows = value.ndim if _is_array(value) else len(value)
    return len(value) if has_rows else None


def _slice(value: Any, path: str, part: slice) -> Any:
    return value if _rows(value, path) is None else value[part]


def _is_sequence(value: Any) -> bool:
    return isinstance(value, list | tuple) and not isinstance(value, PackedSequence)


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _is_array(value: Any) -> bool:
    """A tensor, what is sliced as one (a TensorDict), or a NumPy array; NumPy is imported only by the user."""
    numpy = sys.modules.get("numpy")
    is_sliced = isinstance(value, Tensor) or isinstance(getattr(value, "batch_size", None), torch.Size)
    return is_sliced or (numpy is not None and isinstance(value, numpy.ndarray))


def _holds_array(value: Any) -> bool:
    """Whether an array is anywhere in it."""
    if isinstance(value, Mapping):
        value = list(value.values())
    elif _is_dataclass(value):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    return any(map(_holds_array, value)) if _is_sequence(value) else _is_array(value)
