"""What one process does in a training step, counted: passes over gradients, casts, host waits, Python calls, bytes."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as pl
import torch
from all_callbacks import all_callbacks
from bench_cells import BenchmarkModule, LossModel
from call_counter import Layers, calls, plain_loop_calls
from gradient_counter import CountGradientTraffic, GradientBytes, Row
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from memory_models import MODELS, measure
from small_models import loader, quiet_trainer
from torch import Tensor, nn

from lightning_mp import AutocastPrecision, Float8Precision, LossScaler, MasterWeightsPrecision
from lightning_mp.language_model import GPTConfig

CONFIG = GPTConfig(layers=2, heads=2, width=32, block_tokens=16, vocab=64)
INITIAL_SCALE = 1024.0
"""No step of these is skipped."""
WINDOWS, COUNTED_WINDOW = 6, 3
"""In the first ones optimizer states are made and monitors look; after the last one the run ends."""
GROWTH = (1, 4, 16)
WAYS = ("plain", "stock", "ours", "ours, all callbacks")


@dataclass(frozen=True)
class Setup:
    """One row of the table of steps."""

    precision: str
    fused: bool
    clip: float | None
    window: int = 1

    def __str__(self) -> str:
        optimizer = "fused" if self.fused else "foreach"
        parts = [self.precision, f"{optimizer} AdamW", "no clipping" if self.clip is None else "clipped by norm"]
        return ", ".join([*parts, *([f"{self.window} micro-batches"] if self.window > 1 else [])])


SETUPS = (
    Setup("bf16-mixed", fused=True, clip=None),
    Setup("bf16-mixed", fused=True, clip=1.0),
    Setup("bf16-mixed", fused=False, clip=1.0),
    Setup("16-mixed", fused=True, clip=None),
    Setup("16-mixed", fused=True, clip=1.0),
    Setup("16-mixed", fused=False, clip=None),
    Setup("16-mixed", fused=False, clip=1.0),
    Setup("16-mixed", fused=True, clip=1.0, window=4),
)


@dataclass(frozen=True)
class StepCounts:
    """One optimizer step with its micro-batches; the optimizer's own kernels are left out."""

    passes: float
    """Bytes of gradients read or written, per byte of gradients."""
    kernels: int
    casts: int
    host_waits: int
    gradient_bytes: int
    """Read and written."""


class ClippingSeen(BenchmarkModule):
    """Lightning's plugins for bf16 run everything inside of `optimizer.step`: clipping is counted all the same."""

    counter: CountGradientTraffic

    def configure_gradient_clipping(self, optimizer: Any, *limits: Any, **named_limits: Any) -> None:
        before, self.counter.mode.in_optimizer = self.counter.mode.in_optimizer, False
        super().configure_gradient_clipping(optimizer, *limits, **named_limits)
        self.counter.mode.in_optimizer = before


@cache
def count_step(setup: Setup, way: str) -> StepCounts | None:
    """None where Lightning refuses the combination."""
    torch.manual_seed(0)
    module = (ClippingSeen if way == "stock" else BenchmarkModule)(LossModel(CONFIG), setup.fused)
    if way == "plain":
        rows = _plain_rows(module, setup)
    else:
        counter = CountGradientTraffic(module)
        if isinstance(module, ClippingSeen):
            module.counter = counter
        try:
            _trainer(setup, way, counter).fit(module, loader(_batches(WINDOWS * setup.window)))
        except RuntimeError as error:
            counter.mode.__exit__(None, None, None)  # which the end of a fit would have done
            if "does not allow for gradient clipping" not in str(error):
                raise
            return None
        rows = counter.rows
    first = COUNTED_WINDOW * setup.window
    counted = rows[first : first + setup.window]
    passes = sum(row.passes for row in counted)
    return StepCounts(
        passes=passes,
        kernels=sum(sum(row.kernels.values()) for row in counted),
        casts=sum(row.weight_casts for row in counted),
        host_waits=sum(row.host_waits for row in counted),
        gradient_bytes=round(passes * sum(p.nbytes for p in module.parameters())),
    )


