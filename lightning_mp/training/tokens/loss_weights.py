"""Weights of micro-batches by the items of their losses: exact, or equal once a loss is unknown.

:class:`LossWeights` compares each loss with the run's first one that counts something. The rules, one sentence each:

1. While all means of a loss are over one number, it may be built in any way, but with no term of 0; else its means
   stay, and stay in proportion.
2. The factors of the means that decide add up to the same, unless the loss is built otherwise with as many of them.
3. Of a mean of T means over n items each, T or n is that of the first loss.
4. A loss that counts nothing weighs 0; every other loss is unknown if it counts nothing of what the first one counts.

Limits: ``max(1, n)`` hides whether n was 0 or 1 (a loss of 0 is taken for none, anything else for one); a loop over T
equally long rows counts their elements; two heads of one kind that take turns are one task; a mean over pairs counts
pairs.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from lightning_mp.ground.core.saved_state import AMOUNT, FLAG, NUMBER, POSITIVE, TEXT, checked_state, listed_of, named
from lightning_mp.training.tokens.loss_items import Items, Mean, Number, Unknown

_CLOSE = 1e-5  # relative; counts on a device are float32
_is_close = partial(math.isclose, rel_tol=_CLOSE)

#: How many items one loss counts; whether that is known, a tensor where the host would have to wait for it; why not.
Weight = tuple[Number, bool | Tensor, str]


class LossWeights:
    """What is known about the losses of a run: on each rank its own losses, and the first one of all ranks."""

    def __init__(self) -> None:
        self.first: Items | None = None  # the first loss that counted something; its numbers are the host's
        self.is_equal = False  # micro-batches have equal weights for the rest of the fit
        self._forms: dict[tuple[str, ...], float] = {}  # the factors of the means that decide, by how a loss is built

    def settle(self, readings: Sequence[Items | Unknown]) -> str:
        """Settles it with the first losses of all ranks; returns a message about it, empty if no loss counts anything.

        Their numbers are the host's. Call it again with the next losses while :attr:`first` is None.
        """
        first: Items | None = None
        for reading in readings:
            if isinstance(reading, Unknown):
                return self.weigh_equally(reading.reason)
            factors = [mean.factor for mean in reading.means if mean.factor is not None]
            counts = reading.means and float(reading.means[0].total) != 0 and all(map(math.isfinite, factors))
            first = reading if first is None and counts else first
        if first is None:
            return ""
        self.first = first
        _, is_known, why = self.of(first)
        if not is_known:
            return self.weigh_equally(why)
        kinds = ", ".join(dict.fromkeys(mean.kind for mean in first.means))
        return (
            f"Gradient accumulation: micro-batches are weighted by what their losses are means over ({kinds}),"
            f" {_numbers(first.means)} in the first one."
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
        main = known = None
        many, factor = 0, 0.0
        for mean in reading.means:
            if main is None:
                for known in first.means:
                    if known.kind == mean.kind:
                        main = mean
                        break
            if main is not None and mean.kind == main.kind:
                if mean.factor is None:
                    return 0.0, False, "it is multiplied by a number on the device"
                many, factor = many + 1, factor + mean.factor
        if main is None or known is None:
            return 0.0, False, f"it counts {reading.means[0].kind}, the first loss {first.means[0].kind}"
        if isinstance(main.total, float) and not 0 <= main.total < math.inf:
            return 0.0, False, f"it is a mean over {_numbers([main])} items"
        if not math.isfinite(factor):  # as its gradient, with which no step is made
            return main.total, True, ""
        before = self._forms.get(reading.form)
        if before is None:
            if many != sum(mean.kind == first.means[0].kind for mean in first.means):
                before = next(iter(self._forms.values()))
            else:
                before = self._forms[reading.form] = factor
        if not _is_close(factor, before):
            return 0.0, False, f"it is multiplied by {factor:g}, and one before it by {before:g}"
        if len(reading.means) == len(first.means) == 1 and main.parts == known.parts == 1:
            is_known = main.total.isfinite() if isinstance(main.total, Tensor) else True
            return main.total, is_known, "it is a mean over 1 or no items"
        return self._in_proportion(reading, main, known)

    def _in_proportion(self, reading: Items, main: Mean, known: Mean) -> Weight:
        """What a loss of several means, or of means of means, weighs by one that the first loss has too."""
        assert self.first is not None
        first, means = self.first.means, reading.means
        is_known: bool | Tensor = main.parts == known.parts or main.total * known.parts == known.total * main.parts
        is_same = len(means) == len(first) and known.total > 0
        for index, mean in enumerate(means):
            is_same = is_same and mean.kind == first[index].kind
        if not is_same and (reading.has_zero or self.first.has_zero or not _are_over_one_number(first)):
            return 0.0, False, _out_of_proportion(means, first)
        for index, mean in enumerate(means):
            expected = main.total * (first[index].total / known.total) if is_same else main.total
            is_close = abs(mean.total - expected) <= _CLOSE * expected  # type: ignore[operator]  # numbers, or tensors
            is_known = is_known & mean.is_even & is_close
        if is_known is True:
            return main.total, True, ""
        if len(means) > 1:
            return main.total, is_known, _out_of_proportion(means, first)
        is_even = main.is_even is True
        why = "both numbers of its mean of means change" if is_even else "it is a mean of means over different numbers"
        return main.total, is_known, why

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain data for a checkpoint."""
        first = self.first or Items()
        return {
            "is_equal": self.is_equal,
            "kinds": [mean.kind for mean in first.means],
            "totals": [float(mean.total) for mean in first.means],
            "parts": [mean.parts for mean in first.means],
            "has_zero": first.has_zero,
            "forms": {" ".join(form): factor for form, factor in self._forms.items()},
        }

    def load_state_dict(self, saved: Any) -> None:
        """Continues from a checkpoint."""
        means = len(checked_state(saved, {"kinds": listed_of(TEXT)}, "the weights of micro-batches")["kinds"])
        kinds = {
            "is_equal": FLAG,
            "totals": listed_of(AMOUNT, means),
            "parts": listed_of(POSITIVE, means),
            "has_zero": FLAG,
            "forms": named(NUMBER),
        }
        state = checked_state(saved, kinds, "the weights of micro-batches")
        entries = zip(state["kinds"], state["totals"], state["parts"], strict=True)
        first = tuple(Mean(kind, total, parts=parts) for kind, total, parts in entries)
        self.first = Items(first, has_zero=state["has_zero"]) if first else None
        self.is_equal = state["is_equal"]
        self._forms = {tuple(form.split()): factor for form, factor in state["forms"].items()}


def _are_over_one_number(means: Sequence[Mean]) -> bool:
    totals = [float(mean.total) for mean in means]
    return max(totals) - min(totals) <= _CLOSE * totals[0]


def _out_of_proportion(means: Sequence[Mean], first: Sequence[Mean]) -> str:
    return f"it adds means over {_numbers(means)} items, and the first loss over {_numbers(first)}"


def _numbers(means: Sequence[Mean]) -> str:
    texts = ["a number on the device" if isinstance(mean.total, Tensor) else f"{mean.total:g}" for mean in means]
    texts = ["1 or no" if text == "nan" else text for text in texts]
    return " and ".join(texts[:4] + ["..."] * (len(texts) > 4))
