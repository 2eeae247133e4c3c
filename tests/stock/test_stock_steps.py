"""What torch's scaler and Lightning's precision plugins make of an optimizer step, with ours beside each.

A test that fails here says that upstream has changed: then rewrite the row of docs/defects.md that it names.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from gradient_counter import CountGradientTraffic
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.plugins.precision import FSDPPrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import ModelParallelStrategy
from small_models import LIGHTNING_27, Regression, fit, fused_adamw, quiet_trainer, regression_batches, sgd, weights
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from lightning_mp import AutocastPrecision, LossScaler, MasterWeightsPrecision

SCALE = 1024.0
PLUGINS: dict[str, Callable[[], Precision]] = {
    "stock": lambda: MixedPrecision("16-mixed", "cpu", GradScaler("cpu", init_scale=SCALE)),
    "ours": lambda: AutocastPrecision("16-mixed", scaler=LossScaler(init_scale=SCALE)),
}


def both(measure: Callable[[Precision], Any]) -> tuple[Any, Any]:
    """Of Lightning's plugin and of ours."""
    return measure(PLUGINS["stock"]()), measure(PLUGINS["ours"]())


class OneWeight(pl.LightningModule):
    """A weight of 1 whose gradient is the batch; SGD with a rate of 1, so that it tells what was stepped with."""

    fused = False

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        return self.weight * batch

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0, fused=self.fused)


def moved(module: OneWeight, plugin: Precision, batches: list[float], **arguments: Any) -> float:
    """How far the weight went down."""
    fit(module, [torch.tensor(value) for value in batches], plugin=plugin, **arguments)
    return 1.0 - module.weight.item()


def test_a_skipped_step_advances_the_learning_rate() -> None:
    """D07."""

    def rates(plugin: Precision) -> tuple[list[float], int]:
        module = Regression(sgd, scheduler=lambda o: LambdaLR(o, lambda step: 0.5**step), overflows=(1,))
        trainer = fit(module, regression_batches(4), plugin=plugin)
        return [rate / 1e-2 for rate in module.learning_rates], trainer.global_step

    stock, ours = both(rates)
    assert stock == (pytest.approx([1, 0.25, 0.125]), 4)
    assert ours == (pytest.approx([1, 0.5, 0.25]), 4)


@contextmanager
def noted_averages(monkeypatch: pytest.MonkeyPatch, module: Regression) -> Iterator[list[int]]:
    """How many steps had been made when an average was taken."""
    found: list[int] = []
    update = AveragedModel.update_parameters

    def noting(average: AveragedModel, model: nn.Module) -> None:
        found.append(len(module.learning_rates))
        update(average, model)

    with monkeypatch.context() as patch:
        patch.setattr(AveragedModel, "update_parameters", noting)
        yield found


