"""The gradient epilogue alone, beside the time that reading the gradients once must take.

The floor is bytes of gradients over the bandwidth that a copy reaches on the same device. Every way is timed in each
repeat, beginning with another one, and ratios to the floor are taken within a repeat.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch import nn

from lightning_mp import LossScaler
from lightning_mp.gradients.fused_optimizers import fused_step
from lightning_mp.gradients.replication import GradientReplication
from lightning_mp.language_model import GPT, GPTConfig
from lightning_mp.optimizer_step.gradient_epilogue import GradientEpilogue

# Every call is to find the same gradients: a scale of 1 and a limit that nothing reaches cost what others cost.
SCALE, MAX_NORM = 1.0, 1e9
COPY_BYTES = {"cuda": 2**30, "cpu": 2**24}


@dataclass(frozen=True)
class EpilogueRow:
    """One way from raw gradients to those that the optimizer's kernel takes."""

    name: str
    passes: int
    """Gradient bytes read or written, per byte of gradients, by design; counted in tests, not here."""
    seconds: list[float]
    times_floor: float
    low: float
    high: float


@dataclass(frozen=True)
class EpilogueReport:
    """What :func:`measure` found."""

    gradient_bytes: int
    copy_bytes_per_second: float
    floor_seconds: float
    rows: list[EpilogueRow]

    def as_record(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)


def measure(config: GPTConfig, device: torch.device, *, repeats: int, calls: int) -> EpilogueReport:
    """Times each way on fp32 gradients of the shapes of a model.

    Args:
        config: the model.
        device: where.
        repeats: how often each way is timed.
        calls: epilogues per timing, one wait for the device at its end.
    """
    with torch.device("meta"):
        shapes = [p.shape for p in GPT(config).parameters()]
    generator = torch.Generator(device).manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(shape, device=device)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, device=device, generator=generator)
    gradient_bytes = sum(p.nbytes for p in parameters)
    ways = _ways(parameters, device)
    source = torch.zeros(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    timed: dict[str, Callable[[], object]] = {"copy": lambda: target.copy_(source)}
    timed |= {name: call for name, (_, call) in ways.items()}
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    names = list(timed)
    for call in timed.values():
        _time(call, device, calls)  # warm
    for repeat in range(repeats):
        first = repeat % len(names)
        for name in names[first:] + names[:first]:
            seconds[name].append(_time(timed[name], device, calls))
    # A copy reads and writes.
    floors = [gradient_bytes / (2 * source.nbytes / copied) for copied in seconds["copy"]]
    rows = []
    for name, (passes, _) in ways.items():
        ratios = [taken / floor for taken, floor in zip(seconds[name], floors, strict=True)]
        rows.append(EpilogueRow(name, passes, seconds[name], median(ratios), min(ratios), max(ratios)))
    floor = median(floors)
    return EpilogueReport(gradient_bytes, gradient_bytes / floor, floor, rows)


def _ways(parameters: list[nn.Parameter], device: torch.device) -> dict[str, tuple[int, Callable[[], None]]]:
    scale = torch.full((), SCALE, device=device)
    ranks = GradientReplication.every_rank()
    fused = torch.optim.AdamW(parameters, fused=True)
    unfused = torch.optim.AdamW(parameters, foreach=True)

    def ours_fused() -> None:
        epilogue = GradientEpilogue(fused, scale, ranks=ranks, device=device, in_kernel=True)
        epilogue.reduce(None)
        epilogue.plan(None, MAX_NORM)
        with fused_step(fused, epilogue.found_inf, epilogue.multiplier):
            pass

    def ours_unfused() -> None:
        epilogue = GradientEpilogue(unfused, scale, ranks=ranks, device=device)
        epilogue.reduce(None)
        epilogue.plan(None, MAX_NORM)
        epilogue.apply()

    def torchs() -> None:
        scaler = torch.amp.GradScaler(device.type, init_scale=SCALE)
        scaler.scale(scale)
        scaler.unscale_(unfused)
        nn.utils.clip_grad_norm_(parameters, MAX_NORM)

    def scaler_alone() -> None:
        scaler = LossScaler(device.type, init_scale=SCALE)
        scaler.scale(scale)
        scaler.unscale_(unfused)

    return {
        "ours, fused optimizer": (1, ours_fused),
        "ours, other optimizers": (3, ours_unfused),
        "LossScaler.unscale_ in a loop": (3, scaler_alone),
        "torch: unscale_ and clip_grad_norm_": (5, torchs),
    }


def _time(call: Callable[[], object], device: torch.device, calls: int) -> float:
    """Seconds of one call."""
    _wait(device)
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    _wait(device)
    return (time.perf_counter() - begin) / calls


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
