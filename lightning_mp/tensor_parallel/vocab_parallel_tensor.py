"""A tensor of which each rank holds the columns of some tokens."""

from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_mp.core import private_api


@dataclass(frozen=True)
class VocabParallelSplit:
    """How the vocabulary lies over ranks, in equal parts in their order."""

    group: ProcessGroup

    @property
    def ranks(self) -> int:
        """How many they are."""
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        """This one among them."""
        return dist.get_rank(self.group)

    def whole(self, part: Tensor, dim: int) -> Tensor:
        """All parts together, on every rank of the group."""
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.ranks)]
        dist.all_gather(parts, part, group=self.group)
        return torch.cat(parts, dim)

    def own(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's part, a view."""
        size = whole.shape[dim] // self.ranks
        return whole.narrow(dim, self.rank * size, size)


class InParts(Tensor):
    """A tensor with the size of the whole and the memory of this rank's part; subclasses define what it can do."""

    part: Tensor
    dim_of_vocabulary: int
    vocab_split: VocabParallelSplit

    @staticmethod
    def __new__(  # noqa: D102
        cls: type[Self], part: Tensor, dim: int, split: VocabParallelSplit, requires_grad: bool = False
    ) -> Self:
        size, own = list(part.shape), part.stride(dim)
        size[dim] *= split.ranks
        strides = [stride * split.ranks if stride > own else stride for stride in part.stride()]
        self: Self = private_api.wrapper_tensor(cls, size, strides, part, requires_grad)
        self.part, self.dim_of_vocabulary, self.vocab_split = part, dim, split
        return self

    def like(self, part: Tensor, dim: int | None = None) -> Self:
        """Another part, split in the same way, with the vocabulary along the same dimension or another one."""
        return type(self)(part, self.dim_of_vocabulary if dim is None else dim, self.vocab_split)
