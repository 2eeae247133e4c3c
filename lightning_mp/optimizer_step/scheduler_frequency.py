"""``"frequency": n`` of a learning-rate scheduler that counts optimizer steps, not micro-batches."""

from collections.abc import Callable
from typing import Self

import lightning.pytorch as pl
from lightning.pytorch.utilities.types import LRSchedulerConfig

__all__ = ["LearningRateFrequency", "StepFrequency"]


class StepFrequency(int):
    """The value of ``config.frequency``, answering Lightning's ``(batch_idx + 1) % frequency == 0`` by steps made.

    Python lets the right operand answer if its class is a subclass of the left one's. For everything else it is the
    plain number.

    Example:
        >>> steps_made = iter([1, 2, 3, 4])
        >>> frequency = StepFrequency.of(2, lambda: next(steps_made))
        >>> [17 % frequency == 0 for _ in range(4)], frequency + 1
        ([False, True, False, True], 3)
    """

    _steps_made: Callable[[], int]

    @classmethod
    def of(cls, frequency: int, steps_made: Callable[[], int]) -> Self:
        """Makes the number; an ``int`` is complete before ``__init__`` could see it."""
        number = cls(frequency)
        number._steps_made = steps_made
        return number

    def __rmod__(self, value: int) -> int:
        return self._steps_made() % int(self)

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)


class LearningRateFrequency:
    """Makes ``interval="step"`` schedulers with a frequency step once in so many optimizer steps that were made.

    Lightning counts micro-batches and asks only where a window ends: with 4 micro-batches per step, a frequency of 2
    means every step there, and one of 10 every fifth.

    Args:
        trainer: its scheduler configurations are changed for the time of one ``fit``.
        skipped_steps: how many attempts were skipped so far.
    """

    def __init__(self, trainer: "pl.Trainer", skipped_steps: Callable[[], int]) -> None:
        self._trainer = trainer
        self._skipped_steps = skipped_steps
        self._before: list[tuple[LRSchedulerConfig, int]] = []

    def attach(self) -> Self:
        """Starts counting steps."""
        for config in self._trainer.lr_scheduler_configs:
            if config.interval == "step" and config.frequency != 1 and not isinstance(config.frequency, StepFrequency):
                self._before.append((config, config.frequency))
                config.frequency = StepFrequency.of(config.frequency, self._steps_made)
        return self

    def detach(self) -> None:
        """Gives the configurations their plain numbers back."""
        for config, frequency in self._before:
            config.frequency = frequency
        self._before = []

    def _steps_made(self) -> int:
        return self._trainer.global_step - self._skipped_steps()
