"""In which order parts and cells are measured, and what is kept when the run is cut short.

A part of the benchmark has a share of the time; what earlier parts leave of theirs is added to it. A cell is one way to
train (ours, stock, plain). Cells that are compared with each other form a group: every cell is warmed up first; then
each repeat measures every cell once, starting with another one each time, so that a device that warms up or is shared
slows all of them alike. Ratios are taken within a repeat.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol

NOT_REACHED = "not measured: the time was over"


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
    step_seconds: float | None = None
    """From the end of backward to the stepped weights, median over the steps."""


@dataclass
class Cell:
    """One row of a table and how to measure it."""

    recipe: str
    precision: str
    optimizer: str
    make_runner: Callable[[], Runner]
    floor_bytes: float | None = None
    """Per parameter, what any optimizer step must read and write."""
    beside: str = ""
    """Precision of the cells that it is compared with, if it is not its own."""
    error: str | None = None
    """Set before the run, it keeps the cell from taking the time of others."""
    measurements: list[Measurement | None] = field(default_factory=list)
    """By repeat; None where this cell was not reached in that repeat, nothing for repeats that never began."""

    @property
    def rates(self) -> list[float]:
        """Tokens per second of the repeats that were measured."""
        return [m.tokens_per_second for m in self.measurements if m is not None]


@dataclass
class Group:
    """Cells that are compared with each other."""

    cells: list[Cell]
    repeats: int
    parameters: int = 0
    flops_per_token: int = 0
    on_enter: Callable[[], None] = lambda: None

    def baseline(self, cell: Cell, recipe: str) -> Cell | None:
        """The cell of that recipe that a cell is compared with."""
        precision = cell.beside or cell.precision
        found = (c for c in self.cells if (c.recipe, c.precision) == (recipe, precision) and c is not cell)
        return next(found, None)


class Budget:
    """A time limit, and whether somebody ended the run.

    Args:
        seconds: from now.
        clock: of the whole run.
        within: another limit, which holds as well.
    """

    def __init__(self, seconds: float, clock: Callable[[], float], within: "Budget | None" = None) -> None:
        self.clock, self.cancelled = clock, False
        self._end, self._within = clock() + seconds, within

    def allows(self) -> bool:
        """Whether something may still begin."""
        own = not self.cancelled and self.clock() < self._end
        return own and (self._within is None or self._within.allows())


Progress = Callable[[str], None]


@dataclass
class Part:
    """A table of the report: rows of its own, or those of a group."""

    title: str
    seconds: float
    """Its share of the time."""
    explanation: str
    """Stands above the table."""
    heading: tuple[str, ...] = ()
    measure: "Callable[[Part, Budget], None] | None" = None
    """Adds rows one by one."""
    group: Group | None = None
    rows: list[list[str]] = field(default_factory=list)
    error: str | None = None

    @property
    def has_gaps(self) -> bool:
        """Whether anything that was to be measured is missing."""
        cells, repeats = ([], 0) if self.group is None else (self.group.cells, self.group.repeats)
        is_short = any(len(cell.rates) < repeats for cell in cells)
        return self.error is not None or is_short or any(NOT_REACHED in row for row in self.rows)


def run_parts(parts: Sequence[Part], budget: Budget, on_progress: Progress) -> None:
    """Measures parts in order; ``on_progress`` is called after each thing worth keeping.

    An exception ends a part, or a cell of a group, only: its text goes into the table.
    """
    begin, share = budget.clock(), 0.0
    for part in parts:
        share += part.seconds
        own = Budget(begin + share - budget.clock(), budget.clock, budget)
        try:
            if part.group is not None:
                run_group(part.group, own, lambda text, title=part.title: on_progress(f"{title}: {text}"))
            elif not own.allows():
                part.error = NOT_REACHED
            elif part.measure is not None:
                part.measure(part, own)
        except Exception as error:
            part.error = describe(error)
        on_progress(f"{part.title}: {part.error or 'done'}")


def run_group(group: Group, budget: Budget, on_progress: Progress = lambda _: None) -> None:
    """Measures a group."""
    ready: list[tuple[Cell, Runner]] = []
    try:
        if budget.allows():
            group.on_enter()
        for cell in group.cells:
            runner = _warmed_up(cell, budget)
            if runner is not None:
                ready.append((cell, runner))
            on_progress(f"{cell.recipe}, {cell.precision}: {cell.error or 'warmed up'}")
        for repeat in range(group.repeats):
            if not budget.allows():
                break
            first = repeat % max(len(ready), 1)
            for cell, runner in ready[first:] + ready[:first]:
                _measure(cell, runner, budget)
            on_progress(f"repeat {repeat + 1} of {group.repeats}")
    finally:
        for cell, runner in ready:
            runner.release()
            if cell.error is None and not cell.rates:
                cell.error = NOT_REACHED


def _warmed_up(cell: Cell, budget: Budget) -> Runner | None:
    if cell.error is not None:
        return None
    if not budget.allows():
        cell.error = NOT_REACHED
        return None
    runner = cell.make_runner()
    try:
        runner.warm_up()
    except Exception as error:
        cell.error = describe(error)
        runner.release()
        return None
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

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


def ratio(cell: Cell, baseline: Cell | None) -> Ratio | None:
    """Ratio of two cells, taken within each repeat; None when no repeat has both."""
    pairs = [
        ours.tokens_per_second / theirs.tokens_per_second
        for ours, theirs in zip(cell.measurements, baseline.measurements if baseline is not None else (), strict=False)
        if ours is not None and theirs is not None
    ]
    return Ratio(median(pairs), min(pairs), max(pairs), len(pairs)) if pairs else None
