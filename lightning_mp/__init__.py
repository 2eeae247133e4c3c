"""Mixed-precision plugins, callbacks and strategies for PyTorch Lightning.

What a Trainer is given is here: precision plugins with :class:`LossScaler` and :class:`PrecisionPolicy`, callbacks with
the schedules that they take, and strategies. Four functions answer questions about a run before it starts:
:func:`recommend`, :func:`estimate_memory`, :func:`preflight` and :func:`compare_precisions`; they are loaded when they
are first used. The rest is one level down:

- :mod:`lightning_mp.checkpoints`: atomic and sharded checkpoints outside of a Trainer.
- :mod:`lightning_mp.diagnostics`: outcomes of steps, reports and errors.
- :mod:`lightning_mp.language_model`: the small GPT of the demo and the documentation; it may change without notice.
- :mod:`lightning_mp.metrics`: torchmetrics with integer counts.
- :mod:`lightning_mp.pipelining`: what a module calls in its steps to run under pipeline parallelism.
- :mod:`lightning_mp.planning`: compute-optimal plans, FLOPs, memory and parallel layouts, without a Trainer.
"""

import sys
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_mp._version import __version__


def _only_answers_a_command() -> bool:
    """Whether this is ``lightning-mp`` or ``python -m lightning_mp``; a command that needs the rest imports it."""
    words = sys.orig_argv
    is_module = any(pair == ("-m", "lightning_mp") for pair in pairwise(words))
    return "torch" not in sys.modules and (is_module or Path(sys.argv[0]).stem == "lightning-mp")


if TYPE_CHECKING or not _only_answers_a_command():
    from lightning_mp import checkpoints, diagnostics, metrics, pipelining, planning
    from lightning_mp.callbacks import (
        AccumulationScheduler,
        ActivationCheckpointing,
        AtomicCheckpoints,
        BudgetForecast,
        ChinchillaBudget,
        ExactResume,
        GradientNoiseScale,
        MFUMonitor,
        MicroBatchOnOOM,
        OverflowMonitor,
        OverflowPostMortem,
        PrecisionAudit,
        Preflight,
        RankWatchdog,
        StopAtBoundary,
        TokenLearningRate,
        UnderflowMonitor,
    )
    from lightning_mp.strategies import FSDP2Strategy, PipelineParallelStrategy, ReducedPrecisionDDPStrategy
    from lightning_mp.training.gradients.comm_hook import reduced_precision_hook
    from lightning_mp.training.lr_schedule.schedules import WarmupCosine, WarmupStableDecay
    from lightning_mp.training.optimizer_step.loss_scaler import LossScaler
    from lightning_mp.training.optimizers import JointOptimizer, bf16_moments, matrices_and_rest
    from lightning_mp.training.policy.policy import PrecisionPolicy
    from lightning_mp.training.precision import (
        AutocastPrecision,
        Float8Precision,
        MasterWeightsPrecision,
        TF32Precision,
    )

if TYPE_CHECKING:
    from lightning_mp.monitors.comparison.compare import compare_precisions
    from lightning_mp.monitors.preflight_checks.preflight import preflight
    from lightning_mp.monitors.step_memory.estimate import estimate_memory
    from lightning_mp.planning.advice.recommend import recommend

__all__ = [
    "AccumulationScheduler",
    "ActivationCheckpointing",
    "AtomicCheckpoints",
    "AutocastPrecision",
    "BudgetForecast",
    "ChinchillaBudget",
    "ExactResume",
    "FSDP2Strategy",
    "Float8Precision",
    "GradientNoiseScale",
    "JointOptimizer",
    "LossScaler",
    "MasterWeightsPrecision",
    "MFUMonitor",
    "MicroBatchOnOOM",
    "OverflowMonitor",
    "OverflowPostMortem",
    "PipelineParallelStrategy",
    "PrecisionAudit",
    "PrecisionPolicy",
    "Preflight",
    "RankWatchdog",
    "ReducedPrecisionDDPStrategy",
    "StopAtBoundary",
    "TF32Precision",
    "TokenLearningRate",
    "UnderflowMonitor",
    "WarmupCosine",
    "WarmupStableDecay",
    "__version__",
    "bf16_moments",
    "checkpoints",
    "compare_precisions",
    "diagnostics",
    "estimate_memory",
    "matrices_and_rest",
    "metrics",
    "pipelining",
    "planning",
    "preflight",
    "recommend",
    "reduced_precision_hook",
]

_LOADED_WHEN_USED = {
    "compare_precisions": "lightning_mp.monitors.comparison.compare",
    "estimate_memory": "lightning_mp.monitors.step_memory.estimate",
    "preflight": "lightning_mp.monitors.preflight_checks.preflight",
    "recommend": "lightning_mp.planning.advice.recommend",
}


def __getattr__(name: str) -> Any:
    if name not in _LOADED_WHEN_USED:
        from lightning_mp.ground.core.known_words import did_you_mean  # of use in errors only

        meant = did_you_mean(name, __all__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}.{meant}")
    function = globals()[name] = getattr(import_module(_LOADED_WHEN_USED[name]), name)
    return function


def __dir__() -> list[str]:
    return __all__
