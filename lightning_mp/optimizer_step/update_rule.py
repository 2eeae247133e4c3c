"""The loss scale as a state machine on the device."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_mp.core.private_api import amp_update_scale_


@dataclass(frozen=True)
class ScaleRule:
    """The constants of :func:`update_scale_`."""

    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = 2.0**-24
    max_scale: float = 2.0**24
    hysteresis: int = 1
    hysteresis_refill: Literal["step", "growth"] = "step"


def what_is_wrong_with(rule: ScaleRule) -> tuple[str, object, str] | None:
    """The first constant that is out of range: its name, what it is and what is allowed; None if all are right.

    >>> what_is_wrong_with(ScaleRule(growth_interval=0))
    ('growth_interval', 0, 'a number of steps, 1 or more')
    """
    checks: tuple[tuple[str, Callable[[], bool], str], ...] = (
        (
            "growth_factor",
            lambda: 1.0 < rule.growth_factor < math.inf,
            "greater than 1; for a constant scale use LossScaler.static(scale)",
        ),
        ("backoff_factor", lambda: 0.0 < rule.backoff_factor < 1.0, "between 0 and 1, both excluded"),
        (
            "growth_interval",
            lambda: isinstance(rule.growth_interval, int) and rule.growth_interval >= 1,
            "a number of steps, 1 or more",
        ),
        ("min_scale", lambda: 0.0 <= rule.min_scale <= rule.max_scale, f"from 0 to max_scale={rule.max_scale!r}"),
        (
            "hysteresis",
            lambda: isinstance(rule.hysteresis, int) and rule.hysteresis >= 1,
            "1 (every overflow lowers the scale) or more",
        ),
        ("hysteresis_refill", lambda: rule.hysteresis_refill in ("step", "growth"), "'step' or 'growth'"),
    )
    for name, is_right, allowed in checks:
        try:
            right = is_right()
        except TypeError:  # not a number
            right = False
        if not right:
            return name, getattr(rule, name), allowed
    return None


@dataclass
class ScaleState:
    """The state of :func:`update_scale_`: scalar tensors on one device."""

    scale: Tensor  # float32, shape []
    growth_tracker: Tensor  # int32, shape []; healthy steps since the last change
    hysteresis_tracker: Tensor  # int32, shape []; overflows that are still forgiven, plus one


def update_scale_(state: ScaleState, found_inf: Tensor, rule: ScaleRule, known_scale: float | None = None) -> None:
    """One update of the loss scale, in place and without reading anything on the host.

    With ``hysteresis=1`` and bounds that are never reached this is, bit for bit, the rule of ``torch.amp.GradScaler``:

    .. code-block:: text

        if found_inf:
            hysteresis_tracker -= 1
            growth_tracker = 0
            if hysteresis_tracker <= 0:
                scale = max(min_scale, scale * backoff_factor)
        else:
            growth_tracker += 1
            if growth_tracker == growth_interval:
                growth_tracker = 0
                scale = min(max_scale, scale * growth_factor)   # unless the product is not finite
                hysteresis_tracker = hysteresis                 # refill "growth"
            hysteresis_tracker = hysteresis                     # refill "step"

    Hysteresis forgives the first ``hysteresis - 1`` overflows. With refill "step" any healthy step refills it, as in
    NVIDIA Apex (``update_scale_hysteresis``); with refill "growth" only growth does, as in Megatron-LM
    (``DynamicGradScaler``).
    """
    if rule.hysteresis > 1:
        found_inf = _forgive_(state, found_inf, rule)
    amp_update_scale_(
        state.scale, state.growth_tracker, found_inf, rule.growth_factor, rule.backoff_factor, rule.growth_interval
    )
    lowest, highest = 2.0 * rule.min_scale, rule.max_scale / 2.0  # products are rounded
    if known_scale is None or not (
        known_scale * rule.backoff_factor**2 > lowest and known_scale * rule.growth_factor**2 < highest
    ):
        state.scale.clamp_(rule.min_scale, rule.max_scale)


def _forgive_(state: ScaleState, found_inf: Tensor, rule: ScaleRule) -> Tensor:
    """What hysteresis leaves of an overflow; its tracker, and that of growth where it forgives, move."""
    overflow = found_inf > 0
    state.hysteresis_tracker.sub_(overflow.to(torch.int32))
    forgiven = overflow & (state.hysteresis_tracker > 0)
    # The update below counts a forgiven overflow as one healthy step: -1 makes that come out as 0, far from growth.
    state.growth_tracker.copy_(torch.where(forgiven, -1, state.growth_tracker))
    grows = ~overflow & (state.growth_tracker + 1 == rule.growth_interval)
    refill = ~overflow if rule.hysteresis_refill == "step" else grows
    state.hysteresis_tracker.copy_(torch.where(refill, rule.hysteresis, state.hysteresis_tracker))

    return (overflow & ~forgiven).to(torch.float32)
