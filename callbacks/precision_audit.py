"""The dtype that every module and operation actually used."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from typing_extensions import override

from lightning_mp.ground.core.arguments import whole_number
from lightning_mp.ground.core.foreign_trainers import refuse_other_trainers
from lightning_mp.ground.core.patches import Patches
from lightning_mp.ground.core.ranks import all_gathered
from lightning_mp.ground.core.settings_repr import SettingsRepr
from lightning_mp.ground.core.trainer_ranks import is_pipelined
from lightning_mp.ground.modules.names import named_modules
from lightning_mp.ground.modules.stage_placeholder import full_model
from lightning_mp.monitors.diagnostics.audit.findings import AuditFinding, find_problems
from lightning_mp.monitors.diagnostics.audit.records import AuditReport
from lightning_mp.monitors.diagnostics.audit.requested import RequestedPrecision
from lightning_mp.monitors.diagnostics.audit.table import audit_table, join_stages
from lightning_mp.monitors.diagnostics.audit.watch import PrecisionWatch
from lightning_mp.training.optimizer_step.gradient_observers import makes_true_gradients
from lightning_mp.training.policy.policy import PrecisionPolicy

_MOST_IN_LOG = 12


@dataclass
class _Fit:
    """A fit of which a batch is still to be audited."""

    num_batches: int = 0
    watch: PrecisionWatch | None = None


class PrecisionAudit(SettingsRepr, Callback):
    """Reports the dtype in which every module and operation of one training batch actually ran.

    ::

        trainer = pl.Trainer(precision="bf16-mixed", callbacks=[PrecisionAudit()])

    After the backward of that batch the hooks are removed, so the rest of the run costs nothing, and rank 0 logs a
    table: for each module the dtypes of weights, inputs, operations, outputs and gradients, and the autocast it ran
    under. Problems (:data:`~lightning_mp.monitors.diagnostics.audit.findings.FindingKind`) follow in one
    ``UserWarning`` that names the modules and says what to do.

    The results of the run are bit-identical with and without it. It works with any precision plugin. With manual
    optimization the whole training step is watched, except its optimizer steps. A batch without a backward (a
    ``training_step`` that returned None) is ignored. In a pipeline all stages are watched, and the table lists the
    modules of all of them, including the run that infers shapes. What it can see of compiled code is described in
    :class:`~lightning_mp.monitors.diagnostics.audit.watch.PrecisionWatch`, which also works without a Trainer.

    Args:
        batch: index of the training batch to audit, from 0.

    Attributes:
        records: what was seen, with ``to_dict()`` and ``to_json()``; None before the batch.
        findings: the problems found; empty before the batch, and if there are none.

    Raises:
        ValueError: if ``batch`` is negative.

    Example:
        >>> from lightning_mp import PrecisionAudit
        >>> PrecisionAudit(batch=10).findings
        ()
    """

    def __init__(self, batch: int = 0) -> None:
        self.batch = whole_number(
            batch, "batch", "PrecisionAudit", minimum=0, hint="Training batches are counted from 0."
        )
        self.records: AuditReport | None = None
        self.findings: tuple[AuditFinding, ...] = ()
        self._fit: _Fit | None = None

    @override
    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        """Checks the Trainer."""
        refuse_other_trainers(self, trainer)

    @override
    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Begins to count batches, on rank 0 only where the other ranks run the same."""
        self.records, self.findings = None, ()
        self._fit = _Fit() if trainer.is_global_zero or is_pipelined(trainer) else None
        Patches.of(trainer).at_end(self._drop)

    @override
    def on_train_batch_start(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", batch: object, batch_idx: int
    ) -> None:
        """Begins to watch, if this is the batch."""
        if self._fit is not None:
            if self._fit.num_batches >= self.batch:
                self._fit.watch = PrecisionWatch(pl_module).__enter__()
            self._fit.num_batches += 1

    @override
    def on_after_backward(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Ends, with automatic optimization."""
        if pl_module.automatic_optimization:
            self._end(trainer, pl_module)

    @override
    def on_train_batch_end(
        self,
        trainer: "pl.Trainer",
        pl_module: "pl.LightningModule",
        outputs: Tensor | Mapping[str, Any] | None,
        batch: object,
        batch_idx: int,
    ) -> None:
        """Ends, with manual optimization or without a backward."""
        self._end(trainer, pl_module)

    @override
    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Warns if there was nothing to audit."""
        if self._fit is not None:
            rank_zero_warn(
                f"PrecisionAudit(batch={self.batch}) has seen nothing: the fit had {self._fit.num_batches} batches,"
                f" and no backward from batch {self.batch} on. Use a smaller number.",
                category=UserWarning,
            )

    def _drop(self) -> None:
        fit, self._fit = self._fit, None
        if fit is not None and fit.watch is not None:
            fit.watch.stop()

    def _end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        fit = self._fit
        if fit is None or fit.watch is None:
            return
        watch, fit.watch = fit.watch, None
        watch.stop()
        report, saw_backward = watch.report, watch.saw_backward
        assert report is not None
        if is_pipelined(trainer):
            report, saw_backward = _of_all_stages(report, saw_backward, pl_module)
        if not saw_backward:
            return
        self._fit = None
        self.records = report
        self.findings = find_problems(report, _asked_of(trainer, pl_module))
        rank_zero_info(f"{audit_table(report)}" + ("" if self.findings else "\nNo problem found."))
        if self.findings:
            rank_zero_warn(_summary(self.findings), category=UserWarning)


def _of_all_stages(
    report: AuditReport, saw_backward: bool, pl_module: "pl.LightningModule"
) -> tuple[AuditReport, bool]:
    """The records of all stages; a stage without anything to train takes part even if it has seen no backward."""
    gathered = all_gathered((report, saw_backward))
    with full_model(pl_module):
        names = [name for name, _ in named_modules(pl_module)]
    return join_stages([stage for stage, _ in gathered], names), any(seen for _, seen in gathered)


def _asked_of(trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> RequestedPrecision:
    """The precision of a plugin, with its policy and its fp8 layers, read from public attributes."""
    plugin = trainer.precision_plugin
    policy = getattr(plugin, "policy", None)
    layers = getattr(plugin, "layers", []) if makes_true_gradients(plugin) else []  # Float8Precision has some
    return RequestedPrecision(
        str(plugin.precision),
        policy.resolve(pl_module) if isinstance(policy, PrecisionPolicy) else None,
        tuple(layer.name for layer in layers if layer.skipped_because is None),
    )


def _summary(findings: tuple[AuditFinding, ...]) -> str:
    lines = [f"  {number}. {finding}" for number, finding in enumerate(findings[:_MOST_IN_LOG], start=1)]
    if len(findings) > _MOST_IN_LOG:
        lines.append(f"  and {len(findings) - _MOST_IN_LOG} more, in PrecisionAudit.findings")
    return "\n".join(["PrecisionAudit found:", *lines])
