"""Mixed precision by autocast."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only, rank_zero_warn
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_mp import seams
from lightning_mp.loss_scaler import LossScaler
from lightning_mp.policy import PrecisionPolicy
from lightning_mp.policy_rules import named_modules
from lightning_mp.policy_table import show
from lightning_mp.precision.applied_policy import AppliedPolicy
from lightning_mp.precision.base import EpiloguePrecision
from lightning_mp.precision.frozen_weights import FrozenWeights

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecision as FSDPMixedPrecision

__all__ = ["AutocastPrecision"]

_DTYPES = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}

_EVAL_PRECISIONS = ("32-true", *_DTYPES)

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
        policy: a :class:`~lightning_mp.PrecisionPolicy`, or its rules as a mapping: which modules and operations run in
            another dtype than autocast's own lists say. What it resolved to is printed at set-up.
        eval_precision: for validation, test and predict steps; None for that of training.

    Frozen weights of linear and convolutional layers are cast once and kept in 16 bit besides (2 bytes per frozen
    parameter), not at every use.

    Raises:
        ValueError: if ``precision`` or ``eval_precision`` is unknown; at set-up, if a rule of the policy matches
            nothing.
        MisconfigurationException: if a scaler is given with "bf16-mixed", or fp16 is asked for without one; at set-up,
            if the device or the strategy cannot do it.

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
        *,
        policy: PrecisionPolicy | Mapping[str, str] | None = None,
        eval_precision: Literal["32-true", "16-mixed", "bf16-mixed"] | None = None,
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
        self.policy = policy if isinstance(policy, PrecisionPolicy) or policy is None else PrecisionPolicy(policy)
        _check_policy(self.policy, self.scaler)
        self.eval_precision = _checked_eval_precision(eval_precision or precision)
        self._applied: AppliedPolicy | None = None
        self._frozen: FrozenWeights | None = None
        self._shown_table = ""

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
        if self.eval_precision != self.precision:
            self._check_eval_precision(root)
        self._take_over(module, root)
        return module

    def _take_over(self, module: nn.Module, device_type: str) -> None:
        """Applies the policy and finds the weights that autocast would cast again and again."""
        assert self._trainer is not None
        kept: tuple[str, ...] = ()
        if self.policy is not None:
            self._applied = AppliedPolicy(self.policy, module, device_type)
            kept = self._applied.resolved.modules_kept_from_low()
            self._show_policy(str(self._applied.resolved))
        if not isinstance(self._trainer.strategy, FSDPStrategy | ModelParallelStrategy):  # they cast what they gather
            low = [low_module for name, low_module in named_modules(module) if name not in kept]
            self._frozen = FrozenWeights(low, self.dtype, device_type)

    def _show_policy(self, table: str) -> None:
        """Prints what the policy resolved to, again only if it changes."""
        if table != self._shown_table and self._applied is not None:
            self._shown_table = table
            rank_zero_only(show)(self._applied.resolved)

    def teardown(self) -> None:
        """Gives every module its own forward back; forgets the Trainer and its device."""
        frozen, self._frozen = self._frozen, None
        applied, self._applied = self._applied, None
        if frozen is not None:
            frozen.detach()
        if applied is not None:
            applied.detach()
        super().teardown()
        self.device = self._asked_device

    def _check_device(self, device_type: str, precision: str | None = None) -> None:
        precision = precision or self.precision
        if not torch.amp.is_autocast_available(device_type) or (
            precision == "16-mixed" and device_type not in _FP16_DEVICE_TYPES
        ):
            raise MisconfigurationException(
                f"AutocastPrecision({precision!r}) cannot run on {device_type!r}: torch has no {_DTYPES[precision]}"
                f" autocast there. Use one of {_FP16_DEVICE_TYPES}, another precision, or none."
            )
        if (
            precision == "bf16-mixed"
            and device_type == "cuda"
            and not torch.cuda.is_bf16_supported(including_emulation=False)
        ):
            rank_zero_warn(
                f"{torch.cuda.get_device_name()} has no bf16 units: bf16 is emulated there and slow."
                " Use AutocastPrecision('16-mixed')."
            )

    def _check_eval_precision(self, device_type: str) -> None:
        assert self._trainer is not None
        if isinstance(self._trainer.strategy, FSDPStrategy):
            raise MisconfigurationException(
                f"AutocastPrecision({self.precision!r}, eval_precision={self.eval_precision!r}) with FSDPStrategy: it"
                f" gathers parameters in {self.dtype} for evaluation, too. Leave eval_precision out, or use"
                " ModelParallelStrategy."
            )
        if self.eval_precision in _DTYPES:
            self._check_device(device_type, self.eval_precision)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def autocast_context_manager(self) -> torch.autocast:
        """Autocast with its weight cache on: a weight is cast once per forward, however often it is used."""
        return self._autocast(self.dtype)

    def forward_context(self) -> AbstractContextManager[Any]:  # type: ignore[override]  # the parents disagree
        """Autocast, with the policy in force; for training steps."""
        return self._steps_in(self.precision, "train")

    def val_step_context(self) -> AbstractContextManager[None]:  # type: ignore[override]  # a generator there
        """The same in ``eval_precision``; for validation steps."""
        return self._steps_in(self.eval_precision, "validate")

    def test_step_context(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """The same in ``eval_precision``; for test steps."""
        return self._steps_in(self.eval_precision, "test")

    def predict_step_context(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """The same in ``eval_precision``; for predict steps."""
        return self._steps_in(self.eval_precision, "predict")

    @contextmanager
    def _steps_in(self, precision: str, loop: str) -> Iterator[None]:
        dtype = _DTYPES.get(precision)
        with ExitStack() as stack:
            if dtype is not None:
                if self._frozen is not None and dtype == self.dtype:
                    self._frozen.refresh(loop)
                stack.enter_context(seams.backward_outside_autocast())
                stack.enter_context(self._autocast(dtype))
            if self._applied is not None:
                stack.enter_context(self._applied.in_force(dtype))
            yield

    def _autocast(self, dtype: torch.dtype, enabled: bool = True) -> torch.autocast:
        return torch.autocast(torch.device(self.device or "cpu").type, dtype, enabled, cache_enabled=True)

    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: "pl.LightningModule", optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Runs the module's backward outside of autocast, with the policy in force.

        Each operation's backward runs in the dtype of its forward, also in manual optimization, where all of the
        training step is under autocast. The policy is for what activation checkpoints compute again.
        """
        with ExitStack() as stack:
            stack.enter_context(self._autocast(self.dtype, enabled=False))
            if self._applied is not None:
                stack.enter_context(self._applied.in_force(self.dtype))
            super().backward(tensor, model, optimizer, *args, **kwargs)

    @property
    def mixed_precision_config(self) -> "FSDPMixedPrecision":
        """For ``FSDPStrategy``: 16-bit parameters in forward and backward, gradients reduced in fp32, fp32 buffers.

        FSDP1 has one dtype for all parameters. A policy that asks for another one in some modules gets fp32 parameters,
        which autocast casts at their use: twice the bytes to gather. Under rules about operations parameters come in 16
        bit, and fp32 operations cast them up.
        """
        from torch.distributed.fsdp import MixedPrecision as FSDPMixedPrecision

        in_fp32 = self.policy is not None and self.policy.names_modules
        return FSDPMixedPrecision(
            param_dtype=None if in_fp32 else self.dtype, reduce_dtype=torch.float32, buffer_dtype=torch.float32
        )


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


def _check_policy(policy: PrecisionPolicy | None, scaler: object) -> None:
    if policy is not None and scaler is None and torch.float16 in policy.dtypes:
        rules = ", ".join(str(rule) for rule in policy.rules if rule.dtype == torch.float16)
        raise MisconfigurationException(
            f"The policy asks for fp16 ({rules}), and without a loss scale small gradients vanish there. Use"
            " AutocastPrecision('16-mixed'), or 'bf16' in the rules."
        )


def _checked_eval_precision(precision: str) -> str:
    if precision not in _EVAL_PRECISIONS:
        raise ValueError(
            f"AutocastPrecision(eval_precision={precision!r}) is unknown; it must be one of {_EVAL_PRECISIONS}, or None"
            " for the precision of training."
        )
    return precision
