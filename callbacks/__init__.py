"""Callbacks for ``Trainer(callbacks=[...])``."""

from lightning_mp.callbacks.accumulation_scheduler import AccumulationScheduler
from lightning_mp.callbacks.activation_checkpointing import ActivationCheckpointing
from lightning_mp.callbacks.atomic_checkpoints import AtomicCheckpoints
from lightning_mp.callbacks.budget_forecast import BudgetForecast
from lightning_mp.callbacks.chinchilla_budget import ChinchillaBudget
from lightning_mp.callbacks.exact_resume import ExactResume
from lightning_mp.callbacks.gradient_noise_scale import GradientNoiseScale
from lightning_mp.callbacks.mfu_monitor import MFUMonitor
from lightning_mp.callbacks.micro_batch_on_oom import MicroBatchOnOOM
from lightning_mp.callbacks.overflow_monitor import OverflowMonitor
from lightning_mp.callbacks.overflow_post_mortem import OverflowPostMortem
from lightning_mp.callbacks.precision_audit import PrecisionAudit
from lightning_mp.callbacks.preflight import Preflight
from lightning_mp.callbacks.rank_watchdog import RankWatchdog
from lightning_mp.callbacks.stop_at_boundary import StopAtBoundary
from lightning_mp.callbacks.token_learning_rate import TokenLearningRate
from lightning_mp.callbacks.underflow_monitor import UnderflowMonitor

__all__ = [
    "AccumulationScheduler",
    "ActivationCheckpointing",
    "AtomicCheckpoints",
    "BudgetForecast",
    "ChinchillaBudget",
    "ExactResume",
    "GradientNoiseScale",
    "MFUMonitor",
    "MicroBatchOnOOM",
    "OverflowMonitor",
    "OverflowPostMortem",
    "PrecisionAudit",
    "Preflight",
    "RankWatchdog",
    "StopAtBoundary",
    "TokenLearningRate",
    "UnderflowMonitor",
]
