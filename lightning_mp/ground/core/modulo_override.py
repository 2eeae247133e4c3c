"""An ``int`` that answers ``value % n`` by a function: how Lightning's loops learn when to step."""

from collections.abc import Callable
from typing import Self

from typing_extensions import override


class ModuloOverride(int):
    """A number of which only the answer to a modulo differs; copies and pickles are plain numbers.

    Lightning computes by modulo whether a batch ends an accumulation window or a learning-rate interval. Python calls
    the right operand's method if its class is a subclass of the left one's.

    >>> every_second = ModuloOverride.of(2, lambda value: value // 10)
    >>> [value % every_second for value in (10, 20)], every_second + 1
    ([1, 2], 3)
    """

    @classmethod
    def of(cls, number: int, remainder: Callable[[int], int]) -> Self:
        """Makes the number; an ``int`` is complete before ``__init__`` could see it."""
        answering = cls(number)
        vars(answering)["_remainder"] = remainder
        return answering

    def _remainder(self, value: int) -> int:
        return value % int(self)

    @override
    def __rmod__(self, value: int) -> int:
        return self._remainder(value)

    @override
    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)
