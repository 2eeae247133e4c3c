"""``"frequency": n`` of a learning-rate scheduler that counts optimizer steps, not micro-batches."""

from collections.abc import Callable
from functools import partial
from typing import Self

import lightning.pytorch as pl
from lightning.pytorch.utilities.types import LRSchedulerConfig

from lightning_mp.ground.core.modulo_override import ModuloOverride
from lightning_mp.ground.core.patches import Patches


class LearningRateFrequency:
    """Makes ``interval="step"`` schedulers with a frequency step once in n optimizer steps that were made.

    Lightning counts micro-batches and checks only at the end of a window: with 4 micro-batches per step, a frequency of
    2 means every step there, and one of 10 every fifth.
    """

    def __init__(self, trainer: "pl.Trainer", skipped_steps: Callable[[], int]) -> None:
        self._trainer = trainer
        self._skipped_steps = skipped_steps
        self._held: list[LRSchedulerConfig] = []
        Patches.of(trainer).at_end(self._detach)

    def attach(self) -> Self:
        """Counts steps until the run ends; call it before each step, as schedulers may be replaced during a fit."""
        for config in self._trainer.lr_scheduler_configs:
            if config.interval == "step" and config.frequency != 1 and not isinstance(config.frequency, ModuloOverride):
                self._held.append(config)
                # Lightning evaluates (batch_idx + 1) % frequency; the result counts steps that were made.
                config.frequency = ModuloOverride.of(config.frequency, partial(self._steps_since, config.frequency))
        return self

    def _detach(self) -> None:
        """Restores the plain numbers of the configurations."""
        for config in (*self._held, *self._trainer.lr_scheduler_configs):  # a copy of one has its frequency
            if isinstance(config.frequency, ModuloOverride):
                config.frequency = int(config.frequency)
        self._held = []

    def _steps_since(self, frequency: int, _batch_number: int) -> int:
        return (self._trainer.global_step - self._skipped_steps()) % frequency
