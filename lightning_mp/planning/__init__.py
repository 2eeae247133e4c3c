"""Planning: figures about a training run, without a Trainer and without a GPU."""

from lightning_mp.planning.chinchilla import TOKENS_PER_PARAMETER, tokens_for, training_flops
from lightning_mp.planning.fit import fit_scaling_law
from lightning_mp.planning.fit_plot import draw_fit
from lightning_mp.planning.fit_result import ScalingLawFit
from lightning_mp.planning.flops import CONVENTIONS, FlopsConvention, flops_per_token, model_flops_utilization
from lightning_mp.planning.hardware import Chip, find_chip, known_chips, peak_flops
from lightning_mp.planning.optimum import ComputeOptimal, compute_optimal
from lightning_mp.planning.presets import LAWS
from lightning_mp.planning.repetition import ExponentialDecay, RepetitionLaw
from lightning_mp.planning.runs import Run, read_runs
from lightning_mp.planning.scaling_law import Frontier, FrontierLaw, ParametricLaw, ScalingLaw, TrainedRange

__all__ = [
    "CONVENTIONS",
    "Chip",
    "ComputeOptimal",
    "ExponentialDecay",
    "FlopsConvention",
    "Frontier",
    "FrontierLaw",
    "LAWS",
    "ParametricLaw",
    "RepetitionLaw",
    "Run",
    "ScalingLaw",
    "ScalingLawFit",
    "TOKENS_PER_PARAMETER",
    "TrainedRange",
    "compute_optimal",
    "draw_fit",
    "find_chip",
    "fit_scaling_law",
    "flops_per_token",
    "known_chips",
    "model_flops_utilization",
    "peak_flops",
    "read_runs",
    "tokens_for",
    "training_flops",
]
