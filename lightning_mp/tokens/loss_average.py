"""What a loss averages over, read from its autograd graph: the count that makes the mean of several losses exact."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch import Tensor

_NLL = ("NllLossBackward0", "NllLoss2DBackward0", "NllLossNdBackward0")
_OVER_ELEMENTS = (
    "MseLossBackward0",
    "BinaryCrossEntropyBackward0",
    "BinaryCrossEntropyWithLogitsBackward0",
    "SmoothL1LossBackward0",
    "HuberLossBackward0",
)
_QUOTIENT = "DivBackward0"
# Of cross_entropy with probabilities as targets: torch divides the negative sum by a number, which Python code cannot.
_OF_PROBABILITIES = "DivBackward1"
#: Of :func:`lightning_mp.accumulation.ready_gradients.loss_with_gradients`.
_READY = "_ReadyGradientsBackward"
#: Nodes between a training step's loss and the means in it; any other node belongs to the model.
_ARITHMETIC = ("Mul", "Div", "Add", "Sub", "Neg", "Sum", "Stack", "ToCopy", "Clone")
_SHAPES = ("Alias", "View", "UnsafeView", "Squeeze", "Unsqueeze", "ReshapeAlias", "Select")
_BETWEEN = {f"{name}Backward{number}" for name in (*_ARITHMETIC, *_SHAPES) for number in (0, 1)} | {"_DDPSinkBackward"}
_MEAN, _SUM, _MOST_NODES, _CHECKED_LOSSES = 1, 2, 256, 8

_Path = tuple[int, ...]


@dataclass(frozen=True)
class LossAverage:
    """Where in the graph of a loss its mean is taken, the same in each micro-batch.

    A mean is a loss function of torch with ``reduction="mean"``, ``Tensor.mean()``, or a sum divided by a number, such
    as ``(losses * mask).sum() / mask.sum()``.
    """

    path: _Path  # from the loss's `grad_fn`, which of `next_functions` leads there
    node: str  # the name of the node
    sum_path: _Path | None = None  # for a sum divided by a number, the way to the sum

    @classmethod
    def of(cls, loss: Tensor) -> "list[LossAverage]":
        """The means over different numbers in a loss that Lightning has divided by ``accumulate_grad_batches``.

        One, if the loss shows its number; none, if it does not. A mean over targets (cross-entropy) goes before means
        over elements, such as auxiliary losses.
        Waits for the device, if there are several.
        """
        found = _means(loss.grad_fn)
        found = [mean for mean in found if mean.node in (*_NLL, _OF_PROBABILITIES, _QUOTIENT)] or found
        if len(found) < 2:
            return found
        return list({float(mean.count(loss) or 0): mean for mean in reversed(found)}.values())[::-1]

    @property
    def is_over_targets(self) -> bool:
        """Whether it is the mean of a cross-entropy."""
        return self.node in _NLL

    def count(self, loss: Tensor) -> int | Tensor | None:
        """What this loss is divided by: targets, elements or the sum of class weights; None if it is another loss."""
        node = _follow(loss.grad_fn, self.path)
        if node is None or type(node).__name__ != self.node:
            return None
        if self.node == _READY:
            return node.averaged_over  # type: ignore[no-any-return]
        if self.node == "MeanBackward0":
            return int(node._saved_self_sym_numel)
        if self.node == _OF_PROBABILITIES:
            return int(node._saved_other)
        if self.node in _OVER_ELEMENTS:
            return int(node._saved_self.numel())
        if self.node == _QUOTIENT:
            return self._divisor(node)
        return _num_targets(node)

    def targets(self, loss: Tensor) -> int | Tensor | None:
        """The targets in a sum of cross-entropies, whatever it is divided by; None if there is none."""
        if self.sum_path is None:
            return None
        node = _follow(loss.grad_fn, self.sum_path)
        return _num_targets(node) if type(node).__name__ in _NLL else None

    def _divisor(self, node: Any) -> Tensor | None:
        """The product of what a sum is divided by: ``sum / num_targets / 8`` is one mean."""
        assert self.sum_path is not None
        divisor: Tensor | None = None
        for index in self.sum_path[len(self.path) :]:
            if type(node).__name__ == _QUOTIENT:
                if not _is_quotient(node):
                    return None
                other = node._saved_other.detach().squeeze().abs()
                divisor = other if divisor is None else divisor * other
            node = node.next_functions[index][0] if index < len(node.next_functions) else None
        return divisor if type(node).__name__ in (*_NLL, *_OVER_ELEMENTS, "SumBackward0") else None


class CountCheck:
    """Compares the weights that a user chose with what the first losses average over, and warns where they differ.

    A constant ratio changes nothing. Waits for the device in the first micro-batches, never afterwards.
    """

    def __init__(self, average: LossAverage, weight: str) -> None:
        self._average, self._weight, self._left = average, weight, _CHECKED_LOSSES
        self._first: tuple[float, float] | None = None

    def check(self, loss: Tensor, items: int | Tensor) -> None:
        """Compares one micro-batch, if it is one of the first."""
        if not self._left:
            return
        self._left -= 1
        count = self._average.count(loss)
        if count is None:  # another loss than the first one
            return
        counted, weight = float(count), float(items)
        first = self._first = self._first or (counted, weight)
        if math.isclose(counted * first[1], weight * first[0], rel_tol=1e-6):
            return
        self._left = 0
        rank_zero_warn(
            f"Gradient accumulation: micro-batches are weighted by {self._weight}, {first[1]:g} and {weight:g} in two"
            f" of them, but their losses average over {first[0]:g} and {counted:g}. To weight by what the loss"
            " averages over, use weight_by='auto' without count=."
        )


def _follow(node: Any, path: _Path) -> Any:
    for index in path:
        following = node.next_functions if node is not None else ()
        node = following[index][0] if index < len(following) else None
    return node


def _num_targets(node: Any) -> Tensor | None:
    """The targets of a cross-entropy that are not ignored, or the sum of their class weights."""
    target = node._saved_target
    if type(target) is not Tensor:  # sharded
        return None
    counted: Tensor = target != node._saved_ignore_index
    weight: Tensor | None = node._saved_weight
    if weight is None:
        return counted.sum()
    return (weight.float()[torch.where(counted, target, 0)] * counted).sum()


def _is_quotient(node: Any) -> bool:
    """Whether a division is by one number that has no gradient."""
    return node.next_functions[1][0] is None and node._saved_other is not None and node._saved_other.numel() == 1


def _means(start: Any) -> list[LossAverage]:
    """The means nearest to the loss; a sum divided by a number is one where there is none below.

    The division nearest to the loss is Lightning's, by ``accumulate_grad_batches``.
    """
    is_lightnings = True
    found: list[LossAverage] = []
    quotients: list[_Path] = []
    sums: list[_Path] = []
    ahead: list[tuple[_Path, Any]] = [((), start)]
    for _ in range(_MOST_NODES):
        if not ahead:
            break
        path, node = ahead.pop(0)
        name = type(node).__name__
        reduction = getattr(node, "_saved_reduction", None)
        is_mean = name == "MeanBackward0" or (name in (*_NLL, *_OVER_ELEMENTS) and reduction == _MEAN)
        is_mean |= name == _OF_PROBABILITIES and type(_follow(node, (0,))).__name__ == "NegBackward0"
        if is_mean or (name == _READY and node.averaged_over is not None):
            found.append(LossAverage(path, name))
        elif name in (*_NLL, *_OVER_ELEMENTS) and reduction == _SUM:
            sums.append(path)
        elif name in _BETWEEN:
            if name == "SumBackward0" and math.prod(node._saved_self_sym_sizes) > 1:
                sums.append(path)
            if name == _QUOTIENT and not is_lightnings and _is_quotient(node):
                quotients.append(path)
            is_lightnings = is_lightnings and name != _QUOTIENT
            ahead += [((*path, index), child) for index, (child, _) in enumerate(node.next_functions)]
    for quotient in quotients:
        is_below = [sum_path for sum_path in sums if sum_path[: len(quotient)] == quotient]
        if is_below and not any(mean.path[: len(quotient)] == quotient[: len(mean.path)] for mean in found):
            found.append(LossAverage(quotient, _QUOTIENT, is_below[0]))
    return found
