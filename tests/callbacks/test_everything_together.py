"""Every monitor and callback of the pack on one run: what they cost together, and that none disturbs another."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from gradient_counter import CountGradientTraffic
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from small_models import TokenModel, adamw, fit, fused_adamw, loader, quiet_trainer, token_batches, weights
from torch.optim import lr_scheduler

import lightning_mp as mp

pytestmark = [
    pytest.mark.filterwarnings("ignore:PrecisionAudit found"),
    pytest.mark.filterwarnings("ignore:GradientNoiseScale has no estimate for now"),
    pytest.mark.filterwarnings("ignore:Optimizer step .* was skipped:RuntimeWarning"),
]

LENGTHS = [9, 5, 7, 8, 6, 9, 4, 8] * 4


def monitors() -> list[Callback]:
    """Those that only look."""
    return [
        mp.OverflowMonitor(),
        mp.OverflowPostMortem(replay=True),
        mp.PrecisionAudit(),
        # Its first look is at step 0, and no other one is in the run.
        mp.UnderflowMonitor(every_n_steps=1_000),
    ]


def plugin() -> mp.AutocastPrecision:
    return mp.AutocastPrecision("16-mixed", scaler=mp.LossScaler(init_scale=2.0**10))


class Scheduled(TokenModel):
    """With a scheduler, and an overflow planted in some micro-batches of the run."""

    def __init__(self, optimizer: Any, overflows: Any = ()) -> None:
        super().__init__(optimizer)
        self.overflows, self.seen = set(overflows), 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.seen += 1
        self.log("loss", loss.detach(), prog_bar=True)
        return loss * (math.inf if self.seen - 1 in self.overflows else 1.0)

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "frequency": 2}]


def waits_of_the_module() -> int:
    """Per micro-batch, without anything of the pack: it counts tokens, and Lightning looks at what it logs."""

    class InsideOfTheStepToo(CountGradientTraffic):
        """Stock plugins run forward and backward inside of `optimizer.step`; the fused kernel waits for nothing."""

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.mode.__enter__()

    module = Scheduled(fused_adamw)
    counter = InsideOfTheStepToo(module)
    fit(module, token_batches(LENGTHS[:8]), counter)
    [waits] = {row.host_waits for row in counter.rows[2:-2]}
    return waits


@pytest.mark.parametrize(
    ("optimizer", "passes", "host_waits"), [(fused_adamw, 1.0, 0), (adamw, 3.0, 1)], ids=["fused", "unfused"]
)
@pytest.mark.parametrize("clip", [None, 0.1], ids=["unclipped", "clipped"])
def test_with_every_monitor_on_a_healthy_step_costs_what_it_costs_without(
    optimizer: Any, passes: float, host_waits: int, clip: float | None
) -> None:
    """Promise 5: token weights, budget, clipping and all monitors; no wait and one pass with a fused optimizer."""
    module = Scheduled(optimizer)
    own_waits = waits_of_the_module()
    counter = CountGradientTraffic(module)
    trainer = quiet_trainer(
        plugins=[plugin()],
        callbacks=[
            counter,
            *monitors(),
            mp.RankWatchdog(),
            mp.StopAtBoundary(),
            mp.AccumulationScheduler({0: 2}),
            mp.ChinchillaBudget(tokens=10**6),
        ],
        gradient_clip_val=clip,
    )
    with pytest.warns(UserWarning, match="the data end before the budget|the run ended after"):
        trainer.fit(module, loader(token_batches(LENGTHS)))
    # The first window is looked at by the audit and the underflow monitor, and sets the reference count.
    steps = [row for row in counter.rows[4:-2] if row.kernels]
    assert len(steps) == 13
    assert {row.passes for row in steps} == {passes}
    assert sum(row.host_waits - own_waits for row in counter.rows[4:-2]) == host_waits * len(steps)


def test_noise_scale_adds_one_pass_and_no_wait() -> None:
    module = Scheduled(fused_adamw)
    counter = CountGradientTraffic(module)
    callbacks = [counter, *monitors(), mp.GradientNoiseScale(), mp.AccumulationScheduler({0: 2})]
    fit(module, token_batches(LENGTHS), plugin=plugin(), callbacks=callbacks)
    rows = counter.rows[4:-2]
    assert {row.host_waits for row in rows} == {waits_of_the_module()}
    # Of each window of two, the norm of the first micro-batch's gradient, and the one pass before the step.
    assert Counter(row.passes for row in rows if row.kernels) == {1.0: 26}


def everything(tmp_path: Path) -> list[Callback]:
    return [
        *monitors(),
        mp.ActivationCheckpointing("head"),
        mp.GradientNoiseScale(),
        EMAWeightAveraging(decay=0.5),
        LearningRateMonitor(),
        mp.ChinchillaBudget(tokens=200, on_waste="extend"),
        mp.AccumulationScheduler({0: 1, 4: 2, 9: 3}, unit="step"),
        mp.StopAtBoundary(),
        ModelCheckpoint(tmp_path / "kept", every_n_train_steps=5, save_top_k=-1),
    ]


@pytest.mark.full
@pytest.mark.parametrize("optimizer", [adamw, fused_adamw], ids=["unfused", "fused"])
@pytest.mark.parametrize("order", ["as given", "reversed"])
def test_all_of_the_pack_together_trains_as_the_window_controller_alone(
    optimizer: Any, order: str, tmp_path: Path
) -> None:
    """The order of callbacks never matters, and whoever only looks changes no bit of the weights."""

    def train(callbacks: list[Callback], folder: str) -> tuple[pl.Trainer, Scheduled]:
        module = Scheduled(optimizer, overflows=(3, 4, 11))
        trainer = quiet_trainer(
            plugins=[plugin()],
            callbacks=callbacks if order == "as given" else callbacks[::-1],
            logger=CSVLogger(tmp_path / folder),
            enable_checkpointing=folder == "all",
            gradient_clip_val=0.5,
            max_epochs=-1,
            log_every_n_steps=1,
            default_root_dir=tmp_path / folder,
        )
        trainer.fit(module, loader(token_batches(LENGTHS)))
        return trainer, module

    callbacks = everything(tmp_path)
    averaging = next(callback for callback in callbacks if isinstance(callback, EMAWeightAveraging))
    trainer, module = train(callbacks, "all")
    few = [
        EMAWeightAveraging(decay=0.5),
        mp.ChinchillaBudget(tokens=200, on_waste="extend"),
        mp.AccumulationScheduler({0: 1, 4: 2, 9: 3}, unit="step"),
    ]
    reference_trainer, reference = train(few, "few")
    assert trainer.global_step == reference_trainer.global_step
    assert all(torch.equal(a, b) for a, b in zip(weights(module), weights(reference), strict=True))
    monitor = next(callback for callback in callbacks if isinstance(callback, mp.OverflowMonitor))
    budget = next(callback for callback in callbacks if isinstance(callback, mp.ChinchillaBudget))
    real_steps = {int(state["step"]) for state in trainer.optimizers[0].state.values()}
    assert real_steps == {monitor.attempted_steps - monitor.skipped_steps}
    assert budget.tokens_spent == 200
    assert averaging is not None
    names = ("training_step", "lr_scheduler_step", "log", "all_gather", "forward")
    assert not set(names) & set(vars(module)), "unwrapped after fit"
    assert not set(names) & set(vars(module.head))


@pytest.mark.parametrize("order", [1, -1], ids=["as given", "reversed"])
def test_callbacks_that_watch_the_same_operations_do_not_disturb_each_other(order: int) -> None:
    """The audit ends before others that watch the first micro-batch, and the noise scale computes in between."""

    def train(*callbacks: Callback) -> None:
        fit(Scheduled(adamw), token_batches(LENGTHS), plugin=plugin(), callbacks=list(callbacks)[::order], max_epochs=1)

    audit, monitor, noise = mp.PrecisionAudit(), mp.MFUMonitor(), mp.GradientNoiseScale()
    train(audit, noise, monitor, mp.ActivationCheckpointing("head"), mp.AccumulationScheduler({0: 2}))
    alone, monitor_alone = mp.PrecisionAudit(), mp.MFUMonitor()
    train(alone, mp.ActivationCheckpointing("head"), mp.AccumulationScheduler({0: 2}))
    train(monitor_alone, mp.ActivationCheckpointing("head"), mp.AccumulationScheduler({0: 2}))
    assert audit.records is not None
    assert alone.records is not None
    # What callbacks compute before the step counts as "around the model"; inside of modules it has to be the same.
    inside, inside_alone = (
        [operation for operation in records.operations if operation.module]
        for records in (audit.records, alone.records)
    )
    assert inside == inside_alone
    assert monitor.flop_count is not None
    assert monitor.flop_count == monitor_alone.flop_count


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.filterwarnings("ignore:You.re resuming from a checkpoint that ended before the epoch ended")
def test_a_run_of_everything_can_be_resumed(tmp_path: Path) -> None:
    data = token_batches(LENGTHS)

    def trainer(*more: Callback) -> pl.Trainer:
        return quiet_trainer(
            plugins=[plugin()],
            callbacks=[*everything(tmp_path), *more],
            logger=CSVLogger(tmp_path),
            enable_checkpointing=True,
            max_epochs=-1,
            log_every_n_steps=1,
        )

    # Within rounding: it multiplies the weight of a micro-batch into gradients that are ready.
    trainer(mp.MicroBatchOnOOM()).fit(Scheduled(fused_adamw, overflows=(3,)), loader(data))
    [file] = (tmp_path / "kept").glob("*step=10.ckpt")
    resumed = trainer(mp.MicroBatchOnOOM())
    resumed.fit(Scheduled(fused_adamw), loader(data), ckpt_path=file)
    budget = next(c for c in resumed.callbacks if isinstance(c, mp.ChinchillaBudget))  # type: ignore[attr-defined]
    assert budget.tokens_spent == 200
