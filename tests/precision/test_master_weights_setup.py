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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

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


def test_inputs_are_cast_where_they_are_floating_point() -> None:
    ours = MasterWeightsPrecision("16-true")
    batch = {"x": torch.ones(1, dtype=torch.float64), "y": (torch.ones(1, dtype=torch.int64), "name")}
    cast = ours.convert_input(batch)
    assert cast["x"].dtype == torch.float16
    assert cast["y"][0].dtype == torch.int64
    assert cast["y"][1] == "name"


def test_fp16_has_a_scaler_and_bf16_none() -> None:
    assert isinstance(MasterWeightsPrecision("16-true").scaler, LossScaler)
    assert MasterWeightsPrecision("bf16-true").scaler is None
    own = torch.amp.GradScaler("cpu", init_scale=4.0)
    assert MasterWeightsPrecision("16-true", scaler=own).scaler is own
    assert MasterWeightsPrecision("16-true", scaler=LossScaler("cpu", enabled=False)).scaler is None


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "32-true", "bf16"])
def test_an_unknown_precision_is_refused(precision: Any) -> None:
    with pytest.raises(ValueError, match=r"must be one of \('16-true', 'bf16-true'\).*take AutocastPrecision"):
        MasterWeightsPrecision(precision)


def test_an_unknown_storage_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"storage='int8'\) is unknown; it must be one of \('fp32', 'remainder', '24bit'\)"
    ):
        MasterWeightsPrecision("bf16-true", storage="int8")  # type: ignore[arg-type]


@pytest.mark.parametrize("storage", ["remainder", "24bit"])
def test_a_remainder_of_fp16_is_refused(storage: Any) -> None:
    with pytest.raises(MisconfigurationException, match="fp16 has a different exponent. Use storage='fp32', or 'bf16"):
        MasterWeightsPrecision("16-true", storage=storage)


def test_bf16_takes_no_scaler() -> None:
    with pytest.raises(MisconfigurationException, match="takes no scaler, got LossScaler"):
        MasterWeightsPrecision("bf16-true", scaler=LossScaler())


def test_lbfgs_under_a_loss_scale_is_refused_at_set_up() -> None:
    module = Regression(torch.optim.LBFGS)
    with pytest.raises(MisconfigurationException, match="cannot be used with LBFGS.*could not be unscaled"):
        fit(module, regression_batches(1), plugin=MasterWeightsPrecision("16-true"))
    assert module.seen_batches == 0


def test_pruning_that_rewinds_weights_is_refused_and_other_pruning_trains() -> None:
    module = Regression()
    rewinding = ModelPruning("l1_unstructured", amount=0.5)
    with pytest.raises(
        MisconfigurationException, match="use_lottery_ticket_hypothesis=False, or use AutocastPrecision"
    ):
        fit(module, regression_batches(1), rewinding, plugin=MasterWeightsPrecision("bf16-true"))
    assert module.seen_batches == 0
    pruning = ModelPruning("l1_unstructured", amount=0.5, use_lottery_ticket_hypothesis=False)
    fit(module, regression_batches(2), pruning, plugin=MasterWeightsPrecision("bf16-true"), max_epochs=2)
    zeros = sum(int((p == 0).sum()) for p in module.parameters())
    # Half in the first epoch, half of the rest in the second.
    assert zeros >= 0.7 * sum(p.numel() for p in module.parameters())


def check(strategy: type[Any], module: nn.Module | None = None, **arguments: Any) -> None:
    """Calls the check that ``convert_module`` makes, with a strategy that cannot run here."""
    defaults: dict[str, Any] = {"storage": "fp32", "fp32_gradients": False}
    check_strategy(object.__new__(strategy), module or nn.Linear(1, 1), **(defaults | arguments))


def test_a_remainder_under_fsdp_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match="its shards are fp32 already.*Leave storage out"):
        check(FSDPStrategy, storage="remainder")
    with pytest.raises(MisconfigurationException, match=r"storage='24bit'\) cannot be used with FSDPStrategy"):
        check(FSDPStrategy, storage="24bit")
    check(FSDPStrategy, storage="fp32", fp32_gradients=True)


@pytest.mark.parametrize("strategy", [DDPStrategy, ModelParallelStrategy])
def test_fp32_gradients_on_several_devices_are_refused(strategy: type[Any]) -> None:
    """DDP itself fails deep inside of backward: "Expected BFloat16, got Float"."""
    with pytest.raises(MisconfigurationException, match=f"works on a single device only, got {strategy.__name__}"):
        check(strategy, fp32_gradients=True)
    check(strategy)


def test_a_sharded_batch_norm_is_refused() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        module[1].weight = nn.Parameter(distribute_tensor(module[1].weight.detach(), mesh))
        with pytest.raises(MisconfigurationException, match="keeps norms with running statistics.*GroupNorm"):
            check(ModelParallelStrategy, module)
    finally:
        torch.distributed.destroy_process_group()


def test_under_fabric_it_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match="is a plugin for lightning.pytorch.Trainer"):
        MasterWeightsPrecision("bf16-true").convert_module(nn.Linear(1, 1))


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
def test_parameters_without_a_shape_are_refused_with_the_remedy(precision: str, storage: str) -> None:
    """torch's own error came out of the store; the remedy that is named trains as ready layers do."""
    with pytest.raises(MisconfigurationException) as caught:
        fit(Lazy(), regression_batches(1), plugin=master_weights(precision, storage))
    said = str(caught.value)
    assert "net.0.weight, net.0.bias, net.2.weight, net.2.bias are lazy" in said
    assert "in its setup hook" in said
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
