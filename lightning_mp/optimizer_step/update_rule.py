"""The loss scale as a state machine on the device."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lightning_mp.core.private_optimizer_api import amp_update_scale_

OnFloor = Literal["raise", "warn", "ignore"]

# What a scale may be set to: float32 numbers whose inverse is one, too.
_SMALLEST_SCALE = torch.finfo(torch.float32).smallest_normal
LARGEST_SCALE = 2.0**126


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


# -- validation --------------------------------------------------------------------------------------------------------


def _first_invalid(rule: ScaleRule, on_floor: object) -> tuple[str, object, str] | None:
    """The first setting that is out of range: its name, what it is and what is allowed; None if all are right.

    >>> _first_invalid(ScaleRule(growth_interval=0), "warn")
    ('growth_interval', 0, 'a number of steps, 1 or more')
    """
    growth, steps, overflows = rule.growth_factor, rule.growth_interval, rule.hysteresis
    checks: tuple[tuple[str, object, Callable[[], bool], str], ...] = (
        (
            "growth_factor",
            growth,
            lambda: 1.0 < growth < math.inf,
            "greater than 1; for a constant scale use LossScaler.static(scale)",
        ),
        (
            "backoff_factor",
            rule.backoff_factor,
            lambda: 0.0 < rule.backoff_factor < 1.0,
            "between 0 and 1, both excluded",
        ),
        ("growth_interval", steps, lambda: isinstance(steps, int) and steps >= 1, "a number of steps, 1 or more"),
        (
            "min_scale",
            rule.min_scale,
            lambda: 0.0 <= rule.min_scale <= rule.max_scale,
            f"from 0 to max_scale={rule.max_scale!r}",
        ),
        (
            "hysteresis",
            overflows,
            lambda: isinstance(overflows, int) and overflows >= 1,
            "1 (every overflow lowers the scale) or more",
        ),
        (
            "hysteresis_refill",
            rule.hysteresis_refill,
            lambda: rule.hysteresis_refill in ("step", "growth"),
            "'step' or 'growth'",
        ),
        ("on_floor", on_floor, lambda: on_floor in get_args(OnFloor), "'raise', 'warn' or 'ignore'"),
    )
    for name, got, is_right, allowed in checks:
        try:
            right = is_right()
        except TypeError:  # not a number
            right = False
        if not right:
            return name, got, allowed
    return None


def check_settings(rule: ScaleRule, init_scale: Any, on_floor: str) -> None:
    """Refuses settings of a LossScaler that are out of range."""
    wrong = _first_invalid(rule, on_floor)
    if wrong is None and not isinstance(init_scale, Real):
        wrong = "init_scale", init_scale, "a number"
    if wrong is None and not (
        rule.min_scale <= init_scale <= rule.max_scale and _SMALLEST_SCALE <= init_scale <= LARGEST_SCALE
    ):
        allowed = (
            f"positive and from min_scale={rule.min_scale!r} to {rule.max_scale!r}, and from 2^-126 to 2^126: it is a"
            " float32 number, and so is its inverse"
        )
        wrong = "init_scale", init_scale, allowed
    if wrong is not None:
        name, got, allowed = wrong
        raise ValueError(f"LossScaler({name}={got!r}) is not valid: {name} must be {allowed}.")


def check_state(state: Mapping[str, Any], rule: ScaleRule, on_floor: object) -> None:
    """Refuses what no LossScaler and no GradScaler has written, before anything is changed by it."""
    wrong = _first_invalid(rule, on_floor)
    for name in ("_growth_tracker", "_hysteresis_tracker", "_floor_tracker"):
        count = state.get(name, 0)
        # The tracker of hysteresis goes below zero while overflows continue.
        if wrong is None and not (isinstance(count, int) and (count >= 0 or name == "_hysteresis_tracker")):
            wrong = name, count, "a whole number of steps"
    scale = state["scale"]
    if wrong is None and not (isinstance(scale, int | float) and (math.isnan(scale) or scale >= 0)):
        wrong = "scale", scale, "a positive number"
    if wrong is not None:
        name, got, allowed = wrong
        raise ValueError(
            f"The checkpoint's loss scaler has {name}={got!r}, which is not valid: {name} must be {allowed}. Load"
            " another checkpoint, or take the scaler's state out of this one."
        )
    if math.isnan(scale):
        raise ValueError(
            "The checkpoint's loss scale is nan: its weights and moments may contain nan as well. Load an earlier"
            " checkpoint, or take the scaler's state out of this one."
        )
