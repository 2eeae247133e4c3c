"""Checks the set-up of a fit before its first step."""

from typing import Any, Literal, get_args

import lightning.pytorch as pl
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from lightning_mp.ground.core.foreign_trainers import refuse_other_trainers
from lightning_mp.ground.core.known_words import refuse_unknown
from lightning_mp.ground.core.run_state import RunState
from lightning_mp.ground.core.settings_repr import SettingsRepr
from lightning_mp.monitors.preflight_checks.report import PreflightReport, Severity

RaiseOn = Literal["error", "warning", "advice", "never"]


class Preflight(SettingsRepr, Callback):
    """Checks the set-up of the run with its first batch, and ends the run if something is wrong.

    ::

        trainer = pl.Trainer(callbacks=[Preflight()], plugins=[AutocastPrecision("16-mixed")])

    It runs :func:`~lightning_mp.preflight` once per fit; every rank ends with the same error, from the report of rank
    0. The results of the run are unchanged, and callbacks that watch the first micro-batch do not see its trial step:
    it puts itself first among the callbacks. By then a strategy may have changed the module, which hides part of it
    (``report.not_checked``); called before the fit, ``preflight(trainer, module, data)`` sees more.

    Args:
        raise_on: end the run if a finding is at least this severe. Other errors and warnings are logged as warnings,
            advice is logged.

    Attributes:
        report: what was found; None before the first batch.

    Raises:
        ValueError: if ``raise_on`` is unknown.
        MisconfigurationException: before the first step, with the report.

    Example:
        >>> from lightning_mp import Preflight
        >>> Preflight(raise_on="never").report is None
        True
    """

    def __init__(self, raise_on: RaiseOn = "error") -> None:
        refuse_unknown(raise_on, "raise_on", "Preflight", get_args(RaiseOn))
        self.raise_on: RaiseOn = raise_on
        self.report: PreflightReport | None = None
        self._is_due = False

    @override
    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        """Checks the Trainer, and moves to the front of its callbacks."""
        refuse_other_trainers(self, trainer)
        RunState.of(trainer).place_callback(self)

    @override
    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """The next batch is the first one."""
        self.report, self._is_due = None, True

    @override
    def on_train_batch_start(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", batch: Any, batch_idx: int
    ) -> None:
        """Checks with the first batch; ends the run, warns, or logs that nothing was found."""
        if not self._is_due:
            return
        self._is_due = False
        # On every rank: what the module's own code says to other ranks must find them there.
        self.report = report = trainer.strategy.broadcast(_report(trainer, pl_module, batch))
        if self.raise_on != "never" and report.at_least(self.raise_on):
            raise MisconfigurationException(f"{report}\n{self!r} ends the run; raise_on='never' only reports.")
        graver: Severity = "warning"
        (rank_zero_warn if report.at_least(graver) else rank_zero_info)(str(report))


def _report(trainer: "pl.Trainer", pl_module: "pl.LightningModule", batch: Any) -> PreflightReport:
    # Importing the package should not cost what may never be used.
    from lightning_mp.monitors.preflight_checks.data_facts import FoundData
    from lightning_mp.monitors.preflight_checks.preflight import TrainerInspection

    batches = trainer.num_training_batches
    number = None if batches == float("inf") else int(batches)
    datamodule = vars(trainer).get("datamodule")
    data = FoundData(batch, trainer.train_dataloader, number, datamodule, is_limited=True)
    return TrainerInspection(trainer, pl_module).report(lambda: data, trainer.ckpt_path)
