"""Weights of micro-batches by the items of their losses: exact, or equal once a loss is unknown.

:class:`LossWeights` compares each loss with the run's first one that counts something. The rules, one sentence each:

1. While all means of a loss are over one number, it may be built in any way; else its means stay, and stay in
   proportion.
2. The factors of the means that decide add up to the same, unless the loss is built otherwise with as many of them.
3. Of a mean of T means over n items each, only one of T and n changes.
4. A loss that counts nothing weighs 0; every other loss is unknown if it counts nothing of what the first one counts.

Limits: ``max(1, n)`` hides whether n was 0 or 1 (a loss of 0 is taken for none, anything else for one); a loop over T
equally long rows counts their elements; two heads of one kind that take turns are one task; a mean over pairs counts
pairs.
"""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lightning_mp.core.saved_state import (
    AMOUNT,
    ANY_NUMBER,
    FLAG,
    NUMBER,
    POSITIVE,
    TEXT,
    checked_state,
    listed_of,
    named,
    or_none,
)
from lightning_mp.tokens.loss_items import Items, Mean, Number, Unknown

_CLOSE = 1e-5  # relative; counts on a device are float32


#: How many items one loss counts; whether that is known, a tensor where the host would have to wait for it; why not.
Weight = tuple[Number, bool | Tensor, str]


