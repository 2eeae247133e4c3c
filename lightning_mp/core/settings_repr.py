"""A ``repr`` that shows how a part is set: the arguments of its constructor, as they were understood."""

import inspect
import sys
from collections.abc import Iterator
from inspect import Parameter
from pathlib import Path
from typing import Any, ClassVar

from torch import nn


class SettingsRepr:
    """Shows the arguments of ``__init__`` as they were understood: ``"1e9"`` as a number, the device that was found.

    Each is read from the attribute of its name, or of its name behind an underscore. None, which means "not
    given", is left out, and so is what a constructor that failed has not set.

    >>> class Monitor(SettingsRepr):
    ...     def __init__(self, metric, *, every_n_steps=100, path=None):
    ...         self.metric, self._every_n_steps, self.path = metric, int(every_n_steps), path
    >>> Monitor("loss", every_n_steps="50")
    Monitor('loss', every_n_steps=50)
    """

    def __repr__(self) -> str:
        """Its class and its settings, as in the call that makes it."""
        return f"{type(self).__name__}({', '.join(self._shown_settings())})"

    def _shown_settings(self) -> Iterator[str]:
        own = vars(self)  # not properties: they may be aliases, or need a Trainer
        for name, parameter in inspect.signature(type(self)).parameters.items():
            value = own.get(name, own.get(f"_{name}"))
            if value is None:
                continue
            if parameter.kind is Parameter.VAR_POSITIONAL:
                yield from map(_shown, value)
            elif parameter.kind is Parameter.VAR_KEYWORD:
                yield from (f"{key}={_shown(each)}" for key, each in value.items())
            elif parameter.default is Parameter.empty:
                yield _shown(value)
            else:
                yield f"{name}={_shown(value)}"


def _shown(value: Any) -> str:
    """A function by its name and a module by its class: their own text has addresses, or a page of layers."""
    if isinstance(value, Path):
        return repr(str(value))
    if isinstance(value, nn.Module):
        return type(value).__name__
    if inspect.isroutine(value) or inspect.isclass(value):
        return value.__qualname__
    return repr(value)


class NamespaceHint(SettingsRepr):
    """Shows the settings, and a hint if ``pytorch_lightning`` calls it: its errors print objects that it does not know.

    >>> class Part(NamespaceHint):
    ...     kind = "strategy"
    >>> "import" in repr(Part())
    False
    """

    #: What it is, for the hint.
    kind: ClassVar[str]

    def __repr__(self) -> str:
        """Its class, and the hint."""
        hint = namespace_hint(self.kind)
        return f"{type(self).__name__}{hint}" if hint else super().__repr__()


def namespace_hint(kind: str) -> str:
    """For a ``__repr__``: which import a part needs, if ``pytorch_lightning`` calls it; "" elsewhere."""
    asking = sys._getframe(2).f_globals.get("__name__", "")
    if asking.partition(".")[0] != "pytorch_lightning":
        return ""
    use = "`import lightning.pytorch as pl`, not `import pytorch_lightning as pl`"
    return f", a {kind} for lightning.pytorch: with it use {use}"
