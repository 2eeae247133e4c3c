"""What one collective operation sends, over which links.

Convention of every figure: bytes that one GPU sends (it receives as many), by the algorithms that send least. With S
the bytes of the whole tensor and n ranks::

    all-gather, reduce-scatter    (n - 1) / n S
    all-reduce                  2 (n - 1) / n S      a reduce-scatter and an all-gather
    all-to-all                    (n - 1) / n S      S is what one rank has for all of them, in equal shares
    send                                      S

A ring sends exactly this (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of
workstations"; the "bus bandwidth" of nccl-tests is defined by the same factors). Where a group spans m nodes with k of
its ranks in each, it is done in two levels, inside the nodes and between equal places of the nodes::

    inside a node    c (k - 1) / k S          c = 2 for an all-reduce, else 1
    between nodes    c (m - 1) / (k m) S

Together this is the ring's number, with the least that can cross between nodes. A single ring laid node by node crosses
with c (n - 1) / n S on one of the k ranks; a switch that adds numbers up itself (SHARP) sends less. An all-to-all has
nothing to gain from levels: each rank sends (k - 1) / n S inside its node and (n - k) / n S to others.
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, get_args

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "send"]


@dataclass(frozen=True, slots=True)
class Transfer:
    """Operations of one kind in one optimizer step."""

    what: str  # what is sent, for people
    collective: Collective  # the operation
    payload_bytes: int
    """S of one operation: the tensor that all ranks have after an all-gather, before a reduce-scatter, and otherwise
    always."""
    ranks: int  # n: how many take part; 2 for a send
    count: int = 1  # how many such operations one rank takes part in per optimizer step
    stride: int = 1  # how far apart the ranks are: 1 for neighbours
    awaited: bool = False
    """Whether what is computed next needs it, as activations do; gradients and weights can go beside the computing."""

    def __post_init__(self) -> None:
        if self.collective not in get_args(Collective):
            raise ValueError(f"Unknown operation {self.collective!r}. Use one of {', '.join(get_args(Collective))}.")
        for name, least in (("payload_bytes", 0), ("ranks", 1), ("count", 0), ("stride", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"Transfer.{name} must be at least {least}, got {getattr(self, name)!r}.")

    @property
    def bytes_sent(self) -> float:
        """By one rank, in all operations of a step."""
        return float(self._factor(self.ranks) * self.payload_bytes * self.count)

    def bytes_by_link(self, gpus_per_node: int) -> tuple[float, float]:
        """The same inside a node and between nodes, for ranks numbered node by node."""
        if self.collective == "send":
            inside = self.bytes_sent if self.stride < gpus_per_node else 0.0
            return inside, self.bytes_sent - inside
        near, nodes = self._places(gpus_per_node)
        whole = self.payload_bytes * self.count
        return float(self._factor(near) * whole), float(self._factor(nodes) * whole / near)

    def _factor(self, ranks: int) -> Fraction:
        if self.collective == "send":
            return Fraction(1)
        return Fraction((2 if self.collective == "all_reduce" else 1) * (ranks - 1), ranks)

    def _places(self, gpus_per_node: int) -> tuple[int, int]:
        """Ranks of the group in one node, and nodes."""
        near = max(1, min(self.ranks, gpus_per_node // self.stride))
        apart = self.stride % gpus_per_node if near == 1 and self.ranks > 1 else gpus_per_node % self.stride
        if self.ranks % near or (apart and self.ranks * self.stride > gpus_per_node):
            raise ValueError(
                f"{self.what}: {self.ranks} ranks that are {self.stride} apart do not fill nodes of {gpus_per_node}"
                " GPUs evenly. Use sizes that divide each other."
            )
        return near, self.ranks // near
