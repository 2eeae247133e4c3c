"""Optimizers with train() and eval(): what is evaluated and saved are the weights that they evaluate."""

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from small_models import WIDTH, ResumableLoader, at, loader, quiet_trainer, regression_batches, saving
from torch import nn
from torch.optim import Muon

from lightning_mp import AutocastPrecision, JointOptimizer, LossScaler, MasterWeightsPrecision

schedulefree = pytest.importorskip("schedulefree", reason="schedulefree is not installed")

BATCHES = regression_batches(6)
HELD_OUT = regression_batches(8)[6:]

PLUGINS: dict[str, Any] = {
    "bf16-mixed": lambda: AutocastPrecision("bf16-mixed"),
    "16-mixed": lambda: AutocastPrecision("16-mixed", scaler=LossScaler.static(256.0)),
    "fp32 masters": lambda: MasterWeightsPrecision("bf16-true"),
    "remainder": lambda: MasterWeightsPrecision("bf16-true", storage="remainder"),
}

SLOW = ("bf16-mixed", "remainder")


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 16, bias=False), nn.GELU(), nn.Linear(16, 1, bias=False))


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    return schedulefree.AdamWScheduleFree(net.parameters(), lr=1e-2, warmup_steps=2)


def muon_and_adamw(net: nn.Module) -> torch.optim.Optimizer:
    return JointOptimizer([Muon([net[0].weight]), schedulefree.AdamWScheduleFree([net[2].weight], lr=1e-2)], module=net)


OPTIMIZERS = {"alone": adamw, "in a joint optimizer": muon_and_adamw}


