"""Gradients averaged in buckets, and how often a pipeline does so."""

import weakref

import pytest
import torch
import torch.distributed as dist
from gloo import process_group, run_ranks
from pipelined_models import PipelinedGPT, PipelinedMLP, fit

from lightning_mp import PipelineParallelStrategy
from lightning_mp.training.gradients import bucketed_all_reduce
from lightning_mp.training.gradients.bucketed_all_reduce import buckets, reduce_gradients_
from lightning_mp.training.gradients.clipping import clip_by_whole_norm_
from lightning_mp.training.gradients.replication import GradientReplication


@pytest.mark.parametrize("mean", [True, False])
def test_means_and_sums_are_those_of_all_ranks(mean):
    shapes = [(3, 5), (7,), (), (40,), (2, 2)]
    dtypes = [torch.float32, torch.float32, torch.bfloat16, torch.float64, torch.float16]

    def made(rank):
        generator = torch.Generator().manual_seed(rank)
        return [torch.randn(s, generator=generator).to(d) for s, d in zip(shapes, dtypes, strict=True)]

    def rank(number):
        with process_group(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(bucketed_all_reduce, "BUCKET_BYTES", 100)
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


def test_two_buckets_are_on_their_way_at_a_time():
    """Not a second copy of all gradients: a bucket's buffer is dropped before the third one is filled."""

    class Done:
        """In place of gloo's work, whose thread drops its buffer some time after the wait."""

        def wait(self):
            waited.append(len(sent))

    sent, alive, waited = [], [], []

    def all_reduce(tensor, **_):
        sent.append(weakref.ref(tensor))
        alive.append(sum(reference() is not None for reference in sent))
        return Done()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", all_reduce)
        patch.setattr(dist, "get_world_size", lambda group=None: 2)
        patch.setattr(bucketed_all_reduce, "BUCKET_BYTES", 40)
        reduce_gradients_([torch.ones(10) for _ in range(6)], None, mean=True)
    assert alive == [1, 2, 2, 2, 2, 2]
    assert waited == [2, 3, 4, 5, 6, 6]


@pytest.mark.full
@pytest.mark.parametrize(("model", "per_window"), [(PipelinedMLP, 1), (PipelinedGPT, 2)])
def test_a_window_is_reduced_once(model, per_window):
    """Promise 5: one mean over the copies per window, and one sum where a parameter is tied over stages."""

    def rank(_):
        reduced = []
        original = dist.all_reduce

        def counting(tensor, *args, **kwargs):
            reduced.append(tensor.numel())
            return original(tensor, *args, **kwargs)

        bucketed_all_reduce.dist = type("counted", (), {"all_reduce": counting, "get_world_size": dist.get_world_size})
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
