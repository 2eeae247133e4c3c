"""One optimizer step as the gradient noise scale sees it: its first micro-batch, its whole, and how large both were."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from lightning_mp.core.devices import sent_to
from lightning_mp.core.host_copy import HostCopy
from lightning_mp.gradients import gradient_ops
from lightning_mp.gradients.replication import GradientReplication

#: Length of :meth:`NoiseWindow.numbers`.
NUM_NUMBERS = 10


@dataclass
class NoiseWindow:
    """The micro-batches of one step on this rank, so far."""

    step_index: int  # attempts at a step before it
    micro_batches: int = 0  # how many had a loss
    samples: int = 0  # of all of them
    inverse_sizes: float = 0.0  # one over the samples of each, added up
    tokens: float | Tensor = 0.0  # target tokens of all of them
    first_size: int = 1  # samples of the first one
    first_weight: float | Tensor = 1.0  # what the first one's loss was multiplied by to weigh it
    norms: list[Tensor] = field(default_factory=list)  # of single parameters' gradients in the first one
    # whether the samples of all of them are known. The numbers of a window where they are not are no numbers on all
    # ranks, as ranks add them together
    is_countable: bool = True
    # squared norm of the first one's gradient, a scalar tensor; of shards this rank's share of it
    small_square: Tensor | None = None
    # this rank's share of the squared norm of the step's gradient; None where the outcome has it
    big_square: Tensor | None = None
    # `numbers` over all ranks of the part before a resume, on rank 0, and zeros on the others; None for a window that
    # was not resumed
    carried: Tensor | None = None

    @classmethod
    def resumed(cls, step_index: int, numbers: Sequence[float], device: torch.device, *, is_global_zero: bool) -> Self:
        """A window that was saved open: its first micro-batch is over."""
        dtype = gradient_ops.accumulation_dtype(device)
        carried = torch.tensor(numbers, dtype=dtype, device=device) * float(is_global_zero)
        return cls(step_index, carried=carried, small_square=torch.zeros((), dtype=dtype, device=device))

    def add(self, samples: int, tokens: float | Tensor, weight: float | Tensor) -> None:
        """Books a micro-batch."""
        if not self.micro_batches and self.carried is None:
            self.first_size, self.first_weight = samples, weight
        self.micro_batches += 1
        self.samples += samples
        self.inverse_sizes += 1 / samples
        self.tokens = self.tokens + tokens

    @torch.no_grad()
    def add_norm(self, gradient: Tensor) -> None:
        """Takes the norm of one parameter's gradient in the first micro-batch, as a hook on the parameter."""
        shard = gradient_ops.local_shard(gradient)
        dtype = torch.float64 if shard.dtype == torch.float64 else torch.float32
        self.norms.append(torch.linalg.vector_norm(shard, dtype=dtype))

    def take_norms(self) -> Tensor | None:
        """The sum of squares of :attr:`norms`, which are forgotten; None without any."""
        norms, self.norms = self.norms, []
        if not norms:
            return None
        dtype = gradient_ops.accumulation_dtype(norms[0].device)
        return torch.stack([norm.to(dtype) for norm in norms]).square().sum()

    def numbers(self, device: torch.device) -> Tensor:
        """All numbers that are added over ranks, shape ``[10]``, on the run's device: gradients may be offloaded."""
        assert self.small_square is not None
        is_first = float(self.carried is None)
        entries = (
            self.small_square if self.is_countable else math.nan,
            0.0 if self.big_square is None else self.big_square,
            self.first_weight * is_first,
            self.tokens,
            is_first,
            is_first / self.first_size,
            self.first_size * is_first,
            self.inverse_sizes,
            self.samples,
            self.micro_batches,
        )
        made = sent_to(torch.stack([on_device_of(self.small_square, entry) for entry in entries]), device)
        return made if self.carried is None else made + self.carried


@dataclass(frozen=True)
class ClosedNoiseWindow:
    """A step whose numbers, added over ranks, are on their way to the host."""

    numbers: HostCopy  # of `NoiseWindow.numbers`
    big_factor: float  # makes the squared norm of the step that of the mean gradient
    alike: bool  # micro-batches weigh the same, whatever they hold
    sharded: bool  # the small gradient is one of all ranks, in shards; else each rank has its own
    # ranks that see different data; None where the first micro-batch was on other ranks, all different
    data_ranks: int | None

    def read(self, big_square: float | None) -> tuple[float, float, float, float, float] | None:
        """Squared norms, inverse sizes, tokens of a sample; None if a norm is not finite or the sizes are equal."""
        small, big, weight, tokens, ranks, first_inverse, first_samples, inverses, samples, micro_batches = (
            self.numbers.read()
        )
        # Ranks that share their data (tensor parallel) have counted it once each.
        data_ranks = ranks if self.data_ranks is None else self.data_ranks
        sharing = ranks / data_ranks
        if self.sharded:
            small *= (ranks / weight) ** 2
            small_inverse = first_inverse / sharing / data_ranks**2 if self.alike else sharing / first_samples
        else:
            small, small_inverse = small / ranks, first_inverse / ranks
        # A mean of m means has the variance of one over m^2 sum_i 1 / b_i; one of all samples that of sum_i b_i.
        big_inverse = inverses * sharing / micro_batches**2 if self.alike else sharing / samples
        big = (big if big_square is None else big_square) * self.big_factor
        if not math.isfinite(small + big) or small_inverse <= big_inverse * (1 + 1e-9):
            return None
        return small, big, small_inverse, big_inverse, tokens / samples


def on_device_of(like: Tensor, number: float | Tensor) -> Tensor:
    """A scalar tensor on the device and in the dtype of another, without waiting for it."""
    if isinstance(number, Tensor):
        return sent_to(number.detach(), like.device, like.dtype).reshape(())
    return torch.full((), number, dtype=like.dtype, device=like.device)


def square_share(parameters: Sequence[Tensor], ranks: GradientReplication) -> Tensor:
    """This rank's share of the squared norm of the gradients, a scalar tensor (one pass)."""
    finished = [(p, _finished(p.grad)) for p in parameters if p.grad is not None]
    norms = gradient_ops.shard_norms([gradient_ops.local_shard(gradient) for _, gradient in finished])
    copies = ranks.copies([gradient for _, gradient in finished], [parameter for parameter, _ in finished])
    return gradient_ops.square_sum(norms, copies)


def _finished(gradient: Tensor) -> Tensor:
    """A gradient whose sum over ranks is still to be made, with it made; the original stays as it is."""
    if not isinstance(gradient, DTensor) or not any(placement.is_partial() for placement in gradient.placements):
        return gradient
    return gradient.redistribute(placements=[Replicate() if p.is_partial() else p for p in gradient.placements])
