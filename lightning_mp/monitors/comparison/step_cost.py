"""What a step costs in each precision: time, interleaved; peak memory; error of the gradient."""

import math
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from typing_extensions import override

from lightning_mp.ground.core import private_dispatch_api
from lightning_mp.ground.core.nested_tensors import tensors_in
from lightning_mp.monitors.comparison.trial import Experiment, TrainingData, run_trial
from lightning_mp.monitors.step_memory.live_storages import LiveStorages

_STEPS_TO_A_FINITE_GRADIENT = 40  # a loss scale of 2**24 comes down to 2**-15 in this many skips
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_MEMORY_STEPS = 3  # the third one has gradients of the step before, and optimizer states


@dataclass(frozen=True, slots=True)
class TimedRound:
    """One short run of one precision."""

    batch_seconds: float  # of a batch, with its part of the optimizer's step and of the data's loading
    items_per_second: float  # tokens or samples
    unit: str  # which of them


@dataclass(frozen=True, slots=True)
class StepCost:
    """What a precision costs, over all rounds."""

    batch_seconds: float  # median over the rounds
    time_ratio: float  # median over the rounds of the time over that of the baseline in the same round
    time_ratio_range: tuple[float, float]  # the smallest and the largest of these
    items_per_second: float  # median
    unit: str  # "tokens" or "samples"
    peak_bytes: int  # of the CUDA allocator; elsewhere of live tensors
    # norm of the error of the first gradient, over the norm of the gradient; None where it is not known
    gradient_error: float | None


def measure_round(experiment: Experiment, precision: str, *, warmup: int, steps: int, progress: Callback) -> TimedRound:
    """Times a short run, its first steps left out."""
    clock = _Clock(warmup)
    trial = run_trial(experiment, precision, seed=0, steps=warmup + steps, callbacks=[clock, progress])
    seconds = clock.seconds / max(1, clock.batches)
    items_per_batch = trial.items / max(1, clock.all_batches)
    return TimedRound(seconds, items_per_batch / seconds if seconds else math.nan, trial.unit)


class _Clock(Callback):
    def __init__(self, warmup: int) -> None:
        self._warmup = warmup
        self._began = math.nan
        self.batches = 0
        self.all_batches = 0
        self.seconds = math.nan

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self.all_batches += 1
        if math.isnan(self._began):
            if trainer.global_step >= self._warmup:
                self._began = _time(pl_module.device)
        else:
            self.batches += 1

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.seconds = _time(pl_module.device) - self._began


def _time(device: torch.device) -> float:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()
    return time.perf_counter()


def peak_bytes(experiment: Experiment, precision: str) -> int:
    """The most that the first steps keep: by the CUDA allocator, elsewhere the bytes of live tensors."""
    if experiment.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run_trial(experiment, precision, seed=0, steps=_MEMORY_STEPS)
        return torch.cuda.max_memory_allocated() - before
    live = LiveStorages()
    with ExitStack() as observation:
        watcher = _MemoryWatcher(live, observation)
        run_trial(experiment, precision, seed=0, steps=_MEMORY_STEPS, callbacks=[watcher])
    return max(sample.total_bytes for sample in live.samples)


class _MemoryWatcher(Callback):
    """Begins to observe when the module is made, and reports tensors that no operation has made."""

    def __init__(self, live: LiveStorages, observation: ExitStack) -> None:
        self._live = live
        self._observation = observation

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        weights = [weight for weight in pl_module.parameters() if not is_lazy(weight)]
        self._live.add("weights", weights)
        self._live.add("buffers", pl_module.buffers(), unless=("weights",))
        self._observation.enter_context(private_dispatch_api.observe_dispatch(self._live.after_operation))

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, index: int) -> None:
        self._live.add("batch", tensors_in(batch), unless=("weights", "buffers"))


def gradient_of(experiment: Experiment, precision: str, batch: Any) -> dict[str, Tensor]:
    """The gradient of one batch at the initial weights, as the first optimizer sees it before clipping, in fp64.

    With a loss scale: of the first attempt that does not overflow. Dropout modules are off, since masks are drawn
    differently in each format. Empty if there was no finite gradient.
    """
    taker = _GradientTaker()
    data = TrainingData(batch)
    steps = _STEPS_TO_A_FINITE_GRADIENT
    run_trial(experiment, precision, seed=0, steps=steps, callbacks=[taker], data=data)
    return taker.gradient


class _GradientTaker(Callback):
    def __init__(self) -> None:
        self.gradient: dict[str, Tensor] = {}

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        for module in pl_module.modules():
            if isinstance(module, _DROPOUTS):
                module.p = 0.0

    @override
    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        if self.gradient:
            return
        found = {
            # sparse ones have no isfinite(); copied, since clipping works in place
            name: weight.grad.detach().to_dense().to("cpu", torch.float64, copy=True)
            for name, weight in pl_module.named_parameters()
            if weight.grad is not None
        }
        if found and all(bool(gradient.isfinite().all()) for gradient in found.values()):
            self.gradient = found
            trainer.should_stop = True


def relative_error(gradient: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float | None:
    """Norm of the difference over the norm of the reference; None where they are not over the same parameters.

    >>> import torch
    >>> relative_error({"w": torch.tensor([3.0, 4.5])}, {"w": torch.tensor([3.0, 4.0])})
    0.1
    """
    if not reference or gradient.keys() != reference.keys():
        return None
    error = sum(float((gradient[name] - expected).square().sum()) for name, expected in reference.items())
    norm = sum(float(expected.square().sum()) for expected in reference.values())
    return math.sqrt(error / norm) if norm else None
