"""What the items of a loss are, read from its autograd graph: nothing is stored from one loss to the next.

:func:`read_items` finds the means that a loss adds up and how many items each of them is over, or says why it cannot.
Sizes come from the graph; numbers come from saved tensors that no hook has packed. The rules, one sentence each:

1. A mean is a loss function with ``reduction="mean"``, ``.mean()``, or a sum divided by a number: it counts what it
   divides by.
2. Means may be added, stacked, and multiplied by numbers or by learned weights; terms that depend only on weights do
   not count.
3. T means over n items each, divided by T, are one mean over T * n items; any other division of a mean makes it
   another kind of item.
4. Nothing is counted in what is multiplied by 0, in a sum of no items, or in a loss of 0 whose sums are divided by 1
   (``clamp(min=1)``); of a masked sum that is divided by 1 beside other means it is unknown.
5. Everything else is unknown.

What is counted is named by the function, by the number of dimensions of its items, and by the classes of a target.
:mod:`lightning_mp.training.tokens.loss_weights` says what a micro-batch weighs by its items.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_mp.ground.core.saved_tensors import unchanged

#: A float where the host knows it; a scalar tensor where it would have to wait for the device.
Number = float | Tensor


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean in a loss."""

    kind: str  # what it counts
    total: Number  # how many; NaN if that is not known
    factor: float | None = 1.0  # by which it enters the loss; None if the host does not know it
    parts: int = 1  # of a mean of means, how many these are
    is_even: bool | Tensor = True  # they are all over equally many


@dataclass(frozen=True, slots=True)
class Items:
    """The items of a loss that is known."""

    means: tuple[Mean, ...] = ()  # none: the loss counts nothing
    form: tuple[str, ...] = ()  # the kinds of node between the loss and its means
    has_zero: bool = False  # something in it is multiplied by 0
    divisor: Number | None = None  # what sums of cross-entropies are divided by, if their targets are counted instead

    def on_host(self) -> "Items":
        """The same, for all ranks; waits for the device."""
        means = (replace(mean, total=float(mean.total), is_even=bool(mean.is_even)) for mean in self.means)
        return replace(self, means=tuple(means), divisor=None)


@dataclass(frozen=True, slots=True)
class Unknown:
    """A loss whose items cannot be read."""

    reason: str  # completes "the items of a loss are unknown: ..."


def read_items(loss: Tensor, *, divided: bool = False, counts_targets: bool = False) -> Items | Unknown:
    """The items of a loss.

    Args:
        loss: as ``training_step`` returned it; a scalar with its graph.
        divided: it has passed Lightning's division by ``accumulate_grad_batches``, and maybe a loss scaler: what is
            below them is read.
        counts_targets: of a sum of cross-entropies the targets are counted, whatever divides it.

    Example:
        >>> import torch
        >>> from torch.nn import functional as F
        >>> logits = torch.zeros(4, 3, requires_grad=True)
        >>> items = read_items(0.5 * F.cross_entropy(logits, torch.tensor([0, 2, -100, 1])))
        >>> [(mean.kind, mean.total, mean.factor) for mean in items.means]
        [('targets of 3 classes', 3.0, 0.5)]
        >>> read_items((2 * logits).sum())
        Unknown(reason='it is a sum that nothing divides')
    """
    node, output = loss.grad_fn, loss.output_nr
    try:
        if divided:
            node, output = _below_lightnings_division(node)
        if node is None or type(node).__name__ == "AccumulateGrad":  # a constant
            return Items()
        return _Walk().read(loss, node, output, counts_targets=counts_targets)
    except _Unreadable as unreadable:
        return Unknown(str(unreadable))


def counts_nothing(loss: Tensor) -> bool:
    """Whether a loss that Lightning has divided is a mean over no items. Waits for the device."""
    reading = read_items(loss, divided=True)
    return isinstance(reading, Items) and all(float(mean.total) == 0 for mean in reading.means)


def _names(*names: str) -> frozenset[str]:
    return frozenset(f"{name}Backward{number}" for name in names for number in (0, 1, 2))


_VIEWS = _names("ToCopy", "Clone", "Alias", "View", "UnsafeView", "Squeeze", "Unsqueeze", "ReshapeAlias")
#: The mean of a cross-entropy with split classes: :mod:`lightning_mp.training.tensor_parallel.vocab_parallel_logits`.
_SPLIT_CROSS_ENTROPY = "_MeanOfTargetsBackward"
_SINK = "_DDPSinkBackward"  # all outputs of the wrapped module pass through it
_PASSED = _VIEWS | _names("NanToNum") | {_SINK}
_ADDS, _MULS, _DIVS, _STACKS = _names("Add", "Sub", "Rsub", "Neg"), _names("Mul"), _names("Div"), _names("Stack", "Cat")
_MASKS = _MULS | _names("Where")  # of items that may all be left out
_MEANS, _SUMS = _names("Mean"), _names("Sum", "Nansum", "Dot")
_OF_WEIGHTS = _VIEWS | _MEANS | _SUMS | _names("Pow", "Abs", "Exp", "Neg", "Sqrt", "Select", "Norm", "LinalgVectorNorm")
_MEAN, _SUM = 1, 2  # torch's numbers of reductions
_MOST_NODES = 2048

