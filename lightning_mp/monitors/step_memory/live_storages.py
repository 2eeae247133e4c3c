"""Which storages are alive while operations run, how many bytes they have, and what each of them is for."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args
from weakref import finalize

from torch import Tensor, strided

from lightning_mp.ground.core.nested_tensors import tensors_in

Part = Literal[
    "weights",
    "buffers",
    "masters",
    "optimizer states",
    "gradients",
    "weight casts",
    "activations",
    "batch",
    "temporaries",
    "gathered weights",
    "communication buffers",
    "workspaces",
]
"""What memory is for. ``weight casts`` are copies of weights in the format of matrix products; ``activations`` are
saved for backward; ``temporaries`` are all other results of operations, for as long as they are referenced, and what a
kernel takes on a CPU while it runs. Two come with several ranks: weights that FSDP2 gathered, and the buckets of DDP
or the reductions of FSDP2. ``workspaces`` are those of cuBLAS."""

PARTS: tuple[Part, ...] = get_args(Part)
"""Every part, in the order of tables and plots."""


@dataclass(frozen=True, slots=True)
class MemorySample:
    """What is alive at one moment of a step."""

    phase: str  # "forward", "backward" or "optimizer step"
    bytes_by_part: Mapping[Part, int]  # bytes of each part that has some

    @property
    def total_bytes(self) -> int:
        """The sum over all parts."""
        return sum(self.bytes_by_part.values())


class LiveStorages:
    """Follows storages from the operation that makes them until they are no longer referenced.

    Each storage counts once, with all of its bytes, however many tensors view it. A sparse tensor has none: its indices
    and values are results of operations too, and count as such.

    Attributes:
        phase: of the step: "forward", "backward" or "optimizer step".
        samples: what was alive, in order.
    """

    def __init__(self, workspace_bytes: Callable[[Any, Any, Any], int] | None = None) -> None:
        self._workspace_bytes = workspace_bytes  # of an operation, its arguments and its result
        self._known: dict[int, tuple[int, Part | None]] = {}
        self._bytes = Counter[Part]()
        self.phase = "forward"
        self.samples: list[MemorySample] = []

    @property
    def bytes_by_part(self) -> dict[Part, int]:
        """What is alive now."""
        return {part: self._bytes[part] for part in PARTS if self._bytes[part]}

    def add(self, part: Part | None, tensors: Iterable[Tensor], *, unless: tuple[Part | None, ...] = ()) -> None:
        """Says what the storages of tensors are for."""
        for tensor in _with_storage(tensors):
            storage = tensor.untyped_storage()
            key = id(storage)
            if key in self._known:
                size, before = self._known[key]
                if before in unless:
                    continue
                self._count(before, -size)
            else:
                size = storage.nbytes()
                finalize(storage, self._forget, key).atexit = False
            self._known[key] = size, part
            self._count(part, size)

    def after_operation(self, operation: Any, args: Any, kwargs: Any, result: Any) -> None:
        """For ``private_dispatch_api.observe_dispatch``: what an operation has made, and how much is alive now."""
        is_cast = operation.overloadpacket.__name__ == "_to_copy"
        for tensor in _with_storage(tensors_in(result)):
            if id(tensor.untyped_storage()) in self._known:
                continue
            self.add(self._part_of_result(tensors_in(args) if is_cast else ()), [tensor])
        if self._workspace_bytes is not None and (extra := self._workspace_bytes(operation, args, result)):
            self.sample(extra)
        self.sample()

    def _part_of_result(self, cast: Iterable[Tensor]) -> Part | None:
        of_weights = any(self._part_of(tensor) in ("weights", "gathered weights") for tensor in _with_storage(cast))
        return "weight casts" if of_weights and self.phase == "forward" else "temporaries"

    def sample(self, workspace_bytes: int = 0) -> None:
        """Notes what is alive now, if it is not what was noted last."""
        now = self.bytes_by_part
        if workspace_bytes:
            now["temporaries"] = now.get("temporaries", 0) + workspace_bytes
        if not self.samples or self.samples[-1].phase != self.phase or self.samples[-1].bytes_by_part != now:
            self.samples.append(MemorySample(self.phase, MappingProxyType(now)))

    def _part_of(self, tensor: Tensor) -> Part | None:
        known = self._known.get(id(tensor.untyped_storage()))
        return known[1] if known is not None else None

    def _count(self, part: Part | None, size: int) -> None:
        if part is not None:
            self._bytes[part] += size

    def _forget(self, key: int) -> None:
        size, part = self._known.pop(key)
        self._count(part, -size)


def _with_storage(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    return (tensor for tensor in tensors if tensor.layout == strided)
