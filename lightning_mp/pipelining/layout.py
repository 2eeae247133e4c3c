"""Where a rank stands in its pipeline."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from lightning_mp.pipelining.microbatches import ScheduleName

__all__ = ["Pipeline"]


@dataclass(frozen=True)
class Pipeline:
    """Where a rank stands in its pipeline.

    Attributes:
        group: the ranks of its stages, in order.
        stage: this rank's.
        stages: how many there are.
        microbatches: into how many microbatches a batch is split, at most.
        schedule: "1f1b" or "gpipe".
        device: of this rank.
    """

    group: ProcessGroup
    stage: int
    stages: int
    microbatches: int
    schedule: ScheduleName
    device: torch.device

    @property
    def is_last(self) -> bool:
        """Whether this stage has the loss."""
        return self.stage == self.stages - 1

    @property
    def last_rank(self) -> int:
        """Global rank of the stage that has the loss."""
        return dist.get_global_rank(self.group, self.stages - 1)
