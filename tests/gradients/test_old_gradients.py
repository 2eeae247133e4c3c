"""The last step's gradients are freed before the next forward, unless somebody may read them."""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from cpu_fsdp import CpuFsdp
from gloo import run_ranks
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.strategies import DDPStrategy
from small_models import Regression, fit, regression_batches, weights
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_mp import (
    AccumulationScheduler,
    AutocastPrecision,
    ExactResume,
    FSDP2Strategy,
    GradientNoiseScale,
    MasterWeightsPrecision,
    OverflowMonitor,
)

STEPS = 4


class Watched(Regression):
    """Counts the parameters that have a gradient while the loss is computed."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.held: list[int] = []
        self.net.register_forward_hook(lambda *_: self.held.append(gradients_of(self)))


def gradients_of(module: pl.LightningModule) -> int:
    """By the optimizer's parameters: inside of a forward, masters lend the module others."""
    groups = module.trainer.optimizers[0].param_groups
    return sum(parameter.grad is not None for group in groups for parameter in group["params"])


class Keeps(pl.Callback):
    def on_before_zero_grad(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        """What anybody's own callback might read."""


PLUGINS: dict[str, Callable[[], Any]] = {
    "bf16-mixed": partial(AutocastPrecision, "bf16-mixed"),
    "16-mixed": partial(AutocastPrecision, "16-mixed"),
    "masters": partial(MasterWeightsPrecision, "bf16-true"),
    "remainder": partial(MasterWeightsPrecision, "bf16-true", storage="remainder"),
}


def trained(plugin: Callable[[], Any], window: int = 1, module: Watched | None = None, **arguments: Any) -> Watched:
    module = module or Watched(overflows={2})
    fit(module, regression_batches(STEPS * window), plugin=plugin(), accumulate_grad_batches=window, **arguments)
    return module


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("plugin", PLUGINS)
def test_no_gradient_of_the_last_step_is_alive_in_a_forward_and_no_bit_changes(plugin: str, window: int) -> None:
    """D64."""
    module = trained(PLUGINS[plugin], window, gradient_clip_val=1.0, callbacks=[OverflowMonitor(), ExactResume()])
    assert module.held == ([0] + [4] * (window - 1)) * STEPS
    kept = trained(PLUGINS[plugin], window, gradient_clip_val=1.0, callbacks=[Keeps()])
    assert kept.held[window] == 4
    for ours, theirs in zip(weights(module), weights(kept), strict=True):
        assert torch.equal(ours, theirs)
    assert gradients_of(module) == 4, "after the fit they are there, as in Lightning"


def test_a_window_and_our_own_callbacks_do_not_keep_them() -> None:
    module = trained(
        PLUGINS["bf16-mixed"], 1, Watched(), callbacks=[AccumulationScheduler({0: 2}), GradientNoiseScale()]
    )
    assert module.held == [0, 4] * 2


class WithHook(Watched):
    def on_before_zero_grad(self, optimizer: Any) -> None:
        pass


class WithZeroGrad(Watched):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class ReadsInItsStep(Watched):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("norm", sum(p.grad.norm() for p in self.parameters() if p.grad is not None))
        return super().training_step(batch, batch_idx)


class ReadsThroughAFunction(Watched):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss_of(batch, batch_idx)

    def loss_of(self, batch: Any, batch_idx: int) -> Tensor:
        gradients_of(self)  # its generator expression is code of its own
        return super().training_step(batch, batch_idx)


def reading(step: Any) -> Any:
    @wraps(step)
    def read_first(self: Any, *arguments: Any) -> Any:
        return step(self, *arguments) if gradients_of(self) >= 0 else None

    return read_first


class Decorated(Watched):
    @reading
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx)


class StepsWithItsOwnBackward(Watched):
    """Its first backward adds to what is there, as in Lightning."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        super().training_step(batch, batch_idx).backward()
        return super().training_step(batch, batch_idx)


class ZeroesInItsOwnWay(torch.optim.SGD):
    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none=False)


def on_the_instance() -> Watched:
    module = Watched()
    module.on_before_zero_grad = lambda optimizer: None  # type: ignore[method-assign]
    return module


READERS: dict[str, Callable[[], Watched]] = {
    "hook": WithHook,
    "zero_grad": WithZeroGrad,
    "instance": on_the_instance,
    "step": ReadsInItsStep,
    "function": ReadsThroughAFunction,
    "decorator": Decorated,
    "own backward": StepsWithItsOwnBackward,
    "optimizer": lambda: Watched(optimizer=partial(ZeroesInItsOwnWay, lr=0.1)),
}


@pytest.mark.parametrize("reader", READERS)
def test_gradients_that_somebody_may_read_are_kept_as_in_lightning(reader: str) -> None:
    module = trained(PLUGINS["bf16-mixed"], module=READERS[reader]())
    stock = READERS[reader]()
    fit(stock, regression_batches(STEPS), precision="bf16-mixed")
    assert module.held == stock.held
    assert module.held[-1] == 4
    for ours, theirs in zip(weights(module), weights(stock), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("callback", [Keeps(), LambdaCallback(on_before_zero_grad=lambda *_: None)])
def test_a_callback_that_may_read_them_keeps_them(callback: pl.Callback) -> None:
    assert trained(PLUGINS["16-mixed"], callbacks=[callback]).held == [0, 4, 4, 4]


STRATEGIES: dict[str, Callable[[], Any]] = {
    "ddp": partial(DDPStrategy, process_group_backend="gloo"),
    "ddp, views": partial(DDPStrategy, process_group_backend="gloo", gradient_as_bucket_view=True),
    "fsdp": CpuFsdp,
    "fsdp2": partial(FSDP2Strategy, shard="net.*"),
}


def own_weights(module: pl.LightningModule) -> Tensor:
    return torch.cat([(w.to_local() if isinstance(w, DTensor) else w).flatten() for w in weights(module)])


def test_ranks_free_them_and_no_bit_changes() -> None:
    def train(rank: int) -> dict[str, tuple[list[int], bool]]:
        found = {}
        for name, strategy in STRATEGIES.items():
            runs = [
                trained(PLUGINS["16-mixed"], 2, callbacks=callbacks, strategy=strategy(), devices=2)
                for callbacks in ([], [Keeps()])
            ]
            ours, kept = map(own_weights, runs)
            found[name] = (runs[0].held, torch.equal(ours, kept))
        return found

    for found in run_ranks(train, 2):
        assert all(equal for _, equal in found.values())
        assert {name: held[::2] for name, (held, _) in found.items()} == dict.fromkeys(STRATEGIES, [0] * STEPS)


def test_hooks_between_two_steps_still_see_them() -> None:
    seen: list[int] = []
    hooks = ("on_train_batch_end", "on_train_batch_start")
    callback = LambdaCallback(**{hook: lambda trainer, module, *_: seen.append(gradients_of(module)) for hook in hooks})
    module = trained(PLUGINS["bf16-mixed"], module=Watched(), callbacks=[callback])
    assert module.held == [0] * STEPS
    assert seen == [0] + [4] * (2 * STEPS - 1)


def test_manual_optimization_keeps_what_the_module_keeps() -> None:
    class Manual(Watched):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            loss, optimizer = super().training_step(batch, batch_idx), self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    assert trained(PLUGINS["bf16-mixed"], module=Manual()).held == [0, 4, 4, 4]
