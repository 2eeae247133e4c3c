"""A ``repr`` that shows how a part is set: the arguments of its constructor, as they were understood."""

import inspect
import sys
from collections.abc import Iterator
from inspect import Parameter
from pathlib import Path
from typing import Any

from torch import nn
from typing_extensions import override


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

    @override
    def __repr__(self) -> str:
        """Its class and its settings, as in the call that makes it; for a Trainer that refuses it, where it belongs."""
        from lightning_mp.ground.core.misplaced_parts import place_hint  # of use in errors only

        return f"{type(self).__name__}({', '.join(self.shown_settings())}){place_hint(self)}"

    @property
    def state_key(self) -> str:
        """Of a callback its class; a part that is no callback is refused, and a second callback of a class."""
        asking = sys._getframe(1)
        if asking.f_code.co_name != "_call_callback_hooks":  # which asks in each batch, long after the set-up
            from lightning_mp.ground.core.misplaced_parts import refuse_among_callbacks  # of use in errors only

            refuse_among_callbacks(self, asking)
        return type(self).__qualname__

    def shown_settings(self) -> Iterator[str]:
        """The arguments of the call that makes it, one after another."""
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
    if isinstance(value, set | frozenset):  # in an order that is that of all processes
        return f"{{{', '.join(sorted(map(repr, value)))}}}"
    return repr(value)
