"""Everything that is checked before a run starts: settings, text, device, and the checkpoint to resume from."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_mp.checkpoints import latest_checkpoint
from lightning_mp.demo.history import HISTORY_KEY
from lightning_mp.demo.settings import Settings
from lightning_mp.ground.core.devices import available_device_type
from lightning_mp.language_model import GPTConfig
from lightning_mp.language_model.text import BLOCK_TOKENS, Corpus, HeldOutBatches, TextBatches, load_text

_SMALL_MODEL_PARAMETERS = 1_000_000


@dataclass(frozen=True)
class Job:
    """A run that may start. ``resumed_tokens`` were trained on before the checkpoint ``resumed_from``."""

    settings: Settings
    corpus: Corpus
    folder: Path
    accelerator: str
    max_seconds: float | None = None
    resumed_from: Path | None = None
    resumed_tokens: int = 0


def prepare(
    given: Mapping[str, Any],
    out: Path,
    *,
    resume: bool = False,
    max_minutes: float | None = None,
    accelerator: str = "auto",
) -> Job:
    """Checks a run with the settings that were given, by name, and reads what it needs.

    A ValueError says in one sentence what is wrong, what is allowed and what to do.
    """
    if max_minutes is not None and not max_minutes > 0:
        raise ValueError(f"--max-minutes {max_minutes:g} is not allowed: give a positive number of minutes.")
    if given.get("text") is not None:
        given = {**given, "text": str(Path(given["text"]).resolve())}  # a run may be resumed from elsewhere
    accelerator = available_device_type(accelerator)
    max_seconds = None if max_minutes is None else 60 * max_minutes
    if resume:
        job = _resumed(given, out, accelerator, max_seconds)
    else:
        settings, folder = Settings(**given), _new_run(out)  # before the text, which takes long to read
        job = Job(settings, load_text(settings.text), folder, accelerator, max_seconds)
    # These refuse a text that is too short.
    shape = {"block_tokens": BLOCK_TOKENS, "world_size": job.settings.replicas}
    TextBatches(job.corpus.train, batch_size=job.settings.batch_size, **shape)
    HeldOutBatches(job.corpus.validation, batch_size=1, max_batches=1, **shape)
    use_few_threads(job.settings.model.parameters, accelerator)
    return job


def use_few_threads(parameters: int, accelerator: str) -> None:
    """One CPU thread for matrices so small that threads wait for each other longer than they compute."""
    if accelerator == "cpu" and parameters < _SMALL_MODEL_PARAMETERS:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))


def _new_run(out: Path) -> Path:
    """The next free folder ``version_N`` under ``out``; nothing is made yet."""
    there = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    if not there.is_dir():
        where = "" if there == out else f" is below {there}, which"
        raise ValueError(f"--out {out}{where} is a file: give a folder, which is created if it is missing.")
    if not _can_be_written(there):
        raise ValueError(f"--out {out} cannot be written: {there} is not writable. Give another folder.")
    return Path(CSVLogger(out, name="").log_dir)


def _can_be_written(folder: Path) -> bool:
    """Tried, since what ``os.access`` says is not so for root, and not in /proc."""
    try:
        with TemporaryDirectory(dir=folder):
            return True
    except OSError:
        return False


def _resumed(given: Mapping[str, Any], out: Path, accelerator: str, max_seconds: float | None) -> Job:
    path = latest_checkpoint(out)
    if path is None:
        raise ValueError(
            f"--resume finds no checkpoint under {out}: start a run without --resume, or name the folder of the run "
            "with --out."
        )
    try:
        # mapped: the weights stay on disk
        checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # torch raises half a dozen kinds for a damaged file
        raise ValueError(
            f"the checkpoint {path} cannot be read ({type(error).__name__}): start a new run without --resume."
        ) from error
    if HISTORY_KEY not in checkpoint:
        raise ValueError(
            f"the checkpoint {path} was not written by this demo: name the folder of a demo run with --out, or start a "
            "new run without --resume."
        )
    history = checkpoint[HISTORY_KEY]
    settings = Settings.resume(history["facts"]["settings"], given)
    shape = GPTConfig(**{name: checkpoint["hyper_parameters"][name] for name in GPTConfig.__dataclass_fields__})
    if shape != settings.model:
        raise ValueError(
            f"the checkpoint {path} holds a model of another size ({shape}) than this run's ({settings.model}): leave "
            "--params out, or start a new run without --resume."
        )
    corpus, text = load_text(settings.text), history["facts"]["text"]
    if text["digest"] != corpus.digest:
        raise ValueError(
            f"the text ({corpus.source}) is not the one that the run of {path} was trained on ({text['source']}):"
            " restore that one, or start a new run without --resume."
        )
    folder, tokens = path.parent.parent, history["steps"]["tokens"][-1]
    return Job(settings, corpus, folder, accelerator, max_seconds, resumed_from=path, resumed_tokens=tokens)
