"""What master weights cost: bytes, casts, passes over gradients, waits, compiled graphs."""

import gc
import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import HalfPrecision
from precision_figures import figures_of
from small_models import Regression, fit, regression_batches
from torch import Tensor, nn

from lightning_mp import AutocastPrecision, LossScaler, MasterWeightsPrecision, OverflowMonitor


@pytest.fixture
def _only_new_objects() -> None:
    """Hides what lives already from the garbage collector, which makes it fast, too."""
    gc.collect()
    gc.freeze()


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
    figures = figures_of(ROWS[row](), fused=True, clip=None)
    total = documented()[row][-1]
    assert figures.weight + figures.gradient + figures.moments + figures.other == total
    if row == '``storage="fp32"``':
        assert figures.in_step == total + 4


@pytest.mark.parametrize(
    ("fused", "clip", "bytes_each", "waits"),
    # The norm reads 2 bytes; fp32 gradients read 2 and write 4; a factor that no kernel takes reads 4 and writes 4.
    [(True, None, 8, 0), (True, 1.0, 8, 0), (False, None, 16, 1), (False, 1.0, 16, 1)],
)
@pytest.mark.parametrize("monitors", [False, True], ids=["bare", "monitored"])
def test_traffic_over_gradients_and_host_waits(
    fused: bool, clip: float | None, bytes_each: int, waits: int, monitors: bool
) -> None:
    """Promise 5. Autocast's fp32 gradients take 4 bytes per pass: 1 pass when fused, 3 otherwise."""
    plugin = MasterWeightsPrecision("16-true", scaler=LossScaler(init_scale=2.0**10))
    figures = figures_of(plugin, fused=fused, clip=clip, callbacks=[OverflowMonitor()] if monitors else [])
    assert (figures.traffic, figures.waits) == (bytes_each, waits)


def test_bf16_without_a_factor_makes_fp32_gradients_and_nothing_more() -> None:
    figures = figures_of(MasterWeightsPrecision("bf16-true"), fused=False, clip=None)
    assert (figures.traffic, figures.waits) == (8, 1)


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
