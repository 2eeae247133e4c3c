"""One cell of the memory matrix: a model, a plugin and an optimizer, estimated and measured in a real run."""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from gloo import FLOAT8, run_ranks
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from memory_models import MODELS, Project, measure, measure_on_rank, measure_peak

from lightning_mp import (
    AutocastPrecision,
    Float8Precision,
    FSDP2Strategy,
    LossScaler,
    MasterWeightsPrecision,
    estimate_memory,
)

PLUGINS: dict[str, Callable[[], Any]] = {
    "bf16-mixed": lambda: AutocastPrecision("bf16-mixed"),
    # At a scale of 1 no step is skipped, so that optimizer states are there.
    "16-mixed": lambda: AutocastPrecision("16-mixed", scaler=LossScaler(init_scale=1.0)),
    "bf16-true": lambda: MasterWeightsPrecision("bf16-true"),
    "bf16-true+remainder": lambda: MasterWeightsPrecision("bf16-true", storage="remainder"),
    "fp8-mixed": lambda: Float8Precision(skip_small=False),
}
OTHERS: dict[str, Callable[[], Any]] = {
    "bf16-true+24bit": lambda: MasterWeightsPrecision("bf16-true", storage="24bit"),
    "32-true": lambda: None,
    "cached casts": lambda: AutocastPrecision("bf16-mixed", cache_weights=True),
    "fp32_gradients": lambda: MasterWeightsPrecision("bf16-true", fp32_gradients=True),
}
STRATEGIES: dict[str, Callable[[], Any]] = {
    "ddp": lambda: "ddp",
    "ddp, views": lambda: DDPStrategy(gradient_as_bucket_view=True),
    "fsdp2": FSDP2Strategy,
}
KEPT = ("weights", "buffers", "gradients", "masters", "optimizer states", "batch")
KEPT_ON_RANKS = ("weights", "buffers", "gradients", "masters", "optimizer states")
Cell = tuple[str, str, str]
"""Model, plugin, optimizer."""
PeakCell = tuple[str, str, str, str, int]
"""Model, plugin, optimizer, strategy, micro-batches per step."""


@dataclass(frozen=True)
class Compared:
    """Bytes of one quantity."""

    what: str
    estimated: int
    measured: int

    @property
    def error(self) -> float:
        """Relative; 0 where both are 0."""
        if self.estimated == self.measured:
            return 0.0
        return self.estimated / self.measured - 1 if self.measured else float("inf")


def compare_on_one_device(cell: Cell, plugins: dict[str, Callable[[], Any]] = PLUGINS) -> list[Compared]:
    """Each part that is kept, all that is alive at the end of the forward, what is saved for backward, and the peak."""
    model, plugin, optimizer = cell
    measured = measure(model, optimizer, plugins[plugin]())
    estimate = estimate_memory(
        Project(model, optimizer), MODELS[model][1](), precision=plugins[plugin]() or plugin, device_type="cpu"
    )
    end = estimate.end_of_forward
    rows = [Compared(part, end.bytes_by_part.get(part, 0), measured.parts[part]) for part in KEPT]
    rows.append(Compared("end of forward", end.total_bytes, sum(measured.parts.values())))
    rows.append(Compared("saved", estimate.saved_bytes, measured.parts["saved"]))
    rows.append(Compared("peak", estimate.peak_bytes, measured.peak_bytes))
    return rows