_Division = tuple[Any, Number | None]  # the node, and its divisor; None if that is hidden


class _Unreadable(Exception):
    """Ends a walk with its reason."""


class _Walk:
    """One walk from a loss to its means. Few Python calls, so no ``__init__``: it is made for each micro-batch."""

    def read(self, loss: Tensor, start: Any, start_output: int, *, counts_targets: bool) -> Items:
        """The items below a node of a loss."""
        self._loss, self._counts_targets = loss, counts_targets
        # Each mean's kind, number, factor, and the divisions above it with the outermost first.
        self._means: list[tuple[str, Number, float | None, tuple[_Division, ...]]] = []
        # Of sums by the division above them: kind, number, the divisions above that, whether these may be masked out
        # altogether, and the factors of all.
        self._sums: dict[Any, tuple[str, Number, tuple[_Division, ...], bool, list[float | None]]] = {}
        self._targets: Number | None = None  # in sums of cross-entropies, if they are to be counted
        self._has_zero, self._is_empty = False, False  # something was multiplied by 0; it is a sum of no items
        self._ahead: list[tuple[Any, int, float | None, tuple[_Division, ...]]] = []
        ahead = self._ahead
        form: dict[str, None] = {}
        ahead.append((start, start_output, 1.0, ()))
        for _ in range(_MOST_NODES):
            if not ahead:
                return self._items(tuple(form))
            node, output, factor, divisions = ahead.pop()
            if node is None:  # a constant
                continue
            name, inputs = type(node).__name__, node.next_functions
            if name in _PASSED:
                ahead.append((*inputs[output if name == _SINK else 0], factor, divisions))
                continue
            form[name] = None
            if name in _ADDS:
                for one in reversed(inputs):
                    ahead.append((*one, factor, divisions))  # no comprehension: a Python call
            elif name in _MULS or name in _DIVS:
                self._multiply(node, name, factor, divisions)
            elif name in _MEANS or name in _SUMS or hasattr(node, "_saved_reduction"):
                self._reduce(node, name, factor, divisions)
            elif name == _SPLIT_CROSS_ENTROPY:
                number = _number(node._raw_saved_tensors[0])
                self._means.append((f"targets of {node.classes} classes", _shown(number), factor, divisions))
            elif not _is_of_weights(node):
                raise _Unreadable(f"of {name.partition('Backward')[0]}, which is no mean")
            elif factor == 0.0:
                self._has_zero = True
        raise _Unreadable(f"it has more than {_MOST_NODES} nodes")

    def _multiply(self, node: Any, name: str, factor: float | None, divisions: tuple[_Division, ...]) -> None:
        inputs = node.next_functions
        main = 0 if inputs[0][0] is not None else 1
        if len(inputs) > 1 and inputs[1 - main][0] is not None:  # both sides have gradients
            weights = [side for side in (1, 0) if _is_of_weights(inputs[side][0]) and (side or name in _MULS)]
            if not weights:
                raise _Unreadable("it multiplies or divides by what depends on the batch")
            self._ahead.append((*inputs[1 - weights[0]], factor, divisions))
            return
        saved = getattr(node, "_raw_saved_self" if main else "_raw_saved_other", None)
        number = _number(saved) if saved is not None else float(node._saved_other)
        if name in _MULS:
            known = factor * number if factor is not None and isinstance(number, float) else None
            self._ahead.append((*inputs[main], known, divisions))
        elif main == 0:
            self._ahead.append((*inputs[0], factor, (*divisions, (node, number))))
        else:
            raise _Unreadable("it divides by what depends on the batch")

    def _reduce(self, node: Any, name: str, factor: float | None, divisions: tuple[_Division, ...]) -> None:
        """A mean or a sum: of the items of a loss, or of losses."""
        inputs = node.next_functions
        child, index = inputs[0] if inputs[0][0] is not None else inputs[1]
        shape = child._input_metadata[index].shape
        below, at = child, index
        while type(below).__name__ in _VIEWS:
            below, at = below.next_functions[0]
        kind = type(below).__name__
        is_loss = name not in _MEANS and name not in _SUMS
        if not is_loss and kind in _STACKS and _are_scalars(below.next_functions):
            inner = divisions if name in _SUMS else (*divisions, (node, float(math.prod(shape))))
            for one in reversed(below.next_functions):
                self._ahead.append((*one, factor, inner))
            return
        if not is_loss and not below._input_metadata[at].shape:
            self._ahead.append((child, index, factor, divisions))
            return
        if (kind == "AccumulateGrad" or kind in _OF_WEIGHTS) and _is_of_weights(node):
            self._has_zero = self._has_zero or factor == 0.0
            return
        if (kind in _ADDS or kind in _MULS or kind in _DIVS) and _are_all_zero(below):
            factor = 0.0
        self._count(node, name, kind, shape, factor, divisions)

    def _count(
        self, node: Any, name: str, below: str, shape: Any, factor: float | None, divisions: tuple[_Division, ...]
    ) -> None:
        """A mean or a sum of the items of a loss."""
        is_cross_entropy = name.startswith("NllLoss")
        if name in _MEANS or (name not in _SUMS and node._saved_reduction == _MEAN):
            number: Any = float(math.prod(shape))
            kind = f"{name.partition('Backward')[0]} of {len(shape)}-d items"
            if is_cross_entropy:  # divided by its targets that are not ignored, or by the sum of their class weights
                kind, saved = f"targets of {shape[min(1, len(shape) - 1)]} classes", node._raw_saved_total_weight
                number = _shown(_number(saved))
                if node._saved_weight is None and saved.data.dtype.itemsize < 4:  # 16 bits round their number
                    number = _targets_of(node)
            self._means.append((kind, number, factor, divisions))
        elif factor == 0.0 or 0 in shape:
            self._has_zero, self._is_empty = self._has_zero or factor == 0.0, True
        elif name not in _SUMS and node._saved_reduction != _SUM:
            raise _Unreadable(f"of {name.partition('Backward')[0]} without a reduction")
        elif not divisions:
            raise _Unreadable("it is a sum that nothing divides")
        elif divisions[-1][1] is None:
            raise _Unreadable("what a sum in it is divided by is not one number, or saved-tensor hooks hide it")
        else:
            above, number = divisions[-1]
            if self._counts_targets and is_cross_entropy:
                targets = _targets_of(node)
                self._targets = targets if self._targets is None else self._targets + targets
            if above not in self._sums:
                is_clamped = hasattr(above, "_raw_saved_other")  # in C++ torch divides by what it counts itself
                may_be_none = is_clamped and (below in _MASKS or is_cross_entropy)
                number = number.abs() if isinstance(number, Tensor) else abs(number)
                self._sums[above] = f"sum of {len(shape)}-d items / number", number, divisions[:-1], may_be_none, []
            self._sums[above][4].append(factor)

    def _items(self, form: tuple[str, ...]) -> Items:
        are_sums, is_alone = not self._means, len(self._means) + len(self._sums) == 1
        for kind, number, above, may_be_none, factors in self._sums.values():
            if isinstance(number, Tensor) or number == 1.0:
                number = self._one_or_none(number, is_sure=is_alone or not may_be_none, are_sums=are_sums)
            factor = None if None in factors else math.fsum(factors) / len(factors)  # type: ignore[arg-type]  # no None
            self._means.append((kind, number, factor, above))
        means: list[Mean] = []
        for kind, total, factor, divisions in self._means:
            if divisions:
                means = _means_of_means(self._means)
                break
            means.append(Mean(kind, total, factor))
        found, means = means, []
        for mean in found:  # no comprehension: a Python call
            if mean.factor == 0.0:
                self._has_zero = True
            else:
                means.append(mean)
        if not means and not self._has_zero and not self._is_empty:
            raise _Unreadable("nothing in it counts items")
        if self._targets is not None:
            if not are_sums or len({mean.total for mean in means}) != 1:
                raise _Unreadable("not all of it is divided by num_items_in_batch")
            factors = [mean.factor for mean in means]
            factor = None if None in factors else math.fsum(factors)  # type: ignore[arg-type]  # no None
            return Items((Mean("targets of a sum", self._targets, factor),), form, divisor=means[0].total)
        return Items(tuple(means), form if means or self._has_zero else (), self._has_zero)

    def _one_or_none(self, number: Number, *, is_sure: bool, are_sums: bool) -> Number:
        """What a sum is over: ``n.clamp(min=1)`` is 1 also for no items. NaN where that is not known."""
        one = 1.0 if is_sure else math.nan
        none: Number = one
        if are_sums:
            is_zero = on_host(self._loss) == 0.0
            none = torch.where(is_zero, 0.0, one) if isinstance(is_zero, Tensor) else 0.0 if is_zero else one
        return torch.where(number == 1.0, none, number) if isinstance(number, Tensor) else none


