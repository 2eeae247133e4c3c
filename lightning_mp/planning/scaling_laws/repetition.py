"""What repeated tokens are worth: the data-constrained scaling law.

A repetition law is any function of (law, parameters, tokens, unique tokens) that returns a loss, so a newer one is a
function of your own, handed to :func:`~lightning_mp.planning.scaling_laws.optimum.compute_optimal`.
"""

import math
from dataclasses import dataclass
from typing import Protocol

from lightning_mp.core.arguments import positive_number
from lightning_mp.planning.scaling_laws.scaling_law import ParametricLaw


class RepetitionLaw(Protocol):
    """Predicted loss when D tokens are drawn from a smaller number of unique ones."""

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

    tokens_decay: float = 15.387756
    """R_D*, repetitions after which a token has lost 1 - 1/e of its worth. Appendix A of the paper."""
    parameters_decay: float = 5.309743
    """R_N*, the same for excess parameters."""

    def __post_init__(self) -> None:
        for name in ("tokens_decay", "parameters_decay"):
            positive_number(getattr(self, name), name)

    def effective_tokens(self, tokens: float, unique_tokens: float) -> float:
        """D', the unique tokens that would be worth as much."""
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
