"""Everything that is checked before a run starts. Nothing is written here."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_mp import __version__
from lightning_mp.demo.device import choose_accelerator, require_precision
from lightning_mp.demo.folder import RunFolder, load_checkpoint
from lightning_mp.demo.history import HISTORY_KEY
from lightning_mp.demo.plan import BLOCK_TOKENS, Plan, plan_run
from lightning_mp.demo.settings import Settings
from lightning_mp.demo.text import Corpus, load_file, load_standard_library, require_blocks

__all__ = ["Job", "Options", "describe_shape", "prepare"]


@dataclass(frozen=True)
class Options:
    """What the command line asks for.

    Attributes:
        given: The settings that were given, by name; see :class:`~lightning_mp.demo.settings.Settings`.
        out: Folder of all runs.
        resume: Go on with the newest run there.
        max_minutes: Stop after this much training; None for no limit.
        accelerator: "auto", "cpu", "cuda" or "mps".
        strategy: Any strategy that Lightning knows by name.
    """

    given: Mapping[str, Any]
    out: Path = Path("runs/demo")
    resume: bool = False
    max_minutes: float | None = None
    accelerator: str = "auto"
    strategy: str = "auto"


@dataclass(frozen=True)
class Job:
    """A run that may start.

    Attributes:
        settings: What decides its outcome.
        plan: What follows from that.
        corpus: The text.
        folder: Where its files go.
        accelerator: "cpu", "cuda" or "mps".
        strategy: Lightning's name of a strategy.
        max_seconds: Stop after this much training; None for no limit.
        resumed_tokens: Tokens trained on before the checkpoint to resume from; None for a new run.
    """

    settings: Settings
    plan: Plan
    corpus: Corpus
    folder: RunFolder
    accelerator: str
    strategy: str
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
        train_blocks=settings.batch_size * settings.devices,
        validation_blocks=settings.devices,
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
        strategy=options.strategy,
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