class LossWeights:
    """What is known about the losses of a run: on each rank its own losses, and the first one of all ranks."""

    def __init__(self) -> None:
        self.first: Items | None = None  # the first loss that counted something; its numbers are the host's
        self.is_equal = False  # micro-batches have equal weights for the rest of the fit
        self._forms: dict[tuple[str, ...], float] = {}  # the factors of the means that decide, by how a loss is built
        self._many = 0  # means that decide in the first loss
        # Of means of means: whether their number, and the number of items of each, has always been the same.
        self._same_parts = True
        self._same_items: bool | Tensor = True

    def settle(self, readings: Sequence[Items | Unknown]) -> str:
        """Settles it with the first losses of all ranks; returns a message about it, empty if no loss counts anything.

        Waits for the device. Call it again with the next losses while :attr:`first` is None.
        """
        for reading in readings:
            if isinstance(reading, Unknown):
                return self.weigh_equally(reading.reason)
        known = [reading for reading in readings if isinstance(reading, Items) and reading.means]
        first = next((one for one in known if float(one.means[0].total) > 0 and _is_finite(one)), None)
        if first is None:
            return ""
        means = [Mean(m.kind, float(m.total), m.factor, m.parts, bool(m.is_even)) for m in first.means]
        self.first = Items(tuple(means), first.form)
        _, factor, self._many = self._deciding(first)
        if factor is None:
            return self.weigh_equally("it is multiplied by a number on the device")
        for other in known:
            if self._deciding(other)[0] < 0:
                return self.weigh_equally(f"ranks count {means[0].kind} and {other.means[0].kind}")
        if not all(mean.is_even for mean in means):
            return self.weigh_equally("it is a mean of means over different numbers of items")
        self._forms = {first.form: factor}
        kinds = ", ".join(dict.fromkeys(mean.kind for mean in means))
        return (
            f"Gradient accumulation: micro-batches are weighted by what their losses are means over ({kinds}),"
            f" {_numbers(self.first)} in the first one."
        )

    def weigh_equally(self, why: str) -> str:
        """Micro-batches have equal weights from now on; returns a message about it."""
        self.is_equal = True
        return (
            "Gradient accumulation: micro-batches have equal weights from here on, as in Lightning, because the items"
            f" of a loss are unknown: {why}. To weight them by a count of your own, use"
            " AccumulationScheduler(count=...)."
        )

    def of(self, reading: Items | Unknown) -> Weight:
        """What a loss weighs, compared with those before it."""
        first = self.first
        assert first is not None
        if isinstance(reading, Unknown):
            return 0.0, False, reading.reason
        if not reading.means:
            return 0.0, reading.form not in self._forms, "a factor of it is 0 at times"
        position, factor, many = self._deciding(reading)
        if position < 0:
            return 0.0, False, f"it counts {reading.means[0].kind}, the first loss {first.means[0].kind}"
        main = reading.means[position]
        if isinstance(main.total, float) and not 0 <= main.total < math.inf:
            return 0.0, False, f"it is a mean over {main.total:g} items"
        if factor is None:
            return main.total, False, "it is multiplied by a number on the device"
        if not math.isfinite(factor):  # as its gradient, with which no step is made
            return main.total, True, ""
        before = self._forms.setdefault(reading.form, factor if many == self._many else self._forms[first.form])
        if not abs(factor - before) <= _CLOSE * abs(before):
            return main.total, False, f"it is multiplied by {factor:g}, and one before it by {before:g}"
        if len(reading.means) == len(first.means) == 1 and main.parts == first.means[0].parts == 1:
            return main.total, True, ""
        return self._compare(reading, main)

    def _deciding(self, reading: Items) -> tuple[int, float | None, int]:
        """Which mean decides; the factors of those of its kind, added up, and how many they are."""
        assert self.first is not None
        position, factor, many, kind = -1, 0.0, 0, ""
        for index, mean in enumerate(reading.means):
            if position < 0:
                for known in self.first.means:
                    if known.kind == mean.kind:
                        position, kind = index, mean.kind
            if mean.kind == kind:
                if mean.factor is None:
                    return position, None, many
                factor, many = factor + mean.factor, many + 1
        return position, factor, many

    def _compare(self, reading: Items, main: Mean) -> Weight:
        """Whether a loss of several means, or of means of means, is in proportion to the first one."""
        assert self.first is not None
        first = self.first.means
        is_known, why = main.is_even, "it is a mean of means over different numbers of items"
        if main.parts > 1 or first[0].parts > 1:
            self._same_parts = self._same_parts and main.parts == first[0].parts
            same_items = main.total * first[0].parts == first[0].total * main.parts
            self._same_items = self._same_items & same_items
            is_known = is_known & (self._same_parts | self._same_items)
            if main.is_even is True:
                why = "both numbers of its mean of means change"
        means, unit = reading.means, _scale_of(reading.means, first, main)
        if unit is None:  # what is multiplied by 0 does not count
            means, first = _without_zeros(means), _without_zeros(first)
            unit = _scale_of(means, first, main)
        is_same, scale = unit is not None, main.total if unit is None else unit
        if not is_same and not _are_over_one_number(first):
            return main.total, False, self._out_of_proportion(reading)
        for index, mean in enumerate(means):
            expected = scale * first[index].total if is_same else scale
            is_close = abs(mean.total - expected) <= _CLOSE * expected  # type: ignore[operator]  # numbers, or tensors
            is_known = is_known & is_close & mean.is_even
        if is_known is not True and len(means) > 1:
            why = self._out_of_proportion(reading)
        return main.total, is_known, why

    def _out_of_proportion(self, reading: Items) -> str:
        assert self.first is not None
        return f"it adds means over {_numbers(reading)} items, and the first loss over {_numbers(self.first)}"

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain data for a checkpoint."""
        means = self.first.means if self.first is not None else ()
        return {
            "is_equal": self.is_equal,
            "kinds": [mean.kind for mean in means],
            "totals": [float(mean.total) for mean in means],
            "factors": [mean.factor for mean in means],
            "parts": [mean.parts for mean in means],
            "form": " ".join(self.first.form) if self.first is not None else "",
            "many": self._many,
            "forms": {" ".join(form): factor for form, factor in self._forms.items()},
            "same_parts": self._same_parts,
            "same_items": bool(self._same_items),
        }

    def load_state_dict(self, saved: Any) -> None:
        """Continues from a checkpoint."""
        means = len(checked_state(saved, {"kinds": listed_of(TEXT)}, "the weights of micro-batches")["kinds"])
        kinds = {
            "is_equal": FLAG,
            "totals": listed_of(AMOUNT, means),
            "factors": listed_of(or_none(ANY_NUMBER), means),
            "parts": listed_of(POSITIVE, means),
            "form": TEXT,
            "many": AMOUNT,
            "forms": named(NUMBER),
            "same_parts": FLAG,
            "same_items": FLAG,
        }
        state = checked_state(saved, kinds, "the weights of micro-batches")
        entries = [state[name] for name in ("kinds", "totals", "factors", "parts")]
        first = tuple(Mean(kind, total, factor, parts) for kind, total, factor, parts in zip(*entries, strict=True))
        self.first = Items(first, tuple(state["form"].split())) if first else None
        self.is_equal, self._many = state["is_equal"], state["many"]
        self._same_parts, self._same_items = state["same_parts"], state["same_items"]
        self._forms = {tuple(form.split()): float(factor) for form, factor in state["forms"].items()}


def _scale_of(means: Sequence[Mean], first: Sequence[Mean], main: Mean) -> Number | None:
    """How many times as many items there are as in the first loss, by one of the means; None for other means."""
    if len(means) != len(first):
        return None
    scale: Number | None = None
    for mean, known in zip(means, first, strict=True):  # no comprehension: a Python call
        if mean.kind != known.kind:
            return None
        if mean is main and known.total:
            scale = main.total / known.total
    return scale


def _without_zeros(means: Sequence[Mean]) -> tuple[Mean, ...]:
    return tuple(mean for mean in means if mean.factor != 0.0)


def _are_over_one_number(means: Sequence[Mean]) -> bool:
    totals = [float(mean.total) for mean in means]
    return max(totals) - min(totals) <= _CLOSE * totals[0]


def _is_finite(reading: Items) -> bool:
    return all(mean.factor is None or math.isfinite(mean.factor) for mean in reading.means)


def _numbers(reading: Items) -> str:
    numbers = ["a number on the device" if isinstance(m.total, Tensor) else f"{m.total:g}" for m in reading.means]
    return " and ".join(numbers[:4] + ["..."] * (len(numbers) > 4))
