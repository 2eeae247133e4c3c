"""MasterWeightsPrecision and checkpoints: exact resuming, and from and into runs of other precisions."""

import copy
import pickle
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import small_models
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins.precision import HalfPrecision
from master_loops import KINDS, OPTIMIZERS, SCALE, as_kept, master_weights, masters_of
from small_models import Regression, adamw, loader, quiet_trainer, regression_batches, weights
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from lightning_mp import AutocastPrecision, LossScaler, MasterWeightsPrecision

BATCHES = regression_batches(4)


def fit(plugins: list[Any], module: pl.LightningModule, epochs: int, **arguments: Any) -> pl.Trainer:
    """An epoch has four steps."""
    return small_models.fit(module, BATCHES, plugins=plugins, max_epochs=epochs, **arguments)


class SaveFirstEpoch(pl.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


class AtStart(pl.Callback):
    """Masters, weights and moments when training begins."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        optimizer = trainer.optimizers[0]
        self.weights = weights(pl_module)
        self.moments = [copy.deepcopy(optimizer.state[p]) for p in pl_module.parameters()]
        if isinstance(trainer.precision_plugin, MasterWeightsPrecision):
            self.masters = masters_of(trainer)


def everything(trainer: pl.Trainer) -> list[Tensor]:
    state = trainer.optimizers[0].state_dict()["state"]
    tensors = [v for i in sorted(state) for _, v in sorted(state[i].items()) if isinstance(v, Tensor)]
    return [t.clone() for t in [*tensors, *trainer.lightning_module.parameters()]]


def equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(first, second, strict=True)
    )


@pytest.mark.parametrize("in_fit", [True, False], ids=["saved-in-fit", "saved-after-fit"])
@pytest.mark.parametrize("fp32_checkpoints", [False, True])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw_fused"])
@pytest.mark.parametrize(("precision", "storage"), KINDS)
def test_resuming_is_bit_exact(
    precision: str, storage: str, optimizer: str, fp32_checkpoints: bool, in_fit: bool, tmp_path: Path
) -> None:
    def ours() -> list[Any]:
        scaler = LossScaler(init_scale=SCALE, growth_interval=3) if precision == "16-true" else None
        return [master_weights(precision, storage, fp32_checkpoints=fp32_checkpoints, scaler=scaler)]

    make = OPTIMIZERS[optimizer]
    straight = fit(ours(), Regression(make, overflows=(1,)), 2)

    path = tmp_path / "x.ckpt"
    if in_fit:
        fit(ours(), Regression(make, overflows=(1,)), 2, callbacks=[SaveFirstEpoch(path)])
    else:
        fit(ours(), Regression(make, overflows=(1,)), 1).save_checkpoint(path)
    checkpoint = torch.load(path, weights_only=True)
    assert {v.dtype for v in checkpoint["state_dict"].values()} == (
        {torch.float32} if fp32_checkpoints else {torch.bfloat16 if precision == "bf16-true" else torch.float16}
    )
    resumed = fit(ours(), Regression(make), 2, ckpt_path=path)
    assert equal(everything(straight), everything(resumed))
    if precision == "16-true":
        assert resumed.precision_plugin.scaler.state_dict() == straight.precision_plugin.scaler.state_dict()


class LoadsByItself(torch.optim.Adam):
    """Its ``load_state_dict`` calls none of torch's hooks and casts as torch does (bitsandbytes 0.50)."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        saved = zip(self.param_groups, copy.deepcopy(state_dict["param_groups"]), strict=True)
        self.param_groups = [{**loaded, "params": group["params"]} for group, loaded in saved]
        self.state.clear()
        for index, state in copy.deepcopy(state_dict["state"]).items():
            p = parameters[index]
            self.state[p] = {key: v if key == "step" else v.to(p.dtype) for key, v in state.items()}


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


@pytest.mark.parametrize("make", [LoadsByItself, WithoutInit])
@pytest.mark.parametrize(("precision", "storage"), KINDS)
def test_resuming_an_optimizer_that_does_not_use_torchs_hooks_is_bit_exact(
    make: Any, precision: str, storage: str, tmp_path: Path
) -> None:
    """Masters were dropped without a word, and the run continued from rounded weights."""

    def ours() -> list[Any]:
        scaler = LossScaler(init_scale=SCALE) if precision == "16-true" else None
        return [master_weights(precision, storage, scaler=scaler)]

    straight = fit(ours(), Unhooked(make), 2)
    fit(ours(), Unhooked(make), 1).save_checkpoint(tmp_path / "x.ckpt")
    resumed = fit(ours(), Unhooked(make), 2, ckpt_path=tmp_path / "x.ckpt")
    assert equal(masters_of(straight), masters_of(resumed))
    assert equal(everything(straight), everything(resumed))


def test_an_fp32_run_takes_masters_without_torchs_hooks(tmp_path: Path) -> None:
    first = fit([master_weights()], Regression(LoadsByItself), 1)
    first.save_checkpoint(tmp_path / "x.ckpt")
    spy = AtStart()
    fit([AutocastPrecision("bf16-mixed")], Regression(LoadsByItself), 2, ckpt_path=tmp_path / "x.ckpt", callbacks=[spy])
    assert equal(masters_of(first), spy.weights)


@pytest.mark.parametrize("storage", ["fp32", "remainder"])
def test_the_other_storage_resumes_exactly(storage: str, tmp_path: Path) -> None:
    other = "remainder" if storage == "fp32" else "fp32"
    first = fit([master_weights(storage=storage)], Regression(), 1)
    first.save_checkpoint(tmp_path / "x.ckpt")
    second = fit([master_weights(storage=other)], Regression(), 2, ckpt_path=tmp_path / "x.ckpt")
    third = fit([master_weights(storage=storage)], Regression(), 2, ckpt_path=tmp_path / "x.ckpt")
    assert equal(masters_of(second), masters_of(third))


@pytest.mark.parametrize(("precision", "storage"), KINDS)
def test_a_checkpoint_of_an_fp32_run_goes_on_in_full_precision(precision: str, storage: str, tmp_path: Path) -> None:
    """Masters and moments are what the checkpoint holds, none of it rounded."""
    fp32 = fit([], Regression(), 1)
    fp32.save_checkpoint(tmp_path / "x.ckpt")
    expected = [(p.detach().clone(), copy.deepcopy(fp32.optimizers[0].state[p])) for p in fp32.model.parameters()]

    spy = AtStart()
    warned = pytest.warns(UserWarning, match="holds no loss scale") if precision == "16-true" else nullcontext()
    with warned:
        fit([master_weights(precision, storage)], Regression(), 2, ckpt_path=tmp_path / "x.ckpt", callbacks=[spy])
    for master, moments, (weight, theirs) in zip(spy.masters, spy.moments, expected, strict=True):
        assert torch.equal(master, as_kept(weight, storage))
        assert torch.equal(moments["exp_avg"], theirs["exp_avg"])
        assert torch.equal(moments["exp_avg_sq"], theirs["exp_avg_sq"])


def test_a_16_bit_module_takes_an_fp32_checkpoint_in_full_precision(tmp_path: Path) -> None:
    """The module has been through a fit already, so that Lightning loads the weights into 16 bit."""
    fp32 = fit([], Regression(), 1)
    fp32.save_checkpoint(tmp_path / "x.ckpt")
    expected = weights(fp32.lightning_module)
    module = Regression(lambda p: torch.optim.AdamW(p, lr=1e-2))
    fit([master_weights()], module, 1)

    spy = AtStart()
    fit([master_weights()], module, 2, ckpt_path=tmp_path / "x.ckpt", callbacks=[spy])
    assert equal(spy.masters, expected)


def test_16_bit_weights_without_an_optimizer_are_a_start() -> None:
    half = Regression()
    fit([HalfPrecision("bf16-true")], half, 1)
    module = Regression(lambda p: torch.optim.SGD(p, lr=0.0))
    module.load_state_dict(half.state_dict())
    trainer = fit([master_weights()], module, 1)
    assert equal(masters_of(trainer), [p.float() for p in weights(half)])


def test_a_bf16_true_run_of_lightning_goes_on(tmp_path: Path) -> None:
    half = fit([HalfPrecision("bf16-true")], Regression(), 1)
    half.save_checkpoint(tmp_path / "x.ckpt")
    trainer = fit([master_weights()], Regression(), 2, ckpt_path=tmp_path / "x.ckpt")
    assert {s["exp_avg"].dtype for s in trainer.optimizers[0].state.values()} == {torch.float32}
    assert trainer.global_step == 8


def test_full_weights_are_the_masters_and_load_anywhere(tmp_path: Path) -> None:
    trainer = fit([master_weights(fp32_checkpoints=True)], Regression(), 1)
    masters = masters_of(trainer)
    for weights_only in (False, True):
        trainer.save_checkpoint(tmp_path / "x.ckpt", weights_only=weights_only)
        loaded = torch.load(tmp_path / "x.ckpt", weights_only=True)["state_dict"]
        assert equal(list(loaded.values()), masters)
    assert any(not torch.equal(m, m.bfloat16().float()) for m in masters)

    trainer.save_checkpoint(tmp_path / "full.ckpt")
    for plugins in ([], [AutocastPrecision("bf16-mixed")]):
        spy = AtStart()
        fit(plugins, Regression(), 2, ckpt_path=tmp_path / "full.ckpt", callbacks=[spy])
        assert equal(spy.weights, masters)


def test_a_module_made_in_16_bit_cannot_load_full_weights() -> None:
    plugin = master_weights(fp32_checkpoints=True)
    text = r"Regression was created with 16-bit weights \(net.0.weight.*Create the model in fp32"
    module = Regression()
    with pytest.warns(UserWarning, match=text):
        fit([plugin], module.bfloat16(), 1)
    fit([plugin], module, 1)  # 16 bit from the first fit, with masters


def test_copies_of_a_module_with_full_weights_carry_no_masters() -> None:
    module = Regression(adamw)
    fit([master_weights(fp32_checkpoints=True)], module, 1)
    module.trainer = None
    duplicate = copy.deepcopy(module)
    assert {v.dtype for v in module.state_dict().values()} == {torch.float32}
    assert {v.dtype for v in duplicate.state_dict().values()} == {torch.bfloat16}
    hooks = pickle.dumps(list(module.net.state_dict()) + list(module._state_dict_hooks.values()))
    assert len(hooks) < 2000


def test_averaged_weights_are_not_replaced_by_masters() -> None:
    """An average that was put into the module at the end is what the checkpoint holds."""
    trained: list[Tensor] = []

    class Trained(pl.Callback):
        def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            trained[:] = masters_of(trainer)

    module = Regression(lambda p: torch.optim.SGD(p, lr=0.5))
    averaging = EMAWeightAveraging(decay=0.5)
    fit([master_weights(fp32_checkpoints=True)], module, 2, callbacks=[averaging, Trained()])
    saved = module.state_dict()
    differs = 0
    for (name, value), parameter, master in zip(saved.items(), module.parameters(), trained, strict=True):
        assert torch.equal(value.bfloat16(), parameter), name
        differs += int((value != master).sum())
    assert differs > 10


class Validated(Regression):
    """Lightning lends the module its average for each validation."""

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.training_step(batch, batch_idx)


class AverageOfMasters(SaveFirstEpoch):
    """By hand, of the masters after each step; and what a checkpoint after the first validation has."""

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
@pytest.mark.parametrize(("precision", "storage"), KINDS)
def test_an_average_is_one_of_masters_and_outlasts_validations(
    precision: str, storage: str, averaging: Any, make: Any, tmp_path: Path
) -> None:
    """16 bit would round away a thousandth of the distance, and did so at every validation."""
    by_hand = AverageOfMasters(tmp_path / "x.ckpt")
    callbacks = [averaging(), by_hand]
    trainer = quiet_trainer(
        plugins=[master_weights(precision, storage)], max_epochs=1, val_check_interval=1, callbacks=callbacks
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
    fit([master_weights()], Regression(), 2, callbacks=[averaging(), SaveFirstEpoch(tmp_path / "x.ckpt")])
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


class SaveSecondEpoch(SaveFirstEpoch):
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("fp32_gradients", [False, True])
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize(("precision", "storage"), KINDS)
def test_parameters_trained_late_have_masters_from_then_on(
    precision: str, storage: str, added: bool, fp32_gradients: bool, tmp_path: Path
) -> None:
    path = tmp_path / "x.ckpt"

    def ours() -> list[Any]:
        return [master_weights(precision, storage=storage, fp32_gradients=fp32_gradients)]

    module = TrainedLate(added=added)
    first = fit(ours(), module, 3, callbacks=[SaveSecondEpoch(path)])
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float16
    late = first.precision_plugin._masters.store.get(module.net[0].weight)
    assert not torch.equal(late, late.to(dtype).float()), "fp32 numbers"
    moments = first.optimizers[0].state[module.net[0].weight]["exp_avg"]
    assert moments.dtype == torch.float32
    assert module.dtypes == {torch.float32 if fp32_gradients else dtype}
    assert {p.grad_dtype for p in module.parameters()} == {dtype}, "after the fit"

    resumed = TrainedLate(added=added, resumed=True)
    second = fit(ours(), resumed, 3, ckpt_path=path)
    assert torch.equal(late, second.precision_plugin._masters.store.get(resumed.net[0].weight))
    assert torch.equal(moments, second.optimizers[0].state[resumed.net[0].weight]["exp_avg"])
