"""What MasterWeightsPrecision casts, what it leaves alone, and what it leaves behind."""

from typing import Any, cast

import lightning.pytorch as pl
import pytest
import torch
from master_loops import DTYPES, KINDS, master_weights, masters_of
from small_models import Regression, fit, loader, quiet_trainer, regression_batches, sgd, weights
from torch import Tensor, nn


class Adapters(pl.LightningModule):
    """A frozen base and a trainable low-rank adapter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        return (self.base(x) + self.up(self.down(x))).float().square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # All parameters, as many do; the frozen ones never have a gradient.
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)


@pytest.mark.parametrize("storage", ["fp32", "remainder"])
def test_a_frozen_base_is_16_bit_without_masters(storage: str) -> None:
    module = Adapters()
    base = [p.detach().to(torch.bfloat16) for p in module.base.parameters()]
    before = weights(module.down)
    trainer = fit(module, regression_batches(4), plugin=master_weights(storage=storage))
    assert all(torch.equal(a, b) for a, b in zip(base, module.base.parameters(), strict=True))
    assert not torch.equal(module.down.weight.float(), before[0].bfloat16().float())
    masters = [i for i, entry in trainer.optimizers[0].state_dict()["state"].items() if "master_param" in entry]
    assert masters == [2, 3]


class WithStatistics(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten(), nn.Linear(24, 1))
        self.register_buffer("table", torch.linspace(0, 1, 8))
        self.register_buffer("counter", torch.zeros((), dtype=torch.int64))
        self.seen: dict[str, torch.dtype] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.counter += 1
        self.seen = {"input": x.dtype, "made": torch.zeros(1).dtype, "counter": self.counter.dtype}
        out = self.net((x + self.table.to(x.dtype)).unsqueeze(1))
        self.seen["output"] = out.dtype
        return nn.functional.mse_loss(out.float(), y.float())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self.parameters())


@pytest.mark.parametrize("precision", DTYPES)
def test_buffers_and_norms_with_statistics_stay_fp32(precision: str) -> None:
    """D49."""
    module = WithStatistics()
    table = module.table
    fit(module, regression_batches(3), plugin=master_weights(precision))
    dtype = DTYPES[precision]
    assert {name: b.dtype for name, b in module.named_buffers()} == {
        "table": torch.float32,
        "counter": torch.int64,
        "net.1.running_mean": torch.float32,
        "net.1.running_var": torch.float32,
        "net.1.num_batches_tracked": torch.int64,
    }
    assert torch.equal(module.table, table)
    assert {name: p.dtype for name, p in module.named_parameters()} == {
        "net.0.weight": dtype,
        "net.0.bias": dtype,
        "net.1.weight": torch.float32,
        "net.1.bias": torch.float32,
        "net.4.weight": dtype,
        "net.4.bias": dtype,
    }
    assert module.seen == {"input": dtype, "made": dtype, "counter": torch.int64, "output": dtype}
    assert (module.net[1].weight != 1).any()
    assert module.net[1].running_mean.abs().sum() > 0
    assert module.dtype == dtype
    assert torch.get_default_dtype() == torch.float32


def recurrent(x: Tensor) -> Tensor:
    return cast(Tensor, nn.GRU(x.shape[-1], 2)(x)[0])


@pytest.mark.parametrize(
    ("layer", "error"),
    [
        (lambda x: nn.Linear(x.shape[-1], 2)(x), "must have the same dtype"),
        (lambda x: nn.Conv1d(1, 2, 3)(x[:, None]), "should be the same"),
        (lambda x: nn.LayerNorm(x.shape[-1])(x), "scalar type"),
        (recurrent, "does not match weight dtype"),
    ],
    ids=["linear", "convolution", "norm", "recurrent"],
)
def test_a_buffer_that_promotes_gets_a_hint(layer: Any, error: str) -> None:
    class Promotes(WithStatistics):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return cast(Tensor, layer(batch[0] + self.table)).sum()

    with pytest.raises((RuntimeError, ValueError), match=error) as caught:
        fit(Promotes(), regression_batches(1), plugin=master_weights())
    assert "buffers are fp32" in caught.value.__notes__[0]
    assert "x + self.table.to(x.dtype)" in caught.value.__notes__[0]
    assert torch.get_default_dtype() == torch.float32


def test_other_dtypes_are_left_alone_and_named() -> None:
    class WithOthers(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.angle = nn.Parameter(torch.ones(2, dtype=torch.complex64))
            self.precise = nn.Parameter(torch.full((2,), 1 / 3, dtype=torch.float64))

    module = WithOthers()
    with pytest.warns(UserWarning, match="These keep their dtype and have no masters: .*'angle'.*'precise'"):
        fit(module, regression_batches(1), plugin=master_weights())
    assert module.angle.dtype == torch.complex64
    assert module.precise.dtype == torch.float64
    assert module.precise[0].item() == 1 / 3


def test_parameters_are_the_same_objects_before_and_after() -> None:
    module = Regression()
    before = list(map(id, module.parameters()))
    trainer = fit(module, regression_batches(2), plugin=master_weights())
    assert list(map(id, module.parameters())) == before
    assert [id(p) for p in trainer.optimizers[0].param_groups[0]["params"]] == before


def test_tied_weights_stay_tied() -> None:
    module = Regression()
    module.net[0].weight = nn.Parameter(torch.randn(16, 8))
    module.again = module.net[0]
    trainer = fit(module, regression_batches(2), plugin=master_weights())
    assert module.again.weight is module.net[0].weight
    assert len(masters_of(trainer)) == 4


class Evaluated(WithStatistics):
    """A frozen layer, an fp64 parameter and buffers, run outside of a fit."""

    def __init__(self) -> None:
        super().__init__()
        self.net[4].bias.requires_grad_(False)
        self.seen_in_evaluation: set[torch.dtype] = set()

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen_in_evaluation |= {p.dtype for p in self.net[0].parameters()}
        return torch.zeros(())

    test_step = predict_step = validation_step  # type: ignore[assignment]


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
@pytest.mark.parametrize("loop", ["validate", "test", "predict"])
@pytest.mark.parametrize(("precision", "storage"), KINDS)
def test_weights_after_an_evaluation_are_what_they_were(precision: str, storage: str, loop: str) -> None:
    """A fit that follows it trains as one that comes first, bit for bit."""
    ends = []
    for evaluated in (True, False):
        module = Evaluated()
        before, dtype = {k: v.clone() for k, v in module.state_dict().items()}, module.dtype
        trainer = quiet_trainer(plugins=[master_weights(precision, storage)])
        if evaluated:
            apart = quiet_trainer(plugins=[master_weights(precision, storage)])
            getattr(apart, loop)(module, loader(regression_batches(1)))
            assert module.seen_in_evaluation == {DTYPES[precision]}
            assert all(torch.equal(v, before[k]) and v.dtype == before[k].dtype for k, v in module.state_dict().items())
            assert module.dtype == dtype
        trainer.fit(module, loader(regression_batches(3)))
        ends.append([*masters_of_all(trainer), *module.state_dict().values()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def masters_of_all(trainer: pl.Trainer) -> list[Tensor]:
    state = trainer.optimizers[0].state_dict()["state"]
    return [entry["master_param"].clone() for entry in state.values() if "master_param" in entry]


def test_what_an_evaluation_changes_stays() -> None:
    class Changes(Evaluated):
        def on_validation_start(self) -> None:
            self.net[0].weight.data.fill_(0.3)

    module = Changes()
    bias = module.net[0].bias.detach().clone()
    quiet_trainer(plugins=[master_weights()]).validate(module, loader(regression_batches(1)), verbose=False)
    assert torch.equal(module.net[0].weight, torch.full((4, 1, 3), 0.3).bfloat16().float())
    assert torch.equal(module.net[0].bias, bias)


def test_an_exception_in_training_leaves_16_bit_weights() -> None:
    class Breaks(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            raise KeyError("after the update")

    module = Regression(lambda p: Breaks(p, lr=0.1))
    before = weights(module)
    trainer = quiet_trainer(plugins=[master_weights()])
    with pytest.raises(KeyError):
        trainer.fit(module, loader(regression_batches(1)))
    optimizer = trainer.optimizers[0]
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in module.parameters()]
    for master, parameter, start in zip(masters_of(trainer), module.parameters(), before, strict=True):
        assert torch.equal(master.bfloat16(), parameter), "the weights say what the masters say"
        assert not torch.equal(master, start)
    assert torch.get_default_dtype() == torch.float32


def test_an_exception_that_the_module_catches_leaves_16_bit_weights() -> None:
    class BreaksOnce(torch.optim.SGD):
        attempts = 0

        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            self.attempts += 1
            if self.attempts == 1:
                raise KeyError("after the update")

    class Catches(Regression):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            try:
                optimizer.step(closure=optimizer_closure)
            except KeyError:
                groups = self.trainer.optimizers[0].param_groups
                self.caught = [id(p) for p in groups[0]["params"]], {p.grad.dtype for p in self.parameters()}

    module = Catches(lambda p: BreaksOnce(p, lr=0.1))
    fit(module, regression_batches(2), plugin=master_weights(), gradient_clip_val=0.1)
    assert module.caught == ([id(p) for p in module.parameters()], {torch.bfloat16})


@pytest.mark.parametrize("other", ["fp32", "remainder"])
@pytest.mark.parametrize("storage", ["fp32", "remainder"])
def test_a_second_fit_with_another_plugin_goes_on_in_full_precision(storage: str, other: str) -> None:
    module = Regression(lambda p: torch.optim.SGD(p, lr=1e-4))
    trainer = fit(module, regression_batches(3), plugin=master_weights(storage=storage))
    first = masters_of(trainer)
    module.make_optimizer = lambda p: torch.optim.SGD(p, lr=0.0)
    again = fit(module, regression_batches(1), plugin=master_weights(storage=other))
    assert all(torch.equal(a, b) for a, b in zip(first, masters_of(again), strict=True))
    assert any((a != a.bfloat16()).any() for a in first)


@pytest.mark.parametrize("storage", ["fp32", "remainder"])
def test_a_second_fit_goes_on_in_full_precision(storage: str) -> None:
    """The module is 16 bit by then; its masters are not lost."""
    ours, module = master_weights(storage=storage), Regression(lambda p: torch.optim.SGD(p, lr=1e-4))
    trainer = fit(module, regression_batches(3), plugin=ours)
    first = masters_of(trainer)
    quiet_trainer(plugins=[ours]).test(_with_test_step(module), loader(regression_batches(1)), verbose=False)
    module.make_optimizer = lambda p: torch.optim.SGD(p, lr=0.0)
    again = fit(module, regression_batches(1), plugin=ours)
    assert all(torch.equal(a, b) for a, b in zip(first, masters_of(again), strict=True))


def _with_test_step(module: Regression) -> Regression:
    module.test_step = lambda batch, batch_idx: None  # type: ignore[method-assign]
    return module
