"""What a run puts on a module, and what copies of the module have in its place.

Data that holds a method of the module (``collate_fn=self.collate``) takes the module along to spawned DataLoader
workers, and ``copy.deepcopy(self)`` or ``torch.save(self)`` come in the middle of a fit. A copy has no part in the run:
neither does it carry the Trainer along, nor does anything that happens to it reach our callbacks. ``functools.partial``
is the base because torch.compile traces through it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Self

from typing_extensions import override


class Replacement(partial[Any]):
    """A function in place of a method of one object; copies of the object, by pickle or deepcopy, have the method.

    >>> import copy
    >>> class Greeter:
    ...     def greet(self) -> str:
    ...         return "hello"
    >>> greeter = Greeter()
    >>> greeter.greet = Replacement(lambda: "wrapped", greeter, "greet")
    >>> greeter.greet(), copy.deepcopy(greeter).greet()
    ('wrapped', 'hello')
    """

    _original: tuple[Callable[..., Any], tuple[Any, ...]]

    def __new__(cls, function: Callable[..., Any], owner: object, name: str) -> Self:
        """Before it is set on its owner."""
        replacement = super().__new__(cls, function)
        own = vars(owner)
        # A method of the class is looked up on the copy, which has nothing else yet.
        is_of_class = name not in own and hasattr(owner, name)
        replacement._original = (getattr, (owner, name)) if is_of_class else (_itself, (own.get(name),))
        if hasattr(function, "__wrapped__"):  # Lightning reads signatures of hooks through it
            vars(replacement)["__wrapped__"] = function.__wrapped__
        return replacement

    @override
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._original

    def call(self, function: Callable[..., Any]) -> None:
        """Calls another function from now on, also where a reference was kept."""
        self.__setstate__((function, (), {}, vars(self)))  # type: ignore[attr-defined]  # how a pickled one is filled


class RunHook(partial[Any]):
    """A forward hook, or one before it, for the time of a run; in copies of its module it is one that does nothing.

    >>> import copy
    >>> import torch
    >>> layer = torch.nn.Linear(1, 1)
    >>> handle = layer.register_forward_hook(RunHook(lambda *_: print("forward")))
    >>> output = copy.deepcopy(layer)(torch.ones(1))
    >>> output = layer(torch.ones(1))
    forward
    """

    @override
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return partial, (_nothing,)


def _itself(value: Any) -> Any:
    return value


def _nothing(*_: Any, **__: Any) -> None:
    return None
