"""Splits a batch into smaller ones along its first dimension, and joins what a step returned for each."""

import dataclasses
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from copy import copy
from enum import Enum
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

#: From a batch and a number of samples to batches of at most that many samples, in order.
SplitFunction = Callable[[Any, int], Sequence[Any]]

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
        rows[path] = len(part)
        return part

    _map_rows(batch, note)
    first_path = next(iter(rows), "")
    count = rows.get(first_path, 0)
    for path, length in rows.items():
        if length != count:
            raise UnsplittableBatchError(f"this batch: {path} has {length} rows, {first_path} has {count}.")
    if not count:
        raise UnsplittableBatchError(
            f"a batch of type {type(batch).__name__!r} in which no tensor has a first dimension to split."
        )
    return count


def microbatch_bounds(samples: int, size: int, least: int = 1) -> list[tuple[int, int]]:
    """Start and stop of as few and as even microbatches as possible, none larger than ``size``.

    None of them is smaller than ``least``, if need be by making them larger.

    >>> microbatch_bounds(9, 4)
    [(0, 3), (3, 6), (6, 9)]
    >>> microbatch_bounds(5, 4)
    [(0, 3), (3, 5)]
    >>> microbatch_bounds(5, 2, least=2)
    [(0, 3), (3, 5)]
    """
    num_microbatches = max(min(-(-samples // size), samples // least), 1)
    small, larger = divmod(samples, num_microbatches)
    stops = [small * (index + 1) + min(index + 1, larger) for index in range(num_microbatches)]
    return list(zip([0, *stops[:-1]], stops, strict=True))


def split_batch(batch: Any, size: int, least: int = 1) -> list[Microbatch]:
    """Splits a batch into microbatches of at most ``size`` samples, and of ``least`` or more.

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
    if samples <= size:
        return [Microbatch(batch, samples)]
    return [
        Microbatch(_map_rows(batch, partial(_slice, part=slice(start, stop))), stop - start)
        for start, stop in microbatch_bounds(samples, size, least)
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
    """The same tensors in new dicts and lists, of which a training step may pop entries.

    >>> import torch
    >>> batch = {"x": [torch.ones(2)]}
    >>> _ = copied_containers(batch)["x"].pop()
    >>> len(batch["x"])
    1
    """
    if _is_tensordict(batch):
        return copy(batch)
    if isinstance(batch, MutableMapping):
        return _rebuild_mapping(batch, {key: copied_containers(part) for key, part in batch.items()})
    if isinstance(batch, list | tuple) and _holds_tensor(batch):
        return _rebuild_sequence(batch, [copied_containers(part) for part in batch])
    return batch


def weighted_mean(values: Sequence[Tensor], weights: Sequence[float | Tensor]) -> Tensor:
    """The mean of floating-point tensors by weights; what weighs nothing is left out, even if it is NaN.

    >>> import torch
    >>> weighted_mean([torch.tensor(1.0), torch.tensor(4.0), torch.tensor(torch.nan)], [1, 2, 0])
    tensor(3.)
    """
    stacked = torch.stack(list(values))
    by = torch.stack([torch.as_tensor(weight, dtype=torch.float64, device=stacked.device) for weight in weights])
    # Where nothing is counted, the whole has the same NaN as its parts, or the same number.
    by = torch.where(by.sum() > 0, by, 1.0)
    by = (by / by.sum()).reshape(-1, *[1] * (stacked.ndim - 1)).to(stacked.dtype)
    return torch.where(by > 0, stacked * by, 0.0).sum(0)


def merge_outputs(outputs: Sequence[Any], sizes: Sequence[int], weights: Sequence[float | Tensor]) -> Any:
    """Joins what a step returned for each microbatch into what it might have returned for the whole.

    Tensors with one row per sample, and lists with one entry per sample, are joined. Floating-point numbers, and
    tensors of one shape, are averaged by ``weights``. Mappings, and lists that hold tensors, are joined entry by entry.
    Of anything else the last microbatch's is taken.

    >>> import torch
    >>> merge_outputs([{"acc": 0.5, "y": torch.ones(3)}, {"acc": 1.0, "y": torch.zeros(1)}], [3, 1], [3, 1])
    {'acc': 0.625, 'y': tensor([1., 1., 1., 0.])}
    """
    last = outputs[-1]
    if len(outputs) == 1 or any(type(output) is not type(last) for output in outputs):
        return last
    if isinstance(last, Tensor):
        return _merge_tensors(outputs, sizes, weights)
    if isinstance(last, float):
        return float(weighted_mean([torch.tensor(output, dtype=torch.float64) for output in outputs], weights))
    if isinstance(last, Mapping):
        keys = [key for key in last if all(key in output for output in outputs)]
        merged = {key: merge_outputs([output[key] for output in outputs], sizes, weights) for key in keys}
        return _rebuild_mapping(last, merged)
    if isinstance(last, list | tuple):
        return _merge_sequences(outputs, sizes, weights)
    return last


def _merge_tensors(outputs: Sequence[Tensor], sizes: Sequence[int], weights: Sequence[float | Tensor]) -> Tensor:
    if all(o.ndim and o.shape[0] == size for o, size in zip(outputs, sizes, strict=True)):
        if len({o.shape[1:] for o in outputs}) == 1:
            return torch.cat(list(outputs))
    elif len({o.shape for o in outputs}) == 1 and outputs[-1].is_floating_point():
        return weighted_mean(outputs, weights)
    return outputs[-1]


def _merge_sequences(outputs: Sequence[Any], sizes: Sequence[int], weights: Sequence[float | Tensor]) -> Any:
    last = outputs[-1]
    if not _holds_tensor(last):
        if hasattr(last, "_fields") or any(len(o) != size for o, size in zip(outputs, sizes, strict=True)):
            return last
        return type(last)(entry for output in outputs for entry in output)
    if any(len(output) != len(last) for output in outputs):
        return last
    return _rebuild_sequence(last, [merge_outputs(parts, sizes, weights) for parts in zip(*outputs, strict=True)])


# -- taking apart and putting together ---------------------------------------------------------------------------------


def _map_rows(value: Any, visit: Callable[[Any, str], Any], path: str = "batch") -> Any:
    """The same containers with what ``visit`` makes of everything in them that has one row per sample, at its path."""
    if isinstance(value, Tensor) and (value.is_nested or value.layout != torch.strided):
        raise UnsplittableBatchError(f"this batch: {path} is a nested or sparse tensor.")
    if isinstance(value, PackedSequence):
        raise UnsplittableBatchError(f"this batch: {path} is a PackedSequence.")
    if isinstance(value, _SHARED):
        return value
    if _is_tensordict(value) and not value.batch_size and len(value.keys()):
        raise UnsplittableBatchError(f"this batch: {path} is a {type(value).__name__} without a batch dimension.")
    if _is_array(value):
        return visit(value, path) if value.ndim else value
    if _is_list_of_samples(value):
        return visit(value, path) if value else value
    if isinstance(value, MutableMapping):
        return _rebuild_mapping(value, {k: _map_rows(part, visit, f"{path}[{k!r}]") for k, part in value.items()})
    if isinstance(value, list | tuple):
        return _rebuild_sequence(value, [_map_rows(part, visit, f"{path}[{i}]") for i, part in enumerate(value)])
    if not _is_dataclass(value):
        raise UnsplittableBatchError(f"this batch: {path} is of type {type(value).__name__!r}.")
    rebuilt = copy(value)
    for field in dataclasses.fields(value):
        # A frozen dataclass has no other way.
        part = _map_rows(getattr(value, field.name), visit, f"{path}.{field.name}")
        object.__setattr__(rebuilt, field.name, part)
    return rebuilt


def _slice(rows: Any, path: str, part: slice) -> Any:
    return rows[part] if _is_array(rows) else type(rows)(rows[part])


def _is_list_of_samples(value: Any) -> bool:
    return isinstance(value, list | tuple) and not hasattr(value, "_fields") and not _holds_tensor(value)


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _is_array(value: Any) -> bool:
    """A tensor, a TensorDict or a NumPy array; NumPy is imported only if the user has done so."""
    numpy = sys.modules.get("numpy")
    if isinstance(value, Tensor) or _is_tensordict(value):
        return True
    return numpy is not None and isinstance(value, numpy.ndarray)


def _is_tensordict(value: Any) -> bool:
    """What is sliced as one tensor is: a TensorDict, a tensorclass."""
    return not isinstance(value, Tensor) and isinstance(getattr(value, "batch_size", None), torch.Size)


def _holds_tensor(value: Any) -> bool:
    if _is_array(value):
        return True
    if isinstance(value, Mapping):
        return any(_holds_tensor(part) for part in value.values())
    if isinstance(value, list | tuple):
        return any(_holds_tensor(part) for part in value)
    if _is_dataclass(value):
        return any(_holds_tensor(getattr(value, field.name)) for field in dataclasses.fields(value))
    return False


def _rebuild_mapping(like: Mapping[Any, Any], content: dict[Any, Any]) -> Mapping[Any, Any]:
    if not isinstance(like, MutableMapping):
        return content
    # A copy keeps what the class knows besides its entries; its constructor may take other arguments.
    rebuilt = copy(like)
    for key in like:
        if key in content:
            rebuilt[key] = content[key]
        else:
            del rebuilt[key]
    return rebuilt


def _rebuild_sequence(like: Any, content: list[Any]) -> Any:
    return type(like)(*content) if hasattr(like, "_fields") else type(like)(content)
