"""True gradients under MasterWeightsPrecision: below fp16's range, in hooks, clipped by hand, accumulated in fp32."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from master_loops import DTYPES, clipping, master_weights, masters_of
from small_models import Regression, Trained, fit, loader, quiet_trainer, regression_batches, sgd, weights
from torch import Tensor, nn

from lightning_mp import LossScaler


class Tiny(Regression):
    """Gradients of 1e-8: zero in fp16, unless they are scaled."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * 1e-8


@pytest.mark.parametrize("looked_at", [False, True])
@pytest.mark.parametrize("clip", [None, ("norm", 1e-9), ("value", 1e-9)], ids=["unclipped", "norm", "value"])
@pytest.mark.parametrize("optimizer", ["sgd", "sgd_fused"])
def test_gradients_below_fp16_arrive(optimizer: str, clip: tuple[str, float] | None, looked_at: bool) -> None:
    """Unscaling in fp16 would make them zero; clipping and hooks must not."""
    seen: list[Tensor] = []

    class Witness(Callback):
        def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, _: Any) -> None:
            seen.extend(p.grad.clone() for p in pl_module.parameters())

    make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = {
        "sgd": lambda p: torch.optim.SGD(p, lr=1e6),
        "sgd_fused": lambda p: torch.optim.SGD(p, lr=1e6, fused=True),
    }[optimizer]
    batches = regression_batches(1)
    module, fp32 = Tiny(make), Tiny(make)
    trainer = quiet_trainer(
        plugins=[master_weights("16-true", scaler=LossScaler(init_scale=2.0**20))],
        callbacks=[Witness()] if looked_at else [],
        **clipping(clip),
    )
    trainer.fit(module, loader(batches))
    fp32_loss = fp32.training_step(batches[0], 0)
    fp32_loss.backward()
    raw = [p.grad.clone() for p in fp32.parameters()]
    if clip is not None:
        limit = nn.utils.clip_grad_norm_ if clip[0] == "norm" else nn.utils.clip_grad_value_
        limit(fp32.parameters(), clip[1])
    for master, start, parameter in zip(masters_of(trainer), weights(Tiny(make)), fp32.parameters(), strict=True):
        if clip is not None and clip[0] == "norm":
            # clip_grad_norm_ adds 1e-6 to the norm, much more than the norm is here.
            continue
        torch.testing.assert_close(master - start, -1e6 * parameter.grad, rtol=0.02, atol=1e-5)
        assert (master != start).any()
    if looked_at:
        assert {g.dtype for g in seen} == {torch.float32}
        torch.testing.assert_close(seen, raw, rtol=0.02, atol=1e-11)


@pytest.mark.parametrize("fp32_gradients", [False, True])
def test_a_step_around_the_parents_step_is_one_step(fp32_gradients: bool) -> None:
    """With fp32 gradients the optimizer changes the parameter's own gradient in place."""

    class Around(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            parameters = self.param_groups[0]["params"]
            for p in parameters:
                p.grad.clamp_(-0.01, 0.01)
            super().step(closure)
            for p in parameters:
                p.mul_(1 - 1e-5)

    batches = regression_batches(4)
    ends = []
    for make in (lambda p: Around(p, lr=1e-2), lambda p: torch.optim.SGD(p, lr=1e-2)):
        module = Regression(make)
        start = weights(module)
        trainer = fit(module, batches, plugin=master_weights(fp32_gradients=fp32_gradients), gradient_clip_val=10.0)
        ends.append(masters_of(trainer))
    for ours, plain, before in zip(*ends, start, strict=True):
        # Clamping binds, and the weights decay by 1e-5 per step: neither may be lost to rounding.
        assert (ours - before * (1 - 1e-5) ** 4).abs().max() <= 4.001e-4
        assert (plain - before).abs().max() > 4.001e-4


def test_after_the_step_gradients_are_16_bit_again() -> None:
    seen: list[torch.dtype] = []

    class Witness(Callback):
        def on_before_optimizer_step(self, *_: Any) -> None: ...

        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
            seen.extend({p.grad.dtype for p in pl_module.parameters()} | {p.grad_dtype for p in pl_module.parameters()})

    fit(Regression(), regression_batches(2), Witness(), plugin=master_weights(), gradient_clip_val=0.1)
    assert set(seen) == {torch.bfloat16}


def test_a_backward_after_clipping_finds_16_bit_gradients() -> None:
    """Clipped without a step: another backward adds to what was clipped, and DDP finds gradients of its own dtype."""

    class ClipsTwice(Regression):
        automatic_optimization = False

        def configure_optimizers(self) -> Any:
            return sgd(self.net[0].parameters()), sgd(self.net[2].parameters())

        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            first, _ = self.optimizers()
            for _ in range(2):
                self.manual_backward(super().training_step(batch, batch_idx))
                self.after_backward = {p.grad.dtype for p in self.parameters()}
                self.clip_gradients(first, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
                self.norm = torch.stack([p.grad.float().norm() for p in self.net[0].parameters()]).norm().item()

    module = ClipsTwice()
    fit(module, regression_batches(1), plugin=master_weights())
    assert module.after_backward == {torch.bfloat16}
    assert module.norm == pytest.approx(0.1, rel=1e-3)


@pytest.mark.parametrize("precision", DTYPES)
def test_fp32_gradients_accumulate_what_16_bit_loses(precision: str) -> None:
    """Sixteen micro-batches with one large gradient in front: in bf16 the small ones that follow vanish."""

    def zero() -> nn.Linear:
        layer = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(layer.weight)
        return layer

    def sums() -> Trained:
        optimizer = partial(torch.optim.SGD, lr=1.0)
        return Trained(lambda module, batch: module.layer(batch).float().sum(), optimizer, layer=zero)

    small = 2.0**-10 if precision == "bf16-true" else 2.0**-12
    batches = [torch.ones(1), *[torch.full((1,), small)] * 15]
    ends = {}
    for fp32_gradients in (False, True):
        trainer = quiet_trainer(
            plugins=[master_weights(precision, fp32_gradients=fp32_gradients)], accumulate_grad_batches=16
        )
        module = sums()
        trainer.fit(module, loader(batches))
        ends[fp32_gradients] = masters_of(trainer)[0].item() * -16
    assert ends[True] == 1 + 15 * small
    assert ends[False] == 1.0
