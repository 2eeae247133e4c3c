"""The ways to train that are compared: ours and stock under Lightning's Trainer, and a plain PyTorch loop."""

import gc
import logging
import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Literal

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

CLIP = 1.0
LEARNING_RATE = 3e-4
INITIAL_SCALE = 2.0**16
AUTOCAST_DTYPES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
PEAK_FORMATS = {
    "fp32": "fp32",
    "tf32": "tf32",
    "bf16-mixed": "bf16",
    "bf16-true": "bf16",
    "16-mixed": "fp16",
    "16-true": "fp16",
    "fp8-mixed": "fp8",
}
"""Format of the matmul inputs, whose peak MFU refers to."""
OTHER_PLUGINS = "master weights and fp8"
"""Title of the group that compares the plugins that are not autocast."""


@dataclass(frozen=True)
class Workload:
    """What every cell trains: the same model on the same tokens."""

    config: GPTConfig
    batch_size: int
    device: torch.device
    compile_backend: str
    settle_steps: int
    """Steps before the timer starts in each segment: the optimizer state is made in the first one."""
    segment_seconds: float
    """How long a timed segment should last."""
    min_steps: int
    max_steps: int

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.config.block_tokens

    def batches(self, count: int, rows: int | None = None) -> Iterator[list[Tensor]]:
        """Random token ids that already lie on the device, so that no data loading is timed."""
        generator = torch.Generator().manual_seed(1)
        shape = (rows or self.batch_size, self.config.block_tokens)
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
    """Times from the end of step `settle` to the end of the last step, one device wait at each end."""

    def __init__(self, workload: Workload, steps: int) -> None:
        self.device = workload.device
        self.settle, self.last = workload.settle_steps, workload.settle_steps + steps
        self.seconds = math.nan

    def after_step(self, done: int) -> None:
        if done == self.settle:
            _synchronize(self.device)
            self._begin = time.perf_counter()
        elif done == self.last:
            _synchronize(self.device)
            self.seconds = time.perf_counter() - self._begin


@dataclass
class TrainingRunner:
    """A model that is trained segment by segment; between segments it waits on the CPU."""

    workload: Workload
    precision: str
    compiled: bool
    train: "Train"
    steps: int = 0

    def warm_up(self) -> None:
        torch.manual_seed(0)
        with self.workload.device:  # a CPU takes many seconds to draw a billion weights
            self.model: nn.Module = LossModel(self.workload.config).cpu()
        if self.compiled:
            self.model.compile(backend=self.workload.compile_backend)
        self.steps = self.workload.min_steps
        seconds_per_step = self.workload.tokens_per_step / self.measure().tokens_per_second
        wanted = math.ceil(self.workload.segment_seconds / seconds_per_step)
        self.steps = min(max(wanted, self.workload.min_steps), self.workload.max_steps)

    def measure(self) -> Measurement:
        device = self.workload.device
        gc.collect()  # a Trainer and its module refer to each other; what they held would count as memory
        allocated_before = _reset_peak_memory(device)
        stopwatch = Stopwatch(self.workload, self.steps)
        with _matmul_precision("high" if self.precision == "tf32" else "highest"):
            scaler = self.train(self, stopwatch)
        peak = torch.cuda.max_memory_allocated(device) - allocated_before if device.type == "cuda" else None
        self.model.zero_grad(set_to_none=True)
        # Weights that a plugin has made 16 bit would otherwise be the next segment's true ones.
        self.model.cpu().float()
        # torch's scaler halves on each skipped step and does not grow in so few steps
        skipped = 0 if scaler is None else round(math.log2(INITIAL_SCALE / scaler.get_scale()))
        return Measurement(self.steps * self.workload.tokens_per_step / stopwatch.seconds, peak, skipped)

    def release(self) -> None:
        self.model = nn.Identity()
        gc.collect()