def _below_lightnings_division(node: Any) -> tuple[Any, int]:
    """What Lightning has divided by the number of micro-batches; above that there may be the loss scale."""
    may_be_scaled = True
    while node is not None:
        name = type(node).__name__
        below: tuple[Any, int] = node.next_functions[0]
        if name in _DIVS:
            return below
        if name in _MULS and may_be_scaled:
            may_be_scaled = False
        elif name not in _VIEWS:
            break
        node = below[0]
    raise _Unreadable("what it passed through after training_step is not Lightning's")


def _means_of_means(found: list[Any]) -> list[Mean]:
    """T means of a kind under a division by T are one mean; any other division of a mean makes another kind of it."""
    groups: dict[Any, list[Any]] = {}
    for one in found:
        groups.setdefault((one[3][-1] if one[3] else (None, None), one[0]), []).append(one)
    result = []
    for ((at, divisor), kind), group in groups.items():
        factors: list[float | None] = []
        is_even: bool | Tensor = True
        for _, total, factor, divisions in group:
            is_even = is_even & (total == group[0][1])
            for _, above in divisions:
                known = factor is not None and isinstance(above, float)
                factor = (factor / above if above else math.inf) if known else None
            factors.append(factor)
        if isinstance(divisor, float) and divisor == len(group):
            joined = None if None in factors else math.fsum(factors)  # type: ignore[arg-type]  # no None
            result.append(Mean(f"means of {kind}", group[0][1] * len(group), joined, len(group), is_even))
            continue
        if at is not None and not (isinstance(divisor, float) and divisor == 0.0):
            kind = f"{kind} / {divisor:g}" if isinstance(divisor, float) else f"{kind} / a number of the device"
        for one, factor in zip(group, factors, strict=True):  # no comprehension: a Python call
            result.append(Mean(kind, one[1], factor))
    return result


