"""Other libraries beside ours: Accelerate, Fabric, torchao by hand, and optimizers that keep masters themselves.

Each loop is that of the library's own documentation, with a fused AdamW and clipping by norm where it has them. A
library that is not installed is a row that says so, and takes no time.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from bench_cells import (
    CLIP,
    LEARNING_RATE,
    Stopwatch,
    Train,
    TrainingRunner,
    Workload,
    new_cell,
    quiet_lightning,
    train_plain,
)
from bench_schedule import Cell
from torch import Tensor, nn

ACCELERATE = {"bf16-mixed": "bf16", "16-mixed": "fp16"}
"""Accelerate's names of precisions."""


def train_accelerate(runner: TrainingRunner, stopwatch: Stopwatch) -> None:
    """Source: https://huggingface.co/docs/accelerate/basic_tutorials/migration, 1.15."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)  # keeps the precision of the first Accelerator of a process
    workload = runner.workload
    accelerator = Accelerator(
        mixed_precision=ACCELERATE[runner.precision],
        gradient_accumulation_steps=workload.accumulation,
        cpu=workload.device.type == "cpu",
    )
    model = runner.model.train()
    forward = model.forward
    try:
        optimizer = torch.optim.AdamW(model.to(accelerator.device).parameters(), lr=LEARNING_RATE, fused=True)
        prepared, optimizer = accelerator.prepare(model, optimizer)
        for done, (ids, labels) in enumerate(workload.batches(stopwatch.last * workload.accumulation), start=1):
            with accelerator.accumulate(prepared):
                accelerator.backward(prepared(ids, labels))
                if accelerator.sync_gradients:
                    stopwatch.after_backward()
                    accelerator.clip_grad_norm_(prepared.parameters(), CLIP)
                optimizer.step()
                if accelerator.sync_gradients:
                    stopwatch.after_step(done // workload.accumulation)
                optimizer.zero_grad()
    finally:
        model.forward = forward  # prepare() leaves its autocast on the module, and does not prepare it twice
        model._is_accelerate_prepared = False  # type: ignore[assignment]


def train_fabric(runner: TrainingRunner, stopwatch: Stopwatch) -> None:
    """Source: https://lightning.ai/docs/fabric/stable/fundamentals/convert.html, 2.6."""
    from lightning.fabric import Fabric

    workload = runner.workload
    with quiet_lightning():
        on = "cuda" if workload.device.type == "cuda" else "cpu"
        fabric = Fabric(accelerator=on, devices=1, precision=runner.precision)  # type: ignore[arg-type]
        raw = torch.optim.AdamW(runner.model.train().to(workload.device).parameters(), lr=LEARNING_RATE, fused=True)
        model, optimizer = fabric.setup(runner.model, raw)
        for done, (ids, labels) in enumerate(workload.batches(stopwatch.last * workload.accumulation), start=1):
            closes = done % workload.accumulation == 0
            with fabric.no_backward_sync(model, enabled=not closes):
                fabric.backward(model(ids, labels) / workload.accumulation)
            if closes:
                stopwatch.after_backward()
                fabric.clip_gradients(model, optimizer, max_norm=CLIP)
                optimizer.step()
                stopwatch.after_step(done // workload.accumulation)
                optimizer.zero_grad()


def train_torchao(recipe: str, runner: TrainingRunner, stopwatch: Stopwatch) -> None:
    """fp8 linear layers in the blocks, and the plain loop in bf16 around them.

    Source: https://docs.pytorch.org/ao/stable/workflows/training.html, 0.18.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    if not any(type(part).__name__ == "Float8Linear" for part in runner.model.modules()):
        config = Float8LinearConfig.from_recipe_name(recipe)
        convert_to_float8_training(runner.model, config=config, module_filter_fn=lambda part, name: "blocks" in name)
    train_plain(fused=True, clip=CLIP, precision="bf16-mixed")(runner, stopwatch)


def train_with_masters_in_the_optimizer(
    make_optimizer: Callable[[list[nn.Parameter]], Any], runner: TrainingRunner, stopwatch: Stopwatch
) -> None:
    """bf16 weights, whose optimizer keeps what they round away."""
    model = runner.model.to(runner.workload.device, torch.bfloat16).train()
    parameters = list(model.parameters())
    optimizer = make_optimizer(parameters)
    for done, (ids, labels) in enumerate(runner.workload.batches(stopwatch.last), start=1):
        loss: Tensor = model(ids, labels)
        loss.backward()
        stopwatch.after_backward()
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        stopwatch.after_step(done)
        optimizer.zero_grad()


def _transformer_engine(parameters: list[nn.Parameter], *, remainders: bool) -> Any:
    """Source: transformer_engine.pytorch.optimizers.FusedAdam, 2.x."""
    adam: Any = import_module("transformer_engine.pytorch.optimizers").FusedAdam
    return adam(parameters, lr=LEARNING_RATE, weight_decay=0.01, master_weights=True, store_param_remainders=remainders)


def _flashoptim(parameters: list[nn.Parameter]) -> Any:
    """24 bits of masters and 8-bit moments. Source: https://pypi.org/project/flashoptim, 0.1.3."""
    return import_module("flashoptim").FlashAdamW(parameters, lr=LEARNING_RATE, master_weight_bits=24)


def _peer(workload: Workload, package: str, recipe: str, precision: str, train: Train, **more: Any) -> Cell:
    missing = None if find_spec(package) is not None else f"{package} is not installed"
    return new_cell(workload, recipe, precision, train, error=missing, **more)


def mixed_peers(workload: Workload, precision: str) -> list[Cell]:
    """Accelerate and Fabric under autocast."""
    return [
        _peer(workload, "accelerate", "Accelerate", precision, train_accelerate),
        _peer(workload, "lightning", "Fabric", precision, train_fabric),
    ]


def masters_peers(workload: Workload) -> list[Cell]:
    """Optimizers with masters of their own: fp32, the 16 bits that bf16 lacks, and 8 of these."""
    engine, remainders = "TransformerEngine", partial(_transformer_engine, remainders=True)
    rows: tuple[tuple[str, str, Callable[[list[nn.Parameter]], Any], str], ...] = (
        ("transformer_engine", engine, partial(_transformer_engine, remainders=False), "fp32 masters"),
        ("transformer_engine", f"{engine}, remainders", remainders, "remainder masters"),
        ("flashoptim", "FlashOptim, 24 bits", _flashoptim, "24bit masters"),
    )
    return [
        _peer(workload, package, recipe, "bf16-true", partial(train_with_masters_in_the_optimizer, make), floor=floor)
        for package, recipe, make, floor in rows
    ]


def float8_peers(workload: Workload) -> list[Cell]:
    """torchao by hand, compared with bf16 autocast."""
    peer = partial(_peer, workload, "torchao", precision="fp8-mixed", beside="bf16-mixed")
    return [
        peer(recipe=f"torchao, {recipe}", train=partial(train_torchao, recipe)) for recipe in ("tensorwise", "rowwise")
    ]
