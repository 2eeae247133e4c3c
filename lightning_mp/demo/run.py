"""The main job: Trainer and model are put together and fitted, and the results are shown."""

import json
import logging
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.util import find_spec
from textwrap import indent
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.multiprocessing.spawn import ProcessRaisedException
from typing_extensions import override

import lightning_mp as mp
from lightning_mp.checkpoints import latest_checkpoint
from lightning_mp.demo.history import InjectOverflow, RunHistory, say
from lightning_mp.demo.prepare import Job
from lightning_mp.demo.report import format_table, plot_of, summarise
from lightning_mp.demo.settings import CLIP_NORM, WARMUP_SHARE, Settings
from lightning_mp.ground.core.quiet_run import interrupts_kept, quiet_lightning
from lightning_mp.language_model import LanguageModel, TextData, generate, peak_learning_rate
from lightning_mp.monitors.comparison.compare import versions

_SAMPLE_TOKENS = 200
_ON_BAR = {
    "train/loss": ("loss", ".3f"),
    "mp/budget_fraction": ("budget", ".0%"),
    "mp/skipped_steps": ("skipped", ".0f"),
}
_CHECKPOINTS = 10
_VALIDATIONS = 12

_WARNINGS_ABOUT_NOTHING = (
    r"Checkpoint directory .* exists and is not empty",  # a resumed run writes where it read
    r"FSDP2-wrapped module .* returned a view tensor",  # of fp8 layers; the model changes none in place
    r"ChinchillaBudget: the run ended after .* budgeted tokens",  # the demo says so itself
)


def run_job(job: Job, extra_callbacks: Sequence[Callback] = ()) -> int:
    """Trains, and leaves checkpoints, logs, sample, picture and summary in the run's folder.

    Returns 0 if the run did what was asked, 130 if it was interrupted. On the second Ctrl-C, or on one before the first
    batch, KeyboardInterrupt says where the last checkpoint is.
    """
    try:
        if job.resumed_tokens >= job.settings.plan.budget_tokens:
            say(f"{job.folder} has already spent its whole budget. Start a new run without --resume.")
            if not (job.folder / "history.json").is_file():  # killed between checkpoint and history
                return 0
        else:
            torch.manual_seed(job.settings.seed)
            with quiet_lightning(logging.INFO, *_WARNINGS_ABOUT_NOTHING):
                trainer = assemble(job, extra_callbacks)
                _announce(job)
                fit(trainer, job)
        # Not on the other ranks, where this returns None.
        return rank_zero_only(_conclude)(job) or 0
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_how_to_continue(job)) from None


