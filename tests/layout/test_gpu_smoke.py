"""What only a CUDA device can show: both precisions train, a healthy step waits for nothing, the scale is torch's."""

import math

import lightning as L
import pytest
import torch
from small_models import Outcomes, at, fit
from torch.nn.functional import cross_entropy

from lightning_mp import AutocastPrecision, LossScaler, OverflowMonitor
from lightning_mp.language_model import GPT, GPTConfig

pytestmark = pytest.mark.gpu

CONFIG = GPTConfig(layers=2, heads=2, width=64, block_tokens=64, vocab=64)


def repeated_batch(count: int) -> list[list[torch.Tensor]]:
    """The same tokens again and again, so that the loss has to fall."""
    ids = torch.randint(0, CONFIG.vocab, (8, CONFIG.block_tokens + 1), generator=torch.Generator().manual_seed(0))
    return [[ids[:, :-1], ids[:, 1:]]] * count


class SmallGPT(L.LightningModule):
    """Trains with a fused optimizer; at the planted steps the loss is infinite."""

    def __init__(self, planted: frozenset[int] = frozenset()) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = GPT(CONFIG)
        self.planted = planted
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        ids, labels = batch
        loss = cross_entropy(self.model(ids).flatten(0, 1), labels.flatten())
        self.losses.append(loss.detach())
        return loss * math.inf if batch_idx in self.planted else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)


class NoDeviceWait(L.Callback):
    """Makes torch raise on any wait for the device between backward and the end of the step, from `first` on."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.guarded_steps = 0

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.global_step >= self.first:
            torch.cuda.set_sync_debug_mode("error")
            self.guarded_steps += 1

    def on_train_batch_end(self, *arguments: object) -> None:
        torch.cuda.set_sync_debug_mode("default")

    def on_exception(self, *arguments: object) -> None:
        torch.cuda.set_sync_debug_mode("default")


def train(module: SmallGPT, plugin: AutocastPrecision, steps: int, *callbacks: L.Callback) -> None:
    fit(module, repeated_batch(steps), *callbacks, plugin=plugin, accelerator="gpu", gradient_clip_val=1.0)


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_the_loss_falls_on_cuda(precision: str) -> None:
    module = SmallGPT()
    train(module, AutocastPrecision(precision), 60)
    first, last = module.losses[0].item(), module.losses[-1].item()
    assert first == pytest.approx(math.log(CONFIG.vocab), abs=0.3)
    assert last < first / 2
    assert all(parameter.dtype is torch.float32 for parameter in module.parameters())
    assert all(bool(parameter.isfinite().all()) for parameter in module.parameters())


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_a_healthy_fused_step_does_not_wait_for_the_device(precision: str) -> None:
    guard, monitor, outcomes = NoDeviceWait(first=3), OverflowMonitor(), Outcomes()
    train(SmallGPT(), AutocastPrecision(precision), 12, monitor, outcomes, guard)  # last: the others are guarded too
    assert guard.guarded_steps >= 8
    assert all(outcome.stepped for outcome in outcomes.seen)


def test_the_guard_sees_a_wait() -> None:
    """Without this the test above could pass because nothing is looked for."""

    waits = at(lambda _, module: module.losses[-1].item(), "on_before_optimizer_step")
    with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
        train(SmallGPT(), AutocastPrecision("bf16-mixed"), 12, NoDeviceWait(first=3), waits)


def test_scale_and_skips_equal_torch_on_planted_overflows() -> None:
    planted, steps, interval = frozenset({2, 3, 9}), 16, 4
    outcomes = Outcomes()
    outcomes = Outcomes()
    plugin = AutocastPrecision("16-mixed", scaler=LossScaler("cuda", growth_interval=interval))
    train(SmallGPT(planted), plugin, steps, outcomes)

    module = SmallGPT(planted).cuda()
    optimizer = module.configure_optimizers()
    scaler = torch.amp.GradScaler("cuda", growth_interval=interval)
    expected = []
    for index, batch in enumerate(repeated_batch(steps)):
        scale = scaler.get_scale()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = module.training_step([tensor.cuda() for tensor in batch], index)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        expected.append((index, scale, index not in planted))
    seen = [(outcome.step_index, outcome.loss_scale, outcome.stepped) for outcome in outcomes.seen]
    assert len(seen) >= steps - 1  # with a fused optimizer an outcome comes one step late
    assert seen == expected[: len(seen)]
    assert plugin.scaler is not None
    assert plugin.scaler.get_scale() == scaler.get_scale()
