"""Exact resume beside settings of Lightning: loaders made anew, windows of the Trainer, finders of sizes and rates."""

import warnings
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from gloo import run_same_ranks as run_ranks
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    OnExceptionCheckpoint,
)
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from small_models import Regression, at, fit, quiet_trainer, raising, regression_batches, saving, sgd, weights
from torch.utils.data import DataLoader

from lightning_mp import AccumulationScheduler, AutocastPrecision, ExactResume, StopAtBoundary

EPOCHS, BATCHES = 6, 3


class Stages(pl.LightningDataModule):
    """Each epoch in which Lightning asks for loaders has other data."""

    def _loader(self, shuffle: bool) -> DataLoader[Any]:
        assert self.trainer is not None
        start = 100.0 * self.trainer.current_epoch
        return DataLoader([torch.tensor([start + k]) for k in range(2 * BATCHES)], batch_size=1, shuffle=shuffle)

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader(shuffle=False)


class Seen(pl.LightningModule):
    def __init__(self, estimates: bool = False) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.estimates = estimates
        self.trained: list[tuple[int, int]] = []
        self.validated: list[tuple[int, int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.trained.append((self.current_epoch, int(batch)))
        return (self.weight * batch * 1e-3).sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            self.validated.append((self.current_epoch, int(batch)))

    def configure_optimizers(self) -> Any:
        if self.estimates:  # which asks for the loaders before a checkpoint is loaded
            assert self.trainer.estimated_stepping_batches > 0
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Save(pl.Callback):
    def __init__(self, path: Path, epoch: int, hook: str) -> None:
        self.path, self.epoch = path, epoch
        setattr(self, hook, self.save)

    def save(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if trainer.current_epoch == self.epoch and trainer.global_step % (2 * BATCHES) in (0, BATCHES):
            trainer.save_checkpoint(self.path)
            module.saved_at = len(module.trained), len(module.validated)  # type: ignore[assignment]


def run(every: int, *callbacks: Any, ckpt_path: Any = None, estimates: bool = False, **settings: Any) -> Seen:
    torch.manual_seed(0 if ckpt_path is None else 1)
    module = Seen(estimates)
    plugins = [AutocastPrecision("bf16-mixed")]
    settings = {"reload_dataloaders_every_n_epochs": every, "max_epochs": EPOCHS, "plugins": plugins} | settings
    trainer = quiet_trainer(callbacks=list(callbacks), limit_val_batches=2, num_sanity_val_steps=0, **settings)
    trainer.fit(module, datamodule=Stages(), ckpt_path=ckpt_path, weights_only=False)
    return module


@pytest.mark.quick_cases(8)
@pytest.mark.parametrize("estimates", [False, True], ids=["", "estimates its steps"])
@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_epoch_end", "on_train_epoch_start"])
@pytest.mark.parametrize("epoch", [1, 2, 3])
@pytest.mark.parametrize("every", [0, 1, 2, 3])
def test_a_resumed_run_has_the_loaders_of_the_straight_one(
    every: int, epoch: int, hook: str, estimates: bool, tmp_path: Path
) -> None:
    """D66, #21492: Lightning makes them in the epoch in which it resumes, and counts from there."""
    path = tmp_path / "saved.ckpt"
    resumable = ExactResume(on_unsupported="error")
    straight = run(every, resumable, Save(path, epoch, hook), estimates=estimates)
    resumed = run(every, ExactResume(on_unsupported="error"), ckpt_path=path, estimates=estimates)
    trained, validated = straight.saved_at  # type: ignore[misc]
    order: Any = list if hook != "on_train_epoch_start" or not every else sorted  # drawn anew with the loader
    assert order(resumed.trained) == order(straight.trained[trained:])
    assert resumed.validated == straight.validated[validated:]
    assert {sample // 100 * 100 for _, sample in straight.trained} == {
        100 * e for e in (range(0, EPOCHS, every) if every else [0])
    }


def test_also_on_ranks_and_without_exact_resume(tmp_path: Path) -> None:
    """Whatever brings the progress along: here the stop at a boundary."""

    def rank_(rank: int) -> tuple[list[Any], list[Any]]:
        ranks: dict[str, Any] = {"devices": 2, "strategy": "ddp", "use_distributed_sampler": True}
        straight = run(2, StopAtBoundary(), Save(tmp_path / "saved.ckpt", 1, "on_train_epoch_end"), **ranks)
        resumed = run(2, StopAtBoundary(), ckpt_path=tmp_path / "saved.ckpt", **ranks)
        return [e for e, _ in resumed.trained], [
            sorted(sample for e, sample in module.trained if e >= 2) for module in (straight, resumed)
        ]

    for epochs, (straight, resumed) in run_ranks(rank_, 2):
        assert min(epochs) == 2
        assert straight == resumed


# -- windows of the Trainer --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batches", [1, 2, 3, 6, 7, 8])
@pytest.mark.parametrize("windows", ["Trainer", "Lightning's callback", "ours", "ours, kept"])
@pytest.mark.parametrize("plugin", [None, "bf16-mixed"])
def test_a_window_is_resumed_exactly_or_its_gradient_is_told_to_be_lost(
    plugin: Any, windows: str, batches: int, tmp_path: Path
) -> None:
    """D35. Windows of 3; the last one of the epoch has 2."""
    path = tmp_path / "window.ckpt"

    def train(*callbacks: Any, ckpt_path: Any = None) -> Regression:
        module = Regression(sgd)
        own: dict[str, Any] = {
            "Lightning's callback": lambda: [GradientAccumulationScheduler({0: 3})],
            "ours": lambda: [AccumulationScheduler({0: 3})],
            "ours, kept": lambda: [AccumulationScheduler({0: 3}, save_partial_gradients=True)],
        }
        fit(
            module,
            regression_batches(8),
            ExactResume(),
            *own.get(windows, list)(),
            *callbacks,
            plugin=AutocastPrecision(plugin) if plugin else None,
            ckpt_path=ckpt_path,
            accumulate_grad_batches=3 if windows == "Trainer" else 1,
        )
        return module

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        straight = train(at(saving(path), batch_idx=batches - 1))
    told = any("inside an accumulation window" in str(warning.message) for warning in caught)
    resumed = train(ckpt_path=path)
    is_equal = all(map(torch.equal, weights(resumed), weights(straight)))
    assert is_equal or told or windows == "Lightning's callback"  # which is inactive after a resume (D32)
    assert told == (batches % 3 != 0 and batches != 8 and windows != "ours, kept")


@pytest.mark.parametrize("windows", ["Trainer", "ours", "ours, kept"])
def test_a_lost_gradient_is_an_error_where_errors_are_asked_for(windows: str, tmp_path: Path) -> None:
    def train(batches: int, *callbacks: Any) -> None:
        own = {} if windows == "Trainer" else {"save_partial_gradients": windows == "ours, kept"}
        scheduler = [AccumulationScheduler({0: 3}, **own)] if own else []
        every = 3 if windows == "Trainer" else 1
        resume, save = ExactResume(on_unsupported="error"), at(saving(tmp_path / "window.ckpt"), batch_idx=batches - 1)
        settings = {"accumulate_grad_batches": every, "enable_checkpointing": bool(callbacks)}
        fit(Regression(sgd), regression_batches(8), resume, *scheduler, save, *callbacks, **settings)

    train(3)
    if windows == "ours, kept":
        train(2)
        return
    words = r"ExactResume\(on_unsupported='error'\): This checkpoint is written inside an accumulation window, .* 2 of"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This checkpoint is written inside")  # the scheduler's own
        with pytest.raises(MisconfigurationException, match=words):
            train(2)

    # The exception of the run is the one that is raised.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(ZeroDivisionError):
            train(
                8,
                at(raising(ZeroDivisionError()), "on_train_batch_start", batch_idx=2),
                OnExceptionCheckpoint(tmp_path),
            )
    assert any("inside an accumulation window" in str(warning.message) for warning in caught)
    assert list(tmp_path.glob("on_exception*.ckpt"))


DUE: dict[str, dict[str, Any]] = {
    "after a step": {"every_n_train_steps": 1},
    "after a time": {"train_time_interval": timedelta(seconds=0)},
    "after a validation": {"every_n_epochs": 1, "save_on_train_epoch_end": False},
}


@pytest.mark.parametrize("due", DUE)
@pytest.mark.parametrize("windows", ["Trainer", "ours"])
def test_checkpoints_wait_for_the_end_of_a_window(windows: str, due: str, tmp_path: Path) -> None:
    """Also the first one after a resume, which Lightning writes with the first micro-batch."""

    class Validated(Regression):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            """Makes checkpoints due."""

    folder = tmp_path / "saved"

    def train(ckpt_path: Any = None) -> tuple[pl.LightningModule, list[int]]:
        module, data = Validated(sgd), regression_batches(12)
        save = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, **DUE[due])
        own = [AccumulationScheduler({0: 3})] if windows == "ours" else []
        settings = {"accumulate_grad_batches": 1 if own else 3, "val_check_interval": 2, "num_sanity_val_steps": 0}
        settings |= {"validation": data[:1], "enable_checkpointing": True, "ckpt_path": ckpt_path}
        fit(module, data, ExactResume(on_unsupported="error"), *own, save, **settings)
        saved = [torch.load(file, weights_only=False)["loops"]["fit_loop"] for file in sorted(folder.glob("*.ckpt"))]
        return module, [loop["epoch_loop.batch_progress"]["current"]["ready"] for loop in saved]

    straight, batches = train()
    resumed_from = min(folder.glob("*.ckpt")).rename(tmp_path / "first.ckpt")
    for file in folder.glob("*.ckpt"):
        file.unlink()
    resumed, batches_after = train(resumed_from)
    assert len(batches) > 1
    assert batches_after
    assert [number % 3 for number in batches + batches_after] == [0] * len(batches + batches_after)
    assert all(map(torch.equal, weights(resumed), weights(straight)))


class AtMilestones:
    """As in Lightning's documentation of the callbacks."""

    def on_fit_start(self, *_: Any, **__: Any) -> None:
        return

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch in self.milestones:
            getattr(self, self.find)(trainer, pl_module)


class Sizes(AtMilestones, BatchSizeFinder):
    find = "scale_batch_size"


class Rates(AtMilestones, LearningRateFinder):
    find = "lr_find"


class Tuned(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.batch_size, self.lr = 2, 0.1
        self.sizes: list[tuple[int, int, int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.sizes.append((self.current_epoch, batch_idx, len(batch)))
        return (self.weight * batch).square().mean()

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(torch.ones(16, 1), batch_size=self.batch_size, shuffle=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


@pytest.mark.parametrize("milestones", [(0,), (1,), (0, 2)])
@pytest.mark.parametrize(
    "make", [partial(Sizes, steps_per_trial=2, max_trials=2), partial(Rates, num_training_steps=5)]
)
def test_a_finder_at_milestones_leaves_the_batches_of_stock(
    make: Any, milestones: tuple[int, ...], tmp_path: Path
) -> None:
    seen = []
    for callbacks in ([], [ExactResume(on_unsupported="error")]):
        module, finder = Tuned(), make()
        finder.milestones = milestones
        trainer = quiet_trainer(
            max_epochs=3, callbacks=[finder, *callbacks], default_root_dir=tmp_path, limit_val_batches=0
        )
        trainer.fit(module)
        seen.append((module.sizes, module.batch_size, trainer.global_step))
    assert seen[0] == seen[1]
    assert not list(tmp_path.glob(".*.ckpt"))
