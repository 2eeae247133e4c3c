"""What master weights cost: bytes, casts, passes over gradients, waits, compiled graphs."""

import gc
import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import HalfPrecision
from small_models import Regression, Trained, adamw, fit, fused_adamw, loader, quiet_trainer, regression_batches
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_mp import AutocastPrecision, LossScaler, MasterWeightsPrecision, OverflowMonitor

SIDE = 128


def one_matrix() -> Trained:
    return Trained(
        lambda module, batch: module.layer(batch).float().square().mean(),
        partial(torch.optim.AdamW, lr=1e-3),
        layer=lambda: nn.Linear(SIDE, SIDE, bias=False),
    )


@pytest.fixture
def _only_new_objects() -> None:
    """Hides what lives already from the garbage collector, which makes it fast, too."""
    gc.collect()
    gc.freeze()


def live_bytes() -> int:
    """Bytes of all new tensors that have at least as many elements as the matrix; each memory counted once."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (Tensor, nn.Parameter) and thing.numel() >= SIDE * SIDE:
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
            # A gradient has no Python object until somebody asks for it.
            if thing.is_leaf and thing.grad is not None:
                storages[thing.grad.untyped_storage().data_ptr()] = thing.grad.untyped_storage().nbytes()
    return sum(storages.values())


class Measure(Callback):
    """Bytes per parameter between two steps, and inside of one."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.optimizers[0].register_step_pre_hook(lambda *_: setattr(self, "in_step", live_bytes()))

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.between = live_bytes()


ROWS: dict[str, Any] = {
    '``storage="fp32"``': lambda: MasterWeightsPrecision("bf16-true"),
    '``storage="fp32", fp32_gradients=True``': lambda: MasterWeightsPrecision("bf16-true", fp32_gradients=True),
    "``AutocastPrecision``": lambda: AutocastPrecision("bf16-mixed"),
    'Lightning\'s "bf16-true"': lambda: HalfPrecision("bf16-true"),
}


def documented() -> dict[str, list[int]]:
    """The table in the plugin's docstring."""
    lines = (MasterWeightsPrecision.__doc__ or "").splitlines()
    rows = [re.fullmatch(r"\s*(\S.*?)((?:\s+\d+){5})", line) for line in lines]
    return {row[1].strip(): [int(n) for n in row[2].split()] for row in rows if row is not None}


def test_the_table_of_bytes_adds_up() -> None:
    assert list(documented()) == list(ROWS)
    assert all(sum(parts) == total for *parts, total in documented().values())


@pytest.mark.usefixtures("_only_new_objects")
@pytest.mark.parametrize("row", ROWS)
def test_bytes_per_parameter_are_those_of_the_table(row: str) -> None:
    measure = Measure()
    fit(one_matrix(), [torch.ones(2, SIDE)] * 3, measure, plugin=ROWS[row]())
    assert measure.between / SIDE**2 == documented()[row][-1]
    during = {'``storage="fp32"``': 4}
    if row in during:
        assert measure.in_step / SIDE**2 == documented()[row][-1] + during[row]


class CountGradientBytes(TorchDispatchMode):
    """Bytes read and written by the kernels over gradients, from the end of backward to the optimizer's own kernel."""

    KERNELS = ("aten::_foreach_norm", "aten::_foreach_copy_", "aten::_foreach_mul_")

    def __init__(self) -> None:
        super().__init__()
        self.active = False
        self.bytes, self.waits = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if self.active:
            self.waits += name == "aten::_local_scalar_dense"
            if name in self.KERNELS:
                factor = 2 if name == "aten::_foreach_mul_" else 1
                self.bytes += factor * sum(t.nbytes for t in tree_leaves(args) if isinstance(t, Tensor) and t.dim())
        return func(*args, **(kwargs or {}))


class GradientBytes(Callback):
    """Bytes per parameter and waits of each step."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.mode, self.rows = CountGradientBytes(), []
        trainer.optimizers[0].register_step_pre_hook(lambda *_: self.close(pl_module))
        self.mode.__enter__()

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.mode.active, self.mode.bytes, self.mode.waits = True, 0, 0

    def close(self, module: nn.Module) -> None:
        self.mode.active = False
        self.rows.append((self.mode.bytes / sum(p.numel() for p in module.parameters()), self.mode.waits))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.mode.__exit__(None, None, None)


@pytest.mark.parametrize(
    ("optimizer", "clip", "bytes_each", "waits"),
    # The norm reads 2 bytes; fp32 gradients read 2 and write 4; a factor that no kernel takes reads 4 and writes 4.
    [(fused_adamw, None, 8, 0), (fused_adamw, 1.0, 8, 0), (adamw, None, 16, 1), (adamw, 1.0, 16, 1)],
    ids=["fused", "fused-clipped", "unfused", "unfused-clipped"],
)
@pytest.mark.parametrize("monitors", [False, True], ids=["bare", "monitored"])
def test_traffic_over_gradients_and_host_waits(
    optimizer: Any, clip: float | None, bytes_each: int, waits: int, monitors: bool
) -> None:
    """Promise 5. Autocast's fp32 gradients take 4 bytes per pass: 1 pass when fused, 3 otherwise."""
    counter = GradientBytes()
    quiet_trainer(
        plugins=[MasterWeightsPrecision("16-true", scaler=LossScaler(init_scale=2.0**10))],
        callbacks=[counter, *([OverflowMonitor()] if monitors else [])],
        gradient_clip_val=clip,
    ).fit(Regression(optimizer), loader(regression_batches(4)))
    assert counter.rows[1:] == [(bytes_each, waits)] * 3


