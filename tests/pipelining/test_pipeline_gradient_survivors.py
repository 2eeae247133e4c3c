"""Gradients of a pipeline where a small slip would go unnoticed: windows in manual optimization, frozen layers."""

import contextlib

import pytest
import torch
from gloo import run_ranks
from pipelined_models import PipelinedGPT, PipelinedMLP, losses_of, token_batches

from lightning_mp import PipelineParallelStrategy
from lightning_mp.gradients.bucketed_all_reduce import buckets
from lightning_mp.gradients.clipping import clip_by_whole_norm_
from lightning_mp.gradients.replication import GradientReplication
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


@pytest.mark.parametrize(("max_norm", "wanted"), [(-1.0, 3.0), (0.0, 3.0), (1.5, 1.5)])
def test_a_largest_norm_of_zero_leaves_gradients_alone(max_norm, wanted):
    parameter = torch.nn.Parameter(torch.zeros(9))
    parameter.grad = torch.ones(9)
    ranks = GradientReplication.every_rank()
    clip_by_whole_norm_(torch.optim.SGD([parameter], lr=0.1), max_norm, ranks, torch.device("cpu"))
    assert float(parameter.grad.norm()) == pytest.approx(wanted, rel=1e-5)


def test_buckets_count_the_bytes_of_the_sum_and_hold_one_device():
    """16-bit gradients are widened before they are sent."""
    half = [torch.zeros(10, dtype=torch.bfloat16) for _ in range(2)]
    assert [len(bucket) for bucket in buckets(half, 79)] == [1, 1]
    assert [len(bucket) for bucket in buckets(half, 80)] == [2]
    assert [len(bucket) for bucket in buckets([torch.zeros(1), torch.zeros(1, device="meta")], 80)] == [1, 1]
