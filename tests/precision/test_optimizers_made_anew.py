"""Optimizers that are made anew inside of a fit, as in staged training: they go on as if they had been there before."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from gloo import run_ranks
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from master_loops import DTYPES, OPTIMIZERS, master_weights, masters_of
from small_models import Regression, StepsByHand, fit, loader, quiet_trainer, regression_batches, weights
from torch import Tensor

from lightning_mp import AutocastPrecision, LossScaler

BATCHES = regression_batches(4)


class Anew(Regression):
    """Has other optimizers from the second epoch on; SGD without momentum has no state that they would miss."""

    anew = True

    def on_train_epoch_start(self) -> None:
        if self.anew and self.current_epoch == 1:
            self.trainer.strategy.setup_optimizers(self.trainer)


class Kept(Anew):
    anew = False


class Manual(StepsByHand, Anew):
    pass


SMALL: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "loop": lambda p: torch.optim.SGD(p, lr=1e-4, foreach=False),
    "foreach": lambda p: torch.optim.SGD(p, lr=1e-4, foreach=True),
    "fused": lambda p: torch.optim.SGD(p, lr=1e-4, fused=True),
}


@pytest.mark.parametrize("kind", [Anew, Manual])
@pytest.mark.parametrize("optimizer", SMALL)
@pytest.mark.parametrize("precision", DTYPES)
def test_masters_go_on(precision: str, optimizer: str, kind: type[Anew]) -> None:
    ends = []
    for module in (kind(SMALL[optimizer]), Kept(SMALL[optimizer])):
        trainer = fit(module, BATCHES, plugin=master_weights(precision), max_epochs=3)
        ends.append([*masters_of(trainer), *weights(module)])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_ranks_stay_together() -> None:
    def train(rank: int, kind: type[Anew]) -> list[Tensor]:
        strategy = DDPStrategy(process_group_backend="gloo")
        trainer = quiet_trainer(devices=2, strategy=strategy, plugins=[master_weights()], max_epochs=2)
        trainer.fit(kind(SMALL["foreach"]), loader(BATCHES[2 * rank : 2 * rank + 2]))
        return masters_of(trainer)

    (first, second), (kept, _) = (run_ranks(lambda rank, kind=kind: train(rank, kind), 2) for kind in (Anew, Kept))
    for ours, other, theirs in zip(first, second, kept, strict=True):
        assert torch.equal(ours, other)
        assert torch.equal(ours, theirs)


def test_they_are_refused_like_those_of_the_set_up() -> None:
    class ToLbfgs(Anew):
        def configure_optimizers(self) -> Any:
            if self.current_epoch == 1:
                return torch.optim.LBFGS(self.parameters())
            return super().configure_optimizers()

    for plugin in (master_weights("16-true"), AutocastPrecision("16-mixed", scaler=LossScaler("cpu"))):
        with pytest.raises(MisconfigurationException, match="cannot be used with LBFGS"):
            fit(ToLbfgs(SMALL["loop"]), BATCHES, plugin=plugin, max_epochs=2)


def test_half_weights_that_a_new_optimizer_trains_are_refused() -> None:
    class Later(Anew):
        def __init__(self) -> None:
            super().__init__(SMALL["loop"])
            self.late = torch.nn.Parameter(torch.ones(1).half(), requires_grad=False)

        def on_train_epoch_start(self) -> None:
            self.late.requires_grad_(self.current_epoch == 1)
            super().on_train_epoch_start()

    with pytest.raises(MisconfigurationException, match="trainable parameters are fp16: late"):
        fit(Later(), BATCHES, plugin=AutocastPrecision("bf16-mixed"), max_epochs=2)


def test_an_optimizer_that_a_strategy_wraps_is_not_met_again() -> None:
    """PostLocalSGD wraps the optimizers after the set-up; both would swap the same masters."""

    class Averages(torch.optim.Optimizer):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            vars(self).update(vars(optimizer), optim=optimizer)

        def step(self, closure: Any = None) -> Any:
            return self.optim.step(closure)

        def state_dict(self) -> dict[str, Any]:
            return self.optim.state_dict()

    class Wraps(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            trainer.strategy.optimizers = [Averages(optimizer) for optimizer in trainer.strategy.optimizers]

    ends = []
    for callbacks in ([Wraps()], []):
        trainer = fit(Kept(OPTIMIZERS["sgd"]), BATCHES, plugin=master_weights(), callbacks=callbacks)
        ends.append(masters_of(trainer))
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
