"""The tables of docs/precision.md against what is measured: bytes, traffic, casts and waits of every plugin."""

import gc
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from small_models import loader, quiet_trainer
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lightning_mp
from lightning_mp.precision import tf32

PAGE = Path(__file__).resolve().parents[2] / "docs" / "precision.md"
WIDTH, MICRO_BATCHES, STEPS = 64, 4, 4
VIEWS = {"empty_like", "detach", "view", "alias", "t", "_unsafe_view", "slice", "unbind", "select"}
COPIES = {"copy_", "_foreach_copy_", "_to_copy"}


class Layers(pl.LightningModule):
    """Three square matrices; Float8Precision leaves the first and the last one in bf16."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))
        self.fused = fused

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).float().square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, **{"fused" if self.fused else "foreach": True})


@dataclass
class Figures:
    """Bytes per parameter between two steps; gradient bytes moved per parameter, casts of the weight that gets most of
    them, and waits in one step. The weight of a parameter without memory is what its 16-bit copy lacks."""

    weight: float
    gradient: float
    moments: float
    other: float
    traffic: float
    casts: int
    waits: int


class _Counter(TorchDispatchMode):
    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self.parameters = parameters
        self.in_optimizer = self.after_backward = False
        self.reset()

    def reset(self) -> None:
        self.traffic = self.waits = 0
        self.casts: Counter[int] = Counter()
        self.copies: dict[int, torch.UntypedStorage] = {}  # kept, so that nothing else gets their memory
        self.kernels: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        self.waits += name == "_local_scalar_dense" and not self.in_optimizer
        read = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor)] if name == "_to_copy" else []
        written = tree_leaves(args[0]) if func._schema.is_mutable else made
        if name in ("copy_", "_foreach_copy_"):
            read = tree_leaves(args[1])
        if name in COPIES:
            self._count_casts(read, written)
        if self.after_backward and not self.in_optimizer and name not in VIEWS:
            self._count(name, read, written)
        return result

    def _count_casts(self, read: list[Tensor], written: list[Tensor]) -> None:
        """From and to weights, wherever their numbers are now."""
        for pair in zip(read, written, strict=True):
            if len({tensor.dtype for tensor in pair}) == 2:
                ends = set(map(storage_of, pair)) - {0}
                self.casts.update(id(p) for p in self.parameters if storage_of(p) in ends)

    def _count(self, name: str, read: list[Tensor], written: list[Tensor]) -> None:
        gradients = {storage_of(p.grad) for p in self.parameters if p.grad is not None} | self.copies.keys()
        from_gradients = any(storage_of(t) in gradients for t in read)
        if from_gradients and name in COPIES:
            weights = {storage_of(p) for p in self.parameters}
            self.copies |= {storage_of(t): t.untyped_storage() for t in written if storage_of(t) not in weights}
            gradients |= self.copies.keys()
        for tensor in [*read, *(t for t in written if isinstance(t, Tensor))]:
            if storage_of(tensor) in gradients:
                self.traffic += tensor.nbytes
                self.kernels[name] += 1


def storage_of(tensor: Tensor) -> int:
    """Which memory a tensor has; 0 for tensors that are made of others (torchao's), whose parts pass by as well, and
    for parameters that have given theirs away, which asking would return."""
    return tensor.untyped_storage()._cdata if type(tensor) in (Tensor, nn.Parameter) else 0


def live_bytes() -> Counter[bool]:
    """Bytes of all new tensors that are as large as a matrix, each memory counted once: of numbers, and of integers."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (Tensor, nn.Parameter) and thing.numel() >= WIDTH * WIDTH:
            for tensor in (thing, thing.grad if thing.is_leaf else None):
                if tensor is not None:
                    size = tensor.untyped_storage().nbytes()
                    storages[storage_of(tensor)] = tensor.is_floating_point(), size
    live: Counter[bool] = Counter()
    for is_number, size in storages.values():
        live[is_number] += size
    return live


class Measure(Callback):
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.mode = _Counter(list(pl_module.parameters()))
        optimizer = trainer.optimizers[0]
        optimizer.register_step_pre_hook(lambda *_: setattr(self.mode, "in_optimizer", True))
        optimizer.register_step_post_hook(lambda *_: setattr(self.mode, "in_optimizer", False))
        # Stock plugins without a scaler clip inside of the optimizer's step.
        clip, plugin = trainer.precision_plugin.clip_gradients, trainer.precision_plugin

        def clip_gradients(*args: Any, **kwargs: Any) -> None:
            before, self.mode.in_optimizer = self.mode.in_optimizer, False
            clip(*args, **kwargs)
            self.mode.in_optimizer = before

        plugin.clip_gradients = clip_gradients
        self.mode.__enter__()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % MICRO_BATCHES == 0:
            self.mode.reset()
            self.mode.after_backward = False

    def on_after_backward(self, trainer: pl.Trainer, module: Any) -> None:
        self.mode.after_backward = trainer.fit_loop.epoch_loop.batch_idx % MICRO_BATCHES == MICRO_BATCHES - 1

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx != STEPS * MICRO_BATCHES - 1:
            return
        self.mode.__exit__(None, None, None)
        parameters = list(module.parameters())
        number = sum(p.numel() for p in parameters)
        live = live_bytes()
        weight = live[False] + sum(p.nbytes for p in parameters if storage_of(p))
        gradient = sum(p.grad.nbytes for p in parameters)
        state = [
            t for s in trainer.optimizers[0].state.values() for t in s.values() if isinstance(t, Tensor) and t.dim()
        ]
        moments = sum(t.nbytes for t in state)
        self.figures = Figures(
            weight / number,
            gradient / number,
            moments / number,
            (live.total() - weight - gradient - moments) / number,
            self.mode.traffic / number,
            max(self.mode.casts[id(p)] for p in parameters),
            self.mode.waits,
        )

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        if hasattr(self, "mode") and not hasattr(self, "figures"):
            self.mode.__exit__(None, None, None)


def figures_of(
    plugin: Precision | None, *, fused: bool, clip: float | None = 1.0, callbacks: Sequence[Callback] = ()
) -> Figures:
    """Of the last of some steps, with gradients clipped by norm."""
    measure = Measure()
    trainer = quiet_trainer(
        plugins=[] if plugin is None else [plugin],
        callbacks=[measure, *callbacks],
        gradient_clip_val=clip,
        accumulate_grad_batches=MICRO_BATCHES,
    )
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(16, WIDTH, generator=generator) for _ in range(STEPS * MICRO_BATCHES)]
    trainer.fit(Layers(fused), loader(batches))
    return measure.figures


