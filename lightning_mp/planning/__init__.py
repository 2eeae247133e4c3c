"""Planning: figures about a training run, without a Trainer and without a GPU."""

from lightning_mp.flops.chinchilla import TOKENS_PER_PARAMETER, tokens_for, training_flops
from lightning_mp.flops.conventions import CONVENTIONS, FlopsConvention, flops_per_token, model_flops_utilization
from lightning_mp.flops.hardware import Chip, find_chip, known_chips, peak_flops
from lightning_mp.planning.parallelism.communication import communication_per_step
from lightning_mp.planning.parallelism.decoder_size import DecoderSize
from lightning_mp.planning.parallelism.interconnects import Machine, find_machine, known_machines
from lightning_mp.planning.parallelism.parallel_layout import ParallelLayout
from lightning_mp.planning.parallelism.parallel_plan import ParallelPlan, plan_parallelism, usual_layouts
from lightning_mp.planning.parallelism.pipeline_bubble import bubble_fraction, bubble_to_ideal_ratio, kept_micro_batches
from lightning_mp.planning.scaling_laws.fit import fit_scaling_law
from lightning_mp.planning.scaling_laws.fit_plot import draw_fit
from lightning_mp.planning.scaling_laws.fit_result import ScalingLawFit
from lightning_mp.planning.scaling_laws.optimum import ComputeOptimal, compute_optimal
from lightning_mp.planning.scaling_laws.presets import LAWS
from lightning_mp.planning.scaling_laws.repetition import ExponentialDecay, RepetitionLaw
from lightning_mp.planning.scaling_laws.runs import Run, read_runs
from lightning_mp.planning.scaling_laws.scaling_law import (
    Frontier,
    FrontierLaw,
    ParametricLaw,
    ScalingLaw,
    TrainedRange,
)

__all__ = [
    "CONVENTIONS",
    "Chip",
    "ComputeOptimal",
    "DecoderSize",
    "ExponentialDecay",
    "FlopsConvention",
    "Frontier",
    "FrontierLaw",
    "LAWS",
    "Machine",
    "ParallelLayout",
    "ParallelPlan",
    "ParametricLaw",
    "RepetitionLaw",
    "Run",
    "ScalingLaw",
    "ScalingLawFit",
    "TOKENS_PER_PARAMETER",
    "TrainedRange",
    "bubble_fraction",
    "bubble_to_ideal_ratio",
    "communication_per_step",
    "compute_optimal",
    "draw_fit",
    "find_chip",
    "find_machine",
    "fit_scaling_law",
    "flops_per_token",
    "kept_micro_batches",
    "known_chips",
    "known_machines",
    "model_flops_utilization",
    "peak_flops",
    "plan_parallelism",
    "read_runs",
    "tokens_for",
    "training_flops",
    "usual_layouts",
]


def __dir__() -> list[str]:
    return __all__
