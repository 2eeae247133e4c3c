"""Gradient accumulation by schedule or by target batch, with the exact mean."""

import operator
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, get_args

import lightning.pytorch as pl
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from lightning_mp.callbacks._common import CountUse, check_counts
from lightning_mp.callbacks._window_controller import join_window_controller
from lightning_mp.ground.core.arguments import true_or_false, whole_quantity
from lightning_mp.ground.core.foreign_trainers import refuse_other_trainers
from lightning_mp.ground.core.known_words import refuse_unknown
from lightning_mp.ground.core.settings_repr import SettingsRepr
from lightning_mp.training.accumulation.partial_state import why_gradients_are_elsewhere
from lightning_mp.training.accumulation.schedule import Progress, Ramp, TargetBatch, Thresholds, Unit, estimate_steps
from lightning_mp.training.accumulation.windows import DataLayout
from lightning_mp.training.gradients.sync import Sync
from lightning_mp.training.optimizer_step.gradient_observers import overrides
from lightning_mp.training.tokens.loss_weighting import CountFunction, WeightBy, Weighting

#: A number of micro-batches, or of samples or tokens, by threshold. YAML and Hydra write both as strings.
Table = Mapping[Any, int | str]  # keys are ints or strings; a union of both would refuse a dict[int, int]
#: Samples or tokens in a step: a number, such a number as text ("1M"), or a table of them.
BatchTarget = int | str | Table


def parse_schedule(schedule: Table, name: str = "schedule") -> dict[int, int]:
    """A table with integer thresholds in ascending order; strings are read as quantities (``"1_000"``, ``"1.5B"``).

    >>> parse_schedule({"1_000": 4, "0": 1, "1.5B": "8"})
    {0: 1, 1000: 4, 1500000000: 8}
    """
    if not isinstance(schedule, Mapping) or not schedule:
        raise ValueError(
            f"AccumulationScheduler({name}={schedule!r}): it must be a mapping from a threshold to the number of"
            " micro-batches per optimizer step, for instance {0: 1, 1000: 4}."
        )
    counted = "a number of micro-batches" if name == "schedule" else "a batch in samples or tokens"
    parsed: dict[int, int] = {}
    for threshold, number in schedule.items():
        key, value = _integer(threshold), _integer(number)
        if key is None or value is None or key < 0 or value < 1:
            raise ValueError(
                f"AccumulationScheduler({name}={dict(schedule)!r}): the entry {threshold!r}: {number!r} is not valid."
                f" A threshold is an integer from 0, {counted} an integer from 1."
            )
        if key in parsed:
            raise ValueError(
                f"AccumulationScheduler({name}={dict(schedule)!r}): the threshold {key} is given twice. Keep one entry."
            )
        parsed[key] = value
    return dict(sorted(parsed.items()))


def _integer(value: object) -> int | None:
    try:
        number: Any = value
        if isinstance(value, str):
            number = 0 if value.strip() == "0" else whole_quantity(value, "threshold")
        return None if isinstance(number, bool) else operator.index(number)
    except (TypeError, ValueError):
        return None


