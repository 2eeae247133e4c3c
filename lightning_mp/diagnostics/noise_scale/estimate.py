r"""The gradient noise scale: how large a batch is worth its price, from norms of gradients of two sizes.

McCandlish, Kaplan, Amodei et al. 2018, "An Empirical Model of Large-Batch Training", equation 2.9:

.. math:: B_{simple} = \operatorname{tr}(\Sigma) / |G|^2

with the true gradient :math:`G` and the covariance :math:`\Sigma` of one sample's gradient. A gradient that is the mean
over :math:`B` samples has :math:`E|g_B|^2 = |G|^2 + \operatorname{tr}(\Sigma) / B`, so two sizes give both numbers
without bias (appendix A.1). Each is averaged by itself, and the ratio comes last: the mean of ratios would be far off.
"""

import math
from dataclasses import dataclass
from typing import Any

from lightning_mp.core.saved_state import AMOUNT, COUNT, NUMBER, checked_state, listed_of

_STANDARD_ERRORS = 1.96


def unbiased_estimates(
    small_square_norm: float, big_square_norm: float, small_inverse_size: float, big_inverse_size: float
) -> tuple[float, float]:
    r"""Unbiased estimates of :math:`|G|^2` and :math:`\operatorname{tr}(\Sigma)` (McCandlish et al. 2018, A.1).

    >>> unbiased_estimates(3.0, 1.5, 1 / 4, 1 / 16)  # |G|^2 = 1 and trace = 8: 1 + 8 / 4 and 1 + 8 / 16
    (1.0, 8.0)
    """
    difference = small_inverse_size - big_inverse_size
    if not difference > 0:
        raise ValueError(
            f"The smaller batch must be smaller: got one over {1 / small_inverse_size:g} and {1 / big_inverse_size:g}"
            " samples."
        )
    trace = (small_square_norm - big_square_norm) / difference
    square = (small_inverse_size * big_square_norm - big_inverse_size * small_square_norm) / difference
    return square, trace


@dataclass(frozen=True)
class NoiseScale:
    r"""An estimate of :math:`B_{simple}`, in samples.

    Attributes:
        samples: the estimate.
        low: lower end of its 95% confidence interval; 0 if it has no positive lower end.
        high: upper end; infinite while :math:`|G|^2` cannot be told from zero.
        batch_samples: samples per optimizer step in training.
        tokens_per_sample: mean target tokens per sample; 0 if tokens are not counted.
        windows: optimizer steps that the estimate uses.
    """

    samples: float
    low: float
    high: float
    batch_samples: float
    tokens_per_sample: float
    windows: int

    @property
    def tokens(self) -> float:
        """The estimate in tokens; 0 where tokens are not counted."""
        return self.samples * self.tokens_per_sample

    @property
    def efficiency(self) -> float:
        """Progress of a step compared to the best step that any batch allows, ``1 / (1 + scale / batch)`` (eq. 2.6)."""
        return 1 / (1 + self.samples / self.batch_samples)

    def __str__(self) -> str:
        high = f"{self.high:,.0f}" if math.isfinite(self.high) else "no upper end yet"
        tokens = f", {self.tokens:,.0f} tokens" if self.tokens else ""
        return (
            f"gradient noise scale {self.samples:,.0f} samples (95%: {self.low:,.0f} to {high}){tokens}, from"
            f" {self.windows} steps. A batch of that size takes twice the fewest steps and twice the fewest samples;"
            f" at {self.batch_samples:,.0f} samples a step makes {self.efficiency:.0%} of the best progress. Right"
            " within a factor of about two."
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
        self._weight = 0.0
        self._square_weight = 0.0
        # |G|^2, trace, their squares and product, samples of a batch, tokens of a sample
        self._sums = [0.0] * 7

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
        self._sums = [decay * before + value for before, value in zip(self._sums, new, strict=True)]
        self._weight = decay * self._weight + 1
        self._square_weight = decay**2 * self._square_weight + 1
        self.windows += 1

    def estimate(self) -> NoiseScale | None:
        r"""The ratio of the averages; None for fewer than two windows, or while an average is not positive."""
        if self.windows < 2:
            return None
        square, trace, square_2, trace_2, product, batch_samples, tokens = (s / self._weight for s in self._sums)
        if square <= 0 or trace <= 0:
            return None
        # Variance of a weighted mean: scatter * sum w^2 / (sum w)^2, and Bessel's correction for weights.
        share = self._square_weight / self._weight**2
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
        return {
            "windows": self.windows,
            "weight": self._weight,
            "square_weight": self._square_weight,
            "sums": list(self._sums),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from saved averages."""
        kinds = {
            "windows": COUNT,
            "weight": AMOUNT,
            "square_weight": AMOUNT,
            "sums": listed_of(NUMBER, len(self._sums)),
        }
        state = checked_state(state, kinds, "the gradient noise scale")
        self.windows = state["windows"]
        self._weight = state["weight"]
        self._square_weight = state["square_weight"]
        self._sums = list(state["sums"])


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
