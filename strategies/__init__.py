"""Strategies for ``Trainer(strategy=...)``; importing this registers their names with Lightning."""

from lightning_mp.strategies.fsdp2 import FSDP2Strategy
from lightning_mp.strategies.pipeline import PipelineParallelStrategy
from lightning_mp.strategies.reduced_precision_ddp import ReducedPrecisionDDPStrategy

__all__ = ["FSDP2Strategy", "PipelineParallelStrategy", "ReducedPrecisionDDPStrategy"]
