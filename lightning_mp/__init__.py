"""Mixed-precision plugins, callbacks and strategies for PyTorch Lightning.

What a Trainer is given is here: precision plugins with :class:`LossScaler` and :class:`PrecisionPolicy`, callbacks with
the schedules that they take, and strategies. The rest is one level down:

- :mod:`lightning_mp.checkpoints`: atomic and sharded checkpoints outside of a Trainer.
- :mod:`lightning_mp.diagnostics`: outcomes of steps, reports and errors.
- :mod:`lightning_mp.metrics`: torchmetrics with integer counts.
- :mod:`lightning_mp.pipelining`: what a module calls in its steps to run under pipeline parallelism.
- :mod:`lightning_mp.planning`: compute-optimal plans, FLOPs, memory and parallel layouts, without a Trainer.
"""

from lightning_mp import checkpoints, diagnostics, metrics, pipelining, planning
from lightning_mp._version import __version__
from lightning_mp.callbacks import (
    AccumulationScheduler,
    ActivationCheckpointing,
    AtomicCheckpoints,
    BudgetForecast,
    ChinchillaBudget,
    GradientNoiseScale,
    MFUMonitor,
    MicroBatchOnOOM,
    OverflowMonitor,
    OverflowPostMortem,
    PrecisionAudit,
    RankWatchdog,
    StopAtBoundary,
    TokenLearningRate,
    UnderflowMonitor,
)
from lightning_mp.comparison.compare import compare_precisions
from lightning_mp.gradients.comm_hook import reduced_precision_hook
from lightning_mp.lr_schedule.schedules import WarmupCosine, WarmupStableDecay
from lightning_mp.policy.policy import PrecisionPolicy
from lightning_mp.precision import AutocastPrecision, Float8Precision, MasterWeightsPrecision, TF32Precision
from lightning_mp.scaling.loss_scaler import LossScaler
from lightning_mp.strategies import FSDP2Strategy, PipelineParallelStrategy, ReducedPrecisionDDPStrategy

__all__ = [
    "AccumulationScheduler",
    "ActivationCheckpointing",
    "AtomicCheckpoints",
    "AutocastPrecision",
    "BudgetForecast",
    "ChinchillaBudget",
    "FSDP2Strategy",
    "Float8Precision",
    "GradientNoiseScale",
    "LossScaler",
    "MasterWeightsPrecision",
    "MFUMonitor",
    "MicroBatchOnOOM",
    "OverflowMonitor",
    "OverflowPostMortem",
    "PipelineParallelStrategy",
    "PrecisionAudit",
    "PrecisionPolicy",
    "RankWatchdog",
    "ReducedPrecisionDDPStrategy",
    "StopAtBoundary",
    "TF32Precision",
    "TokenLearningRate",
    "UnderflowMonitor",
    "WarmupCosine",
    "WarmupStableDecay",
    "__version__",
    "checkpoints",
    "compare_precisions",
    "diagnostics",
    "metrics",
    "pipelining",
    "planning",
    "reduced_precision_hook",
]


def __dir__() -> list[str]:
    return __all__
