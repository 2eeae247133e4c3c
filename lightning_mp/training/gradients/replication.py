"""Which ranks decide on a step together, and which of them hold the same parameters."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Self

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightning_mp.ground.core.devices import accumulation_dtype
from lightning_mp.ground.core.ranks import sum_over_ranks_, world_size
from lightning_mp.training.gradients.gradient_ops import LocalGradients, replicas_of, square_sum


@dataclass(frozen=True)
class GradientReplication:
    """The ranks that step together.

    .. code-block:: text

                                  group       ranks_per_parameter  plain_replicas
        one process               all (1)     1                    1
        DDP, FSDP2, TP, 2-D       all         all                  all
        FSDP1, full shard         all         all                  1 (plain gradients are shards)
        FSDP1, hybrid shard       all         all                  number of shard groups
        pipeline of s stages      all         ranks of one stage   ranks of one stage
        half of the ranks         that half   that half            that half

    A strategy whose ranks hold different parameters says so in a method ``gradient_replication()`` that returns one of
    these; our precision plugins read it.

    >>> GradientReplication.every_rank()
    GradientReplication(group=None, ranks_per_parameter=1, plain_replicas=1)
    """

    group: ProcessGroup | None
    ranks_per_parameter: int
    plain_replicas: int
    shared: Mapping[Tensor, int] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.ranks_per_parameter < 1 or self.plain_replicas < 1 or self.ranks_per_parameter % self.plain_replicas:
            raise ValueError(
                f"GradientReplication(ranks_per_parameter={self.ranks_per_parameter!r},"
                f" plain_replicas={self.plain_replicas!r}) is not valid: both must be 1 or more, and plain_replicas"
                " must divide ranks_per_parameter, because the ranks that hold the same parameters are made of groups"
                " with the same plain gradients."
            )

    @cached_property
    def is_one_process(self) -> bool:
        """Nobody else steps with this process."""
        return world_size(self.group) == 1

    @classmethod
    def every_rank(cls, group: ProcessGroup | None = None) -> Self:
        """All ranks of a group hold the same parameters, as under DDP; None for all ranks of the job."""
        size = world_size(group)
        return cls(group, size, size)

    @classmethod
    def of_fsdp1(cls, module: nn.Module) -> Self:
        """What torch's ``FullyShardedDataParallel`` has made of a module: plain gradients are shards."""
        from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

        everyone = cls.every_rank()
        for unit in FullyShardedDataParallel.fsdp_modules(module):
            if unit.sharding_strategy == ShardingStrategy.NO_SHARD:
                return everyone
            size = everyone.ranks_per_parameter
            return cls(None, size, size // dist.get_world_size(unit.process_group))
        return cls(None, everyone.ranks_per_parameter, 1)

    def copies(self, gradients: Iterable[Tensor], parameters: Iterable[Tensor]) -> list[int]:
        """For each gradient, how many of the ranks hold the same local shard; ``parameters`` says whose they are."""
        here = replicas_of(gradients, ranks_per_parameter=self.ranks_per_parameter, plain_replicas=self.plain_replicas)
        if not self.shared:
            return here
        return [number * self.shared.get(parameter, 1) for number, parameter in zip(here, parameters, strict=True)]

    def square_sum(self, here: LocalGradients, device: torch.device) -> Tensor:
        """This rank's share of the squared norm over all ranks, a scalar tensor."""
        if here.norms is None:
            return torch.zeros((), dtype=accumulation_dtype(device), device=device)
        return square_sum(here.norms, self.copies(here.gradients, here.parameters)).to(device)

    def sum_(self, values: Tensor) -> Tensor:
        """Adds a small tensor over the ranks that step together, in place."""
        return sum_over_ranks_(values, self.group)


def gradient_replication(trainer: "pl.Trainer") -> GradientReplication:
    """What the strategy says by ``gradient_replication()``; of Lightning's own, FSDP1 shards and all others copy."""
    strategy = trainer.strategy
    requested = getattr(strategy, "gradient_replication", None)
    if requested is not None:
        ranks: GradientReplication = requested()
        return ranks
    if isinstance(strategy, FSDPStrategy) and strategy.model is not None:
        return GradientReplication.of_fsdp1(strategy.model)
    return GradientReplication.every_rank()


def all_hold_the_same(strategy: Strategy) -> bool:
    """Whether every rank holds all weights, as on one device and under DDP."""
    return isinstance(strategy, SingleDeviceStrategy | DDPStrategy) and not hasattr(strategy, "gradient_replication")
