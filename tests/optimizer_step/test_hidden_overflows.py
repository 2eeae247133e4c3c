"""No step under a loss scale does nothing in silence: hidden overflows, unscaled losses, cleared gradients."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gloo import run_same_ranks as run_ranks
from lightning.pytorch.callbacks import Callback
from small_models import Regression, StepsByHand, adamw, fit, fused_adamw, regression_batches, sgd, weights

from lightning_mp import AutocastPrecision, LossScaler, MasterWeightsPrecision, OverflowMonitor

SCALE = 2.0**16
PLUGINS: dict[str, Callable[[], Any]] = {
    "16-mixed": lambda: AutocastPrecision("16-mixed", scaler=LossScaler("cpu", init_scale=SCALE)),
    "16-mixed, torch's": lambda: AutocastPrecision("16-mixed", scaler=torch.amp.GradScaler("cpu", init_scale=SCALE)),
    "16-true": lambda: MasterWeightsPrecision("16-true", scaler=LossScaler("cpu", init_scale=SCALE)),
}


def clear(parameters: Any) -> None:
    for parameter in parameters:
        parameter.grad = None


def clear_if_not_finite(parameters: Any) -> None:
    parameters = list(parameters)
    if not all(torch.isfinite(p.grad).all() for p in parameters if p.grad is not None):
        clear(parameters)


def fill_with_zeros(parameters: Any) -> None:
    for parameter in parameters:
        parameter.grad.zero_()


def replace_what_is_not_finite(parameters: Any) -> None:
    for parameter in parameters:
        parameter.grad.nan_to_num_(0.0, 0.0, 0.0)


HIDES = [clear_if_not_finite, replace_what_is_not_finite]


class Hides(Regression):
    """Its loss is so large that gradients overflow until the scale has fallen."""

    def __init__(self, optimizer: Any, hide: Any = None) -> None:
        super().__init__(optimizer)
        self.hide = hide

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return 50 * super().training_step(batch, batch_idx)

    def on_after_backward(self) -> None:
        if self.hide is not None:
            self.hide(self.parameters())


class HidingCallback(Callback):
    def __init__(self, hide: Any) -> None:
        self.hide = hide

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self.hide(pl_module.parameters())


class HidesByHand(StepsByHand, Hides):
    pass


@pytest.mark.parametrize("kind", [Hides, HidesByHand], ids=["automatic", "manual"])
@pytest.mark.parametrize("optimizer", [adamw, fused_adamw])
@pytest.mark.parametrize("hide", HIDES)
@pytest.mark.parametrize("precision", PLUGINS)
def test_an_overflow_that_a_hook_hides_is_skipped_as_without_it(
    precision: str, hide: Any, optimizer: Any, kind: Any
) -> None:
    runs = []
    for hidden in (None, hide):
        module, plugin, monitor = kind(optimizer, hidden), PLUGINS[precision](), OverflowMonitor()
        fit(module, regression_batches(20), monitor, plugin=plugin)
        runs.append((monitor.skipped_steps, plugin.scaler.get_scale(), weights(module)))
    (skips, scale, plain), (found_skips, found_scale, found) = runs
    assert skips > 1
    assert (found_skips, found_scale) == (skips, scale)
    assert all(map(torch.equal, found, plain))


def test_one_that_a_callback_hides_in_a_window() -> None:
    runs = []
    for callbacks in ([], [HidingCallback(replace_what_is_not_finite)]):
        module, plugin, monitor = Regression(sgd, overflows={1}), PLUGINS["16-mixed"](), OverflowMonitor()
        fit(module, regression_batches(6), monitor, *callbacks, plugin=plugin, accumulate_grad_batches=3)
        runs.append((monitor.skipped_steps, plugin.scaler.get_scale(), [w.tolist() for w in weights(module)]))
    assert runs[0] == runs[1]
    assert runs[0][0] >= 1


def test_one_that_one_rank_hides_is_skipped_by_both() -> None:
    def rank_(rank: int) -> tuple[int, float, list[Any]]:
        module, monitor = Hides(sgd, clear_if_not_finite if rank == 1 else lambda parameters: None), OverflowMonitor()
        plugin = PLUGINS["16-mixed"]()
        fit(module, regression_batches(40)[rank::2], monitor, plugin=plugin, devices=2, strategy="ddp")
        return monitor.skipped_steps, plugin.scaler.get_scale(), [w.tolist() for w in weights(module)]

    first, second = run_ranks(rank_, 2)
    assert first == second
    assert first[0] > 1


def test_a_gradient_that_is_finite_at_no_scale_ends_with_the_cure() -> None:
    class Forever(Hides):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * torch.inf

    scaler = LossScaler("cpu", init_scale=1.0, min_scale=0.5)
    with pytest.raises(RuntimeError, match=r"none, as on_after_backward has replaced them.*Tensor\.register_hook"):
        fit(Forever(sgd, fill_with_zeros), regression_batches(60), plugin=AutocastPrecision("16-mixed", scaler=scaler))


# -- losses that nobody scaled -----------------------------------------------------------------------------------------


class Raw(Regression):
    """In manual optimization; from batch ``raw_from`` on with ``loss.backward()``."""

    automatic_optimization = False

    def __init__(self, raw_from: int = 0) -> None:
        super().__init__(sgd)
        self.raw_from = raw_from

    def back(self, loss: torch.Tensor, batch_idx: int) -> None:
        if batch_idx >= self.raw_from:
            loss.backward()
        else:
            self.manual_backward(loss)

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.back(super().training_step(batch, batch_idx), batch_idx)
        optimizer.step()


class RawInAClosure(Raw):
    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = Regression.training_step(self, batch, batch_idx)
            self.back(loss, batch_idx)
            return loss

        optimizer.step(closure=closure)


class RawForTheSecond(Raw):
    """As in a GAN: each optimizer has a loss of its own, and only one of them is scaled."""

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net[index].parameters(), lr=1e-2) for index in (0, 2)]

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        for index, optimizer in enumerate(self.optimizers()):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            loss = Regression.training_step(self, batch, batch_idx)
            self.back(loss, batch_idx if index else -1)
            optimizer.step()
            self.untoggle_optimizer(optimizer)


@pytest.mark.parametrize("raw_from", [0, 2])
@pytest.mark.parametrize("kind", [Raw, RawInAClosure, RawForTheSecond])
@pytest.mark.parametrize("precision", PLUGINS)
def test_a_loss_that_was_not_scaled_is_an_error(precision: str, kind: Any, raw_from: int) -> None:
    module, plugin = kind(raw_from), PLUGINS[precision]()
    with pytest.raises(RuntimeError, match=r"SGD come from a loss that was not scaled.*self\.manual_backward\(loss\)"):
        fit(module, regression_batches(6), plugin=plugin)
    assert module.trainer.global_step == raw_from * (1 + (kind is RawForTheSecond)) + (kind is RawForTheSecond)
    assert "scale" not in vars(plugin.scaler)


class OneOverflow(RawForTheSecond):
    """Of the second optimizer, whose gradients are still there in the next backward of the first one."""

    def __init__(self) -> None:
        super().__init__(raw_from=99)
        self.overflows = {3}  # of the losses, two in each batch

    def on_after_backward(self) -> None:
        pass  # it might write gradients, so these are read before it


def test_an_overflow_of_one_optimizer_is_skipped_once() -> None:
    module, monitor, scaler = OneOverflow(), OverflowMonitor(), LossScaler("cpu", init_scale=1024.0)
    fit(module, regression_batches(6), monitor, plugin=AutocastPrecision("16-mixed", scaler=scaler))
    assert (monitor.skipped_steps, scaler.get_scale()) == (1, 512.0)


def test_and_in_the_second_fit_of_a_plugin() -> None:
    plugin = PLUGINS["16-mixed"]()
    fit(Raw(raw_from=9), regression_batches(3), plugin=plugin)
    with pytest.raises(RuntimeError, match="was not scaled"):
        fit(Raw(), regression_batches(3), plugin=plugin)


def test_and_on_every_rank() -> None:
    def rank_(rank: int) -> str:
        with pytest.raises(RuntimeError) as caught:
            fit(Raw(), regression_batches(4)[rank::2], plugin=PLUGINS["16-mixed"](), devices=2, strategy="ddp")
        return str(caught.value)

    assert all("was not scaled" in message for message in run_ranks(rank_, 2))


class ScaledByHand(Raw):
    def back(self, loss: torch.Tensor, batch_idx: int) -> None:
        scaler = self.trainer.precision_plugin.scaler
        for parameter, gradient in zip(
            self.parameters(), torch.autograd.grad(scaler.scale(loss), list(self.parameters())), strict=True
        ):
            parameter.grad = gradient


class MadeLater(Raw):
    """Changes its optimizer in the middle of a batch, after the backward."""

    def back(self, loss: torch.Tensor, batch_idx: int) -> None:
        self.manual_backward(loss)

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.zero_grad()
        self.back(Regression.training_step(self, batch, batch_idx), batch_idx)
        if batch_idx == 2:
            self.trainer.strategy.optimizers = [sgd(self.parameters())]
        self.optimizers().step()


@pytest.mark.parametrize("kind", [ScaledByHand, MadeLater])
@pytest.mark.parametrize("precision", ["16-mixed", "16-mixed, torch's"])
def test_losses_scaled_elsewhere_train_as_before(precision: str, kind: Any) -> None:
    module, reference = kind(), Raw(raw_from=99)
    for trained in (module, reference):
        fit(trained, regression_batches(5), plugin=PLUGINS[precision]())
    torch.testing.assert_close(weights(module), weights(reference), rtol=1e-6, atol=1e-8)


# -- steps without gradients -------------------------------------------------------------------------------------------


class Empties(StepsByHand, Regression):
    """Where no hook of Lightning is called: in ``training_step``, or in a hook on each parameter."""

    def __init__(self, empty: Any, on_parameters: bool) -> None:
        super().__init__(sgd)
        self.empty, self.on_parameters = empty, on_parameters

    def on_fit_start(self) -> None:
        if self.on_parameters:
            for parameter in self.parameters():
                parameter.register_post_accumulate_grad_hook(lambda p: self.empty([p]))

    def manual_backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        super().manual_backward(loss, *args, **kwargs)
        if not self.on_parameters:
            self.empty(self.parameters())


@pytest.mark.parametrize("on_parameters", [False, True], ids=["in the step", "on parameters"])
@pytest.mark.parametrize("empty", [clear, fill_with_zeros])
def test_ten_steps_without_a_gradient_are_told_once(empty: Any, on_parameters: bool) -> None:
    for batches, times in ((30, 1), (9, 0)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(Empties(empty, on_parameters), regression_batches(batches), plugin=PLUGINS["16-mixed"]())
        start = "The last 10 steps of SGD had no gradient, or zeros, at loss scale"
        assert sum(str(warning.message).startswith(start) for warning in caught) == times


@pytest.mark.parametrize(("batches", "times"), [(30, 1), (9, 0)])
@pytest.mark.parametrize("plugin", [AutocastPrecision("bf16-mixed"), MasterWeightsPrecision("bf16-true")], ids=str)
def test_ten_skips_in_a_row_without_a_scale_are_told_once(plugin: Any, batches: int, times: int) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(Regression(overflows=range(1, batches + 1)), regression_batches(batches + 1), plugin=plugin)
    start = "The last 10 steps of AdamW were skipped: gradients were not finite"
    assert sum(str(warning.message).startswith(start) for warning in caught) == times


class Times(Regression):
    factor = 1e-12

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.factor * super().training_step(batch, batch_idx)


class ClearsOverflows(Empties, Times):
    factor = 50.0


@pytest.mark.parametrize(
    ("make", "idle_at", "trains_at"),
    [(lambda: ClearsOverflows(clear_if_not_finite, False), 2.0**24, 1.0), (lambda: Times(sgd), 1.0, 2.0**24)],
    ids=["overflows are cleared", "underflow"],
)
def test_both_causes_of_such_steps_are_named_and_another_scale_tells_them_apart(
    make: Callable[[], Any], idle_at: float, trains_at: float
) -> None:
    for scale, is_idle in ((idle_at, True), (trains_at, False)):
        scaler = LossScaler("cpu", init_scale=scale, growth_interval=1000)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(make(), regression_batches(12), plugin=AutocastPrecision("16-mixed", scaler=scaler))
        found = [text for w in caught if "had no gradient, or zeros, at loss scale" in (text := str(w.message))]
        assert len(found) == is_idle
        for part in ("Remove code that clears or replaces non-finite gradients", "if gradients underflow (zeros at"):
            assert all(part in text for text in found)


@pytest.mark.parametrize(
    ("overflows", "batches", "told"),
    [(range(10), 10, True), (range(3), 3, True), (range(0, 30, 2), 30, True), (range(9), 30, False)],
)
def test_the_monitor_tells_where_most_steps_were_skipped(overflows: Any, batches: int, told: bool) -> None:
    module = Regression(sgd, overflows=overflows)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scaler = LossScaler("cpu", init_scale=2.0**12)
        plugin = AutocastPrecision("16-mixed", scaler=scaler)
        fit(module, regression_batches(batches), OverflowMonitor(), plugin=plugin)
    found = [str(w.message) for w in caught if "optimizer steps were skipped" in str(w.message)]
    assert len(found) == told
    assert not told or f"{len(overflows)} of {batches} optimizer steps" in found[0]
