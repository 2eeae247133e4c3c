"""Where a list of layers is split into stages: into parts of about equal cost, or before the layers that are named."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from lightning_mp.core.messages import listed

_OWNER = "PipelineParallelStrategy"


def balanced_split_points(costs: Sequence[float], stages: int) -> list[int]:
    r"""First layers of the stages, so that the most costly stage is as cheap as can be.

    .. math:: \min_{0 = c_0 < c_1 < \dots < c_s = n} \; \max_j \; \sum_{c_j \le i < c_{j+1}} \text{cost}_i

    by dynamic programming over the first layers and stages, in :math:`O(n^2 s)`. All stages wait for the slowest one.

    >>> balanced_split_points([4, 1, 1, 1, 1, 4], 3)
    [0, 1, 5]
    """
    if len(costs) < stages:
        raise ValueError(
            f"{_OWNER}: {len(costs)} layers cannot be split into {stages} stages. Use fewer stages, or return more and"
            " smaller layers from pipeline_layers."
        )
    until = [0.0]
    for cost in costs:
        until.append(until[-1] + cost)
    best = [(until[end], [0]) for end in range(len(costs) + 1)]
    for stage in range(1, stages):
        longer = list(best)
        for end in range(stage + 1, len(costs) + 1):
            longer[end] = min(
                (max(best[split][0], until[end] - until[split]), [*best[split][1], split])
                for split in range(stage, end)
            )
        best = longer
    return best[len(costs)][1]


def named_split_points(layer_names: Sequence[str], split_points: Sequence[str], stages: int) -> list[int]:
    """First layers of the stages, as they are named.

    >>> named_split_points(["embed", "blocks.0", "blocks.1", "head"], ["blocks.1"], 2)
    [0, 2]
    """
    if len(split_points) != stages - 1:
        raise ValueError(
            f"{_OWNER}(split_points={list(split_points)!r}): {stages} stages need {stages - 1} split points,"
            f" got {len(split_points)}. Name the layer that begins each stage but the first."
        )
    splits = [0]
    for name in split_points:
        found = [index for index, layer in enumerate(layer_names) if fnmatchcase(layer, name)]
        if len(found) != 1 or found[0] <= splits[-1]:
            raise ValueError(
                f"{_OWNER}(split_points=...): {name!r} "
                + (
                    f"fits {len(found)} layers, and it must be one"
                    if len(found) != 1
                    else "does not come after the split before it, or is the first layer of all"
                )
                + f". Layers in order: {listed(layer_names, most=12)}."
            )
        splits.append(found[0])
    return splits
