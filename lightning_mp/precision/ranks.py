"""Which ranks step together and hold the same gradients, as far as the strategy tells."""

import lightning.pytorch as pl
from lightning.pytorch.strategies import FSDPStrategy

from lightning_mp.stepping_ranks import SteppingRanks

__all__ = ["stepping_ranks"]


def stepping_ranks(trainer: "pl.Trainer") -> SteppingRanks:
    """What the strategy says by ``stepping_ranks()``; of Lightning's own, FSDP1 shards and all others copy."""
    strategy = trainer.strategy
    asked = getattr(strategy, "stepping_ranks", None)
    if asked is not None:
        ranks: SteppingRanks = asked()
        return ranks
    if isinstance(strategy, FSDPStrategy) and strategy.model is not None:
        return SteppingRanks.of_fsdp1(strategy.model)
    return SteppingRanks.every_rank()
