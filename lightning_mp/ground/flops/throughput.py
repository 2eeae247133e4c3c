"""Tokens per second, MFU, HFU and goodput from readings of a clock and of token counts.

Between two readings, with F the operations of the model per token, R those run again and P the peak of all devices::

    tokens_per_second = input tokens / seconds
    MFU               = F input tokens / (P seconds)
    HFU               = (F + R) input tokens / (P seconds)
    goodput           = useful tokens / input tokens

Input tokens are all tokens that went through the model, padding included, because the devices multiply padding as well.
Useful tokens are neither padding nor part of a skipped optimizer step. Goodput times MFU is the share of the peak that
went into training.
"""

from collections import deque
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from lightning_mp.ground.core.arguments import whole_number
from lightning_mp.ground.core.quantities import format_share
from lightning_mp.ground.core.saved_state import AMOUNT, COUNT, checked_state


@dataclass(frozen=True, slots=True)
class Work:
    """What a token costs and what the machine could do. Where a figure is not known it is None."""

    model_flops_per_token: float | None = None  # forward and backward
    hardware_flops_per_token: float | None = None  # what is run again added
    peak_flops_per_second: float | None = None  # dense peak of all devices together


@dataclass(frozen=True, slots=True)
class ThroughputTotals:
    """Sums over all devices and over the whole run, resumes included."""

    input_tokens: int = 0  # through the model, padding included
    nonpad_tokens: int = 0  # without padding
    useful_tokens: int = 0  # without padding, in steps that were made
    timed_input_tokens: int = 0  # those of `input_tokens` whose time was taken; windows that warm up are left out
    timed_nonpad_tokens: int = 0  # the same without padding
    seconds: float = 0.0  # training time of the timed tokens, without validation
    validation_seconds: float = 0.0  # time in validation
    model_flops: float = 0.0  # of the timed tokens whose cost is known
    hardware_flops: float = 0.0  # what is run again added
    mfu_capacity_flops: float = 0.0  # what the devices could have done in the time of `model_flops`
    hfu_capacity_flops: float = 0.0  # the same for `hardware_flops`

    def rates(self, since: "ThroughputTotals | None" = None) -> "Rates":
        """Rates from an earlier reading to this one; without one, of the whole run."""
        before = asdict(since) if since is not None else asdict(ThroughputTotals())
        part = {name: value - before[name] for name, value in asdict(self).items()}

        def ratio(above: str, below: str) -> float | None:
            return part[above] / part[below] if part[below] > 0 else None

        if not part["timed_input_tokens"]:  # only the warm-up step
            return Rates(goodput=ratio("useful_tokens", "input_tokens"))
        return Rates(
            tokens_per_second=ratio("timed_input_tokens", "seconds"),
            nonpad_tokens_per_second=ratio("timed_nonpad_tokens", "seconds"),
            mfu=ratio("model_flops", "mfu_capacity_flops"),
            hfu=ratio("hardware_flops", "hfu_capacity_flops"),
            goodput=ratio("useful_tokens", "input_tokens"),
        )


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates over some time. None where nothing was measured or a figure is missing."""

    tokens_per_second: float | None = None  # input tokens, over all devices
    nonpad_tokens_per_second: float | None = None  # without padding
    mfu: float | None = None  # model FLOPs utilisation
    hfu: float | None = None  # hardware FLOPs utilisation
    goodput: float | None = None  # share of the input tokens that was neither padding nor in a skipped step

    def by_name(self, unit: str = "token") -> dict[str, float | None]:
        """Every rate by its name: samples have no padding.

        >>> list(Rates(tokens_per_second=8.0).by_name("sample"))
        ['samples_per_second', 'mfu', 'hfu', 'goodput']
        """
        named = asdict(self)
        if unit == "sample":
            del named["nonpad_tokens_per_second"]
            named = {"samples_per_second": named.pop("tokens_per_second"), **named}
        return named

    def summary(self, unit: str = "token") -> str:
        """One line of all that is known.

        >>> Rates(tokens_per_second=1200.0, nonpad_tokens_per_second=1000.0, mfu=0.4).summary()
        '1,200 tokens/s, 1,000 of them without padding, MFU 40.0%'
        """
        parts = [f"{self.tokens_per_second:,.0f} {unit}s/s"] if self.tokens_per_second is not None else []
        if unit == "token" and self.nonpad_tokens_per_second is not None:
            parts.append(f"{self.nonpad_tokens_per_second:,.0f} of them without padding")
        parts += [
            f"{label} {format_share(value)}"
            for label, value in (("MFU", self.mfu), ("HFU", self.hfu), ("goodput", self.goodput))
            if value is not None
        ]
        return ", ".join(parts)


@dataclass
class Throughput:
    """Sums up readings."""

    readings: int = 20
    work: Work = field(default_factory=Work)
    totals: ThroughputTotals = field(default_factory=ThroughputTotals)

    def __post_init__(self) -> None:
        self._since: float | None = None
        self._history: deque[ThroughputTotals] = deque([self.totals], maxlen=self.readings + 1)

    @property
    def total(self) -> Rates:
        """Rates of the whole run."""
        return self.totals.rates()

    @property
    def window(self) -> Rates:
        """Rates over the last readings."""
        return self.totals.rates(self._history[0])

    def start_clock(self, now: float) -> None:
        """Time counts from now on."""
        self._since = now

    def stop_clock(self) -> None:
        """Time does not count until the clock is started again; tokens read meanwhile have no time."""
        self._since = None

    def read(self, now: float, *, input_tokens: int, nonpad_tokens: int, useful_tokens: int) -> None:
        """Takes the tokens since the last reading, and the time since then if the clock runs.

        Useful tokens can be negative: when a step turns out to be skipped after its tokens were read.
        """
        totals, work = self.totals, self.work
        timed_input = timed_nonpad = 0
        seconds = model_flops = hardware_flops = mfu_capacity = hfu_capacity = 0.0
        if self._since is not None:
            seconds, self._since = now - self._since, now
            timed_input, timed_nonpad = input_tokens, nonpad_tokens
            if work.peak_flops_per_second is not None and work.model_flops_per_token is not None:
                mfu_capacity = work.peak_flops_per_second * seconds
                model_flops = work.model_flops_per_token * input_tokens
                if work.hardware_flops_per_token is not None:
                    hfu_capacity, hardware_flops = mfu_capacity, work.hardware_flops_per_token * input_tokens
        # Runs in every optimizer step: `dataclasses.replace` makes a call per field.
        self.totals = ThroughputTotals(
            totals.input_tokens + input_tokens,
            totals.nonpad_tokens + nonpad_tokens,
            totals.useful_tokens + useful_tokens,
            totals.timed_input_tokens + timed_input,
            totals.timed_nonpad_tokens + timed_nonpad,
            totals.seconds + seconds,
            totals.validation_seconds,
            totals.model_flops + model_flops,
            totals.hardware_flops + hardware_flops,
            totals.mfu_capacity_flops + mfu_capacity,
            totals.hfu_capacity_flops + hfu_capacity,
        )
        if input_tokens:
            self._history.append(self.totals)
        else:
            # Time or skips of the step before; the window stays as many steps long.
            self._history[-1] = self.totals

    def validated(self, seconds: float) -> None:
        """Adds time spent in validation, which is kept apart."""
        self.totals = replace(self.totals, validation_seconds=self.totals.validation_seconds + seconds)

    def state_dict(self) -> dict[str, Any]:
        """The totals."""
        return asdict(self.totals)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from saved totals; the window starts over."""
        kinds = {f.name: COUNT if f.type is int else AMOUNT for f in fields(ThroughputTotals)}
        self.totals = ThroughputTotals(**checked_state(state, kinds, "the throughput"))
        self._history.clear()
        self._history.append(self.totals)
        self._since = None