# -- the page ----------------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """What a row of the page says; None where it says "refused"."""

    sizes: list[int]
    total: int
    traffic: list[tuple[int, int] | None]
    casts: int
    waits: list[int | None]
    purpose: str


def rows_of(heading: str) -> dict[str, Row]:
    """A line may be about several plugins: what one is for; bytes and casts; passes and waits, fused and other."""
    section = PAGE.read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    purposes: dict[str, str] = {}
    kept: dict[str, tuple[str, str]] = {}
    moved: dict[str, list[str]] = {}
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        names = re.findall(r"`([^`]+)`", cells[0]) if line.startswith("| `") else []
        for name in names:
            match cells[1:]:
                case [purpose]:
                    assert purposes.setdefault(name, purpose) is purpose, f"{name} has two rows"
                case [sizes, casts] if "=" in sizes:
                    assert kept.setdefault(name, (sizes, casts)) == (sizes, casts), f"{name} has two rows"
                case [fused, other]:
                    assert moved.setdefault(name, [fused, other]) == [fused, other], f"{name} has two rows"
    assert purposes.keys() == kept.keys() == moved.keys()
    rows = {}
    for name, purpose in purposes.items():
        sizes, total = kept[name][0].split(" = ")
        passes = [re.fullmatch(r"(\d+) \((\d+) bytes\), (\d)", cell) for cell in moved[name]]
        assert all(match or cell == "refused" for match, cell in zip(passes, moved[name], strict=True)), name
        rows[name] = Row(
            [int(size) for size in sizes.split(" + ")],
            int(total),
            [None if match is None else (int(match[1]), int(match[2])) for match in passes],
            int(kept[name][1]),
            [None if match is None else int(match[3]) for match in passes],
            purpose,
        )
    return rows


