"""Precision plugins for ``Trainer(plugins=[...])``."""

from lightning_mp.precision.autocast import AutocastPrecision
from lightning_mp.precision.base import GradientStepPrecision
from lightning_mp.precision.float8 import Float8Precision
from lightning_mp.precision.master_weights import MasterWeightsPrecision
from lightning_mp.precision.tf32 import TF32Precision

__all__ = ["AutocastPrecision", "GradientStepPrecision", "Float8Precision", "MasterWeightsPrecision", "TF32Precision"]
