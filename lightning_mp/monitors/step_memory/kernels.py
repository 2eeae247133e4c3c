"""Where the kernels of a device differ from what fake tensors run, as far as their memory is concerned.

The simulated step runs the CPU's operations. What a GPU's fused kernels do not make is left out here, and what kernels
allocate beside their outputs is added.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_mp.ground.core.half_dtypes import HALF_DTYPES

#: cuBLAS gets a workspace for each thread that calls it, forward and backward: 32 MiB on compute capability 9.0, 8.1
#: before (torch 2.11, aten/src/ATen/cuda/CublasHandlePool.cpp). On an H200 the allocator held 73 to 81 MiB more than
#: all tensors (docs/results/bench_gpu_2026-11-27-2.md); three of 32 MiB are counted.
CUDA_WORKSPACE_BYTES = 3 * 32 * 2**20


class CudaKernels(TorchFunctionMode):
    """While this is entered, operations of fake tensors on the CPU save and make what CUDA's kernels do.

    Attention with dropout is fused there, and keeps no scores; softmax reads 16 bit and gives fp32 in one kernel, so
    there is no fp32 copy of the logits.
    """

    @override
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            args, kwargs = _without_dropout(args, kwargs)
        elif func is F.cross_entropy and _is_wide(args, kwargs):
            return _cross_entropy(*args, **kwargs)
        return func(*args, **kwargs)


def _without_dropout(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
    position = 4  # of dropout_p in the signature
    kwargs.pop("dropout_p", None)
    return (*args[:position], *((0.0,) if len(args) > position else ()), *args[position + 1 :]), kwargs


def _is_wide(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether autocast makes the loss of 16-bit logits in fp32, and its targets are classes."""
    if len(args) < 2 or len(args) > 2 or kwargs.get("label_smoothing"):
        return False
    logits, target = args
    low = logits.dtype in HALF_DTYPES and torch.is_autocast_enabled("cpu")
    return low and not target.is_floating_point()


def _cross_entropy(logits: Tensor, target: Tensor, **options: Any) -> Tensor:
    log_softmax: Callable[..., Tensor] = _LogSoftmax.apply
    options.pop("label_smoothing", None)
    return F.nll_loss(log_softmax(logits), target, **options)


class _LogSoftmax(torch.autograd.Function):
    """16 bit to fp32 in one kernel, and back in one."""

    @staticmethod
    @override
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        result = torch.empty_like(logits, dtype=torch.float32)
        ctx.save_for_backward(result)
        ctx.dtype = logits.dtype
        return result

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.empty_like(gradient, dtype=ctx.dtype)


# -- oneDNN ------------------------------------------------------------------------------------------------------------

_SCRATCH_BYTES = 16 * 1024
_BLOCK_CHANNELS = 16  # with AVX-512
# Of a product in bf16: blocks of its tensors, and a copy of a transposed left side.
_PADDED_INNER = 64
_MOST_BLOCKS_BYTES, _MOST_COPIED_BYTES, _ALIGNMENT_BYTES = 129 * 1024, 1280 * 1024, 1024
# How often the gradient of a 16-bit weight takes its bytes while it is summed in fp32.
_SUMMED_IN_FP32 = 3


def cpu_workspace_bytes(operation: Any, args: Sequence[Any], result: Any) -> int:
    """What oneDNN allocates beside the outputs, at most: tensors in the layout of a kernel, and 16-bit sums in fp32.

    Measured with torch 2.13 and one thread on a CPU with avx512_bf16; scratch memory differs between CPUs, and each
    thread adds sums of a 16-bit weight's gradient. Other kernels take little.
    """
    name = operation.overloadpacket.__name__
    if name.startswith("convolution") and args[1].dtype == torch.float16:
        return _columns_bytes(name, args, result)
    if name == "convolution":
        inputs, weight, transposed = args[0], args[1], bool(args[6])
        scratch = weight.nbytes + _SCRATCH_BYTES if transposed else 0
        scratch += _SCRATCH_BYTES if weight.dtype == torch.bfloat16 else 0
        filled_up = _in_blocks_bytes(result) - result.nbytes
        in_its_layout: int = max(
            inputs.nbytes + weight.nbytes + scratch + filled_up, (2 if transposed else 1) * result.nbytes
        )
        return in_its_layout
    if name == "convolution_backward":
        return _of_convolution_backward(
            *args[:3], is_strided=max(args[4]) > 1, transposed=bool(args[7]), results=result
        )
    if name in ("mm", "addmm") and result.dtype == torch.bfloat16:
        left, right = args[-2:]
        copied = 0 if left.is_contiguous() else min(left.nbytes + _ALIGNMENT_BYTES, _MOST_COPIED_BYTES)
        rows, columns, inner = left.shape[0], right.shape[1], max(left.shape[1], _PADDED_INNER)
        blocks = 2 * (rows * inner + inner * columns + rows * columns) + _ALIGNMENT_BYTES
        return int(min(blocks, _MOST_BLOCKS_BYTES) + copied)
    return 0


def _in_blocks_bytes(images: Tensor) -> int:
    """Of a tensor with its channels in blocks, the last of which is filled up."""
    channels = images.shape[1]
    return images.nbytes // channels * (-(-channels // _BLOCK_CHANNELS) * _BLOCK_CHANNELS)


def _columns_bytes(name: str, args: Sequence[Any], result: Any) -> int:
    """In fp16 a CPU without such instructions unfolds the inputs, or the outputs of a transposed convolution.

    There is a column for each place of the kernel.
    """
    if name == "convolution":
        inputs, weight, outputs, transposed = args[0], args[1], result, bool(args[6])
    else:
        outputs, inputs, weight, transposed = args[0], args[1], args[2], bool(args[7])
    if weight.shape[2:].numel() == 1:
        return 0
    places = inputs if transposed else outputs
    return int(places.numel() // places.shape[1] * weight[0].numel() * weight.itemsize)


def _of_convolution_backward(
    gradient: Tensor,
    inputs: Tensor,
    weight: Tensor,
    *,
    is_strided: bool,
    transposed: bool,
    results: Sequence[Tensor | None],
) -> int:
    """First the gradient of the inputs, then that of the weight."""
    of_inputs, of_weight = (0 if tensor is None else tensor.nbytes for tensor in results[:2])
    of_outputs, peaks = gradient.nbytes if transposed else _in_blocks_bytes(gradient), [0]
    if of_inputs:
        scratch = weight.nbytes + _SCRATCH_BYTES if is_strided or transposed else 0
        copies = 3 if is_strided and not transposed else 2
        peaks += [of_outputs + weight.nbytes + of_inputs + scratch, copies * of_inputs]
    if of_weight:
        sums = _SUMMED_IN_FP32 * of_weight + _SCRATCH_BYTES if weight.dtype == torch.bfloat16 else 0
        peaks += [of_inputs + of_outputs + inputs.nbytes + of_weight + sums]
        peaks += [of_inputs + (3 if transposed else 2) * of_weight]
    return max(0, max(peaks) - of_inputs - of_weight)
