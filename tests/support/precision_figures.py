"""What a step under a precision plugin costs, measured: bytes, traffic over gradients, casts and waits."""

import gc
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import Precision
from small_models import loader, quiet_trainer
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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
    in_step: float
    """Bytes per parameter when a step begins, where gradients may be in fp32 besides."""


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
        optimizer.register_step_pre_hook(lambda *_: self._begin_step())
        optimizer.register_step_post_hook(lambda *_: setattr(self.mode, "in_optimizer", False))
        # Stock plugins without a scaler clip inside of the optimizer's step.
        clip, plugin = trainer.precision_plugin.clip_gradients, trainer.precision_plugin

        def clip_gradients(*args: Any, **kwargs: Any) -> None:
            before, self.mode.in_optimizer = self.mode.in_optimizer, False
            clip(*args, **kwargs)
            self.mode.in_optimizer = before

        plugin.clip_gradients = clip_gradients
        self.mode.__enter__()

    def _begin_step(self) -> None:
        self.mode.in_optimizer, self.in_step = True, live_bytes().total()

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
            self.in_step / number,
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
