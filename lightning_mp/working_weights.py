"""Which weights of a module are held in 16 bit, and the cast in place."""

import warnings

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

__all__ = ["cast_weights_", "keeps_float32"]

# Their kernels want weights in the dtype of the running statistics, and those are fp32 (torch 2.13, CPU and CUDA).
_WITH_STATISTICS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)

_CAST_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def keeps_float32(module: nn.Module) -> bool:
    """Whether a module's own weights stay fp32: those of norms with running statistics, which are few."""
    return isinstance(module, _WITH_STATISTICS)


def cast_weights_(module: nn.Module, dtype: torch.dtype) -> dict[nn.Parameter, Tensor]:
    """Casts a module's weights in place; parameters stay the same objects.

    Cast are fp32, fp16 and bf16 parameters. Buffers, the weights of norms with running statistics
    (:func:`keeps_float32`), and parameters of other dtypes (fp64, complex) stay as they are.

    Args:
        module: also gets ``dtype`` as its ``module.dtype`` if it is a Lightning module.
        dtype: fp16 or bf16.

    Returns:
        What each parameter that was cast held before. It shares the memory, so nothing was copied.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(2, 1)
        >>> before = cast_weights_(layer, torch.bfloat16)
        >>> layer.weight.dtype, before[layer.weight].dtype
        (torch.bfloat16, torch.float32)
    """
    held = {parameter: parameter.data for parameter in module.parameters()}
    buffers = [
        (owner, name, buffer) for owner in module.modules() for name, buffer in owner.named_buffers(recurse=False)
    ]
    kept = {p for owner in module.modules() if keeps_float32(owner) for p in owner.parameters(recurse=False)}
    other = {name: p.dtype for name, p in module.named_parameters() if p.dtype not in _CAST_DTYPES}
    if other:
        rank_zero_warn(f"Only fp32 weights are held in {dtype}. These stay as they are, without masters: {other}.")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Casting complex values to real")
        # `to` and not `parameter.data =`: modules with an `_apply` of their own (RNNs, FSDP2) follow it.
        module.to(dtype)
    for parameter, data in held.items():
        if parameter in kept or data.dtype not in _CAST_DTYPES:
            parameter.data = data
    for owner, name, buffer in buffers:
        setattr(owner, name, buffer)
    return {p: data for p, data in held.items() if p not in kept and data.dtype in _CAST_DTYPES}
