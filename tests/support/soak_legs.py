"""One leg of a run of everything: all callbacks, faults where a plan says, and an end of one kind or another."""

import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch.callbacks import Callback
from small_models import TokenModel, quiet_trainer
from soak_model import BUDGET_TOKENS, GROWTH_INTERVAL, MAX_SCALE, MIN_SCALE, PEAK_RATE, SCALE, Stream, rate
from torch import Tensor
from torch.distributed.tensor import DTensor

import lightning_mp as mp
from lightning_mp.training.accumulation.controller import AccumulationController

#: A loss that is not finite on one rank; memory that runs out on one rank.
Fault = Literal["overflow", "oom"]
Precision = Literal["16-mixed", "bf16-mixed", "16-true", "bf16-true"]
Strategy = Literal["ddp", "fsdp2"]


class PlannedCrash(Exception):
    """The end of a leg."""


@dataclass(frozen=True)
class Leg:
    """From a checkpoint, or the beginning, to the next one."""

    ranks: int
    strategy: Strategy
    precision: Precision
    fused: bool
    schedule: Mapping[int, int]
    first_row: int
    micro_batches: int
    faults: Mapping[int, Fault]
    """By micro-batch of the leg."""
    saved_after: int | None
    """This micro-batch of the leg; what comes after it is lost in a crash at its end. None: it ends by SIGTERM."""
    resume: Path | None
    folder: Path


@dataclass
class Found:
    """What a rank has seen."""

    rates: list[float | None] = field(default_factory=list)
    """The learning rate of each step that was made; None for one that was skipped."""
    state: dict[str, float] = field(default_factory=dict)
    """At the checkpoint."""
    weights: list[Tensor] = field(default_factory=list)


class Everything(TokenModel):
    """Fails where the leg says so."""

    def __init__(self, leg: Leg, rank: int) -> None:
        super().__init__(partial(torch.optim.SGD, lr=PEAK_RATE, momentum=0.9, fused=leg.fused))
        self.leg, self.rank, self.seen = leg, rank, 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        fault = self.leg.faults.get(self.seen) if self.rank == self.seen % self.leg.ranks else None
        if fault == "oom" and len(batch[0]) > 1 and torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory. (planted)")
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss.detach(), on_step=True)
        return loss * torch.inf if fault == "overflow" else loss


class Recorder(Callback):
    """Notes steps, writes the checkpoint, and ends the leg."""

    def __init__(self, leg: Leg, found: Found) -> None:
        self.leg, self.found = leg, found

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.leg.saved_after is None and pl_module.seen == self.leg.micro_batches - 1 and pl_module.rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_after_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any, outcome: Any) -> None:
        self.found.rates.append(float(optimizer.param_groups[0]["lr"]) if outcome.stepped else None)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        pl_module.seen += 1
        if pl_module.seen == self.leg.saved_after:
            trainer.save_checkpoint(self.leg.folder / "saved.ckpt")
            self.look(trainer, pl_module)
        if self.leg.saved_after is not None and pl_module.seen == self.leg.micro_batches:
            raise PlannedCrash

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.look(trainer, pl_module)

    def look(self, trainer: Any, pl_module: Any) -> None:
        monitor = next(c for c in trainer.callbacks if isinstance(c, mp.OverflowMonitor))
        counter = AccumulationController.of(trainer).counter
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.found.state = {
            "micro_batches": pl_module.seen,
            "global_step": trainer.global_step,
            "attempts": monitor.attempted_steps,
            "skipped": monitor.skipped_steps,
            "tokens": counter.tokens,
            "skipped_tokens": counter.skipped_tokens,
            "scale": scaler.get_scale() if scaler is not None else SCALE,
        }


def all_callbacks(folder: Path, schedule: Mapping[int, int], *, sharded: bool = False) -> list[Callback]:
    """One of each kind; those that cannot be beside sharded strategies only where they can."""
    replicated = [mp.MicroBatchOnOOM()]
    return [
        mp.OverflowMonitor(),
        mp.OverflowPostMortem(dirpath=folder),
        mp.UnderflowMonitor(every_n_steps=5),
        mp.PrecisionAudit(),
        mp.MFUMonitor(),
        mp.GradientNoiseScale(),
        mp.ActivationCheckpointing("head"),
        mp.AtomicCheckpoints(),
        mp.BudgetForecast("loss", every_n_steps=7),
        mp.TokenLearningRate(rate),
        mp.ChinchillaBudget(tokens=BUDGET_TOKENS, on_waste="extend", save=False),
        mp.AccumulationScheduler(schedule, unit="step", save_partial_gradients=not sharded),
        mp.RankWatchdog(timeout_seconds=100),
        mp.StopAtBoundary(dirpath=folder, filename="saved"),
        *([] if sharded else replicated),
    ]


def plugin_of(leg: Leg) -> Any:
    scaler = mp.LossScaler(
        init_scale=SCALE, min_scale=MIN_SCALE, max_scale=MAX_SCALE, growth_interval=GROWTH_INTERVAL, on_floor="ignore"
    )
    scaled = {"scaler": scaler} if leg.precision.startswith("16") else {}
    if "true" in leg.precision:
        return mp.MasterWeightsPrecision(leg.precision, fp32_checkpoints=True, **scaled)
    return mp.AutocastPrecision(leg.precision, **scaled)


def run_leg(rank: int, *, leg: Leg) -> Found:
    """Called on every rank."""
    sharded = leg.strategy == "fsdp2"
    found = Found()
    strategies: dict[str, Any] = {
        "ddp": "ddp" if leg.ranks > 1 else "auto",
        "fsdp2": mp.FSDP2Strategy(save_distributed_checkpoint=False, process_group_backend="gloo", shard="head"),
    }
    trainer = quiet_trainer(
        devices=leg.ranks,
        strategy=strategies[leg.strategy],
        plugins=[plugin_of(leg)],
        callbacks=[*all_callbacks(leg.folder, leg.schedule, sharded=sharded), Recorder(leg, found)],
        max_epochs=-1,
        log_every_n_steps=3,
        default_root_dir=leg.folder,
    )
    module = Everything(leg, rank)
    before = set(vars(module))
    with suppress(PlannedCrash):
        trainer.fit(module, Stream(leg.first_row, rank, leg.ranks), ckpt_path=leg.resume)
    saved = torch.load(leg.folder / "saved.ckpt", weights_only=False)["state_dict"]
    found.weights = [saved[name].float() for name, _ in TokenModel().named_parameters()]
    for weight in [*module.parameters(), *found.weights]:
        whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
        assert torch.isfinite(whole).all(), "non-finite weights"
    # Lightning's DDP sets `forward` back to the class's own
    own = {name: value for name, value in vars(module).items() if name not in before and callable(value)}
    left = {name for name, value in own.items() if getattr(value, "__func__", None) is not getattr(TokenModel, name)}
    assert not left, f"still on the module after the fit: {left}"
    return found
