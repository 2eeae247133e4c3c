"""Planning: figures about a training run, without a Trainer and without a GPU."""

from lightning_mp.planning.chinchilla import TOKENS_PER_PARAMETER, tokens_for, training_flops
from lightning_mp.planning.communication import communication_per_step
from lightning_mp.planning.decoder_size import DecoderSize
from lightning_mp.planning.fit import fit_scaling_law
from lightning_mp.planning.fit_plot import draw_fit
from lightning_mp.planning.fit_result import ScalingLawFit
from lightning_mp.planning.flops import CONVENTIONS, FlopsConvention, flops_per_token, model_flops_utilization
from lightning_mp.planning.hardware import Chip, find_chip, known_chips, peak_flops
from lightning_mp.planning.interconnects import Machine, find_machine, known_machines
from lightning_mp.planning.optimum import ComputeOptimal, compute_optimal
from lightning_mp.planning.parallel_layout import ParallelLayout
from lightning_mp.planning.parallel_plan import ParallelPlan, plan_parallelism, usual_layouts
from lightning_mp.planning.pipeline_bubble import bubble_fraction, bubble_to_ideal_ratio, kept_micro_batches
from lightning_mp.planning.presets import LAWS
from lightning_mp.planning.repetition import ExponentialDecay, RepetitionLaw
from lightning_mp.planning.runs import Run, read_runs
from lightning_mp.planning.scaling_law import Frontier, FrontierLaw, ParametricLaw, ScalingLaw, TrainedRange

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
