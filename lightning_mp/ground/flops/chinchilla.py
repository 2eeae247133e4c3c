"""The rule of thumb of compute-optimal training: about 20 tokens per parameter, C = 6 N D.

Hoffmann et al. 2022, "Training Compute-Optimal Large Language Models" (arXiv:2203.15556): in Table 3 the optimal
number of tokens stays between 20.0 and 21.6 per parameter from 400 million to 10 trillion parameters.
"""

from lightning_mp.ground.core.arguments import positive_quantity
from lightning_mp.ground.core.quantities import Quantity

TOKENS_PER_PARAMETER = 20
"""Hoffmann et al. 2022, Table 3 (Approach 1), rounded."""

FLOPS_PER_PARAMETER_AND_TOKEN = 6
"""2 forward and 4 backward: Kaplan et al. 2020 (arXiv:2001.08361), section 2.1."""


def tokens_for(parameters: Quantity, tokens_per_parameter: Quantity = TOKENS_PER_PARAMETER) -> int:
    """Training tokens that match a model size under the rule of a fixed ratio.

    Args:
        parameters: Number of parameters N, such as 7e9 or "7B". Hoffmann et al. count all of them, embeddings included.
        tokens_per_parameter: The ratio D / N.

    Returns:
        D in tokens, rounded to the nearest integer.

    Raises:
        ValueError: An argument is not positive and finite, or the product rounds to zero.

    Example:
        Chinchilla follows the rule. GPT-3 was trained on 300 billion tokens, a twelfth of it.

        >>> tokens_for(70e9)
        1400000000000
        >>> gpt3_parameters, gpt3_tokens = 175e9, 300e9
        >>> round(gpt3_tokens / gpt3_parameters, 1)
        1.7
        >>> round(tokens_for(gpt3_parameters) / gpt3_tokens, 1)
        11.7
    """
    number = positive_quantity(parameters, "parameters")
    ratio = positive_quantity(tokens_per_parameter, "tokens_per_parameter")
    tokens = round(number * ratio)
    if tokens < 1:
        raise ValueError(
            f"{number:g} parameters times {ratio:g} tokens per parameter is less than one token. "
            "Pass a larger `tokens_per_parameter`."
        )
    return tokens


def training_flops(parameters: Quantity, tokens: Quantity) -> float:
    """Training compute C = 6 N D, without attention scores.

    Args:
        parameters: Number of parameters N.
        tokens: Number of training tokens D.

    Raises:
        ValueError: An argument is not positive and finite.

    Example:
        GPT-3 took 3.14e23 FLOPs (Brown et al. 2020, arXiv:2005.14165, Table D.1); 6 N D agrees to within 1%.

        >>> f"{training_flops(174_600e6, 300e9):.2e}"
        '3.14e+23'
    """
    number, seen = positive_quantity(parameters, "parameters"), positive_quantity(tokens, "tokens")
    return FLOPS_PER_PARAMETER_AND_TOKEN * float(number) * float(seen)
