"""Given to a `pytorch_lightning` Trainer or to Fabric, one line says what to use; `LossScaler` works in all of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import pytorch_lightning
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision as FabricMixedPrecision
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins import MixedPrecision
from pytorch_lightning.plugins import MixedPrecision as OtherMixedPrecision
from small_models import Regression, adamw, fit, loader, quiet_trainer, regression_batches, weights
from torch import Tensor, nn

import lightning_mp as mp
from lightning_mp.checkpoints import AtomicCheckpointIO

ADVICE = r"use `import lightning\.pytorch as pl`, not `import pytorch_lightning as pl`"


class OtherModule(pytorch_lightning.LightningModule):
    """A module of the other distribution."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Regression(overflows={1, 2})

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.inner.training_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self.parameters())


def other_trainer(**arguments: Any) -> pytorch_lightning.Trainer:
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return pytorch_lightning.Trainer(accelerator="cpu", devices=1, max_epochs=1, **quiet, **arguments)


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_a_pytorch_lightning_trainer_is_told_which_import_the_plugin_needs(precision: str) -> None:
    message = rf"Found invalid type for plugin AutocastPrecision\('{precision}'\).*{ADVICE}"
    with pytest.raises(Exception, match=message) as error:
        other_trainer(plugins=[mp.AutocastPrecision(precision)])
    assert type(error.value).__name__ == "MisconfigurationException"
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "make_callback",
    [
        mp.OverflowMonitor,
        mp.OverflowPostMortem,
        lambda: mp.AccumulationScheduler({0: 2}),
        lambda: mp.ChinchillaBudget(tokens=100),
        mp.UnderflowMonitor,
        mp.PrecisionAudit,
        mp.RankWatchdog,
        mp.StopAtBoundary,
        mp.MicroBatchOnOOM,
        mp.GradientNoiseScale,
        mp.MFUMonitor,
        lambda: mp.ActivationCheckpointing("net.*"),
        lambda: mp.BudgetForecast("loss"),
        lambda: mp.TokenLearningRate(mp.WarmupCosine(), tokens=100),
    ],
    ids=lambda make: type(make()).__name__,
)
def test_a_pytorch_lightning_trainer_is_told_which_import_a_callback_needs(
    make_callback: Callable[[], pl.Callback],
) -> None:
    callback = make_callback()
    module = OtherModule()
    before = weights(module)
    message = rf"{type(callback).__name__} is a callback for lightning\.pytorch\.Trainer.* a pytorch_lightning\.Trainer"
    with pytest.raises(MisconfigurationException, match=f"{message}: {ADVICE}") as error:
        other_trainer(callbacks=[callback]).fit(module, loader(regression_batches(4)))
    assert "\n" not in str(error.value)
    assert all(torch.equal(old, new) for old, new in zip(before, weights(module), strict=True))
    assert not list(Path().iterdir())


@pytest.mark.parametrize(
    "part", [mp.FSDP2Strategy, mp.PipelineParallelStrategy, lambda: mp.ReducedPrecisionDDPStrategy("bf16")]
)
def test_a_pytorch_lightning_trainer_is_told_which_import_a_strategy_needs(part: Callable[[], Any]) -> None:
    strategy = part()
    message = rf"invalid strategy name.*{type(strategy).__name__} \(a strategy for lightning\.pytorch: with it {ADVICE}"
    with pytest.raises(ValueError, match=message):
        other_trainer(strategy=strategy)
    assert "import" not in repr(strategy)


def test_a_pytorch_lightning_trainer_is_told_which_import_the_checkpoint_plugin_needs() -> None:
    message = rf"AtomicCheckpointIO \(a checkpoint plugin for lightning\.pytorch: with it {ADVICE}"
    with pytest.raises(Exception, match=message):
        other_trainer(plugins=[AtomicCheckpointIO()])
    assert "import" not in str(AtomicCheckpointIO())


