"""Several optimizers as one, and which parameters each of them takes."""

from lightning_mp.training.optimizers.adam_moments import bf16_moments
from lightning_mp.training.optimizers.joint import JointOptimizer
from lightning_mp.training.optimizers.matrices import MatricesAndRest, matrices_and_rest

__all__ = ["JointOptimizer", "MatricesAndRest", "bf16_moments", "matrices_and_rest"]
