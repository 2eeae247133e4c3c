"""Operations on logits that are split by vocabulary: on the part where that gives a part, or else on the whole.

They run below autograd, so backwards go the same ways.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_mp.ground.core import private_dispatch_api


@dataclass(frozen=True)
class VocabParallelSplit:
    """How the vocabulary lies over ranks, in equal parts in their order."""

    group: ProcessGroup

    @property
    def ranks(self) -> int:
        """How many they are."""
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        """This one among them."""
        return dist.get_rank(self.group)

    def whole(self, part: Tensor, dim: int) -> Tensor:
        """All parts together, on every rank of the group."""
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.ranks)]
        dist.all_gather(parts, part, group=self.group)
        return torch.cat(parts, dim)

    def own(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's part, a view."""
        size = whole.shape[dim] // self.ranks
        return whole.narrow(dim, self.rank * size, size)


class InParts(Tensor):
    """A tensor with the size of the whole and the memory of this rank's part; subclasses define what it can do."""

    part: Tensor
    dim_of_vocabulary: int
    vocab_split: VocabParallelSplit

    @staticmethod
    def __new__(  # noqa: D102
        cls: type[Self], part: Tensor, dim: int, split: VocabParallelSplit, requires_grad: bool = False
    ) -> Self:
        size, own = list(part.shape), part.stride(dim)
        size[dim] *= split.ranks
        strides = [stride * split.ranks if stride > own else stride for stride in part.stride()]
        self: Self = private_dispatch_api.wrapper_tensor(cls, size, strides, part, requires_grad)
        self.part, self.dim_of_vocabulary, self.vocab_split = part, dim, split
        return self

    def like(self, part: Tensor, dim: int | None = None) -> Self:
        """Another part, split in the same way, with the vocabulary along the same dimension or another one."""
        return type(self)(part, self.dim_of_vocabulary if dim is None else dim, self.vocab_split)


aten = torch.ops.aten


def run_on_parts(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One operation of torch, as ``__torch_dispatch__`` gets it."""
    handler = _ON_PARTS.get(func)
    result = handler(func, *args, **kwargs) if handler is not None else NotImplemented
    return _on_whole(func, args, kwargs) if result is NotImplemented else result


def _on_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Gathers, and puts back what the operation has changed in place."""
    wholes: dict[int, Tensor] = {}

    def gathered(value: Any) -> Any:
        if isinstance(value, InParts):
            if id(value) not in wholes:
                wholes[id(value)] = value.vocab_split.whole(value.part, value.dim_of_vocabulary)
            return wholes[id(value)]
        return [gathered(item) for item in value] if isinstance(value, list | tuple) else value

    result = func(*map(gathered, args), **{name: gathered(value) for name, value in kwargs.items()})
    for place, argument in enumerate(func._schema.arguments if func._schema.is_mutable else ()):
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, InParts):
            value.part.copy_(value.vocab_split.own(wholes[id(value)], value.dim_of_vocabulary))
            result = value if result is wholes[id(value)] else result
    return result


def _same_shape(func: Any, logits: InParts, *args: Any, **kwargs: Any) -> Any:
    return logits.like(func(logits.part, *args, **kwargs))


def _copy(func: Any, logits: InParts, **kwargs: Any) -> Any:
    device = kwargs.get("device")
    if device is not None and torch.device(device).type != logits.device.type:
        return NotImplemented
    return logits.like(func(logits.part, **kwargs))


def _elementwise(func: Any, *args: Any, **kwargs: Any) -> Any:
    first = next(value for value in args if isinstance(value, InParts))
    from_the_right = first.dim_of_vocabulary - first.ndim
    own = []
    for value in args:
        if isinstance(value, InParts):
            if (value.dim_of_vocabulary, value.shape) != (first.dim_of_vocabulary, first.shape):
                return NotImplemented
            value = value.part
        elif isinstance(value, Tensor) and value.ndim >= -from_the_right and value.shape[from_the_right] != 1:
            if value.shape[from_the_right] != first.shape[from_the_right] or value.ndim > first.ndim:
                return NotImplemented
            value = first.vocab_split.own(value, value.ndim + from_the_right)
        own.append(value)
    in_place = func._schema.is_mutable
    if (in_place and args[0] is not first) or kwargs.keys() - {"alpha", "rounding_mode"}:
        return NotImplemented
    result = func(*own, **kwargs)
    return first if in_place else first.like(result, result.ndim + from_the_right)


