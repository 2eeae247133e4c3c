"""One run: a fresh module, fresh data and a fresh plugin in a Trainer that leaves nothing behind."""

import copy
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_mp.comparison.precisions import PluginFactory
from lightning_mp.comparison.recorder import Recorder, set_seed, weights_digest
from lightning_mp.comparison.training_data import TrainingData
from lightning_mp.core.quiet_run import interrupts_kept, quiet_lightning

ModuleFactory = Callable[[], pl.LightningModule]


@dataclass(frozen=True, slots=True)
class Experiment:
    """What all runs of a comparison share."""

    make_module: ModuleFactory  # a module with its initial weights; called once per run, after the seed is set
    data: TrainingData  # what to train on
    precisions: Mapping[str, PluginFactory]  # makes the plugin of each precision; the first one is the baseline
    accelerator: str  # of the Trainer, "cpu", "cuda" or "mps"
    trainer_options: Mapping[str, Any]  # of the Trainer, such as `gradient_clip_val`

    @property
    def device(self) -> torch.device:
        """The device of the runs."""
        return torch.device(self.accelerator)


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of one run."""

    # of each batch, undivided by accumulation; empty where `training_step` returns none, as it may in manual
    # optimization
    train_losses: tuple[float, ...]
    items: int  # tokens or samples trained on
    unit: str  # "tokens" or "samples"
    metric: float | None  # the validation metric that was requested
    seconds: float  # of the fit, from the first batch on
    weights_digest: str  # of the initial weights
    data_digest: str  # of the first batches of each epoch


def run_trial(
    experiment: Experiment,
    precision: str,
    *,
    seed: int,
    steps: int,
    callbacks: Sequence[Callback] = (),
    monitor: str | None = None,
    data: TrainingData | None = None,
    make_module: ModuleFactory | None = None,
) -> Trial:
    """Trains for some optimizer steps.

    Everything random is a function of the seed and the batch: at the start and the end of each batch the generators are
    set anew. A precision that draws more random numbers than another one sees the same data nevertheless.
    """
    set_seed(seed)
    module = (make_module or experiment.make_module)()
    digest = weights_digest(module)
    recorder = Recorder(seed)
    options = {**copy.deepcopy(dict(experiment.trainer_options))}
    own_callbacks = options.pop("callbacks", None) or []
    own_callbacks = [own_callbacks] if isinstance(own_callbacks, Callback) else list(own_callbacks)
    with TemporaryDirectory() as folder, quiet_lightning(logging.ERROR), interrupts_kept():
        warnings.filterwarnings("ignore", category=PossibleUserWarning)  # advice on long runs
        trainer = pl.Trainer(
            **{**_QUIET_OPTIONS, **options},
            plugins=[experiment.precisions[precision]()],
            accelerator=experiment.accelerator,
            devices=1,
            max_steps=steps,
            max_epochs=-1,
            callbacks=[*own_callbacks, *callbacks, recorder],
            default_root_dir=folder,
        )
        source = (data or experiment.data).make()
        set_seed(seed)  # before `setup` and `configure_model`, after the plugin's constructor: any may draw numbers
        with _failures_explained(precision, seed):
            trainer.fit(module, **source.fit_arguments())
        recorder.check(trainer)
        metric = _validated(trainer, module, source, monitor) if monitor is not None else None
    return Trial(
        train_losses=tuple(torch.stack(recorder.losses).tolist()) if recorder.losses else (),
        items=recorder.items,
        unit=recorder.unit,
        metric=metric,
        seconds=recorder.seconds,
        weights_digest=digest,
        data_digest=recorder.digest.hexdigest()[:16],
    )


def _validated(trainer: pl.Trainer, module: pl.LightningModule, source: TrainingData, monitor: str) -> float:
    trainer.validate(module, **source.validate_arguments(), verbose=False)
    metrics = trainer.callback_metrics
    if monitor not in metrics:
        raise ValueError(
            f"`monitor` {monitor!r} was not logged in validation; logged were {', '.join(sorted(metrics)) or 'none'}."
            " Pass one of these, or leave monitor out to compare the training loss."
        )
    return float(metrics[monitor])


_QUIET_OPTIONS = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_model_summary": False,
    "enable_progress_bar": False,
    "num_sanity_val_steps": 0,
    "check_val_every_n_epoch": None,
    "val_check_interval": 10**9,
}


@contextmanager
def _failures_explained(precision: str, seed: int) -> Iterator[None]:
    """Says which run failed, and what to do if something follows a metric that validation would log."""
    try:
        yield
    except (MisconfigurationException, RuntimeError) as error:
        if "ReduceLROnPlateau conditioned on metric" not in str(error):
            error.add_note(f"This was the run in {precision!r} with seed {seed} of compare_precisions().")
            raise
        raise ValueError(
            f"`module` needs a metric that is not there: {error} Validation runs only after the last step. If that logs"
            " it, pass trainer_options={'check_val_every_n_epoch': 1, 'val_check_interval': 1.0}."
        ) from error
