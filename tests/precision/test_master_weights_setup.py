"""What MasterWeightsPrecision refuses, and when."""

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.plugins.precision import FSDPPrecision, MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from master_loops import DTYPES, KINDS, master_weights, masters_of
from small_models import Regression, fit, loader, quiet_trainer, regression_batches, weights
from torch import nn

from lightning_mp import LossScaler, MasterWeightsPrecision
from lightning_mp.precision.masters.checks import check_strategy


def test_every_stock_strategy_accepts_it() -> None:
    ours = MasterWeightsPrecision("bf16-true")
    assert isinstance(ours, MixedPrecision)
    assert isinstance(ours, FSDPPrecision)
    config = ours.mixed_precision_config
    assert (config.param_dtype, config.reduce_dtype, config.buffer_dtype) == (
        torch.bfloat16,
        torch.float32,
        torch.float32,
    )


def test_modules_are_made_in_fp32() -> None:
    """Otherwise there would be no true initial weights; Lightning's bf16-true makes them in bf16."""
    ours = MasterWeightsPrecision("bf16-true")
    with ours.module_init_context(), ours.tensor_init_context():
        assert nn.Linear(1, 1).weight.dtype == torch.float32


def test_fp16_has_a_scaler_and_bf16_none() -> None:
    assert isinstance(MasterWeightsPrecision("16-true").scaler, LossScaler)
    assert MasterWeightsPrecision("bf16-true").scaler is None
    own = torch.amp.GradScaler("cpu", init_scale=4.0)
    assert MasterWeightsPrecision("16-true", scaler=own).scaler is own
    assert MasterWeightsPrecision("16-true", scaler=LossScaler("cpu", enabled=False)).scaler is None


def test_lbfgs_under_a_loss_scale_is_refused_at_set_up() -> None:
    module = Regression(torch.optim.LBFGS)
    with pytest.raises(MisconfigurationException, match="cannot be used with LBFGS.*could not be unscaled"):
        fit(module, regression_batches(1), plugin=MasterWeightsPrecision("16-true"))
    assert module.seen_batches == 0


@pytest.mark.parametrize("rewinds", [True, False])
def test_pruning_trains(rewinds: bool) -> None:
    module = Regression()
    pruning = ModelPruning("l1_unstructured", amount=0.5, use_lottery_ticket_hypothesis=rewinds)
    fit(module, regression_batches(2), pruning, plugin=MasterWeightsPrecision("bf16-true"), max_epochs=2)
    zeros = sum(int((p == 0).sum()) for p in module.parameters())
    # Half in the first epoch, half of the rest in the second.
    assert zeros >= 0.7 * sum(p.numel() for p in module.parameters())


def check(strategy: type[Any], **arguments: Any) -> None:
    """Calls the check that ``convert_module`` makes, with a strategy that cannot run here."""
    defaults: dict[str, Any] = {"storage": "fp32", "fp32_gradients": False}
    check_strategy(object.__new__(strategy), **(defaults | arguments))


def test_strategies_that_it_runs_under() -> None:
    check(FSDPStrategy, storage="fp32", fp32_gradients=True)
    check(DDPStrategy)
    check(ModelParallelStrategy, fp32_gradients=True)


def test_fp32_checkpoints_are_taken() -> None:
    assert MasterWeightsPrecision("bf16-true", fp32_checkpoints=True).fp32_checkpoints


class Lazy(Regression):
    def __init__(self, *, in_setup: bool = False) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.LazyLinear(16), nn.GELU(), nn.LazyLinear(1))
        self.in_setup = in_setup

    def setup(self, stage: str) -> None:
        if self.in_setup:
            torch.manual_seed(0)
            with torch.no_grad():
                self.net(torch.zeros(1, 8))


class ValidatedLazy(Lazy):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen = self.net(batch[0]).dtype


@pytest.mark.parametrize(("precision", "storage"), KINDS)
def test_parameters_without_a_shape_train_once_they_have_one(precision: str, storage: str) -> None:
    ends = []
    for module in (Lazy(in_setup=True), Regression()):
        trainer = fit(module, regression_batches(4), plugin=master_weights(precision, storage))
        ends.append(masters_of(trainer))
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
def test_parameters_without_a_shape_can_be_evaluated(precision: Any) -> None:
    module = ValidatedLazy()
    quiet_trainer(plugins=[master_weights(precision)]).validate(module, loader(regression_batches(1)), verbose=False)
    assert module.seen == DTYPES[precision]


def test_a_fit_that_fails_at_set_up_does_not_round_the_weights() -> None:
    """The next try starts from the same weights; also with a mistake in ``configure_optimizers``."""

    def mistake(parameters: Any) -> Any:
        raise KeyError("typo")

    lbfgs = torch.optim.LBFGS
    for precision, optimizer, error in (
        ("16-true", lbfgs, MisconfigurationException),
        ("bf16-true", mistake, KeyError),
    ):
        module = Regression(optimizer)
        before = weights(module)
        with pytest.raises(error):
            fit(module, regression_batches(1), plugin=MasterWeightsPrecision(precision))
        assert all(torch.equal(a, b) for a, b in zip(weights(module), before, strict=True))
        assert {p.dtype for p in module.parameters()} == {torch.float32}
