"""Mixed precision by autocast."""

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_mp.loss_scaler import LossScaler
from lightning_mp.precision.base import EpiloguePrecision

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecision as FSDPMixedPrecision

__all__ = ["AutocastPrecision"]

_DTYPES = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}

# Device types on which torch.autocast casts to fp16 (torch 2.13, torch/amp/autocast_mode.py).
_FP16_DEVICE_TYPES = ("cuda", "cpu", "mps", "xpu")


class AutocastPrecision(EpiloguePrecision):
    """fp32 weights, matrix products in fp16 or bf16 through ``torch.autocast``, fp32 gradients.

    A drop-in for Lightning's ``MixedPrecision`` and ``FSDPPrecision``::

        trainer = L.Trainer(plugins=[AutocastPrecision("16-mixed")])

    Args:
        precision: "16-mixed" or "bf16-mixed".
        device: device type for autocast; None takes the Trainer's.
        scaler: any ``torch.amp.GradScaler`` for "16-mixed"; None makes a :class:`~lightning_mp.LossScaler`. The plugin
            drives its ``scale``, ``update`` and state; unscaling and stepping are the plugin's own. "bf16-mixed" takes
            none.

    Raises:
        ValueError: if ``precision`` is unknown.
        MisconfigurationException: if a scaler is given with "bf16-mixed"; at set-up, if the device cannot do it.

    Example:
        >>> from lightning_mp import AutocastPrecision, LossScaler
        >>> AutocastPrecision("16-mixed", scaler=LossScaler("cpu", init_scale=1024.0)).scaler.get_scale()
        1024.0
    """

    def __init__(
        self,
        precision: Literal["16-mixed", "bf16-mixed"],
        device: str | None = None,
        scaler: "torch.amp.GradScaler | None" = None,
    ) -> None:
        if precision not in _DTYPES:
            raise ValueError(
                f"AutocastPrecision(precision={precision!r}) is unknown; it must be one of {tuple(_DTYPES)}."
                " For fp32 leave the plugin out: Trainer(precision='32-true')."
            )
        if scaler is not None and precision == "bf16-mixed":
            raise MisconfigurationException(
                f"AutocastPrecision('bf16-mixed') takes no scaler, got {type(scaler).__name__}: bf16 has the range of"
                " fp32. Leave the scaler out, or use '16-mixed'."
            )
        _check_device_and_scaler(device, scaler)
        self.precision = precision
        self._asked_device = device
        self.device: str | None = device  # type: ignore[assignment]  # None until the Trainer is known
        if precision == "16-mixed" and scaler is None:
            scaler = LossScaler(device)
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None

    @property
    def dtype(self) -> torch.dtype:
        """The 16-bit dtype."""
        return _DTYPES[self.precision]

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Meets the Trainer and checks that its device can do what is asked for.

        Raises:
            MisconfigurationException: if it cannot.
        """
        module = super().convert_module(module)
        assert self._trainer is not None
        root = self._trainer.strategy.root_device.type
        self.device = self._asked_device or root
        if torch.device(self.device).type != root:
            raise MisconfigurationException(
                f"AutocastPrecision(device={self.device!r}) but the Trainer runs on {root!r}: nothing would be cast."
                f" Leave device out, or give {root!r}."
            )
        self._check_device(root)
        return module

    def teardown(self) -> None:
        """Forgets the Trainer and its device."""
        super().teardown()
        self.device = self._asked_device

    def _check_device(self, device_type: str) -> None:
        if not torch.amp.is_autocast_available(device_type) or (
            self.precision == "16-mixed" and device_type not in _FP16_DEVICE_TYPES
        ):
            raise MisconfigurationException(
                f"AutocastPrecision({self.precision!r}) cannot run on {device_type!r}: torch has no"
                f" {self.dtype} autocast there. Use one of {_FP16_DEVICE_TYPES}, another precision, or none."
            )
        if (
            self.precision == "bf16-mixed"
            and device_type == "cuda"
            and not torch.cuda.is_bf16_supported(including_emulation=False)
        ):
            rank_zero_warn(
                f"{torch.cuda.get_device_name()} has no bf16 units: bf16 is emulated there and slow."
                " Use AutocastPrecision('16-mixed')."
            )

    def autocast_context_manager(self) -> torch.autocast:
        """Autocast with its weight cache on: a weight is cast once per forward, however often it is used."""
        return torch.autocast(torch.device(self.device or "cpu").type, dtype=self.dtype, cache_enabled=True)

    def forward_context(self) -> AbstractContextManager[Any]:  # type: ignore[override]  # the parents disagree
        """Autocast, for training, validation, test and predict steps."""
        return self.autocast_context_manager()

    @property
    def mixed_precision_config(self) -> "FSDPMixedPrecision":
        """For ``FSDPStrategy``: 16-bit parameters in forward and backward, gradients reduced in fp32, fp32 buffers."""
        from torch.distributed.fsdp import MixedPrecision as FSDPMixedPrecision

        return FSDPMixedPrecision(param_dtype=self.dtype, reduce_dtype=torch.float32, buffer_dtype=torch.float32)


def _check_device_and_scaler(device: object, scaler: object) -> None:
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise ValueError(
            f"AutocastPrecision(scaler={scaler!r}): it must be a torch.amp.GradScaler, for instance"
            " lightning_mp.LossScaler(init_scale=1024.0)."
        )
    if device is None:
        return
    try:
        device_type = torch.device(device).type if isinstance(device, str) else None
    except RuntimeError:
        device_type = None
    if device_type is None:
        raise ValueError(
            f"AutocastPrecision(device={device!r}): it must be a device type such as 'cuda' or 'cpu', or None for the"
            " Trainer's."
        )
