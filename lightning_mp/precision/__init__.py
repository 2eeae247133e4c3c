"""Precision plugins for ``Trainer(plugins=[...])``."""

from lightning_mp.precision.autocast import AutocastPrecision
from lightning_mp.precision.base import EpiloguePrecision

__all__ = ["AutocastPrecision", "EpiloguePrecision"]
