"""What all monitors say about a run."""

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins import Precision
from planted_causes import Monitor
from small_models import loader, quiet_trainer

from lightning_mp import OverflowMonitor, OverflowPostMortem
from lightning_mp.callbacks.precision_audit import PrecisionAudit
from lightning_mp.callbacks.underflow_monitor import UnderflowMonitor
from lightning_mp.diagnostics.overflow.report import OverflowReport

_ANYWHERE = ("diverged",)


def diagnose(
    module: pl.LightningModule, batches: list[Any], plugin: Precision, folder: Path
) -> dict[Monitor, list[tuple[str, ...]]]:
    """Trains with every monitor; what each of them found, in order, without repetitions."""
    monitor, underflow, audit = OverflowMonitor(stop_after_skips=5), UnderflowMonitor(every_n_steps=1), PrecisionAudit()
    post_mortem = OverflowPostMortem(replay=module.automatic_optimization, dirpath=folder)
    trainer = quiet_trainer(
        plugins=[plugin],
        callbacks=[monitor, underflow, audit, post_mortem],
        default_root_dir=folder,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="PrecisionAudit (found|.* has seen nothing)")
        warnings.filterwarnings("ignore", message="OverflowMonitor.stop_after_skips")
        trainer.fit(module, loader(batches))
    return {
        "OverflowPostMortem": list(dict.fromkeys(_name(report) for report in post_mortem.reports)),
        "PrecisionAudit": [(finding.kind, finding.modules[0]) for finding in audit.findings],
        "UnderflowMonitor": _of_scale(underflow, monitor.skipped_steps) if plugin.precision == "16-mixed" else [],
        "OverflowMonitor": [("only skips",)] if monitor.stop_reason is not None else [],
    }


def _name(report: OverflowReport) -> tuple[str, ...]:
    if not report.findings:
        return ("no finding", report.note)
    finding = report.findings[0]
    if finding.first_overflow is None or finding.verdict in _ANYWHERE:
        return (finding.verdict, "", "")
    module = "" if finding.verdict == "scale" else finding.first_overflow.module
    return (finding.verdict, finding.first_overflow.phase, module)


def _of_scale(monitor: UnderflowMonitor, skipped_steps: int) -> list[tuple[str, ...]]:
    """The monitor has numbers, and a reader draws conclusions: the scale is far from what it suggests."""
    found = []
    for summary in (summaries["gradients"] for summaries in monitor.history):
        lost = summary.underflow_fraction + summary.subnormal_fraction
        suggested = summary.suggested_scale
        if suggested is not None and suggested >= 16 * summary.scale and lost > 0.1:
            found.append(("scale too low",))
        if summary.headroom_doublings < 0 and not skipped_steps:
            found.append(("scale too high",))
    return list(dict.fromkeys(found))
