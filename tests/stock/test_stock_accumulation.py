"""What Lightning makes of windows of micro-batches, with ours beside each.

A test that fails here says that upstream has changed: then rewrite the row of docs/defects.md that it names.
"""

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler, StochasticWeightAveraging
from small_models import (
    Regression,
    ResumableLoader,
    Trained,
    at,
    fit,
    loader,
    quiet_trainer,
    regression_batches,
    saving,
    stop_run,
)
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_mp import AccumulationScheduler

MICRO_BATCHES = 12


class Shares(pl.LightningModule):
    """The gradient of micro-batch i is one in element i: a step's gradient has the share of each micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(MICRO_BATCHES))
        self.steps: list[dict[int, float]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.weight @ batch

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        optimizer.register_step_post_hook(lambda *_: self._note())
        return optimizer

    def _note(self) -> None:
        assert self.weight.grad is not None
        self.steps.append({i: round(share, 3) for i, share in enumerate(self.weight.grad.tolist()) if share})


def rows(count: int = MICRO_BATCHES) -> list[Tensor]:
    return list(torch.eye(MICRO_BATCHES)[:count])


def shares(micro_batches: int = MICRO_BATCHES, **arguments: Any) -> list[dict[int, float]]:
    """Of each step."""
    module = Shares()
    fit(module, rows(micro_batches), **arguments)
    return module.steps


def test_the_last_window_is_divided_by_a_full_one() -> None:
    """D29."""
    assert shares(6, accumulate_grad_batches=4)[1] == {4: 0.25, 5: 0.25}
    assert shares(6, callbacks=[AccumulationScheduler({0: 4})])[1] == {4: 0.5, 5: 0.5}


def tokens() -> Trained:
    """Mean cross-entropy of logits that do not depend on the input."""
    return Trained(
        lambda module, labels: cross_entropy(module.logits.expand(len(labels), 3), labels),
        partial(torch.optim.SGD, lr=1.0),
        logits=lambda: nn.Parameter(torch.zeros(3)),
    )


def test_the_mean_of_means_is_not_the_mean_over_tokens() -> None:
    """D30: 1 token of one kind and 7 of another, in a micro-batch each."""
    batches = [torch.zeros(1, dtype=torch.long), torch.ones(7, dtype=torch.long)]

    def gradient(**arguments: Any) -> list[float]:
        module = tokens()
        fit(module, batches, **arguments)
        return [round(-value, 4) for value in module.logits.tolist()]

    labels = torch.cat(batches)
    exact = [round(1 / 3 - (labels == kind).float().mean().item(), 4) for kind in range(3)]
    assert gradient(accumulate_grad_batches=2) == [round(1 / 3 - 1 / 2, 4), round(1 / 3 - 1 / 2, 4), round(1 / 3, 4)]
    scheduler = AccumulationScheduler({0: 2}, count=lambda labels: len(labels))
    assert gradient(callbacks=[scheduler]) == exact


class SetInside(Callback):
    """Changes the number between two micro-batches, as the documentation of Lightning allows."""

    def __init__(self, schedule: dict[int, int]) -> None:
        self.schedule = schedule

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        trainer.accumulate_grad_batches = self.schedule.get(batch_idx, trainer.accumulate_grad_batches)


@pytest.mark.parametrize(
    ("schedule", "dropped", "too_often"),
    [({0: 4, 6: 2}, {4, 5}, set()), ({0: 3, 4: 2, 9: 5}, {3}, set()), ({0: 1, 1: 4}, set(), {0})],
    ids=str,
)
def test_a_change_inside_an_epoch_drops_or_repeats_micro_batches(
    schedule: dict[int, int], dropped: set[int], too_often: set[int]
) -> None:
    """D31."""
    stock = shares(callbacks=[SetInside(schedule)])
    used = [i for step in stock for i in step]
    assert set(range(MICRO_BATCHES)) - set(used) == dropped
    assert {i for i in used if used.count(i) > 1} == too_often
    ours = shares(callbacks=[AccumulationScheduler({0: 4, 1: 2}, unit="step")])
    assert sorted(i for step in ours for i in step) == list(range(MICRO_BATCHES))
    assert [sum(step.values()) for step in ours] == [1.0] * 5


def resumed_steps(folder: Path, stop_after: int, make: Any, **arguments: Any) -> list[dict[int, float]]:
    """Of a run that goes on from a checkpoint that was saved at the end of a micro-batch."""

    saves, stops = (at(act, batch_idx=stop_after) for act in (saving(folder / "middle.ckpt"), stop_run))
    fit(Shares(), ResumableLoader(rows()), *make(), saves, stops, **arguments)
    module = Shares()
    fit(module, ResumableLoader(rows()), callbacks=make(), ckpt_path=folder / "middle.ckpt", **arguments)
    return module.steps


def test_the_scheduler_is_inactive_after_a_resume_inside_an_epoch(tmp_path: Path) -> None:
    """D32: windows of 1 micro-batch in place of 4."""
    assert len(resumed_steps(tmp_path, 3, lambda: [GradientAccumulationScheduler({0: 4})])) == 8
    assert len(resumed_steps(tmp_path, 3, lambda: [AccumulationScheduler({0: 4})])) == 2


def test_a_second_fit_raises_and_the_callers_dict_is_changed() -> None:
    """D33."""

    def fit_twice(scheduler: Any) -> None:
        trainer = quiet_trainer(callbacks=[scheduler])
        for epochs in (1, 2):
            trainer.fit_loop.max_epochs = epochs
            trainer.fit(Shares(), loader(rows(2)))

    schedule = {2: 2}
    GradientAccumulationScheduler(schedule)
    assert schedule == {0: 1, 2: 2}
    with pytest.raises(ValueError, match="You have set `accumulate_grad_batches` and are using"):
        fit_twice(GradientAccumulationScheduler({0: 2}))
    schedule = {2: 2}
    AccumulationScheduler(schedule)
    assert schedule == {2: 2}
    fit_twice(AccumulationScheduler({0: 2}))


def test_the_estimated_number_of_steps_ignores_the_scheduler() -> None:
    """D34."""

    class Asking(Shares):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            self.stock = self.trainer.estimated_stepping_batches
            self.ours = scheduler.estimated_steps(self.trainer)
            return super().configure_optimizers()

    scheduler, module = AccumulationScheduler({0: 4}), Asking()
    fit(module, rows(), scheduler, max_epochs=2)
    assert (module.stock, module.ours, len(module.steps)) == (6, 6, 6)
    module = Asking()
    fit(module, rows(), GradientAccumulationScheduler({0: 4}), max_epochs=2)
    assert (module.stock, len(module.steps)) == (24, 6)


def test_a_resume_inside_a_window_loses_its_gradient(tmp_path: Path) -> None:
    """D35: saved after the sixth micro-batch, in the second window of four."""
    stock = resumed_steps(tmp_path, 5, list, accumulate_grad_batches=4)
    assert stock[0] == {6: 0.25, 7: 0.25}
    ours = resumed_steps(tmp_path, 5, lambda: [AccumulationScheduler({0: 4}, save_partial_gradients=True)])
    assert ours[0] == {4: 0.25, 5: 0.25, 6: 0.25, 7: 0.25}


def test_a_stop_inside_a_window_loses_its_gradients() -> None:
    """D38."""
    stop = at(stop_run, batch_idx=5)
    assert [*map(len, shares(callbacks=[stop], accumulate_grad_batches=4))] == [4]
    assert [*map(len, shares(callbacks=[stop, AccumulationScheduler({0: 4})]))] == [4, 4]


def test_stochastic_weight_averaging_sets_the_accumulation() -> None:
    """D51: in an epoch of its own, to one more than there are micro-batches. Beside AccumulationScheduler: refused."""

    class Normed(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.net.insert(1, nn.BatchNorm1d(16))

    seen: list[tuple[int, int]] = []
    averaging = StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1)
    noting = at(
        lambda trainer, _: seen.append((trainer.current_epoch, trainer.accumulate_grad_batches)), "on_train_batch_start"
    )
    fit(Normed(), regression_batches(3), averaging, noting, max_epochs=2)
    assert set(seen) == {(0, 1), (1, 1), (2, 4)}
    both = [StochasticWeightAveraging(swa_lrs=1e-2), AccumulationScheduler({0: 3})]
    with pytest.raises(pl.utilities.exceptions.MisconfigurationException, match="cannot be used with Stochastic"):
        fit(Shares(), rows(), callbacks=both)
