"""Forwards of modules wrapped on the instance, and restored again."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn


class WrappedForwards:
    """Modules whose forwards are wrapped until :meth:`undo`.

    Not by :mod:`lightning_mp.ground.core.patches`: a copy of a module keeps its wrapper, which calls the copy's own
    forward.
    """

    def __init__(self) -> None:
        self._wrapped: list[tuple[nn.Module, partial[Any]]] = []

    def wrap(self, module: nn.Module, function: Callable[..., Any], *arguments: Any) -> None:
        """Has ``function`` called in place of the forward, with the forward, these arguments and those of the call."""
        wrapper = partial(function, module.forward, *arguments)
        module.forward = wrapper
        self._wrapped.append((module, wrapper))

    def undo(self) -> None:
        """Restores every module's own forward, unless other code has wrapped it meanwhile."""
        for module, wrapper in reversed(self._wrapped):
            _unwrap(module, wrapper)
        self._wrapped.clear()


def _unwrap(module: nn.Module, wrapper: "partial[Any]") -> None:
    """Removes a wrapper from a module, also one below another wrapper of this package; not one below other code's."""
    inner, outer = wrapper.args[0], vars(module).get("forward")
    if outer is wrapper:
        del module.forward
        if module.forward != inner:  # it was set on the instance, by other code
            module.forward = inner
        return
    while isinstance(outer, partial) and outer.args:
        if outer.args[0] is wrapper:
            # how a pickled one is filled; its arguments cannot be set otherwise
            outer.__setstate__((outer.func, (inner, *outer.args[1:]), outer.keywords, None))  # type: ignore[attr-defined]
            return
        outer = outer.args[0]


def takes_hooks(module: nn.Module) -> bool:
    """Whether forward hooks can be set on a module; not on TorchScript modules, whose inside is never called.

    >>> takes_hooks(nn.Linear(2, 2))
    True
    """
    return not isinstance(module, torch.jit.ScriptModule)


def class_forward(module: nn.Module) -> Callable[..., Any] | None:
    """The forward of a module's class; None for containers, which have none, and for TorchScript modules.

    >>> class_forward(nn.Linear(2, 2)) is nn.Linear.forward, class_forward(nn.ModuleList())
    (True, None)
    """
    # The class of a TorchScript module raises when its `forward` is read.
    forward: Callable[..., Any] | None = type(module).forward if takes_hooks(module) else None
    return None if forward is nn.Module.forward else forward