@pytest.mark.parametrize(("every", "stock", "ours"), [(1, [1, 1, 2, 3], [1, 2, 3]), (2, [1, 2], [1, 3])])
def test_weights_are_averaged_by_attempts(
    every: int, stock: list[int], ours: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """D08, and D58 where every second step is averaged, from the first on. The second of four attempts is skipped."""

    def averages(plugin: Precision) -> list[int]:
        module = Regression(sgd, overflows=(1,))
        with noted_averages(monkeypatch, module) as found:
            average = EMAWeightAveraging(decay=0.5, update_every_n_steps=every)
            fit(module, regression_batches(4), average, plugin=plugin)
        return found

    assert both(averages) == (stock, ours)


class TwoOptimizers(pl.LightningModule):
    """The first one's gradient is infinite, the second one's is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.bad, self.good = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()))

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.manual_backward(self.bad * torch.inf + self.good)
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD([weight], lr=1.0) for weight in (self.bad, self.good)]


def test_the_second_optimizer_is_unscaled_by_another_scale() -> None:
    """D09: by the half of the scale that its gradients have."""

    def second(plugin: Precision) -> float:
        module = TwoOptimizers()
        fit(module, [torch.ones(())], plugin=plugin)
        assert module.bad.item() == 1.0
        return 1.0 - module.good.item()

    assert both(second) == (2.0, 1.0)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_manual_optimization_clips_scaled_gradients(algorithm: Any) -> None:
    """D10."""

    class Manual(OneWeight):
        automatic_optimization = False  # type: ignore[assignment]

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            optimizer = self.optimizers()
            self.manual_backward(self.weight * batch)
            self.clip_gradients(optimizer, 0.5, algorithm)  # type: ignore[arg-type]
            optimizer.step()  # type: ignore[union-attr]

    stock, ours = both(lambda plugin: moved(Manual(), plugin, [1.0]))
    assert stock == pytest.approx(0.5 / SCALE, rel=1e-3)
    assert ours == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_clipping_is_refused_with_a_fused_optimizer(precision: Any) -> None:
    """D11."""
    fp16 = precision == "16-mixed"
    stock = MixedPrecision(precision, "cpu", GradScaler("cpu", init_scale=SCALE) if fp16 else None)
    ours = AutocastPrecision(precision, scaler=LossScaler(init_scale=SCALE) if fp16 else None)
    batches = regression_batches(1)
    allowed = LIGHTNING_27 and not fp16
    with nullcontext() if allowed else pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        fit(Regression(fused_adamw), batches, plugin=stock, gradient_clip_val=1.0)
    module = Regression(fused_adamw)
    before = weights(module)
    fit(module, batches, plugin=ours, gradient_clip_val=1.0)
    assert not any(map(torch.equal, weights(module), before))


def test_hooks_see_scaled_gradients_of_a_fused_optimizer() -> None:
    """D12."""

    class Looking(OneWeight):
        fused = True

        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            assert self.weight.grad is not None
            self.seen = self.weight.grad.item()

    def seen(plugin: Precision) -> float:
        module = Looking()
        assert moved(module, plugin, [0.5]) == 0.5
        return module.seen

    assert both(seen) == (0.5 * SCALE, 0.5)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_window_without_a_loss_at_its_end_is_thrown_away() -> None:
    """D13: in fp32 three of four micro-batches are stepped with."""

    class NoneAtTheEnd(OneWeight):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
            return None if batch_idx == 3 else super().training_step(batch, batch_idx)

    def stepped(plugin: Precision) -> float:
        return moved(NoneAtTheEnd(), plugin, [1.0] * 4, accumulate_grad_batches=4)

    assert stepped(Precision()) == 0.75
    assert both(stepped) == (0.0, 0.75)


@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
def test_fsdp_precision_refuses_a_scaler_and_clipping_by_norm_and_keeps_16_bit() -> None:
    """D14, D17, D18, D49."""
    scaler = GradScaler("cpu")
    with pytest.raises(ValueError, match="does not use a scaler"):
        FSDPPrecision("16-mixed", scaler=scaler)  # type: ignore[arg-type]
    stock, ours = FSDPPrecision("16-mixed"), AutocastPrecision("16-mixed", scaler=scaler)
    assert ours.scaler is scaler
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(()))], lr=1.0)
    with pytest.raises(pl.utilities.exceptions.MisconfigurationException, match="is currently not supported"):
        stock.clip_gradients(optimizer, 1.0)
    stocks, config = stock.mixed_precision_config, ours.mixed_precision_config
    assert (stocks.reduce_dtype, stocks.buffer_dtype) == (torch.float16, torch.float16)
    assert (config.reduce_dtype, config.buffer_dtype) == (torch.float32, torch.float32)
    assert stock.forward_context().device == "cuda"  # type: ignore[attr-defined]
    assert FSDPPrecision("16-true").scaler is None


def test_model_parallel_strategy_refuses_16_mixed() -> None:
    """D19: the plugin of the same precision is accepted."""
    with pytest.raises(ValueError, match="does not support .*'16-mixed'"):
        quiet_trainer(strategy=ModelParallelStrategy(), precision="16-mixed")
    trainer = quiet_trainer(strategy=ModelParallelStrategy(), plugins=[PLUGINS["ours"]()])
    assert isinstance(trainer.precision_plugin, AutocastPrecision)


def test_autocast_casts_a_weight_at_every_use() -> None:
    """D22: all four in both forwards; ours as well, for exactness. Lightning 2.7 casts them once per step."""

    class Twice(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.net(batch[0])
            return super().training_step(batch, batch_idx)

    def casts(plugin: Precision) -> int:
        module = Twice()
        counter = CountGradientTraffic(module)
        fit(module, regression_batches(3), counter, plugin=plugin)
        return counter.rows[-2].weight_casts

    assert both(casts) == (4 if LIGHTNING_27 else 2 * 4, 2 * 4)


@pytest.mark.skipif(not LIGHTNING_27, reason="Lightning 2.6 casts at every use; 2.7 (PR 21616) once per step")
def test_casts_are_kept_while_a_step_changes_its_weights() -> None:
    """D63: the second of two forwards has the old weight, and ``torch.no_grad`` is no class while a step runs."""

    class Changing(OneWeight):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1, 1))

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.is_a_class = isinstance(torch.no_grad, type)
            first = nn.functional.linear(batch, self.weight)
            self.weight.data += 1.0
            return first + nn.functional.linear(batch, self.weight)

    def found(plugin: Precision) -> tuple[float, bool]:
        module = Changing()
        losses: list[float] = []
        module.on_train_batch_end = lambda outputs, *_: losses.append(float(outputs["loss"]))  # type: ignore[method-assign]
        fit(module, [torch.ones(1, 1)], plugin=plugin)
        return losses[0], module.is_a_class

    assert found(MixedPrecision("bf16-mixed", "cpu")) == (2.0, False)
    assert found(AutocastPrecision("bf16-mixed")) == (3.0, True)


def test_another_plugins_scale_is_lost_on_resume(tmp_path: Any) -> None:
    """D23: the state is stored under the name of the plugin's class."""

    class Renamed(MixedPrecision):
        pass

    trainer = fit(Regression(overflows=(0,)), regression_batches(2), plugin=PLUGINS["stock"]())
    trainer.save_checkpoint(tmp_path / "stock.ckpt")

    def scale(plugin: Any) -> float:
        fit(Regression(), regression_batches(2), plugin=plugin, max_epochs=2, ckpt_path=tmp_path / "stock.ckpt")
        return float(plugin.scaler.get_scale())

    assert scale(Renamed("16-mixed", "cpu", GradScaler("cpu", init_scale=SCALE))) == SCALE
    assert scale(PLUGINS["ours"]()) == SCALE / 2


def test_a_module_that_calls_the_closure_itself_is_never_stepped() -> None:
    """D48."""

    class OwnStep(OneWeight):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            optimizer_closure()
            optimizer.step()

    assert both(lambda plugin: moved(OwnStep(), plugin, [0.25] * 2)) == (0.0, 0.5)


@contextmanager
def nan_in_fresh_memory() -> Iterator[None]:
    """What torch leaves uninitialised is NaN, and not by chance the zeros of a new page."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_momentum_of_a_fused_optimizer_is_uninitialised_after_a_skipped_first_step() -> None:
    """D47."""

    def trained(scaler: GradScaler) -> Tensor:
        weight = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([weight], lr=0.5, momentum=0.9, fused=True)
        for factor in (torch.inf, 1.0):
            optimizer.zero_grad()
            scaler.scale((weight * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        return weight.detach()

    with nan_in_fresh_memory():
        assert trained(GradScaler("cpu", init_scale=8.0)).isnan().all()
        assert trained(LossScaler("cpu", init_scale=8.0)).tolist() == [0.5] * 3


def test_clipping_by_an_infinite_norm_makes_nan_and_zeros_of_gradients() -> None:
    """D52: of every one that is infinite, and zero of the finite ones. Here such a step is skipped."""
    gradients = [torch.ones(2), torch.tensor([torch.inf])]
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    nn.utils.clip_grad_norm_(parameters, 1.0)
    assert [p.grad.tolist() for p in parameters] == [[0.0, 0.0], [pytest.approx(torch.nan, nan_ok=True)]]  # type: ignore[union-attr]
    assert moved(OneWeight(), PLUGINS["ours"](), [torch.inf], gradient_clip_val=1.0) == 0.0


def test_gradients_of_the_last_step_live_through_the_next_forward() -> None:
    """D64. Lightning clears them between forward and backward."""

    def held(plugin: Precision) -> list[int]:
        module, found = Regression(), []
        module.net.register_forward_hook(lambda *_: found.append(sum(p.grad is not None for p in module.parameters())))
        fit(module, regression_batches(3), plugin=plugin)
        return found

    assert both(held) == ([0, 4, 4], [0, 0, 0])


def test_a_weight_that_is_used_several_times_is_kept_several_times() -> None:
    """D65. Lightning 2.6 turned torch's cache of casts off (#21611); 2.7 keeps one, at the price of D63."""

    class Unrolled(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            kept: dict[int, Tensor] = {}

            def keep(tensor: Tensor) -> Tensor:
                if tensor.dtype == torch.bfloat16 and tensor.shape == (8, 8):
                    kept[tensor.untyped_storage().data_ptr()] = tensor
                return tensor

            x, square = batch[0], self.net[0].weight.new_zeros(8, 8).requires_grad_()
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                for _ in range(4):
                    x = nn.functional.linear(x, square).tanh() + batch[0]
            self.copies = len(kept)
            return super().training_step([x, batch[1]], batch_idx)

    module = Unrolled()
    fit(module, regression_batches(1), plugin=MixedPrecision("bf16-mixed", "cpu"))
    assert module.copies == (1 if LIGHTNING_27 else 3)


def test_losses_and_tables_of_16_bit_weights_have_three_digits() -> None:
    """D68: under Lightning's plugin the default dtype is 16 bit while a step runs; under masters it stays fp32."""

    class Seeing(Regression):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
            self.positions = torch.arange(4_096) * torch.tensor(1.0)

    def seen(plugin: Precision) -> tuple[torch.dtype, torch.dtype, bool]:
        module, batches = Seeing(), regression_batches(1)
        trainer = quiet_trainer(plugins=[plugin])
        trainer.validate(module, DataLoader(batches, batch_size=None), verbose=False)  # type: ignore[arg-type]
        exact = torch.equal(module.positions.long(), torch.arange(4_096))
        return module.loss.dtype, module.positions.dtype, exact

    assert seen(HalfPrecision("bf16-true")) == (torch.bfloat16, torch.bfloat16, False)
    assert seen(MasterWeightsPrecision("bf16-true")) == (torch.float32, torch.float32, True)
