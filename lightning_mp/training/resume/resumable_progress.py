"""What a checkpoint says of epochs and data, so that a run continues with the very next batch."""

from collections import deque
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BatchSizeFinder, Callback, LearningRateFinder, OnExceptionCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_mp.ground.core import private_resume_api, private_trainer_api
from lightning_mp.ground.core.patches import Patches
from lightning_mp.ground.core.private_trainer_api import callbacks_of
from lightning_mp.ground.core.run_state import RunState
from lightning_mp.ground.core.saved_state import Schema, checked_state

_LOADERS_KEY = "lightning_mp_loaders_made_in"


@dataclass
class _Fit:
    """Loader states of one fit; kept until the next one, for a checkpoint that is written when it has ended."""

    # Before the fetch before the last, and before the last, where they are needed.
    before_fetches: deque[list[dict[str, Any]]] = field(default_factory=lambda: deque(maxlen=2))
    at_start: list[dict[str, Any]] = field(default_factory=list)  # before the present loaders were first asked
    at_end: list[dict[str, Any]] = field(default_factory=list)
    ends_with_validation: bool = False
    is_tuning: bool = False  # a finder of learning rates or batch sizes tries them, and puts everything back


class ResumableProgress(Callback):
    """Lets a run continue exactly where it was, whichever batch its checkpoint was written after.

    Lightning 2.6 continues exactly from most checkpoints inside an epoch, if the data loader has a length and a state
    of its own. It does not from these, which this callback corrects:

    .. code-block:: text

        written                       Lightning                                here
        after a batch at which        does not validate                        validates, then continues
        validation is due
        after an epoch's last batch   skips the next epoch, or counts it with  ends the epoch, validation and
                                      the one before; a second restart in it   on_train_epoch_end included, and
                                      begins it anew                           begins the next one
        in on_train_epoch_end         with max_steps: does all of that hook    counts the epoch, and loads the
                                      again and counts the epoch twice;        loader's state
                                      with max_epochs: forgets the loader's
                                      state
        with a loader that has no     loses the batch that was fetched ahead   saves the loader's state before
        length, or on an exception    or was in work                           that fetch
        inside a later epoch, with    uses the order of the first epoch        sets the sampler's epoch before the
        a sampler like                                                         loader continues
        DistributedSampler
        in on_train_epoch_start       finds the loader at its end, and skips   begins the epoch
                                      the epoch
        at the end of a run, after    takes the epoch for finished, and has    keeps the epoch open, or just over,
        it                            lost the loader's state                  and the loader's state
        inside an epoch               ReduceLROnPlateau does nothing at the    it sees its metric, if that is there
                                      epoch's end
        between the epochs in which   makes them in the epoch in which it      makes those of the epoch in which they
        loaders are made anew         continues, and counts from there         were made

    Of these, Lightning-AI/pytorch-lightning has reports of the first (#20288), of an epoch's last batch (#19617), of
    the sampler (#21938) and of loaders made anew (#21492), open as of Lightning 2.6; the others are not reported. A
    test in ``tests/resume/test_progress_of_lightning.py`` or ``tests/stock/test_stock_restarts.py`` fails when one is
    fixed.

    The loader's state is copied before each fetch if it has no length, or if checkpoints are written on exceptions. All
    ranks are given the state that rank 0 saved, as in Lightning.

    :class:`~lightning_mp.ExactResume`, :class:`~lightning_mp.AtomicCheckpoints`, :class:`~lightning_mp.StopAtBoundary`,
    :class:`~lightning_mp.AccumulationScheduler`, :class:`~lightning_mp.ChinchillaBudget`,
    :class:`~lightning_mp.FSDP2Strategy` and :class:`~lightning_mp.PipelineParallelStrategy` bring it along.
    """

    def __init__(self) -> None:
        self._fit = _Fit()

    @classmethod
    def attach(cls, trainer: "pl.Trainer") -> "ResumableProgress":
        """Adds one before the Trainer's callbacks if there is none."""
        run = RunState.of(trainer)
        found = run.callback(cls)
        if found is not None:
            return found
        new = cls()
        new.setup(trainer, trainer.lightning_module, str(trainer.state.fn))
        run.place_callback(new)
        return new

    @override
    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        """Lets samplers know the epoch before their loader continues inside it."""
        if trainer.state.fn != TrainerFn.FITTING:
            return
        self._fit = fit = _Fit()

        def process(dataloader: object) -> object:
            processed = patch.original(dataloader)
            private_resume_api.set_sampler_epoch(trainer, processed)
            return processed

        def begin(states: list[dict[str, Any]]) -> None:
            fit.at_start = states
            if fit.before_fetches:
                fit.before_fetches = deque([states], maxlen=2)

        patches = Patches.of(trainer)
        for callback in callbacks_of(trainer):
            for kind, name in ((LearningRateFinder, "lr_find"), (BatchSizeFinder, "scale_batch_size")):
                if isinstance(callback, kind):
                    patches.around(
                        callback, name, partial(self._tune, trainer, True), partial(self._tune, trainer, False)
                    )
        private_resume_api.before_loader_states(trainer, partial(self._forget_loader_states, trainer))
        patch = patches.replace(trainer.strategy, "process_dataloader", process)
        private_resume_api.before_first_fetch(trainer, begin)

    @property
    def is_tuning(self) -> bool:
        """Whether a checkpoint is a finder's of learning rates or batch sizes, to put everything back in this run."""
        return self._fit.is_tuning

    def _tune(self, trainer: "pl.Trainer", is_tuning: bool) -> None:
        self._forget_loader_states(trainer)
        self._fit.is_tuning = is_tuning

    def _forget_loader_states(self, trainer: "pl.Trainer") -> None:
        """A finder's trials use separate loaders, and the fit after them starts its loaders again, as in Lightning."""
        if self.is_tuning:
            private_resume_api.forget_loader_states(trainer)

    @override
    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Ends the batch and the epoch that a checkpoint was written after."""
        fit = self._fit
        private_resume_api.load_late_states(trainer)
        if private_resume_api.end_resumed_epoch(trainer):
            fit.at_start = []  # the next epoch starts at its first batch
        private_resume_api.end_resumed_batch(trainer)
        goes_back = saves_on_exception(trainer)

        if goes_back or private_resume_api.fetches_ahead(trainer):
            fit.before_fetches.append(fit.at_start)

        def keep(states: list[dict[str, Any]]) -> None:
            fit.before_fetches.append(deepcopy(states))  # a loader may return an object that its next fetch changes

        private_resume_api.before_each_fetch(trainer, keep, always=goes_back)

    @override
    def on_train_epoch_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Lets ``ReduceLROnPlateau`` see the metric of a resumed epoch."""
        private_resume_api.end_restart(trainer)

    @override
    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Keeps the loaders' states, which Lightning resets after this."""
        fit = self._fit
        fit.ends_with_validation = private_resume_api.is_validation_due(trainer)
        fetches_ahead = private_resume_api.fetches_ahead(trainer) and fit.before_fetches
        fit.at_end = fit.before_fetches[-1] if fetches_ahead else deepcopy(private_resume_api.loader_states(trainer))

    @override
    def on_save_checkpoint(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", checkpoint: dict[str, Any]
    ) -> None:
        """Writes what the run has really done."""
        progress = checkpoint.get("loops", {}).get("fit_loop")
        if progress is None:
            return
        fit = self._fit
        if fit.is_tuning:
            return
        checkpoint[_LOADERS_KEY] = private_resume_api.loaders_made_in(trainer)
        skip_started_epoch(progress)
        reopen_epoch(progress, num_batches=trainer.num_training_batches)
        fetched = num_unprocessed_batches(trainer, progress)
        if _is_in_work(progress) and not private_trainer_api.is_accumulating(trainer):
            # Lightning counts the step of a batch that was in work when it continues, and again when it has made it.
            progress["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1
        # Where the run ended with a validation, Lightning ends that batch again when it continues, and counts its step.
        progress["epoch_loop.state_dict"]["_batches_that_stepped"] -= fit.ends_with_validation
        # Those before the fetch of the first batch that is not done. The present ones are right if it was not fetched.
        if fit.at_end or 0 < fetched <= len(fit.before_fetches):
            progress["state_dict"]["combined_loader"] = fit.at_end or fit.before_fetches[-fetched]

    @override
    def on_load_checkpoint(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", checkpoint: dict[str, Any]
    ) -> None:
        """Has loaders made of the epoch in which they were made."""
        made_in = checkpoint.get(_LOADERS_KEY)
        if trainer.state.fn == TrainerFn.FITTING and made_in is not None and not self.is_tuning:
            kind = Schema("two epochs", lambda value: isinstance(value, list) and len(value) == 2)
            made_in = checked_state({"epochs": made_in}, {"epochs": kind}, "the loaders")["epochs"]
            private_resume_api.make_loaders_of(trainer, made_in)


def saves_on_exception(trainer: "pl.Trainer") -> bool:
    """Whether a checkpoint may be written while a batch is in work."""
    return any(
        isinstance(callback, OnExceptionCheckpoint) or getattr(callback, "save_on_exception", False)
        for callback in callbacks_of(trainer)
    )


def num_unprocessed_batches(trainer: "pl.Trainer", progress: Mapping[str, Any]) -> int:
    """Batches that were fetched and are not done: the one in work, and one that is fetched ahead."""
    return _is_in_work(progress) + private_resume_api.fetches_ahead(trainer)


def _is_in_work(progress: Mapping[str, Any]) -> bool:
    batches = progress["epoch_loop.batch_progress"]["current"]
    return bool(batches["ready"] > batches["processed"])


def skip_started_epoch(progress: dict[str, Any]) -> None:
    """An epoch that is in its ``on_train_epoch_start`` begins again, from where the one before it has ended."""
    epochs = progress["epoch_progress"]
    begun = epochs["current"]["started"]
    if epochs["current"]["ready"] == begun:
        return
    for counts in (epochs["total"], epochs["current"]):
        counts["ready"] -= 1
        counts["completed"] -= begun > 0


def reopen_epoch(progress: dict[str, Any], num_batches: float) -> None:
    """Counts the epoch in which a run ended as one that continues, or that only needs to be counted as completed.

    Lightning counts it as finished in any case, also where the run ended after some of its ``num_batches``. A
    checkpoint that is written while an epoch runs stays as it is.
    """
    epochs, batches = progress["epoch_progress"], progress["epoch_loop.batch_progress"]
    ready = epochs["current"]["ready"]
    if not ready or epochs["current"]["completed"] < ready:
        return
    is_over = batches["is_last_batch"] or batches["current"]["ready"] >= num_batches
    for counts in (epochs["total"], epochs["current"]):
        counts["completed"] -= 1
        counts["processed"] -= not is_over


def is_epoch_over(progress: Mapping[str, Any]) -> bool:
    """Whether no batch of the epoch is left; ``progress`` is that of the fit loop, as a checkpoint holds it."""
    epochs, batches = progress["epoch_progress"]["current"], progress["epoch_loop.batch_progress"]
    is_done = batches["current"]["ready"] == batches["current"]["processed"]
    return bool(epochs["ready"]) and (epochs["processed"] >= epochs["ready"] or (batches["is_last_batch"] and is_done))


def repeat_validation(progress: dict[str, Any]) -> None:
    """A checkpoint written during a validation counts as written before it; ``progress`` is changed in place."""
    batches, validation = progress["epoch_loop.batch_progress"], progress["epoch_loop.val_loop.batch_progress"]
    for counts in (batches["total"], batches["current"]):
        counts["completed"] -= 1
    for name, number in validation["current"].items():
        validation["total"][name] -= number
        validation["current"][name] = 0
    validation["is_last_batch"] = False
