"""Published scaling laws by name, each with its source, the parameters it counts and the models it was fitted to.

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

import math
from collections.abc import Mapping
from types import MappingProxyType

from lightning_mp.flops.chinchilla import FLOPS_PER_PARAMETER_AND_TOKEN, TOKENS_PER_PARAMETER
from lightning_mp.planning.scaling_laws.scaling_law import (
    Frontier,
    FrontierLaw,
    ParametricLaw,
    ScalingLaw,
    TrainedRange,
)

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
"""Every preset by name."""


def find_law(law: str | ScalingLaw) -> ScalingLaw:
    """A preset by its name; a law is returned as it is."""
    if not isinstance(law, str):
        return law
    if law not in LAWS:
        raise ValueError(f"Unknown scaling law {law!r}. Use one of {', '.join(LAWS)}, or a ParametricLaw of your own.")
    return LAWS[law]
