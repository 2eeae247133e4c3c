"""What the items of a loss are, read from its autograd graph: nothing is stored from one loss to the next.

:func:`read_items` finds the means that a loss adds up and how many items each of them is over, or says why it cannot.
Sizes come from the graph; numbers come from saved tensors that no hook has packed. The rules, one sentence each:

1. A mean is a loss function with ``reduction="mean"``, ``.mean()``, or a sum divided by a number: it counts what it
   divides by.
2. Means may be added, stacked, and multiplied by numbers or by learned weights; terms that depend only on weights do
   not count.
3. T means over n items each, divided by T, are one mean over T * n items; any other division of a mean makes it
   another kind of item.
4. Nothing is counted in what is multiplied by 0, in a sum of no items, or in a 0 that was divided by 1
   (``clamp(min=1)``): a whole loss of 0, or beside other means what a mask or ignored targets leave out.
5. Everything else is unknown.

What is counted is named by the function, by the number of dimensions of its items, and by the classes of a target.
:mod:`lightning_mp.tokens.loss_weights` says what a micro-batch weighs by its items.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_mp.core.saved_tensors import unchanged

#: A float where the host knows it; a scalar tensor where it would have to wait for the device.
Number = float | Tensor


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean in a loss."""

    kind: str  # what it counts
    total: Number  # how many
    factor: float | None = 1.0  # by which it enters the loss; None if the host does not know it
    parts: int = 1  # of a mean of means, how many these are
    is_even: bool | Tensor = True  # they are all over equally many


@dataclass(frozen=True, slots=True)
class Items:
    """The items of a loss that is known."""

    means: tuple[Mean, ...] = ()  # none: the loss counts nothing
    form: tuple[str, ...] = ()  # the kinds of node between the loss and its means
    summed: Number | None = None  # the targets in a sum of cross-entropies, where these were to be counted


@dataclass(frozen=True, slots=True)
class Unknown:
    """A loss whose items cannot be read."""

    reason: str  # completes "the items of a loss are unknown: ..."


