"""Optimizers of other packages: how each is made, and whether it trains, clips, skips and resumes in each precision."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from small_models import ResumableLoader, quiet_trainer
from torch import Tensor, nn

from lightning_mp import AutocastPrecision, LossScaler, MasterWeightsPrecision

PRECISIONS: dict[str, Callable[[], Any]] = {
    "fp16 autocast": lambda: AutocastPrecision("16-mixed", scaler=LossScaler.static(256.0)),
    "fp32 masters": lambda: MasterWeightsPrecision("bf16-true"),
    "remainder masters": lambda: MasterWeightsPrecision("bf16-true", storage="remainder"),
    "24bit masters": lambda: MasterWeightsPrecision("bf16-true", storage="24bit"),
}

CHECKS = ("train", "clip", "skip", "resume")

WIDTH = 64  # a matrix has 4,096 elements, the fewest that 8-bit optimizers quantise


@dataclass(frozen=True)
class Row:
    """One optimizer. ``fails``: by precision, words of the KeyError that the package itself raises."""

    package: str
    module: str
    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    wrap: Callable[[torch.optim.Optimizer], Any] | None = None
    fails: dict[str, str] = field(default_factory=dict)
    needs: str = ""

    def __str__(self) -> str:
        return f"{self.package} {self.name}"

    @property
    def is_installed(self) -> bool:
        return all(find_spec(name) is not None for name in (self.module.partition(".")[0], self.needs) if name)

    def make(self, net: nn.Module) -> torch.optim.Optimizer:
        trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
        optimizer = getattr(import_module(self.module), self.name)(trained, **({"lr": 1e-3} | self.settings))
        return optimizer if self.wrap is None else self.wrap(optimizer)


def _lookahead(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return import_module("torch_optimizer").Lookahead(optimizer, k=3)


ROWS = [
    *(Row("bitsandbytes", "bitsandbytes.optim", name) for name in ("AdamW8bit", "Lion8bit", "PagedAdamW8bit", "AdamW")),
    *(Row("torchao", "torchao.optim", name) for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8")),
    *(
        Row("schedulefree", "schedulefree", name)
        for name in ("AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree")
    ),
    Row("prodigyopt", "prodigyopt", "Prodigy", {"lr": 1.0}),
    Row("lion-pytorch", "lion_pytorch", "Lion"),
    *(
        Row("pytorch_optimizer", "pytorch_optimizer", name)
        for name in ("Adan", "Lamb", "SOAP", "SPlus", "ScheduleFreeAdamW", "StableAdamW", "AdEMAMix")
    ),
    *(Row("torch-optimizer", "torch_optimizer", name) for name in ("Yogi", "Lamb", "RAdam")),
    Row("torch-optimizer", "torch_optimizer", "Yogi", wrap=_lookahead),
    *(Row("torch-optimi", "optimi", name) for name in ("AdamW", "Lion")),
    # Else it takes Triton's kernels for weights on a CPU, where Triton is installed (0.3.3).
    Row("torch-optimi", "optimi", "StableAdamW", {"triton": False}),
    *(Row("heavyball", "heavyball", name) for name in ("AdamW", "SOAP")),
    # It finds its state by the memory of a weight, which these storages free between steps (3.2.1).
    Row(
        "heavyball",
        "heavyball",
        "SFAdamW",
        fails=dict.fromkeys(("remainder masters", "24bit masters"), "Tensor has no tracked state"),
    ),
    *(Row("dion", "dion", name) for name in ("Dion", "Muon", "NorMuon")),
    Row("distributed-shampoo", "distributed_shampoo", "DistributedShampoo"),
    Row("transformers", "transformers.optimization", "Adafactor", {"relative_step": False, "scale_parameter": False}),
    Row("peft", "torch.optim", "AdamW", needs="peft"),
]


class Net(pl.LightningModule):
    """Two matrices; under peft they are frozen and their adapters are trained."""

    def __init__(self, row: Row, overflow_at: int | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net: nn.Module = nn.Sequential(
            nn.Linear(WIDTH, WIDTH, bias=False), nn.GELU(), nn.Linear(WIDTH, WIDTH, bias=False)
        )
        if row.package == "peft":
            peft = import_module("peft")
            self.net = peft.get_peft_model(self.net, peft.LoraConfig(r=4, target_modules=["0", "2"]))
        self.row, self.overflow_at = row, overflow_at

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = (self.net(batch).float() - batch.float().flip(1)).square().mean()
        return loss * (torch.inf if batch_idx == self.overflow_at else 1.0)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.row.make(self.net)

    def weights(self) -> list[Tensor]:
        return [parameter.detach().float().clone() for parameter in self.net.parameters()]


class _Watch(pl.Callback):
    """Saves after four batches; notes the largest gradient norm that an optimizer was given."""

    def __init__(self, path: Path | None) -> None:
        self.path, self.norm = path, 0.0

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if self.path is not None and trainer.global_step == 4:
            trainer.save_checkpoint(self.path)

    def on_before_zero_grad(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Any) -> None:
        gradients = [p.grad.float() for p in module.parameters() if p.grad is not None]
        if gradients:
            self.norm = max(self.norm, float(nn.utils.get_total_norm(gradients)))


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return list(torch.randn(8, 4, WIDTH, generator=generator))


def fit(
    row: Row,
    precision: str,
    rows: list[Tensor],
    *,
    save_to: Path | None = None,
    ckpt_path: Path | None = None,
    overflow_at: int | None = None,
    **settings: Any,
) -> list[Tensor]:
    """The weights after one pass."""
    module = Net(row, overflow_at)
    trainer = quiet_trainer(plugins=[PRECISIONS[precision]()], callbacks=[_Watch(save_to)], **settings)
    trainer.fit(module, ResumableLoader(rows), ckpt_path=ckpt_path, weights_only=False if ckpt_path else None)
    return module.weights()


def outcomes(row: Row, precision: str, folder: Path) -> Iterator[tuple[str, bool]]:
    """Whether each check holds, in the order of ``CHECKS``."""
    rows = batches()
    straight = fit(row, precision, rows, save_to=folder / "half.ckpt")
    before = Net(row, None).weights()
    moved = [not torch.equal(a, b) for a, b in zip(straight, before, strict=True)]
    yield "train", any(moved) and all(bool(weight.isfinite().all()) for weight in straight)

    plain = fit(row, precision, rows)  # a checkpoint switches schedule-free weights, which rounds them
    clipped, loosely = (fit(row, precision, rows, gradient_clip_val=limit) for limit in (1e-4, 1e6))
    yield "clip", _equal(loosely, plain) and all(bool(weight.isfinite().all()) for weight in clipped)

    # the same batches, and one more without a finite loss, whose step leaves no trace
    yield "skip", _equal(fit(row, precision, [*rows[:2], rows[0], *rows[2:]], overflow_at=2), plain)
    yield "resume", _equal(fit(row, precision, rows, ckpt_path=folder / "half.ckpt"), straight)


def _equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(map(torch.equal, ours, theirs))
