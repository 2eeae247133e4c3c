"""How far a run is on its learning-rate schedule: a state machine over token counts, without a Trainer."""

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_mp.ground.core.saved_state import (
    COUNT,
    NUMBER,
    POSITIVE_COUNT,
    Schema,
    checked_state,
    listed_of,
    or_none,
)
from lightning_mp.training.lr_schedule.schedules import (
    COOLDOWN_SHAPES,
    Cooldown,
    Course,
    TokenSchedule,
    WarmupCosine,
    WarmupStableDecay,
)

#: Hoffmann et al. 2022, appendix B, figure A1: a cosine that is more than 25% longer than the run costs loss.
LONGEST_COSINE = 1.25


_KINDS = {
    "horizon_tokens": or_none(POSITIVE_COUNT),
    "course": listed_of(NUMBER, 3),
    "cooldown": or_none(
        Schema(
            "a list of two finite numbers and the name of a shape",
            lambda value: (
                isinstance(value, list)
                and len(value) == 3
                and all(map(NUMBER.accepts, value[:2]))
                and value[2] in COOLDOWN_SHAPES
            ),
        )
    ),
    "skipped_tokens": COUNT,
}


class ScheduleRun:
    """The position of a run on its schedule."""

    def __init__(self, schedule: TokenSchedule) -> None:
        self.schedule = schedule
        self.factor = float(schedule(0.0))
        self.horizon_tokens: int | None = None
        self.cooldown: Cooldown | None = None
        self._course = Course(0, 1)
        self._skipped_tokens = 0

    def begin(self, horizon_tokens: int, skipped_tokens: int = 0, *, skips_shorten: bool = False) -> None:
        """Starts; or continues where it was left, if the horizon is the same or the cooldown has begun."""
        if self.cooldown is None and self.horizon_tokens != horizon_tokens:
            self.horizon_tokens = horizon_tokens
            self._course = Course(0, horizon_tokens - skipped_tokens * skips_shorten)
            self._skipped_tokens = skipped_tokens

    def advance(self, trained_tokens: int, skipped_tokens: int = 0, *, skips_shorten: bool = False) -> float:
        """The factor of the step after n tokens."""
        lost, self._skipped_tokens = skipped_tokens - self._skipped_tokens, skipped_tokens
        if lost and skips_shorten:
            self._course = self._course.shortened(trained_tokens, lost)
        self.factor = float((self.cooldown or self.schedule)(self._course.fraction(trained_tokens)))
        return self.factor

    def cool_down(self, trained_tokens: int, tokens: int) -> None:
        """Starts a cooldown of ``tokens``, from the current factor to the schedule's ``final``, or to 0."""
        final = self.schedule.final if isinstance(self.schedule, WarmupStableDecay | WarmupCosine) else 0.0
        shape = self.schedule.shape if isinstance(self.schedule, WarmupStableDecay) else "linear"
        self.cooldown = Cooldown(self.factor, min(final, self.factor), shape)
        self._course = Course(trained_tokens, trained_tokens + tokens)

    def state_dict(self) -> dict[str, Any]:
        """All but the schedule."""
        course, cooldown = self._course, self.cooldown
        return {
            "horizon_tokens": self.horizon_tokens,
            "course": [course.from_tokens, course.end_tokens, course.from_fraction],
            "cooldown": None if cooldown is None else [cooldown.start, cooldown.final, cooldown.shape],
            "skipped_tokens": self._skipped_tokens,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a saved state."""
        state = checked_state(state, _KINDS, "a learning-rate schedule")
        self.horizon_tokens = state["horizon_tokens"]
        self._course = Course(*state["course"])
        self.cooldown = None if state["cooldown"] is None else Cooldown(*state["cooldown"])
        self._skipped_tokens = state["skipped_tokens"]


def missed_end(schedule: TokenSchedule, horizon_tokens: int, run_tokens: int) -> str | None:
    """What is wrong with a schedule of ``horizon_tokens`` in a run of ``run_tokens``; None if nothing is.

    A cosine may be up to 25% too long or too short; one that is longer costs loss (Hoffmann et al. 2022, appendix B,
    figure A1, https://arxiv.org/abs/2203.15556). The cooldown of a :class:`WarmupStableDecay` must have room.
    """
    at_end, final = schedule(min(1.0, run_tokens / horizon_tokens)), schedule(1.0)
    if isinstance(schedule, WarmupStableDecay) and horizon_tokens > run_tokens:
        return f"the run ends before its cooldown does, at {at_end:.3g} of the peak rate instead of {final:g}"
    if horizon_tokens > LONGEST_COSINE * run_tokens:
        return (
            f"it is {horizon_tokens / run_tokens - 1:.0%} longer than the run, which ends at {at_end:.3g} of the peak"
            f" rate instead of {final:g}; more than 25% costs loss (Hoffmann et al. 2022, appendix B)"
        )
    if run_tokens > LONGEST_COSINE * horizon_tokens:
        return f"the last {1 - horizon_tokens / run_tokens:.0%} of the run are trained at {final:g} of the peak rate"
    return None


def initial_rates(optimizer: Optimizer) -> list[float]:
    """Each group's ``initial_lr``, made from its rate where there is none; numbers, since reading a tensor waits."""
    for group in optimizer.param_groups:
        if not isinstance(group.get("initial_lr"), float):
            group["initial_lr"] = float(group.get("initial_lr", group["lr"]))
    return [group["initial_lr"] for group in optimizer.param_groups]


def set_rates(optimizer: Optimizer, factor: float) -> None:
    """Every group's rate becomes its ``initial_lr`` times ``factor``; a rate that is a tensor stays that tensor."""
    for group, initial in zip(optimizer.param_groups, initial_rates(optimizer), strict=True):
        rate = initial * factor
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
