"""A module's ``forward`` wrapped on the instance, and taken off again."""

from functools import partial
from typing import Any

from torch import nn


def unwrap_forward(module: nn.Module, wrapper: "partial[Any]") -> None:
    """Takes a wrapper off a module, if it is the outermost."""
    if vars(module).get("forward") is not wrapper:
        return
    inner = wrapper.args[0]
    del module.forward
    if module.forward != inner:  # it was set on the instance, by other code
        module.forward = inner
