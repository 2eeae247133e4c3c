"""Planning: figures about a training run, without a Trainer and without a GPU.

The questions :func:`lightning_mp.recommend` and :func:`lightning_mp.estimate_memory` answer with types from here.
"""

from lightning_mp.ground.flops.chinchilla import TOKENS_PER_PARAMETER, tokens_for, training_flops
from lightning_mp.ground.flops.conventions import CONVENTIONS, FlopsConvention, flops_per_token, model_flops_utilization
from lightning_mp.ground.flops.device_traits import DeviceTraits
from lightning_mp.ground.flops.hardware import Chip, find_chip, known_chips, peak_flops
from lightning_mp.ground.flops.throughput import bubble_fraction
from lightning_mp.monitors.step_memory.estimate import MemoryEstimate
from lightning_mp.planning.advice.recommendation import Choice, Component, Recommendation
from lightning_mp.planning.communication import ParallelLayout, communication_per_step
from lightning_mp.planning.layouts import (
    ChipChoice,
    LayoutChoice,
    Machine,
    ParallelPlan,
    choose_chips,
    choose_layouts,
    find_machine,
    known_machines,
    plan_parallelism,
    usual_layouts,
)
from lightning_mp.planning.memory.decoder_config import DecoderConfig, DecoderSize, LatentAttention
from lightning_mp.planning.memory.decoder_memory import DecoderMemory, decoder_memory, largest_micro_batch
from lightning_mp.planning.scaling_laws.fit import ScalingLawFit, fit_scaling_law
from lightning_mp.planning.scaling_laws.fit_plot import draw_fit
from lightning_mp.planning.scaling_laws.optimum import (
    ComputeOptimal,
    InferenceAware,
    compute_optimal,
    inference_aware_optimum,
)
from lightning_mp.planning.scaling_laws.runs import Run, read_runs
from lightning_mp.planning.scaling_laws.scaling_law import (
    LAWS,
    ExponentialDecay,
    Frontier,
    FrontierLaw,
    ParametricLaw,
    RepetitionLaw,
    ScalingLaw,
    TrainedRange,
)
from lightning_mp.planning.training_run import RunTime, TrainingRun, run_time, training_run

__all__ = [
    "CONVENTIONS",
    "Chip",
    "ChipChoice",
    "Choice",
    "Component",
    "ComputeOptimal",
    "DecoderConfig",
    "DecoderMemory",
    "DecoderSize",
    "DeviceTraits",
    "ExponentialDecay",
    "FlopsConvention",
    "Frontier",
    "FrontierLaw",
    "InferenceAware",
    "LAWS",
    "LatentAttention",
    "LayoutChoice",
    "Machine",
    "MemoryEstimate",
    "ParallelLayout",
    "ParallelPlan",
    "ParametricLaw",
    "Recommendation",
    "RepetitionLaw",
    "Run",
    "RunTime",
    "ScalingLaw",
    "ScalingLawFit",
    "TOKENS_PER_PARAMETER",
    "TrainedRange",
    "TrainingRun",
    "bubble_fraction",
    "choose_chips",
    "choose_layouts",
    "communication_per_step",
    "compute_optimal",
    "decoder_memory",
    "draw_fit",
    "find_chip",
    "find_machine",
    "fit_scaling_law",
    "flops_per_token",
    "inference_aware_optimum",
    "known_chips",
    "known_machines",
    "largest_micro_batch",
    "model_flops_utilization",
    "peak_flops",
    "plan_parallelism",
    "read_runs",
    "run_time",
    "tokens_for",
    "training_flops",
    "training_run",
    "usual_layouts",
]


def __dir__() -> list[str]:
    return __all__
