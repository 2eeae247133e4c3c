"""A model whose every dtype is known beforehand, and audited runs of any module."""

import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from small_models import adamw, loader, quiet_trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_mp.callbacks.precision_audit import PrecisionAudit
from lightning_mp.monitors.diagnostics.audit.records import AuditReport

WIDTH, CLASSES = 16, 8


class Known(pl.LightningModule):
    """Linear, norm, linear, softmax, product, linear, cross-entropy: every size a multiple of 8."""

    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, 32)
        self.norm = nn.LayerNorm(32)
        self.middle = nn.Linear(32, 32)
        self.mix = Mix()
        self.last = nn.Linear(32, CLASSES)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(self.norm(F.gelu(self.first(x))))
        x = checkpoint(self.mix, x, use_reentrant=False) if self.checkpointed else self.mix(x)
        logits: Tensor = self.last(x)
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        x, y = batch
        return F.cross_entropy(self(x), y)

    def configure_optimizers(self) -> Any:
        return adamw(self.parameters())


class Mix(nn.Module):
    """Calls a softmax and two products as functions."""

    def forward(self, x: Tensor) -> Tensor:
        return x + F.softmax(x @ x.mT, -1) @ x


class InFp64(nn.Module):
    """Computes in 64 bit, in the middle of everything else."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.double() * 2).to(x.dtype)


def batches(num_batches: int = 3) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    return [
        [torch.randn(8, WIDTH, generator=generator), torch.randint(CLASSES, (8,), generator=generator)]
        for _ in range(num_batches)
    ]


def fit(module: pl.LightningModule, data: Any = None, audit: PrecisionAudit | None = None, **arguments: Any) -> Any:
    """A fit, with an audit or without; findings are asked of the audit, so that their warning is left aside."""
    callbacks = [*arguments.pop("callbacks", []), *([audit] if audit is not None else [])]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="PrecisionAudit found")
        trainer = quiet_trainer(callbacks=callbacks, **arguments)
        trainer.fit(module, loader(batches()) if data is None else data)
    return trainer


def audited(module: pl.LightningModule, data: Any = None, **arguments: Any) -> PrecisionAudit:
    audit = PrecisionAudit()
    fit(module, data, audit, **arguments)
    assert audit.records is not None
    return audit


def runs(report: AuditReport, phase: str = "forward") -> dict[tuple[str, str], str]:
    """The dtype of each product, softmax, norm and loss, by module and operation."""
    shown = ("matmul", "softmax", "norm", "loss")
    found: dict[tuple[str, str], str] = {}
    for row in report.operations:
        if row.phase == phase and row.kind in shown:
            assert found.setdefault((row.module, row.operation), row.compute) == row.compute
    return found


def what_is_left(module: nn.Module) -> int:
    """Hooks on modules and parameters, and modes of torch, counted."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    hooks = sum(len(getattr(part, name)) for part in module.modules() for name in names)
    on_weights = sum(len(p._backward_hooks or ()) for p in module.parameters())
    modes = len(_get_current_dispatch_mode_stack()) + torch._C._len_torch_function_stack()
    return hooks + on_weights + modes
