"""What expert parallelism sends: tokens to the ranks of their experts and back.

Each block of a mixture dispatches every token to the ranks of its experts and combines what comes back: two all-to-alls
in forward, and two in backward for their gradients. A checkpointed block dispatches and combines again. Tokens are
taken to be shared out evenly; an uneven router makes the busiest rank send more.
"""

from dataclasses import dataclass

from lightning_mp.core.arguments import whole_number
from lightning_mp.planning.parallelism.collectives import Transfer

__all__ = ["ExpertTraffic", "token_transfers"]

_FORWARD, _BACKWARD = 2, 2


@dataclass(frozen=True, slots=True)
class ExpertTraffic:
    """Experts of each block, and over how many data ranks they are divided.

    Attributes:
        ranks: neighbours among the data ranks, each with a part of the experts.
        weights: of all experts of one block.
        active: experts that one token meets.

    Raises:
        ValueError: a number is not positive.
    """

    ranks: int
    weights: int
    active: int

    def __post_init__(self) -> None:
        for name in self.__slots__:
            whole_number(getattr(self, name), name, "ExpertTraffic")


def token_transfers(
    experts: ExpertTraffic, *, layers: int, width: int, tokens: int, itemsize: int, stride: int, recomputed: bool
) -> Transfer:
    """Every all-to-all of one micro-batch.

    Args:
        experts: whose tokens they are.
        layers: blocks of a mixture on this rank.
        width: of the residual stream.
        tokens: of one data rank.
        itemsize: bytes of one number of the products.
        stride: how far apart data ranks are.
        recomputed: blocks run again in backward.

    Source:
        Lepikhin et al. 2020, arXiv:2006.16668, section 3.2 (dispatch and combine); Rajbhandari et al. 2022,
        arXiv:2201.05596 (with data parallelism).

    Example:
        Each of 4,096 tokens goes to 2 experts on other ranks and comes back:

        >>> mixture = ExpertTraffic(ranks=8, weights=8 * 176_160_768, active=2)
        >>> shape = {"layers": 32, "width": 4096, "tokens": 4096, "itemsize": 2, "stride": 1}
        >>> tokens = token_transfers(mixture, **shape, recomputed=False)
        >>> tokens.count, tokens.payload_bytes == 4096 * 2 * 4096 * 2
        (128, True)
    """
    times = _FORWARD * (2 if recomputed else 1) + _BACKWARD
    payload = tokens * experts.active * width * itemsize
    return Transfer("tokens to experts and back", "all_to_all", payload, experts.ranks, layers * times, stride, True)
