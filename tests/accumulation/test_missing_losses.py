"""A training step that returns None: left out of the mean, on any ranks; where all do, the step is skipped."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from gloo import run_same_ranks
from lightning.pytorch.strategies import DDPStrategy
from small_models import fit, weights
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_mp import AccumulationScheduler, AutocastPrecision, LossScaler, OverflowMonitor
from lightning_mp.training.accumulation.controller import AccumulationController

pytestmark = pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
ROWS = (2, 5, 1, 4, 3, 6, 2, 2)  # of batches that the ranks take in turn


class Sometimes(pl.LightningModule):
    def __init__(self, missing: set[int], *, is_mean: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.missing, self.is_mean = nn.Linear(4, 3), missing, is_mean

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        index, x, y = batch
        if index in self.missing:
            return None
        with torch.autocast("cpu", enabled=False):
            return F.mse_loss(self.net(x), y, reduction="mean" if self.is_mean else "sum")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1, weight_decay=0.5)


def batches() -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    return [
        (i, torch.randn(n, 4, generator=generator), torch.randn(n, 3, generator=generator)) for i, n in enumerate(ROWS)
    ]


def reference(missing: set[int], *, is_mean: bool) -> list[Tensor]:
    """Windows of two micro-batches on two ranks; one whose losses are all missing makes no step."""
    module, data = Sometimes(set(), is_mean=is_mean), batches()
    optimizer = module.configure_optimizers()
    for window in (data[:4], data[4:]):
        present = [(x, y) for i, x, y in window if i not in missing]
        if not present:
            continue
        optimizer.zero_grad()
        total = sum(len(x) for x, _ in present)
        for x, y in present:
            share = len(x) / total if is_mean else 1 / len(present)
            (share * F.mse_loss(module.net(x), y, reduction="mean" if is_mean else "sum")).backward()
        optimizer.step()
    return weights(module)


CASES = [
    pytest.param({0}, True, id="first loss of a rank"),
    pytest.param({1, 6}, True, id="one of each"),
    pytest.param({2, 3}, True, id="all ranks, where the window closes"),
    pytest.param({0, 1, 2, 3}, True, id="a window"),
    pytest.param({4, 6}, True, id="a rank's window"),
    pytest.param({1, 6}, False, id="one of each, sums"),
    pytest.param({4, 5, 6, 7}, False, id="a window, sums"),
]


def test_they_are_left_out_of_the_mean_on_any_ranks() -> None:
    def on_rank(rank: int) -> list[tuple[list[Tensor], int]]:
        found = []
        for case in CASES:
            for unused in (False, True):
                missing, is_mean = case.values
                module, monitor = Sometimes(missing, is_mean=is_mean), OverflowMonitor()  # type: ignore[arg-type]
                strategy = DDPStrategy(process_group_backend="gloo", find_unused_parameters=unused)
                plugin = AutocastPrecision("bf16-mixed")
                fit(
                    module,
                    batches()[rank::2],
                    monitor,
                    plugin=plugin,
                    strategy=strategy,
                    devices=2,
                    accumulate_grad_batches=2,
                )
                found.append((weights(module), monitor.skipped_steps))
        return found

    for results in run_same_ranks(on_rank, 2):
        for case, *both in zip(CASES, results[::2], results[1::2], strict=True):
            missing, is_mean = case.values
            expected = reference(missing, is_mean=is_mean)  # type: ignore[arg-type]
            for found, skipped in both:
                torch.testing.assert_close(found, expected, msg=case.id)
                assert skipped == (len(missing) == 4), case.id  # type: ignore[arg-type]


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("accumulates", [1, 2])
def test_a_step_without_any_loss_is_skipped_and_counted(precision: str, accumulates: int) -> None:
    missing = set(range(2, 2 + accumulates))
    module, monitor = Sometimes(missing), OverflowMonitor()
    scaler = LossScaler(init_scale=64.0) if precision == "16-mixed" else None
    plugin = AutocastPrecision(precision, scaler=scaler)  # type: ignore[arg-type]
    fit(module, batches(), monitor, plugin=plugin, accumulate_grad_batches=accumulates)
    assert monitor.skipped_steps == 1
    if scaler is not None:
        assert scaler.get_scale() == 64.0


def test_a_scheduler_leaves_them_out_with_a_stock_plugin() -> None:
    module = Sometimes({1})
    fit(module, batches()[:4], AccumulationScheduler({0: 4}))
    torch.testing.assert_close(weights(module), reference({1, 4, 5, 6, 7}, is_mean=True))


def test_their_tokens_are_not_counted() -> None:
    def on_rank(rank: int) -> tuple[list[Tensor], int]:
        module = Sometimes({1, 6})
        scheduler = AccumulationScheduler({0: 2}, count=lambda batch: len(batch[1]))
        strategy = DDPStrategy(process_group_backend="gloo")
        trainer = fit(module, batches()[rank::2], scheduler, strategy=strategy, devices=2)
        controller = AccumulationController.of(trainer)
        assert controller is not None
        return weights(module), controller.counter.tokens

    for found, tokens in run_same_ranks(on_rank, 2):
        torch.testing.assert_close(found, reference({1, 6}, is_mean=True))
        assert tokens == sum(ROWS) - ROWS[1] - ROWS[6]
