"""torchmetrics of mixed-precision training: integer counts, summed over ranks."""

from lightning_mp.monitors.metrics.overflow_rate import OverflowRate, overflow_rate
from lightning_mp.monitors.metrics.token_perplexity import TokenPerplexity, token_perplexity
from lightning_mp.monitors.metrics.underflow_fraction import UnderflowFraction, underflow_fraction

__all__ = [
    "OverflowRate",
    "TokenPerplexity",
    "UnderflowFraction",
    "overflow_rate",
    "token_perplexity",
    "underflow_fraction",
]


def __dir__() -> list[str]:
    return __all__
