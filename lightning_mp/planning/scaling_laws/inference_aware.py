"""The cheapest model of a given quality when inference is paid for, too.

Sardana et al. 2024 (arXiv:2401.00448), equation 2: of all N and D that reach a loss, those that minimise::

    6 N D_training + 2 N D_inference

Inference of a token costs a forward, 2 N operations. Beyond the models that a law was fitted to, it promises too much
of more tokens (their section 5), so a far smaller and longer trained model is a guess.
"""

import math
from dataclasses import dataclass

from lightning_mp.core.arguments import quantity_from
from lightning_mp.flops.chinchilla import FLOPS_PER_PARAMETER_AND_TOKEN
from lightning_mp.planning.scaling_laws.optimum import minimum
from lightning_mp.planning.scaling_laws.scaling_law import ParametricLaw

_FLOPS_OF_INFERENCE = 2


@dataclass(frozen=True, slots=True)
class InferenceAware:
    """A model of the same loss, and its cost over its lifetime.

    Attributes:
        parameters: N.
        tokens: of training.
        inference_tokens: read and written over the model's life.
        lifetime_flops: of training and inference together.
        lifetime_flops_before: the same for the model that it is compared with.
    """

    parameters: float
    tokens: float
    inference_tokens: float
    lifetime_flops: float
    lifetime_flops_before: float

    @property
    def saving(self) -> float:
        """Share of the lifetime's operations that is saved."""
        return 1 - self.lifetime_flops / self.lifetime_flops_before


def inference_aware_optimum(
    law: ParametricLaw, *, parameters: float | str, tokens: float | str, inference_tokens: float | str
) -> InferenceAware:
    """The cheapest model over its lifetime among those that reach the same loss.

    Args:
        law: with a loss.
        parameters: N of the model to compare with.
        tokens: it is trained on.
        inference_tokens: of the lifetime; 0 gives the optimum of training alone.

    Raises:
        ValueError: a number is not finite, or negative.

    Example:
        The paper's figure 1: 2 trillion tokens of inference. In place of a 13B model train one of 7B on more data; the
        paper says 17%, with rounded constants of the law.

        >>> from lightning_mp.planning.scaling_laws.presets import LAWS
        >>> law = LAWS["hoffmann-3"]
        >>> _, tokens = law.frontier.optimum(law.frontier.flops_for_parameters(13e9))
        >>> best = inference_aware_optimum(law, parameters=13e9, tokens=tokens, inference_tokens=2e12)
        >>> round(best.parameters / 1e9), f"{best.saving:.0%}"
        (7, '16%')
    """
    given, seen = quantity_from(1, parameters, "parameters"), quantity_from(1, tokens, "tokens")
    asked = quantity_from(0, inference_tokens, "inference_tokens")
    loss = law.loss(given, seen)
    # Below this size no number of tokens reaches the loss.
    smallest = (law.A / (loss - law.E)) ** (1 / law.alpha)

    def tokens_of(size: float) -> float:
        return float((law.B / (loss - law.E - law.A * size**-law.alpha)) ** (1 / law.beta))

    def cost(log_excess: float) -> float:
        size = smallest * (1 + math.exp(log_excess))
        training = FLOPS_PER_PARAMETER_AND_TOKEN * size * tokens_of(size)
        return math.log(training + _FLOPS_OF_INFERENCE * size * asked)

    best = smallest * (1 + math.exp(minimum(cost, middle=0.0, reach=math.log(1e6))))
    before = FLOPS_PER_PARAMETER_AND_TOKEN * given * seen + _FLOPS_OF_INFERENCE * given * asked
    return InferenceAware(
        parameters=best,
        tokens=tokens_of(best),
        inference_tokens=asked,
        lifetime_flops=FLOPS_PER_PARAMETER_AND_TOKEN * best * tokens_of(best) + _FLOPS_OF_INFERENCE * best * asked,
        lifetime_flops_before=before,
    )