def _batches(count: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(CONFIG.vocab, (count, 2, CONFIG.block_tokens + 1), generator=generator)
    return [[rows[:, :-1], rows[:, 1:]] for rows in ids]


def _trainer(setup: Setup, way: str, counter: CountGradientTraffic) -> pl.Trainer:
    arguments: dict[str, Any] = {"callbacks": [counter], "accumulate_grad_batches": setup.window}
    if way == "ours, all callbacks":
        arguments = {"callbacks": [counter, *all_callbacks(setup.window).values()]}
    plugin = stock_plugin(setup.precision) if way == "stock" else our_plugin(setup.precision)
    return quiet_trainer(plugins=[plugin], gradient_clip_val=setup.clip, **arguments)


def stock_plugin(precision: str) -> Precision:
    """Lightning's own."""
    scaler = torch.amp.GradScaler("cpu", init_scale=INITIAL_SCALE) if precision == "16-mixed" else None
    return MixedPrecision(precision, "cpu", scaler)  # type: ignore[arg-type]


def our_plugin(precision: str) -> Precision:
    """The same of this package."""
    scaler = LossScaler(init_scale=INITIAL_SCALE) if precision == "16-mixed" else None
    return AutocastPrecision(precision, scaler=scaler)  # type: ignore[arg-type]


def _plain_rows(module: BenchmarkModule, setup: Setup) -> list[Row]:
    """The loop of torch's documentation, micro-batch by micro-batch."""
    fp16 = setup.precision == "16-mixed"
    parameters = list(module.parameters())
    optimizer = module.configure_optimizers()
    scaler = torch.amp.GradScaler("cpu", init_scale=INITIAL_SCALE, enabled=fp16)
    rows = []
    with GradientBytes(parameters) as mode:
        optimizer.register_step_pre_hook(lambda *_: setattr(mode, "in_optimizer", True))
        optimizer.register_step_post_hook(lambda *_: setattr(mode, "in_optimizer", False))
        for index, batch in enumerate(_batches(WINDOWS * setup.window)):
            mode.between = False
            with torch.autocast("cpu", dtype=torch.float16 if fp16 else torch.bfloat16):
                loss = module.training_step(batch, index) / setup.window
            scaler.scale(loss).backward()
            mode.between = True
            if (index + 1) % setup.window == 0:
                if setup.clip is not None:
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(parameters, setup.clip)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            passes = mode.bytes / sum(p.nbytes for p in parameters)
            rows.append(Row(passes, mode.waits, mode.casts, dict(mode.kernels)))
            mode.reset()
    return rows


def host_calls(folder: Path, micro_batches: int) -> dict[str, float]:
    """Python calls per micro-batch without logging, by way and callback; last, with a logging step in each of them."""
    stock, ours = stock_plugin("bf16-mixed"), our_plugin("bf16-mixed")
    found = {
        "plain": plain_loop_calls(micro_batches),
        "stock": calls(folder, micro_batches, stock),
        "ours": calls(folder, micro_batches, ours),
    }
    for name, callback in all_callbacks().items():
        # Its schedule ends with the budget.
        callbacks = [all_callbacks()["ChinchillaBudget"], callback] if name == "TokenLearningRate" else [callback]
        also = " beside ChinchillaBudget" if len(callbacks) > 1 else ""
        found[f"ours, {name}{also}"] = calls(folder, micro_batches, ours, callbacks)
    found["ours, all callbacks"] = calls(folder, micro_batches, ours, all_callbacks().values())
    logging_steps: dict[str, Callable[[], tuple[Precision, Iterable[pl.Callback]]]] = {
        "stock, each step logged": lambda: (stock, ()),
        "ours, all callbacks, each step logged": lambda: (ours, all_callbacks().values()),
    }
    for name, make in logging_steps.items():
        plugin, logging_callbacks = make()
        found[name] = calls(folder, micro_batches, plugin, logging_callbacks, log_every_n_steps=1)
    return found


@dataclass(frozen=True)
class GrownCalls:
    """Python calls per micro-batch of a model with so many parameters."""

    parameters: int
    parameter_tensors: int
    calls: dict[str, float]


@cache
def growth_of_host_calls(micro_batches: int, growth: tuple[int, ...] = GROWTH) -> list[GrownCalls]:
    """Of models that grow in depth, which adds tensors: width alone changes no count."""
    with TemporaryDirectory() as folder:
        return [_calls_of_layers(Path(folder), micro_batches, layers) for layers in growth]


def _calls_of_layers(folder: Path, micro_batches: int, layers: int) -> GrownCalls:
    plugin = our_plugin("bf16-mixed")
    found = {
        "plain": plain_loop_calls(micro_batches, layers=layers),
        "stock": calls(folder, micro_batches, stock_plugin("bf16-mixed"), layers=layers),
        "ours": calls(folder, micro_batches, plugin, layers=layers),
        "ours, all callbacks": calls(folder, micro_batches, plugin, all_callbacks().values(), layers=layers),
    }
    sizes = [p.numel() for p in Layers(layers).parameters()]
    return GrownCalls(sum(sizes), len(sizes), found)


PLUGINS: dict[str, Callable[[], Precision | None]] = {
    "stock, 32-true": lambda: None,
    "stock, bf16-mixed": lambda: stock_plugin("bf16-mixed"),
    "ours, bf16-mixed": lambda: our_plugin("bf16-mixed"),
    "ours, fp8-mixed": lambda: Float8Precision(emulate=True, skip_small=False),
    "ours, bf16-true, fp32 masters": lambda: MasterWeightsPrecision("bf16-true"),
    "ours, bf16-true, remainder": lambda: MasterWeightsPrecision("bf16-true", storage="remainder"),
    "ours, 16-true, fp32 masters": lambda: MasterWeightsPrecision(
        "16-true", scaler=LossScaler(init_scale=INITIAL_SCALE)
    ),
    "stock, bf16-true (no masters)": lambda: HalfPrecision("bf16-true"),
}
KEPT = ("weights", "gradients", "masters", "optimizer states")


@cache
def bytes_per_parameter(name: str) -> dict[str, float]:
    """Of a decoder with AdamW, between the first two steps of a run, by part: walked, not estimated."""
    measured = measure("decoder", "AdamW", PLUGINS[name]())
    parts = measured.parts | {"gradients": measured.gradient_bytes}
    parameters = sum(p.numel() for p in MODELS["decoder"][0]().parameters())
    return {part: parts[part] / parameters for part in KEPT}
