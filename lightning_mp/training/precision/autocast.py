"""Mixed precision by autocast."""

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Literal

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from typing_extensions import override

from lightning_mp.ground.core.arguments import true_or_false
from lightning_mp.ground.core.known_words import refuse_unknown
from lightning_mp.ground.core.messages import listed
from lightning_mp.ground.core.precisions import AUTOCAST_DTYPES, MASTER_DTYPES
from lightning_mp.training.distributed.fsdp1_models import FSDP1Model
from lightning_mp.training.optimizer_step.loss_scaler import LossScaler
from lightning_mp.training.policy.applied import fsdp_mixed_precision, read_policy
from lightning_mp.training.policy.policy import PolicyLike
from lightning_mp.training.policy.sharding_units import gathered_in_another_low
from lightning_mp.training.precision.autocast_context import AutocastRun, warn_about_emulated_bf16, why_no_autocast
from lightning_mp.training.precision.eval_outputs import Float32EvalOutputs
from lightning_mp.training.precision.full_weights import FullWeightsPrecision

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecision as FSDPMixedPrecision

_EVAL_PRECISIONS = ("32-true", *AUTOCAST_DTYPES)


class AutocastPrecision(FullWeightsPrecision):
    """fp32 weights, matrix products in fp16 or bf16 through ``torch.autocast``, fp32 gradients.

    A drop-in for Lightning's ``MixedPrecision`` and ``FSDPPrecision``::

        trainer = pl.Trainer(plugins=[AutocastPrecision("16-mixed")])

    Args:
        precision: "16-mixed" or "bf16-mixed".
        device: device type for autocast; None takes the Trainer's.
        scaler: any ``torch.amp.GradScaler`` for "16-mixed"; None creates a :class:`~lightning_mp.LossScaler`. The
            plugin calls its ``scale`` and ``update`` and saves its state, but unscales and steps itself. Not allowed
            with "bf16-mixed".
        policy: a :class:`~lightning_mp.PrecisionPolicy`, or its rules as a mapping: modules and operations that run in
            a dtype other than the one autocast would choose; "default" is
            :meth:`PrecisionPolicy.default() <lightning_mp.PrecisionPolicy.default>`. The resolved rules are printed at
            set-up.
        eval_precision: precision of validation, test and predict steps; None uses that of training. "32-true" turns
            autocast off; weights stored in 16 bit still compute in 16 bit, with a warning.
        fp32_eval_outputs: True casts what the module and its children return to validation, test and predict steps, and
            what these steps return, to fp32, so that ``.numpy()`` works and metrics count in fp32. Layers inside
            continue in 16 bit; outputs of other methods than ``forward`` are cast only where a step returns them.
        cache_weights: False casts a weight at every use, bit-identical to Lightning's ``MixedPrecision``. True turns on
            torch's weight cache: a trainable weight is cast once per step, however often it is used. This saves casts
            but is wrong in two cases: a change to a weight within a step has no effect until the step ends
            (hand-written SAM, MAML's inner loop, averaged weights swapped in for validation), and gradients from
            several uses of one weight are summed in 16 bit (8 uses: error 5e-3 instead of 3e-3).
        weight_by: "loss" weights the micro-batches of one optimizer step, over the accumulation window and all ranks,
            by the number of items their loss averages over, which is read from the loss's autograd graph. None gives
            all micro-batches the same weight, as in Lightning. Micro-batches whose graph does not show the number also
            get the same weight.

    Frozen weights are cast at every use too; load them in 16 bit where that cost matters.

    Raises:
        ValueError: if ``precision`` or ``eval_precision`` is unknown; at set-up, if a rule of the policy matches
            nothing.
        MisconfigurationException: if a scaler is given with "bf16-mixed", or fp16 is requested without one; at set-up,
            if the device or the strategy does not support it, or trainable weights are fp16.

    Example:
        >>> from lightning_mp import AutocastPrecision, LossScaler
        >>> AutocastPrecision("16-mixed", scaler=LossScaler("cpu", init_scale=1024.0)).scaler.get_scale()
        1024.0
    """

    def __init__(
        self,
        precision: Literal["16-mixed", "bf16-mixed"],
        device: str | None = None,
        scaler: "LossScaler | torch.amp.GradScaler | None" = None,
        *,
        policy: PolicyLike | Literal["default"] | None = None,
        eval_precision: Literal["32-true", "16-mixed", "bf16-mixed"] | None = None,
        fp32_eval_outputs: bool = False,
        cache_weights: bool = False,
        weight_by: Literal["loss"] | None = "loss",
    ) -> None:
        of_masters = f" For 16-bit copies of weights use MasterWeightsPrecision({precision!r})."
        in_fp32 = " For fp32 leave the plugin out: Trainer(precision='32-true')."
        hint = of_masters if precision in tuple(MASTER_DTYPES) else in_fp32
        refuse_unknown(precision, "precision", "AutocastPrecision", AUTOCAST_DTYPES, hint=hint)
        if scaler is not None and precision == "bf16-mixed":
            raise MisconfigurationException(
                f"AutocastPrecision('bf16-mixed') takes no scaler, got {type(scaler).__name__}: bf16 has the range of"
                " fp32. Leave the scaler out, or use '16-mixed'."
            )
        _check_device_and_scaler(device, scaler)
        if precision == "16-mixed" and scaler is None:
            scaler = LossScaler(device)
        super().__init__(precision, scaler, weight_by)
        self._requested_device = device
        self.device: str | None = device  # type: ignore[assignment]  # None until the Trainer is known
        self.policy = read_policy(policy, self.scaler, "AutocastPrecision('16-mixed')")
        self.eval_precision = _checked_eval_precision(eval_precision or precision)
        self.fp32_eval_outputs = true_or_false(fp32_eval_outputs, "fp32_eval_outputs", "AutocastPrecision")
        self._eval_outputs: Float32EvalOutputs | None = None
        self.cache_weights = true_or_false(cache_weights, "cache_weights", "AutocastPrecision")

    @property
    def dtype(self) -> torch.dtype:
        """The 16-bit dtype."""
        return AUTOCAST_DTYPES[self.precision]

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        """Takes the Trainer from the module and checks that its device supports the precision."""
        module = super().convert_module(module)
        strategy = self._run.trainer.strategy
        FSDP1Model.inspect_before_wrapping(module, strategy)
        root = strategy.root_device.type
        self.device = self._requested_device or root
        self._run.cleanups.callback(setattr, self, "device", self._requested_device)
        if torch.device(self.device).type != root:
            raise MisconfigurationException(
                f"AutocastPrecision(device={self.device!r}) but the Trainer runs on {root!r}: nothing would be cast."
                f" Leave device out, or give {root!r}."
            )
        self._check_device(root)
        if self.eval_precision != self.precision:
            self._check_eval_precision(root, module)
        self._start_autocast(
            AutocastRun(
                module,
                root,
                self.dtype,
                eval_dtype=AUTOCAST_DTYPES.get(self.eval_precision),
                policy=self.policy,
                cache_weights=self.cache_weights,
            )
        )
        if self.fp32_eval_outputs:
            self._eval_outputs = Float32EvalOutputs(self._run.trainer, module)
            self._run.cleanups.callback(self._leave_outputs)
        return module

    def _leave_outputs(self) -> None:
        outputs, self._eval_outputs = self._eval_outputs, None
        if outputs is not None:
            outputs.detach()

    def _check_device(self, device_type: str, precision: str | None = None) -> None:
        precision = precision or self.precision
        refusal = why_no_autocast(device_type, AUTOCAST_DTYPES[precision])
        if refusal is not None:
            raise MisconfigurationException(
                f"AutocastPrecision({precision!r}) cannot run on {device_type!r}: {refusal}"
            )
        if precision == "bf16-mixed":
            warn_about_emulated_bf16(device_type, "AutocastPrecision('16-mixed')")

    def _check_eval_precision(self, device_type: str, module: nn.Module) -> None:
        if isinstance(self._run.trainer.strategy, FSDPStrategy):
            raise MisconfigurationException(
                f"AutocastPrecision({self.precision!r}, eval_precision={self.eval_precision!r}) with FSDPStrategy: it"
                f" gathers parameters in {self.dtype} for evaluation as well. Leave eval_precision out, or use"
                " ModelParallelStrategy."
            )
        if self.eval_precision in AUTOCAST_DTYPES:
            self._check_device(device_type, self.eval_precision)
            return
        held = [name for name, p in module.named_parameters() if p.dtype in AUTOCAST_DTYPES.values()]
        gathered = [name or "the model" for name, _ in gathered_in_another_low(module, torch.float32)]
        if held or gathered:
            rank_zero_warn(
                f"AutocastPrecision(eval_precision='32-true'): {listed(held or gathered)} are"
                f" {'stored' if held else 'gathered by fully_shard'} in 16 bit, so evaluation is not in fp32."
                + (" For that, evaluate a copy loaded in fp32." if held else " Give fully_shard no param_dtype.")
            )

    # -- steps ---------------------------------------------------------------------------------------------------------

    @override
    def _evaluation_steps(self, steps: AbstractContextManager[None]) -> AbstractContextManager[None]:
        """With outputs in fp32, if they are requested."""
        return steps if self._eval_outputs is None else self._eval_outputs.of_a_step(steps)

    @override
    def autocast_context_manager(self) -> torch.autocast:
        """Autocast, with torch's weight cache if ``cache_weights`` is on."""
        device_type = torch.device(self.device or self._carried.device_type or "cpu").type
        return torch.autocast(device_type, self.dtype, cache_enabled=self.cache_weights)

    @override
    def _steps_after_a_run(self, loop: str) -> AbstractContextManager[None]:
        dtype = AUTOCAST_DTYPES.get(self.precision if loop == "train" else self.eval_precision)
        if dtype is None:
            return nullcontext()
        return torch.autocast(self._carried.device_type or "cpu", dtype, cache_enabled=self.cache_weights)

    @property
    @override
    def mixed_precision_config(self) -> "FSDPMixedPrecision":
        """For ``FSDPStrategy``: 16-bit parameters in forward and backward, gradients reduced in fp32, fp32 buffers.

        FSDP1 uses one dtype for all parameters. If a policy sets another dtype for some modules, parameters are
        gathered in fp32, twice the bytes, and autocast casts them where they are used. With rules about operations
        only, parameters are gathered in 16 bit, and fp32 operations cast them up.

        With 16-bit parameters FSDP1 also casts the model's inputs, including floating-point targets in the batch;
        integer labels are unchanged. FSDP2 does not.
        """
        return fsdp_mixed_precision(self.dtype, self.policy)


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


def _checked_eval_precision(precision: str) -> str:
    hint = " None is the precision of training."
    refuse_unknown(precision, "eval_precision", "AutocastPrecision", _EVAL_PRECISIONS, hint=hint)
    return precision
