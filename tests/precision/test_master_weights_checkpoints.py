"""MasterWeightsPrecision and checkpoints: exact resuming, and from and into runs of other precisions."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import small_models
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging, WeightAveraging
from master_loops import DTYPES, OPTIMIZERS, SCALE, master_weights, masters_of
from small_models import Regression, adamw, at, loader, quiet_trainer, regression_batches, saving, weights
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from lightning_mp import LossScaler

BATCHES = regression_batches(4)


def fit(plugins: list[Any], module: pl.LightningModule, epochs: int, **arguments: Any) -> pl.Trainer:
    """An epoch has four steps."""
    return small_models.fit(module, BATCHES, plugins=plugins, max_epochs=epochs, **arguments)


def saves_first_epoch(path: Path) -> pl.Callback:
    return at(saving(path), "on_train_epoch_end", call=1)


def everything(trainer: pl.Trainer) -> list[Tensor]:
    state = trainer.optimizers[0].state_dict()["state"]
    tensors = [v for i in sorted(state) for _, v in sorted(state[i].items()) if isinstance(v, Tensor)]
    return [t.clone() for t in [*tensors, *trainer.lightning_module.parameters()]]


def equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(first, second, strict=True)
    )


@pytest.mark.parametrize("in_fit", [True, False], ids=["saved-in-fit", "saved-after-fit"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw_fused"])
@pytest.mark.parametrize("precision", DTYPES)
def test_resuming_is_bit_exact(precision: str, optimizer: str, in_fit: bool, tmp_path: Path) -> None:
    def ours() -> list[Any]:
        scaler = LossScaler(init_scale=SCALE, growth_interval=3) if precision == "16-true" else None
        return [master_weights(precision, scaler=scaler)]

    make = OPTIMIZERS[optimizer]
    straight = fit(ours(), Regression(make, overflows=(1,)), 2)

    path = tmp_path / "x.ckpt"
    if in_fit:
        fit(ours(), Regression(make, overflows=(1,)), 2, callbacks=[saves_first_epoch(path)])
    else:
        fit(ours(), Regression(make, overflows=(1,)), 1).save_checkpoint(path)
    checkpoint = torch.load(path, weights_only=True)
    assert {v.dtype for v in checkpoint["state_dict"].values()} == {torch.float32}
    resumed = fit(ours(), Regression(make), 2, ckpt_path=path)
    assert equal(everything(straight), everything(resumed))
    if precision == "16-true":
        assert resumed.precision_plugin.scaler.state_dict() == straight.precision_plugin.scaler.state_dict()


class WithoutInit(torch.optim.Optimizer):
    """A wrapper that does not call ``Optimizer.__init__`` (torch_optimizer.Lookahead 0.3)."""

    def __init__(self, parameters: Any) -> None:
        self.optimizer = torch.optim.Adam(parameters)
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state
        self.defaults = self.optimizer.defaults

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state


class Unhooked(Regression):
    """No hook on its optimizer, which may have no room for one."""

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.parameters())


@pytest.mark.parametrize("precision", DTYPES)
def test_resuming_an_optimizer_that_has_none_of_torchs_hooks_is_bit_exact(precision: str, tmp_path: Path) -> None:

    def ours() -> list[Any]:
        scaler = LossScaler(init_scale=SCALE) if precision == "16-true" else None
        return [master_weights(precision, scaler=scaler)]

    straight = fit(ours(), Unhooked(WithoutInit), 2)
    fit(ours(), Unhooked(WithoutInit), 1).save_checkpoint(tmp_path / "x.ckpt")
    resumed = fit(ours(), Unhooked(WithoutInit), 2, ckpt_path=tmp_path / "x.ckpt")
    assert equal(masters_of(straight), masters_of(resumed))
    assert equal(everything(straight), everything(resumed))


class Validated(Regression):
    """Lightning lends the module its average for each validation."""

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.training_step(batch, batch_idx)


class AverageOfMasters(pl.Callback):
    """By hand, of the masters after each step."""

    averages: list[Tensor] | None = None

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        masters = masters_of(trainer)
        if self.averages is None:
            self.averages = masters
        for average, master in zip(self.averages, masters, strict=True):
            average.lerp_(master, 0.001)


@pytest.mark.parametrize("make", [lambda m: m, lambda m: m.bfloat16()], ids=["32 bit at first", "16 bit at first"])
@pytest.mark.parametrize(
    "averaging",
    [lambda: EMAWeightAveraging(decay=0.999), lambda: WeightAveraging(multi_avg_fn=get_ema_multi_avg_fn(0.999))],
    ids=["one by one", "all at once"],
)
@pytest.mark.parametrize("precision", DTYPES)
def test_an_average_is_one_of_masters_and_outlasts_validations(
    precision: str, averaging: Any, make: Any, tmp_path: Path
) -> None:
    """16 bit would round away a thousandth of the distance, and did so at every validation."""
    by_hand = AverageOfMasters()
    callbacks = [averaging(), by_hand, saves_first_epoch(tmp_path / "x.ckpt")]
    trainer = quiet_trainer(
        plugins=[master_weights(precision)], max_epochs=1, val_check_interval=1, callbacks=callbacks
    )
    trainer.fit(make(Validated()), loader(BATCHES), loader(BATCHES))
    saved = torch.load(tmp_path / "x.ckpt", weights_only=False)["state_dict"]
    assert by_hand.averages is not None
    for (name, value), expected in zip(saved.items(), by_hand.averages, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-7, msg=name)
    assert not {"on_validation_epoch_start", "on_validation_epoch_end"} & set(vars(callbacks[0]))


def test_stochastic_weight_averaging_of_16_bit_weights_is_in_fp32() -> None:
    class Dtypes(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            self.found = {p.dtype for p in averaging.state_dict()["average_model_state"].values()}

    averaging, dtypes = StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1), Dtypes()
    fit([master_weights()], Regression().bfloat16(), 3, callbacks=[averaging, dtypes])
    assert dtypes.found == {torch.float32}


def test_a_run_with_averaged_weights_resumes(tmp_path: Path) -> None:
    def averaging() -> EMAWeightAveraging:
        return EMAWeightAveraging(decay=0.9)

    straight = fit([master_weights()], Regression(), 2, callbacks=[averaging()])
    fit([master_weights()], Regression(), 2, callbacks=[averaging(), saves_first_epoch(tmp_path / "x.ckpt")])
    resumed = fit([master_weights()], Regression(), 2, ckpt_path=tmp_path / "x.ckpt", callbacks=[averaging()])
    assert equal(masters_of(straight), masters_of(resumed))
    assert equal(weights(straight.lightning_module), weights(resumed.lightning_module))


class TrainedLate(Regression):
    """The first layer is trained from the second epoch on: in the optimizer all the time, or added to it then."""

    def __init__(self, *, added: bool, resumed: bool = False) -> None:
        super().__init__(adamw)
        self.added, self.resumed = added, resumed
        self.net[0].requires_grad_(False)
        self.dtypes: set[torch.dtype | None] = set()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw((self.net[2] if self.added else self).parameters())

    def add(self) -> None:
        if self.added:
            self.trainer.optimizers[0].add_param_group({"params": list(self.net[0].parameters())})

    def on_fit_start(self) -> None:
        if self.resumed:  # before the optimizer's state is read, and still frozen, as BaseFinetuning does
            self.add()

    def on_train_epoch_start(self) -> None:
        if self.current_epoch >= 1:
            self.net[0].requires_grad_(True)
        if self.current_epoch == 1 and not self.resumed:
            self.add()

    def on_after_backward(self) -> None:
        self.dtypes |= {p.grad.dtype for p in self.net[0].parameters() if p.grad is not None}


@pytest.mark.parametrize("fp32_gradients", [False, True])
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("precision", DTYPES)
def test_parameters_trained_late_have_masters_from_then_on(
    precision: str, added: bool, fp32_gradients: bool, tmp_path: Path
) -> None:
    path = tmp_path / "x.ckpt"

    def ours() -> list[Any]:
        return [master_weights(precision, fp32_gradients=fp32_gradients)]

    module = TrainedLate(added=added)
    first = fit(ours(), module, 3, callbacks=[at(saving(path), "on_train_epoch_end", call=2)])
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float16
    late = module.net[0].weight
    moments = first.optimizers[0].state[module.net[0].weight]["exp_avg"]
    assert moments.dtype == torch.float32
    assert module.dtypes == {torch.float32 if fp32_gradients else dtype}
    assert {p.grad_dtype for p in module.parameters()} == {torch.float32}, "after the fit"

    resumed = TrainedLate(added=added, resumed=True)
    second = fit(ours(), resumed, 3, ckpt_path=path)
    assert torch.equal(late, resumed.net[0].weight)
    assert torch.equal(moments, second.optimizers[0].state[resumed.net[0].weight]["exp_avg"])
