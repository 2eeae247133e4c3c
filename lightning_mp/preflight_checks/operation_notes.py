"""What the operations of a step show: by what a loss was divided, and whether random numbers are drawn again."""

from typing import Any

import torch
from torch import Tensor

# Operations that refuse two floating-point dtypes, and do not as long as tensors are fake.
_OF_ONE_DTYPE = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm.", "aten.index_add", "aten.index_put")


class OperationNotes:
    """Sees every operation, as :func:`lightning_mp.core.private_api.observe_dispatch` shows them.

    Where a checkpoint restores the random state for what it runs again, as it should, random operations meet states
    that were met in the forward. Fake tensors draw none, so each random operation moves the generator here.

    Example:
        >>> from lightning_mp.core.private_api import observe_dispatch
        >>> notes = OperationNotes()
        >>> with observe_dispatch(notes.after_operation):
        ...     loss = torch.ones(3).sum() / 4
        >>> notes.divisor_of(loss)
        4.0
    """

    def __init__(self) -> None:
        self.in_backward = self.draws_anew = False
        self.count = 0
        self.mixed_dtypes = ""
        self._states: set[int] = set()
        # The tensors are kept, so that no other one gets their id.
        self._divided: dict[int, tuple[Tensor, float]] = {}

    def after_operation(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Notes one operation."""
        self.count += 1
        if torch.Tag.nondeterministic_seeded in getattr(operation, "tags", ()):
            self._note_draw()
        if not self.mixed_dtypes and str(operation).startswith(_OF_ONE_DTYPE):
            dtypes = {value.dtype for value in args if isinstance(value, Tensor) and value.is_floating_point()}
            if len(dtypes) > 1:
                named = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
                self.mixed_dtypes = f"{str(operation).split('.')[1]} was given {named}."
        divisor = _divisor(str(operation), args)
        if divisor is not None and isinstance(result, Tensor) and result.ndim == 0:
            self._divided[id(result)] = result, divisor

    def divisor_of(self, loss: Tensor) -> float | None:
        """By which number the last operation has divided a loss; None if it did something else."""
        return self._divided[id(loss)][1] if id(loss) in self._divided else None

    def _note_draw(self) -> None:
        generator = torch.default_generator
        state = generator.initial_seed()
        if self.in_backward:
            self.draws_anew = self.draws_anew or state not in self._states
        else:
            self._states.add(state)
        # A seed is part of the state that a checkpoint restores.
        generator.manual_seed((state + 1) % 2**63)


def _divisor(operation: str, args: tuple[Any, ...]) -> float | None:
    if len(args) < 2 or isinstance(args[1], bool) or not isinstance(args[1], int | float) or not args[1]:
        return None
    if operation.startswith(("aten.div.", "aten.div_.")):
        return float(args[1])
    if operation.startswith(("aten.mul.", "aten.mul_.")):
        inverse = 1 / args[1]
        # 1/3 is no number of the computer; its inverse is close to a whole one.
        return float(round(inverse)) if abs(inverse - round(inverse)) < 1e-9 else None
    return None
