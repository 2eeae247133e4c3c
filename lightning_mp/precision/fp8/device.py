"""Whether a device can multiply in fp8."""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from lightning_mp.precision.fp8.conversion import convert_to_float8
from lightning_mp.precision.fp8.layer_filter import DIMENSION_MULTIPLE, Float8Layer

if TYPE_CHECKING:
    from torchao.float8 import Float8LinearConfig

_OTHERWISE = "Use AutocastPrecision('bf16-mixed'), or emulate=True to try out the numerics of fp8, slowly."

# Until torch 2.13 the CPU says so of one scale per row.
_ONE_SCALE_ONLY = "only supports per-tensor scaling"

# torch 2.13, aten/src/ATen/native/cuda/ScaledBlas.cpp, `_scaled_mm_allowed_device`: 8.9 (Ada), 9.0 (Hopper) and later.
_FIRST_CUDA_CAPABILITY = (8, 9)
# There as well: MI300, MI350 and Navi 4.
_ROCM_ARCHITECTURES = ("gfx942", "gfx950", "gfx1200", "gfx1201")


def why_no_float8(
    device_type: str,
    capability: tuple[int, int] | None = None,
    *,
    rocm_architecture: str | None = None,
    emulate: bool = False,
) -> str | None:
    """Why a device cannot multiply in fp8, and what to do; None if it can."""
    if device_type == "mps":
        return "torch has no fp8 numbers on MPS, not even emulated. Use AutocastPrecision('bf16-mixed')."
    if emulate or device_type == "cpu":
        return None
    if device_type != "cuda":
        return f"on {device_type!r} torch's fp8 matrix product is not known to work. {_OTHERWISE}"
    if rocm_architecture is not None:
        if rocm_architecture.split(":")[0] in _ROCM_ARCHITECTURES:
            return None
        return (
            f"it is an AMD {rocm_architecture}, and torch multiplies in fp8 on {', '.join(_ROCM_ARCHITECTURES)}."
            f" {_OTHERWISE}"
        )
    if capability is not None and capability < _FIRST_CUDA_CAPABILITY:
        return (
            f"it has compute capability {capability[0]}.{capability[1]}, and fp8 matrix units come with 8.9 (Ada), 9.0"
            f" (Hopper) and later. {_OTHERWISE}"
        )
    return None


def why_no_float8_on(device: torch.device, *, emulate: bool = False) -> str | None:
    """The same of a device that is there."""
    if device.type != "cuda":
        return why_no_float8(device.type, emulate=emulate)
    if torch.version.hip is not None:
        architecture = torch.cuda.get_device_properties(device).gcnArchName
        return why_no_float8(device.type, rocm_architecture=architecture, emulate=emulate)
    return why_no_float8(device.type, torch.cuda.get_device_capability(device), emulate=emulate)


def try_float8(config: "Float8LinearConfig", device: torch.device) -> str | None:
    """Multiplies forward and backward once, with small ones; returns what the device said against it, or None.

    No random numbers are drawn.
    """
    size = DIMENSION_MULTIPLE
    layer = nn.utils.skip_init(nn.Linear, size, size, bias=False, device=device)
    nn.init.ones_(layer.weight)
    # Gathering in fp8 is only another way to come by the weight.
    convert_to_float8([Float8Layer("", layer, None)], replace(config, enable_fsdp_float8_all_gather=False))
    try:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            layer(torch.ones(size, size, device=device, requires_grad=True)).float().sum().backward()
    except (RuntimeError, NotImplementedError) as error:
        said = str(error).partition("\n")[0]
        if device.type == "cpu" and _ONE_SCALE_ONLY in said:
            said += f" (torch {torch.__version__}; 2.13 can.) {_OTHERWISE}"
        return said
    return None
