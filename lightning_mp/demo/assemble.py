"""The Trainer of a run: precision plugin, callbacks, loggers."""

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, Literal, cast

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_info

from lightning_mp import (
    AccumulationScheduler,
    AutocastPrecision,
    ChinchillaBudget,
    OverflowMonitor,
    OverflowPostMortem,
    StopAtBoundary,
)
from lightning_mp.demo.folder import RunFolder
from lightning_mp.demo.history import RunHistory
from lightning_mp.demo.overflow import InjectOverflow
from lightning_mp.demo.plan import Plan
from lightning_mp.demo.prepare import Job
from lightning_mp.demo.progress import DemoProgressBar
from lightning_mp.demo.stop import FinalCheckpoint

__all__ = ["assemble"]

_LOG_EVERY_STEPS = 10
_CLIP_NORM = 1.0  # Brown et al. 2020 (arXiv:2005.14165), appendix B


def assemble(job: Job, extra_callbacks: Sequence[Callback] = ()) -> pl.Trainer:
    """Builds the Trainer.

    Args:
        job: The run.
        extra_callbacks: Besides the demo's own.

    Raises:
        ValueError: If Lightning does not know the strategy.
        MisconfigurationException: If Lightning refuses the combination of strategy and devices.
    """
    settings, plan, folder = job.settings, job.plan, job.folder
    # The last checkpoint goes to the same file as the others.
    budget = ChinchillaBudget(tokens_per_parameter=settings.tokens_per_parameter, save=False)
    stop = StopAtBoundary(
        signals=["SIGINT"],
        max_seconds=job.max_seconds,
        dirpath=folder.checkpoint.parent,
        filename=folder.checkpoint.stem,
    )
    callbacks: list[Callback] = [
        OverflowMonitor(),
        OverflowPostMortem(dirpath=folder.path),
        AccumulationScheduler(plan.accumulation, unit="step"),
        budget,
        RunHistory(folder.history, job.facts, budget, stop, plan.micro_batch_tokens),
        DemoProgressBar(refresh_rate=_refresh_every(plan)),
        *extra_callbacks,
        ModelCheckpoint(
            dirpath=folder.checkpoint.parent,
            filename=folder.checkpoint.stem,
            every_n_train_steps=plan.checkpoint_every_steps,
            enable_version_counter=False,
        ),
        FinalCheckpoint(folder.checkpoint, stop),
        stop,
    ]
    if settings.inject_overflow is not None:
        middle = f"model.blocks.{plan.model.layers // 2}.mlp.up.weight"
        callbacks.append(InjectOverflow(settings.inject_overflow, middle))
    return pl.Trainer(
        **_precision(settings.precision),
        accelerator=job.accelerator,
        devices=settings.devices,
        strategy=job.strategy,
        max_epochs=-1,
        gradient_clip_val=_CLIP_NORM,
        callbacks=callbacks,
        logger=_loggers(folder),
        # the whole run is one epoch, see TextData
        val_check_interval=plan.validate_every_micro_batches,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        log_every_n_steps=min(_LOG_EVERY_STEPS, plan.micro_batches),
        enable_model_summary=False,
        default_root_dir=folder.path,
    )


def _precision(precision: str) -> dict[str, Any]:
    if precision == "32-true":
        return {"precision": precision}
    return {"plugins": [AutocastPrecision(cast(Literal["16-mixed", "bf16-mixed"], precision))]}


def _loggers(folder: RunFolder) -> list[Logger]:
    loggers: list[Logger] = [CSVLogger(folder.path, name="csv")]
    if find_spec("tensorboard") is not None:
        loggers.append(TensorBoardLogger(folder.path, name="tensorboard", version=""))
    else:
        rank_zero_info("No TensorBoard log is written: install tensorboard (pip install 'lightning-mp[plots]').")
    return loggers


def _refresh_every(plan: Plan) -> int:
    """In micro-batches: often on a terminal, some twenty times where the output goes to a file."""
    return 5 if sys.stdout.isatty() else max(1, plan.micro_batches // 20)
