"""What monitors may read of a batch that runs in parts, from the state of the run."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import lightning.pytorch as pl

from lightning_mp.core.run_state import RunState

if TYPE_CHECKING:
    from lightning_mp.core.random_state import RandomState


class RunningPart(NamedTuple):
    """A part of a batch."""

    batch: Any
    batch_idx: int  # of the whole
    position: int  # which part of it this is
    random_state: "RandomState"  # before its forward


@dataclass
class RunningParts:
    """Where ``MicroBatchOnOOM`` is; kept by the run's :class:`~lightning_mp.core.run_state.RunState`."""

    part: RunningPart | None = None  # the one that runs; None while batches run whole
    is_repeated: bool = False  # an attempt at the loader's current batch has failed

    @classmethod
    def of(cls, trainer: "pl.Trainer") -> "RunningParts":
        """That of a run; nothing runs in parts without ``MicroBatchOnOOM``."""
        return RunState.of(trainer).find(cls) or cls()
