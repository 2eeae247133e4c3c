"""Scaling laws: how loss depends on parameters N and tokens D, and how N and D should share a compute C = 6 N D.

The parametric law is that of Hoffmann et al. 2022 (arXiv:2203.15556), section 3.3::

    L(N, D) = E + A / N^alpha + B / D^beta

Its minimum under C = 6 N D is a power law (their equation 4)::

    N = G (C / 6)^a,  D = C / (6 N),  a = beta / (alpha + beta),  G = (alpha A / (beta B))^(1 / (alpha + beta))

Some published laws give the power law only, so a law here is one of the two: :class:`ParametricLaw`,
:class:`FrontierLaw`. Both have a :class:`Frontier`.
"""

from dataclasses import dataclass

from lightning_mp.core.arguments import positive_number
from lightning_mp.flops.chinchilla import FLOPS_PER_PARAMETER_AND_TOKEN

FAR_OUTSIDE = 10.0
"""How many times beyond the trained models a prediction may lie before it is warned about."""


@dataclass(frozen=True, slots=True)
class TrainedRange:
    """The models that a law was fitted to. Beyond them it extrapolates."""

    parameters: tuple[float, float]
    """Smallest and largest model."""
    tokens: tuple[float, float]
    """Shortest and longest run."""

    def times_outside(self, parameters: float, tokens: float) -> float:
        """How many times beyond the nearest trained model, in parameters or tokens: 1 inside.

        Example:
            >>> round(TrainedRange((70e6, 16e9), (5e9, 500e9)).times_outside(70e9, 1.4e12), 1)
            4.4
        """
        return max(
            1.0,
            *(
                ratio
                for value, (low, high) in ((parameters, self.parameters), (tokens, self.tokens))
                for ratio in (low / value, value / high)
            ),
        )


@dataclass(frozen=True, slots=True)
class Frontier:
    """The compute-optimal model of every budget: N = coefficient * C^exponent, D = C / (6 N)."""

    coefficient: float
    exponent: float

    def optimum(self, flops: float) -> tuple[float, float]:
        """Parameters and tokens of the best model for a compute budget."""
        parameters = self.coefficient * flops**self.exponent
        return parameters, flops / (FLOPS_PER_PARAMETER_AND_TOKEN * parameters)

    def flops_for_parameters(self, parameters: float) -> float:
        """The budget for which a model of this size is the best one."""
        return float((parameters / self.coefficient) ** (1 / self.exponent))

    def flops_for_tokens(self, tokens: float) -> float:
        """The budget for which this many tokens are the best choice."""
        return float((FLOPS_PER_PARAMETER_AND_TOKEN * tokens * self.coefficient) ** (1 / (1 - self.exponent)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ParametricLaw:
    """L(N, D) = E + A / N^alpha + B / D^beta, loss in nats per token.

    Raises:
        ValueError: A constant is not positive and finite.

    Example:
        Gopher and Chinchilla cost the same compute. The law puts Chinchilla ahead.

        >>> from lightning_mp.planning.scaling_laws.presets import LAWS
        >>> law = LAWS["besiroglu"]
        >>> round(law.loss(280e9, 300e9), 3), round(law.loss(70e9, 1.4e12), 3)  # Gopher, Chinchilla
        (2.0, 1.974)
    """

    name: str
    E: float
    A: float
    B: float
    alpha: float
    beta: float
    source: str
    counts: str
    """Which parameters N counts."""
    trained: TrainedRange

    def __post_init__(self) -> None:
        for field in ("E", "A", "B", "alpha", "beta"):
            positive_number(getattr(self, field), field, type(self).__name__)

    def loss(self, parameters: float, tokens: float) -> float:
        """Predicted loss of a model of N parameters trained on D tokens, none of them repeated."""
        return float(self.E + self.A * parameters**-self.alpha + self.B * tokens**-self.beta)

    @property
    def frontier(self) -> Frontier:
        """The minimum of the loss under C = 6 N D."""
        exponents = self.alpha + self.beta
        share = self.beta / exponents
        scale = (self.alpha * self.A / (self.beta * self.B)) ** (1 / exponents)
        return Frontier(scale * FLOPS_PER_PARAMETER_AND_TOKEN**-share, share)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierLaw:
    """A published frontier N = k C^a without a loss."""

    name: str
    frontier: Frontier
    source: str
    counts: str
    """Which parameters N counts."""
    trained: TrainedRange


ScalingLaw = ParametricLaw | FrontierLaw
