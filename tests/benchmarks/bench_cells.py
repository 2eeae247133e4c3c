"""The ways to train that are compared: ours and stock under Lightning's Trainer, and a plain PyTorch loop."""

import gc
import logging
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import Any, Literal, get_args

import lightning as L
import torch
from all_callbacks import all_callbacks
from bench_schedule import Cell, Group, Measurement
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_mp import AutocastPrecision, Float8Precision, MasterWeightsPrecision, OverflowMonitor, TF32Precision
from lightning_mp.language_model import GPT, GPTConfig
from lightning_mp.planning import flops_per_token
from lightning_mp.training.precision.masters.checks import Storage

CLIP = 1.0
LEARNING_RATE = 3e-4
INITIAL_SCALE = 2.0**16
AUTOCAST_DTYPES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
PEAK_FORMATS = {
    "tf32": "tf32",
    "bf16-mixed": "bf16",
    "bf16-true": "bf16",
    "16-mixed": "fp16",
    "16-true": "fp16",
    "fp8-mixed": "fp8",
}
"""Format of the matmul inputs, whose peak MFU refers to."""


@dataclass(frozen=True)
class Workload:
    """What every cell trains: the same model on the same tokens."""

    config: GPTConfig
    batch_size: int
    """Sequences per optimizer step."""
    device: torch.device
    compile_backend: str
    settle_steps: int
    """Steps before the timer starts in each segment: the optimizer state is made in the first one."""
    segment_seconds: float
    """How long a timed segment should last."""
    min_steps: int
    max_steps: int
    compiled: Literal["", "whole", "by block"] = ""
    accumulation: int = 1
    """Micro-batches per optimizer step."""

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.config.block_tokens

    def batches(self, count: int, rows: int | None = None) -> Iterator[list[Tensor]]:
        """Random token ids that already lie on the device, so that no data loading is timed."""
        generator = torch.Generator().manual_seed(1)
        shape = (rows or self.batch_size // self.accumulation, self.config.block_tokens)
        ids = torch.randint(0, self.config.vocab, shape, generator=generator).to(self.device)
        for _ in range(count):
            yield [ids, ids.roll(-1, dims=1)]


class LossModel(nn.Module):
    """The GPT with its loss, so that a compiler sees both."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gpt = GPT(config)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(self.gpt(ids).flatten(0, 1), labels.flatten())


class Stopwatch:
    """Times whole segments and, in each step, what follows backward.

    A segment lasts from the end of step `settle` to the end of the last step, one device wait at each end. In between
    the device is only marked with events.
    """

    def __init__(self, workload: Workload, steps: int) -> None:
        self.device = workload.device
        self.settle, self.last = workload.settle_steps, workload.settle_steps + steps
        self.seconds = math.nan
        self._spans: list[tuple[Any, Any]] = []
        self._backward_ended: Any = None

    def after_backward(self) -> None:
        self._backward_ended = self._mark()

    def after_step(self, done: int) -> None:
        if done > self.settle:
            self._spans.append((self._backward_ended, self._mark()))
        if done == self.settle:
            synchronize(self.device)
            self._begin = time.perf_counter()
        elif done == self.last:
            synchronize(self.device)
            self.seconds = time.perf_counter() - self._begin

    def step_seconds(self) -> float:
        """From backward's end to the stepped weights, median over the timed steps."""
        on_cuda = self.device.type == "cuda"
        return median(start.elapsed_time(end) / 1e3 if on_cuda else end - start for start, end in self._spans)

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


@dataclass
class TrainingRunner:
    """A model that is trained segment by segment; between segments it waits on the device if others fit beside it."""

    workload: Workload
    precision: str
    train: "Train"
    steps: int = 0

    def warm_up(self) -> None:
        torch.manual_seed(0)
        with self.workload.device:  # a CPU takes many seconds to draw a billion weights
            self.model = LossModel(self.workload.config).cpu()
        parts: Iterable[nn.Module] = self.model.gpt.blocks if self.workload.compiled == "by block" else [self.model]
        for part in parts if self.workload.compiled else ():
            part.compile(backend=self.workload.compile_backend)
        self.steps = self.workload.min_steps
        seconds_per_step = self.workload.tokens_per_step / self.measure().tokens_per_second
        wanted = math.ceil(self.workload.segment_seconds / seconds_per_step)
        self.steps = min(max(wanted, self.workload.min_steps), self.workload.max_steps)

    def measure(self) -> Measurement:
        device = self.workload.device
        own = sum(p.nbytes for p in self.model.parameters() if p.device.type == "cuda")
        allocated_before = free_device(device) - own
        stopwatch = Stopwatch(self.workload, self.steps)
        scaler = self.train(self, stopwatch)
        peak = torch.cuda.max_memory_allocated(device) - allocated_before if device.type == "cuda" else None
        self.model.zero_grad(set_to_none=True)
        # Weights that a plugin has made 16 bit would otherwise be the next segment's true ones.
        self.model.float()
        if not others_fit_beside(device):
            self.model.cpu()
        # torch's scaler halves on each skipped step and does not grow in so few steps
        skipped = 0 if scaler is None else round(math.log2(INITIAL_SCALE / scaler.get_scale()))
        rate = self.steps * self.workload.tokens_per_step / stopwatch.seconds
        return Measurement(rate, peak, skipped, stopwatch.step_seconds())

    def release(self) -> None:
        del self.model
        gc.collect()


Train = Callable[[TrainingRunner, Stopwatch], torch.amp.GradScaler | None]
"""Trains `stopwatch.last` steps from fresh optimizer state and returns the loss scaler."""


def train_plain(*, fused: bool, clip: float | None, precision: str | None = None) -> Train:
    """The loop that one writes by hand: torch.autocast and torch's GradScaler; in the cell's precision if None."""

    def train(runner: TrainingRunner, stopwatch: Stopwatch) -> torch.amp.GradScaler | None:
        device, window = runner.workload.device, runner.workload.accumulation
        dtype = AUTOCAST_DTYPES.get(precision or runner.precision)
        model = runner.model.to(device).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=fused)
        scaler = torch.amp.GradScaler(device.type, init_scale=INITIAL_SCALE, enabled=dtype is torch.float16)

        def autocast() -> AbstractContextManager[None]:
            return torch.autocast(device.type, dtype=dtype) if dtype is not None else nullcontext()

        for done, (ids, labels) in enumerate(runner.workload.batches(stopwatch.last * window), start=1):
            with autocast():
                loss = model(ids, labels) / window
            scaler.scale(loss).backward()
            if done % window:
                continue
            stopwatch.after_backward()
            if clip is not None:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
            stopwatch.after_step(done // window)
            optimizer.zero_grad(set_to_none=True)
        return scaler if scaler.is_enabled() else None

    return train


def train_plain_masters(runner: TrainingRunner, stopwatch: Stopwatch) -> None:
    """bf16 weights, fp32 masters, copies of whole lists: the loop that one writes by hand for them."""
    model = runner.model.to(runner.workload.device).train()
    masters = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    weights = list(model.to(torch.bfloat16).parameters())
    optimizer = torch.optim.AdamW(masters, lr=LEARNING_RATE, fused=True)
    for done, (ids, labels) in enumerate(runner.workload.batches(stopwatch.last), start=1):
        model(ids, labels).backward()
        stopwatch.after_backward()
        gradients = [torch.empty_like(master) for master in masters]
        torch._foreach_copy_(gradients, [p.grad for p in weights if p.grad is not None])
        for master, gradient in zip(masters, gradients, strict=True):
            master.grad = gradient
        nn.utils.clip_grad_norm_(masters, CLIP)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(weights, masters)
        stopwatch.after_step(done)
        model.zero_grad(set_to_none=True)


class BenchmarkModule(L.LightningModule):
    """What a user writes: a training step and an optimizer."""

    def __init__(self, model: nn.Module, fused: bool) -> None:
        super().__init__()
        self.model = model
        self.fused = fused

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(*batch)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=LEARNING_RATE, fused=self.fused)


