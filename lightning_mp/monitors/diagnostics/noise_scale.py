r"""The gradient noise scale, an estimate of the critical batch size, from gradient norms at two batch sizes.

McCandlish, Kaplan, Amodei et al. 2018, "An Empirical Model of Large-Batch Training", equation 2.9:

.. math:: B_{simple} = \operatorname{tr}(\Sigma) / |G|^2

with the true gradient :math:`G` and the covariance :math:`\Sigma` of one sample's gradient. A gradient that is the mean
over :math:`B` samples has :math:`E|g_B|^2 = |G|^2 + \operatorname{tr}(\Sigma) / B`, so two sizes give both numbers
without bias (appendix A.1). Each is averaged separately before the ratio is taken: a mean of ratios would be biased.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from typing_extensions import override

from lightning_mp.ground.core.devices import accumulation_dtype, sent_to
from lightning_mp.ground.core.host_copy import HostCopy
from lightning_mp.ground.core.saved_state import AMOUNT, COUNT, NUMBER, checked_state, listed_of
from lightning_mp.training.gradients import gradient_ops
from lightning_mp.training.gradients.replication import GradientReplication

_STANDARD_ERRORS = 1.96
_NUM_SUMS = 7
_STATE_KINDS = {"windows": COUNT, "weight": AMOUNT, "square_weight": AMOUNT, "sums": listed_of(NUMBER, _NUM_SUMS)}


def unbiased_estimates(
    small_square_norm: float, big_square_norm: float, small_inverse_size: float, big_inverse_size: float
) -> tuple[float, float]:
    r"""Unbiased estimates of :math:`|G|^2` and :math:`\operatorname{tr}(\Sigma)` (McCandlish et al. 2018, A.1).

    >>> unbiased_estimates(3.0, 1.5, 1 / 4, 1 / 16)  # |G|^2 = 1 and trace = 8: 1 + 8 / 4 and 1 + 8 / 16
    (1.0, 8.0)
    """
    difference = small_inverse_size - big_inverse_size
    assert difference > 0
    trace = (small_square_norm - big_square_norm) / difference
    square = (small_inverse_size * big_square_norm - big_inverse_size * small_square_norm) / difference
    return square, trace


@dataclass(frozen=True)
class NoiseScale:
    r"""An estimate of the gradient noise scale, :math:`B_{simple}`, in samples."""

    samples: float  #: the estimate.
    low: float  #: lower end of its 95% confidence interval; 0 if it has no positive lower end.
    high: float  #: upper end; infinite while :math:`|G|^2` is indistinguishable from zero.
    batch_samples: float  #: samples per optimizer step in training.
    tokens_per_sample: float  #: mean target tokens per sample; 0 if tokens are not counted.
    windows: int  #: optimizer steps that the estimate uses.

    @property
    def tokens(self) -> float:
        """The estimate in tokens; 0 where tokens are not counted."""
        return self.samples * self.tokens_per_sample

    @property
    def efficiency(self) -> float:
        """Progress of a step compared to the best step that any batch allows, ``1 / (1 + scale / batch)`` (eq. 2.6)."""
        return 1 / (1 + self.samples / self.batch_samples)

    @override
    def __str__(self) -> str:
        high = f"{self.high:,.0f}" if math.isfinite(self.high) else "no upper end yet"
        tokens = f", {self.tokens:,.0f} tokens" if self.tokens else ""
        return (
            f"gradient noise scale {self.samples:,.0f} samples (95%: {self.low:,.0f} to {high}){tokens}, from"
            f" {self.windows} steps. At that batch size a run takes twice the minimum number of steps and of samples."
            f" Each step on {self.batch_samples:,.0f} samples makes {self.efficiency:.0%} of the largest possible"
            " progress. Accurate to a factor of about two."
        )


class NoiseScaleAverage:
    r"""Exponential averages of :math:`|G|^2`, :math:`\operatorname{tr}(\Sigma)` and their scatter, without start bias.

    The averages of the first windows are plain means, and later ones forget with a time constant of
    ``average_steps``. The interval of the ratio is Fieller's (E. C. Fieller 1954, "Some Problems in Interval
    Estimation"), which is right also where the denominator is hardly known: windows draw fresh samples, so their
    scatter around the average gives its standard error.
    """

    def __init__(self, average_steps: int) -> None:
        self.average_steps = average_steps
        self.windows = 0
        self.weight = 0.0
        self.square_weight = 0.0
        # |G|^2, trace, their squares and product, samples of a batch, tokens of a sample
        self.sums = [0.0] * _NUM_SUMS

    def add(
        self,
        small_square_norm: float,
        big_square_norm: float,
        small_inverse_size: float,
        big_inverse_size: float,
        *,
        tokens_per_sample: float = 0.0,
    ) -> None:
        """Adds one window; see :func:`unbiased_estimates`."""
        square, trace = unbiased_estimates(small_square_norm, big_square_norm, small_inverse_size, big_inverse_size)
        decay = 1 - 1 / self.average_steps
        new = (square, trace, square**2, trace**2, square * trace, 1 / big_inverse_size, tokens_per_sample)
        self.sums = [decay * before + value for before, value in zip(self.sums, new, strict=True)]
        self.weight = decay * self.weight + 1
        self.square_weight = decay**2 * self.square_weight + 1
        self.windows += 1

    def estimate(self) -> NoiseScale | None:
        r"""The ratio of the averages; None for fewer than two windows, or while an average is not positive."""
        if self.windows < 2:
            return None
        square, trace, square_2, trace_2, product, batch_samples, tokens = (s / self.weight for s in self.sums)
        if square <= 0 or trace <= 0:
            return None
        # Variance of a weighted mean: scatter * sum w^2 / (sum w)^2, and Bessel's correction for weights.
        share = self.square_weight / self.weight**2
        factor = share / (1 - share)
        low, high = _fieller(
            trace,
            square,
            factor * max(trace_2 - trace**2, 0.0),
            factor * max(square_2 - square**2, 0.0),
            factor * (product - square * trace),
        )
        return NoiseScale(trace / square, low, high, batch_samples, tokens, self.windows)

    def state_dict(self) -> dict[str, Any]:
        """All averages."""
        return {name: getattr(self, name) for name in _STATE_KINDS}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from saved averages."""
        state = checked_state(state, _STATE_KINDS, "the gradient noise scale")
        for name in _STATE_KINDS:
            setattr(self, name, state[name])


