"""Mixed-precision plugins, callbacks and strategies for PyTorch Lightning."""

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
    OverflowReport,
    PrecisionAudit,
    RankWatchdog,
    StopAtBoundary,
    TokenLearningRate,
    UnderflowMonitor,
)
from lightning_mp.checkpoints.atomic import AtomicCheckpointIO
from lightning_mp.checkpoints.consolidate import consolidate_checkpoint
from lightning_mp.checkpoints.latest import latest_checkpoint
from lightning_mp.gradients.comm_hook import reduced_precision_hook
from lightning_mp.lr_schedule.schedules import WarmupCosine, WarmupStableDecay
from lightning_mp.metrics import OverflowRate, TokenPerplexity, UnderflowFraction
from lightning_mp.optimizer_step.outcome import StepOutcome
from lightning_mp.pipelining.api import pipelined_loss, pipelined_metrics, pipelined_output
from lightning_mp.pipelining.layers import PipelineLayer
from lightning_mp.planning import compute_optimal, estimate_memory, fit_scaling_law
from lightning_mp.policy.policy import PrecisionPolicy
from lightning_mp.precision import AutocastPrecision, Float8Precision, MasterWeightsPrecision, TF32Precision
from lightning_mp.scaling.loss_scaler import LossScaleFloorError, LossScaler
from lightning_mp.strategies import FSDP2Strategy, PipelineParallelStrategy, ReducedPrecisionDDPStrategy

__all__ = [
    "AccumulationScheduler",
    "ActivationCheckpointing",
    "AtomicCheckpointIO",
    "AtomicCheckpoints",
    "AutocastPrecision",
    "BudgetForecast",
    "ChinchillaBudget",
    "FSDP2Strategy",
    "Float8Precision",
    "GradientNoiseScale",
    "LossScaleFloorError",
    "LossScaler",
    "MasterWeightsPrecision",
    "MFUMonitor",
    "MicroBatchOnOOM",
    "OverflowMonitor",
    "OverflowPostMortem",
    "OverflowRate",
    "OverflowReport",
    "PipelineLayer",
    "PipelineParallelStrategy",
    "PrecisionAudit",
    "PrecisionPolicy",
    "RankWatchdog",
    "ReducedPrecisionDDPStrategy",
    "StepOutcome",
    "StopAtBoundary",
    "TF32Precision",
    "TokenLearningRate",
    "TokenPerplexity",
    "UnderflowFraction",
    "UnderflowMonitor",
    "WarmupCosine",
    "WarmupStableDecay",
    "__version__",
    "compute_optimal",
    "consolidate_checkpoint",
    "estimate_memory",
    "fit_scaling_law",
    "latest_checkpoint",
    "pipelined_loss",
    "pipelined_metrics",
    "pipelined_output",
    "reduced_precision_hook",
]