class TimerCallback(L.Callback):
    """Tells the stopwatch about each step, the same for ours and stock; the first of the callbacks."""

    def __init__(self, stopwatch: Stopwatch, window: int) -> None:
        self.stopwatch, self.window = stopwatch, window

    def on_after_backward(self, *arguments: object) -> None:
        self.stopwatch.after_backward()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % self.window == 0:
            self.stopwatch.after_step((batch_idx + 1) // self.window)


class Batches:
    """A sized iterable of the workload's batches, for the Trainer."""

    def __init__(self, workload: Workload, count: int, rows: int | None = None) -> None:
        self.workload, self.count, self.rows = workload, count, rows

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[list[Tensor]]:
        return self.workload.batches(self.count, self.rows)


def fit(
    module: L.LightningModule,
    workload: Workload,
    plugin: Precision | None,
    batches: Iterable[list[Tensor]],
    callbacks: Sequence[L.Callback] = (),
    **arguments: Any,
) -> None:
    """One epoch on the batches under Lightning's Trainer."""
    with quiet_lightning():
        trainer = L.Trainer(
            accelerator="gpu" if workload.device.type == "cuda" else "cpu",
            devices=1,
            max_epochs=1,
            plugins=[] if plugin is None else [plugin],
            callbacks=list(callbacks),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **{"logger": False, "accumulate_grad_batches": workload.accumulation, **arguments},
        )
        trainer.fit(module, batches)


def train_lightning(
    plugin: Callable[[str, str], Precision | None],
    *,
    fused: bool,
    clip: float | None,
    callbacks: Callable[[], list[L.Callback]] = list,
) -> Train:
    """Lightning's Trainer with the precision plugin that `plugin(precision, device)` makes, None for 32 bit."""

    def train(runner: TrainingRunner, stopwatch: Stopwatch) -> torch.amp.GradScaler | None:
        workload = runner.workload
        precision = plugin(runner.precision, workload.device.type)
        module = BenchmarkModule(runner.model, fused)
        batches = Batches(workload, stopwatch.last * workload.accumulation)
        timed = [TimerCallback(stopwatch, workload.accumulation), *callbacks()]
        fit(module, workload, precision, batches, timed, gradient_clip_val=clip)
        return getattr(precision, "scaler", None)

    return train


def stock_plugin(precision: str, device: str) -> Precision | None:
    """Lightning's own."""
    # Made by hand because Trainer(precision="16-mixed") turns into bf16 on a CPU; on CUDA it makes this very plugin.
    scaler = torch.amp.GradScaler(device, init_scale=INITIAL_SCALE) if precision == "16-mixed" else None
    return MixedPrecision(precision, device, scaler)  # type: ignore[arg-type]


def our_plugin(precision: str, device: str) -> Precision:
    """The same of this package."""
    return AutocastPrecision(precision)  # type: ignore[arg-type]


# -- cells -------------------------------------------------------------------------------------------------------------

# Bytes per parameter that AdamW with clipping by norm cannot avoid: the gradient is read for the norm; then gradient,
# weight and moments are read, and weight and moments are written.
FLOOR_BYTES = {
    "fp32 weights": 4 + (4 + 4 + 8) + (4 + 8),
    "fp32 masters": 2 + (2 + 4 + 8) + (2 + 4 + 8),
    "remainder masters": 2 + (2 + 2 + 2 + 8) + (2 + 2 + 8),
    "24bit masters": 2 + (2 + 2 + 1 + 8) + (2 + 1 + 8),
    "16-bit weights and moments": 2 + (2 + 2 + 4) + (2 + 4),
}


def new_cell(
    workload: Workload,
    recipe: str,
    precision: str,
    train: Train,
    *,
    floor: str = "fp32 weights",
    fused: bool = True,
    clipped: bool = True,
    **more: Any,
) -> Cell:
    """A row of the tables; ``floor`` names the bytes that its optimizer step cannot avoid."""
    runner = partial(TrainingRunner, workload, precision, train)
    optimizer = f"{'fused' if fused else 'foreach'} AdamW{'' if clipped else ', no clipping'}"
    return Cell(recipe, precision, optimizer, runner, FLOOR_BYTES[floor] if clipped else None, **more)


def _ours(plugin: Callable[[], Precision], callbacks: Callable[[], list[L.Callback]] = list) -> Train:
    return train_lightning(lambda *_: plugin(), fused=True, clip=CLIP, callbacks=callbacks)


def mixed_cells(workload: Workload, precision: str) -> list[Cell]:
    """Ours, plain and stock under autocast, then ours with callbacks, and stock fused."""

    def ours(callbacks: Callable[[], list[L.Callback]] = list) -> Train:
        return train_lightning(our_plugin, fused=True, clip=CLIP, callbacks=callbacks)

    # FLOPs as a number, because those of compiled code cannot be counted.
    every = partial(all_callbacks, workload.accumulation, training_flops_per_token(workload.config)[1])
    cell = partial(new_cell, workload, precision=precision)
    return [
        cell("ours", train=ours()),
        cell("plain", train=train_plain(fused=True, clip=CLIP)),
        # Lightning refuses clipping with a fused optimizer under autocast.
        cell("stock", train=train_lightning(stock_plugin, fused=False, clip=CLIP), fused=False),
        cell("ours, all callbacks", train=ours(lambda: list(every().values()))),
        cell("stock, no clipping", train=train_lightning(stock_plugin, fused=True, clip=None), clipped=False),
        cell("ours, OverflowMonitor", train=ours(lambda: [OverflowMonitor()])),
    ]


def masters_cells(workload: Workload) -> list[Cell]:
    """Master weights beside the loop that one writes by hand, and beside 16-bit weights without masters."""
    cell = partial(new_cell, workload, precision="bf16-true")
    ours = [
        cell(
            f"ours, {storage} masters",
            train=_ours(partial(MasterWeightsPrecision, "bf16-true", storage=storage)),
            floor=f"{storage} masters",
        )
        for storage in get_args(Storage)
    ]
    stock = train_lightning(lambda *_: HalfPrecision("bf16-true"), fused=True, clip=CLIP)
    return [
        ours[0],
        cell("plain", train=train_plain_masters, floor="fp32 masters"),
        *ours[1:],
        cell("stock", train=stock, floor="16-bit weights and moments"),
    ]


def float8_cells(workload: Workload) -> list[Cell]:
    """fp8, which is compared with bf16 autocast; without torchao its rows say so at once."""
    missing = None if find_spec("torchao") else "torchao is not installed"
    recipes: tuple[Literal["tensorwise", "rowwise"], ...] = ("tensorwise", "rowwise")
    return [
        new_cell(
            workload,
            f"ours, fp8 {recipe}",
            "fp8-mixed",
            _ours(partial(Float8Precision, recipe, skip_small=False)),
            beside="bf16-mixed",
            error=missing,
        )
        for recipe in recipes
    ]


def every_plugin(workload: Workload) -> list[Cell]:
    """One way per plugin, beside the plain loops."""
    fp16_masters = _ours(lambda: MasterWeightsPrecision("16-true"))
    return [
        *mixed_cells(workload, "bf16-mixed")[:3],
        *masters_cells(workload)[:4],
        *mixed_cells(workload, "16-mixed")[:3],
        new_cell(workload, "ours, fp16 masters", "16-true", fp16_masters, floor="fp32 masters"),
        new_cell(workload, "ours, TF32Precision", "tf32", _ours(TF32Precision)),
        *float8_cells(workload),
    ]


def make_group(workload: Workload, cells: list[Cell], repeats: int) -> Group:
    """Of cells that train the same workload."""
    flops = training_flops_per_token(workload.config)[1]
    reset = torch.compiler.reset if workload.compiled else lambda: None
    return Group(cells, repeats, workload.config.parameters, flops, reset)


def training_flops_per_token(config: GPTConfig) -> tuple[int, int]:
    """Parameters that take part in matmuls (blocks and head, which the token table shares), and PaLM's operations."""
    parameters = 12 * config.layers * config.width**2 + config.vocab * config.width
    context = {"layers": config.layers, "width": config.width, "context_tokens": config.block_tokens}
    return parameters, flops_per_token(parameters, **context, convention="palm")


def copy_bytes_per_second(device: torch.device) -> float:
    """Bytes read and written by a copy, the best of five."""
    source = torch.zeros(2**30 if device.type == "cuda" else 2**24, dtype=torch.uint8, device=device)
    target, seconds = torch.empty_like(source), []
    for _ in range(5):
        synchronize(device)
        begin = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return 2 * source.nbytes / min(seconds)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def others_fit_beside(device: torch.device) -> bool:
    """Whether half of the device is free, so that a model may wait there for its next segment."""
    if device.type != "cuda":
        return False
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return free > total / 2


def free_device(device: torch.device) -> int:
    """Empties the allocator's cache, begins new peaks, and returns the bytes that remain allocated."""
    gc.collect()  # a Trainer and its module refer to each other; what they held would count as memory
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Keeps the Trainer's banner out of the output; errors pass."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
