"""Callbacks for ``Trainer(callbacks=[...])``."""

from lightning_mp.callbacks.accumulation_scheduler import AccumulationScheduler
from lightning_mp.callbacks.chinchilla_budget import ChinchillaBudget
from lightning_mp.callbacks.overflow_monitor import OverflowMonitor
from lightning_mp.callbacks.overflow_post_mortem import OverflowPostMortem, OverflowReport

__all__ = ["AccumulationScheduler", "ChinchillaBudget", "OverflowMonitor", "OverflowPostMortem", "OverflowReport"]