Train = Callable[[TrainingRunner, Stopwatch], torch.amp.GradScaler | None]
"""Trains `stopwatch.last` steps from fresh optimizer state and returns the loss scaler."""


def train_plain(*, fused: bool, clip: float | None) -> Train:
    """The loop that one writes by hand: torch.autocast and torch's GradScaler."""

    def train(runner: TrainingRunner, stopwatch: Stopwatch) -> torch.amp.GradScaler | None:
        device = runner.workload.device
        dtype = AUTOCAST_DTYPES.get(runner.precision)
        model = runner.model.to(device).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=fused)
        scaler = torch.amp.GradScaler(device.type, init_scale=INITIAL_SCALE, enabled=dtype is torch.float16)

        def autocast() -> AbstractContextManager[None]:
            return torch.autocast(device.type, dtype=dtype) if dtype is not None else nullcontext()

        for done, (ids, labels) in enumerate(runner.workload.batches(stopwatch.last), start=1):
            with autocast():
                loss = model(ids, labels)
            scaler.scale(loss).backward()
            if clip is not None:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            stopwatch.after_step(done)
        return scaler if scaler.is_enabled() else None

    return train


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
    """Tells the stopwatch about each step, the same for ours and stock."""

    def __init__(self, stopwatch: Stopwatch) -> None:
        self.stopwatch = stopwatch

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        self.stopwatch.after_step(batch_idx + 1)


class Batches:
    """A sized iterable of the workload's batches, for the Trainer."""

    def __init__(self, workload: Workload, count: int, rows: int | None = None) -> None:
        self.workload, self.count, self.rows = workload, count, rows

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[list[Tensor]]:
        return self.workload.batches(self.count, self.rows)


