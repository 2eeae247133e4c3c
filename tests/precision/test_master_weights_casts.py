"""What MasterWeightsPrecision casts, what it leaves alone, and what it leaves behind."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from master_loops import DTYPES, counted_casts, master_weights
from small_models import Regression, Trained, fit, loader, quiet_trainer, regression_batches, sgd, weights
from torch import Tensor, nn


def adapters() -> Trained:
    """A frozen base and a trainable low-rank adapter; all are given to the optimizer, as many do."""
    module = Trained(
        lambda m, batch: (m.base(batch[0]) + m.up(m.down(batch[0]))).float().square().mean(),
        base=lambda: nn.Linear(8, 8).requires_grad_(False),
        down=lambda: nn.Linear(8, 2, bias=False),
        up=lambda: nn.Linear(2, 8, bias=False),
    )
    module.make_optimizer = lambda _: torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1)
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_frozen_base_stays_as_it_was_loaded(dtype: torch.dtype) -> None:
    """And is lent to nobody."""
    module = adapters()
    module.base.to(dtype)
    base, before = weights(module.base), weights(module.down)
    with counted_casts() as casts:
        fit(module, regression_batches(4), plugin=master_weights())
    assert all(torch.equal(a, b) and b.dtype == dtype for a, b in zip(base, module.base.parameters(), strict=True))
    assert not torch.equal(module.down.weight, before[0])
    assert set(casts) == {id(module.down.weight), id(module.up.weight)}


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
        out = self.net((x + self.table).unsqueeze(1))
        self.seen["output"] = out.dtype
        return nn.functional.mse_loss(out.float(), y.float())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self.parameters())


@pytest.mark.parametrize("precision", DTYPES)
def test_all_is_fp32_but_what_modules_compute(precision: str) -> None:
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
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    assert module.seen == {"input": torch.float32, "made": torch.float32, "counter": torch.int64, "output": dtype}
    assert (module.net[1].weight != 1).any()
    assert module.net[1].running_mean.abs().sum() > 0
    assert module.dtype == torch.float32
    assert torch.get_default_dtype() == torch.float32


class Evaluated(WithStatistics):
    """A frozen layer, an fp64 parameter and buffers, run outside of a fit."""

    def __init__(self) -> None:
        super().__init__()
        self.net[4].bias.requires_grad_(False)
        self.seen_in_evaluation: set[torch.dtype] = set()

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen_in_evaluation |= {p.dtype for p in self.net[0].parameters()} | {self.net(batch[0][:, None]).dtype}
        return torch.zeros(())

    test_step = predict_step = validation_step  # type: ignore[assignment]


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
@pytest.mark.parametrize("loop", ["validate", "test", "predict"])
@pytest.mark.parametrize("precision", DTYPES)
def test_weights_after_an_evaluation_are_what_they_were(precision: str, loop: str) -> None:
    """A fit that follows it trains as one that comes first, bit for bit."""
    ends = []
    for evaluated in (True, False):
        module = Evaluated()
        before, dtype = {k: v.clone() for k, v in module.state_dict().items()}, module.dtype
        trainer = quiet_trainer(plugins=[master_weights(precision)])
        if evaluated:
            apart = quiet_trainer(plugins=[master_weights(precision)])
            getattr(apart, loop)(module, loader(regression_batches(1)))
            assert module.seen_in_evaluation == {torch.float32, DTYPES[precision]}
            assert all(torch.equal(v, before[k]) and v.dtype == before[k].dtype for k, v in module.state_dict().items())
            assert module.dtype == dtype
        trainer.fit(module, loader(regression_batches(3)))
        ends.append(list(module.state_dict().values()))
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_an_exception_that_the_module_catches_leaves_16_bit_gradients() -> None:
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