def _fieller(a: float, b: float, var_a: float, var_b: float, covariance: float) -> tuple[float, float]:
    """95% interval of ``a / b``: all ``r >= 0`` with ``(a - r b)^2 <= z^2 (var_a - 2 r covariance + r^2 var_b)``."""
    z_2 = _STANDARD_ERRORS**2
    quadratic = b**2 - z_2 * var_b
    linear = a * b - z_2 * covariance
    constant = a**2 - z_2 * var_a
    discriminant = linear**2 - quadratic * constant
    if quadratic <= 0:
        # b may be zero: there is no upper end, and a lower one only if a is not zero.
        if discriminant <= 0 or constant <= 0:
            return 0.0, math.inf
        return constant / (linear + math.sqrt(discriminant)), math.inf
    root = math.sqrt(max(discriminant, 0.0))
    return max((linear - root) / quadratic, 0.0), (linear + root) / quadratic


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

    def add(self, samples: int, tokens: float | Tensor) -> None:
        """Books a micro-batch."""
        if not self.micro_batches:
            self.first_size = samples
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
        dtype = accumulation_dtype(norms[0].device)
        return torch.stack([norm.to(dtype) for norm in norms]).square().sum()

    def numbers(self, device: torch.device) -> Tensor:
        """All numbers that are added over ranks, shape ``[10]``, on the run's device: gradients may be offloaded."""
        assert self.small_square is not None
        entries = (
            self.small_square if self.is_countable else math.nan,
            0.0 if self.big_square is None else self.big_square,
            self.first_weight,
            self.tokens,
            1.0,
            1 / self.first_size,
            self.first_size,
            self.inverse_sizes,
            self.samples,
            self.micro_batches,
        )
        return sent_to(torch.stack([on_device_of(self.small_square, entry) for entry in entries]), device)


@dataclass(frozen=True)
class ClosedNoiseWindow:
    """A step whose numbers, added over ranks, are on their way to the host."""

    numbers: HostCopy  # of `NoiseWindow.numbers`
    big_factor: float  # makes the squared norm of the step that of the mean gradient
    equal_weights: bool  # micro-batches weigh the same, regardless of their size
    sharded: bool  # the small gradient is one of all ranks, in shards; else each rank has its own
    data_ranks: int  # ranks that see different data

    def read(self, big_square: float | None) -> tuple[float, float, float, float, float] | None:
        """Squared norms, inverse sizes, tokens of a sample; None if a norm is not finite or the sizes are equal."""
        small, big, weight, tokens, ranks, first_inverse, first_samples, inverses, samples, micro_batches = (
            self.numbers.read()
        )
        # Ranks that share their data (tensor parallel) have counted it once each.
        sharing = ranks / self.data_ranks
        if self.sharded:
            small *= (ranks / weight) ** 2
            small_inverse = (
                first_inverse / sharing / self.data_ranks**2 if self.equal_weights else sharing / first_samples
            )
        else:
            small, small_inverse = small / ranks, first_inverse / ranks
        # A mean of m means has the variance of one over m^2 sum_i 1 / b_i; one of all samples that of sum_i b_i.
        big_inverse = inverses * sharing / micro_batches**2 if self.equal_weights else sharing / samples
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
