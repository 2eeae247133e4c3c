"""Buffers that a checkpointed forward changes: its second run finds what the first one found, and changes nothing.

Examples are the vectors of ``spectral_norm``, a codebook that is averaged in the forward, a count of calls. The first
forward keeps copies of all buffers and shows which modules change theirs; from then on only theirs are copied.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_mp.core.private_api import version_of
from lightning_mp.modules.norms import NORMS_WITH_STATISTICS


class _Buffer(NamedTuple):
    """A buffer as the first run found it: number and name say which; ``copy`` is there where it was kept."""

    owner: int
    name: str
    value: Tensor | None
    version: int
    copy: Tensor | None


class WatchedBuffers:
    """The buffers of a module, and which of the modules in it change theirs in a forward.

    >>> bool(WatchedBuffers(nn.Linear(2, 2))), bool(WatchedBuffers(nn.utils.spectral_norm(nn.Linear(2, 2))))
    (False, True)
    """

    def __init__(self, module: nn.Module) -> None:
        self._class_name = type(module).__name__
        self._names: list[str] = []
        self._owners: list[nn.Module] = []
        self._unset: list[tuple[str, ...]] = []
        for name, owner in module.named_modules():
            unset = _unassigned_names(owner)
            has_buffers = next(owner.buffers(recurse=False), None) is not None
            if unset or has_buffers:
                self._names.append(f"{name}." if name else "")
                self._owners.append(owner)
                self._unset.append(unset)
        self._known_modes: set[tuple[bool, ...]] = set()
        self._changing: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._owners)

    def buffers(self) -> Iterator[tuple[int, str, Tensor | None]]:
        """Number of the owner, name and value of each; None where a buffer is still to come."""
        for number, owner in enumerate(self._owners):
            for name, value in owner.named_buffers(recurse=False, remove_duplicate=False):
                if not is_lazy(value):
                    yield number, name, value
            for name in self._unset[number]:
                if getattr(owner, name, 0) is None:
                    yield number, name, None

    def owner(self, number: int) -> nn.Module:
        """A module that owns buffers."""
        return self._owners[number]

    def name_of(self, buffer: _Buffer) -> str:
        """Its name in the module."""
        return self._names[buffer.owner] + buffer.name

    def must_keep(self, number: int) -> bool:
        """Whether the buffers of an owner are kept from now on."""
        return number in self._changing

    def learns(self) -> bool:
        """Whether no forward has been seen in the present mode, of training or evaluation, of every owner."""
        return tuple(owner.training for owner in self._owners) not in self._known_modes

    def learn(self, changed: "list[_Buffer]") -> None:
        """Takes note of what a forward has changed.

        What it changed though it never had before, and was therefore not kept, is named in a warning.
        """
        self._known_modes.add(tuple(owner.training for owner in self._owners))
        self._changing.update(buffer.owner for buffer in changed)
        lost = [buffer for buffer in changed if buffer.copy is None and _is_written(buffer)]
        if lost:
            names = ", ".join(map(self.name_of, lost))
            rank_zero_warn(
                f"ActivationCheckpointing: {self._class_name} changed its buffer {names} for the first time after its"
                " first forward. Gradients of this micro-batch may differ from those without checkpoints; later ones"
                " do not. If that matters, do not checkpoint this module."
            )


def _unassigned_names(owner: nn.Module) -> tuple[str, ...]:
    """Names under which a module has registered None: a buffer may come there."""
    registered = (name for name in dir(owner) if name not in vars(owner) and not hasattr(type(owner), name))
    return tuple(name for name in registered if getattr(owner, name, 0) is None)


def _version(value: Tensor | None) -> int:
    return version_of(value) if value is not None and not value.is_inference() else 0


def _is_written(buffer: _Buffer) -> bool:
    return _version(buffer.value) != buffer.version


class FoundBuffers:
    """What the buffers of one call were at its first run. :meth:`put_in` and :meth:`take_out` are for the second."""

    def __init__(self, watched: WatchedBuffers) -> None:
        self._watched = watched
        self._learns = False
        self._found: list[_Buffer] = []
        self._own: list[tuple[nn.Module, str, Tensor | None]] = []

    def __enter__(self) -> None:
        self.note()

    def note(self) -> None:
        """Takes note of the buffers as they are."""
        watched = self._watched
        self._learns = watched.learns()
        copies: dict[int, Tensor] = {}  # a buffer with two names is one tensor
        for number, name, value in watched.buffers():
            copy = None
            if value is not None and (self._learns or watched.must_keep(number)):
                copy = _copied(value, copies)
            self._found.append(_Buffer(number, name, value, _version(value), copy))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            changed = [buffer for buffer in self._found if self._is_changed(buffer)]
            if changed or self._learns:
                self._watched.learn(changed)
        self._found = [buffer for buffer in self._found if self._watched.must_keep(buffer.owner)]

    def changed_unseen(self) -> list[str]:
        """Names of the buffers that have changed since, in modules that no run around a context has shown to do so.

        The statistics of torch's norms are left out: compiled code updates them once.
        """
        changed = [buffer for buffer in self._found if self._is_changed(buffer)]
        unseen = [buffer for buffer in changed if not self._watched.must_keep(buffer.owner)]
        norms = NORMS_WITH_STATISTICS
        return [self._watched.name_of(row) for row in unseen if type(self._watched.owner(row.owner)) not in norms]

    def _is_changed(self, buffer: _Buffer) -> bool:
        """Whether the first run changed it. What is written through ``.data`` is seen in its numbers only."""
        now = getattr(self._watched.owner(buffer.owner), buffer.name, None)
        if now is not buffer.value or _is_written(buffer):
            return True
        if not self._learns or buffer.copy is None or buffer.value is None or buffer.copy.layout != torch.strided:
            return False
        return not torch.equal(buffer.copy, buffer.value)

    def put_in(self) -> None:
        """The buffers are for now what the first run found; what is done to them is done to copies."""
        copies: dict[int, Tensor] = {}
        for buffer in self._found:
            owner = self._watched.owner(buffer.owner)
            self._own.append((owner, buffer.name, getattr(owner, buffer.name, None)))
            value = buffer.copy if buffer.copy is not None else buffer.value
            setattr(owner, buffer.name, value if value is None else _copied(value, copies))

    def take_out(self) -> None:
        """The buffers are what they were before :meth:`put_in`."""
        while self._own:
            owner, name, value = self._own.pop()
            setattr(owner, name, value)


def _copied(value: Tensor, copies: dict[int, Tensor]) -> Tensor:
    """A copy, one of each tensor; a tensor with a graph is its own, because a copy would begin another graph."""
    if value.requires_grad:
        return value
    if id(value) not in copies:
        copies[id(value)] = value.detach().clone()
    return copies[id(value)]
