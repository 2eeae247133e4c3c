"""The main job: fit, then report."""

import json
import logging
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_mp.demo.assemble import assemble
from lightning_mp.demo.data import TextData
from lightning_mp.demo.device import limit_threads, slowness_hint
from lightning_mp.demo.finish import finish
from lightning_mp.demo.folder import RunFolder
from lightning_mp.demo.module import LanguageModel
from lightning_mp.demo.plan import BLOCK_TOKENS
from lightning_mp.demo.prepare import Job, describe_shape
from lightning_mp.demo.stop import interrupts_given_back

__all__ = ["fit", "run_job"]

_MAX_VALIDATION_BATCHES = 32


def run_job(job: Job, extra_callbacks: Sequence[Callback] = ()) -> int:
    """Trains, and leaves checkpoint, logs, sample, picture and summary in the run's folder.

    Args:
        job: The run, checked.
        extra_callbacks: Besides the demo's own.

    Returns:
        0 if the run did what was asked, 130 if it was interrupted.

    Raises:
        MisconfigurationException: If Lightning or the pack refuses the combination. Nothing is left behind then.
        KeyboardInterrupt: On the second Ctrl-C, or before the first batch; says where the last checkpoint is.
    """
    if job.resumed_tokens is not None and job.resumed_tokens >= job.plan.budget_tokens:
        _say(f"{job.folder.path} has spent its whole budget already. Start a new run without --resume.")
        _finish_again(job.folder)
        return 0
    torch.manual_seed(job.settings.seed)
    with _quiet():
        try:
            trainer = assemble(job, extra_callbacks)
        except ValueError as error:
            raise MisconfigurationException(str(error)) from error
        _announce(job)
        fit(trainer, job)
    if not trainer.is_global_zero:
        return 0
    # read from the file: under some strategies the training happened in other processes
    stopped_by = json.loads(job.folder.history.read_text())["stopped_by"]
    if stopped_by == "interrupt":
        _say(f"Interrupted at an optimizer step; the checkpoint is {job.folder.checkpoint}.\n{_how_to_go_on(job)}")
        return 130
    try:
        finish(job.folder)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"The checkpoint is {job.folder.checkpoint}. {_how_to_go_on(job)}") from None
    if stopped_by == "time":
        _say(f"The time of --max-minutes is over. {_how_to_go_on(job)}")
    return 0


def fit(trainer: pl.Trainer, job: Job) -> None:
    """Builds model and data and trains, from the checkpoint if the run goes on.

    Args:
        trainer: From :func:`~lightning_mp.demo.assemble.assemble`.
        job: The run.

    Raises:
        MisconfigurationException: See :func:`run_job`.
        KeyboardInterrupt: See :func:`run_job`.
    """
    settings, plan = job.settings, job.plan
    limit_threads(job.accelerator, plan.model.parameters)
    model = LanguageModel(
        **asdict(plan.model),
        learning_rate=plan.learning_rate,
        total_steps=plan.optimizer_steps,
        warmup_steps=plan.warmup_steps,
    )
    data = TextData(
        job.corpus,
        batch_size=settings.batch_size,
        block_tokens=BLOCK_TOKENS,
        num_batches=plan.micro_batches,
        max_validation_batches=_MAX_VALIDATION_BATCHES,
        seed=settings.seed,
    )
    resumes = job.resumed_tokens is not None
    try:
        with interrupts_given_back():
            trainer.fit(model, data, ckpt_path=job.folder.checkpoint if resumes else None, weights_only=True)
    except MisconfigurationException:
        if not resumes and trainer.is_global_zero:
            shutil.rmtree(job.folder.path, ignore_errors=True)
        raise
    except SystemExit:
        # Lightning ends the process so after a KeyboardInterrupt: the second Ctrl-C, or one before the first batch.
        if job.folder.checkpoint.is_file():
            raise KeyboardInterrupt(f"The last checkpoint is {job.folder.checkpoint}. {_how_to_go_on(job)}") from None
        raise KeyboardInterrupt("No checkpoint had been written yet.") from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps a few known messages off the terminal that say nothing about this run."""

    def no_advertisement(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("\N{ELECTRIC LIGHT BULB} Tip:")

    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addFilter(no_advertisement)
    with warnings.catch_warnings():
        # Lightning 2.6 asks torch's pytree in a way that torch 2.11+ deprecates.
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning)
        # A resumed run writes into the folder that it read from.
        warnings.filterwarnings("ignore", r"Checkpoint directory .* exists and is not empty")
        # The demo says itself how far a stopped run got, and how to go on.
        warnings.filterwarnings("ignore", r"The run ended after .* budgeted tokens")
        try:
            yield
        finally:
            logger.removeFilter(no_advertisement)


def _announce(job: Job) -> None:
    plan, settings = job.plan, job.settings
    _say(f"Text: {job.corpus.source}, {len(job.corpus.train):,} bytes and {len(job.corpus.validation):,} held out.")
    _say(
        f"Model: {plan.model.parameters:,} parameters ({describe_shape(asdict(plan.model))}), {settings.precision} on "
        f"{settings.devices} x {job.accelerator}. Budget: {plan.budget_tokens:,} tokens in about "
        f"{plan.optimizer_steps:,} optimizer steps."
    )
    if job.resumed_tokens is not None:
        _say(f"Going on after {job.resumed_tokens:,} tokens, from {job.folder.checkpoint}.")
    hint = slowness_hint(settings, job.accelerator)
    if hint is not None:
        _say(hint)


def _how_to_go_on(job: Job) -> str:
    return f"Go on with: lightning-mp demo --resume --out {job.folder.path}"


@rank_zero_only
def _say(text: str) -> None:
    print(text, flush=True)


@rank_zero_only
def _finish_again(folder: RunFolder) -> None:
    if folder.history.is_file():
        finish(folder)