def loss_of(net: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(net(batch[0]).float(), batch[1].float())


class Module(pl.LightningModule):
    def __init__(
        self, make: Any = adamw, net: nn.Module | None = None, raise_at: int = -1, overflow_at: int | None = None
    ) -> None:
        super().__init__()
        self.net = make_net() if net is None else net
        self.make, self.raise_at, self.overflow_at = make, raise_at, overflow_at
        self.validated: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.trainer.global_step == self.raise_at:
            raise RuntimeError("stopped on purpose")
        return loss_of(self.net, batch) * (torch.inf if batch_idx == self.overflow_at else 1.0)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(loss_of(self.net, batch).item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make(self.net)


def fit(module: Module, plugin: Any, ckpt_path: Any = None, **settings: Any) -> pl.Trainer:
    trainer = quiet_trainer(**({"plugins": [plugin], "max_epochs": 2, "val_check_interval": 3} | settings))
    trainer.fit(module, ResumableLoader(BATCHES), loader(HELD_OUT), ckpt_path=ckpt_path)
    return trainer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_evaluates_and_saves_what_a_loop_by_hand_does(name: str, tmp_path: Path) -> None:
    make = OPTIMIZERS[name]
    saving = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, every_n_train_steps=2)
    module = Module(make)
    fit(module, AutocastPrecision("bf16-mixed"), callbacks=[saving], enable_checkpointing=True)

    net, validated, saved = make_net(), [], {}
    optimizer = make(net)
    validated += evaluate(net)  # Lightning's sanity check
    optimizer.train()
    for step in range(1, 13):
        optimizer.zero_grad()
        with autocast():
            loss = loss_of(net, BATCHES[(step - 1) % 6])
        loss.backward()
        optimizer.step()
        if step % 2 == 0:
            optimizer.eval()
            saved[step] = net[0].weight.detach().clone()
            optimizer.train()
        if step % 3 == 0:
            optimizer.eval()
            validated += evaluate(net)
            optimizer.train()
    optimizer.eval()
    assert module.validated == validated
    for step, weight in saved.items():
        checkpoint = torch.load(tmp_path / f"step={step}.ckpt", weights_only=True)
        assert torch.equal(checkpoint["state_dict"]["net.0.weight"], weight)
    assert len(saved) == 6
    assert all(map(torch.equal, module.net.state_dict().values(), net.state_dict().values()))


def autocast() -> Any:
    return torch.autocast("cpu", torch.bfloat16, cache_enabled=False)


def evaluate(net: nn.Module) -> list[float]:
    with torch.no_grad(), autocast():
        return [loss_of(net, batch).item() for batch in HELD_OUT]


@pytest.mark.parametrize(("hook", "step"), [("on_train_batch_end", 4), ("on_validation_end", 6)])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("precision", [pytest.param(n, marks=pytest.mark.full if n in SLOW else ()) for n in PLUGINS])
def test_a_resumed_run_is_the_uninterrupted_one(
    precision: str, name: str, hook: str, step: int, tmp_path: Path
) -> None:
    straight, resumed = Module(OPTIMIZERS[name]), Module(OPTIMIZERS[name])
    path = tmp_path / "once.ckpt"
    # on_validation_end is where ModelCheckpoint saves
    fit(straight, PLUGINS[precision](), callbacks=[at(saving(path), hook, step=step)], max_epochs=3)
    fit(resumed, PLUGINS[precision](), path, max_epochs=3)
    assert all(map(torch.equal, resumed.net.state_dict().values(), straight.net.state_dict().values()))
    assert len(resumed.validated) > 4
    assert resumed.validated == straight.validated[-len(resumed.validated) :]


@pytest.mark.parametrize("precision", PLUGINS)
def test_a_skipped_step_changes_neither_weights_nor_state(precision: str) -> None:
    def run(rows: list[Any], overflow_at: int | None) -> Module:
        module = Module(overflow_at=overflow_at)
        quiet_trainer(plugins=[PLUGINS[precision]()]).fit(module, loader(rows), loader(HELD_OUT))
        return module

    plain = run(BATCHES, None)
    skipped = run([*BATCHES[:2], BATCHES[0], *BATCHES[2:]], 2)
    assert all(map(torch.equal, plain.net.state_dict().values(), skipped.net.state_dict().values()))
    states = [module.trainer.optimizers[0].state_dict() for module in (plain, skipped)]
    torch.testing.assert_close(*states, rtol=0, atol=0)


def test_an_exception_leaves_the_evaluated_weights() -> None:
    module = Module(raise_at=4)
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(module, AutocastPrecision("bf16-mixed"))
    [group] = module.trainer.optimizers[0].param_groups
    assert group["train_mode"] is False
    whole = Module()
    fit(whole, AutocastPrecision("bf16-mixed"), max_epochs=-1, max_steps=4)
    assert all(map(torch.equal, module.net.state_dict().values(), whole.net.state_dict().values()))
    assert "save_checkpoint" not in vars(module.trainer)


class Conv(Module):
    def __init__(self, norm: type[nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__(net=nn.Sequential(nn.Linear(WIDTH, 16), norm(16), nn.Linear(16, 1)))


@pytest.mark.parametrize(
    ("norm", "make", "told"),
    [
        (nn.BatchNorm1d, adamw, True),
        (nn.LayerNorm, adamw, False),
        (nn.BatchNorm1d, lambda net: torch.optim.AdamW(net.parameters()), False),
    ],
    ids=["", "other norm", "other optimizer"],
)
def test_batch_norm_is_spoken_of_at_set_up(norm: Any, make: Any, told: bool, caplog: Any) -> None:
    module = Conv(norm)
    module.make = make
    with caplog.at_level(logging.INFO):
        fit(module, AutocastPrecision("bf16-mixed"), max_steps=1, max_epochs=-1)
    lines = [record.message for record in caplog.records if "running statistics" in record.message]
    assert len(lines) == told
    if told:
        assert lines[0].startswith("AdamWScheduleFree evaluates averaged weights, and the running statistics of net.1")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_average_of_the_trained_weights_stays_in_the_module(name: str) -> None:
    """What Lightning leaves with other optimizers: the average, which ``eval()`` must not move."""
    seen: list[list[torch.Tensor]] = []

    class Average(EMAWeightAveraging):
        def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            assert self._average_model is not None
            seen.append([weight.detach().clone() for weight in self._average_model.module.parameters()])
            super().on_train_end(trainer, pl_module)

    module = Module(OPTIMIZERS[name])
    trainer = fit(module, AutocastPrecision("bf16-mixed"), callbacks=[Average(decay=0.5)])
    assert all(map(torch.equal, module.net.parameters(), seen[0]))
    groups = [group["train_mode"] for group in trainer.optimizers[0].param_groups if "train_mode" in group]
    assert groups
    assert not any(groups)
