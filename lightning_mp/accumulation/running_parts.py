"""What monitors may read of a batch that runs in parts, from the state of the run."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl

from lightning_mp.core.run_state import RunState

if TYPE_CHECKING:
    from lightning_mp.core.random_state import RandomState


@dataclass
class RunningParts:
    """Where ``MicroBatchOnOOM`` is; kept by the run's :class:`~lightning_mp.core.run_state.RunState`."""

    batch_idx: int = 0  # of the batch that runs, or runs again
    part: Any = None  # the part of it that runs; None while batches run whole
    index: int = 0  # which one it is
    random_state: "RandomState | None" = None  # before its forward
    is_repeated: bool = False  # an attempt at the loader's current batch has failed

    @classmethod
    def of(cls, trainer: "pl.Trainer") -> "RunningParts":
        """That of a run; nothing runs in parts without ``MicroBatchOnOOM``."""
        return RunState.of(trainer).find(cls) or cls()
