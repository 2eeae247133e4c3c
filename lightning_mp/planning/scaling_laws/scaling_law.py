"""Scaling laws: how the loss depends on parameters N and tokens D, and how to split compute C = 6 N D between them.

The parametric law is that of Hoffmann et al. 2022 (arXiv:2203.15556), section 3.3::

    L(N, D) = E + A / N^alpha + B / D^beta

Its minimum under C = 6 N D is a power law (their equation 4)::

    N = G (C / 6)^a,  D = C / (6 N),  a = beta / (alpha + beta),  G = (alpha A / (beta B))^(1 / (alpha + beta))

Some published laws give the power law only, so a law here is one of the two: :class:`ParametricLaw`,
:class:`FrontierLaw`. Both have a :class:`Frontier`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from typing_extensions import override

from lightning_mp.ground.core.arguments import positive_number
from lightning_mp.ground.core.quantities import format_quantity
from lightning_mp.ground.flops.chinchilla import FLOPS_PER_PARAMETER_AND_TOKEN, TOKENS_PER_PARAMETER

FAR_OUTSIDE = 10.0
"""How many times beyond the trained models a prediction may lie before it is warned about."""


@dataclass(frozen=True, slots=True)
class TrainedRange:
    """The models that a law was fitted to. Beyond them it extrapolates."""

    parameters: tuple[float, float]  #: Smallest and largest model.
    tokens: tuple[float, float]  #: Shortest and longest run.

    @override
    def __str__(self) -> str:
        (small, large), (short, long) = [tuple(map(format_quantity, ends)) for ends in (self.parameters, self.tokens)]
        return f"{small} to {large} parameters, {short} to {long} tokens"

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
        """Parameters and tokens of the optimal model for a compute budget."""
        parameters = self.coefficient * flops**self.exponent
        return parameters, flops / (FLOPS_PER_PARAMETER_AND_TOKEN * parameters)

    def flops_for_parameters(self, parameters: float) -> float:
        """The budget for which a model of this size is optimal."""
        return float((parameters / self.coefficient) ** (1 / self.exponent))

    def flops_for_tokens(self, tokens: float) -> float:
        """The budget for which this many tokens are optimal."""
        return float((FLOPS_PER_PARAMETER_AND_TOKEN * tokens * self.coefficient) ** (1 / (1 - self.exponent)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ParametricLaw:
    """L(N, D) = E + A / N^alpha + B / D^beta, loss in nats per token.

    Raises:
        ValueError: A constant is not positive and finite.

    Example:
        Gopher and Chinchilla cost the same compute. The law puts Chinchilla ahead.

        >>> from lightning_mp.planning.scaling_laws.scaling_law import LAWS
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
    counts: str  #: Which parameters N counts.
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
    counts: str  #: Which parameters N counts.
    trained: TrainedRange


ScalingLaw = ParametricLaw | FrontierLaw


PETAFLOP_DAY_FLOPS = 8.64e19
"""One PF-day, the unit of compute in Kaplan et al. 2020: 1e15 FLOP/s for 86,400 s."""

DEFAULT_LAW = "besiroglu"
"""The preset used where none is named: it agrees with Approaches 1 and 2 of Hoffmann et al., and predicts a loss."""

_ALL = "all parameters"
# Abstract: "70 million to over 16 billion parameters on 5 to 500 billion tokens".
_CHINCHILLA_RUNS = TrainedRange(parameters=(70e6, 16e9), tokens=(5e9, 500e9))
_HOFFMANN = "Hoffmann et al. 2022, arXiv:2203.15556"

