"""Counts, at torch's dispatcher, what happens to gradients between backward and the optimizer's own kernel."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

VIEWS = {
    "aten::empty_like",
    "aten::detach",
    "aten::view",
    "aten::alias",
    "aten::t",
    "aten::_unsafe_view",
    "aten::slice",
}


@dataclass
class Row:
    """One micro-batch, with its optimizer step if it has one. A pass is every gradient byte read or written once."""

    passes: float
    host_waits: int
    weight_casts: int
    kernels: dict[str, int] = field(default_factory=dict)


class GradientBytes(TorchDispatchMode):
    """Adds up the bytes of gradients that kernels read and write while it is entered, but those of the optimizer."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        super().__init__()
        self.parameters = list(parameters)
        self.between = True
        self.in_optimizer = False
        self.reset()

    def reset(self) -> None:
        self.bytes, self.waits, self.casts = 0, 0, 0
        self.kernels: Counter[str] = Counter()

    def _gradient_bytes(self, schema: Any, args: Any, kwargs: Any) -> tuple[int, int]:
        """Bytes of gradients that one kernel reads and writes. An in-place argument is both; ``out=`` is written."""
        grads = {p.grad.untyped_storage().data_ptr(): p.grad.nbytes for p in self.parameters if p.grad is not None}
        read, written = set(), set()
        for argument, value in zip(
            schema.arguments,
            [*args, *(kwargs[a.name] for a in schema.arguments[len(args) :] if a.name in kwargs)],
            strict=False,
        ):
            storages = {t.untyped_storage().data_ptr() for t in tree_leaves(value) if isinstance(t, torch.Tensor)}
            writes = argument.alias_info is not None and argument.alias_info.is_write
            written |= storages if writes else set()
            read |= set() if writes and argument.kwarg_only else storages
        return sum(grads.get(s, 0) for s in read), sum(grads.get(s, 0) for s in written)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if name == "aten::_local_scalar_dense" and not self.in_optimizer:
            self.waits += 1
        weights = {p.untyped_storage().data_ptr() for p in self.parameters}
        if name == "aten::_to_copy" and any(t.untyped_storage().data_ptr() in weights for t in tensors):
            self.casts += 1
        if self.between and not self.in_optimizer and name not in VIEWS:
            read, written = self._gradient_bytes(func._schema, args, kwargs)
            if read or written:
                self.bytes += read + written
                self.kernels[name] += 1
        return func(*args, **kwargs)


class CountGradientTraffic(Callback):
    """One :class:`Row` per micro-batch in ``rows``, from its forward to the next one's start.

    Put it first among the callbacks: what later ones do is then counted too.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.mode = GradientBytes(module.parameters())
        self.mode.between = False
        self.rows: list[Row] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        optimizer = trainer.optimizers[0]
        optimizer.register_step_pre_hook(lambda *_: setattr(self.mode, "in_optimizer", True))
        optimizer.register_step_post_hook(lambda *_: setattr(self.mode, "in_optimizer", False))
        self.mode.__enter__()

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.mode.between = True

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._close(pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.mode.__exit__(None, None, None)
        self._close(pl_module)

    def _close(self, pl_module: pl.LightningModule) -> None:
        if not self.mode.between:
            return
        self.mode.between = False
        parameter_bytes = sum(p.nbytes for p in pl_module.parameters())
        mode = self.mode
        self.rows.append(Row(mode.bytes / parameter_bytes, mode.waits, mode.casts, dict(mode.kernels)))
        mode.reset()
