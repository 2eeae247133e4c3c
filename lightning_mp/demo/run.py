"""The main job: Trainer and model are put together, fitted, and the results shown."""

import json
import logging
import re
import shutil
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from textwrap import indent
from typing import Literal, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.multiprocessing.spawn import ProcessRaisedException

from lightning_mp import (
    AccumulationScheduler,
    AutocastPrecision,
    ChinchillaBudget,
    Float8Precision,
    FSDP2Strategy,
    MasterWeightsPrecision,
    MFUMonitor,
    OverflowMonitor,
    OverflowPostMortem,
    PipelineParallelStrategy,
    StopAtBoundary,
    TF32Precision,
    TokenLearningRate,
    WarmupCosine,
)
from lightning_mp.core.messages import lightning_logger
from lightning_mp.demo.data import TextData
from lightning_mp.demo.history import (
    DemoProgressBar,
    FinalCheckpoint,
    InjectOverflow,
    RunHistory,
    interrupts_given_back,
    say,
)
from lightning_mp.demo.model import GPT, GPTConfig, generate
from lightning_mp.demo.module import LanguageModel
from lightning_mp.demo.prepare import Job, RunFolder, describe_shape, limit_threads, load_checkpoint, slowness_hint
from lightning_mp.demo.report import Summary, draw_report, format_table
from lightning_mp.demo.settings import BLOCK_TOKENS, RECIPES, Settings

__all__ = ["assemble", "finish", "fit", "printable", "run_job"]

_LOG_EVERY_STEPS = 10
_MAX_VALIDATION_BATCHES = 32
_PROMPT = b"def "
_SAMPLE_TOKENS = 200

_WARMUP_SHARE = 0.05
_CLIP_NORM = 1.0  # Brown et al. 2020 (arXiv:2005.14165), appendix B

_Float8Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]


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
        say(f"{job.folder.path} has spent its whole budget already. Start a new run without --resume.")
        if job.folder.history.is_file():
            rank_zero_only(finish)(job.folder)
        return 0
    torch.manual_seed(job.settings.seed)
    with _quiet():
        try:
            trainer = assemble(job, extra_callbacks)
        except (ValueError, ModuleNotFoundError) as error:
            raise MisconfigurationException(str(error)) from error
        _announce(job)
        fit(trainer, job)
    if not trainer.is_global_zero:
        return 0
    # read from the file: under some strategies the training happened in other processes
    stopped_by = json.loads(job.folder.history.read_text())["stopped_by"]
    if stopped_by == "interrupt":
        say(f"Interrupted at an optimizer step; the checkpoint is {job.folder.checkpoint}.\n{_how_to_go_on(job)}")
        return 130
    try:
        finish(job.folder)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"The checkpoint is {job.folder.checkpoint}. {_how_to_go_on(job)}") from None
    if stopped_by == "time":
        say(f"The time of --max-minutes is over. {_how_to_go_on(job)}")
    return 0


