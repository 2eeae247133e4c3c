"""Everything that is checked before a run starts: the device, the run's folder, the checkpoint to resume from."""

import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_mp import __version__
from lightning_mp.demo.data import Corpus, load_file, load_standard_library, require_blocks
from lightning_mp.demo.history import HISTORY_KEY
from lightning_mp.demo.settings import BLOCK_TOKENS, Plan, Settings, plan_run

__all__ = [
    "ACCELERATORS",
    "Job",
    "Options",
    "RunFolder",
    "choose_accelerator",
    "describe_shape",
    "limit_threads",
    "load_checkpoint",
    "prepare",
    "require_precision",
    "slowness_hint",
]

_VERSION = re.compile(r"version_(\d+)")


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run: ``OUT/version_N``, as Lightning's loggers name theirs.

    Attributes:
        path: The folder.
    """

    path: Path

    @classmethod
    def new(cls, out: Path) -> "RunFolder":
        """The next free folder under ``out``; nothing is made yet.

        Raises:
            ValueError: If ``out`` is a file.
        """
        if out.exists() and not out.is_dir():
            raise ValueError(f"--out {out} is a file: give a folder, which is made if it is missing.")
        return cls(out / f"version_{max(_versions(out), default=-1) + 1}")

    @classmethod
    def latest(cls, out: Path) -> "RunFolder":
        """The newest run under ``out`` that has a checkpoint, or ``out`` itself if it is a run's folder.

        Raises:
            ValueError: If there is none.
        """
        itself = cls(out)
        if itself.checkpoint.is_file():
            return itself
        for version in sorted(_versions(out), reverse=True):
            folder = cls(out / f"version_{version}")
            if folder.checkpoint.is_file():
                return folder
        raise ValueError(
            f"--resume finds no checkpoint under {out}: start a run without --resume, or name the folder of the run "
            "with --out."
        )

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def checkpoint(self) -> Path:
        """The last checkpoint."""
        return self.checkpoints / "last.ckpt"

    @property
    def history(self) -> Path:
        """What happened, as JSON."""
        return self.path / "history.json"

    @property
    def summary(self) -> Path:
        """The final table, as JSON."""
        return self.path / "summary.json"

    @property
    def report(self) -> Path:
        """The picture."""
        return self.path / "report.png"

    @property
    def sample(self) -> Path:
        """Text written by the trained model."""
        return self.path / "sample.txt"


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Reads a checkpoint of the demo; its tensors stay on disk until they are used.

    Raises:
        ValueError: If it cannot be read or was not written by the demo.
    """
    try:
        checkpoint = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # torch raises half a dozen kinds for a damaged file
        raise ValueError(
            f"the checkpoint {path} cannot be read ({type(error).__name__}): start a new run without --resume."
        ) from error
    if not isinstance(checkpoint, dict) or HISTORY_KEY not in checkpoint.get("callbacks", {}):
        raise ValueError(
            f"the checkpoint {path} was not written by this demo: name the folder of a demo run with --out, or start a "
            "new run without --resume."
        )
    return checkpoint


def _versions(out: Path) -> list[int]:
    if not out.is_dir():
        return []
    return [int(match[1]) for entry in out.iterdir() if (match := _VERSION.fullmatch(entry.name))]


ACCELERATORS = ("auto", "cpu", "cuda", "mps")

_SMALL_MODEL_PARAMETERS = 1_000_000


def choose_accelerator(wish: str) -> str:
    """``"cuda"`` if there is one, else ``"cpu"``; or what is wished for.

    Raises:
        ValueError: If it is unknown or not there.
    """
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if wish == "auto":
        return "cuda" if available["cuda"] else "cpu"
    if wish not in available:
        raise ValueError(f"--accelerator {wish} is unknown: choose {', '.join(ACCELERATORS[:-1])} or mps.")
    if not available[wish]:
        usable = " or ".join(name for name, there in available.items() if there)
        raise ValueError(f"--accelerator {wish} is not available on this machine: choose {usable}.")
    return wish


def require_precision(precision: str, accelerator: str) -> None:
    """Refuses a 16-bit precision on a device for which torch has no autocast to it.

    Raises:
        ValueError: Names the precisions that work there.
    """
    if precision not in ("bf16-mixed", "16-mixed") or _has_autocast(accelerator, precision):
        return  # what the plugins of the others need, they say themselves
    works = [name for name in ("bf16-mixed", "16-mixed") if _has_autocast(accelerator, name)]
    raise ValueError(
        f"--precision {precision} does not work on {accelerator}, for which torch has no such autocast: "
        f"choose {' or '.join(['32-true', *works])}."
    )


def _has_autocast(accelerator: str, precision: str) -> bool:
    if not torch.amp.is_autocast_available(accelerator):
        return False
    if precision == "bf16-mixed":
        # MPS computes in bf16 from macOS 14 on; before that torch raises only once training runs.
        return accelerator != "mps" or torch.backends.mps.is_macos_or_newer(14, 0)
    return True