LAWS: Mapping[str, ScalingLaw] = MappingProxyType(
    {
        law.name: law
        for law in (
            FrontierLaw(
                name="hoffmann-1",
                frontier=Frontier(coefficient=0.09929, exponent=0.4981),
                source=f"{_HOFFMANN}, Table 3 (Approach 1, minima over training curves)",
                counts=_ALL,
                trained=_CHINCHILLA_RUNS,
            ),
            FrontierLaw(
                name="hoffmann-2",
                frontier=Frontier(coefficient=0.14591, exponent=0.48988),
                source=f"{_HOFFMANN}, Table A3 (Approach 2, isoFLOP profiles)",
                counts=_ALL,
                trained=_CHINCHILLA_RUNS,
            ),
            ParametricLaw(
                name="hoffmann-3",
                E=math.exp(0.5267228),
                A=math.exp(6.0073404),
                B=math.exp(6.0179186),
                alpha=0.33917084,
                beta=0.2849083,
                source=f"{_HOFFMANN}, section 3.3 and its TeX source (Approach 3, unrounded)",
                counts=_ALL,
                trained=_CHINCHILLA_RUNS,
            ),
            ParametricLaw(
                name="besiroglu",
                E=1.8172,
                A=482.01,
                B=2085.43,
                alpha=0.3478,
                beta=0.3658,
                source="Besiroglu et al. 2024, arXiv:2404.10102, Table 1 (Approach 3 refitted to 240 of the runs)",
                counts=_ALL,
                trained=_CHINCHILLA_RUNS,
            ),
            ParametricLaw(
                name="muennighoff",
                E=math.exp(0.6254804),
                A=math.exp(6.255414),
                B=math.exp(7.3049974),
                alpha=0.3526596,
                beta=0.3526596,
                source="Muennighoff et al. 2023, arXiv:2305.16264, appendix A (C4, alpha = beta)",
                counts=_ALL,
                # Appendix A: 7M to 9B parameters; 100M unique tokens is the smallest data budget, 900B the most seen.
                trained=TrainedRange(parameters=(7e6, 9e9), tokens=(100e6, 900e9)),
            ),
            FrontierLaw(
                name="rule-of-20",
                frontier=Frontier((FLOPS_PER_PARAMETER_AND_TOKEN * TOKENS_PER_PARAMETER) ** -0.5, 0.5),
                source=f"20 tokens per parameter, C = 120 N^2: {_HOFFMANN}, Table 3, rounded",
                counts=_ALL,
                trained=_CHINCHILLA_RUNS,
            ),
            FrontierLaw(
                name="kaplan",
                # C_min of Table 6 is the compute at small batches, half of what a run at the critical batch size
                # takes. Read so, it gives the 4.68B at 1e21 FLOPs that Hoffmann et al. quote (appendix D.4).
                frontier=Frontier(1.3e9 * (0.5 / PETAFLOP_DAY_FLOPS) ** 0.73, 0.73),
                source="Kaplan et al. 2020, arXiv:2001.08361, Table 6 (superseded: one schedule for all run lengths)",
                counts="all but embeddings",
                trained=TrainedRange(parameters=(768, 1.5e9), tokens=(22e6, 23e9)),
            ),
        )
    }
)
"""Published laws by name, each with its source, the parameters it counts and the models it was fitted to.

What the papers print does not always agree with itself. Three things to know about Hoffmann et al. 2022:

- Approaches 1 and 2 are printed as tables (Table 3 and Table A3), not as constants. One power law each reproduces
  every row to all printed digits, except the row of 67 billion parameters, in which N, C and D contradict each other
  (6 N D is 5% above the C of Approach 1). The constants here are those of that power law. They also give the 2.86
  billion parameters at 1e21 FLOPs that appendix D.4 quotes for Approach 1.
- The constants of Approach 3 are rounded in the text (alpha 0.34, beta 0.28). The rounded ones move the optimum of a
  10B model by 60% in compute, so the unrounded ones of the TeX source are used. Table A3 was made with yet others
  (a power law of exponent 0.459 where these constants give 0.457): its FLOPs lie 2 to 16% below these constants.
- Misprints in the column of Approach 3: 1.26e24 FLOPs for 175 billion parameters and 12.0 trillion tokens, where
  6 N D is 1.26e25; 20.1 trillion tokens for 280 billion parameters, where C / 6 N is 20.9.
"""


def find_law(law: str | ScalingLaw) -> ScalingLaw:
    """A preset by its name; a law is returned as it is."""
    if not isinstance(law, str):
        return law
    if law not in LAWS:
        raise ValueError(f"Unknown scaling law {law!r}. Use one of {', '.join(LAWS)}, or a ParametricLaw of your own.")
    return LAWS[law]


