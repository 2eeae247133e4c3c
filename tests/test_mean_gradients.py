"""Gradients averaged in buckets, and how often a pipeline does so."""

import weakref

import pytest
import torch
import torch.distributed as dist
from gloo import process_group, run_ranks
from pipelined_models import PipelinedGPT, PipelinedMLP, fit

from lightning_mp import mean_gradients
from lightning_mp.mean_gradients import buckets, reduce_gradients_
from lightning_mp.strategies.pipeline import PipelineParallelStrategy


@pytest.mark.parametrize("mean", [True, False])
def test_means_and_sums_are_those_of_all_ranks(mean, monkeypatch):
    monkeypatch.setattr(mean_gradients, "BUCKET_BYTES", 100)
    shapes = [(3, 5), (7,), (), (40,), (2, 2)]
    dtypes = [torch.float32, torch.float32, torch.bfloat16, torch.float64, torch.float16]

    def made(rank):
        generator = torch.Generator().manual_seed(rank)
        return [torch.randn(s, generator=generator).to(d) for s, d in zip(shapes, dtypes, strict=True)]

    def rank(number):
        with process_group():
            gradients = made(number)
            kept = list(gradients)
            reduce_gradients_(gradients, dist.group.WORLD, mean=mean)
            assert all(a is b for a, b in zip(gradients, kept, strict=True))
            return gradients

    wanted = [sum(g.double() for g in parts) / (3 if mean else 1) for parts in zip(*map(made, range(3)), strict=True)]
    for got in run_ranks(rank, 3):
        for gradient, value, dtype in zip(got, wanted, dtypes, strict=True):
            # 16-bit values are summed in fp32 and rounded once.
            once = {torch.bfloat16: 2**-8, torch.float16: 2**-11}.get(dtype, 2e-6)
            torch.testing.assert_close(gradient.double(), value, rtol=once, atol=1e-6)


def test_buckets_hold_one_dtype_and_keep_the_order():
    gradients = [torch.zeros(5, dtype=d) for d in (torch.float32, torch.float32, torch.bfloat16, torch.float32)]
    assert [[id(g) for g in bucket] for bucket in buckets(gradients, 10**6)] == [
        [id(g) for g in gradients[:2]],
        [id(gradients[2])],
        [id(gradients[3])],
    ]
    assert [len(bucket) for bucket in buckets(gradients[:2], 39)] == [1, 1]
    assert [len(bucket) for bucket in buckets(gradients[:2], 40)] == [2]


def test_two_buckets_are_on_their_way_at_a_time(monkeypatch):
    """Not a second copy of all gradients."""
    monkeypatch.setattr(mean_gradients, "BUCKET_BYTES", 40)

    def rank(_):
        sent, most = [], 0
        original = dist.all_reduce

        def counting(tensor, *args, **kwargs):
            nonlocal most
            sent.append(weakref.ref(tensor))
            most = max(most, sum(reference() is not None for reference in sent))
            return original(tensor, *args, **kwargs)

        with process_group(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "all_reduce", counting)
            reduce_gradients_([torch.ones(10) for _ in range(6)], dist.group.WORLD, mean=True)
        return len(sent), most

    assert run_ranks(rank, 2) == [(6, 2), (6, 2)]


@pytest.mark.parametrize(("model", "per_window"), [(PipelinedMLP, 1), (PipelinedGPT, 2)])
def test_a_window_is_reduced_once(model, per_window):
    """Promise 5: one mean over the copies per window, and one sum where a parameter is tied over stages."""

    def rank(_):
        reduced = []
        original = dist.all_reduce

        def counting(tensor, *args, **kwargs):
            reduced.append(tensor.numel())
            return original(tensor, *args, **kwargs)

        mean_gradients.dist = type("counted", (), {"all_reduce": counting, "get_world_size": dist.get_world_size})
        module = model()
        trainer = fit(
            module, PipelineParallelStrategy(2), 4, max_epochs=1, accumulate_grad_batches=2, limit_train_batches=4
        )
        own = sum(p.numel() for p in module.parameters())
        return reduced, own, trainer.global_step

    for reduced, own, steps in run_ranks(rank, 4):
        assert steps == 1  # 22 samples in batches of 8, two copies: one window of two, shortened
        assert len(reduced) == per_window * steps
        assert own in reduced