def read_items(loss: Tensor, *, divided: bool = False, counts_sums: bool = False) -> Items | Unknown:
    """The items of a loss.

    Args:
        loss: as ``training_step`` returned it; a scalar with its graph.
        divided: it has passed Lightning's division by ``accumulate_grad_batches``, and maybe a loss scaler: what is
            below them is read.
        counts_sums: targets are counted also where a sum of cross-entropies is divided by something else.

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
        walk = _Walk()
        items = walk.read(node, output, loss)
        return replace(items, summed=_targets_of(walk.summed)) if counts_sums and walk.summed is not None else items
    except _Unreadable as unreadable:
        return Unknown(str(unreadable))


def counts_nothing(loss: Tensor) -> bool:
    """Whether a loss that Lightning has divided is a mean over no items. Waits for the device."""
    reading = read_items(loss, divided=True)
    return isinstance(reading, Items) and all(float(mean.total) == 0 for mean in reading.means)


def _names(*names: str) -> frozenset[str]:
    return frozenset(f"{name}Backward{number}" for name in names for number in (0, 1, 2))


_VIEWS = _names("ToCopy", "Clone", "Alias", "View", "UnsafeView", "Squeeze", "Unsqueeze", "ReshapeAlias")
#: Of :mod:`lightning_mp.tensor_parallel.vocab_parallel_logits`: the mean of a cross-entropy whose classes are split.
_SPLIT_CROSS_ENTROPY = "_MeanOfTargetsBackward"
_SINK = "_DDPSinkBackward"  # all outputs of the wrapped module pass through it
_PASSED = _VIEWS | _names("NanToNum") | {_SINK}
_ADDS, _MULS, _DIVS, _STACKS = _names("Add", "Sub", "Rsub", "Neg"), _names("Mul"), _names("Div"), _names("Stack", "Cat")
_MEANS, _SUMS = _names("Mean"), _names("Sum", "Nansum", "Dot")
_OF_WEIGHTS = _VIEWS | _MEANS | _SUMS | _names("Pow", "Abs", "Exp", "Neg", "Sqrt", "Select", "Norm", "LinalgVectorNorm")
_MEAN, _SUM = 1, 2  # torch's numbers of reductions
_MOST_NODES = 2048

_Division = tuple[Any, Number | None]  # the node, and its divisor; None if that is hidden


class _Unreadable(Exception):
    """Ends a walk with its reason."""


class _Walk:
    """One walk from a loss to its means. Few Python calls: it is made for each micro-batch."""

    def __init__(self) -> None:
        # Each mean's kind, number, factor, and the divisions above it with the outermost first.
        self._means: list[tuple[str, Number, float | None, tuple[_Division, ...]]] = []
        # Of sums under one division: kind, number, the divisions above that one; factors, and what is summed.
        self._sums: dict[Any, tuple[str, Number, tuple[_Division, ...], list[float | None], list[Any]]] = {}
        self._has_zero, self._is_empty = False, False  # something was multiplied by 0; it is a sum of no items
        self._ahead: list[tuple[Any, int, float | None, tuple[_Division, ...]]] = []
        self.summed: Any = None  # the last cross-entropy that is a sum

    def read(self, start: Any, start_output: int, loss: Tensor) -> Items:
        """The items below a node."""
        ahead = self._ahead
        form: dict[str, None] = {}
        ahead.append((start, start_output, 1.0, ()))
        for _ in range(_MOST_NODES):
            if not ahead:
                return self._items(tuple(form), loss)
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
                self._add_targets(node, node.classes, factor, divisions)
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
        elif name in _MULS:
            value = _saved_number(node, "self" if main else "other")
            known = factor * value if factor is not None and isinstance(value, float) else None
            self._ahead.append((*inputs[main], known, divisions))
        elif main == 0:
            self._ahead.append((*inputs[0], factor, (*divisions, (node, _saved_number(node, "other")))))
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
        if name in _MEANS or name in _SUMS:
            if kind in _STACKS and _are_scalars(below.next_functions):
                inner = divisions if name in _SUMS else (*divisions, (node, float(math.prod(shape))))
                for one in reversed(below.next_functions):
                    self._ahead.append((*one, factor, inner))
                return
            if not below._input_metadata[at].shape:
                self._ahead.append((child, index, factor, divisions))
                return
        if (kind == "AccumulateGrad" or kind in _OF_WEIGHTS) and _is_of_weights(node):
            self._has_zero = self._has_zero or factor == 0.0
            return
        number = divisions[-1][1] if divisions else None
        clamped = isinstance(number, float) and number == 1.0  # no items: a sum of nothing divided by 1
        is_product = kind in _ADDS or kind in _MULS or kind in _DIVS
        if is_product and not clamped and _are_all_zero(below) and math.prod(shape) > 1:  # else it may be a mask
            factor = 0.0
        if name in _MEANS or (name not in _SUMS and node._saved_reduction == _MEAN):
            if name.startswith("NllLoss"):
                self._add_targets(node, shape[min(1, len(shape) - 1)], factor, divisions)
            else:
                kind = f"{name.partition('Backward')[0]} of {len(shape)}-d items"
                self._means.append((kind, float(math.prod(shape)), factor, divisions))
        elif factor == 0.0 or (0 in shape and not clamped):
            self._has_zero, self._is_empty = self._has_zero or factor == 0.0, True
        elif name not in _SUMS and node._saved_reduction != _SUM:
            raise _Unreadable(f"of {name.partition('Backward')[0]} without a reduction")
        else:
            self.summed = node if name.startswith("NllLoss") else None
            if not divisions:
                raise _Unreadable("it is a sum that nothing divides")
            above, divisor = divisions[-1]
            if divisor is None:
                raise _Unreadable("what a sum in it is divided by is not one number, or saved-tensor hooks hide it")
            if above not in self._sums:
                number = divisor.abs() if isinstance(divisor, Tensor) else abs(divisor)
                self._sums[above] = f"sum of {len(shape)}-d items / number", number, divisions[:-1], [], []
            self._sums[above][3].append(factor)
            self._sums[above][4].append(None if 0 in shape else below if name in _SUMS else node)

    def _add_targets(self, node: Any, classes: int, factor: float | None, divisions: tuple[_Division, ...]) -> None:
        """What a cross-entropy is divided by: its targets that are not ignored, or the sum of their class weights."""
        if type(node).__name__ == _SPLIT_CROSS_ENTROPY:
            value, is_rounded = _saved_tensor(node._raw_saved_tensors[0]), False
        else:
            value = _saved_tensor(node._raw_saved_total_weight)
            is_rounded = value is not None and value.dtype.itemsize < 4 and node._saved_weight is None
        total = _targets_of(node) if is_rounded else None if value is None else on_host(value)
        if total is None:
            raise _Unreadable("saved-tensor hooks or a sharded loss hide how many targets it counts")
        self._means.append((f"targets of {classes} classes", total, factor, divisions))

    def _items(self, form: tuple[str, ...], loss: Tensor) -> Items:
        many = len(self._means) + len(self._sums)
        for kind, number, divisions, factors, summed in self._sums.values():
            if many == 1 and not any(summed):
                self._is_empty = True
                continue
            if many > 1 and (isinstance(number, Tensor) or number == 1.0):
                number = _zero_if_masked(number, summed)
            factor = None if None in factors else math.fsum(factors) / len(factors)  # type: ignore[arg-type]  # no None
            self._means.append((kind, number, factor, divisions))
        means: list[Mean] = []
        for kind, total, factor, divisions in self._means:
            if divisions:
                means = _means_of_means(self._means)
                break
            means.append(Mean(kind, total, factor))
        if means and many == len(self._sums):
            total = means[0].total
            if isinstance(total, Tensor) or total == means[0].parts:
                means = _none_if_empty(means, loss)
        if not means and not self._has_zero and not self._is_empty:
            raise _Unreadable("nothing in it counts items")
        for mean in means:
            if mean.factor != 0.0:
                return Items(tuple(means), form)
        return Items((), form if means or self._has_zero else ())


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
            parts, total = len(group), group[0][1]
            joined = None if None in factors else math.fsum(factors)  # type: ignore[arg-type]  # no None
            result.append(Mean(f"means of {kind}", total * parts, joined, parts, is_even))
            continue
        if at is not None and not (isinstance(divisor, float) and divisor == 0.0):
            kind = f"{kind} / {divisor:g}" if isinstance(divisor, float) else f"{kind} / a number of the device"
        for one, factor in zip(group, factors, strict=True):  # no comprehension: a Python call
            result.append(Mean(kind, one[1], factor))
    return result


def _none_if_empty(sums: list[Mean], loss: Tensor) -> list[Mean]:
    """A loss of 0 whose sums were divided by 1 has no items: ``sum / n.clamp(min=1)``."""
    is_empty: bool | Tensor = on_host(loss) == 0.0
    for mean in sums:
        is_empty = is_empty & (mean.total == mean.parts)
    if is_empty is False:
        return sums
    none = [torch.where(is_empty, 0.0, m.total) if isinstance(is_empty, Tensor) else 0.0 for m in sums]
    return [replace(mean, total=total) for mean, total in zip(sums, none, strict=True)]


def _zero_if_masked(number: Number, summed: list[Any]) -> Number:
    """What sums beside other means are divided by: 0 for the 1 of a ``clamp(min=1)`` over what is masked out."""
    is_empty: bool | Tensor = number == 1.0
    for node in summed:
        if is_empty is False:
            return number
        is_empty = is_empty & _is_masked_out(node)
    return torch.where(is_empty, 0.0, number) if isinstance(is_empty, Tensor) else 0.0 if is_empty else number


def _is_masked_out(node: Any) -> bool | Tensor:
    """Whether all items of a sum are multiplied by 0, or are ignored targets; without a node there are no items."""
    if node is None:
        return True
    if type(node).__name__.startswith("NllLoss"):
        targets = _targets_of(node)
        return targets is not None and targets == 0
    is_out: bool | Tensor = False
    while type(node).__name__ in _VIEWS or type(node).__name__ in _MULS:
        inputs = node.next_functions
        main = 0 if inputs[0][0] is not None else 1
        if len(inputs) > 1 and inputs[1 - main][0] is None:
            mask = _saved_tensor(node._raw_saved_self if main else node._raw_saved_other)
            is_out = is_out if mask is None else is_out | (on_host(mask.count_nonzero()) == 0)
        node = inputs[main][0]
    return is_out


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
    for node, output in inputs:
        if node is None or len(inputs) == 1:
            continue
        below, at = node, output
        while type(below).__name__ in _VIEWS:
            below, at = below.next_functions[0]
        if below is None or (type(node).__name__ != "StackBackward0" and below._input_metadata[at].shape):
            continue
        if not _is_of_weights(node):
            raise _Unreadable("it weights stacked losses, or adds a mean to each item")
    main = 0 if inputs[0][0] is not None else 1
    if type(items).__name__ not in _MULS or (len(inputs) > 1 and inputs[1 - main][0] is not None):
        return False
    value = _saved_number(items, "self" if main else "other")
    return isinstance(value, float) and value == 0.0


def _are_scalars(outputs: Any) -> bool:
    """Whether outputs of nodes have no dimensions."""
    for node, output in outputs:
        while type(node).__name__ in _VIEWS:
            node, output = node.next_functions[0]
        if node is not None and node._input_metadata[output].shape:
            return False
    return True


def _targets_of(cross_entropy: Any) -> Number | None:
    targets = _saved_tensor(cross_entropy._raw_saved_target)
    return None if targets is None else on_host((targets != cross_entropy._saved_ignore_index).sum())


def _saved_tensor(saved: Any) -> Tensor | None:
    """What a node's ``_raw_saved_*`` holds; None where a hook has packed it, or it is no plain tensor.

    A hook may unpack once only, as in torch's tutorial on saved-tensor hooks.
    """
    value = saved.data if saved.unpack_hook is None or saved.unpack_hook is unchanged else None
    return value if type(value) is Tensor else None


def _saved_number(node: Any, name: str) -> Number | None:
    """A number that a node has saved; None where a hook has packed it, or it is not one number."""
    saved = getattr(node, f"_raw_saved_{name}", None)
    if saved is None:
        return float(getattr(node, f"_saved_{name}"))
    # As `_saved_tensor`, with one Python call less.
    value = saved.data if saved.unpack_hook is None or saved.unpack_hook is unchanged else None
    return on_host(value) if type(value) is Tensor and value.numel() == 1 else None


def on_host(value: Tensor) -> Number:
    """The number in a tensor of one element if it is in the host's memory, else a scalar tensor on its device."""
    if value.device.type != "cpu":
        return value.detach().float().reshape(())
    number: Any = (
        value.tolist()
    )  # not `item()`, which fails under a TorchDispatchMode for a number that Python has given
    while isinstance(number, list):
        number = number[0]
    return float(number)
