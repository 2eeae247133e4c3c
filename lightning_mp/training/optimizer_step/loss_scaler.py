"""A ``torch.amp.GradScaler`` with a floor, a ceiling and one decision on all ranks.

.. code-block:: text

    scale the loss; backward; divide the gradients by the scale
    a gradient of any rank is inf or nan:     no step; scale = max(min_scale, scale * backoff_factor)
    else:                                     step; after growth_interval such steps in a row
                                                  scale = min(max_scale, scale * growth_factor)

The scale is changed by :func:`~lightning_mp.training.optimizer_step.update_rule.update_scale_`, which adds hysteresis.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from ctypes import c_float
from dataclasses import fields
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_mp.ground.core.arguments import true_or_false
from lightning_mp.ground.core.half_dtypes import HALF_DTYPES
from lightning_mp.ground.core.host_copy import HostCopy
from lightning_mp.ground.core.ranks import sum_over_ranks_
from lightning_mp.ground.core.saved_state import AMOUNT, COUNT, POSITIVE, POSITIVE_COUNT, checked_state
from lightning_mp.ground.core.settings_repr import SettingsRepr
from lightning_mp.training.gradients import gradient_ops
from lightning_mp.training.gradients.fused_optimizers import applies_grad_scale, momentum_is_missing, one_mesh_per_group
from lightning_mp.training.optimizer_step.update_rule import (
    LARGEST_SCALE,
    OnFloor,
    ScaleRule,
    ScaleState,
    check_settings,
    check_state,
    update_scale_,
)

#: Overflows in a row with the scale already at its floor after which ``on_floor`` acts.
FLOOR_PATIENCE_STEPS = 20
#: What every ``torch.amp.GradScaler`` saves.
_TORCH_STATE = {
    "scale": AMOUNT,
    "growth_factor": POSITIVE,
    "backoff_factor": POSITIVE,
    "growth_interval": POSITIVE_COUNT,
    "_growth_tracker": COUNT,
}
#: Said by preflight and beside torch's error.
ANOMALIES_UNDER_A_SCALE = (
    "Trainer(detect_anomaly=True) ends a run with a loss scale at its first overflow, which is part of finding the"
    " scale and would be skipped. Use OverflowPostMortem(replay=True), which names the layer of an overflow that lasts,"
    " or detect_anomaly=True in 'bf16-mixed' or '32-true'."
)


class LossScaleFloorError(RuntimeError):
    """The loss scale is at its floor and the gradients still overflow."""


class LossScaler(SettingsRepr, torch.amp.GradScaler):
    """A ``torch.amp.GradScaler`` with a floor and a ceiling, whose decisions are the same on all ranks.

    Use it wherever a ``GradScaler`` is accepted: in the plugins of this package, in Lightning's, in Fabric, in a
    hand-written loop. Differences from torch's class: the scale stays within ``[min_scale, max_scale]``; gradients may
    be fp16, plain tensors and DTensors mixed; in a distributed run one reduction of one scalar makes all ranks skip
    together; the scaled loss is fp32; repeated overflows at the floor end the run with a clear error. The update rule
    is documented in :func:`lightning_mp.training.optimizer_step.update_rule.update_scale_`.

    Args:
        device: device type; None takes the accelerator if there is one, else the CPU.
        init_scale: first scale.
        growth_factor: factor by which the scale grows after ``growth_interval`` healthy steps in a row.
        backoff_factor: factor by which the scale shrinks after an overflow.
        growth_interval: healthy steps in a row before the scale grows.
        enabled: False makes every method a no-op, as in torch.
        min_scale: floor. The default 2^-24 keeps the inverse scale finite.
        max_scale: ceiling.
        hysteresis: overflows before the scale is lowered; 1 is torch's rule.
        hysteresis_refill: "step" or "growth", see
            :func:`lightning_mp.training.optimizer_step.update_rule.update_scale_`.
        on_floor: what happens after ``FLOOR_PATIENCE_STEPS`` (20) overflows in a row at the floor: "raise"
            :class:`LossScaleFloorError`, "warn" or "ignore". It is detected one step late, so that nothing waits for
            the device.
        process_group: the ranks that step and skip together; None for all. For models that only some ranks train, in a
            hand-written loop; such a scaler cannot be pickled.

    A gradient whose square does not fit into float32 (above 1.8e19) also counts as an overflow: it would put an inf
    into Adam's second moment.

    Raises:
        ValueError: if an argument is out of range, or CUDA is requested and not available.

    References:
        Micikevicius et al., "Mixed Precision Training", 2017, section 3.2, https://arxiv.org/abs/1710.03740

    Example:
        >>> import torch
        >>> from lightning_mp import LossScaler
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = torch.optim.SGD([weight], lr=0.5)
        >>> scaler = LossScaler("cpu", init_scale=4.0)
        >>> scaler.scale((weight * torch.tensor([1.0, float("inf")])).sum()).backward()
        >>> _ = scaler.step(optimizer)
        >>> scaler.update()
        >>> weight.tolist(), scaler.get_scale()
        ([1.0, 1.0], 2.0)
    """

    #: An overflow that one rank finds is an overflow on all ranks, also where gradients are sharded.
    decides_on_all_ranks = True

    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float = 2.0**-24,
        max_scale: float = 2.0**24,
        hysteresis: int = 1,
        hysteresis_refill: Literal["step", "growth"] = "step",
        on_floor: OnFloor = "raise",
        process_group: "dist.ProcessGroup | None" = None,
    ) -> None:
        rule = ScaleRule(
            growth_factor, backoff_factor, growth_interval, min_scale, max_scale, hysteresis, hysteresis_refill
        )
        check_settings(rule, init_scale, on_floor)
        true_or_false(enabled, "enabled", "LossScaler")
        device_type = _resolve_device_type(device) if enabled else (device or "cpu")
        super().__init__(device_type, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._min_scale = min_scale
        self._max_scale = max_scale
        self._hysteresis = hysteresis
        self._hysteresis_refill = hysteresis_refill
        self._on_floor = on_floor
        self._process_group = process_group
        # torch keeps no constants when it is disabled.
        self._disabled_rule = None if enabled else rule
        self._init_hysteresis_tracker = hysteresis
        self._hysteresis_tracker: Tensor | None = None
        self._overflows_at_floor = 0
        # Of the last update, found_inf and the scale before it: read one update late, so that nothing waits.
        self._last_update: HostCopy | None = None
        self._has_counted = False

    @classmethod
    def static(cls, scale: float, device: str | None = None, *, enabled: bool = True) -> Self:
        """A scaler whose scale never changes; steps that overflow are still skipped.

        Example:
            >>> LossScaler.static(2.0**15, "cpu").get_scale()
            32768.0
        """
        return cls(device, init_scale=scale, enabled=enabled, min_scale=scale, max_scale=scale)

    @property
    def rule(self) -> ScaleRule:
        """The constants of the update rule; those it was created with if it is disabled."""
        if self._disabled_rule is not None:
            return self._disabled_rule
        return ScaleRule(
            self._growth_factor,
            self._backoff_factor,
            self._growth_interval,
            self._min_scale,
            self._max_scale,
            self._hysteresis,
            self._hysteresis_refill,
        )

    @override
    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        super()._lazy_init_scale_growth_tracker(dev)
        self._hysteresis_tracker = torch.full((), self._init_hysteresis_tracker, dtype=torch.int32, device=dev)

    @override
    def scale(self, outputs: Any) -> Any:
        """Multiplies a loss, or an iterable of losses, by the scale, in float32.

        A 16-bit loss is cast up first: 2.0 times 2^16 does not fit into fp16.
        """
        if not self._enabled:
            return outputs
        return super().scale(_map_tensors(outputs, _to_at_least_float32))

    @override
    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Steps the optimizer, or skips the step on non-finite gradients, as ``torch.amp.GradScaler.step``.

        Before a fused SGD creates its momentum, the host waits for the device: a step skipped there would leave the
        momentum uninitialised, as it does with torch's class.
        """
        if self._enabled and applies_grad_scale(optimizer) and momentum_is_missing(optimizer):
            state = self._per_optimizer_states[id(optimizer)]
            if not state["found_inf_per_device"]:
                self.unscale_(optimizer)
            if any(found_inf.item() for found_inf in state["found_inf_per_device"].values()):
                return None
        with one_mesh_per_group(optimizer) if self._enabled else nullcontext():
            return super().step(optimizer, *args, **kwargs)

    @override
    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        parameters = gradient_ops.parameters_with_gradient(optimizer)
        gradient_ops.reduce_partial_gradients_(parameters)
        shards = [gradient_ops.local_shard(p.grad) for p in parameters if p.grad is not None]
        scale, _ = self._check_scale_growth_tracker("unscale_")
        # The inverse of a tiny scale is inf in float32, and inf times a gradient of 0 is nan.
        found_inf.copy_(~torch.isfinite(scale.reciprocal()))
        if shards:
            norms = gradient_ops.shard_norms(shards)
            found = gradient_ops.any_overflow(norms * scale.reciprocal().to(norms))
            found_inf.copy_(torch.maximum(found_inf, found.to(found_inf.device)))
            if not allow_fp16:  # torch passes it for fused optimizers, which multiply the scale in themselves
                gradient_ops.multiply_(shards, inv_scale)
        sum_over_ranks_(found_inf, self._process_group)
        return {found_inf.device: found_inf.clamp_(max=1.0)}  # fused kernels skip at exactly 1

    @override
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Updates the scale; call it once per step, after all optimizers.

        Args:
            new_scale: sets the scale instead, clamped to the bounds. A tensor is read on the host.

        Raises:
            ValueError: if ``new_scale`` is not a number.
            LossScaleFloorError: see ``on_floor``.
        """
        if not self._enabled:
            return
        if new_scale is not None:
            if math.isnan(new_scale):
                raise ValueError("LossScaler.update(new_scale=nan): a loss scale must be a number, 2^-126 to 2^126.")
            self._count_last_update()
            super().update(new_scale)
            assert self._scale is not None
            self._scale.clamp_(self._min_scale, min(self._max_scale, LARGEST_SCALE))
            return
        scale, growth_tracker = self._check_scale_growth_tracker("update")
        assert self._hysteresis_tracker is not None
        flags = [
            flag.to(scale.device)
            for state in self._per_optimizer_states.values()
            for flag in state["found_inf_per_device"].values()
        ]
        if not flags:
            raise AssertionError("No inf checks were recorded prior to update.")
        found_inf = torch.stack(flags).amax() if len(flags) > 1 else flags[0]
        last, self._last_update = self._last_update, HostCopy(torch.stack([found_inf, scale]))
        numbers = last.read() if last is not None else None
        if numbers is not None:
            self._count(*numbers)
        known_scale = numbers[1] if numbers is not None else None
        update_scale_(
            ScaleState(scale, growth_tracker, self._hysteresis_tracker), found_inf, self.rule, known_scale=known_scale
        )
        self._per_optimizer_states.clear()
        has_counted, self._has_counted = self._has_counted, False
        overflows = self._overflows_at_floor
        if self._on_floor != "ignore" and has_counted and overflows and overflows % FLOOR_PATIENCE_STEPS == 0:
            self._raise_at_floor(overflows)

    def _count(self, found_inf: float, scale: float) -> None:
        self._overflows_at_floor = overflows_at_floor(self._overflows_at_floor, found_inf, scale, self.rule)
        self._has_counted = True

    def _count_last_update(self) -> None:
        """Counts it now, if it is not counted yet."""
        last, self._last_update = self._last_update, None
        if last is not None:
            self._count(*last.read())

    def _raise_at_floor(self, overflows: int) -> None:
        message = (
            f"LossScaler: the last {overflows} steps overflowed with the loss scale at its floor,"
            f" {self._min_scale:.10g}: no scale makes these gradients finite. OverflowPostMortem(replay=True) names the"
            " layer; or train in bf16. To continue regardless, use LossScaler(on_floor='warn')."
        )
        if self._on_floor == "raise":
            raise LossScaleFloorError(message)
        rank_zero_warn(message, category=RuntimeWarning)

    @override
    def state_dict(self) -> dict[str, Any]:
        """torch's five entries, then those of this class; ``GradScaler.load_state_dict`` accepts it too."""
        if not self._enabled:
            return {}
        self._count_last_update()
        return super().state_dict() | {
            "min_scale": self._min_scale,
            "max_scale": self._max_scale,
            "hysteresis": self._hysteresis,
            "hysteresis_refill": self._hysteresis_refill,
            "on_floor": self._on_floor,
            "_hysteresis_tracker": _read(self._hysteresis_tracker, self._init_hysteresis_tracker),
            "_floor_tracker": self._overflows_at_floor,
        }

    def checked_settings(self, state_dict: Any) -> "tuple[ScaleRule, Any]":
        """The rule and the ``on_floor`` that a saved state brings along, once all of its entries are checked."""
        checked_state(state_dict, {}, "the loss scaler")
        missing = [key for key in _TORCH_STATE if key not in state_dict]
        if missing:
            raise ValueError(
                f"The checkpoint's loss scaler lacks {', '.join(missing)}; it has {', '.join(state_dict)}. It must be"
                " the state_dict() of a LossScaler or a torch.amp.GradScaler."
            )
        rule = ScaleRule(
            **{field.name: state_dict.get(field.name, getattr(self.rule, field.name)) for field in fields(ScaleRule)}
        )
        on_floor = state_dict.get("on_floor", self._on_floor)
        check_state(state_dict, rule, on_floor)
        return rule, on_floor

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state of a ``LossScaler`` or of a ``torch.amp.GradScaler``.

        Settings that a ``GradScaler`` lacks (bounds, hysteresis, ``on_floor``) are unchanged; a scale outside the
        bounds is clamped, with a warning.

        Raises:
            ValueError: if an entry is missing or out of range; nothing is changed then.
        """
        if not self._enabled:
            return
        if state_dict == {}:
            super().load_state_dict(state_dict)  # raises torch's error about an empty state
        rule, on_floor = self.checked_settings(state_dict)
        self._min_scale, self._max_scale, self._on_floor = rule.min_scale, rule.max_scale, on_floor
        self._hysteresis, self._hysteresis_refill = rule.hysteresis, rule.hysteresis_refill
        # The scale is a float32 number and the bounds need not be.
        low, high = torch.tensor([self._min_scale, min(self._max_scale, LARGEST_SCALE)], dtype=torch.float32).tolist()
        scale = min(max(state_dict["scale"], low), high)
        if scale != state_dict["scale"]:
            rank_zero_warn(
                f"LossScaler: the checkpoint's loss scale {state_dict['scale']:.10g} is outside"
                f" [{self._min_scale:.10g}, {self._max_scale:.10g}], so the run continues with"
                f" {scale:.10g}. To keep it, widen min_scale or max_scale."
            )
        super().load_state_dict({**state_dict, "scale": scale})
        self._init_hysteresis_tracker = state_dict.get("_hysteresis_tracker", self._hysteresis)
        self._overflows_at_floor = state_dict.get("_floor_tracker", 0)
        self._last_update, self._has_counted = None, False
        if self._hysteresis_tracker is not None:
            self._hysteresis_tracker.fill_(self._init_hysteresis_tracker)

    @override
    def __getstate__(self) -> dict[str, Any]:
        self._count_last_update()
        state: dict[str, Any] = super().__getstate__()
        if self._enabled:
            state["_init_hysteresis_tracker"] = _read(self._hysteresis_tracker, self._init_hysteresis_tracker)
        return state | {"_hysteresis_tracker": None}


def check_saved_scaler(scaler: torch.amp.GradScaler, state: Any) -> None:
    """Refuses a state that the scaler cannot load, before anything is changed by it."""
    if isinstance(scaler, LossScaler):
        scaler.checked_settings(state)
    else:
        checked_state(state, _TORCH_STATE, "the loss scaler")


def overflows_at_floor(before: int, found_inf: float, scale: float, rule: ScaleRule) -> int:
    """Overflows in a row at the floor, one step later; counted on the host, where a step's numbers come late."""
    return before + 1 if found_inf > 0 and scale <= c_float(rule.min_scale).value else 0


def _resolve_device_type(device: str | torch.device | None) -> str:
    """The device type a scaler is for; the accelerator, else the CPU, when None."""
    if device is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return accelerator.type if accelerator is not None else "cpu"
    try:
        device_type = torch.device(device).type
    except (RuntimeError, TypeError):
        raise ValueError(
            f"LossScaler(device={device!r}): it must be a device type such as 'cuda' or 'cpu', or None for the device"
            " that is available."
        ) from None
    if device_type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"LossScaler(device={str(device)!r}): CUDA is not available on this machine."
            " Leave `device` out to use the device that is available, or pass enabled=False."
        )
    return device_type


def _read(tracker: Tensor | None, initial: int) -> int:
    return initial if tracker is None else int(tracker.item())


def _to_at_least_float32(output: Tensor) -> Tensor:
    return output.float() if output.dtype in HALF_DTYPES else output


def _map_tensors(outputs: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(outputs, Tensor):
        return function(outputs)
    if isinstance(outputs, Iterable) and not isinstance(outputs, str | Mapping):
        mapped = (_map_tensors(output, function) for output in outputs)
        return type(outputs)(mapped) if isinstance(outputs, list | tuple) else mapped
    return outputs