def limit_threads(accelerator: str, parameters: int) -> None:
    """One CPU thread for a small model, unless OMP_NUM_THREADS says otherwise.

    Its matrices are so small that threads wait for each other longer than they compute, by far so on a busy machine.
    """
    if accelerator == "cpu" and parameters < _SMALL_MODEL_PARAMETERS and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def slowness_hint(settings: Settings, accelerator: str) -> str | None:
    """A line to print where a precision is only emulated, or None."""
    if accelerator != "cpu" or not hasattr(torch.cpu, "get_capabilities"):
        return None
    if settings.precision == "fp8":
        return "On a CPU fp8 is emulated: operands are rounded to fp8 and multiplied in fp32, which is slow."
    if settings.precision not in ("bf16-mixed", "bf16-true", "16-mixed", "16-true"):
        return None
    name = "bf16" if settings.precision.startswith("bf16") else "fp16"
    found = torch.cpu.get_capabilities()
    if any(found.get(instructions) for instructions in (f"avx512_{name}", f"amx_{name}", name)):
        return None
    return (
        f"This CPU has no {name} instructions: {settings.precision} computes the right numbers here, but slowly "
        "(several minutes; --params 10000 is quick)."
    )


@dataclass(frozen=True)
class Options:
    """What the command line asks for.

    Attributes:
        given: The settings that were given, by name; see :class:`~lightning_mp.demo.settings.Settings`.
        out: Folder of all runs.
        resume: Go on with the newest run there.
        max_minutes: Stop after this much training; None for no limit.
        accelerator: "auto", "cpu", "cuda" or "mps".
    """

    given: Mapping[str, Any]
    out: Path = Path("runs/demo")
    resume: bool = False
    max_minutes: float | None = None
    accelerator: str = "auto"


@dataclass(frozen=True)
class Job:
    """A run that may start.

    Attributes:
        settings: What decides its outcome.
        plan: What follows from that.
        corpus: The text.
        folder: Where its files go.
        accelerator: "cpu", "cuda" or "mps".
        max_seconds: Stop after this much training; None for no limit.
        resumed_tokens: Tokens trained on before the checkpoint to resume from; None for a new run.
    """

    settings: Settings
    plan: Plan
    corpus: Corpus
    folder: RunFolder
    accelerator: str
    max_seconds: float | None
    resumed_tokens: int | None

    @property
    def facts(self) -> dict[str, Any]:
        """What goes into the files of the run, as plain values."""
        plan = {key: value for key, value in asdict(self.plan).items() if key != "accumulation"}
        plan["parameters"] = self.plan.model.parameters
        versions = {"lightning_mp": __version__, "lightning": pl.__version__, "torch": str(torch.__version__)}
        text = {"source": self.corpus.source, "digest": self.corpus.digest}
        return {"settings": self.settings.as_dict(), "plan": plan, "text": text, "versions": versions}


def prepare(options: Options) -> Job:
    """Checks the options, the text, and the checkpoint to resume from.

    Raises:
        ValueError: If something is not allowed; one sentence says what, what is allowed and what to do.
    """
    if options.max_minutes is not None and not options.max_minutes > 0:
        raise ValueError(f"--max-minutes {options.max_minutes:g} is not allowed: give a positive number of minutes.")
    checkpoint: dict[str, Any] | None = None
    if options.resume:
        folder = RunFolder.latest(options.out)
        checkpoint = load_checkpoint(folder.checkpoint)
    else:
        folder = RunFolder.new(options.out)
    saved = checkpoint["callbacks"][HISTORY_KEY] if checkpoint is not None else None
    settings = Settings.resolve(options.given, saved["facts"]["settings"] if saved is not None else None)
    plan = plan_run(settings)
    accelerator = choose_accelerator(options.accelerator)
    require_precision(settings.precision, accelerator)
    corpus = load_standard_library() if settings.text is None else load_file(Path(settings.text))
    require_blocks(
        corpus,
        block_tokens=BLOCK_TOKENS,
        train_blocks=settings.sequences,
        validation_blocks=settings.replicas,
    )
    if checkpoint is not None and saved is not None:
        _require_same_model(checkpoint, plan, folder)
        if saved["facts"]["text"]["digest"] != corpus.digest:
            raise ValueError(
                f"the text ({corpus.source}) is not the one that the run in {folder.path} began with "
                f"({saved['facts']['text']['source']}): bring that back, or start a new run without --resume."
            )
    resumed_tokens = saved["tokens"][-1] if saved is not None and saved["tokens"] else None
    return Job(
        settings=settings,
        plan=plan,
        corpus=corpus,
        folder=folder,
        accelerator=accelerator,
        max_seconds=None if options.max_minutes is None else 60 * options.max_minutes,
        resumed_tokens=resumed_tokens,
    )


def _require_same_model(checkpoint: Mapping[str, Any], plan: Plan, folder: RunFolder) -> None:
    shape = asdict(plan.model)
    saved = {name: checkpoint.get("hyper_parameters", {}).get(name) for name in shape}
    if saved != shape:
        raise ValueError(
            f"the checkpoint {folder.checkpoint} holds a model of another size ({describe_shape(saved)}) than this "
            f"run's ({describe_shape(shape)}): leave --params out, or start a new run without --resume."
        )


def describe_shape(config: Mapping[str, Any]) -> str:
    """A model's shape in words, from a mapping with ``layers``, ``heads`` and ``width``."""
    plural = {name: "" if config[name] == 1 else "s" for name in ("layers", "heads")}
    return (
        f"{config['layers']} layer{plural['layers']}, {config['heads']} head{plural['heads']}, width {config['width']}"
    )
