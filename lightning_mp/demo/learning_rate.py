"""The learning rate over a run whose number of optimizer steps is known in advance."""

import math
from collections.abc import Mapping

__all__ = ["count_optimizer_steps", "peak_learning_rate", "warmup_cosine"]


def warmup_cosine(step: int, *, warmup_steps: int, total_steps: int, floor: float = 0.1) -> float:
    """Factor on the peak learning rate: linear warm-up, then half a cosine down to ``floor`` at the last step.

    Loshchilov and Hutter 2017 (arXiv:1608.03983), equation 5, without restarts. The cosine must end where the run
    ends: Hoffmann et al. 2022 (arXiv:2203.15556), appendix B, find that a cycle more than 25% too long clearly hurts.

    Args:
        step: Optimizer steps made so far; the factor is for the next one.
        warmup_steps: Steps until the peak.
        total_steps: Steps of the whole run; the last one has index ``total_steps - 1``.
        floor: Where the cosine ends, as a share of the peak.

    Example:
        >>> [round(warmup_cosine(step, warmup_steps=2, total_steps=5), 2) for step in range(6)]
        [0.5, 1.0, 0.78, 0.33, 0.1, 0.1]
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min(1.0, (step + 1 - warmup_steps) / max(1, total_steps - warmup_steps))
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))


def count_optimizer_steps(micro_batches: int, schedule: Mapping[int, int]) -> int:
    """Optimizer steps that ``micro_batches`` make, the last one perhaps with fewer micro-batches than planned.

    Args:
        micro_batches: Micro-batches of the whole run, per rank.
        schedule: From which optimizer step on how many micro-batches make one step.

    Example:
        >>> count_optimizer_steps(11, {0: 1, 3: 2})  # 1 + 1 + 1 + 2 + 2 + 2 + 2
        7
    """
    steps = 0
    thresholds = sorted(schedule)
    for first_step, end_step in zip(thresholds, [*thresholds[1:], None], strict=True):
        length = schedule[first_step]
        wanted = -(-micro_batches // length)
        made = wanted if end_step is None else min(wanted, end_step - first_step)
        steps += made
        micro_batches -= min(micro_batches, made * length)
    return steps


def peak_learning_rate(parameters: int) -> float:
    """Peak rate for AdamW that falls with the third root of the model size.

    Anchored at 6e-4 for 124M parameters (Brown et al. 2020, arXiv:2005.14165, table 2.1, GPT-3 Small). The exponent
    makes it 6.4e-3 at 0.1M, which ended lower there than 4e-3 and 1e-2. At most 1e-2.

    Example:
        >>> round(peak_learning_rate(124_337_664), 6)
        0.0006
    """
    return min(1e-2, 6e-4 * math.cbrt(124_337_664 / parameters))
