"""Parameters that DDP was never told of are not trained apart on each rank, as they silently are in stock Lightning."""

from functools import partial
from typing import Any

import pytest
import torch
from gloo import run_same_ranks as run_ranks
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from small_models import Regression, loader, quiet_trainer, regression_batches, weights
from torch import Tensor

from lightning_mp import AutocastPrecision, OverflowMonitor


class Thaw(BaseFinetuning):
    """Freezes the first layer before DDP is set up; trains it from the second epoch on."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, lr=0.1)


class FrozenLate(Thaw):
    """The remedy that the message names."""

    def freeze_before_training(self, pl_module: Any) -> None:
        pass

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.net[0].requires_grad_(False)


class Module(Regression):
    """The optimizer begins with the last layer; it is made after DDP is set up."""

    def __init__(self, *, freezes_itself: bool = False) -> None:
        super().__init__()
        self.freezes_itself = freezes_itself

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.freezes_itself:
            self.net[0].requires_grad_(False)
        return torch.optim.SGD(self.net[2].parameters(), lr=0.1)


class ThawLate(Thaw):
    """Freezes nothing itself."""

    def freeze_before_training(self, pl_module: Any) -> None:
        pass


def train(rank: int, thaw: type[Thaw] = Thaw, *, plugin: bool = True, **module: Any) -> tuple[str, int, list[Tensor]]:
    """The message if there is one, the steps that were made, and the weights."""
    trained = Module(**module)
    trainer = quiet_trainer(
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo", find_unused_parameters=thaw is not Thaw),
        plugins=[AutocastPrecision("bf16-mixed")] * plugin,
        callbacks=[thaw(), OverflowMonitor()],
        max_epochs=2,
    )
    message = ""
    try:
        trainer.fit(trained, loader(regression_batches(6)[rank::2]))
    except MisconfigurationException as error:
        message = str(error)
    return message, trainer.global_step, weights(trained)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("plugin", [True, False])
def test_an_unfreeze_that_ddp_knows_nothing_of_is_refused_before_ranks_drift_apart(plugin: bool) -> None:
    (message, steps, first), (_, _, second) = run_ranks(partial(train, plugin=plugin), 2)
    assert "DDP does not reduce net.0.weight, net.0.bias, which were frozen when it was set up" in message
    assert "Freeze them in on_train_start" in message
    assert steps == 3
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("thaw", "freezes_itself"), [(FrozenLate, False), (ThawLate, True)], ids=["the remedy", "in configure_optimizers"]
)
def test_what_was_frozen_after_ddp_was_set_up_is_reduced_when_it_trains(thaw: type[Thaw], freezes_itself: bool) -> None:
    start = weights(Module())
    (message, steps, first), (_, _, second) = run_ranks(partial(train, thaw=thaw, freezes_itself=freezes_itself), 2)
    assert message == ""
    assert steps == 6
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, start, strict=True))


def test_two_fits_train_alike() -> None:
    """The other remedy."""
    (first, moved), (second, _) = run_ranks(two_fits, 2)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert moved


def two_fits(rank: int) -> tuple[list[Tensor], bool]:
    module = Module()
    module.net[0].requires_grad_(False)
    for _ in range(2):
        trainer = quiet_trainer(
            devices=2, strategy=DDPStrategy(process_group_backend="gloo"), plugins=[AutocastPrecision("bf16-mixed")]
        )
        before = weights(module)
        trainer.fit(module, loader(regression_batches(6)[rank::2]))
        module.requires_grad_(True)
        module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.1)
    return weights(module), not torch.equal(before[0], weights(module)[0])
