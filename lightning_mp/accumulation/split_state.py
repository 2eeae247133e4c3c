"""How the batches of a run are split: what a user has set, and what the run has found out."""

from dataclasses import dataclass
from typing import Any, Literal

from lightning_mp.accumulation.batch_split import (
    Microbatch,
    SplitFunction,
    copied_containers,
    num_samples,
    split_batch,
    split_by,
)

#: The loss of a batch is the mean of its parts' losses by what they count, or their sum.
LossForm = Literal["mean", "sum"]


@dataclass
class SplitState:
    """The settings of ``MicroBatchOnOOM``, and what is kept in checkpoints."""

    split: SplitFunction | None  # a user's function
    min_size: int
    least: int = 1  # rows in a part: two where layers normalise over them
    size: int | None = None  # samples in a part at most; None while everything has fitted
    form: LossForm | None = None  # how the loss of a batch is made of its parts'; None before the first split

    def parts_of(self, batch: Any) -> list[Microbatch]:
        """The batch, or its parts; a training step may pop entries of each."""
        if self.size is None:
            return [Microbatch(copied_containers(batch), 1)]
        if self.split is not None:
            return split_by(self.split, copied_containers(batch), self.size)
        parts = split_batch(batch, self.size, self.least)
        return parts if len(parts) > 1 else [Microbatch(copied_containers(batch), parts[0].samples)]

    def samples_of(self, batch: Any) -> int:
        """How many samples a batch holds."""
        return num_samples(batch) if self.split is None else len(self.split(batch, 1))
