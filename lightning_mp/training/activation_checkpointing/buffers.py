"""Buffers that a checkpointed forward changes: its second run finds what the first one found, and changes nothing.

Examples are the vectors of ``spectral_norm``, a codebook that is averaged in the forward, a count of calls. The first
forward keeps copies of all buffers and shows which modules change theirs; from then on only theirs are copied.
"""

from typing import NamedTuple

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_mp.ground.core.private_tensor_api import version_of
from lightning_mp.ground.modules.norms import NORMS_WITH_STATISTICS


class _Buffer(NamedTuple):
    """A buffer as the first run found it; ``copy`` is there where it was kept."""

    owner: nn.Module
    name: str
    full_name: str
    value: Tensor | None
    version: int
    copy: Tensor | None

    def now(self) -> Tensor | None:
        """What the owner has under this name now."""
        value: Tensor | None = getattr(self.owner, self.name, None)
        return value

    def is_written(self) -> bool:
        """Whether the tensor itself was changed."""
        return _version(self.value) != self.version


class WatchedBuffers:
    """The buffers of a module, and which of the modules in it change theirs in a forward.

    >>> bool(WatchedBuffers(nn.Linear(2, 2))), bool(WatchedBuffers(nn.utils.spectral_norm(nn.Linear(2, 2))))
    (False, True)
    """

    def __init__(self, module: nn.Module) -> None:
        self._class_name = type(module).__name__
        self._owners: list[tuple[str, nn.Module, tuple[str, ...]]] = []
        for name, owner in module.named_modules():
            unset = _unassigned_names(owner)
            if unset or next(owner.buffers(recurse=False), None) is not None:
                self._owners.append((f"{name}." if name else "", owner, unset))
        self._known_modes: set[tuple[bool, ...]] = set()
        #: Those whose buffers are kept from now on.
        self.changing: set[nn.Module] = set()

    def __bool__(self) -> bool:
        return bool(self._owners)

    def find(self) -> list[_Buffer]:
        """Every buffer as it is, with a copy where one is needed; without a value where a buffer is still to come."""
        learns = self.learns()
        copies: dict[int, Tensor] = {}  # a buffer with two names is one tensor
        found = []
        for prefix, owner, unset in self._owners:
            for name, value in owner.named_buffers(recurse=False, remove_duplicate=False):
                if not is_lazy(value):
                    copy = _copied(value, copies) if learns or owner in self.changing else None
                    found.append(_Buffer(owner, name, prefix + name, value, _version(value), copy))
            still_unset = [name for name in unset if getattr(owner, name, 0) is None]
            found += [_Buffer(owner, name, prefix + name, None, 0, None) for name in still_unset]
        return found

    def learns(self) -> bool:
        """Whether no forward has been seen in the present mode, of training or evaluation, of every owner."""
        return self._modes() not in self._known_modes

    def learn(self, changed: list[_Buffer]) -> None:
        """Takes note of what a forward has changed.

        What it changed though it never had before, and was therefore not kept, is named in a warning.
        """
        self._known_modes.add(self._modes())
        self.changing.update(buffer.owner for buffer in changed)
        lost = [buffer.full_name for buffer in changed if buffer.copy is None and buffer.is_written()]
        if lost:
            rank_zero_warn(
                f"ActivationCheckpointing: {self._class_name} changed its buffer {', '.join(lost)} for the first time"
                " after its first forward. Gradients of this micro-batch may differ from those without checkpoints;"
                " later ones do not. If that matters, do not checkpoint this module."
            )

    def _modes(self) -> tuple[bool, ...]:
        return tuple(owner.training for _, owner, _ in self._owners)


def _unassigned_names(owner: nn.Module) -> tuple[str, ...]:
    """Names under which a module has registered None: a buffer may come there."""
    registered = (name for name in dir(owner) if name not in vars(owner) and not hasattr(type(owner), name))
    return tuple(name for name in registered if getattr(owner, name, 0) is None)


def _version(value: Tensor | None) -> int:
    return version_of(value) if value is not None and not value.is_inference() else 0


class FoundBuffers:
    """What the buffers of one call held at its first run; :meth:`restore_snapshot` puts it back for the second."""

    def __init__(self, watched: WatchedBuffers) -> None:
        self._watched = watched
        self._learns = False
        self._found: list[_Buffer] = []
        self._own: list[tuple[nn.Module, str, Tensor | None]] = []

    def __enter__(self) -> None:
        self.note()

    def note(self) -> None:
        """Takes note of the buffers as they are."""
        self._learns, self._found = self._watched.learns(), self._watched.find()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            changed = [buffer for buffer in self._found if self._is_changed(buffer)]
            if changed or self._learns:
                self._watched.learn(changed)
        self._found = [buffer for buffer in self._found if buffer.owner in self._watched.changing]

    def changed_unseen(self) -> list[str]:
        """Names of the buffers that have changed since, in modules that no run around a context has shown to do so.

        The statistics of torch's norms are left out: torch.compile recomputes these right.
        """
        known, norms = self._watched.changing, NORMS_WITH_STATISTICS
        unseen = [buffer for buffer in self._found if buffer.owner not in known and type(buffer.owner) not in norms]
        return [buffer.full_name for buffer in unseen if self._is_changed(buffer)]

    def _is_changed(self, buffer: _Buffer) -> bool:
        """Whether the first run changed it. What is written through ``.data`` is seen in its numbers only."""
        if buffer.now() is not buffer.value or buffer.is_written():
            return True
        if not self._learns or buffer.copy is None or buffer.value is None or buffer.copy.layout != torch.strided:
            return False
        return not torch.equal(buffer.copy, buffer.value)

    def restore_snapshot(self) -> None:
        """The buffers are for now what the first run found; what is done to them is done to copies."""
        copies: dict[int, Tensor] = {}
        for buffer in self._found:
            self._own.append((buffer.owner, buffer.name, buffer.now()))
            value = buffer.copy if buffer.copy is not None else buffer.value
            setattr(buffer.owner, buffer.name, value if value is None else _copied(value, copies))

    def undo_restore(self) -> None:
        """The buffers are what they were before :meth:`restore_snapshot`."""
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
