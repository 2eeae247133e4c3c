"""In which order cells are measured, and what is kept when the run is cut short.

A cell is one way to train (ours, stock, plain) in one precision, eager or compiled. Cells that are compared with each
other form a group. Within a group every cell is warmed up first; then each repeat measures every cell once, starting
with another one each time, so that a device that warms up or is shared slows all of them alike. Ratios are taken
within a repeat.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol

NOT_REACHED = "not measured: the run ended first"


class Runner(Protocol):
    """One way to train, ready to be measured again and again."""

    def warm_up(self) -> None:
        """Builds, compiles and calibrates. Not timed."""

    def measure(self) -> "Measurement":
        """Trains one segment and times it."""

    def release(self) -> None:
        """Frees what the runner holds."""


@dataclass(frozen=True)
class Measurement:
    """One timed segment."""

    tokens_per_second: float
    peak_memory_bytes: int | None
    skipped_steps: int = 0


@dataclass
class Cell:
    """One row of the table and how to measure it."""

    recipe: str
    precision: str
    compiled: bool
    optimizer: str
    clip: float | None
    make_runner: Callable[[], Runner]
    measurements: list[Measurement | None] = field(default_factory=list)
    """By repeat; None where this cell was not reached in that repeat, nothing for repeats that never began."""
    error: str | None = None

    @property
    def rates(self) -> list[float]:
        """Tokens per second of the repeats that were measured."""
        return [m.tokens_per_second for m in self.measurements if m is not None]


@dataclass
class Group:
    """Cells that are compared with each other."""

    precision: str
    compiled: bool
    cells: list[Cell]
    on_enter: Callable[[], None] = lambda: None
    model: str = ""
    """Empty for the model that the report is about."""
    flops_per_token: int | None = None

    @property
    def title(self) -> str:
        """Heading of the group's table."""
        return ", ".join([*filter(None, [self.model]), self.precision, "compiled" if self.compiled else "eager"])


@dataclass
class Budget:
    """A time limit, how long a warm-up took so far, and whether somebody ended the run."""

    seconds: float
    clock: Callable[[], float]
    expected_warm_up_seconds: dict[bool, float] = field(default_factory=lambda: {False: 0.0, True: 0.0})
    """Longest warm-up seen or to be expected, by eager (False) and compiled (True)."""
    cancelled: bool = False

    def __post_init__(self) -> None:
        self._deadline = self.clock() + self.seconds

    def allows(self, seconds: float = 0.0) -> bool:
        """Whether something that takes this long may still begin."""
        return not self.cancelled and self.clock() + seconds < self._deadline


def run_groups(
    groups: Sequence[Group], *, repeats: int, budget: Budget, on_progress: Callable[[str], None] = lambda _: None
) -> None:
    """Measures all groups in order; `on_progress` is called after each thing worth keeping.

    An exception in a cell ends that cell only: its text goes into the table.
    """
    for group in groups:
        _run_group(group, repeats, budget, on_progress)


def _run_group(group: Group, repeats: int, budget: Budget, on_progress: Callable[[str], None]) -> None:
    ready: list[tuple[Cell, Runner]] = []
    try:
        if budget.allows():
            group.on_enter()
        for cell in group.cells:
            runner = _warmed_up(cell, budget)
            if runner is not None:
                ready.append((cell, runner))
            on_progress(f"{group.title}: {cell.recipe}: {cell.error or 'warmed up'}")
        for repeat in range(repeats):
            if not budget.allows():
                break
            first = repeat % max(len(ready), 1)
            for cell, runner in ready[first:] + ready[:first]:
                _measure(cell, runner, budget)
            on_progress(f"{group.title}: repeat {repeat + 1} of {repeats}")
    finally:
        for cell, runner in ready:
            runner.release()
            if cell.error is None and not cell.rates:
                cell.error = NOT_REACHED


def _warmed_up(cell: Cell, budget: Budget) -> Runner | None:
    if not budget.allows(budget.expected_warm_up_seconds[cell.compiled]):
        cell.error = NOT_REACHED
        return None
    begin = budget.clock()
    runner = cell.make_runner()
    try:
        runner.warm_up()
    except Exception as error:
        cell.error = describe(error)
        runner.release()
        return None
    seconds = budget.clock() - begin
    budget.expected_warm_up_seconds[cell.compiled] = max(seconds, budget.expected_warm_up_seconds[cell.compiled])
    return runner


def _measure(cell: Cell, runner: Runner, budget: Budget) -> None:
    measurement = None
    if cell.error is None and budget.allows():
        try:
            measurement = runner.measure()
        except Exception as error:
            cell.error = describe(error)
    cell.measurements.append(measurement)


def describe(error: Exception) -> str:
    """Type and first line, for a table."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


@dataclass(frozen=True)
class Ratio:
    """How many times as fast a cell is as another of its group: median and range over the repeats."""

    median: float
    low: float
    high: float
    repeats: int


def ratio(cell: Cell, baseline: Cell) -> Ratio | None:
    """Ratio of two cells, taken within each repeat; None when no repeat has both."""
    pairs = [
        ours.tokens_per_second / theirs.tokens_per_second
        for ours, theirs in zip(cell.measurements, baseline.measurements, strict=False)
        if ours is not None and theirs is not None
    ]
    return Ratio(median(pairs), min(pairs), max(pairs), len(pairs)) if pairs else None
