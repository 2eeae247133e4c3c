"""fp32 storage, matrix products in TF32."""

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_mp.precision.base import EpiloguePrecision
from lightning_mp.tf32_settings import tf32_matmuls_and_convolutions, why_no_tf32

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecision as FSDPMixedPrecision

__all__ = ["TF32Precision"]


class TF32Precision(EpiloguePrecision):
    """Everything is stored in fp32; CUDA multiplies matrices and convolves in TF32, for as long as the Trainer runs.

    TF32 rounds the operands to 10 mantissa bits and sums in fp32. torch has it on for cuDNN and off for matrix
    products. The caller's settings, old and new, are put back when fit, validate, test or predict ends, also by an
    exception; see :func:`~lightning_mp.tf32_settings.tf32_matmuls_and_convolutions`.

    Non-finite gradients never reach the optimizer, as with every plugin of this package.

    Example:
        >>> from lightning_mp import TF32Precision
        >>> TF32Precision().precision
        '32-true'
    """

    def __init__(self) -> None:
        self.precision = "32-true"
        self.scaler = None
        self._switched_on = ExitStack()

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Meets the Trainer and switches TF32 on; the module stays as it is.

        Raises:
            MisconfigurationException: if the device has no TF32.
        """
        module = super().convert_module(module)
        assert self._trainer is not None
        reason = _why_not(self._trainer.strategy.root_device)
        if reason is not None:
            raise MisconfigurationException(f"TF32Precision cannot run on this device: {reason}")
        self._switched_on.close()
        self._switched_on.enter_context(tf32_matmuls_and_convolutions())
        return module

    def teardown(self) -> None:
        """Puts the caller's settings back."""
        self._switched_on.close()
        super().teardown()

    def _steps_in(self, loop: str) -> AbstractContextManager[None]:
        """No autocast."""
        return nullcontext()

    @property
    def mixed_precision_config(self) -> "FSDPMixedPrecision":
        """For ``FSDPStrategy``: fp32 throughout."""
        from torch.distributed.fsdp import MixedPrecision as FSDPMixedPrecision

        return FSDPMixedPrecision(param_dtype=torch.float32, reduce_dtype=torch.float32, buffer_dtype=torch.float32)


def _why_not(device: torch.device) -> str | None:
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return why_no_tf32(device.type, capability, is_rocm=torch.version.hip is not None)
