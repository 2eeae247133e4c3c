"""Which 16-bit weights other code may have changed since they were written, known without reading one of them.

torch counts changes in place (``tensor._version``), but none through ``parameter.data``. So while a run has masters,
reading or setting ``.data`` of a parameter marks it. Memory that a weight shares with another tensor (the flat weights
of an LSTM, a view that was kept) may be changed by that name, and counts as changed. A mark costs a comparison, never
a wrong number. Not seen: writes to the address of a weight by a kernel that holds no tensor, and, of a sharded weight,
``parameter.to_local().data``.
"""

from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_mp.core import private_api
from lightning_mp.gradients.gradient_ops import local_shard

_WATCHED_CLASSES = (nn.Parameter, DTensor)
_TENSOR_DATA: Any = torch.Tensor.data
_watching: "WeakSet[ChangedWeights]" = WeakSet()


def _get_data(tensor: Tensor) -> Tensor:
    for watch in _watching:
        watch.note(tensor)
    value: Tensor = _TENSOR_DATA.__get__(tensor)
    return value


def _set_data(tensor: Tensor, value: Tensor) -> None:
    for watch in _watching:
        watch.note(tensor)
    _TENSOR_DATA.__set__(tensor, value)


class ChangedWeights:
    """Of a set of weights, those that may have been changed since :meth:`written`.

    Until :meth:`watch` every weight may have been.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> changed = ChangedWeights()
        >>> changed.watch()
        >>> changed.written([weight])
        >>> changed.may_be(weight)
        False
        >>> _ = weight.data.mul_(2)
        >>> changed.may_be(weight)
        True
        >>> changed.end()
    """

    def __init__(self) -> None:
        self._marks: dict[Tensor, tuple[int, ...]] = {}
        self._noted: set[Tensor] = set()

    def watch(self) -> None:
        """From now on ``.data`` of parameters is watched; what was written before may have been changed."""
        self._noted.update(self._marks)
        _watching.add(self)
        for kind in _WATCHED_CLASSES:
            if "data" not in vars(kind):
                kind.data = property(_get_data, _set_data)  # type: ignore[assignment]

    def end(self) -> None:
        """Restores ``data`` of torch's classes, unless another instance is watching."""
        _watching.discard(self)
        for kind in _WATCHED_CLASSES if not _watching else ():
            if "data" in vars(kind):
                del kind.data

    def note(self, weight: Tensor) -> None:
        """Records that ``.data`` of a tensor was read or set."""
        if weight in self._marks:
            self._noted.add(weight)

    def written(self, weights: Iterable[Tensor]) -> None:
        """Records that these are up to date."""
        for weight in weights:
            self._marks[weight] = _mark(weight)
            self._noted.discard(weight)

    def may_be(self, weight: Tensor) -> bool:
        """Whether it may have been changed."""
        return (
            self not in _watching
            or weight in self._noted
            or self._marks.get(weight) != _mark(weight)
            or (type(weight) is nn.Parameter and private_api.shares_memory(weight))
            or not isinstance(weight, _WATCHED_CLASSES)
        )

    def version_moved(self, weight: Tensor) -> bool:
        """Whether torch has counted a change."""
        return self._marks.get(weight) != _mark(weight)


def _mark(weight: Tensor) -> tuple[int, ...]:
    """Another number, or another memory, after each change that torch counts."""
    local = local_shard(weight.detach()) if isinstance(weight, DTensor) else weight
    return private_api.version_of(weight), private_api.version_of(local), private_api.memory_of(local)