@pytest.mark.parametrize(
    "context", [f"{stage}_context" for stage in ("forward", "val_step", "test_step", "predict_step")]
)
@pytest.mark.parametrize(
    "plugin",
    [
        mp.AutocastPrecision("bf16-mixed"),
        mp.MasterWeightsPrecision("bf16-true"),
        mp.Float8Precision(),
        mp.TF32Precision(),
    ],
    ids=lambda plugin: type(plugin).__name__,
)
def test_a_context_outside_of_a_trainers_run_is_refused(plugin: Any, context: str) -> None:
    """Without a Trainer the plugin knows neither device nor model, and would cast nothing, or for another device."""
    message = (
        rf"^{type(plugin).__name__} is a plugin for lightning\.pytorch\.Trainer and has no context outside of"
        r" a Trainer's run, as under Fabric\. With Fabric use Fabric\(precision=\.\.\.\)"
    )
    with pytest.raises(MisconfigurationException, match=message):
        getattr(plugin, context)()


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
@pytest.mark.parametrize("setup", ["setup", "setup_module"])
@pytest.mark.parametrize("make_module", [lambda: nn.Linear(2, 2), Regression], ids=["nn.Module", "LightningModule"])
def test_fabric_is_told_what_to_use(make_module: Callable[[], nn.Module], setup: str, precision: str) -> None:
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[mp.AutocastPrecision(precision)])
    message = (
        r"AutocastPrecision is a plugin for lightning\.pytorch\.Trainer.*With Fabric use Fabric\(precision=\.\.\.\)"
        r" and, for fp16, MixedPrecision\('16-mixed', device, scaler=lightning_mp\.LossScaler\(\)\) from"
        r" lightning\.fabric\.plugins"
    )
    with pytest.raises(MisconfigurationException, match=message) as error:
        getattr(fabric, setup)(make_module())
    assert "\n" not in str(error.value)


OVERFLOWS = frozenset({1, 2})
SCALE = 2.0**10
MAX_NORM = 0.5


def by_hand(scaler: torch.amp.GradScaler) -> list[Tensor]:
    """The loop of torch's AMP examples."""
    module = Regression(overflows=OVERFLOWS)
    optimizer = adamw(module.parameters())
    for index, batch in enumerate(regression_batches(8)):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = module.training_step(batch, index)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(module.parameters(), MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
    return weights(module)


def by_fabric(scaler: torch.amp.GradScaler) -> list[Tensor]:
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[FabricMixedPrecision("16-mixed", "cpu", scaler=scaler)])
    module = Regression()
    model, optimizer = fabric.setup(module.net, adamw(module.parameters()))
    for index, (x, y) in enumerate(regression_batches(8)):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        fabric.backward(loss * torch.inf if index in OVERFLOWS else loss)
        fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM, error_if_nonfinite=False)
        optimizer.step()
    return weights(module)


def by_stock_plugin(scaler: torch.amp.GradScaler) -> list[Tensor]:
    module = Regression(overflows=OVERFLOWS)
    plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    fit(module, regression_batches(8), plugin=plugin, gradient_clip_val=MAX_NORM)
    return weights(module)


def by_pytorch_lightning(scaler: torch.amp.GradScaler) -> list[Tensor]:
    module = OtherModule()
    plugin = OtherMixedPrecision("16-mixed", "cpu", scaler=scaler)
    other_trainer(plugins=[plugin], gradient_clip_val=MAX_NORM).fit(module, loader(regression_batches(8)))
    return weights(module)


@pytest.mark.parametrize("train", [by_hand, by_fabric, by_stock_plugin, by_pytorch_lightning])
def test_loss_scaler_stands_in_for_grad_scaler_anywhere(train: Callable[[torch.amp.GradScaler], list[Tensor]]) -> None:
    """Bit for bit the weights and the scale of torch's own loop, two skipped steps and one growth included."""
    reference = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=4)
    expected = by_hand(reference)
    scaler = mp.LossScaler("cpu", init_scale=SCALE, growth_interval=4)
    assert all(torch.equal(a, b) for a, b in zip(train(scaler), expected, strict=True))
    assert scaler.get_scale() == reference.get_scale() == SCALE / 4 * 2


@pytest.mark.parametrize("flag", ["16-mixed", "bf16-mixed", "32-true"])
def test_precision_besides_the_plugin_is_refused_by_lightning(flag: str) -> None:
    """Explained in README: leave `precision=` out."""
    message = rf"Received both `precision={flag}` and `plugins=AutocastPrecision\('16-mixed'\)`\. Choose one"
    with pytest.raises(ValueError, match=message):
        quiet_trainer(precision=flag, plugins=[mp.AutocastPrecision("16-mixed")])
