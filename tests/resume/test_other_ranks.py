"""Promise 6: resumed on another number of ranks, an epoch has the samples that are left, in the same steps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from exact_runs import BATCH, BATCHES, SAMPLES, Augmented, Dropped
from gloo import run_ranks
from lightning.pytorch.callbacks import Callback
from pipelined_models import PipelinedMLP, fit
from restarts import Interruption, saved_and_interrupted
from small_models import at, quiet_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from lightning_mp import ExactResume, PipelineParallelStrategy

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]

Steps = dict[tuple[int, int], list[float]]
SAVED_AFTER = BATCHES + 2


def shuffled(batch_size: int) -> "DataLoader[Any]":
    return DataLoader(Augmented(), batch_size, shuffle=True)


def train(
    ranks: int, *, saves: Path | None = None, resumes: Path | None = None, make: Callable[[int], Any] = shuffled
) -> Steps:
    """The samples of each step, on this rank."""
    pl.seed_everything(0 if resumes is None else 5, verbose=False)
    trainer = quiet_trainer(
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        callbacks=[ExactResume(), *([at(saved_and_interrupted(saves), call=SAVED_AFTER)] if saves is not None else [])],
        max_epochs=3,
        use_distributed_sampler=True,
    )
    module = Dropped()
    try:
        trainer.fit(module, make(BATCH // ranks), ckpt_path=resumes)
    except Interruption:
        assert saves is not None
    return module.steps


def on_ranks(ranks: int, **arguments: Any) -> Steps:
    """The samples of each step, of all ranks together."""
    found = run_ranks(lambda _: train(ranks, **arguments), ranks)
    return {place: sorted(sample for steps in found for sample in steps[place]) for place in found[0]}


def test_the_samples_of_each_step_stay_on_more_and_on_fewer_ranks(tmp_path: Path) -> None:
    """From two ranks in all epochs; from one in the epoch that was begun, and each sample once in those after it."""
    two, one = tmp_path / "two.ckpt", tmp_path / "one.ckpt"
    straight = {ranks: on_ranks(ranks) for ranks in (1, 2)}
    on_ranks(2, saves=two)
    on_ranks(1, saves=one)
    resumed = {ranks: on_ranks(ranks, resumes=two) for ranks in (1, 4)}
    assert resumed[1] == {place: samples for place, samples in straight[2].items() if place >= (1, 2)}
    for place, samples in resumed[4].items():
        # DistributedSampler fills up the last step of four ranks with the first two samples
        added = set(samples) - set(straight[2][place])
        assert len(added) == (2 if place[1] == BATCHES - 1 else 0)
        assert set(straight[2][place]) <= set(samples)
    from_one = on_ranks(2, resumes=one)
    assert {place: s for place, s in from_one.items() if place[0] == 1} == {
        place: s for place, s in straight[1].items() if place[0] == 1 and place >= (1, 2)
    }
    assert sorted(sample for place, samples in from_one.items() if place[0] == 2 for sample in samples) == [
        *map(float, range(SAMPLES))
    ]


def weighted(batch_size: int) -> "DataLoader[Any]":
    return DataLoader(Augmented(), batch_size, sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES))


def test_samples_that_a_sampler_orders_are_refused_where_ranks_split_them_otherwise(tmp_path: Path) -> None:
    train(1, saves=tmp_path / "one.ckpt", make=weighted)

    def resumed(rank: int) -> str:
        with pytest.raises(ValueError, match="ExactResume cannot continue") as refused:
            train(2, resumes=tmp_path / "one.ckpt", make=weighted)
        return str(refused.value)

    for message in run_ranks(resumed, 2):
        assert (
            "on another number of ranks: a sampler of your own orders samples (DistributedSamplerWrapper now)"
            in message
        )


class DroppedInLayers(PipelinedMLP):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.3)) for _ in range(5))


def test_the_stages_of_a_pipeline_draw_on(tmp_path: Path) -> None:
    """Each stage draws from a sequence of its own."""
    path = tmp_path / "pipelined.ckpt"

    def on_rank(*callbacks: Callback, resumes: Path | None = None) -> tuple[list[float], list[torch.Tensor]]:
        pl.seed_everything(0 if resumes is None else 5, verbose=False)
        x = torch.randn(22, 6, generator=torch.Generator().manual_seed(1))
        loader = DataLoader(TensorDataset(x, x.flip(1) ** 2), 8, shuffle=True)
        module = DroppedInLayers()
        arguments: dict[str, Any] = {"callbacks": [ExactResume(), *callbacks], "ckpt_path": resumes}
        try:
            fit(module, PipelineParallelStrategy(), 2, train=loader, **arguments)
        except Interruption:
            return [], []
        return module.train_losses, [p.detach() for p in module.parameters() if p.device.type != "meta"]

    straight = run_ranks(lambda _: on_rank(), 2)
    run_ranks(lambda _: on_rank(at(saved_and_interrupted(path), call=4)), 2)
    for (losses, weights), (own, own_weights) in zip(
        straight, run_ranks(lambda _: on_rank(resumes=path), 2), strict=True
    ):
        assert losses[4:] == own
        assert all(torch.equal(a, b) for a, b in zip(weights, own_weights, strict=True))
