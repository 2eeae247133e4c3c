"""fp32 storage, matrix products in TF32."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from typing_extensions import override

from lightning_mp.training.precision.full_weights import FullWeightsPrecision

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecision as FSDPMixedPrecision


class TF32Precision(FullWeightsPrecision):
    """Stores everything in fp32; CUDA matrix products and convolutions use TF32 while the Trainer runs.

    TF32 rounds the operands to 10 mantissa bits and sums in fp32. By default torch enables it for cuDNN but not for
    matrix products. The caller's settings, in torch's old and new API, are restored when fit, validate, test or predict
    ends, even after an exception; see :func:`~lightning_mp.training.precision.tf32.tf32_matmuls_and_convolutions`.

    Non-finite gradients never reach the optimizer, as with every plugin of this package.

    Args:
        weight_by: see :class:`~lightning_mp.AutocastPrecision`.

    Example:
        >>> from lightning_mp import TF32Precision
        >>> TF32Precision().precision
        '32-true'
    """

    def __init__(self, *, weight_by: Literal["loss"] | None = "loss") -> None:
        super().__init__("32-true", None, weight_by)

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        """Switches TF32 on; the module stays as it is.

        Raises:
            MisconfigurationException: if the device has no TF32.
        """
        module = super().convert_module(module)
        reason = _why_not(self._run.trainer.strategy.root_device)
        if reason is not None:
            raise MisconfigurationException(f"TF32Precision cannot run on this device: {reason}")
        self._run.cleanups.enter_context(tf32_matmuls_and_convolutions())
        return module

    @override
    def _steps_in(self, loop: str) -> AbstractContextManager[None]:
        """No autocast."""
        return nullcontext()

    @property
    @override
    def mixed_precision_config(self) -> "FSDPMixedPrecision":
        """For ``FSDPStrategy``: fp32 throughout."""
        from torch.distributed.fsdp import MixedPrecision as FSDPMixedPrecision

        return FSDPMixedPrecision(param_dtype=torch.float32, reduce_dtype=torch.float32, buffer_dtype=torch.float32)


def _why_not(device: torch.device) -> str | None:
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return why_no_tf32(device.type, capability, is_rocm=torch.version.hip is not None)


# torch keeps two sets of switches (torch 2.9 to 2.13, aten/src/ATen/Context.cpp). The new ones, `fp32_precision`, form
# a tree in which "none" takes the parent's value: everything -> CUDA -> matmul, conv, rnn. The old ones are
# `allow_tf32` and `set_float32_matmul_precision`. The kernels read the new set, but reading an old switch raises where
# the two disagree, and Lightning itself reads one when a CUDA run starts. So both sets are switched, and both put back.


@contextmanager
def tf32_matmuls_and_convolutions() -> Iterator[None]:
    """Lets CUDA multiply fp32 matrices, and cuDNN convolve, in TF32; restores all settings, also after an exception.

    .. code-block:: text

        TF32 keeps 8 exponent bits and 10 of 23 mantissa bits of the operands; sums are fp32.
        on:   torch.backends.cuda.matmul and torch.backends.cudnn.{conv,rnn}, old and new switches alike
        off:  what the caller had, in both sets, also where the caller's two sets disagreed

    Settings of the CPU (``torch.backends.mkldnn``) are not touched.
    """
    with _old_switches_allowed():
        settings = _read()
    try:
        with _old_switches_allowed():
            _switch_on()
        yield
    finally:
        with _old_switches_allowed():
            _put_back(settings)


def why_no_tf32(device_type: str, capability: tuple[int, int] | None = None, *, is_rocm: bool = False) -> str | None:
    """Why a device cannot do TF32, and what to use there; None if it can.

    >>> why_no_tf32("cuda", (8, 0))
    >>> why_no_tf32("cuda", (7, 5))
    "it has compute capability 7.5, and TF32 needs 8.0 (Ampere) or later. Use AutocastPrecision('16-mixed')."
    """
    if device_type != "cuda":
        return (
            f"TF32 is a mode of NVIDIA's matrix units, and this is {device_type!r}."
            " Use Trainer(precision='32-true') without this plugin, or AutocastPrecision('bf16-mixed')."
        )
    if is_rocm:
        return (
            "TF32 is a mode of NVIDIA's matrix units, and this is an AMD device, where torch ignores the switch."
            " Use Trainer(precision='32-true') without this plugin, or AutocastPrecision('bf16-mixed')."
        )
    # NVIDIA, CUDA C++ Programming Guide, "Arithmetic Instructions": TF32 tensor cores from compute capability 8.0 on.
    if capability is not None and capability < (8, 0):
        return (
            f"it has compute capability {capability[0]}.{capability[1]}, and TF32 needs 8.0 (Ampere) or later."
            " Use AutocastPrecision('16-mixed')."
        )
    return None


@dataclass(frozen=True)
class _Settings:
    """Both sets, the new one as it is stored: "none" where a value comes from the parent."""

    new: tuple[str, ...]
    old_matmul: bool
    old_cudnn: bool


def _new_switches() -> list[Any]:
    """Everything, all of CUDA, and the three operations; parents first. Each has an attribute ``fp32_precision``."""
    everything: Any = torch.backends
    cudnn: Any = torch.backends.cudnn
    return [everything, cudnn, torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn]


def _read() -> _Settings:
    new = []
    for switch in _new_switches():
        new.append(switch.fp32_precision)
        switch.fp32_precision = "none"  # so that its children show what they store themselves
    old_matmul = _is_on(lambda: torch.backends.cuda.matmul.allow_tf32)
    old_cudnn = _is_on(lambda: torch.backends.cudnn.allow_tf32)
    settings = _Settings(tuple(new), old_matmul, old_cudnn)
    _put_back_new(settings)
    return settings


def _is_on(read_old_switch: Callable[[], bool]) -> bool:
    """An old switch, while the new ones say that TF32 is off: where the two disagree, reading raises."""
    try:
        return read_old_switch()
    except RuntimeError:
        return True


def _switch_on() -> None:
    _set_old_matmul(True)
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.backends.cudnn.allow_tf32 = True


def _put_back(settings: _Settings) -> None:
    _set_old_matmul(settings.old_matmul)
    torch.backends.cudnn.allow_tf32 = settings.old_cudnn
    _put_back_new(settings)


def _set_old_matmul(on: bool) -> None:
    """Sets the old switch if it is not so already: setting it would turn the caller's "medium" into "high"."""
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    if _is_on(lambda: torch.backends.cuda.matmul.allow_tf32) != on:
        torch.backends.cuda.matmul.allow_tf32 = on


def _put_back_new(settings: _Settings) -> None:
    for switch, precision in zip(_new_switches(), settings.new, strict=True):
        switch.fp32_precision = precision


@contextmanager
def _old_switches_allowed() -> Iterator[None]:
    """Without torch's advice to use the new switches only."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Please use the new API settings to control TF32 behavior")
        yield