def with_loss(law: ScalingLaw, name: str) -> ParametricLaw:
    """The law, for the argument ``name``, which needs one that predicts a loss."""
    if isinstance(law, ParametricLaw):
        return law
    known = ", ".join(each for each, row in LAWS.items() if isinstance(row, ParametricLaw))
    raise ValueError(f"`{name}` needs a law that predicts a loss, which {law.name!r} does not. Use one of {known}.")


class RepetitionLaw(Protocol):
    """Predicted loss when D tokens are drawn from fewer unique ones; any function with this signature works."""

    def __call__(self, law: ParametricLaw, parameters: float, tokens: float, unique_tokens: float) -> float:
        """The loss in nats per token. Must equal ``law.loss`` at the law's own optimum when nothing is repeated."""


@dataclass(frozen=True, slots=True)
class ExponentialDecay:
    """Each repetition is worth less than the one before; so is each parameter beyond what the unique data can feed.

    Muennighoff et al. 2023 (arXiv:2305.16264), section 3, equations 5 and 6::

        D' = U_D + U_D R_D* (1 - exp(-R_D / R_D*)),  R_D = D / U_D - 1,  U_D = min(unique tokens, D)
        N' = U_N + U_N R_N* (1 - exp(-R_N / R_N*)),  R_N = N / U_N - 1,  U_N = min(optimal parameters for U_D, N)
        L  = E + A / N'^alpha + B / D'^beta

    A model larger than is optimal for its tokens has excess parameters even in its first epoch, so there the loss lies
    a little above ``law.loss``. The constants were fitted to 182 runs of 1 to 500 epochs, all with dropout and weight
    decay of 0.1. The form only saturates: it cannot say that more epochs make a model worse.

    Raises:
        ValueError: A constant is not positive and finite.

    Example:
        Four epochs are worth nearly four times the data, a hundred epochs no more than 16 times.

        >>> decay = ExponentialDecay()
        >>> round(decay.effective_tokens(4e9, 1e9) / 1e9, 2), round(decay.effective_tokens(100e9, 1e9) / 1e9, 2)
        (3.73, 16.36)
    """

    #: R_D*, repetitions after which a token has lost 1 - 1/e of its worth. Appendix A of the paper.
    tokens_decay: float = 15.387756
    parameters_decay: float = 5.309743  #: R_N*, the same for excess parameters.

    def __post_init__(self) -> None:
        for name in ("tokens_decay", "parameters_decay"):
            positive_number(getattr(self, name), name)

    def effective_tokens(self, tokens: float, unique_tokens: float) -> float:
        """D', the number of unique tokens with the same value."""
        return _saturating(tokens, unique_tokens, self.tokens_decay)

    def value_of_next_token(self, tokens: float, unique_tokens: float) -> float:
        """What one more token adds, in new ones: 1 in the first epoch, 1/e after R_D* repetitions.

        Example:
            >>> decay = ExponentialDecay()
            >>> [round(decay.value_of_next_token(epochs * 1e9, 1e9), 2) for epochs in (1, 4, 16, 40)]
            [1.0, 0.82, 0.38, 0.08]
        """
        return math.exp(-max(0.0, tokens / unique_tokens - 1) / self.tokens_decay)

    def epochs_until_worth(self, share: float) -> float:
        """After how many epochs one more token adds no more than this share of a new one.

        Example:
            >>> round(ExponentialDecay().epochs_until_worth(0.1), 1)
            36.4
        """
        return 1 - self.tokens_decay * math.log(share)

    def __call__(self, law: ParametricLaw, parameters: float, tokens: float, unique_tokens: float) -> float:
        """The loss in nats per token."""
        frontier = law.frontier
        fed_parameters, _ = frontier.optimum(frontier.flops_for_tokens(min(unique_tokens, tokens)))
        return law.loss(
            parameters=_saturating(parameters, fed_parameters, self.parameters_decay),
            tokens=self.effective_tokens(tokens, unique_tokens),
        )


def _saturating(amount: float, full_worth: float, decay: float) -> float:
    if amount <= full_worth:
        return amount
    repetitions = amount / full_worth - 1
    return full_worth * (1 - decay * math.expm1(-repetitions / decay))


MUENNIGHOFF_2023 = ExponentialDecay()
"""The published constants."""
