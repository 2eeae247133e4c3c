"""Runs with dropout, shuffled data and augmentation that are interrupted and resumed, and all that must be equal."""

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import CombinedLoader
from restarts import MOMENTS, Interruption, interrupted_before
from small_models import quiet_trainer
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)
from torchmetrics.aggregation import MeanMetric

from lightning_mp import ExactResume

SAMPLES, BATCH, WIDTH = 22, 4, 3
BATCHES = -(-SAMPLES // BATCH)


class Augmented(Dataset[Any]):
    """Numbers with noise from all three libraries; counts what it loads in this process."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.samples = samples
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.loaded.append(index)
        noise = torch.rand(WIDTH) + random.random() + float(np.random.random())
        return noise + index / SAMPLES, torch.tensor(float(index))


class AugmentedStream(IterableDataset[Any]):
    """The same as a stream with a state."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self.position >= SAMPLES:
            self.position = 0
        while self.position < SAMPLES:
            self.position += 1
            yield torch.rand(WIDTH) + self.position / SAMPLES + random.random(), torch.tensor(float(self.position - 1))

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class PythonShuffle(Sampler[int]):
    """As users write them."""

    def __iter__(self) -> Iterator[int]:
        order = list(range(SAMPLES))
        random.shuffle(order)
        return iter(np.random.permutation(order).tolist())

    def __len__(self) -> int:
        return SAMPLES


class Unsized:
    """A batch sampler without a length."""

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(SAMPLES).tolist()
        return iter(order[at : at + BATCH] for at in range(0, SAMPLES, BATCH))


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def _loader(**arguments: Any) -> "DataLoader[Any]":
    return DataLoader(Augmented(), **({"batch_size": BATCH} | arguments))


def _two(mode: str, **arguments: Any) -> CombinedLoader:
    short = DataLoader(Augmented(10), batch_size=BATCH, shuffle=True, **arguments)
    return CombinedLoader({"long": _loader(shuffle=True, **arguments), "short": short}, mode)  # type: ignore[arg-type]


LOADERS: dict[str, Callable[[], Any]] = {
    "shuffle": lambda: _loader(shuffle=True),
    "in order": _loader,
    "generator": lambda: _loader(shuffle=True, generator=seeded()),
    "weighted": lambda: _loader(sampler=WeightedRandomSampler([1.0 + i for i in range(SAMPLES)], SAMPLES)),
    "replacement": lambda: _loader(
        sampler=RandomSampler(range(SAMPLES), replacement=True, num_samples=40, generator=seeded())
    ),
    "a sampler in Python": lambda: _loader(sampler=PythonShuffle()),
    "batch sampler": lambda: DataLoader(
        Augmented(), batch_sampler=BatchSampler(RandomSampler(range(SAMPLES)), BATCH, drop_last=True)
    ),
    "no batches": lambda: _loader(shuffle=True, batch_size=None),
    "no length": lambda: DataLoader(Augmented(), batch_sampler=Unsized()),  # type: ignore[arg-type]
    "stream": lambda: DataLoader(AugmentedStream(), batch_size=BATCH),
    "max_size_cycle": lambda: _two("max_size_cycle"),
    "max_size": lambda: _two("max_size"),
    "min_size": lambda: _two("min_size"),
    "workers": lambda: _loader(shuffle=True, num_workers=2),
    "workers that persist": lambda: _loader(shuffle=True, num_workers=2, persistent_workers=True),
    "workers, generator": lambda: _loader(shuffle=True, num_workers=2, generator=seeded()),
    "workers, cycle": lambda: _two("max_size_cycle", num_workers=1),
}


class Memory(Logger):
    """What was logged last at each step."""

    name, version = "memory", 0

    def __init__(self) -> None:
        super().__init__()
        self.logged: dict[tuple[int, str], float] = {}

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert step is not None
        self.logged.update({(step, name): value for name, value in metrics.items()})


class Dropped(pl.LightningModule):
    """Draws in its forward, in its steps and in its hooks; logs means, a metric and what is reduced otherwise."""

    def __init__(self, *, plateau: bool = False) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 1))
        self.mean = MeanMetric()
        self.plateau = plateau
        self.steps: dict[tuple[int, int], list[float]] = {}
        #: What a callback finds before each batch, values of the last validation among them.
        self.found: dict[tuple[int, int], dict[str, float]] = {}

    def on_train_epoch_start(self) -> None:
        self.scale = 1.0 + torch.rand(()).item()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        metrics = self.trainer.callback_metrics
        self.found[self.current_epoch, batch_idx] = {name: float(value) for name, value in metrics.items()}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        parts = [part for part in (batch.values() if isinstance(batch, dict) else [batch]) if part is not None]
        self.steps[self.current_epoch, batch_idx] = [float(i) for _, index in parts for i in index.reshape(-1)]
        drawn = 1 + random.random()  # times the items: a factor of the whole loss that varies makes its items unknown
        loss = torch.stack([(drawn * self.net(noise)).square().mean() for noise, _ in parts]).sum()
        size = sum(index.numel() for _, index in parts)
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=size)
        self.log("largest", loss.detach(), on_step=False, on_epoch=True, reduce_fx="max", batch_size=size)
        self.mean.update(loss.detach())
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        if batch_idx == 0:
            self.log("first", loss.detach(), on_step=False, on_epoch=True, batch_size=size)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("score", self.net(batch[0]).mean() + random.random() + torch.rand(()), batch_size=len(batch[0]))

    def val_dataloader(self) -> Any:
        return DataLoader(Augmented(8), batch_size=BATCH)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        if self.plateau:
            scheduler: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", factor=0.5, patience=0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "loss_epoch"}}
        return optimizer


