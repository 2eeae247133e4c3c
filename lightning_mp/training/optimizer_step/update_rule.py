"""The loss scale as a state machine on the device."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lightning_mp.ground.core.private_optimizer_api import amp_update_scale_

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
    # The scale that is known is one update old: where two updates cannot reach a bound, the clamp's kernel is saved.
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

_Check = Callable[[Any, ScaleRule], bool]


def _is_count(value: Any, least: int | None) -> bool:
    return isinstance(value, int) and (least is None or value >= least)


#: Of each setting, and of each entry of a saved state: whether a value is right, and what is allowed.
_ALLOWED: Mapping[str, tuple[_Check, str]] = {
    "growth_factor": (
        lambda value, _: 1.0 < value < math.inf,
        "greater than 1; for a constant scale use LossScaler.static(scale)",
    ),
    "backoff_factor": (lambda value, _: 0.0 < value < 1.0, "between 0 and 1, both excluded"),
    "growth_interval": (lambda value, _: _is_count(value, 1), "a number of steps, 1 or more"),
    "min_scale": (lambda value, rule: 0.0 <= value <= rule.max_scale, "from 0 to max_scale={rule.max_scale!r}"),
    "hysteresis": (lambda value, _: _is_count(value, 1), "1 (every overflow lowers the scale) or more"),
    "hysteresis_refill": (lambda value, _: value in ("step", "growth"), "'step' or 'growth'"),
    "on_floor": (lambda value, _: value in get_args(OnFloor), "'raise', 'warn' or 'ignore'"),
    "init_scale": (
        lambda value, rule: (
            isinstance(value, Real)
            and rule.min_scale <= float(value) <= rule.max_scale
            and _SMALLEST_SCALE <= float(value) <= LARGEST_SCALE
        ),
        "positive and from min_scale={rule.min_scale!r} to {rule.max_scale!r}, and from 2^-126 to 2^126: it is a"
        " float32 number, and so is its inverse",
    ),
    "_growth_tracker": (lambda value, _: _is_count(value, 0), "a whole number of steps"),
    # It goes below zero while overflows continue.
    "_hysteresis_tracker": (lambda value, _: _is_count(value, None), "a whole number of steps"),
    "_floor_tracker": (lambda value, _: _is_count(value, 0), "a whole number of steps"),
    "scale": (
        lambda value, _: isinstance(value, int | float) and (math.isnan(value) or value >= 0),
        "a positive number",
    ),
}


def _first_invalid(values: Mapping[str, Any], rule: ScaleRule) -> tuple[str, Any, str] | None:
    """The first value that is out of range: its name, what it is and what is allowed; None if all are right.

    >>> _first_invalid({"growth_interval": 0, "on_floor": "warn"}, ScaleRule())
    ('growth_interval', 0, 'a number of steps, 1 or more')
    """
    for name, (is_right, allowed) in _ALLOWED.items():
        if name not in values:
            continue
        try:
            right = is_right(values[name], rule)
        except TypeError:  # not a number
            right = False
        if not right:
            return name, values[name], allowed.format(rule=rule)
    return None


def check_settings(rule: ScaleRule, init_scale: Any, on_floor: str) -> None:
    """Refuses settings of a LossScaler that are out of range."""
    wrong = _first_invalid({**vars(rule), "init_scale": init_scale, "on_floor": on_floor}, rule)
    if wrong is not None:
        name, got, allowed = wrong
        raise ValueError(f"LossScaler({name}={got!r}) is not valid: {name} must be {allowed}.")


def check_state(state: Mapping[str, Any], rule: ScaleRule, on_floor: object) -> None:
    """Refuses what no LossScaler and no GradScaler has written, before anything is changed by it."""
    wrong = _first_invalid({**state, **vars(rule), "on_floor": on_floor}, rule)
    if wrong is not None:
        name, got, allowed = wrong
        raise ValueError(
            f"The checkpoint's loss scaler has {name}={got!r}, which is not valid: {name} must be {allowed}. Load"
            " another checkpoint, or take the scaler's state out of this one."
        )
    if math.isnan(state["scale"]):
        raise ValueError(
            "The checkpoint's loss scale is nan: its weights and moments may contain nan as well. Load an earlier"
            " checkpoint, or take the scaler's state out of this one."
        )
