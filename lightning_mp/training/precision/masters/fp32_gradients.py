"""fp32 gradients of 16-bit parameters, for as long as they are worked on.

The true gradient of an fp16 run with a loss scale of 2^16 often does not fit into fp16 at all: what is below 6e-8 would
become zero. So whatever changes gradients (unscaling, normalising, clipping, a user's hook) is given fp32 copies.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_mp.ground.core import private_tensor_api
from lightning_mp.ground.core.half_dtypes import HALF_DTYPES
from lightning_mp.training.gradients import gradient_ops
from lightning_mp.training.gradients.gradient_ops import local_shard
from lightning_mp.training.optimizer_step.gradient_epilogue import GradientEpilogue


def as_float32(gradients: Sequence[Tensor]) -> list[Tensor]:
    """fp32 copies of gradients; those that are not 16 bit are returned as they are.

    Example:
        >>> import torch
        >>> [g.dtype for g in as_float32([torch.ones(2, dtype=torch.bfloat16)])]
        [torch.float32]
    """
    narrow = [g for g in gradients if g.dtype in HALF_DTYPES and not g.is_sparse]
    copies = [torch.empty_like(g, dtype=torch.float32) for g in narrow]
    if narrow:
        private_tensor_api.foreach_copy_(_locals(copies), _locals(narrow))
    ready = iter(copies)
    return [g if g.dtype not in HALF_DTYPES else g.float() if g.is_sparse else next(ready) for g in gradients]


def _locals(tensors: Sequence[Tensor]) -> list[Tensor]:
    """:func:`local_shard` of each; plain ones cost no call."""
    return [t if type(t) is Tensor else local_shard(t) for t in tensors]


class Fp32Gradients:
    """Replaces 16-bit gradients (``parameter.grad``) by fp32 copies, and removes them again."""

    def __init__(self) -> None:
        # parameter, its own gradient, the copy in its place; no dictionary, because the hash of a tensor is a call
        self._shown: list[tuple[Tensor, Tensor, Tensor]] = []
        #: By what 16-bit gradients are still to be multiplied when a step makes fp32 ones of them.
        self.factor: Tensor | None = None

    @property
    def are_shown(self) -> bool:
        """Whether fp32 copies are in place."""
        return bool(self._shown)

    def for_step(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """What an optimizer gets: fp32 copies of 16-bit gradients, multiplied; others as they are."""
        ready = as_float32(gradients)
        if self.factor is not None:
            copies = [copy for copy, own in zip(ready, gradients, strict=True) if copy is not own]
            gradient_ops.multiply_(_locals(copies), self.factor)
        return ready

    def show(self, parameters: Iterable[Tensor]) -> None:
        """Replaces the gradients that are 16 bit."""
        narrow = [p for p in parameters if p.grad is not None and p.grad.dtype in HALF_DTYPES]
        own = [p.grad for p in narrow if p.grad is not None]
        for parameter, gradient, copy in zip(narrow, own, self.for_step(own), strict=True):
            parameter.grad = None  # torch refuses another grad_dtype while there is a gradient
            parameter.grad_dtype = copy.dtype
            parameter.grad = copy
            self._shown.append((parameter, gradient, copy))

    def put_back(self, parameters: Iterable[Tensor] | None = None, *, written: bool = False) -> None:
        """Gives these parameters, or all, their 16-bit gradients again, as they were before :meth:`show`.

        With ``written``, what hooks have made of the copies is cast to 16 bit: another backward adds to it.
        """
        shown, self._shown = self._shown, []
        if parameters is not None:
            requested = {id(parameter) for parameter in parameters}
            self._shown = [entry for entry in shown if id(entry[0]) not in requested]
            shown = [entry for entry in shown if id(entry[0]) in requested]
        for parameter, own, copy in shown:
            now, parameter.grad = parameter.grad, None
            parameter.grad_dtype = own.dtype
            parameter.grad = own if now is copy and not written else None if now is None else now.to(own.dtype)


class Fp32GradientEpilogue(GradientEpilogue):
    """The epilogue over 16-bit gradients: it reads them as they are, and changes fp32 copies.

    ``is_evaluated`` says whether the optimizer evaluates the loss in the middle of the step that is being made. It
    reads fp32 gradients there, too.
    """

    def __init__(self, fp32_copies: Fp32Gradients, is_evaluated: Callable[[], bool], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._fp32_copies = fp32_copies
        self._is_evaluated = is_evaluated

    @override
    def make_true(self) -> None:
        """Shows true gradients, always in fp32."""
        self._fp32_copies.show(self.parameters)
        super().make_true()

    @override
    def clip_by_value(self, limit: float) -> None:
        """Limits every element, measured on true gradients."""
        self._fp32_copies.show(self.parameters)
        super().clip_by_value(limit)

    @override
    def clip_scaled(self, limit: float, *, by_value: bool) -> None:
        """Clips by the size of the true gradients but leaves them scaled; they stay fp32 until the step."""
        self._fp32_copies.show(self.parameters)
        super().clip_scaled(limit, by_value=by_value)

    @override
    def apply(self) -> None:
        """Multiplies what was planned into the gradients; into fp32 copies of 16-bit ones when the step makes them."""
        self._fp32_copies.factor = None
        if self._is_evaluated():
            self._fp32_copies.show(self.parameters)
            return super().apply()
        if self._value_limit is None and self.multiplier is not None:
            wide = [p for p in self.parameters if p.grad is not None and p.grad.dtype not in HALF_DTYPES]
            gradient_ops.multiply_(gradient_ops.local_shards(wide), self.multiplier)
            self._fp32_copies.factor, self.multiplier = self.multiplier, None
        return super().apply()
