"""A module's ``forward`` wrapped on the instance, and taken off again."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn


def unwrap_forward(module: nn.Module, wrapper: "partial[Any]") -> None:
    """Takes a wrapper off a module, if it is the outermost."""
    if vars(module).get("forward") is not wrapper:
        return
    inner = wrapper.args[0]
    del module.forward
    if module.forward != inner:  # it was set on the instance, by other code
        module.forward = inner


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
