"""Several optimizers as one, and which parameters each of them takes."""

from lightning_mp.optimizers.joint import JointOptimizer
from lightning_mp.optimizers.matrices import MatricesAndRest, matrices_and_rest

__all__ = ["JointOptimizer", "MatricesAndRest", "matrices_and_rest"]
