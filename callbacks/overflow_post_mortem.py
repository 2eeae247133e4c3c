"""Which parameters overflowed."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import lightning.pytorch as pl
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.callbacks import Callback
from torch.optim import Optimizer

from lightning_mp.callbacks._common import refuse_other_trainers
from lightning_mp.outcome import StepOutcome

__all__ = ["OverflowPostMortem", "OverflowReport"]

_NAMES_IN_LOG = 5


@dataclass(frozen=True)
class OverflowReport:
    """One skipped step.

    Attributes:
        step_index: attempts before it, skipped ones included.
        loss_scale: the scale at that step.
        parameters: parameters with a non-finite gradient on this rank, last layer first.
        rank: the rank that reports.
    """

    step_index: int
    loss_scale: float
    parameters: list[str]
    rank: int

    def __str__(self) -> str:
        names = ", ".join(self.parameters[:_NAMES_IN_LOG]) or "none that this plugin knows of"
        more = len(self.parameters) - _NAMES_IN_LOG
        return (
            f"Optimizer step {self.step_index} was skipped at loss scale {self.loss_scale:g}."
            f" Non-finite gradients, last layer first: {names}{f' and {more} more' if more > 0 else ''}."
        )


class OverflowPostMortem(Callback):
    """Names the parameters whose gradients were not finite in a skipped step.

    It costs nothing until a step is skipped: the norms that our precision plugins take anyway tell which parameters
    were at fault, also with a fused optimizer. Each report goes to the log and, on rank 0, to
    ``overflow_step=<step_index>.json``.

    Args:
        dirpath: folder for the JSON files; None takes ``trainer.default_root_dir``.

    Example:
        >>> from lightning_mp import OverflowPostMortem
        >>> OverflowPostMortem().reports
        []
    """

    def __init__(self, dirpath: str | Path | None = None) -> None:
        self.dirpath = Path(dirpath) if dirpath is not None else None
        self.reports: list[OverflowReport] = []

    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        """Checks the Trainer."""
        refuse_other_trainers(self, trainer)

    def on_after_optimizer_step(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", optimizer: Optimizer, outcome: StepOutcome
    ) -> None:
        """Reports a skip."""
        if outcome.stepped:
            return
        report = OverflowReport(
            outcome.step_index, outcome.loss_scale, outcome.nonfinite_parameters(), trainer.global_rank
        )
        self.reports.append(report)
        rank_zero_warn(str(report), category=RuntimeWarning)
        if trainer.is_global_zero:
            folder = self.dirpath if self.dirpath is not None else Path(trainer.default_root_dir)
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"overflow_step={report.step_index}.json"
            path.write_text(json.dumps(asdict(report), indent=2) + "\n")