def train_lightning(
    plugin: Callable[[str, str], Precision | None],
    *,
    fused: bool,
    clip: float | None,
    callbacks: Callable[[], list[L.Callback]] = list,
) -> Train:
    """Lightning's Trainer with the precision plugin that `plugin(precision, device)` makes, None for 32 bit."""

    def train(runner: TrainingRunner, stopwatch: Stopwatch) -> torch.amp.GradScaler | None:
        device = runner.workload.device
        precision = plugin(runner.precision, device.type)
        with quiet_lightning():
            trainer = L.Trainer(
                accelerator="gpu" if device.type == "cuda" else "cpu",
                devices=1,
                max_epochs=1,
                plugins=[] if precision is None else [precision],
                callbacks=[TimerCallback(stopwatch), *callbacks()],
                gradient_clip_val=clip,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            trainer.fit(BenchmarkModule(runner.model, fused), Batches(runner.workload, stopwatch.last))
        return getattr(precision, "scaler", None)

    return train


def stock_plugin(precision: str, device: str) -> Precision | None:
    """Lightning's own, None for fp32 and TF32."""
    if precision not in AUTOCAST_DTYPES:
        return None
    # Made by hand because Trainer(precision="16-mixed") turns into bf16 on a CPU; on CUDA it makes this very plugin.
    scaler = torch.amp.GradScaler(device, init_scale=INITIAL_SCALE) if precision == "16-mixed" else None
    return MixedPrecision(precision, device, scaler)  # type: ignore[arg-type]


def our_plugin(precision: str, device: str) -> Precision:
    """The same of this package."""
    return AutocastPrecision(precision)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Row:
    """One recipe. A plugin that switches TF32 on by itself runs where it is off."""

    recipe: str
    precision: str
    train: Train
    fused: bool = True
    clip: float | None = CLIP
    switches_tf32_on: bool = False


def make_group(workload: Workload, precision: str, compiled: bool, model: str = "") -> Group:
    """All recipes of one precision, or the other plugins beside autocast; `model` is named if not the report's."""
    flops = training_flops_per_token(workload.config)[1]
    rows = _other_plugins() if precision == OTHER_PLUGINS else _one_precision(precision, flops)
    if model and precision != OTHER_PLUGINS:
        rows = rows[:3]  # ours, stock and plain: the larger a model, the longer its cells take
    cells = [
        Cell(
            row.recipe,
            row.precision,
            compiled,
            "fused AdamW" if row.fused else "foreach AdamW",
            row.clip,
            partial(TrainingRunner, workload, "fp32" if row.switches_tf32_on else row.precision, compiled, row.train),
        )
        for row in rows
    ]
    return Group(precision, compiled, cells, torch.compiler.reset if compiled else lambda: None, model, flops)


def training_flops_per_token(config: GPTConfig) -> tuple[int, int]:
    """Parameters that take part in matmuls (blocks and head, which the token table shares), and PaLM's operations."""
    parameters = 12 * config.layers * config.width**2 + config.vocab * config.width
    context = {"layers": config.layers, "width": config.width, "context_tokens": config.block_tokens}
    return parameters, flops_per_token(parameters, **context, convention="palm")


def _one_precision(precision: str, flops: int) -> list[Row]:
    stock_clips_fused = precision not in AUTOCAST_DTYPES  # Lightning 2.6 refuses both together under autocast
    stock = Row(
        "stock", precision, train_lightning(stock_plugin, fused=stock_clips_fused, clip=CLIP), stock_clips_fused
    )
    plain = Row("plain", precision, train_plain(fused=True, clip=CLIP))
    if precision == "tf32":
        ours = train_lightning(lambda precision, device: TF32Precision(), fused=True, clip=CLIP)
        return [Row("ours, TF32Precision", precision, ours, switches_tf32_on=True), stock, plain]
    if precision not in AUTOCAST_DTYPES:
        return [stock, plain]
    monitored = train_lightning(our_plugin, fused=True, clip=CLIP, callbacks=lambda: [OverflowMonitor()])
    # FLOPs as a number, because those of compiled code cannot be counted.
    every = partial(all_callbacks, flops_per_token=flops)
    everything = train_lightning(our_plugin, fused=True, clip=CLIP, callbacks=lambda: list(every().values()))
    unclipped = train_lightning(stock_plugin, fused=True, clip=None)
    return [
        Row("ours", precision, train_lightning(our_plugin, fused=True, clip=CLIP)),
        stock,
        plain,
        Row("ours, OverflowMonitor", precision, monitored),
        Row("ours, all callbacks", precision, everything),
        Row("stock, no clipping", precision, unclipped, clip=None),
    ]


def _other_plugins() -> list[Row]:
    """All beside the same autocast in bf16; what Lightning calls bf16-true keeps no fp32 weights."""

    def trained(plugin: Callable[[str, str], Precision | None]) -> Train:
        return train_lightning(plugin, fused=True, clip=CLIP)

    def masters(precision: Literal["bf16-true", "16-true"], storage: Literal["fp32", "remainder"]) -> Train:
        return trained(lambda *_: MasterWeightsPrecision(precision, storage=storage))

    return [
        Row("ours", "bf16-mixed", trained(our_plugin)),
        Row("plain", "bf16-mixed", train_plain(fused=True, clip=CLIP)),
        Row("ours, MasterWeightsPrecision fp32", "bf16-true", masters("bf16-true", "fp32")),
        Row("ours, MasterWeightsPrecision remainder", "bf16-true", masters("bf16-true", "remainder")),
        Row("ours, MasterWeightsPrecision fp16", "16-true", masters("16-true", "fp32")),
        Row("stock", "bf16-true", trained(lambda *_: HalfPrecision("bf16-true"))),
        Row("ours, Float8Precision rowwise", "fp8-mixed", trained(lambda *_: Float8Precision("rowwise"))),
        Row("ours, Float8Precision tensorwise", "fp8-mixed", trained(lambda *_: Float8Precision("tensorwise"))),
    ]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _reset_peak_memory(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


@contextmanager
def _matmul_precision(setting: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(setting)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


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
