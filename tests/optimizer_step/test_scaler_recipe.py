"""torch's public recipe (unscale_, clip, step, update) works through the plugins or raises as torch does."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from small_models import Regression, fit, fused_adamw, regression_batches, sgd, weights
from torch import Tensor, nn

from lightning_mp import AutocastPrecision, LossScaler, MasterWeightsPrecision, OverflowMonitor

SCALE = 1024.0
BATCHES = 5
OVERFLOW = 2
MAX_NORM = 0.1

SCALERS: dict[str, Callable[[], torch.amp.GradScaler]] = {
    "torch": lambda: torch.amp.GradScaler("cpu", init_scale=SCALE),
    "ours": lambda: LossScaler("cpu", init_scale=SCALE),
}


class Recipe(Regression):
    """The recipe in manual optimization, written in several ways."""

    automatic_optimization = False

    def __init__(self, way: str, optimizer: Any = sgd, **arguments: Any) -> None:
        super().__init__(optimizer, **arguments)
        self.way = way

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer, scaler = self.optimizers(), self.trainer.precision_plugin.scaler
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        unscales = {"plugin": optimizer.optimizer, "wrapper": optimizer, "scaler": optimizer.optimizer}
        scaler.unscale_(unscales[self.way])
        nn.utils.clip_grad_norm_(self.parameters(), MAX_NORM)
        if self.way == "scaler":
            scaler.step(optimizer.optimizer)
            scaler.update()
        else:
            optimizer.step()


@pytest.mark.parametrize("optimizer", [sgd, fused_adamw], ids=["sgd", "fused"])
@pytest.mark.parametrize("scaler", SCALERS)
@pytest.mark.parametrize("way", ["plugin", "wrapper", "scaler"])
def test_the_recipe_trains_as_in_a_plain_loop(way: str, scaler: str, optimizer: Any) -> None:
    batches = regression_batches(BATCHES)
    reference = Regression(optimizer, overflows={OVERFLOW})
    stepping, plain = optimizer(reference.parameters()), torch.amp.GradScaler("cpu", init_scale=SCALE)
    for index, batch in enumerate(batches):
        stepping.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = reference.training_step(batch, index)
        plain.scale(loss).backward()
        plain.unscale_(stepping)
        nn.utils.clip_grad_norm_(reference.parameters(), MAX_NORM)
        plain.step(stepping)
        plain.update()

    module, plugin = (
        Recipe(way, optimizer, overflows={OVERFLOW}),
        AutocastPrecision("16-mixed", scaler=SCALERS[scaler]()),
    )
    fit(module, batches, plugin=plugin)
    assert plugin.scaler is not None
    assert plugin.scaler.get_scale() == plain.get_scale() == SCALE / 2
    torch.testing.assert_close(weights(module), weights(reference), rtol=1e-5, atol=1e-7)


def test_what_unscaling_has_found_counts_although_it_was_clipped_away() -> None:
    class Clamps(Recipe):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(Regression.training_step(self, batch, batch_idx))
            self.trainer.precision_plugin.scaler.unscale_(optimizer.optimizer)
            for p in self.parameters():
                p.grad.nan_to_num_(0.0, 0.0, 0.0)
            optimizer.step()

    monitor = OverflowMonitor()
    plugin = AutocastPrecision("16-mixed", scaler=SCALERS["ours"]())
    fit(Clamps("plugin", overflows={1}), regression_batches(3), monitor, plugin=plugin)
    assert monitor.skipped_steps == 1


@pytest.mark.parametrize("scaler", SCALERS)
@pytest.mark.parametrize("hook", ["on_before_optimizer_step", "configure_gradient_clipping"])
def test_unscaling_in_a_hook_raises_as_torch_does(hook: str, scaler: str) -> None:
    """Gradients are true there already."""

    def unscales(self: Any, optimizer: Any, *_: Any, **__: Any) -> None:
        self.trainer.precision_plugin.scaler.unscale_(optimizer)

    module = type("Unscales", (Regression,), {hook: unscales})(sgd)
    plugin = AutocastPrecision("16-mixed", scaler=SCALERS[scaler]())
    with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called on this optimizer since the last"):
        fit(module, regression_batches(2), plugin=plugin)


def test_a_step_by_the_scaler_in_a_hook_raises_as_torch_does() -> None:
    class Steps(Regression):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.trainer.precision_plugin.scaler.step(optimizer)

    plugin = AutocastPrecision("16-mixed", scaler=SCALERS["ours"]())
    with pytest.raises(RuntimeError, match=r"^step\(\) has already been called since the last update\(\): .* a hook"):
        fit(Steps(sgd), regression_batches(2), plugin=plugin)


def test_unscaling_after_the_step_raises_as_torch_does() -> None:
    class After(Recipe):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            super().training_step(batch, batch_idx)
            self.trainer.precision_plugin.scaler.unscale_(self.optimizers().optimizer)

    plugin = AutocastPrecision("16-mixed", scaler=SCALERS["ours"]())
    with pytest.raises(RuntimeError, match=r"unscale_\(\) is being called after step\(\)"):
        fit(After("plugin"), regression_batches(2), plugin=plugin)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")  # once per process
def test_a_hook_that_looks_leaves_nothing_behind_when_nobody_had_a_gradient() -> None:
    """The next step unscales: that gradients were true concerned those of this step."""

    class Looks(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx == 0 else super().training_step(batch, batch_idx)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            """Looks."""

    module, reference = Looks(sgd), Regression(sgd)
    batches = regression_batches(3)
    fit(module, batches, plugin=AutocastPrecision("16-mixed", scaler=SCALERS["ours"]()))
    fit(reference, batches[1:], plugin=AutocastPrecision("16-mixed", scaler=SCALERS["ours"]()))
    torch.testing.assert_close(weights(module), weights(reference), rtol=1e-6, atol=1e-8)


# -- steps past the plugin ---------------------------------------------------------------------------------------------


class PastThePlugin(Regression):
    def optimizer_step(self, epoch: Any, batch_idx: Any, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        optimizer.optimizer.step()


class ManualPast(Regression):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class Wrapping(torch.optim.Optimizer):
    """Holds the optimizer that steps for it and shares its groups, as implementations of SAM do."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner
        self.param_groups = inner.param_groups

    def second_step(self) -> None:
        self.inner.step()