def test_bf16_without_a_factor_makes_fp32_gradients_and_nothing_more() -> None:
    counter = GradientBytes()
    fit(Regression(adamw), regression_batches(3), counter, plugin=MasterWeightsPrecision("bf16-true"))
    assert counter.rows[1:] == [(8, 1)] * 2


def test_a_compiled_model_is_compiled_once() -> None:
    torch._dynamo.reset()
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    class Compiled(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.compile(self.net, backend=backend, fullgraph=True)

    ends = []
    for module in (Compiled(), Regression()):
        fit(module, regression_batches(4), plugin=MasterWeightsPrecision("bf16-true"))
        ends.append([p.detach() for p in module.parameters()])
    assert len(graphs) == 1
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


class Breaks(nn.Linear):
    """Ends a graph, so that code of torch.compile returns to Python in the middle of a forward."""

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


class Forward(Regression):
    """Its step calls its forward or, with ``by_layer``, each layer of it."""

    by_layer = False

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(2, Breaks(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        if not self.by_layer:
            return nn.functional.mse_loss(self(x), y)
        for layer in self.net:
            x = layer(x)
        return nn.functional.mse_loss(x, y)


COMPILED: dict[str, Callable[[Forward], Any]] = {
    "module": lambda module: module.compile(backend="aot_eager"),
    "net": lambda module: module.net.compile(backend="aot_eager"),
    "all": lambda module: [part.compile(backend="aot_eager") for part in (module, module.net, *module.net)],
    "steps": lambda module: torch.compile(module, backend="aot_eager"),
}


@pytest.mark.parametrize(
    ("what", "by_layer", "storage"),
    [
        *((what, False, "fp32") for what in COMPILED),
        *((what, True, "fp32") for what in COMPILED),
        ("module", False, "remainder"),
    ],
)
@pytest.mark.full
def test_compiled_modules_are_lent_16_bit_copies(what: str, by_layer: bool, storage: Any) -> None:
    """Whatever of it is called from outside of compiled code."""

    class Gradients(Forward):
        def on_after_backward(self) -> None:
            assert {p.grad.dtype for p in self.parameters() if p.grad is not None} == {torch.bfloat16}

    ends = []
    for is_compiled in (True, False):
        torch._dynamo.reset()
        module = Gradients()
        module.by_layer = by_layer
        made = COMPILED[what](module) if is_compiled else None
        plugin = MasterWeightsPrecision("bf16-true", storage=storage)
        target = made if isinstance(made, nn.Module) else module
        fit(target, regression_batches(6), plugin=plugin, accumulate_grad_batches=2)
        ends.append([p.detach() for p in module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


@pytest.mark.parametrize("when", ["__init__", "on_train_start"])
@pytest.mark.parametrize("has_hook", [False, True], ids=["plain", "hook"])
@pytest.mark.full
def test_what_compiled_functions_call_is_cast_by_autocast(has_hook: bool, when: str) -> None:
    """Functions, and modules that are compiled after set-up."""
    ends = []
    for is_compiled in (True, False):
        torch._dynamo.reset()
        module = Forward()
        if has_hook:
            module.net[2].register_forward_hook(lambda *_: None)
        if is_compiled and when == "__init__":
            module.forward = torch.compile(module.forward, backend="aot_eager")  # type: ignore[method-assign]
        elif is_compiled:
            module.on_train_start = partial(module.net.compile, backend="aot_eager")  # type: ignore[method-assign]
        plugin = MasterWeightsPrecision("bf16-true") if is_compiled else AutocastPrecision("bf16-mixed")
        is_late = is_compiled and when == "on_train_start"
        with pytest.warns(UserWarning, match="'net' was compiled after set-up") if is_late else nullcontext():
            fit(module, regression_batches(6), plugin=plugin)
        ends.append([p.detach() for p in module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
