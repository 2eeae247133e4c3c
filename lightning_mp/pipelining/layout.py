"""A rank's place in its pipeline."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from lightning_mp.pipelining.microbatches import ScheduleName


@dataclass(frozen=True)
class Pipeline:
    """A rank's place in its pipeline."""

    group: ProcessGroup  # the ranks of its stages, in order
    stage: int  # this rank's
    stages: int  # how many there are
    microbatches: int  # into how many microbatches a batch is split, at most
    schedule: ScheduleName  # "1f1b" or "gpipe"
    device: torch.device  # of this rank

    @property
    def is_last(self) -> bool:
        """Whether this stage has the loss."""
        return self.stage == self.stages - 1

    @property
    def last_rank(self) -> int:
        """Global rank of the stage that has the loss."""
        return dist.get_global_rank(self.group, self.stages - 1)