class ManualInner(ManualPast):
    """Steps by a method that nobody but the optimizer knows."""

    def configure_optimizers(self) -> Any:
        return Wrapping(self.make_optimizer(self.parameters()))

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(Regression.training_step(self, batch, batch_idx))
        optimizer.optimizer.second_step()


@pytest.mark.parametrize("optimizer", [sgd, fused_adamw], ids=["sgd", "fused"])
@pytest.mark.parametrize("module", [PastThePlugin, ManualPast, ManualInner])
@pytest.mark.parametrize(
    "plugin",
    [
        lambda: AutocastPrecision("16-mixed", scaler=LossScaler("cpu", init_scale=SCALE)),
        lambda: MasterWeightsPrecision("16-true", scaler=LossScaler("cpu", init_scale=SCALE)),
    ],
    ids=["autocast", "masters"],
)
def test_a_step_of_scaled_gradients_past_the_plugin_is_refused_before_it_changes_a_weight(
    plugin: Any, module: Any, optimizer: Any
) -> None:
    made = module(optimizer)
    before = weights(made)
    with pytest.raises(
        RuntimeError,
        match=r"\w+\.step\(\) was called on the optimizer itself, bypassing \w+\('16-\w+'\): its gradients are still"
        r" scaled by 1024, unchecked and unclipped\. Call step\(\) on what self\.optimizers\(\) returns",
    ):
        fit(made, regression_batches(2), plugin=plugin())
    for now, then in zip(weights(made), before, strict=True):
        assert torch.equal(now.float(), then.to(now.dtype).float())


def test_without_a_scale_a_step_past_the_plugin_is_warned_about() -> None:
    with pytest.warns(
        UserWarning, match=r"SGD\.step\(\) was called on the optimizer itself, bypassing AutocastPrecision"
    ):
        fit(ManualPast(sgd), regression_batches(2), plugin=AutocastPrecision("bf16-mixed"))