def assemble(job: Job, extra_callbacks: Sequence[Callback] = ()) -> pl.Trainer:
    """Builds the Trainer."""
    settings, plan, folder, on_terminal = job.settings, job.settings.plan, job.folder, sys.stdout.isatty()
    budget = mp.ChinchillaBudget(tokens_per_parameter=settings.tokens_per_parameter)
    speed, stop = mp.MFUMonitor(), mp.StopAtBoundary(signals=["SIGINT"], max_seconds=job.max_seconds)
    loggers: list[Any] = [CSVLogger(folder, name="csv")]
    if _is_installed("tensorboard", "No TensorBoard log is written"):
        loggers.append(TensorBoardLogger(folder, name="tensorboard", version=""))
    return pl.Trainer(
        plugins=_precision(job),
        strategy=_strategy(settings),
        max_epochs=-1,  # the budget ends the run
        callbacks=[
            mp.OverflowMonitor(guard=settings.precision == "32-true"),
            mp.OverflowPostMortem(dirpath=folder),
            mp.AccumulationScheduler(settings.accumulation, unit="step"),
            budget,
            # The cosine ends where the run ends: Hoffmann et al. 2022 (arXiv:2203.15556), appendix B, find that a cycle
            # more than 25% too long clearly hurts. The first step's rate is not 0, so that it does something.
            mp.TokenLearningRate(mp.WarmupCosine(warmup=WARMUP_SHARE, final=0.1, start=0.02)),
            speed,
            RunHistory(folder / "history.json", _facts(job), budget, stop, speed),
            *extra_callbacks,
            ModelCheckpoint(
                folder / "checkpoints",
                filename="step-{step}",
                auto_insert_metric_name=False,
                every_n_train_steps=-(-plan.optimizer_steps // _CHECKPOINTS),
            ),
            stop,
            InjectOverflow(settings),
            *([ProgressBar(refresh_rate=5)] if on_terminal else []),
        ],
        logger=loggers,
        log_every_n_steps=min(10, plan.micro_batches),
        enable_progress_bar=on_terminal,
        default_root_dir=folder,
        accelerator=job.accelerator,
        devices=settings.devices,
        gradient_clip_val=CLIP_NORM,
        # the whole run is one epoch, see TextData; before its first step there is nothing to validate
        val_check_interval=min(
            max(-(-plan.micro_batches // _VALIDATIONS), settings.accumulation[0]), plan.micro_batches
        ),
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        enable_model_summary=False,
    )


def _facts(job: Job) -> dict[str, Any]:
    """What goes into the files of the run, as plain values."""
    return {
        "settings": asdict(job.settings),
        "plan": asdict(job.settings.plan),
        "text": {"source": job.corpus.source, "digest": job.corpus.digest},
        "versions": versions(),
    }


class ProgressBar(TQDMProgressBar):
    """What fits beside the bar in 80 columns, under short names."""

    BAR_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"

    @override
    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        """The loss of the last step, the share of the budget that is spent, and skipped steps from the first one on."""
        shown = super().get_metrics(trainer, pl_module)
        found: dict[str, str] = {}
        for name, (short, form) in _ON_BAR.items():
            value = shown.get(name)
            if isinstance(value, int | float) and (value or name != "mp/skipped_steps"):
                found[short] = format(value, form)
        return found


def _precision(job: Job) -> list[Any]:
    settings = job.settings
    match settings.precision:
        case "32-true":
            return []
        case "tf32":
            return [mp.TF32Precision()]
        case "fp8-mixed":
            # some CPUs take seconds for a step with torch's own product
            return [mp.Float8Precision(settings.recipe, emulate=job.accelerator == "cpu", skip_small=False)]
        case "bf16-true" | "16-true" as weights:
            return [mp.MasterWeightsPrecision(weights, storage=settings.storage)]
        case mixed:
            return [mp.AutocastPrecision(mixed)]


def _strategy(settings: Settings) -> Strategy | str:
    """Checkpoints are single files, which every strategy reads on any number of devices."""
    if settings.strategy == "mp_fsdp2" or settings.tensor_parallel > 1:
        return mp.FSDP2Strategy(tensor_parallel_size=settings.tensor_parallel, save_distributed_checkpoint=False)
    if settings.strategy == "model_parallel":
        return ModelParallelStrategy(settings.devices, tensor_parallel_size=1, save_distributed_checkpoint=False)
    if settings.strategy == "mp_pipeline":
        return mp.PipelineParallelStrategy(settings.stages)
    return settings.strategy


def fit(trainer: pl.Trainer, job: Job) -> None:
    """Builds the model and trains it, from the checkpoint if the run continues.

    If Lightning or this package refuses the combination, nothing is left behind.
    """
    settings, shape = job.settings, job.settings.model
    data = TextData(job.corpus, settings.batch_size, settings.plan.micro_batches, settings.seed)
    # TokenLearningRate sets the rate
    model = LanguageModel(**asdict(shape), learning_rate=peak_learning_rate(shape.parameters), total_steps=None)
    new_folders = [folder for folder in (job.folder, *job.folder.parents) if not folder.exists()]
    try:
        with interrupts_kept():
            trainer.fit(model, data, ckpt_path=job.resumed_from, weights_only=True)
    except (MisconfigurationException, ProcessRaisedException) as error:
        # ddp_fork and ddp_spawn bring the traceback of another process as text
        _, found, refusal = str(error).rpartition("MisconfigurationException: ")
        if isinstance(error, ProcessRaisedException) and not found:
            raise
        if trainer.is_global_zero and new_folders:
            shutil.rmtree(new_folders[0], ignore_errors=True)
            with suppress(OSError):  # another run has begun there
                for folder in new_folders[1:]:
                    folder.rmdir()
        raise MisconfigurationException(refusal) from None


def _conclude(job: Job) -> int:
    """Shows the results of the run, and returns the exit code."""
    # Read from the file: under some strategies the training happened in other processes.
    history = json.loads((job.folder / "history.json").read_text())
    stopped_by = history["stopped_by"]
    if stopped_by == "interrupt":
        say(f"Interrupted at an optimizer step. {_how_to_continue(job)}")
        return 130
    _show(job, history)
    if stopped_by == "time":
        say(f"Stopped after --max-minutes. {_how_to_continue(job)}")
    return 0


def _show(job: Job, history: dict[str, Any]) -> None:
    """Writes and prints sample, picture and summary."""
    folder = job.folder
    checkpoint = latest_checkpoint(folder / "checkpoints")
    assert checkpoint is not None
    trained = LanguageModel.load_from_checkpoint(checkpoint, map_location="cpu", weights_only=True).eval()
    sample = _printable(generate(trained.model, b"def ", _SAMPLE_TOKENS))
    (folder / "sample.txt").write_text(sample + "\n", encoding="utf-8")
    say(f"\nA sample:\n{indent(sample, '    ')}\n")
    summary = summarise(history, folder)
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    if _is_installed("matplotlib", "No picture is drawn"):
        plot_of(history).write(folder / "report.png")
    say(format_table(summary, folder))


def _is_installed(package: str, otherwise: str) -> bool:
    found = find_spec(package) is not None
    if not found:
        say(f"{otherwise}: install {package} (pip install '.[plots]').")
    return found


def _printable(text: bytes) -> str:
    """The text with a dot for every byte that is no text, among them those that would command a terminal."""
    decoded = text.decode(errors="replace")
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{MIDDLE DOT}" for char in decoded)


def _announce(job: Job) -> None:
    settings, plan, on_cpu = job.settings, job.settings.plan, job.accelerator == "cpu"
    say(f"Text: {job.corpus.source}, {len(job.corpus.train):,} bytes and {len(job.corpus.validation):,} held out.")
    say(
        f"Model: {plan.parameters:,} parameters ({settings.model}), {settings.precision} on {settings.devices} x "
        f"{job.accelerator}. Budget: {plan.budget_tokens:,} tokens in about {plan.optimizer_steps:,} optimizer steps."
    )
    if job.resumed_from is not None:
        say(f"Resuming after {job.resumed_tokens:,} tokens, from {job.resumed_from}.")
    if on_cpu and settings.precision == "fp8-mixed":
        say("On a CPU, fp8 is emulated: operands are rounded to fp8 and multiplied in fp32, which is slow.")
    elif on_cpu and "16" in settings.precision:
        name = "bf16" if settings.precision.startswith("bf16") else "fp16"
        if not any(there for feature, there in torch.cpu.get_capabilities().items() if feature.endswith(name)):
            say(f"This CPU has no {name} instructions: {settings.precision} is slow here (--params 10000 is quick).")


def _how_to_continue(job: Job) -> str:
    checkpoint = latest_checkpoint(job.folder / "checkpoints")
    if checkpoint is None:
        return "No checkpoint had been written yet."
    return f"The last checkpoint is {checkpoint}. Resume with: lightning-mp demo --resume --out {job.folder}"
