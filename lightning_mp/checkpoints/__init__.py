"""Checkpoints that survive a kill and another number of ranks: atomic, sharded, single-file."""

from lightning_mp.training.checkpoints.atomic import AtomicCheckpointIO
from lightning_mp.training.checkpoints.consolidate import consolidate_checkpoint
from lightning_mp.training.checkpoints.latest import latest_checkpoint

__all__ = ["AtomicCheckpointIO", "consolidate_checkpoint", "latest_checkpoint"]


def __dir__() -> list[str]:
    return __all__
