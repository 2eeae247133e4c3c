"""Gradients of DDP reduced over ranks in 16 bit: half the bytes on the wire."""

from collections.abc import Callable
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

ReducedDtype = torch.dtype | Literal["bf16", "fp16"]

# torch compares the annotations of a hook with exactly these types.
Hook = Callable[[object, dist.GradBucket], torch.futures.Future[Tensor]]  # type: ignore[name-defined]  # unknown to mypy


def reduced_precision_hook(dtype: ReducedDtype) -> Hook:
    """A communication hook for DDP that reduces gradients in bf16 or fp16 instead of fp32.

    On CUDA, with Lightning's own strategy::

        trainer = pl.Trainer(strategy=DDPStrategy(ddp_comm_hook=reduced_precision_hook(torch.bfloat16)))

    On any other device Lightning silently registers no hook. ``Trainer(strategy="mp_ddp_bf16_reduce")`` and
    ``"mp_ddp_fp16_reduce"`` (:class:`~lightning_mp.strategies.ReducedPrecisionDDPStrategy`) work on all devices.

    Each rank divides its gradients by the number of ranks ``n`` in the dtype they have and then rounds once to 16 bit,
    so the sum of the quotients is a mean. In fp16 it overflows where a quotient or a partial sum is above 65504.
    (torch's ``fp16_compress_hook`` casts first, overflows at gradients above 65504, and rounds twice.) An inf or nan is
    preserved and reaches every rank, so that all ranks skip the step. fp16 needs a loss scale: without one, small
    gradients are rounded to zero.

    .. code-block:: text

        bytes   = 2 (n - 1) / n * 2 bytes * elements     sent by each rank of a ring; with fp32 twice as many
        |error| <= n u / (1 - n u) * mean_r |g_r| + n s  against the exact mean of the ranks' gradients g_r

    ``u`` is half the distance between 1 and the next number, 2^-8 in bf16 and 2^-11 in fp16 (Higham, "Accuracy and
    Stability of Numerical Algorithms", 2nd ed., section 3.1). ``s`` is half the smallest subnormal number, 2^-25 in
    fp16, and negligible in bf16.

    With NCCL the reduction overlaps the backward pass; with gloo each bucket blocks. In a hand-written loop on gloo,
    delete the ``DistributedDataParallel`` before ``dist.destroy_process_group()``: until torch 2.14 one that outlives
    its group may hang, with any hook or none. Lightning's strategies end in the other order.

    16-bit gradients are reduced as they are. Works with ``gradient_as_bucket_view``, with accumulation
    (DDP calls the hook once per window) and with any precision plugin.

    Args:
        dtype: ``torch.bfloat16`` or "bf16", ``torch.float16`` or "fp16".

    Returns:
        A module-level function, so that ``ddp_spawn`` can pickle it.

    Raises:
        ValueError: if ``dtype`` is neither.

    Example:
        >>> import torch
        >>> from lightning_mp import reduced_precision_hook
        >>> reduced_precision_hook(torch.bfloat16) is reduced_precision_hook("bf16")
        True
    """
    hooks: dict[object, Hook] = {
        torch.bfloat16: reduce_in_bfloat16,
        "bf16": reduce_in_bfloat16,
        torch.float16: reduce_in_float16,
        "fp16": reduce_in_float16,
    }
    if not isinstance(dtype, torch.dtype | str) or dtype not in hooks:
        raise ValueError(
            f"reduced_precision_hook(dtype={dtype!r}) is not valid; it must be torch.bfloat16 or 'bf16', or"
            " torch.float16 or 'fp16'. Without a hook DDP reduces gradients in the dtype they have."
        )
    return hooks[dtype]


def reduce_in_bfloat16(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    """The hook for bf16; ``state`` is a process group, or None for all ranks."""
    return _mean_over_ranks(state, bucket.buffer(), torch.bfloat16)


def reduce_in_float16(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    """The same for fp16."""
    return _mean_over_ranks(state, bucket.buffer(), torch.float16)


def _mean_over_ranks(state: object, gradients: Tensor, dtype: torch.dtype) -> torch.futures.Future[Tensor]:
    group = state if isinstance(state, dist.ProcessGroup) else None
    wire = gradients if gradients.element_size() <= dtype.itemsize else torch.empty_like(gradients, dtype=dtype)
    # Divides in the dtype of the gradients, writes in that of the wire: one rounding.
    torch.div(gradients, dist.get_world_size(group), out=wire)
    work = dist.all_reduce(wire, group=group, async_op=True)
    assert work is not None

    def widen(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        return gradients.copy_(future.value()[0])

    reduced: torch.futures.Future[Tensor]
    if wire.is_cuda and "cuda:nccl" in str(dist.get_backend_config(group)).split(","):
        reduced = work.get_future().then(widen)  # called here and now: NCCL's future is done, its stream is not
    else:
        # gloo would call `widen` in its own thread, which needs Python's lock once more after the future is
        # done; if the run ends just then, the process aborts ("terminate called without an active exception").
        work.wait()
        reduced = torch.futures.Future(devices=[wire.device] if wire.is_cuda else None)
        reduced.set_result(gradients.copy_(wire))
    return reduced