def bubble_fraction(stages: int, micro_batches: int) -> float:
    """Share of a step's time in which a stage is idle, under GPipe and 1F1B.

    With f and b the time of one forward and one backward of one micro-batch in one stage, both take (m + s - 1)(f + b),
    of which a stage works m (f + b). The pipeline drains at the end of every batch: what counts is the micro-batches of
    one call of the schedule. Megatron-LM divides by the time without a bubble instead: (s - 1) / m.

    Args:
        stages: s stages of equal work.
        micro_batches: m, into which the schedule splits one batch. Torch's ``Schedule1F1B`` needs at least s.

    Returns:
        (s - 1) / (m + s - 1), from 0 to below 1; ignores the time for communication and the optimizer step.

    Raises:
        ValueError: an argument is not a positive integer.

    Source: Huang et al. 2019, GPipe, arXiv:1811.06965, section 2.3.

    Example:
        With 4 micro-batches per stage, a fifth at most:

        >>> bubble_fraction(2, 8), bubble_fraction(4, 13), round(bubble_fraction(64, 256), 3)
        (0.1111111111111111, 0.1875, 0.197)
    """
    for name, value in (("stages", stages), ("micro_batches", micro_batches)):
        whole_number(value, name)
    return (stages - 1) / (micro_batches + stages - 1)
