"""The pipeline bubble: how long stages are idle."""

from lightning_mp.core.arguments import whole_number


def bubble_fraction(stages: int, micro_batches: int) -> float:
    """Share of a step's time in which a stage is idle, under GPipe and 1F1B.

    With f and b the time of one forward and one backward of one micro-batch in one stage, both take (m + s - 1)(f + b),
    of which a stage works m (f + b). The pipeline drains at the end of every batch: what counts is the micro-batches of
    one call of the schedule. Megatron-LM divides by the time without a bubble instead: (s - 1) / m.

    Args:
        stages: s, of equal work.
        micro_batches: m, into which the schedule splits one batch. Torch's ``Schedule1F1B`` needs at least s.

    Returns:
        (s - 1) / (m + s - 1), from 0 to below 1; without the time of sending and of the optimizer step.

    Raises:
        ValueError: an argument is not a positive integer.

    Source: Huang et al. 2019, GPipe, arXiv:1811.06965, section 2.3.

    Example:
        With 4 micro-batches per stage, a fifth at most:

        >>> bubble_fraction(2, 8), bubble_fraction(4, 13), round(bubble_fraction(64, 256), 3)
        (0.1111111111111111, 0.1875, 0.197)
    """
    for name, value in (("stages", stages), ("micro_batches", micro_batches)):
        whole_number(value, name)
    return (stages - 1) / (micro_batches + stages - 1)
