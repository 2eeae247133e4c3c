"""Everything that is checked before a run starts: settings, text, device, and the checkpoint to resume from."""

import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_mp import __version__
from lightning_mp.checkpoints import latest_checkpoint
from lightning_mp.demo.data import Corpus, HeldOutBatches, TextBatches, load_file, load_standard_library
from lightning_mp.demo.history import HISTORY_KEY
from lightning_mp.demo.settings import BLOCK_TOKENS, Settings

__all__ = [
    "ACCELERATORS",
    "Job",
    "describe_shape",
    "latest_run",
    "load_checkpoint",
    "new_run",
    "prepare",
    "use_few_threads",
]

ACCELERATORS = ("auto", "cpu", "cuda", "mps")

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

    @property
    def facts(self) -> dict[str, Any]:
        """What goes into the files of the run, as plain values."""
        settings = self.settings
        plan = {
            "parameters": settings.model.parameters,
            "budget_tokens": settings.budget_tokens,
            "micro_batch_tokens": settings.micro_batch_tokens,
            "optimizer_steps": settings.optimizer_steps,
        }
        versions = {"lightning_mp": __version__, "lightning": pl.__version__, "torch": str(torch.__version__)}
        text = {"source": self.corpus.source, "digest": self.corpus.digest}
        return {"settings": asdict(settings), "plan": plan, "text": text, "versions": versions}


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
    path = latest_run(out) if resume else None
    checkpoint = load_checkpoint(path) if path is not None else {}
    saved = checkpoint["callbacks"][HISTORY_KEY] if checkpoint else None
    settings = Settings(**given) if saved is None else Settings.resume(saved["facts"]["settings"], given)
    saved_shape, shape = checkpoint.get("hyper_parameters"), asdict(settings.model)
    if saved_shape is not None and any(saved_shape.get(name) != value for name, value in shape.items()):
        raise ValueError(
            f"the checkpoint {path} holds a model of another size ({describe_shape(saved_shape)}) than this run's "
            f"({describe_shape(shape)}): leave --params out, or start a new run without --resume."
        )
    corpus = load_standard_library() if settings.text is None else load_file(Path(settings.text))
    # These refuse a text that is too short.
    shape = {"block_tokens": BLOCK_TOKENS, "world_size": settings.replicas}
    TextBatches(corpus.train, batch_size=settings.batch_size, **shape)
    HeldOutBatches(corpus.validation, batch_size=1, max_batches=1, **shape)
    if saved is not None and saved["facts"]["text"]["digest"] != corpus.digest:
        raise ValueError(
            f"the text ({corpus.source}) is not the one that the run of {path} began with "
            f"({saved['facts']['text']['source']}): bring that back, or start a new run without --resume."
        )
    accelerator = _available(accelerator)
    use_few_threads(settings.model.parameters, accelerator)
    return Job(
        settings=settings,
        corpus=corpus,
        folder=path.parent.parent if path is not None else new_run(out),
        accelerator=accelerator,
        max_seconds=None if max_minutes is None else 60 * max_minutes,
        resumed_from=path,
        resumed_tokens=saved["steps"]["tokens"][-1] if saved is not None else 0,
    )


def use_few_threads(parameters: int, accelerator: str) -> None:
    """One CPU thread for matrices so small that threads wait for each other longer than they compute."""
    if accelerator == "cpu" and parameters < _SMALL_MODEL_PARAMETERS:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))


def new_run(out: Path) -> Path:
    """The next free folder ``version_N`` under ``out``; nothing is made yet."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file: give a folder, which is made if it is missing.")
    return out / f"version_{max(_versions(out), default=-1) + 1}"


def latest_run(out: Path) -> Path:
    """The last checkpoint of the run in ``out``, or of the newest run under it that has one."""
    for folder in (out, *(out / f"version_{number}" for number in sorted(_versions(out), reverse=True))):
        checkpoint = latest_checkpoint(folder / "checkpoints")
        if checkpoint is not None:
            return checkpoint
    raise ValueError(
        f"--resume finds no checkpoint under {out}: start a run without --resume, or name the folder of the run with "
        "--out."
    )


def _versions(out: Path) -> list[int]:
    return [int(match[1]) for entry in out.glob("version_*") if (match := re.fullmatch(r"version_(\d+)", entry.name))]


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Reads a checkpoint of the demo; its tensors stay on disk until they are used."""
    try:
        checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # torch raises half a dozen kinds for a damaged file
        raise ValueError(
            f"the checkpoint {path} cannot be read ({type(error).__name__}): start a new run without --resume."
        ) from error
    if HISTORY_KEY not in checkpoint.get("callbacks", {}):
        raise ValueError(
            f"the checkpoint {path} was not written by this demo: name the folder of a demo run with --out, or start a "
            "new run without --resume."
        )
    return checkpoint


def describe_shape(shape: Mapping[str, Any]) -> str:
    """The shape of a model in words."""
    return f"layers: {shape['layers']}, heads: {shape['heads']}, width: {shape['width']}"


def _available(accelerator: str) -> str:
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if accelerator == "auto":
        return "cuda" if available["cuda"] else "cpu"
    if not available[accelerator]:
        usable = " or ".join(name for name, there in available.items() if there)
        raise ValueError(f"--accelerator {accelerator} is not available on this machine: choose {usable}.")
    return accelerator