TABLES = {heading: rows_of(heading) for heading in ("The plugins of this package", "Stock Lightning")}
ROWS = {name: row for table in TABLES.values() for name, row in table.items()}
NAMES = {name: getattr(lightning_mp, name) for name in lightning_mp.__all__ if name.endswith("Precision")}
SMALL = {"Float8Precision": partial(lightning_mp.Float8Precision, skip_small=False)}  # as the model here is
STOCK = {"MixedPrecision": MixedPrecision, "HalfPrecision": HalfPrecision, "GradScaler": torch.amp.GradScaler}


def plugin_of(name: str) -> Precision | None:
    plugin: Precision | None = eval(name, {**NAMES, **SMALL, **STOCK})
    return plugin


@pytest.fixture(autouse=True, scope="module")
def _only_new_objects() -> None:
    """Hides what lives already from the garbage collector, which makes it fast, too."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _tf32_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tf32, "why_no_tf32", lambda *_, **__: None)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "other"])
@pytest.mark.full
def test_a_row_says_what_is_measured(name: str, fused: bool) -> None:
    row, column = ROWS[name], 0 if fused else 1
    if row.traffic[column] is None:
        assert row.waits[column] is None
        with pytest.raises(RuntimeError, match="does not allow for gradient clipping because it performs unscaling"):
            figures_of(plugin_of(name), fused=fused)
        return
    figures = figures_of(plugin_of(name), fused=fused)
    assert row.sizes == [figures.weight, figures.gradient, figures.other, figures.moments]
    assert row.total == sum(row.sizes)
    assert row.traffic[column] == (figures.traffic / figures.gradient, figures.traffic)
    assert row.casts == figures.casts
    assert row.waits[column] == figures.waits


def test_every_plugin_has_a_row_and_every_row_a_purpose() -> None:
    named = {name.split("(")[0] for name in TABLES["The plugins of this package"]}
    assert named == set(NAMES)
    assert all(row.purpose.endswith(".") for row in ROWS.values())


@pytest.mark.parametrize("fused", [True, False])
def test_what_the_page_says_about_runs_without_clipping(fused: bool) -> None:
    stock = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    assert figures_of(stock, fused=fused, clip=None).traffic == 2 * 4
    for name in ('AutocastPrecision("bf16-mixed")', "TF32Precision()", "Float8Precision()"):
        assert figures_of(plugin_of(name), fused=fused, clip=None).traffic == 1 * 4


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize(("only_reads", "passes"), [(False, 4), (True, 3)])
def test_what_the_page_says_about_who_looks(only_reads: bool, passes: int, clip: float | None) -> None:
    looker = Callback()
    looker.on_before_optimizer_step = lambda *_: None
    if only_reads:
        looker.needs_gradients = lambda step_index: True
    figures = figures_of(plugin_of('AutocastPrecision("16-mixed")'), fused=True, clip=clip, callbacks=[looker])
    assert figures.traffic == passes * 4


def test_the_pages_name_tests_that_exist() -> None:
    pages = PAGE.read_text() + (PAGE.parent / "results" / "README.md").read_text()
    files = set(re.findall(r"`tests/([\w/]+\.py)`", pages))
    assert len(files) >= 5
    assert all((Path(__file__).parents[1] / file).exists() for file in files)
