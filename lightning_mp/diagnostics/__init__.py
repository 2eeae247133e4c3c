"""What monitors report and steps raise: outcomes, reports, findings and errors; the callbacks wire them into a run."""

from lightning_mp.monitors.diagnostics.audit.findings import AuditFinding
from lightning_mp.monitors.diagnostics.audit.records import AuditReport
from lightning_mp.monitors.diagnostics.noise_scale import NoiseScale
from lightning_mp.monitors.diagnostics.overflow.report import OverflowReport
from lightning_mp.monitors.diagnostics.overflow.search import OverflowFinding
from lightning_mp.monitors.diagnostics.underflow.observation import UnderflowObservation
from lightning_mp.training.activation_checkpointing.cost import RecomputeReport
from lightning_mp.training.optimizer_step.loss_scaler import LossScaleFloorError
from lightning_mp.training.optimizer_step.outcome import StepOutcome

__all__ = [
    "AuditFinding",
    "AuditReport",
    "LossScaleFloorError",
    "NoiseScale",
    "OverflowFinding",
    "OverflowReport",
    "RecomputeReport",
    "StepOutcome",
    "UnderflowObservation",
]


def __dir__() -> list[str]:
    return __all__
