"""Gradients of a pipeline: summed up once over copies and windows, with frozen layers left out of the norm."""

import contextlib

import pytest
import torch
from gloo import run_same_ranks as run_ranks
from pipelined_models import PipelinedGPT, PipelinedMLP, losses_of, token_batches

from lightning_mp import PipelineParallelStrategy
from lightning_mp.pipelining import pipelined_loss

#: For each step, which of its backwards are kept local.
WINDOWS = [(True, True, False), (True, False, False), (False, True, False)]


class Windows(PipelinedGPT):
    """Several different gradients in a step, of tied weights too, which would show if they were summed up twice."""

    def __init__(self):
        super().__init__(torch.optim.SGD, lr=0.1)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer, strategy = self.optimizers(), self.trainer.strategy
        optimizer.zero_grad()
        for places, kept in enumerate(WINDOWS[batch_idx % len(WINDOWS)]):
            with contextlib.suppress(KeyError), strategy.block_backward_sync():
                raise KeyError  # what goes wrong in a window ends the window
            loss = pipelined_loss(self, (batch[0].roll(places, 1), batch[1]))
            with strategy.block_backward_sync() if kept else contextlib.nullcontext():
                self.manual_backward(loss)
        optimizer.step()
        self.train_losses.append(float(loss.detach()))


@pytest.mark.full
def test_gradients_are_reduced_once_whichever_backwards_are_kept_local():
    def rank(strategy, devices):
        batches = token_batches(48, 4, masked=False)
        return losses_of(Windows(), strategy, devices, train=batches, limit_val_batches=0, max_epochs=1)

    wanted = run_ranks(lambda _: rank("ddp", 2), 2)
    got = run_ranks(lambda _: rank(PipelineParallelStrategy(2, microbatches=2), 4), 4)
    for own, expected in zip(got, wanted * 2, strict=True):
        assert own == pytest.approx(expected, rel=1e-5)


class Frozen(PipelinedMLP):
    """The first layers do not train."""

    def __init__(self, layers):
        super().__init__()
        for layer in self.layers[:layers]:
            layer.requires_grad_(False)


@pytest.mark.full
@pytest.mark.parametrize(
    ("layers", "devices"),
    # Stages of three and two layers: a part of one on two ranks, and all of one.
    [(1, 4), (3, 2)],
)
def test_frozen_layers_have_no_gradient_and_take_no_part_in_the_norm(layers, devices):
    arguments = {"max_epochs": 1, "limit_val_batches": 0, "gradient_clip_val": 0.05}
    strategy = {"stages": 2, "microbatches": 2, "split_points": ["layers.3"]}
    wanted = run_ranks(lambda _: losses_of(Frozen(layers), "ddp", devices // 2, **arguments), devices // 2)
    got = run_ranks(
        lambda _: losses_of(Frozen(layers), PipelineParallelStrategy(**strategy), devices, **arguments), devices
    )
    for own, expected in zip(got, wanted * 2, strict=True):
        assert own == pytest.approx(expected, rel=1e-5)


class TwoBackwards(PipelinedGPT):
    """Different gradients add up in one step, of tied weights too; nothing hides how long they are."""

    def __init__(self):
        super().__init__(torch.optim.SGD, lr=0.1)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for places in (0, 1):
            loss = pipelined_loss(self, (batch[0].roll(places, 1), batch[1]))
            self.manual_backward(loss)
        optimizer.step()
        self.train_losses.append(float(loss.detach()))


@pytest.mark.full
def test_gradients_of_two_backwards_add_up_after_they_were_averaged():
    wanted = run_ranks(lambda _: losses_of(TwoBackwards(), "ddp", 2, max_epochs=1), 2)
    got = run_ranks(lambda _: losses_of(TwoBackwards(), PipelineParallelStrategy(2), 4, max_epochs=1), 4)
    for own, expected in zip(got, wanted * 2, strict=True):
        assert own == pytest.approx(expected, rel=1e-5)
