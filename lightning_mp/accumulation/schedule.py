"""How many micro-batches the next window has: a pure function of how far the run is."""

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, get_args

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


class WindowSchedule(Protocol):
    """Says how long the window is that opens now."""

    @property
    def units(self) -> frozenset[Unit]:
        """What has to be counted for it."""
        ...

    @property
    def has_target(self) -> bool:
        """Whether it asks for a batch of some size, however many micro-batches that takes."""
        ...

    def micro_batches(self, progress: Progress) -> int:
        """The number of micro-batches, 1 or more."""
        ...


@dataclass(frozen=True)
class Thresholds:
    """Micro-batches by threshold: the entry with the largest threshold that is not above the position; else 1.

    Example:
        >>> schedule = Thresholds({2: 4, 5: 8}, "step")
        >>> [schedule.micro_batches(Progress(step=step)) for step in (0, 2, 4, 5)]
        [1, 4, 4, 8]
    """

    table: Mapping[int, int]
    unit: Unit = "epoch"

    @property
    def units(self) -> frozenset[Unit]:
        """What has to be counted for it."""
        return frozenset({self.unit})

    @property
    def has_target(self) -> bool:
        """It counts micro-batches."""
        return False

    def micro_batches(self, progress: Progress) -> int:
        """Length of the window that opens now."""
        entry = _entry_at(sorted(self.table), progress.at(self.unit))
        return 1 if entry is None else self.table[entry]


@dataclass(frozen=True)
class TargetBatch:
    r"""A target for the global batch, reached as nearly as whole micro-batches allow.

    .. math:: N = \max(1, \lfloor \text{target} / \text{micro-batch} + 1/2 \rfloor)

    where the micro-batch is the first one of the run, over all ranks; after a resume with another number of ranks or
    another batch size of the loader, the first one there. "stepped" keeps each target until the next
    threshold, as large-model recipes write it ("0:768 250B:1536"); "linear" goes in a straight line from each target to
    the next and stays at the last.

    Example:
        >>> schedule = TargetBatch({0: 32, 1000: 64}, "sample", unit="step", ramp="linear")
        >>> [schedule.micro_batches(Progress(step=step, micro_batch_samples=8)) for step in (0, 500, 1000, 2000)]
        [4, 6, 8, 8]
    """

    targets: Mapping[int, int]
    counted: Literal["sample", "token"]
    unit: Unit = "step"
    ramp: Ramp = "stepped"
    _thresholds: list[int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.ramp not in get_args(Ramp):
            raise ValueError(f"ramp={self.ramp!r} is unknown; it must be one of {get_args(Ramp)}.")
        object.__setattr__(self, "_thresholds", sorted(self.targets))
        if self._thresholds[0] != 0:
            raise ValueError(
                f"The first target batch is given from {self.unit} {self._thresholds[0]:,} on, and nothing before it:"
                f" give the batch of the start as {{0: {self.targets[self._thresholds[0]]}, ...}}."
            )

    @property
    def units(self) -> frozenset[Unit]:
        """What has to be counted for it."""
        return frozenset({self.unit, self.counted})

    @property
    def has_target(self) -> bool:
        """It counts samples or tokens."""
        return True

    def target(self, progress: Progress) -> float:
        """The batch requested, in ``counted``."""
        position = progress.at(self.unit)
        before = _entry_at(self._thresholds, position)
        assert before is not None
        following = [threshold for threshold in self._thresholds if threshold > position]
        if self.ramp == "stepped" or not following:
            return self.targets[before]
        part = (position - before) / (following[0] - before)
        return self.targets[before] + part * (self.targets[following[0]] - self.targets[before])

    def micro_batches(self, progress: Progress) -> int:
        """Length of the window that opens now."""
        size = progress.micro_batch_samples if self.counted == "sample" else progress.micro_batch_tokens
        return max(1, math.floor(self.target(progress) / max(size, 1) + 0.5))


def _entry_at(thresholds: list[int], position: int) -> int | None:
    index = bisect_right(thresholds, position)
    return thresholds[index - 1] if index else None