class AccumulationScheduler(SettingsRepr, Callback):
    """Sets the micro-batches per optimizer step, by schedule or target batch size; gradients are exact means.

    A drop-in replacement for Lightning's ``GradientAccumulationScheduler``. A change takes effect
    when the next window opens. The last window of an epoch may be shorter and is still an exact mean. The schedule also
    applies after resuming in the middle of an epoch and in a second ``fit``.

    Give one of ``schedule``, ``target_samples`` and ``target_tokens``. Thresholds in samples and tokens are compared
    with the counts over all ranks up to the window before the last one, whose count may still be on the device.

    With this callback, the run also ends only at the end of a window, whatever sets ``trainer.should_stop``;
    ``ModelCheckpoint`` writes at the ends of windows; the ``frequency`` of a learning-rate scheduler counts optimizer
    steps; ``sync`` sets when sharded gradients are reduced.

    Args:
        schedule: threshold -> micro-batches per optimizer step. Keys may be strings ("1_000", "1.5B").
        scheduling: Lightning's name for ``schedule``.
        unit: what thresholds count: "epoch", "step" for optimizer steps (``trainer.global_step``), "sample" or "token".
        target_samples: global batch size in samples: a number, or threshold -> number, starting at threshold 0. It is
            rounded to a whole number of micro-batches, given the size of the run's first one and the number of ranks
            that see different data; a resume with another number of ranks or another batch size measures again.
        target_tokens: the same in tokens: padding included, or those that ``count`` returns.
        ramp: how to get from one target to the next: "stepped" or "linear".
        weight_by: weight of a micro-batch in the mean of its window: "auto" for the items of its loss, or equal weights
            if these are unknown, as a message then says; "token" for its target tokens, "sample" for its batch size,
            "batch" for equal weights. With the last three the loss must be a mean over these; or, if the batch is a
            mapping with ``"num_items_in_batch"``, a sum divided by that, as Hugging Face models make it.
        count: a function that returns the number of tokens in a batch on this rank (int, or scalar tensor); None counts
            the labels other than -100.
        sync: under FSDP and FSDP2, "window" reduces gradients once per window and keeps them unsharded until then;
            "micro_batch" reduces and shards them after every micro-batch. The bytes of both are printed.
        save_partial_gradients: allow checkpoints inside a window, with its gradient so far. A resumed run is
            bit-identical on one process, and equal up to rounding on several or on another number. Not for sharded
            strategies or pipelines.
        carry_over: let a window that is not full at the end of an epoch continue in the next one, instead of closing
            there. The last epoch of ``max_epochs`` still closes it.

    Raises:
        ValueError: if an argument is not valid.
        MisconfigurationException: at set-up, with manual optimization, ``Trainer(accumulate_grad_batches=N)``,
            DeepSpeed, ``StochasticWeightAveraging`` or Lightning's own scheduler.

    Example:
        >>> from lightning_mp import AccumulationScheduler
        >>> AccumulationScheduler({0: 1, 1000: 4}, unit="step").schedule
        {0: 1, 1000: 4}
        >>> AccumulationScheduler(target_tokens={0: 500_000, "250B": "1M"}, unit="token", ramp="linear").windows.targets
        {0: 500000, 250000000000: 1000000}
    """

    _count_use: ClassVar[CountUse] = "weights"

    def __init__(
        self,
        schedule: Table | None = None,
        *,
        scheduling: Table | None = None,
        unit: Unit = "epoch",
        target_samples: BatchTarget | None = None,
        target_tokens: BatchTarget | None = None,
        ramp: Ramp = "stepped",
        weight_by: WeightBy = "auto",
        count: CountFunction | None = None,
        sync: Sync = "window",
        save_partial_gradients: bool = False,
        carry_over: bool = False,
    ) -> None:
        words = (("unit", unit, Unit), ("sync", sync, Sync), ("ramp", ramp, Ramp), ("weight_by", weight_by, WeightBy))
        for name, value, allowed in words:
            refuse_unknown(value, name, "AccumulationScheduler", get_args(allowed))
        Weighting(weight_by, count)  # raises on a wrong argument now, not at set-up
        _refuse_unless_one(
            schedule=schedule, scheduling=scheduling, target_samples=target_samples, target_tokens=target_tokens
        )
        self.unit = unit
        self.schedule: dict[int, int] | None = None
        self.windows: Thresholds | TargetBatch
        table = schedule if scheduling is None else scheduling
        if table is not None:
            if ramp != "stepped":
                raise ValueError(
                    f"AccumulationScheduler(ramp={ramp!r}) is for target_samples and target_tokens; a schedule of"
                    " micro-batches changes in steps. Leave ramp out."
                )
            self.schedule = parse_schedule(table)
            self.windows = Thresholds(self.schedule, unit)
        else:
            self.windows = _target_batch(target_samples, target_tokens, unit, ramp)
        self.target_samples = target_samples
        self.target_tokens = target_tokens
        self.ramp: Ramp = ramp
        self.weight_by: WeightBy = weight_by
        self.count = count
        self.sync: Sync = sync
        self.save_partial_gradients = true_or_false(
            save_partial_gradients, "save_partial_gradients", "AccumulationScheduler"
        )
        self.carry_over = true_or_false(carry_over, "carry_over", "AccumulationScheduler")

    @property
    def scheduling(self) -> dict[int, int] | None:
        """``schedule`` under Lightning's name, with an entry for the start; None for a target batch."""
        return None if self.schedule is None else {0: 1} | self.schedule

    def going_to_accumulate_grad_batches(self) -> bool:
        """Whether a window may have several micro-batches; the method of Lightning's scheduler."""
        return self.schedule is None or any(number > 1 for number in self.schedule.values())

    def get_accumulate_grad_batches(self, epoch: int) -> int:
        """Micro-batches per optimizer step in an epoch; the method of Lightning's scheduler.

        Raises:
            ValueError: if the schedule does not count epochs.
        """
        if self.windows.units != {"epoch"}:
            counted = " and ".join(sorted(self.windows.units))
            raise ValueError(
                f"AccumulationScheduler.get_accumulate_grad_batches({epoch}): this schedule counts {counted}s, so the"
                " number can change within an epoch. Read trainer.accumulate_grad_batches in the middle of a window."
            )
        return self.windows.micro_batches(Progress(epoch=epoch))

    def check_setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", batch: Any) -> None:
        """Raises the errors of a fit before it starts; called by preflight.

        Raises:
            MisconfigurationException: as in the fit.
        """
        check_counts(self, trainer, pl_module, batch, needs_tokens="token" in self.windows.units)

    @override
    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        """Passes the schedule to the accumulation controller."""
        refuse_other_trainers(self, trainer)
        if stage != "fit":
            return
        controller = join_window_controller(self, trainer, pl_module, self.count, self.weight_by)
        reason = why_gradients_are_elsewhere(trainer)
        if self.save_partial_gradients and reason:
            raise MisconfigurationException(
                f"AccumulationScheduler(save_partial_gradients=True) cannot be used here: {reason} Leave it out:"
                " checkpoints are then written at the end of a window."
            )
        controller.settings.follow(
            self.windows,
            self.sync,
            partial_gradients=self.save_partial_gradients,
            carry_over=self.carry_over,
            total=lambda: self._estimated_stepping_batches(trainer),
        )
        # From now on `trainer.estimated_stepping_batches` is right, also in `configure_optimizers`.
        trainer.accumulate_grad_batches = controller.settings.idle_value()

    @override
    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Warns, as Lightning does, where the module's own hooks are called once per window only."""
        overridden = [
            name for name in ("optimizer_step", "optimizer_zero_grad") if overrides(pl_module, pl.LightningModule, name)
        ]
        if overridden and self.going_to_accumulate_grad_batches():
            rank_zero_warn(
                f"AccumulationScheduler: {type(pl_module).__name__}.{' and '.join(overridden)} will be called once per"
                " optimizer step, not for every micro-batch."
            )

    def _estimated_stepping_batches(self, trainer: "pl.Trainer") -> int | None:
        try:
            return int(self.estimated_steps(trainer))
        except (ValueError, MisconfigurationException) as error:
            rank_zero_warn(
                "trainer.estimated_stepping_batches was read, and does not know about this AccumulationScheduler: the"
                f" number it gives is too large, and AccumulationScheduler.estimated_steps(trainer) could not replace"
                f" it. {error}"
            )
            return None

    def estimated_steps(self, trainer: "pl.Trainer") -> int | float:
        """Optimizer steps of the whole run, skipped ones included, for use in ``configure_optimizers``.

        ``trainer.estimated_stepping_batches`` gives the same number from ``configure_optimizers`` on; where it is not
        known, it warns.

        Returns:
            The number; ``math.inf`` for a run without ``max_epochs`` and ``max_steps``, or over data without a length
            that has no ``max_steps``.

        Raises:
            ValueError: if the schedule counts tokens.
            MisconfigurationException: if samples are needed and the data loader has no ``batch_size``.
        """
        trainer.fit_loop.setup_data()
        max_epochs = -1 if trainer.max_epochs is None else trainer.max_epochs
        batches = trainer.num_training_batches
        if batches == float("inf"):
            # One epoch without an end: every window is whole.
            batches, max_epochs = max(trainer.max_steps, 0) * 10**6, 1 if trainer.max_steps != -1 else -1
        samples = _micro_batch_samples(trainer) if "sample" in self.windows.units else 0
        return estimate_steps(
            self.windows,
            int(batches),
            max_epochs=max_epochs,
            max_steps=trainer.max_steps,
            micro_batch_samples=samples,
            carry_over=self.carry_over,
        )


