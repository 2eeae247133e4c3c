"""The pipeline bubble: how long stages are idle, and how many micro-batches each keeps meanwhile.

For s stages that take the same time and m micro-batches, with f and b the time of one forward and one backward of one
micro-batch in one stage, GPipe and 1F1B both take (m + s - 1)(f + b), of which a stage works m (f + b). The ratio of
b to f cancels, so recomputing activations leaves both shares as they are.

Two conventions are in use and differ by much when m is small; both are here, under different names::

    bubble_fraction          idle time / time of the step         (s - 1) / (m + s - 1)    GPipe
    bubble_to_ideal_ratio    idle time / time without a bubble    (s - 1) / m              Megatron-LM

Sources: Huang et al. 2019, GPipe, arXiv:1811.06965, section 2.3; Narayanan et al. 2021, Megatron-LM,
arXiv:2104.04473, section 2.2.1. Neither has the time of sending in it, and the optimizer step comes on top.
"""

from typing import Literal

from lightning_mp.core.arguments import whole_number


def bubble_fraction(stages: int, micro_batches: int) -> float:
    """Share of the time of a step in which a stage is idle, under GPipe and under 1F1B.

    The pipeline drains at the end of every batch: what counts is the micro-batches of one call of the schedule.
    Accumulating gradients over more batches leaves the share as it is.

    Args:
        stages: s, of equal work.
        micro_batches: m, into which the schedule splits one batch. Torch's ``Schedule1F1B`` wants at least s.

    Returns:
        (s - 1) / (m + s - 1), from 0 to below 1.

    Raises:
        ValueError: an argument is not a positive integer.

    Source: Huang et al. 2019, arXiv:1811.06965, section 2.3.

    Example:
        With 4 micro-batches per stage, a fifth at most:

        >>> bubble_fraction(2, 8), bubble_fraction(4, 13), round(bubble_fraction(64, 256), 3)
        (0.1111111111111111, 0.1875, 0.197)
    """
    _check(stages, micro_batches)
    return (stages - 1) / (micro_batches + stages - 1)


def bubble_to_ideal_ratio(stages: int, micro_batches: int) -> float:
    """Idle time over the time the step would take without a bubble, as Megatron-LM gives it; can exceed 1.

    A step takes 1 + this ratio times as long as m micro-batches of work. With u this ratio and w
    :func:`bubble_fraction`, w = u / (1 + u).

    Args:
        stages: s, of equal work.
        micro_batches: m, into which the schedule splits one batch.

    Returns:
        (s - 1) / m.

    Raises:
        ValueError: an argument is not a positive integer.

    Source: Narayanan et al. 2021, arXiv:2104.04473, section 2.2.1, t_pb / t_id.

    Example:
        >>> bubble_to_ideal_ratio(4, 12), bubble_fraction(4, 12)
        (0.25, 0.2)
    """
    _check(stages, micro_batches)
    return (stages - 1) / micro_batches


def kept_micro_batches(stages: int, micro_batches: int, stage: int, *, schedule: Literal["1f1b", "gpipe"]) -> int:
    """Micro-batches whose activations a stage holds at most at one time, waiting for their backward.

    GPipe runs every forward first and keeps all m. 1F1B starts the backward of a micro-batch as soon as it comes
    back, so that the first stage keeps s and the last one 1. The bubble is the same: memory is the whole difference.

    Args:
        stages: s.
        micro_batches: m, into which the schedule splits one batch; under 1F1B at least s.
        stage: which stage, 0 to s - 1.
        schedule: "1f1b" or "gpipe".

    Returns:
        m under GPipe, s - stage under 1F1B.

    Raises:
        ValueError: an argument is not as above, or 1F1B has fewer micro-batches than stages, which torch refuses.

    Source: Narayanan et al. 2021, arXiv:2104.04473, section 2.2.1, figures 3 and 4.

    Example:
        >>> [kept_micro_batches(4, 16, stage, schedule="1f1b") for stage in range(4)]
        [4, 3, 2, 1]
        >>> kept_micro_batches(4, 16, 0, schedule="gpipe")
        16
    """
    _check(stages, micro_batches)
    if isinstance(stage, bool) or not isinstance(stage, int) or not 0 <= stage < stages:
        raise ValueError(f"`stage` must be an integer from 0 to {stages - 1} for {stages} stages, got {stage!r}.")
    if schedule not in ("1f1b", "gpipe"):
        raise ValueError(f"Unknown pipeline schedule {schedule!r}. Use '1f1b' or 'gpipe'.")
    if schedule == "gpipe":
        return micro_batches
    if micro_batches < stages:
        raise ValueError(
            f"1F1B needs at least as many `micro_batches` as stages, got {micro_batches} for {stages} stages."
            " Split the batch into more, or use 'gpipe'."
        )
    return stages - stage


def _check(stages: int, micro_batches: int) -> None:
    for name, value in (("stages", stages), ("micro_batches", micro_batches)):
        whole_number(value, name)