def _view(func: Any, logits: InParts, size: Sequence[int]) -> Any:
    last = logits.ndim - 1
    known = 1
    for number in size:
        known *= number if number >= 0 else 1
    wanted = [number if number >= 0 else logits.numel() // known for number in size] if known else list(size)
    if logits.dim_of_vocabulary != last or not wanted or wanted[-1] != logits.shape[last]:
        return NotImplemented
    part = logits.part.reshape([*wanted[:-1], logits.part.shape[last]])
    return logits.like(part, len(wanted) - 1)


def _permuted(func: Any, logits: InParts, *args: Any) -> Any:
    # Where each dimension goes, seen on a tensor without elements whose sizes are the dimensions' numbers.
    order = func(torch.empty([*range(logits.ndim)], device="meta"), *args).shape
    return logits.like(func(logits.part, *args), list(order).index(logits.dim_of_vocabulary))


def _unsqueezed(func: Any, logits: InParts, dim: int) -> Any:
    at = dim % (logits.ndim + 1)
    return logits.like(func(logits.part, dim), logits.dim_of_vocabulary + (at <= logits.dim_of_vocabulary))


def _squeezed(func: Any, logits: InParts, dims: int | Sequence[int]) -> Any:
    at = {dim % logits.ndim for dim in ([dims] if isinstance(dims, int) else dims)}
    if logits.dim_of_vocabulary in at:
        return NotImplemented
    gone = sum(1 for dim in at if dim < logits.dim_of_vocabulary and logits.shape[dim] == 1)
    return logits.like(func(logits.part, dims), logits.dim_of_vocabulary - gone)


def _sliced(
    func: Any, logits: InParts, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    if dim % logits.ndim == logits.dim_of_vocabulary:
        size = logits.shape[dim]
        everything = (start or 0) in (0, -size) and (end is None or end >= size) and step == 1
        return logits.like(logits.part) if everything else NotImplemented
    return logits.like(func(logits.part, dim, start, end, step))


def _selected(func: Any, logits: InParts, dim: int, index: int) -> Any:
    at, vocabulary = dim % logits.ndim, logits.dim_of_vocabulary
    return (
        NotImplemented
        if at == vocabulary
        else logits.like(func(logits.part, dim, index), vocabulary - (at < vocabulary))
    )


def _slice_backward(func: Any, gradient: InParts, sizes: Sequence[int], dim: int, *others: Any) -> Any:
    at = gradient.dim_of_vocabulary
    if dim % gradient.ndim == at:
        return gradient.like(gradient.part) if sizes[at] == gradient.shape[at] else NotImplemented
    own = [*sizes[:at], gradient.part.shape[at], *sizes[at + 1 :]]
    return gradient.like(func(gradient.part, own, dim, *others))


def _select_backward(func: Any, gradient: InParts, sizes: Sequence[int], dim: int, index: int) -> Any:
    at = gradient.dim_of_vocabulary + (dim % len(sizes) <= gradient.dim_of_vocabulary)
    own = [*sizes[:at], gradient.part.shape[gradient.dim_of_vocabulary], *sizes[at + 1 :]]
    return gradient.like(func(gradient.part, own, dim, index), at)


def _rows(func: Any, logits: Any, indices: Sequence[Tensor | None]) -> Any:
    """``logits[mask]``: rows taken out."""
    if not _of_rows(logits, indices):
        return NotImplemented
    part = func(logits.part, indices)
    return logits.like(part, part.ndim - 1)


def _put_rows(func: Any, target: Any, indices: Sequence[Tensor | None], values: Any, *others: Any) -> Any:
    if not _of_rows(target, indices) or not isinstance(values, InParts) or not _of_rows(values, ()):
        return NotImplemented
    result = func(target.part, indices, values.part, *others)
    return target if func._schema.is_mutable else target.like(result)


def _of_rows(logits: Any, indices: Sequence[Tensor | None]) -> bool:
    if not isinstance(logits, InParts) or logits.dim_of_vocabulary != logits.ndim - 1:
        return False
    used = sum(index.ndim if index is not None and index.dtype == torch.bool else 1 for index in indices)
    return used < logits.ndim and not any(index is None or isinstance(index, InParts) for index in indices)


def _new_zeros(func: Any, logits: InParts, size: Sequence[int], **kwargs: Any) -> Any:
    if (
        not _of_rows(logits, ())
        or not size
        or size[-1] != logits.shape[-1]
        or kwargs.get("device", logits.device) is None
    ):
        return NotImplemented
    return logits.like(func(logits.part, [*size[:-1], logits.part.shape[-1]], **kwargs), len(size) - 1)


_ON_PARTS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((aten.detach.default, aten.alias.default, aten.clone.default), _same_shape),
    aten._to_copy.default: _copy,
    **dict.fromkeys((aten.view.default, aten._unsafe_view.default), _view),
    **dict.fromkeys((aten.t.default, aten.transpose.int, aten.permute.default), _permuted),
    aten.unsqueeze.default: _unsqueezed,
    **dict.fromkeys((aten.squeeze.dim, aten.squeeze.dims), _squeezed),
    aten.slice.Tensor: _sliced,
    aten.select.int: _selected,
    aten.slice_backward.default: _slice_backward,
    aten.select_backward.default: _select_backward,
    aten.index.Tensor: _rows,
    aten.new_zeros.default: _new_zeros,
    **dict.fromkeys((aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default), _put_rows),
    **dict.fromkeys(
        (
            *(getattr(aten, name).Tensor for name in ("add", "sub", "mul", "div", "add_", "sub_", "mul_", "div_")),
            *(getattr(aten, name).default for name in ("neg", "tanh", "tanh_backward", "tanh_", "copy_", "zero_")),
        ),
        _elementwise,
    ),
}
