"""Who may still need the gradients of the last step while the next forward runs, where Lightning keeps them.

Lightning clears gradients between forward and backward, so those of the step before are alive at the end of the
forward, where most memory is in use: 4 bytes per parameter. A loop by hand clears them after the step (nanoGPT, PR 71).
"""

from collections.abc import Iterable, Iterator
from inspect import getattr_static
from types import CellType, CodeType, FunctionType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from torch.optim import Optimizer

_LIBRARIES = ("lightning", "lightning_mp", "torch")  # none of them reads old gradients
_ABOUT_GRADIENTS = frozenset({"grad", "backward", "manual_backward"})


def needs_old_gradients(callbacks: Iterable[Callback], module: "pl.LightningModule", optimizer: Optimizer) -> bool:
    """Whether anybody's code may read, or add to, the last step's gradients once the next forward has begun.

    It may in an overridden ``on_before_zero_grad`` or ``optimizer_zero_grad``, in an optimizer's own ``zero_grad``, and
    in a ``training_step`` that mentions gradients, itself or in what it calls by name. Code that reads them elsewhere
    keeps them by overriding ``on_before_zero_grad``.
    """
    hooks = [optimizer.zero_grad, *(callback.on_before_zero_grad for callback in callbacks)]
    # An idle hook of our callbacks is None.
    return not all(hook is None or _is_from_a_library(hook) for hook in hooks) or module_needs_old_gradients(module)


def module_needs_old_gradients(module: "pl.LightningModule") -> bool:
    """Whether the module's own code may."""
    hooks = (module.on_before_zero_grad, module.optimizer_zero_grad)
    return not all(map(_is_from_a_library, hooks)) or _mentions_gradients(module)


def _is_from_a_library(function: Any) -> bool:
    package = getattr(_function(function), "__module__", None) or ""
    return package.partition(".")[0] in _LIBRARIES


def _function(method: Any) -> Any:
    return getattr(method, "__func__", method)


def _mentions_gradients(module: "pl.LightningModule") -> bool:
    """Looks through ``training_step``, ``forward`` and the functions and methods whose names they use."""
    waiting, seen = [*_attributes(module, {"training_step", "forward"})], set()
    while waiting:
        function = _function(waiting.pop())
        if not isinstance(function, FunctionType) or function in seen or _is_from_a_library(function):
            continue
        seen.add(function)
        names = set(_names(function.__code__))
        if names & _ABOUT_GRADIENTS:
            return True
        waiting += _attributes(module, names)
        waiting += [function.__globals__.get(name) for name in names]
        waiting += [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
    return False


def _attributes(module: "pl.LightningModule", names: Iterable[str]) -> Iterator[Any]:
    """What the module's class and the module itself have under these names; properties are not called."""
    for name in names:
        yield getattr_static(type(module), name, None)
        yield vars(module).get(name)


def _names(code: CodeType) -> Iterator[str]:
    """The names that a function uses, those of functions inside of it included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
