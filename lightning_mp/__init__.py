"""Mixed-precision plugins, callbacks and strategies for PyTorch Lightning."""

from lightning_mp._version import __version__
from lightning_mp.callbacks import (
    AccumulationScheduler,
    ChinchillaBudget,
    OverflowMonitor,
    OverflowPostMortem,
    OverflowReport,
)
from lightning_mp.loss_scaler import LossScaleFloorError, LossScaler
from lightning_mp.outcome import StepOutcome
from lightning_mp.precision import AutocastPrecision

__all__ = [
    "AccumulationScheduler",
    "AutocastPrecision",
    "ChinchillaBudget",
    "LossScaleFloorError",
    "LossScaler",
    "OverflowMonitor",
    "OverflowPostMortem",
    "OverflowReport",
    "StepOutcome",
    "__version__",
]
