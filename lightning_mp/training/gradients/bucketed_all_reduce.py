"""Gradients averaged over ranks that hold the same parameters, in buckets and in fp32."""

from collections import deque
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_mp.ground.core import private_tensor_api

#: As DDP's ``bucket_cap_mb=25``.
BUCKET_BYTES = 25 * 2**20

#: While one bucket is sent, the next is filled.
MOST_IN_FLIGHT = 2


def reduce_gradients_(gradients: Sequence[Tensor], group: ProcessGroup, *, mean: bool) -> None:
    """Replaces gradients by their mean or sum over the ranks of a group, in place.

    16-bit gradients are reduced in fp32 and rounded once at the end. One collective for each bucket; two buckets are
    on their way at a time, so that no second copy of all gradients is held.
    """
    size = dist.get_world_size(group)
    if size == 1:
        return
    in_flight: deque[tuple[list[Tensor], Tensor, dist.Work | None]] = deque()
    for bucket in buckets(gradients, BUCKET_BYTES):
        if len(in_flight) == MOST_IN_FLIGHT:
            _write_back(*in_flight.popleft())
        wide = [torch.promote_types(gradient.dtype, torch.float32) for gradient in bucket]
        flat = torch.cat([gradient.reshape(-1).to(dtype) for gradient, dtype in zip(bucket, wide, strict=True)])
        if mean:
            flat.div_(size)  # before the sum, as DDP does
        in_flight.append((bucket, flat, dist.all_reduce(flat, group=group, async_op=True)))
        del flat  # the name would keep this bucket alive while the next one is filled
    while in_flight:
        _write_back(*in_flight.popleft())


def _write_back(bucket: list[Tensor], flat: Tensor, work: dist.Work | None) -> None:
    assert work is not None
    work.wait()
    parts = flat.split([gradient.numel() for gradient in bucket])
    private_tensor_api.foreach_copy_(bucket, [part.view_as(g) for part, g in zip(parts, bucket, strict=True)])


def buckets(gradients: Iterable[Tensor], most_bytes: int) -> list[list[Tensor]]:
    """Gradients of one device and dtype together, in order, at most n fp32 bytes in each; one at least.

    >>> import torch
    >>> [len(bucket) for bucket in buckets([torch.zeros(4), torch.zeros(4), torch.zeros(100)], 64)]
    [2, 1]
    """
    made: list[list[Tensor]] = []
    filled = 0
    for gradient in gradients:
        size = gradient.numel() * max(4, gradient.element_size())
        last = made[-1][-1] if made else None
        fits = last is not None and filled + size <= most_bytes
        if last is None or not fits or (last.device, last.dtype) != (gradient.device, gradient.dtype):
            made.append([])
            filled = 0
        made[-1].append(gradient)
        filled += size
    return made