def fit(trainer: pl.Trainer, job: Job) -> None:
    """Builds model and data and trains, from the checkpoint if the run goes on.

    Args:
        trainer: From :func:`~lightning_mp.demo.run.assemble`.
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
        total_steps=None,  # TokenLearningRate sets it
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
    new_folders = [folder for folder in (job.folder.path, *job.folder.path.parents) if not folder.exists()]
    try:
        with interrupts_given_back():
            trainer.fit(model, data, ckpt_path=job.folder.checkpoint if resumes else None, weights_only=True)
    except (MisconfigurationException, ProcessRaisedException) as error:
        # ddp_fork and ddp_spawn bring the traceback of another process as text
        refusal = re.search(r"MisconfigurationException: (.*)", str(error), re.DOTALL)
        if isinstance(error, ProcessRaisedException) and refusal is None:
            raise
        if not resumes and trainer.is_global_zero:
            _remove(new_folders)
        raise (MisconfigurationException(refusal[1]) if refusal is not None else error) from None
    except SystemExit:
        # Lightning ends the process so after a KeyboardInterrupt: the second Ctrl-C, or one before the first batch.
        if job.folder.checkpoint.is_file():
            raise KeyboardInterrupt(f"The last checkpoint is {job.folder.checkpoint}. {_how_to_go_on(job)}") from None
        raise KeyboardInterrupt("No checkpoint had been written yet.") from None


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
    on_terminal = sys.stdout.isatty()
    return pl.Trainer(
        plugins=[_precision(job)] if settings.precision != "32-true" else None,
        accelerator=job.accelerator,
        devices=settings.devices,
        strategy=_strategy(settings),
        max_epochs=-1,
        gradient_clip_val=_CLIP_NORM,
        callbacks=[*_callbacks(job, extra_callbacks), *([DemoProgressBar(refresh_rate=5)] if on_terminal else [])],
        logger=_loggers(folder),
        # the whole run is one epoch, see TextData
        val_check_interval=plan.validate_every_micro_batches,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        log_every_n_steps=min(_LOG_EVERY_STEPS, plan.micro_batches),
        enable_model_summary=False,
        enable_progress_bar=on_terminal,
        default_root_dir=folder.path,
    )


def _callbacks(job: Job, extra_callbacks: Sequence[Callback]) -> list[Callback]:
    settings, plan, folder = job.settings, job.plan, job.folder
    # The last checkpoint goes to the same file as the others.
    budget = ChinchillaBudget(tokens_per_parameter=settings.tokens_per_parameter, save=False)
    throughput = MFUMonitor()
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
        # The cosine ends where the run ends: Hoffmann et al. 2022 (arXiv:2203.15556), appendix B, find that a cycle
        # more than 25% too long clearly hurts. The first step's rate is not 0, so that it does something.
        TokenLearningRate(WarmupCosine(warmup=_WARMUP_SHARE, final=0.1, start=0.02)),
        throughput,
        RunHistory(folder.history, job.facts, budget, throughput, stop, plan.micro_batch_tokens),
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
    return callbacks


def _precision(job: Job) -> Precision:
    settings = job.settings
    match settings.precision:
        case "tf32":
            return TF32Precision()
        case "fp8":
            # some CPUs take seconds for a step with torch's own product
            recipe = cast(_Float8Recipe, settings.recipe or RECIPES[0])
            return Float8Precision(recipe, emulate=job.accelerator == "cpu")
        case "bf16-true" | "16-true" as weights:
            return MasterWeightsPrecision(weights, storage=cast(Literal["fp32", "remainder"], settings.storage))
        case mixed:
            return AutocastPrecision(cast(Literal["16-mixed", "bf16-mixed"], mixed))


def _strategy(settings: Settings) -> Strategy | str:
    """With checkpoints in a single file, which every strategy reads on any number of devices."""
    if settings.strategy == "mp_fsdp2" or settings.tensor_parallel > 1:
        return FSDP2Strategy(tensor_parallel_size=settings.tensor_parallel, save_distributed_checkpoint=False)
    if settings.strategy == "model_parallel":
        return ModelParallelStrategy(
            data_parallel_size=settings.devices, tensor_parallel_size=1, save_distributed_checkpoint=False
        )
    if settings.strategy == "mp_pipeline":
        return PipelineParallelStrategy(settings.stages)
    return settings.strategy


def _loggers(folder: RunFolder) -> list[Logger]:
    loggers: list[Logger] = [CSVLogger(folder.path, name="csv")]
    if find_spec("tensorboard") is not None:
        loggers.append(TensorBoardLogger(folder.path, name="tensorboard", version=""))
    else:
        rank_zero_info("No TensorBoard log is written: install tensorboard (pip install 'lightning-mp[plots]').")
    return loggers


def finish(folder: RunFolder) -> None:
    """Reads what the run left and adds sample, picture and summary; prints the latter.

    It works from the files only, since under some strategies the training happened in other processes.
    """
    history = json.loads(folder.history.read_text())
    sample = printable(generate(_trained_model(folder), _PROMPT, _SAMPLE_TOKENS))
    folder.sample.write_text(sample + "\n", encoding="utf-8")
    summary = Summary.of(history, folder.path)
    folder.summary.write_text(json.dumps(summary.as_dict(), indent=1) + "\n")
    print(f"\nA sample:\n{indent(sample, '    ')}\n")
    if find_spec("matplotlib") is not None:
        draw_report(history, folder.report)
    else:
        print("No picture is drawn: install matplotlib (pip install 'lightning-mp[plots]').")
    print(format_table(summary, folder))


def _trained_model(folder: RunFolder) -> GPT:
    checkpoint = load_checkpoint(folder.checkpoint)
    shape = {name: checkpoint["hyper_parameters"][name] for name in GPTConfig.__dataclass_fields__}
    model = GPT(GPTConfig(**shape))
    model.load_state_dict({name.removeprefix("model."): value for name, value in checkpoint["state_dict"].items()})
    return model.eval()


def printable(text: bytes) -> str:
    """The text with a dot for every byte that is no text, among them those that would command a terminal."""
    decoded = text.decode(errors="replace")
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{MIDDLE DOT}" for char in decoded)


def _remove(folders: Sequence[Path]) -> None:
    """Of nested folders, the innermost first: that one with its content, and around it those that are empty then."""
    for folder in folders[:1]:
        shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        for folder in folders[1:]:
            folder.rmdir()


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps a few known messages off the terminal that say nothing about this run."""

    def no_advertisement(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("\N{ELECTRIC LIGHT BULB} Tip:")

    logger = lightning_logger()
    logger.addFilter(no_advertisement)
    with warnings.catch_warnings():
        # Lightning 2.6 asks torch's pytree in a way that torch 2.11+ deprecates.
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning)
        # A resumed run writes into the folder that it read from.
        warnings.filterwarnings("ignore", r"Checkpoint directory .* exists and is not empty")
        # fp8 layers return views, and the model changes none of them in place.
        warnings.filterwarnings("ignore", r"FSDP2-wrapped module .* returned a view tensor")
        # The demo says itself how far a stopped run got, and how to go on.
        warnings.filterwarnings("ignore", r"The run ended after .* budgeted tokens")
        try:
            yield
        finally:
            logger.removeFilter(no_advertisement)


def _announce(job: Job) -> None:
    plan, settings = job.plan, job.settings
    say(f"Text: {job.corpus.source}, {len(job.corpus.train):,} bytes and {len(job.corpus.validation):,} held out.")
    say(
        f"Model: {plan.model.parameters:,} parameters ({describe_shape(asdict(plan.model))}), {settings.precision} on "
        f"{settings.devices} x {job.accelerator}. Budget: {plan.budget_tokens:,} tokens in about "
        f"{plan.optimizer_steps:,} optimizer steps."
    )
    if job.resumed_tokens is not None:
        say(f"Going on after {job.resumed_tokens:,} tokens, from {job.folder.checkpoint}.")
    hint = slowness_hint(settings, job.accelerator)
    if hint is not None:
        say(hint)


def _how_to_go_on(job: Job) -> str:
    return f"Go on with: lightning-mp demo --resume --out {job.folder.path}"
