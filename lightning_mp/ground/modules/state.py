"""A module that runs once more and is afterwards as it was: gradients, buffers, counters, metrics."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_mp.ground.core.patches import Patch

# What every module has: weights, children, hooks. A run does not change them.
_OWN_NAMES = frozenset(vars(nn.Module()))

_CONTAINERS = (list, dict, set, deque)


@contextmanager
def gradients_set_aside(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Inside, no parameter has a gradient; afterwards each has the one it had, the same tensor.

    >>> import torch
    >>> from lightning_mp.ground.modules.state import gradients_set_aside
    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> (2 * weight).sum().backward()
    >>> with gradients_set_aside([weight]):
    ...     (5 * weight).sum().backward()
    >>> weight.grad
    tensor([2.])
    """
    aside = [(parameter, parameter.grad) for parameter in parameters]
    for parameter, _ in aside:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in aside:
            parameter.grad = gradient


@contextmanager
def logging_muted(module: nn.Module) -> Iterator[None]:
    """Inside, ``self.log`` and ``self.log_dict`` of every LightningModule do nothing."""
    with ExitStack() as stack:
        for owner in module.modules():
            if isinstance(owner, pl.LightningModule):
                for name in ("log", "log_dict"):
                    stack.enter_context(Patch(owner, name, lambda *_, **__: None))
        yield


@contextmanager
def module_kept(module: nn.Module) -> Iterator[None]:
    """Afterwards buffers and plain attributes of all submodules are what they were before.

    That covers running statistics, counters (``self.num_calls += 1``), metric states, and lists, dicts and sets one
    level deep. Not covered is what lies outside of modules (files, loggers, global variables) and what objects of other
    classes keep inside. Buffers and tensors are copied for the time of the run.
    """
    restore = keep_module(module)
    try:
        yield
    finally:
        restore()


def keep_module(module: nn.Module) -> Callable[[], None]:
    """Copies what :func:`module_kept` covers; returns what puts it back, once or again."""
    owners = [owner for owner in module.modules() if not _is_fsdp1(owner)]
    restores = [restore for owner in owners for restore in (*_keep_buffers(owner), _keep_attributes(owner))]

    def restore_all() -> None:
        with torch.no_grad():
            for restore in restores:
                restore()

    return restore_all


def _keep_buffers(owner: nn.Module) -> Iterator[Callable[[], None]]:
    for name, buffer in owner.named_buffers(recurse=False):
        yield partial(_put_back, owner, name, buffer, buffer.detach().clone())


def _put_back(owner: nn.Module, name: str, buffer: Tensor, value: Tensor) -> None:
    buffer.copy_(value)
    if getattr(owner, name, None) is not buffer:
        setattr(owner, name, buffer)


def _keep_attributes(owner: nn.Module) -> Callable[[], None]:
    before = {name: value for name, value in vars(owner).items() if name not in _OWN_NAMES}
    contents = [_keep_content(value) for value in before.values()]

    def restore() -> None:
        attributes = vars(owner)
        for name in [name for name in attributes if name not in before and name not in _OWN_NAMES]:
            del attributes[name]
        for name, value in before.items():
            if attributes.get(name) is not value:
                attributes[name] = value
        for put_back in contents:
            put_back()

    return restore


def _keep_content(value: Any) -> Callable[[], None]:
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return lambda: _ignore(value.set_state(state))
    if isinstance(value, Tensor):
        copy = value.detach().clone()
        return lambda: _ignore(value.detach().copy_(copy))
    if type(value) in _CONTAINERS:
        members = value.copy()

        def refill() -> None:
            value.clear()
            (value.extend if isinstance(value, list | deque) else value.update)(members)

        return refill
    return lambda: None


def _ignore(_: object) -> None:
    return None


def _is_fsdp1(owner: nn.Module) -> bool:
    """FSDP1 keeps its own books in attributes."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed.fsdp import FullyShardedDataParallel

    return isinstance(owner, FullyShardedDataParallel)
