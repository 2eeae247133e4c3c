"""Runs with one known fault each, and what the right monitor has to say about it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from innocent_models import BATCH, CLASSES, WIDTH, Trained
from lightning.pytorch.plugins import Precision
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_mp import AutocastPrecision, LossScaler, PrecisionPolicy

Monitor = Literal["OverflowPostMortem", "PrecisionAudit", "UnderflowMonitor", "OverflowMonitor"]


def fp16(scale: float = 2.0**8, **settings: Any) -> Precision:
    return AutocastPrecision("16-mixed", scaler=LossScaler(init_scale=scale), **settings)


def bf16(**settings: Any) -> Precision:
    return AutocastPrecision("bf16-mixed", **settings)


@dataclass(frozen=True)
class PlantedCause:
    """One fault.

    Attributes:
        make: the LightningModule.
        monitor: which monitor has to name it.
        named: what it has to say first: verdict, phase and module of the post-mortem; kind and module of the audit.
        plugin: makes the precision plugin.
        spoil: what is done to each batch.
        num_batches: training batches.
    """

    make: Callable[[], pl.LightningModule]
    monitor: Monitor
    named: tuple[str, ...]
    plugin: Callable[[], Precision] = fp16
    spoil: Callable[[list[Tensor]], None] = lambda batch: None
    num_batches: int = 2

    def batches(self) -> list[list[Tensor]]:
        generator = torch.Generator().manual_seed(1)
        made = []
        for _ in range(self.num_batches):
            batch = [torch.randn(BATCH, WIDTH, generator=generator), torch.randn(BATCH, CLASSES, generator=generator)]
            self.spoil(batch)
            made.append(batch)
        return made


def _squared_error(net: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(net(batch[0]).float(), batch[1])


class Does(nn.Module):
    """A module of one line."""

    def __init__(self, what: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        return self.what(x)


class DoesNorm(Does):
    """The same; its name says that it normalises."""


def _around(fault: nn.Module | Callable[[Tensor], Tensor], **settings: Any) -> Callable[[], pl.LightningModule]:
    """The fault between two layers, as ``net.1``."""

    def make() -> pl.LightningModule:
        torch.manual_seed(0)
        middle = fault if isinstance(fault, nn.Module) else Does(fault)
        net = nn.Sequential(nn.Linear(WIDTH, WIDTH), middle, nn.Linear(WIDTH, CLASSES))
        return Trained(net, _squared_error, **settings)

    return make


def _with_loss(loss: Callable[[Tensor, Tensor], Tensor], **settings: Any) -> Callable[[], pl.LightningModule]:
    def make() -> pl.LightningModule:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, CLASSES))
        return Trained(net, lambda net, batch: loss(net(batch[0]), batch[1]), **settings)

    return make


def _masked_softmax(x: Tensor) -> Tensor:
    """The first row may attend to nothing: -1e9 is -inf in fp16, and a softmax over -inf alone is nan."""
    mask = torch.zeros(len(x), len(x))
    mask[0] = 1.0
    scores = x @ x.T
    return torch.softmax(scores + mask.to(scores.dtype) * -1e9, -1) @ x


def _chaos(x: Tensor) -> Tensor:
    """Bounded in forward; in backward each step multiplies by about 8."""
    for _ in range(24):
        x = torch.sin(8 * x)
    return x


def _without_autocast(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    def call(x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            out: Tensor = layer(x.float())
        return out

    return call


class Inner(nn.Module):
    """A layer that is called in some way of the parent's."""

    def __init__(self, layer: nn.Module, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.layer, x)


def _called_without_autocast(layer: nn.Module, x: Tensor) -> Tensor:
    return _without_autocast(layer)(x)


def _called_in_half(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        out: Tensor = layer(x.half()).float()
    return out


def _everything_without_autocast() -> pl.LightningModule:
    module = _with_loss(lambda out, y: F.mse_loss(out, y))()
    module.loss = lambda net, batch: F.mse_loss(_without_autocast(net)(batch[0]), batch[1])
    return module


class GroupedExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, WIDTH, WIDTH) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.grouped_mm(x.float(), self.weight, offs=torch.tensor([2, BATCH], dtype=torch.int32))


def _broken_weight() -> pl.LightningModule:
    module = _with_loss(F.mse_loss)()
    module.get_submodule("net.0").weight.data[0, 0] = torch.nan
    return module


def _spoil(index: int, value: float) -> Callable[[list[Tensor]], None]:
    def spoil(batch: list[Tensor]) -> None:
        batch[index][0, 0] = value

    return spoil


def _dies(
    verdict: str, phase: str, module: str, make: Callable[[], pl.LightningModule], **settings: Any
) -> PlantedCause:
    return PlantedCause(make, "OverflowPostMortem", (verdict, phase, module), **settings)


def _audited(kind: str, module: str, make: Callable[[], pl.LightningModule], **settings: Any) -> PlantedCause:
    return PlantedCause(make, "PrecisionAudit", (kind, module), **settings)


_ALL_LOW = PrecisionPolicy({"matmuls": "low"})

