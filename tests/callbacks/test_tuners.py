"""Tuners train the module before the fit, with callbacks of their own: the fit is what it would have been without."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, Callback, LearningRateFinder
from lightning.pytorch.tuner import Tuner
from small_models import TokenModel, quiet_trainer, token_batches, weights
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_mp import (
    AccumulationScheduler,
    AutocastPrecision,
    ChinchillaBudget,
    GradientNoiseScale,
    LossScaler,
    MasterWeightsPrecision,
    OverflowMonitor,
    TokenLearningRate,
    WarmupCosine,
)

pytestmark = pytest.mark.filterwarnings("ignore:You are tuning with `BatchSizeFinder`")

SEARCH = {"num_training": 10, "update_attr": False}
TRIALS = {"steps_per_trial": 2, "max_trials": 1, "init_val": 2}


class Tuned(TokenModel):
    """Eight rows of twelve tokens, two in a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.lr, self.batch_size = 0.1, 2

    def train_dataloader(self) -> DataLoader[Any]:
        rows = [tuple(part[0] for part in batch) for batch in token_batches([12] * 8)]
        return DataLoader(rows, batch_size=self.batch_size)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), self.lr)


PLUGINS: dict[str, Callable[[], list[Any]]] = {
    "no plugin": list,
    "fp16": lambda: [AutocastPrecision("16-mixed", scaler=LossScaler(init_scale=2.0**16, growth_interval=2))],
    "remainder": lambda: [MasterWeightsPrecision("bf16-true", storage="remainder")],
}
CALLBACKS: dict[str, Callable[[], list[Callback]]] = {
    "windows": lambda: [AccumulationScheduler({0: 3})],
    "budget": lambda: [AccumulationScheduler({0: 3}), ChinchillaBudget(tokens=131), TokenLearningRate(WarmupCosine())],
    "monitors": lambda: [OverflowMonitor(), GradientNoiseScale(), AccumulationScheduler({0: 2})],
}
TUNERS: dict[str, Callable[[Any, Any], None]] = {
    "Tuner.lr_find": lambda trainer, module: Tuner(trainer).lr_find(module, **SEARCH),
    "Tuner.scale_batch_size": lambda trainer, module: Tuner(trainer).scale_batch_size(module, **TRIALS),
    "LearningRateFinder": lambda trainer, module: trainer.callbacks.append(
        LearningRateFinder(num_training_steps=10, update_attr=False)
    ),
    "BatchSizeFinder": lambda trainer, module: trainer.callbacks.append(BatchSizeFinder(**TRIALS)),
}


def fitted(plugin: str, callbacks: str, tuner: str | None) -> tuple[list[Tensor], list[Any]]:
    """The weights; the steps, the epoch, the tokens and the loss scale."""
    module, made = Tuned(), CALLBACKS[callbacks]()
    trainer = quiet_trainer(plugins=PLUGINS[plugin](), callbacks=made, max_epochs=3)
    if tuner is not None:
        TUNERS[tuner](trainer, module)
    trainer.fit(module)
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    tokens = [callback.tokens_seen for callback in made if isinstance(callback, ChinchillaBudget)]
    scale = scaler.get_scale() if scaler is not None else None
    return weights(module), [trainer.global_step, trainer.current_epoch, module.batch_size, scale, *tokens]


@pytest.mark.parametrize("tuner", TUNERS)
@pytest.mark.parametrize("callbacks", CALLBACKS)
@pytest.mark.parametrize("plugin", PLUGINS)
def test_the_fit_is_the_same_after_a_search(plugin: str, callbacks: str, tuner: str) -> None:
    """Promise 4: a window's mean, the budget and the schedule; to the bit."""
    expected, expected_counts = fitted(plugin, callbacks, None)
    found, counts = fitted(plugin, callbacks, tuner)
    assert counts == expected_counts
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
