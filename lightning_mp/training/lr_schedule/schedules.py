"""Learning-rate schedules as pure functions of the fraction of a token budget that is spent.

A schedule is any function from that fraction, 0 to 1, to a factor of the peak learning rate. It depends on neither
tokens nor steps, so one schedule works for every budget, batch size and accumulation. :class:`Course` tracks the
progress of a run.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from lightning_mp.ground.core.known_words import refuse_unknown

#: From the fraction of the budget that is spent to the factor of the peak learning rate.
TokenSchedule = Callable[[float], float]

CooldownShape = Literal["linear", "1-sqrt", "cosine"]

_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda u: 1.0 - u,
    # Haegele et al. 2024, equation 3
    "1-sqrt": lambda u: 1.0 - math.sqrt(u),
    "cosine": lambda u: 0.5 * (1.0 + math.cos(math.pi * u)),
}

#: Names of the shapes.
COOLDOWN_SHAPES = tuple(_SHAPES)


@dataclass(frozen=True)
class Cooldown:
    """Falls from ``start`` at fraction 0 to ``final`` at fraction 1.

    With ``u`` the fraction, "linear" is ``1 - u``, "1-sqrt" is ``1 - sqrt(u)`` and "cosine" is ``(1 + cos(pi u)) / 2``,
    each stretched to end at ``final``.

    >>> [Cooldown(0.8, 0.0, "1-sqrt")(u) for u in (0, 0.25, 1)]
    [0.8, 0.4, 0.0]
    """

    start: float = 1.0
    final: float = 0.0
    shape: CooldownShape = "1-sqrt"

    def __post_init__(self) -> None:
        _check(self, "start", high=math.inf)
        _check(self, "final")
        _check_shape(self, self.shape)

    def __call__(self, fraction: float) -> float:
        """The factor after this fraction."""
        final = min(self.final, self.start)
        if fraction >= 1:
            return final
        return final + (self.start - final) * _SHAPES[self.shape](max(fraction, 0.0))


@dataclass(frozen=True)
class WarmupStableDecay:
    """Linear warmup, constant rate, and a cooldown over the last part of the budget (WSD).

    .. code-block:: text

        factor = start + (1 - start) * f / warmup                        f < warmup
                 1                                                       f < 1 - decay
                 final + (1 - final) * shape((f - 1 + decay) / decay)    up to 1, where it is `final`

    Between warmup and cooldown the rate is constant, so the length of the run can still be changed.

    Args:
        warmup: share of the budget over which the rate rises in a straight line; 0 for none.
        decay: share of the budget over which the rate falls at the end.
        shape: shape of the cooldown, see :class:`Cooldown`.
        final: factor of the peak rate at the end.
        start: factor of the first step. With 0 the first step changes nothing.

    Raises:
        ValueError: if an argument is not valid.

    References:
        Hu et al., "MiniCPM: Unveiling the Potential of Small Language Models with Scalable Training Strategies", 2024,
        section 4, https://arxiv.org/abs/2404.06395 (the schedule); Haegele et al., "Scaling Laws and Compute-Optimal
        Training Beyond Fixed Training Durations", 2024, section 3, https://arxiv.org/abs/2405.18392 (the shape
        ``1 - sqrt``, a cooldown over 20% of the run).

    Example:
        >>> schedule = WarmupStableDecay(warmup=0.1, decay=0.2, shape="linear")
        >>> [round(schedule(f), 3) for f in (0, 0.05, 0.1, 0.5, 0.8, 0.9, 1)]
        [0.0, 0.5, 1.0, 1.0, 1.0, 0.5, 0.0]
    """

    warmup: float = 0.01
    decay: float = 0.2
    shape: CooldownShape = "1-sqrt"
    final: float = 0.0
    start: float = 0.0

    def __post_init__(self) -> None:
        for name in ("warmup", "decay", "final", "start"):
            _check(self, name)
        _check_shape(self, self.shape)
        if self.decay == 0 or self.warmup + self.decay > 1:
            raise ValueError(
                f"WarmupStableDecay(warmup={self.warmup!r}, decay={self.decay!r}): decay must be above 0, and both are"
                " shares of one budget, so they add up to 1 at most. Take for instance warmup=0.01, decay=0.2."
            )

    def __call__(self, fraction: float) -> float:
        """The factor after this fraction."""
        if fraction < self.warmup:
            return _rise(self.start, fraction / self.warmup)
        if fraction <= 1 - self.decay:
            return 1.0
        into_decay = (fraction - (1 - self.decay)) / self.decay
        return Cooldown(1.0, self.final, self.shape)(1.0 if fraction >= 1 else into_decay)


@dataclass(frozen=True)
class WarmupCosine:
    """Linear warmup, then half a cosine that ends with the budget.

    .. code-block:: text

        factor = start + (1 - start) * f / warmup                                          f < warmup
                 final + (1 - final) * (1 + cos(pi * (f - warmup) / (1 - warmup))) / 2     up to 1

    Args:
        warmup: share of the budget over which the rate rises in a straight line; 0 for none.
        final: factor of the peak rate at the end.
        start: factor of the first step. With 0 the first step changes nothing.

    Raises:
        ValueError: if an argument is not valid.

    References:
        Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", 2017, equation 5,
        https://arxiv.org/abs/1608.03983; one cycle as long as the run, down to a tenth: Hoffmann et al., "Training
        Compute-Optimal Large Language Models", 2022, appendix B, https://arxiv.org/abs/2203.15556

    Example:
        >>> llama = WarmupCosine(warmup=2000 * 4e6 / 2e12, final=0.1)  # 2,000 of 500,000 steps with 4M tokens each
        >>> [round(3e-4 * llama(tokens / 2e12), 7) for tokens in (0, 4e9, 8e9, 1.004e12, 2e12)]
        [0.0, 0.00015, 0.0003, 0.000165, 3e-05]
    """

    warmup: float = 0.01
    final: float = 0.1
    start: float = 0.0

    def __post_init__(self) -> None:
        for name in ("warmup", "final", "start"):
            _check(self, name)
        if self.warmup == 1:
            raise ValueError("WarmupCosine(warmup=1) leaves nothing for the cosine; take for instance warmup=0.01.")

    def __call__(self, fraction: float) -> float:
        """The factor after this fraction."""
        if fraction < self.warmup:
            return _rise(self.start, fraction / self.warmup)
        return Cooldown(1.0, self.final, "cosine")((fraction - self.warmup) / (1 - self.warmup))


@dataclass(frozen=True)
class Course:
    """Maps the number of trained tokens to the fraction of the schedule."""

    from_tokens: int
    end_tokens: int
    from_fraction: float = 0.0

    def fraction(self, tokens: int) -> float:
        """The fraction after ``tokens``; never above 1."""
        if tokens >= self.end_tokens:
            return 1.0
        way = (tokens - self.from_tokens) / (self.end_tokens - self.from_tokens)
        return self.from_fraction + (1.0 - self.from_fraction) * way

    def shortened(self, tokens: int, by_tokens: int) -> "Course":
        """The course after ``tokens``, for a run that ends ``by_tokens`` earlier than planned."""
        return Course(tokens, self.end_tokens - by_tokens, self.fraction(tokens))


def check_schedule(schedule: TokenSchedule) -> TokenSchedule:
    """The schedule, if it is one."""
    if not callable(schedule):
        raise ValueError(
            f"TokenLearningRate(schedule={schedule!r}): it must be a WarmupStableDecay, a WarmupCosine, or a function"
            " from the fraction of the horizon that is spent to a factor of the learning rate."
        )
    if isinstance(schedule, type):
        name = schedule.__name__
        raise ValueError(f"TokenLearningRate(schedule={name}): {name} is a class. Make an instance: {name}().")
    for fraction in (0.0, 0.5, 1.0):
        factor = schedule(fraction)
        if not isinstance(factor, int | float) or not 0 <= factor < math.inf:
            raise ValueError(
                f"TokenLearningRate(schedule={schedule!r}): it gives {factor!r} for the fraction {fraction:g}; it must"
                " give a finite number from 0."
            )
    return schedule


def _rise(start: float, way: float) -> float:
    return start + (1.0 - start) * max(way, 0.0)


def _check(schedule: object, name: str, high: float = 1.0) -> None:
    value = getattr(schedule, name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= high or value == math.inf:
        allowed = "from 0 to 1" if high == 1 else "from 0"
        raise ValueError(f"{type(schedule).__name__}({name}={value!r}): it must be a number {allowed}.")


def _check_shape(schedule: object, shape: str) -> None:
    refuse_unknown(shape, "shape", type(schedule).__name__, COOLDOWN_SHAPES)
