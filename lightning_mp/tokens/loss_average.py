"""What a loss averages over, read from its autograd graph: the count that makes the mean of several losses exact."""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

__all__ = ["LossAverage"]

_NLL = ("NllLossBackward0", "NllLoss2DBackward0", "NllLossNdBackward0")
_OVER_ELEMENTS = (
    "MseLossBackward0",
    "BinaryCrossEntropyBackward0",
    "BinaryCrossEntropyWithLogitsBackward0",
    "SmoothL1LossBackward0",
    "HuberLossBackward0",
)
#: Nodes between a training step's loss and the means in it; any other node belongs to the model.
_ARITHMETIC = ("Mul", "Div", "Add", "Sub", "Neg", "Sum", "Stack", "ToCopy", "Clone")
_SHAPES = ("Alias", "View", "UnsafeView", "Squeeze", "Unsqueeze", "ReshapeAlias", "Select")
_BETWEEN = {f"{name}Backward{number}" for name in (*_ARITHMETIC, *_SHAPES) for number in (0, 1)} | {"_DDPSinkBackward"}
_MEAN, _MOST_NODES = 1, 256


@dataclass(frozen=True)
class LossAverage:
    """Where in the graph of a loss its mean is taken, the same in each micro-batch.

    Attributes:
        path: from the loss's ``grad_fn``, which of ``next_functions`` leads there.
        node: the name of the node.

    Example:
        >>> import torch
        >>> logits, target = torch.zeros(4, 3, requires_grad=True), torch.tensor([0, 2, 255, 255])
        >>> loss = torch.nn.functional.cross_entropy(logits, target, ignore_index=255) / 2
        >>> LossAverage.of(loss).count(loss)
        tensor(2)
    """

    path: tuple[int, ...]
    node: str

    @classmethod
    def of(cls, loss: Tensor) -> Self | None:
        """The mean in a loss; None if there is none that is known, or if there are several of different numbers.

        A mean over targets (cross-entropy) goes before means over elements, such as auxiliary losses. Waits for the
        device, if there are several.
        """
        found = [cls(path, type(node).__name__) for path, node in _means(loss.grad_fn)]
        found = [mean for mean in found if mean.node in _NLL] or found
        if len(found) > 1 and len({float(mean.count(loss) or 0) for mean in found}) > 1:
            return None
        return found[0] if found else None

    def count(self, loss: Tensor) -> int | Tensor | None:
        """How much this loss averages over: targets, elements or the sum of class weights; None if it is another."""
        node: Any = loss.grad_fn
        for index in self.path:
            following = node.next_functions if node is not None else ()
            node = following[index][0] if index < len(following) else None
        if node is None or type(node).__name__ != self.node:
            return None
        if self.node == "MeanBackward0":
            return int(node._saved_self_sym_numel)
        if self.node in _OVER_ELEMENTS:
            return int(node._saved_self.numel())
        target = node._saved_target
        if type(target) is not Tensor:  # sharded
            return None
        counted = target != node._saved_ignore_index
        weight = node._saved_weight
        return counted.sum() if weight is None else _sum_of_weights(weight, target, counted)


def _sum_of_weights(weight: Tensor, target: Tensor, counted: Tensor) -> Tensor:
    return (weight.float()[torch.where(counted, target, 0)] * counted).sum()


def _means(start: Any) -> list[tuple[tuple[int, ...], Any]]:
    """The means nearest to the loss, with the way to each."""
    found: list[tuple[tuple[int, ...], Any]] = []
    ahead: list[tuple[tuple[int, ...], Any]] = [((), start)]
    for _ in range(_MOST_NODES):
        if not ahead:
            break
        path, node = ahead.pop(0)
        name = type(node).__name__
        if name == "MeanBackward0" or (
            name in (*_NLL, *_OVER_ELEMENTS) and getattr(node, "_saved_reduction", None) == _MEAN
        ):
            found.append((path, node))
        elif name in _BETWEEN:
            ahead += [((*path, index), child) for index, (child, _) in enumerate(node.next_functions)]
    return found
