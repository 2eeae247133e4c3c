"""Gradients that a rank has computed without DDP's reduction, reduced afterwards as if in one backward."""

from collections.abc import Iterable
from typing import Any

import torch
from lightning.pytorch.overrides.distributed import prepare_for_backward
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override


def reduce_gradients(model: DistributedDataParallel, hooked: Iterable[Tensor]) -> None:
    """Sends every ``p.grad`` through DDP's own reducer, bucket by bucket, in the order of any other backward.

    ``hooked`` are the tensors that DDP has hooked: parameters, or what stands in their place.

    Other ranks may be in a backward that overlaps with its reduction: they wait for these buckets in theirs. A backward
    that adds zeros is what sets the reducer to work; communication hooks run as always.
    """
    used = [p for p in hooked if p.requires_grad and p.grad is not None]
    with torch.enable_grad():
        outputs = [_passed(p) for p in used]
    prepare_for_backward(model, outputs)
    torch.autograd.backward(outputs, [_zeros(p) for p in used])


def _passed(parameter: Tensor) -> Tensor:
    passed: Tensor = _Passed.apply(parameter)  # type: ignore[no-untyped-call]
    return passed


def _zeros(parameter: Tensor) -> Tensor:
    """No numbers, in the layout of the gradient."""
    assert parameter.grad is not None
    if parameter.grad.is_sparse:
        return torch.zeros_like(parameter.grad)
    return parameter.new_zeros(()).expand_as(parameter)


class _Passed(torch.autograd.Function):
    """The identity, also for sparse gradients, which those of torch's views cannot be."""

    @staticmethod
    @override
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        return parameter.view_as(parameter)

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient
