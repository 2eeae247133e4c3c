"""A rank that has no gradients steps, skips and moves its loss scale with the others."""

from typing import Any

import pytest
import torch
from gloo import run_same_ranks as run_ranks
from pipelined_models import PipelinedMLP
from pipelined_models import fit as fit_pipeline
from small_models import Outcomes, Regression, fit, regression_batches, sgd, weights
from torch import Tensor, nn

from lightning_mp import AutocastPrecision, FSDP2Strategy, LossScaler, MasterWeightsPrecision, PipelineParallelStrategy


def scaler() -> LossScaler:
    """It moves at every step."""
    return LossScaler("cpu", init_scale=1024.0, growth_interval=1, max_scale=2.0**16)


def scales_and_steps(outcomes: Outcomes) -> list[tuple[float, bool]]:
    return [(outcome.loss_scale, outcome.stepped) for outcome in outcomes.seen]


class FrozenEnd(PipelinedMLP):
    """The layers of one stage are frozen; the loss of batch 1 overflows."""

    def __init__(self, frozen: slice, fused: bool) -> None:
        super().__init__(torch.optim.AdamW, lr=1e-2, fused=fused)
        for layer in self.layers[frozen]:
            layer.requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * torch.inf if batch_idx == 1 else loss


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("frozen", [slice(3), slice(3, None)], ids=["first", "last"])
def test_a_pipeline_stage_that_is_frozen(frozen: slice, fused: bool) -> None:
    def rank_(rank: int, devices: int = 2) -> tuple[list[tuple[float, bool]], float]:
        plugin, outcomes = AutocastPrecision("16-mixed", scaler=scaler()), Outcomes()
        strategy = (
            PipelineParallelStrategy(stages=2, microbatches=2, split_points=["layers.3"]) if devices == 2 else "auto"
        )
        module = FrozenEnd(frozen, fused)
        fit_pipeline(module, strategy, devices, plugin=plugin, callbacks=[outcomes], max_epochs=1, limit_val_batches=0)
        assert plugin.scaler is not None
        return scales_and_steps(outcomes), plugin.scaler.get_scale()

    first, second = run_ranks(rank_, 2)
    assert first == second == run_ranks(lambda rank: rank_(rank, devices=1), 1)[0]
    assert {stepped for _, stepped in first[0]} == {True, False}


class TwoOptimizers(Regression):
    """In manual optimization; on one rank the second optimizer never gets a gradient, and at batch 1 nobody's does."""

    automatic_optimization = False

    def __init__(self, lonely: bool) -> None:
        super().__init__(sgd)
        self.lonely = lonely

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net[index].parameters(), lr=1e-2) for index in (0, 2)]

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        first, second = self.optimizers()
        for optimizer in (first, second):
            optimizer.zero_grad()
        if batch_idx != 1:
            loss = nn.functional.mse_loss(self.net(batch[0]).float(), batch[1])
            self.manual_backward(loss)
            if self.lonely:
                second.zero_grad()
        first.step()
        second.step()


def test_two_optimizers_of_which_one_has_no_gradients_on_one_rank() -> None:
    def rank_(rank: int) -> tuple[list[tuple[float, bool]], float]:
        plugin, outcomes = AutocastPrecision("16-mixed", scaler=scaler()), Outcomes()
        fit(TwoOptimizers(lonely=rank == 1), regression_batches(4), outcomes, strategy="ddp", devices=2, plugin=plugin)
        assert plugin.scaler is not None
        return scales_and_steps(outcomes), plugin.scaler.get_scale()

    first, second = run_ranks(rank_, 2)
    assert first == second
    # Three batches had gradients, each moved the scale once.
    assert first[1] == 1024.0 * 2**3


def test_a_rank_that_has_scaled_no_loss_has_the_same_scale_as_the_others() -> None:
    """Its scaler has made no tensor for it yet, when the others step."""

    class Alone(Regression):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            optimizer = self.optimizers()
            optimizer.zero_grad()
            if self.global_rank == 0:
                # Past DDP, which would wait for the other rank.
                self.trainer.strategy.precision_plugin.scaler.scale(super().training_step(batch, batch_idx)).backward()
            optimizer.step()

    def rank_(rank: int) -> tuple[list[tuple[float, bool]], float]:
        plugin, outcomes = AutocastPrecision("16-mixed", scaler=scaler()), Outcomes()
        module = Alone(sgd, overflows={1})
        fit(module, regression_batches(3), outcomes, strategy="ddp", devices=2, plugin=plugin)
        assert plugin.scaler is not None
        return scales_and_steps(outcomes), plugin.scaler.get_scale()

    first, second = run_ranks(rank_, 2)
    assert first == second
    assert [stepped for _, stepped in first[0]] == [True, False, True]
    assert first[1] == 1024.0 * 2


class Small(Regression):
    """A second layer with a single row: under FSDP2 one rank has nothing of it, and the first layer is frozen."""

    def configure_optimizers(self) -> Any:
        self.net[0].requires_grad_(False)
        return torch.optim.AdamW(self.net[2].parameters(), lr=1e-2, fused=True)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("masters", [False, True])
def test_a_rank_whose_shards_are_empty(masters: bool) -> None:
    def rank_(rank: int) -> tuple[list[tuple[float, bool]], float]:
        plugin = (
            MasterWeightsPrecision("16-true", scaler=scaler())
            if masters
            else AutocastPrecision("16-mixed", scaler=scaler())
        )
        outcomes = Outcomes()
        strategy = FSDP2Strategy()
        fit(Small(overflows={1}), regression_batches(4), outcomes, strategy=strategy, devices=2, plugin=plugin)
        assert plugin.scaler is not None
        return scales_and_steps(outcomes), plugin.scaler.get_scale()

    first, second = run_ranks(rank_, 2)
    assert first == second
    assert [stepped for _, stepped in first[0]] == [True, False, True, True]


def test_a_batch_that_gives_nobody_a_gradient_moves_no_scale() -> None:
    class Nothing(Regression):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            self.optimizers().step()

    def rank_(rank: int) -> float:
        plugin = AutocastPrecision("16-mixed", scaler=scaler())
        module = Nothing(sgd)
        before = weights(module)
        fit(module, regression_batches(3), strategy="ddp", devices=2, plugin=plugin)
        assert all(torch.equal(now, then) for now, then in zip(weights(module), before, strict=True))
        assert plugin.scaler is not None
        return plugin.scaler.get_scale()

    assert run_ranks(rank_, 2) == [1024.0, 1024.0]