def _is_of_weights(node: Any) -> bool:
    """Whether it comes from one parameter and nothing else."""
    for _ in range(9):
        name = type(node).__name__
        if name == "AccumulateGrad":
            return True
        inputs: tuple[Any, ...] = node.next_functions if node is not None else ()
        if name not in _OF_WEIGHTS or len(inputs) != 1 or inputs[0][0] is None:
            return False
        node = inputs[0][0]
    return False


def _are_all_zero(items: Any) -> bool:
    """Whether items are multiplied by the number 0.

    Raises:
        _Unreadable: if a loss is added to items or multiplies them, or if a tensor weights stacked losses.
    """
    inputs: tuple[Any, ...] = items.next_functions
    for one in inputs if len(inputs) > 1 else ():
        is_loss = type(one[0]).__name__ == "StackBackward0" or _are_scalars([one])
        if one[0] is not None and is_loss and not _is_of_weights(one[0]):
            raise _Unreadable("it weights stacked losses, or adds a mean to each item")
    main = 0 if inputs[0][0] is not None else 1
    if type(items).__name__ not in _MULS or (len(inputs) > 1 and inputs[1 - main][0] is not None):
        return False
    value = _saved_tensor(items._raw_saved_self if main else items._raw_saved_other)
    if value is None or value.ndim:  # a tensor with dimensions is a mask
        return False
    number = on_host(value)
    return isinstance(number, float) and number == 0.0


def _are_scalars(outputs: Any) -> bool:
    """Whether outputs of nodes have no dimensions."""
    for node, output in outputs:
        while type(node).__name__ in _VIEWS:
            node, output = node.next_functions[0]
        if node is not None and node._input_metadata[output].shape:
            return False
    return True


def _targets_of(cross_entropy: Any) -> Number:
    targets = _saved_tensor(cross_entropy._raw_saved_target)
    return on_host((_shown(targets) != cross_entropy._saved_ignore_index).sum())


def _shown(value: Any) -> Any:
    """What a cross-entropy has saved, unless it is hidden."""
    if value is None:
        raise _Unreadable("saved-tensor hooks or a sharded loss hide how many targets it counts")
    return value


def _saved_tensor(saved: Any) -> Tensor | None:
    """What a node's ``_raw_saved_*`` holds; None where a hook has packed it, or it is no plain tensor.

    A hook may unpack once only, as in torch's tutorial on saved-tensor hooks.
    """
    value = saved.data if saved.unpack_hook is None or saved.unpack_hook is unchanged else None
    return value if type(value) is Tensor else None


def _number(saved: Any) -> Number | None:
    """The number in a ``_raw_saved_*``; None where a hook has packed it, or it is not one number."""
    # As `_saved_tensor`, with one Python call less.
    value = saved.data if saved.unpack_hook is None or saved.unpack_hook is unchanged else None
    return on_host(value) if type(value) is Tensor and value.numel() == 1 else None


def on_host(value: Tensor) -> Number:
    """The number in a tensor of one element if it is in the host's memory, else a scalar tensor on its device."""
    if value.device.type != "cpu":
        return value.detach().float().reshape(())
    number: Any = value.tolist()  # not `item()`, which fails under a TorchDispatchMode for a number of Python
    while isinstance(number, list):
        number = number[0]
    return float(number)
