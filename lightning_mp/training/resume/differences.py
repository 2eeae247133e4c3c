"""What differs between two checkpoints, by kind, to the bit."""

import math
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

#: Where ``ExactResume`` writes its part of a checkpoint.
EXACT_RESUME_KEY = "lightning_mp_exact_resume"

_Path = tuple[str | int, ...]

#: What a checkpoint holds, in the order in which a difference is reported.
KINDS = (
    "weights",
    "masters",
    "optimizer state",
    "learning rate schedule",
    "loss scaler",
    "accumulated gradients",
    "counters",
    "random state",
    "position in the data",
    "epoch metrics",
    "callbacks",
    "other",
)

_OF_ENTRY = {
    "state_dict": "weights",
    "lr_schedulers": "learning rate schedule",
    "native_amp_scaling_state": "loss scaler",
    "lightning_mp_partial_window": "accumulated gradients",
    "epoch": "counters",
    "global_step": "counters",
    "callbacks": "callbacks",
}
_OF_RESUME = {"random": "random state", "loaders": "position in the data", "metrics": "epoch metrics"}
# Equal runs in two folders, or at two speeds, differ in these: states of callbacks, and other values.
_OF_THE_MACHINE = ("path", "seconds", "time", "best_k_models", "flops")
_OF_THE_CLOCK = re.compile(r"lightning_mp_device_seconds|\bmp/([mh]fu|forecast_seconds|\w+_per_second)\b")


@dataclass(frozen=True)
class Difference:
    """One value that differs."""

    kind: str  # one of :data:`KINDS`
    name: str  # where it is in the checkpoint
    num_different: int  # elements that differ
    num_elements: int  # all elements of the value
    largest: float | None  # the largest absolute difference; None where there is none, as between text or shapes
    note: str = ""  # why elements cannot be compared, where that is so

    @override
    def __str__(self) -> str:
        largest = "" if self.largest is None else f", by {self.largest:.3g} at most"
        what = self.note or f"{self.num_different:,} of {self.num_elements:,} elements{largest}"
        return f"{self.kind}: {self.name}: {what}"


def compare_checkpoints(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[Difference]:
    """Compares two checkpoints of one step value by value, as bits: 0.0 and -0.0 differ, a NaN equals itself.

    Left out are paths, times, rates per second, FLOPs that were timed, and the version of Lightning.

    Example:
        >>> a = {"global_step": 3, "state_dict": {"weight": torch.tensor([1.0, 2.0])}}
        >>> b = {"global_step": 3, "state_dict": {"weight": torch.tensor([1.0, 2.5])}}
        >>> compare_checkpoints(a, a)
        []
        >>> print(*compare_checkpoints(a, b))
        weights: weight: 1 of 2 elements, by 0.5 at most
    """
    left, right = dict(_values(first)), dict(_values(second))
    found = []
    for path in {**left, **right}:
        kind, name = kind_of(path), _name(path)
        if path not in left or path not in right:
            number = _size(left.get(path, right.get(path)))
            where = "first" if path in left else "second"
            found.append(Difference(kind, name, number, number, None, f"only in the {where} one"))
            continue
        difference = _difference(left[path], right[path])
        if difference is not None:
            found.append(Difference(kind, name, *difference))
    return sorted(found, key=lambda difference: KINDS.index(difference.kind))


def kinds_in(checkpoint: Mapping[str, Any]) -> dict[str, int]:
    """How many elements of each kind are compared.

    Example:
        >>> kinds_in({"global_step": 3, "state_dict": {"weight": torch.zeros(2, 3)}})
        {'weights': 6, 'counters': 1}
    """
    counts = dict.fromkeys(KINDS, 0)
    for path, value in _values(checkpoint):
        counts[kind_of(path)] += _size(value)
    return {kind: count for kind, count in counts.items() if count}


def kind_of(path: _Path) -> str:
    """What a value is, by its place in a checkpoint."""
    entry = path[0]
    if entry == "optimizer_states":
        return "masters" if any("master" in str(part) for part in path) else "optimizer state"
    if entry == "loops":
        return "position in the data" if "combined_loader" in path else "counters"
    if entry == EXACT_RESUME_KEY:
        return next((_OF_RESUME[part] for part in path if isinstance(part, str) and part in _OF_RESUME), "other")
    if isinstance(entry, str) and entry.endswith("Precision"):
        return "loss scaler"
    return _OF_ENTRY.get(str(entry), "other")


def _values(value: Any, path: _Path = ()) -> Iterator[tuple[_Path, Any]]:
    """Every value that is no container, with its path."""
    if len(path) == 1 and path[0] == "pytorch-lightning_version":
        return
    if _OF_THE_CLOCK.search(".".join(map(str, path))):
        return
    if len(path) > 1 and path[0] == "callbacks" and any(word in str(path[-1]) for word in _OF_THE_MACHINE):
        return
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _values(item, (*path, key))
    elif isinstance(value, list | tuple | set):
        for place, item in enumerate(sorted(value, key=repr) if isinstance(value, set) else value):
            yield from _values(item, (*path, place))
    else:
        if path[0] == "callbacks" and isinstance(value, str):
            return
        yield path, value


def _name(path: _Path) -> str:
    parts = path[1:] if path[0] == "state_dict" else path
    return ".".join(map(str, parts))


def _size(value: Any) -> int:
    return value.numel() if isinstance(value, Tensor) else 1


def _difference(first: Any, second: Any) -> tuple[int, int, float | None, str] | None:
    """(elements that differ, all elements, largest difference, note); None if equal to the bit."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return _difference_of_tensors(first, second)
    number = max(_size(first), _size(second))
    if type(first) is not type(second):
        return number, number, None, f"{type(first).__name__} in the first, {type(second).__name__} in the second"
    # 0.0 equals -0.0, and a NaN does not equal itself.
    if struct.pack("d", first) == struct.pack("d", second) if isinstance(first, float) else first == second:
        return None
    largest = abs(first - second) if isinstance(first, int | float) else None
    return 1, 1, largest, ""


def _difference_of_tensors(first: Tensor, second: Tensor) -> tuple[int, int, float | None, str] | None:
    number = max(first.numel(), second.numel())
    if first.shape != second.shape or first.dtype != second.dtype:
        said = [f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in (first, second)]
        return number, number, None, f"{said[0]} in the first, {said[1]} in the second"
    first, second = (t.detach().cpu().to_dense().contiguous() for t in (first, second))
    differs = (_bytes(first) != _bytes(second)).any(dim=-1)
    count = int(differs.sum())
    if not count:
        return None
    wide: Callable[[Tensor], Tensor] = torch.Tensor.to if first.is_complex() else torch.Tensor.double
    change = (wide(first.flatten()[differs]) - wide(second.flatten()[differs])).abs()
    return count, number, float(change.max()) if not change.isnan().any() else math.nan, ""


def _bytes(tensor: Tensor) -> Tensor:
    """Shape ``[num_elements, bytes of an element]``."""
    return tensor.reshape(-1, 1).view(torch.uint8).reshape(tensor.numel(), tensor.element_size())
