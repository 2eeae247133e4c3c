"""MicroBatchOnOOM under DDP: one rank alone runs out of memory, all go on with the same gradient."""

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from gloo import RankError, run_ranks
from lightning.pytorch.strategies import DDPStrategy
from planted_oom import Limited
from small_models import WIDTH, loader, quiet_trainer, regression_batches
from torch import Tensor, nn

from lightning_mp import AccumulationScheduler
from lightning_mp.callbacks.micro_batch_on_oom import MicroBatchOnOOM

WINDOWS = 4
NEVER = 10**9


def batches_of(rank: int, num_batches: int) -> list[list[Tensor]]:
    return regression_batches(2 * num_batches, batch_size=8)[rank::2]


class CountReductions(pl.Callback):
    """Bucket reductions per optimizer step, through DDP's public communication hook."""

    def __init__(self) -> None:
        self.reductions = [0]

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            self.reductions[-1] += 1
            work = dist.all_reduce(bucket.buffer().div_(2), async_op=True)
            return work.get_future().then(lambda future: future.value()[0])

        trainer.strategy.model.register_comm_hook(None, hook)

    def on_before_zero_grad(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        self.reductions.append(0)


def train(rank: int, limits: tuple[int, int], where: str, window: int, callbacks: list[Any], **ddp: Any) -> Any:
    """Gradients of all steps, what really ran, the reductions per step and the callback's size."""
    model = Limited(limits[rank], where, first=1)
    counter = CountReductions()
    split = MicroBatchOnOOM()
    trainer = quiet_trainer(
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo", **ddp),
        callbacks=[split, counter, *callbacks],
        accumulate_grad_batches=window,
    )
    trainer.fit(model, loader(batches_of(rank, WINDOWS * window)))
    assert len(model.gradients) == WINDOWS
    result = model.gradients, [rows for _, rows in model.notes.rows], counter.reductions[1:], split.size
    trainer.strategy.barrier()
    return result, trainer.callback_metrics["loss_epoch"]


def whole(window: int) -> list[list[Tensor]]:
    """Plain PyTorch, one process, nothing split."""
    model = Limited()
    optimizer = model.configure_optimizers()
    all_batches = [batches_of(rank, WINDOWS * window) for rank in (0, 1)]
    gradients = []
    for step in range(WINDOWS):
        optimizer.zero_grad()
        for index in range(step * window, (step + 1) * window):
            for batches in all_batches:
                x, y = batches[index]
                (nn.functional.mse_loss(model.net(x), y) / (2 * window)).backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
        optimizer.step()
    return gradients


def assert_close(a: list[list[Tensor]], b: list[list[Tensor]]) -> None:
    for step_a, step_b in zip(a, b, strict=True):
        for x, y in zip(step_a, step_b, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("where", "window", "ddp"),
    [
        ("forward", 1, {}),
        ("backward", 1, {"gradient_as_bucket_view": True}),
        ("backward", 3, {"find_unused_parameters": True}),
    ],
)
def test_one_rank_alone_runs_out_of_memory(where, window, ddp):
    """One reduction per window on both ranks; the other rank runs its micro-batches whole."""

    def run(rank: int) -> Any:
        return train(rank, (NEVER, 3), where, window, [], **ddp)

    ((gradients, rows, reductions, size), loss), ((other, other_rows, other_reductions, other_size), other_loss) = (
        run_ranks(run, 2)
    )
    for a, b in zip(gradients, other, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert_close(gradients, whole(window))
    buckets = reductions[0]
    assert reductions == other_reductions == [buckets] * len(reductions)
    assert sum(reductions) == WINDOWS * buckets
    assert (size, other_size) == (None, 2)
    # Micro-batch 0 fits, from 1 on not: it is tried, then the losses of its parts and of their halves are compared.
    if where == "forward":
        assert other_rows[:9] == [8, 8, 2, 2, 2, 4, 1, 1, 1]
    else:  # both comparisons fit, and the backward of a part of 4 does not
        assert other_rows[:11] == [8, 8, 2, 2, 2, 4, 2, 2, 2, 4, 4]
    assert other_rows[-4:] == [2, 2, 2, 2]
    assert rows == [8] * len(rows)
    # Logged with sync_dist=True: one collective per micro-batch, however many microbatches a rank has run.
    assert loss == other_loss


def test_buffers_and_sparse_gradients_of_a_rank_that_repeats_alone():
    """What is restored are the buffers that rank 0 has sent; sparse gradients go through the reducer as such."""

    class Normed(Limited):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.net[2] = nn.BatchNorm1d(16)
            self.embedding = nn.Embedding(11, WIDTH, sparse=True)
            self.seen: Any = Seen()

        def training_step(self, batch, batch_idx):
            if self.training:
                self.seen.means.append((batch_idx, self.net[2].running_mean.tolist()))
            x, y = batch
            return super().training_step((x + self.embedding(x[:, 0].abs().long()), y), batch_idx)

    def run(rank: int) -> Any:
        model = Normed((NEVER, 5)[rank], "backward", first=1)
        trainer = quiet_trainer(
            devices=2, strategy=DDPStrategy(process_group_backend="gloo"), callbacks=[MicroBatchOnOOM()]
        )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "MicroBatchOnOOM: 1 layers")
            trainer.fit(model, loader(batches_of(rank, 4)))
        trainer.strategy.barrier()
        return model.seen.means, [p.tolist() for p in model.parameters()]

    (means, weights), (other_means, other_weights) = run_ranks(run, 2)
    assert weights == other_weights
    # On the rank that repeats: the attempt, then the first part.
    first, again = [mean for index, mean in other_means if index == 1][:2]
    assert first == again == next(mean for index, mean in means if index == 1)


class Seen:
    """What ran, failed attempts too: an attribute of the module would be put back."""

    def __init__(self) -> None:
        self.means: list[Any] = []


class Late(Limited):
    """Notes which reductions begin inside of a backward; rank 1 runs out of memory in its backward from a batch on."""

    is_in_backward = False

    def backward(self, loss: Tensor) -> None:
        self.is_in_backward = True
        loss.backward()
        self.is_in_backward = False


def fit_late(rank: int, first: int) -> list[list[bool]]:
    """For each step, whether a backward was under way when its buckets were reduced."""
    model = Late((NEVER, 3)[rank], "backward", first=first)
    seen: list[list[bool]] = [[]]

    class Notes(pl.Callback):
        def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
                seen[-1].append(model.is_in_backward)
                work = dist.all_reduce(bucket.buffer().div_(2), async_op=True)
                return work.get_future().then(lambda future: future.value()[0])

            trainer.strategy.model.register_comm_hook(None, hook)

        def on_before_zero_grad(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
            seen.append([])

    strategy = DDPStrategy(process_group_backend="gloo")
    trainer = quiet_trainer(devices=2, strategy=strategy, callbacks=[MicroBatchOnOOM(), Notes()])
    trainer.fit(model, loader(batches_of(rank, 4)))
    trainer.strategy.barrier()
    return seen[1:]


def test_shapes_that_have_fitted_overlap_with_their_reduction():
    """From the third step on: in the second the optimizer has its state for the first time."""
    for overlapped in run_ranks(lambda rank: fit_late(rank, NEVER), 2):
        assert [all(step) for step in overlapped] == [False, False, True, True]


def test_an_overlapped_backward_that_runs_out_of_memory_ends_with_a_note():
    with pytest.raises(RankError, match="MicroBatchOnOOM: a backward that overlaps with the reduction over ranks"):
        run_ranks(lambda rank: fit_late(rank, 3), 2)


@pytest.mark.full
def test_with_a_schedule_and_ragged_batches():
    def run(rank: int) -> Any:
        return train(rank, (5, 2), "backward", 1, [AccumulationScheduler({0: 1})])

    results = run_ranks(run, 2)
    for (gradients, _, _, _), _ in results:
        assert_close(gradients, whole(1))
    assert [size for (_, _, _, size), _ in results] == [4, 2]


def test_a_collective_in_the_training_step_is_refused():
    class Gathering(Limited):
        def training_step(self, batch, batch_idx):
            self.all_gather(batch[0])
            return super().training_step(batch, batch_idx)

    def run(rank: int) -> None:
        trainer = quiet_trainer(
            devices=2, strategy=DDPStrategy(process_group_backend="gloo"), callbacks=[MicroBatchOnOOM()]
        )
        trainer.fit(Gathering(), loader(batches_of(rank, 1)))

    with pytest.raises(RankError, match=r"The training step called self\.all_gather"):
        run_ranks(run, 2)


def test_a_static_graph_is_refused():
    def run(rank: int) -> None:
        train(rank, (NEVER, NEVER), "forward", 1, [], static_graph=True)

    with pytest.raises(RankError, match="static_graph=True.*, which expects the same number"):
        run_ranks(run, 2)
