"""A method put on one object for a while, and taken off again."""

from collections.abc import Callable
from typing import Any

from lightning_mp.core.uncopied import Replacement

__all__ = ["InstancePatch"]


class InstancePatch:
    """A public method replaced on one instance, and put back as it was; copies of the instance have the original.

    Example:
        >>> class Greeter:
        ...     def greet(self) -> str:
        ...         return "hello"
        >>> greeter = Greeter()
        >>> method = InstancePatch(greeter, "greet", lambda: "wrapped " + method.original())
        >>> greeter.greet()
        'wrapped hello'
        >>> method.restore()
        >>> greeter.greet(), vars(greeter)
        ('hello', {})
    """

    def __init__(self, owner: object, name: str, replacement: Callable[..., Any]) -> None:
        self._owner = owner
        self._name = name
        self._own_attribute = vars(owner).get(name)
        self.original: Callable[..., Any] = getattr(owner, name)
        setattr(owner, name, Replacement(replacement, owner, name))

    def restore(self) -> None:
        """Puts the original back."""
        if self._own_attribute is not None:
            setattr(self._owner, self._name, self._own_attribute)
        else:
            delattr(self._owner, self._name)
