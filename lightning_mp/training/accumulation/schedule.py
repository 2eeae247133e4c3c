"""How many micro-batches the next window has: a pure function of how far the run is."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Unit = Literal["epoch", "step", "sample", "token"]
Ramp = Literal["stepped", "linear"]


@dataclass(frozen=True)
class Progress:
    """How far a run is when a window opens; the same numbers on every rank.

    Samples and tokens are those of all windows but the last one, whose count may still be on its way from the device.
    """

    epoch: int = 0  # epochs completed
    step: int = 0  # optimizer steps attempted (`trainer.global_step`)
    samples: int = 0  # samples trained on, over all ranks
    tokens: int = 0  # target tokens trained on, over all ranks
    micro_batch_samples: int = 0  # samples of the run's first micro-batch, over all ranks
    micro_batch_tokens: int = 0  # tokens of the run's first micro-batch, padding included, over all ranks

    def at(self, unit: Unit) -> int:
        """The position that thresholds of this unit are compared with."""
        return {"epoch": self.epoch, "step": self.step, "sample": self.samples, "token": self.tokens}[unit]


@dataclass(frozen=True)
class Thresholds:
    """Micro-batches by threshold: the entry with the largest threshold that is not above the position; else 1.

    >>> schedule = Thresholds({2: 4, 5: 8}, "step")
    >>> [schedule.micro_batches(Progress(step=step)) for step in (0, 2, 4, 5)]
    [1, 4, 4, 8]
    """

    table: Mapping[int, int]
    unit: Unit = "epoch"

    @property
    def units(self) -> frozenset[Unit]:
        """What is counted for it."""
        return frozenset({self.unit})

    def micro_batches(self, progress: Progress) -> int:
        """Length of the window that opens now."""
        position = progress.at(self.unit)
        entry = max((threshold for threshold in self.table if threshold <= position), default=None)
        return 1 if entry is None else self.table[entry]


@dataclass(frozen=True)
class TargetBatch:
    r"""A target for the global batch, reached as nearly as whole micro-batches allow.

    .. math:: N = \max(1, \lfloor \text{target} / \text{micro-batch} + 1/2 \rfloor)

    where the micro-batch is the first one of the run, over all ranks; after a resume with another number of ranks or
    another batch size of the loader, the first one there. "stepped" keeps each target until the next
    threshold, as large-model recipes write it ("0:768 250B:1536"); "linear" goes in a straight line from each target to
    the next and stays at the last.

    >>> schedule = TargetBatch({0: 32, 1000: 64}, "sample", unit="step", ramp="linear")
    >>> [schedule.micro_batches(Progress(step=step, micro_batch_samples=8)) for step in (0, 500, 1000, 2000)]
    [4, 6, 8, 8]
    """

    targets: Mapping[int, int]
    counted: Literal["sample", "token"]
    unit: Unit = "step"
    ramp: Ramp = "stepped"

    def __post_init__(self) -> None:
        first = min(self.targets)
        if first != 0:
            raise ValueError(
                f"The first target batch is given from {self.unit} {first:,} on, and nothing before it: give the batch"
                f" of the start as {{0: {self.targets[first]}, ...}}."
            )

    @property
    def units(self) -> frozenset[Unit]:
        """What is counted for it."""
        return frozenset({self.unit, self.counted})

    def target(self, progress: Progress) -> float:
        """The batch requested, in ``counted``."""
        position = progress.at(self.unit)
        before = max(threshold for threshold in self.targets if threshold <= position)
        following = min((threshold for threshold in self.targets if threshold > position), default=None)
        if self.ramp == "stepped" or following is None:
            return self.targets[before]
        part = (position - before) / (following - before)
        return self.targets[before] + part * (self.targets[following] - self.targets[before])

    def micro_batches(self, progress: Progress) -> int:
        """Length of the window that opens now."""
        size = progress.micro_batch_samples if self.counted == "sample" else progress.micro_batch_tokens
        return max(1, math.floor(self.target(progress) / max(size, 1) + 0.5))


#: Says how long the window is that opens now.
WindowSchedule = Thresholds | TargetBatch


def estimate_steps(
    schedule: WindowSchedule,
    batches_per_epoch: int,
    *,
    max_epochs: int = -1,
    max_steps: int = -1,
    micro_batch_samples: int = 0,
    carry_over: bool = False,
) -> int | float:
    """Counts optimizer steps by walking through the windows of the run.

    .. code-block:: text

        for every epoch:  left <- batches_per_epoch
            while left > 0:  left <- left - min(left, N(progress));  steps <- steps + 1
        up to max_steps

    >>> from lightning_mp.training.accumulation.schedule import Thresholds
    >>> estimate_steps(Thresholds({0: 1, 2: 4}), 10, max_epochs=4)  # 10 + 10 + 3 + 3
    26
    """
    if "token" in schedule.units:
        raise ValueError(
            "AccumulationScheduler: a schedule in tokens does not determine the number of optimizer steps before the"
            " batches are loaded. Use TokenLearningRate, or give a schedule in steps or samples."
        )
    if max_epochs == -1 and max_steps == -1:
        return math.inf
    if batches_per_epoch < 1:
        return 0
    steps = epoch = samples = last_window = planned = position = 0
    while (max_epochs == -1 or epoch < max_epochs) and (max_steps == -1 or steps < max_steps):
        left = batches_per_epoch
        another_follows = max_epochs == -1 or epoch + 1 < max_epochs
        while left > 0 and (max_steps == -1 or steps < max_steps):
            if position == 0:
                seen = samples - last_window
                progress = Progress(epoch=epoch, step=steps, samples=seen, micro_batch_samples=micro_batch_samples)
                planned = schedule.micro_batches(progress)
            taken = min(left, planned - position)
            left -= taken
            position += taken
            if position < planned and carry_over and another_follows:
                break
            steps += 1
            last_window = position * micro_batch_samples
            samples += last_window
            position = 0
        epoch += 1
    return steps