def test_steps_of_other_modules_are_nobodys_business() -> None:
    """Neither those of an optimizer of other weights in the same run, nor any once the run has ended."""
    other = nn.Linear(2, 2)

    class TrainsAnother(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            other(torch.ones(2)).sum().backward()
            sgd(other.parameters()).step()

    module, before = Regression(sgd), other.weight.detach().clone()
    plugin = AutocastPrecision("16-mixed", scaler=SCALERS["ours"]())
    trainer = fit(module, regression_batches(2), TrainsAnother(), plugin=plugin)
    assert not torch.equal(other.weight, before)
    trainer.optimizers[0].step()


def test_a_step_that_only_makes_state_is_no_step() -> None:
    """torch makes an optimizer's state so, with zero gradients and a learning rate of zero, to load a checkpoint."""

    class MakesState(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            (optimizer,) = trainer.optimizers
            group = optimizer.param_groups[0]
            for p in group["params"]:
                p.grad = torch.zeros_like(p)
            learning_rate, group["lr"] = group["lr"], 0.0
            optimizer.step(closure=None)
            group["lr"] = learning_rate
            optimizer.zero_grad(set_to_none=True)

    plugin = AutocastPrecision("16-mixed", scaler=SCALERS["ours"]())
    trainer = fit(Regression(sgd), regression_batches(2), MakesState(), plugin=plugin)
    assert trainer.global_step == 2


# -- manual optimization -----------------------------------------------------------------------------------------------


class TwoRates(pl.LightningModule):
    """One optimizer steps in each batch, the other in each fourth, over a gradient that it has added up."""

    automatic_optimization = False

    def __init__(self, optimizer: Any, bad_batches: Sequence[int] = ()) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.make_optimizer, self.bad_batches = optimizer, bad_batches
        self.fast, self.slow = nn.Linear(8, 1), nn.Linear(8, 1)
        self.windows: list[list[Tensor]] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        fast, slow = self.optimizers()
        x, y = batch
        loss = nn.functional.mse_loss(self.fast(x).float(), y.float())
        fast.zero_grad()
        self.manual_backward(loss * torch.inf if batch_idx in self.bad_batches else loss)
        fast.step()
        self.manual_backward(nn.functional.mse_loss(self.slow(x).float(), y.float()) / 4)
        if batch_idx % 4 == 3:
            slow.step()
            slow.zero_grad()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if optimizer.param_groups[0]["params"][0] is self.slow.weight:
            self.windows.append([p.grad.float().clone() for p in self.slow.parameters()])

    def configure_optimizers(self) -> Any:
        return [self.make_optimizer(part.parameters()) for part in (self.fast, self.slow)]


PLUGINS = {"autocast": partial(AutocastPrecision, "16-mixed"), "masters": partial(MasterWeightsPrecision, "16-true")}


def same_windows(runs: Sequence[tuple[TwoRates, int]], plugin: str, scale: float, batches: int, windows: int) -> None:
    """Of two runs, each with its growth interval; scales are powers of two, so that they round nothing in fp32."""
    for module, growth_interval in runs:
        scaler = LossScaler("cpu", init_scale=scale, growth_interval=growth_interval)
        fit(module, regression_batches(batches), plugin=PLUGINS[plugin](scaler=scaler))
    (undisturbed, _), (disturbed, _) = runs
    assert len(undisturbed.windows) == windows
    for window, wanted in zip(disturbed.windows, undisturbed.windows, strict=True):
        torch.testing.assert_close(window, wanted, rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("optimizer", [sgd, fused_adamw], ids=["sgd", "fused"])
@pytest.mark.parametrize("plugin", PLUGINS)
@pytest.mark.parametrize(
    ("bad_batches", "growth_interval"), [((1,), 1000), ((), 2), ((2, 3, 5), 1)], ids=["overflow", "growth", "both"]
)
def test_a_window_is_a_mean_whatever_the_other_optimizer_does_to_the_scale(
    bad_batches: Sequence[int], growth_interval: int, plugin: str, optimizer: Any
) -> None:
    """Promise 4."""
    runs = [(TwoRates(optimizer), 1000), (TwoRates(optimizer, bad_batches), growth_interval)]
    same_windows(runs, plugin, scale=256.0, batches=8, windows=2)


class GradientsBehindTheStep(TwoRates):
    """A batch ends with gradients for a later step of an optimizer that has stepped in it."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        fast, slow = self.optimizers()
        x, y = batch
        if batch_idx > 0:
            slow.step()  # with the last batch's
        slow.zero_grad(set_to_none=batch_idx % 2 == 0)
        self.manual_backward(nn.functional.mse_loss(self.slow(x).float(), y.float()))
        fast.zero_grad()
        self.manual_backward(nn.functional.mse_loss(self.fast(x).float(), y.float()))
        fast.step()


@pytest.mark.parametrize("optimizer", [sgd, fused_adamw], ids=["sgd", "fused"])
@pytest.mark.parametrize("plugin", PLUGINS)
def test_gradients_that_come_after_their_optimizers_step_change_with_the_scale(plugin: str, optimizer: Any) -> None:
    runs = [(GradientsBehindTheStep(optimizer), interval) for interval in (1000, 1)]
    same_windows(runs, plugin, scale=16.0, batches=6, windows=5)


def test_what_a_step_has_used_is_not_touched_by_the_update() -> None:
    """Reading gradients after the step, and no pass over those of a net that waits for nothing."""
    used: list[Tensor] = []

    class Reads(TwoRates):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            if used:
                assert torch.equal(self.fast.weight.grad, used[-1])  # type: ignore[arg-type]
            super().training_step(batch, batch_idx)
            used.append(self.fast.weight.grad.clone())  # type: ignore[union-attr]

    scaler = LossScaler("cpu", init_scale=16.0, growth_interval=1)
    fit(Reads(sgd), regression_batches(6), plugin=AutocastPrecision("16-mixed", scaler=scaler))
    assert len(used) == 6


def test_a_weight_that_waits_for_two_optimizers_changes_with_the_scale_once() -> None:
    class Shared(TwoRates):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            fast, slow, _ = self.optimizers()
            x, y = batch
            fast.zero_grad()
            self.manual_backward(nn.functional.mse_loss(self.fast(x).float(), y.float()))
            fast.step()
            self.manual_backward(nn.functional.mse_loss(self.slow(x).float(), y.float()))
            if batch_idx == 3:
                slow.step()

        def configure_optimizers(self) -> Any:
            return [sgd(self.fast.parameters()), sgd(self.slow.parameters()), sgd(self.slow.parameters())]

    same_windows([(Shared(sgd), 1000), (Shared(sgd), 1)], "autocast", scale=16.0, batches=4, windows=1)
