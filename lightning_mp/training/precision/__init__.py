"""Precision plugins for ``Trainer(plugins=[...])``."""

from lightning_mp.training.precision.autocast import AutocastPrecision
from lightning_mp.training.precision.base import GradientStepPrecision
from lightning_mp.training.precision.float8 import Float8Precision
from lightning_mp.training.precision.master_weights import MasterWeightsPrecision
from lightning_mp.training.precision.tf32 import TF32Precision

__all__ = ["AutocastPrecision", "GradientStepPrecision", "Float8Precision", "MasterWeightsPrecision", "TF32Precision"]
