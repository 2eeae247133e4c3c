"""Gradient accumulation by schedule, with the exact mean."""

import operator
from collections.abc import Mapping
from typing import Literal, get_args

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from lightning_mp.callbacks._common import refuse_other_trainers, refuse_rivals
from lightning_mp.weighting import CountFunction, WeightBy, Weighting
from lightning_mp.windows import WindowKeeper

__all__ = ["AccumulationScheduler", "micro_batches_at", "parse_schedule"]

Unit = Literal["epoch", "step"]


def parse_schedule(schedule: Mapping[int | str, int | str] | Mapping[int, int] | Mapping[str, int]) -> dict[int, int]:
    """A schedule with integer thresholds in rising order; strings are read as integers (YAML, Hydra).

    Raises:
        ValueError: if it is no mapping, empty, or holds anything but thresholds from 0 and lengths from 1.

    Example:
        >>> parse_schedule({"1_000": 4, "0": 1})
        {0: 1, 1000: 4}
    """
    if not isinstance(schedule, Mapping) or not schedule:
        raise ValueError(
            f"AccumulationScheduler(schedule={schedule!r}): it must be a mapping from a threshold to the number of"
            " micro-batches per optimizer step, for instance {0: 1, 1000: 4}."
        )
    parsed: dict[int, int] = {}
    for threshold, micro_batches in schedule.items():
        key, value = _integer(threshold), _integer(micro_batches)
        if key is None or value is None or key < 0 or value < 1:
            raise ValueError(
                f"AccumulationScheduler(schedule={dict(schedule)!r}): the entry {threshold!r}: {micro_batches!r} is not"
                " valid. A threshold is an integer from 0, a number of micro-batches an integer from 1."
            )
        if key in parsed:
            raise ValueError(
                f"AccumulationScheduler(schedule={dict(schedule)!r}): the threshold {key} is given twice."
                " Keep one entry."
            )
        parsed[key] = value
    return dict(sorted(parsed.items()))


def _integer(value: object) -> int | None:
    if isinstance(value, bool):
        return None
    try:
        return int(value) if isinstance(value, str) else operator.index(value)  # type: ignore[arg-type]  # tried
    except (TypeError, ValueError):
        return None


def micro_batches_at(schedule: Mapping[int, int], position: int) -> int:
    """The entry with the largest threshold that is not above ``position``; 1 before the first threshold.

    Example:
        >>> [micro_batches_at({2: 4, 5: 8}, position) for position in (0, 2, 4, 5)]
        [1, 4, 4, 8]
    """
    return next((schedule[threshold] for threshold in sorted(schedule, reverse=True) if position >= threshold), 1)


class AccumulationScheduler(Callback):
    """Micro-batches per optimizer step, by epoch or by optimizer step; always the exact mean.

    A drop-in for Lightning's ``GradientAccumulationScheduler``. A change takes effect where the next window opens. The
    last window of an epoch is as short as it has to be and is still an exact mean. The schedule holds after a resume in
    the middle of an epoch and in a second ``fit``.

    Args:
        schedule: threshold -> micro-batches per optimizer step. Keys may be strings ("1_000").
        unit: what thresholds count: "epoch", or "step" for optimizer steps (``trainer.global_step``).
        weight_by: what a micro-batch weighs in the mean of its window: "token" for its loss-bearing tokens, "sample"
            for its batch size, "batch" for all alike. "auto" takes tokens if batches have token labels, else samples.
            The loss must be a mean over these items.
        count: a function from a batch to its number of tokens on this rank (int, or scalar tensor), where they are not
            the labels other than -100.

    Raises:
        ValueError: if an argument is not valid.
        MisconfigurationException: at set-up, with manual optimization, ``Trainer(accumulate_grad_batches=N)``,
            DeepSpeed, ``StochasticWeightAveraging`` or Lightning's own scheduler.

    Example:
        >>> from lightning_mp import AccumulationScheduler
        >>> AccumulationScheduler({0: 1, 1000: 4}, unit="step").schedule
        {0: 1, 1000: 4}
    """

    def __init__(
        self,
        schedule: Mapping[int, int] | Mapping[str, int],
        *,
        unit: Unit = "epoch",
        weight_by: WeightBy = "auto",
        count: CountFunction | None = None,
    ) -> None:
        if unit not in get_args(Unit):
            raise ValueError(f"AccumulationScheduler(unit={unit!r}) is unknown; it must be one of {get_args(Unit)}.")
        Weighting(weight_by, count)  # raises on a wrong argument now, not at set-up
        self.schedule = parse_schedule(schedule)
        self.unit = unit
        self.weight_by: WeightBy = weight_by
        self.count = count

    def micro_batches(self, trainer: "pl.Trainer") -> int:
        """Length of the window that opens now."""
        position = trainer.current_epoch if self.unit == "epoch" else trainer.global_step
        return micro_batches_at(self.schedule, position)

    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        """Hands the schedule to the window keeper."""
        refuse_other_trainers(self, trainer)
        if stage != "fit":
            return
        refuse_rivals(self, trainer, pl_module)
        keeper = WindowKeeper.attach(trainer)
        keeper.follow(self.micro_batches)
        keeper.weigh(self.weight_by, self.count)
