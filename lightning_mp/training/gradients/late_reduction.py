"""Gradients that a rank has computed without DDP's reduction, reduced afterwards as if in one backward."""

from collections.abc import Iterable

import torch
from lightning.pytorch.overrides.distributed import prepare_for_backward
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


def reduce_gradients(model: DistributedDataParallel, hooked: Iterable[Tensor]) -> None:
    """Sends every ``p.grad`` through DDP's own reducer, bucket by bucket, in the order of any other backward.

    ``hooked`` are the tensors that DDP has hooked: parameters, or what stands in their place.

    Other ranks may be in a backward that overlaps with its reduction: they wait for these buckets in theirs. A backward
    that adds zeros is what sets the reducer to work; communication hooks run as always.
    """
    used = [p for p in hooked if p.requires_grad and p.grad is not None]
    with torch.enable_grad():
        prepare_for_backward(model, [p.view_as(p) for p in used])
    torch.autograd.backward(used, [_zeros(p) for p in used])


def _zeros(parameter: Tensor) -> Tensor:
    """No numbers, in the layout of the gradient."""
    assert parameter.grad is not None
    if parameter.grad.is_sparse:
        return torch.zeros_like(parameter.grad)
    return parameter.new_zeros(()).expand_as(parameter)
