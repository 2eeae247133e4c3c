"""Planning: figures about a training run, without a Trainer and without a GPU."""

from lightning_mp.planning.chinchilla import TOKENS_PER_PARAMETER, tokens_for, training_flops
from lightning_mp.planning.flops import CONVENTIONS, FlopsConvention, flops_per_token, model_flops_utilization
from lightning_mp.planning.hardware import Chip, find_chip, known_chips, peak_flops

__all__ = [
    "CONVENTIONS",
    "Chip",
    "FlopsConvention",
    "TOKENS_PER_PARAMETER",
    "find_chip",
    "flops_per_token",
    "known_chips",
    "model_flops_utilization",
    "peak_flops",
    "tokens_for",
    "training_flops",
]