class Result(NamedTuple):
    """All that must be equal to the bit."""

    weights: list[Tensor]
    optimizer: list[Tensor]
    steps: dict[tuple[int, int], list[float]]
    found: dict[tuple[int, int], dict[str, float]]
    logged: dict[tuple[int, str], float]
    rates: list[float]
    stopping: tuple[int, float]
    random: list[float]

    def differences(self, other: "Result") -> list[str]:
        found = []
        for name, ours, theirs in zip(self._fields, self, other, strict=True):
            if name in ("weights", "optimizer"):
                same = all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
            else:
                same = ours == theirs
            if not same:
                found.append(f"{name}: {differing(ours, theirs)}")
        return found


def differing(ours: Any, theirs: Any) -> Any:
    """Keys of dictionaries, which are short enough to be shown."""
    if isinstance(ours, dict):
        return [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]
    return "weights" if ours and isinstance(ours[0], Tensor) else (ours, theirs)


class Save(NamedTuple):
    arguments: dict[str, Any]
    trainer: dict[str, Any] = MappingProxyType({})  # type: ignore[assignment]


SAVES = {
    name: Save(arguments, {"val_check_interval": 2} if name == "each validation" else {})
    for name, arguments in MOMENTS.items()
}


def run(
    folder: Path,
    before: Sequence[int],
    make_loader: Callable[[], Any],
    save: Save,
    *,
    make_callbacks: Callable[[], list[Callback]] = lambda: [ExactResume()],
    module: Callable[[], pl.LightningModule] = Dropped,
    **arguments: Any,
) -> Result:
    """A run that is interrupted before its n-th batch, resumed, and so on; the last one reaches its end."""
    steps: dict[tuple[int, int], list[float]] = {}
    found: dict[tuple[int, int], dict[str, float]] = {}
    logger = Memory()
    path = folder / "last.ckpt"
    for number, n in enumerate((*before, 0)):
        # a restarted process has other random numbers
        pl.seed_everything(number if path.exists() else 0, verbose=False)
        stopping = EarlyStopping("loss_epoch", patience=100, check_on_train_epoch_end=True)
        checkpoint = ModelCheckpoint(folder, save_last=True, **save.arguments)
        trainer = quiet_trainer(
            callbacks=[*make_callbacks(), stopping, checkpoint, interrupted_before(n)],
            enable_checkpointing=True,
            logger=logger,
            log_every_n_steps=1,
            **({"max_epochs": 3} | dict(save.trainer) | arguments),
        )
        trained = module()
        with contextlib.suppress(Interruption):
            trainer.fit(trained, make_loader(), ckpt_path=path if path.exists() else None)
        steps.update(trained.steps)
        found.update(getattr(trained, "found", {}))
    optimizer = trainer.optimizers[0]
    return Result(
        [p.detach().clone() for p in trained.parameters()],
        [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)],
        steps,
        found,
        logger.logged,
        [group["lr"] for group in optimizer.param_groups],
        (stopping.wait_count, float(stopping.best_score)),
        [torch.rand(()).item(), random.random(), float(np.random.random())],
    )
