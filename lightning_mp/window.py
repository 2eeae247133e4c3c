"""One accumulation window as Lightning sees it: the value of ``trainer.accumulate_grad_batches``."""

from typing import Self

__all__ = ["Window"]


class Window(int):
    """The value of ``trainer.accumulate_grad_batches`` for one micro-batch.

    Lightning asks it two questions by modulo: ``batch_idx % N == 0`` (set the gradients to zero?) and
    ``(batch_idx + 1) % N == 0`` (make the optimizer step?). Python lets the right operand answer if its class is a
    subclass of the left one's, so the answers come from the keeper. For everything else it is the plain number ``N``,
    by which Lightning divides the loss.

    Example:
        >>> window = Window(4, batch_idx=6, opens=True, closes=False)
        >>> 6 % window, 7 % window, 12 / window
        (0, 1, 3.0)
    """

    _batch_idx: int
    _opens: bool
    _closes: bool

    def __new__(cls, micro_batches: int, *, batch_idx: int, opens: bool, closes: bool) -> Self:
        """Makes the number; an ``int`` is complete before ``__init__`` could see it."""
        window = super().__new__(cls, micro_batches)
        window._batch_idx = batch_idx
        window._opens = opens
        window._closes = closes
        return window

    def __rmod__(self, value: int) -> int:
        if value == self._batch_idx:
            return int(not self._opens)
        if value == self._batch_idx + 1:
            return int(not self._closes)
        return value % int(self)

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)