def compare_on_ranks(cells: Iterable[Cell], strategy: str, timeout_seconds: float = 60) -> dict[Cell, list[Compared]]:
    """What each of two ranks holds of the parts when a step begins, what its forward saves, and DDP's buckets.

    The larger error of both ranks counts. Weights while they are gathered are not compared. A cell that the plugin
    refuses, such as BatchNorm with master weights under FSDP2, has no rows.
    """
    chosen = list(cells)

    def measure_all(rank: int) -> list[dict[str, int] | None]:
        logging.disable(logging.WARNING)
        return [measure_unless_refused(cell) for cell in chosen]

    def measure_unless_refused(cell: Cell) -> dict[str, int] | None:
        model, plugin, optimizer = cell
        try:
            return measure_on_rank(model, PLUGINS[plugin](), STRATEGIES[strategy](), optimizer)
        except MisconfigurationException:
            return None

    in_fp8 = any(PLUGINS[plugin] is PLUGINS["fp8-mixed"] for _, plugin, _ in chosen)
    ranks = run_ranks(measure_all, 2, timeout_seconds, imports=FLOAT8 if in_fp8 else ())
    found: dict[Cell, list[Compared]] = {}
    for index, (model, plugin, optimizer) in enumerate(chosen):
        found[model, plugin, optimizer] = []
        measured = [parts[index] for parts in ranks]
        if None in measured:
            continue
        estimate = estimate_memory(
            Project(model, optimizer),
            MODELS[model][1](),
            precision=plugin,
            strategy=strategy,
            ranks=2,
            device_type="cpu",
        )
        end = estimate.end_of_forward.bytes_by_part
        estimated = {part: end.get(part, 0) for part in KEPT_ON_RANKS} | {"saved": estimate.saved_bytes}
        if strategy == "ddp":
            estimated["buckets"] = end.get("communication buffers", 0)
        held = [{what: parts[what] for what in estimated} for parts in measured]
        estimated["sum"] = sum(estimated.values())
        rows = []
        for what, size in estimated.items():
            on_ranks = (Compared(what, size, sum(parts.values()) if what == "sum" else parts[what]) for parts in held)
            rows.append(max(on_ranks, key=lambda row: abs(row.error)))
        found[model, plugin, optimizer] = rows
    return found


def estimate_peak(cell: PeakCell) -> int | str:
    """The estimated peak on one device, or on each of two ranks; why it is refused."""
    model, plugin, optimizer, strategy, window = cell
    arguments: dict[str, Any] = {}
    if strategy != "single":
        arguments = {"strategy": strategy.partition(",")[0], "ranks": 2}
        arguments["gradient_as_bucket_view"] = strategy == "ddp, views"
    make = (PLUGINS | OTHERS)[plugin]
    try:
        return estimate_memory(
            Project(model, optimizer),
            MODELS[model][1](),
            precision=make() or plugin,
            device_type="cpu",
            accumulate_grad_batches=window,
            **arguments,
        ).peak_bytes
    except ValueError as error:
        return str(error)


def measure_peaks(cells: Sequence[PeakCell], timeout_seconds: float = 60) -> list[int | str]:
    """What the allocator held at the peak of a real run of each cell, on the rank with more; why it is refused.

    All cells are of one strategy. With more threads oneDNN sums the gradients of 16-bit weights in more memory.
    """
    [strategy] = {cell[3] for cell in cells}
    plugins = PLUGINS | OTHERS

    def measure_all(rank: int, ranks: int = 2) -> list[int | str]:
        logging.disable(logging.WARNING)
        torch.set_num_threads(1)
        found: list[int | str] = []
        for model, plugin, optimizer, _, window in cells:
            chosen = STRATEGIES[strategy]() if ranks > 1 else "auto"
            try:
                found.append(measure_peak(model, optimizer, plugins[plugin](), chosen, window=window, ranks=ranks))
            except MisconfigurationException as error:
                found.append(str(error))
        return found

    if strategy == "single":
        disabled, threads = logging.root.manager.disable, torch.get_num_threads()
        try:
            return measure_all(0, ranks=1)
        finally:  # this process has other tests to run
            logging.disable(disabled)
            torch.set_num_threads(threads)
    in_fp8 = any(plugins[plugin] is PLUGINS["fp8-mixed"] for _, plugin, *_ in cells)
    return [
        max(both)
        for both in zip(*run_ranks(measure_all, 2, timeout_seconds, imports=FLOAT8 if in_fp8 else ()), strict=True)
    ]