PLANTED_CAUSES: dict[str, PlantedCause] = {
    "log of zero": _dies("model", "forward", "net.1", _around(lambda x: x.relu().float().log())),
    "division by zero in a normalisation": _dies(
        "model", "forward", "net.1", _around(lambda x: x / (x - x).std(-1, keepdim=True))
    ),
    "derivative of a square root at zero": _dies(
        "model", "backward", "net.1", _around(lambda x: x + (x * 0).float().sqrt())
    ),
    "derivative of an arc cosine at one": _dies(
        "model", "backward", "net.1", _around(lambda x: x + (x * 0 + 1).float().acos())
    ),
    "exp of something large": _dies("model", "forward", "net.1", _around(lambda x: (1e3 * x.float()).exp())),
    "exp too large for fp16": _dies("range", "forward", "net.1", _around(lambda x: (x * 0 + 12).exp())),
    "softmax by hand in fp16": _dies(
        "range", "forward", "net.1", _around(lambda x: (20 * x).exp() / (20 * x).exp().sum(-1, keepdim=True))
    ),
    "attention mask of -1e9 in fp16": _dies("range", "forward", "net.1", _around(_masked_softmax)),
    "large logits": _dies("range", "forward", "net.1", _around(lambda x: x * 1e6)),
    "sum of squares in fp16 as the loss": _dies(
        "range", "loss", "", _with_loss(lambda out, y: (1e3 * out).square().sum())
    ),
    "division by the sum of an empty loss mask": _dies(
        "model", "loss", "", _with_loss(lambda out, y: ((out - y).square() * 0).sum() / (y * 0).sum())
    ),
    "log of a probability that is zero": _dies(
        "model", "loss", "", _with_loss(lambda out, y: -torch.sigmoid(-1e3 - out.float().abs()).log().mean())
    ),
    "infinite label": _dies("data", "data", "", _with_loss(F.mse_loss), spoil=_spoil(1, torch.inf)),
    "nan in the input": _dies("data", "data", "", _with_loss(F.mse_loss), spoil=_spoil(0, torch.nan)),
    "broken weight": _dies("weights", "weights", "net.0", _broken_weight),
    "learning rate too high, AdamW": _dies(
        *("diverged", "", ""), _with_loss(F.mse_loss, optimizer=partial(torch.optim.AdamW, lr=1e6)), num_batches=4
    ),
    "learning rate too high, SGD": _dies(
        *("diverged", "", ""), _with_loss(F.mse_loss, optimizer=partial(torch.optim.SGD, lr=1e5)), num_batches=4
    ),
    "exploding gradients through time": _dies("range", "backward", "net.1", _around(_chaos)),
    "loss scale too high": _dies("scale", "backward", "", _with_loss(F.mse_loss), plugin=partial(fp16, 2.0**24)),
    "loss scale too low": PlantedCause(
        _with_loss(lambda out, y: 1e-3 * F.mse_loss(out, y)),
        "UnderflowMonitor",
        ("scale too low",),
        plugin=lambda: AutocastPrecision("16-mixed", scaler=LossScaler.static(1.0)),
    ),
    "loss divided twice": PlantedCause(
        _with_loss(lambda out, y: F.mse_loss(out, y) / 512 / 512),
        "UnderflowMonitor",
        ("scale too low",),
        plugin=partial(fp16, 2.0**4),
    ),
    "nothing but skipped steps": PlantedCause(
        _with_loss(lambda out, y: F.mse_loss(out, y) * torch.inf), "OverflowMonitor", ("only skips",), num_batches=6
    ),
    "autocast switched off in a layer": _audited(
        "fp32_matmul", "net.1.layer", _around(Inner(nn.Linear(WIDTH, WIDTH), _called_without_autocast)), plugin=bf16
    ),
    "autocast switched off around the model": _audited("not_active", "net.0", _everything_without_autocast),
    "layer.half() inside": _audited(
        "other_format",
        "net.1.layer",
        _around(Inner(nn.Linear(WIDTH, WIDTH).half().requires_grad_(False), _called_in_half)),
        plugin=bf16,
    ),
    "layer that goes against its policy": _audited(
        "policy",
        "net.1.layer",
        _around(Inner(nn.Linear(WIDTH, WIDTH), _called_without_autocast)),
        plugin=partial(bf16, policy=_ALL_LOW),
    ),
    "softmax cast to 16 bit by hand": _audited(
        "low_precision", "net.1", _around(lambda x: x.float().bfloat16().softmax(-1).float()), plugin=bf16
    ),
    "root mean square by hand in 16 bit": _audited(
        "low_precision", "net.1", _around(DoesNorm(lambda x: x * x.pow(2).mean(-1, keepdim=True).rsqrt())), plugin=bf16
    ),
    "batch norm by hand in 16 bit": _audited(
        "low_precision", "net.1", _around(DoesNorm(lambda x: (x - x.mean(0)) / (x.var(0) + 1e-3).sqrt())), plugin=bf16
    ),
    "loss in 16 bit": _audited("low_precision", "net.1", _around(nn.LogSoftmax(-1)), plugin=bf16),
    "64-bit numbers": _audited("fp64", "net.1", _around(lambda x: (2 * x.double()).to(x.dtype)), plugin=bf16),
    "operation without a rule of autocast": _audited("fp32_matmul", "net.1", _around(GroupedExperts()), plugin=bf16),
    "layer of an odd width": _audited(
        "tensor_cores", "net.1.0", _around(nn.Sequential(nn.Linear(WIDTH, 100), nn.Linear(100, WIDTH))), plugin=bf16
    ),
}
