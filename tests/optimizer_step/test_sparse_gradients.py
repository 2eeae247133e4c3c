"""Gradients of `nn.Embedding(sparse=True)` whose rows come up more than once are unscaled, normalised and clipped."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from gloo import run_ranks
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import MixedPrecision
from small_models import loader, quiet_trainer, weights
from torch import Tensor, nn

from lightning_mp import AccumulationScheduler, AutocastPrecision, LossScaler, MasterWeightsPrecision, OverflowMonitor
from lightning_mp.training.gradients.gradient_ops import local_shard

ROWS = 8


class Table(pl.LightningModule):
    """A row of the table comes up twice in a batch, and again in the next one."""

    def __init__(self, *, sparse: bool = True, optimizer: Any = torch.optim.SGD) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(ROWS, 4, sparse=sparse)
        self.head = nn.Linear(4, ROWS)
        self.kind = optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.table(batch[0])).float(), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.kind(self.parameters(), lr=0.1)


def batches(sizes: Any = (4, 4, 4, 4, 4, 2)) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [[torch.tensor([1, 1, *torch.randint(ROWS, (n - 2,), generator=generator)]), torch.arange(n)] for n in sizes]


def fit(module: Table, plugin: Any = None, **arguments: Any) -> list[Tensor]:
    plugins = [] if plugin is None else [plugin]
    quiet_trainer(plugins=plugins, **arguments).fit(module, loader(batches()))
    return weights(module)


def masters(policy: Any = None) -> MasterWeightsPrecision:
    return MasterWeightsPrecision("16-true", scaler=LossScaler("cpu", init_scale=1024.0), policy=policy)


PLUGINS = {
    "fp16": lambda: AutocastPrecision("16-mixed", scaler=LossScaler("cpu", init_scale=1024.0)),
    "bf16": lambda: AutocastPrecision("bf16-mixed"),
}


@pytest.mark.parametrize("clip", [None, ("norm", 1e-2), ("value", 1e-3)], ids=["unclipped", "norm", "value"])
@pytest.mark.parametrize("window", [1, 2, 4])
@pytest.mark.parametrize("precision", PLUGINS)
def test_a_sparse_table_trains_as_a_dense_one(precision: str, window: int, clip: Any) -> None:
    """Windows of 4 are short in the end, and all of them are normalised by samples."""
    trained = []
    for sparse in (True, False):
        arguments = {} if clip is None else {"gradient_clip_algorithm": clip[0], "gradient_clip_val": clip[1]}
        callbacks: list[Callback] = [AccumulationScheduler({0: window}), OverflowMonitor()]
        trained.append(fit(Table(sparse=sparse), PLUGINS[precision](), callbacks=callbacks, **arguments))
    assert not torch.equal(trained[0][0], Table().table.weight)
    for one, other in zip(*trained, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_hooks_are_shown_true_gradients_of_a_sparse_table() -> None:
    class Norms(Callback):
        def __init__(self) -> None:
            self.norms: list[float] = []

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            gradient = pl_module.table.weight.grad
            self.norms.append(float((gradient.to_dense() if gradient.is_sparse else gradient).norm()))

    seen = []
    for sparse in (True, False):
        norms = Norms()
        fit(Table(sparse=sparse), PLUGINS["fp16"](), callbacks=[norms])
        seen.append(norms.norms)
    assert seen[0] == pytest.approx(seen[1], rel=1e-5)


def test_windows_of_a_stock_plugin_are_normalised_too() -> None:
    trained = [
        fit(
            Table(sparse=sparse),
            MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0)),
            callbacks=[AccumulationScheduler({0: 4})],
        )
        for sparse in (True, False)
    ]
    for one, other in zip(*trained, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("window", [1, 2, 4])
def test_16_true_trains_a_sparse_table_as_a_dense_one_in_fp32(window: int) -> None:
    """torch adds no sparse fp16 gradients on a CPU."""
    trained = [
        fit(Table(sparse=sparse), masters(policy), callbacks=[AccumulationScheduler({0: window})])
        for sparse, policy in ((True, None), (False, {"table": "fp32"}))
    ]
    for one, other in zip(*trained, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.filterwarnings("ignore:OverflowMonitor. 6 of 6 optimizer steps were skipped")
def test_a_sum_of_rows_that_overflows_is_skipped() -> None:
    class Huge(Table):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            # Each row's share is finite, and the two of row 1 are not together.
            return (self.table(torch.tensor([1, 1])).float() * 2.5e38).sum() + super().training_step(batch, batch_idx)

    module, monitor = Huge(), OverflowMonitor()
    before = weights(module)
    fit(module, PLUGINS["bf16"](), callbacks=[monitor])
    assert monitor.skipped_steps == monitor.attempted_steps > 0
    for now, then in zip(weights(module), before, strict=True):
        assert torch.equal(now, then)


@pytest.mark.parametrize("plugin", [PLUGINS["fp16"], masters])
def test_ranks_train_a_sparse_table_alike(plugin: Any) -> None:
    def rank_(rank: int) -> list[list[float]]:
        module = Table()
        fit(module, plugin(), strategy="ddp", devices=2)
        return [w.flatten().tolist() for w in weights(module)]

    first, second = run_ranks(rank_, 2)
    assert first == second
    for one, other in zip(first, fit(Table(), plugin()), strict=True):
        torch.testing.assert_close(torch.tensor(one), other.flatten(), rtol=1e-5, atol=1e-7)


def test_what_is_written_into_a_shard_is_in_the_gradient() -> None:
    table = nn.Embedding(3, 1, sparse=True)
    for rows in ([1, 1], [1, 2]):
        table(torch.tensor(rows)).sum().backward()
    gradient = table.weight.grad
    assert gradient is not None
    assert not gradient.is_coalesced()
    local_shard(gradient).mul_(0.5)
    assert table.weight.grad is gradient
    assert gradient.to_dense().flatten().tolist() == [0.0, 1.5, 0.5]
