"""What all ranks must do alike, watched for the time of one ``fit``."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import lightning.pytorch as pl
from torch.optim import Optimizer

from lightning_mp.core.patches import Patch, Patches
from lightning_mp.gradients.agreed_units import AgreedUnits
from lightning_mp.gradients.unreduced_parameters import UnreducedParameters

__all__ = ["RanksAlike"]


class RanksAlike:
    """Sharded ranks run the same units; DDP reduces every parameter that is trained.

    Both are looked at between the last backward of a step and the step. Any part of the pack may ask for it; the first
    one is heard.

    Args:
        trainer: after its strategy has wrapped the model.
        optimizers: of the run.
    """

    _by_trainer: ClassVar[WeakKeyDictionary["pl.Trainer", "RanksAlike"]] = WeakKeyDictionary()

    def __init__(self, trainer: "pl.Trainer", optimizers: Sequence[Optimizer]) -> None:
        self._trainer = trainer
        self._units: AgreedUnits | None = None
        self._unreduced: UnreducedParameters | None = None
        self._method: Patch | None = None
        model = trainer.strategy.model
        if trainer in self._by_trainer or model is None:
            return
        self._by_trainer[trainer] = self
        self._units = AgreedUnits.of(model, optimizers, trainer.strategy.root_device)
        self._unreduced = UnreducedParameters.of(model)
        if self._units is not None or self._unreduced is not None:
            self._method = Patches.of(trainer).replace(trainer.strategy, "optimizer_step", self._optimizer_step)

    def settle(self) -> None:
        """Makes sure that ranks were alike until now.

        Raises:
            MisconfigurationException: on all ranks, if they were not.
        """
        if self._units is not None:
            self._units.settle()

    def detach(self) -> None:
        """Stops watching."""
        if self._units is not None:
            self._units.detach()
        if self._method is not None:
            self._method.undo()
            self._method = None
        if self._by_trainer.get(self._trainer) is self:
            del self._by_trainer[self._trainer]

    def _optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *others: Any, **named: Any) -> Any:
        assert self._method is not None

        def closure_then_look() -> Any:
            result = closure()
            if self._units is not None:
                self._units.compare(optimizer)
            if self._unreduced is not None:
                self._unreduced.check(optimizer)
            return result

        return self._method.original(optimizer, closure_then_look, *others, **named)