def _micro_batch_samples(trainer: "pl.Trainer") -> int:
    layout = DataLayout.of(trainer)
    if layout.batch_size is None:
        raise MisconfigurationException(
            "AccumulationScheduler.estimated_steps needs the number of samples in a micro-batch, and the data loader of"
            f" type {type(trainer.train_dataloader).__name__} has no batch_size. Give a schedule in steps or epochs, or"
            " compute the number of steps yourself."
        )
    return layout.batch_size * layout.data_ranks


def _refuse_unless_one(**given: object) -> None:
    asked = [name for name, value in given.items() if value is not None]
    if len(asked) != 1:
        raise ValueError(
            f"AccumulationScheduler needs one of schedule, target_samples and target_tokens, and got"
            f" {', '.join(asked) or 'none'}: give a mapping such as {{0: 1, 1000: 4}}, or the batch to reach."
        )


def _target_batch(samples: BatchTarget | None, tokens: BatchTarget | None, unit: Unit, ramp: Ramp) -> TargetBatch:
    counted: Literal["sample", "token"] = "sample" if samples is not None else "token"
    target: Any = samples if samples is not None else tokens
    table = target if isinstance(target, Mapping) else {0: target}
    return TargetBatch(parse_schedule(table, f"target_{counted}s"), counted, unit, ramp)
