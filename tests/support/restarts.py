"""Runs of few batches that are interrupted and restarted, and what they have trained on, step by step."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from small_models import at, quiet_trainer, raising
from torch import Tensor, nn

#: Of one epoch.
BATCHES = 4


class Interruption(Exception):
    """In place of a kill: what is in memory is dropped."""


class Stream:
    """Hands out 0, 1, 2, 3 without saying how many; its state is that of its latest iterator.

    As torchdata's StatefulDataLoader: the first iterator after ``load_state_dict`` goes on, and is at its end where the
    one that was saved was; the next one begins anew.
    """

    def __init__(self) -> None:
        self.position = 0
        self._continues = False
        # By this name Lightning drops it after a fit.
        self._iterator: Iterator[Tensor] | None = None

    def __iter__(self) -> Iterator[Tensor]:
        if not self._continues:
            self.position = 0
        self._continues = False
        self._iterator = self._rest()
        return self._iterator

    def _rest(self) -> Iterator[Tensor]:
        while self.position < BATCHES:
            self.position += 1
            yield torch.tensor([[self.position - 1.0]])

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position if self._iterator is not None else 0}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]
        self._continues = True


class SizedStream(Stream):
    """The same with a length."""

    def __len__(self) -> int:
        return BATCHES


class Turning:
    """A sampler with another order in each epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class TurningStream(SizedStream):
    """Asks its sampler for the order when an iterator is made, as loaders with workers do."""

    def __init__(self) -> None:
        super().__init__()
        self.sampler = Turning()

    def __iter__(self) -> Iterator[Tensor]:
        epoch = self.sampler.epoch
        return ((batch + epoch) % BATCHES for batch in super().__iter__())


class Batch(NamedTuple):
    epoch: int
    sample: int
    batch_idx: int
    learning_rate: float
    logger_step: int


class Traced(pl.LightningModule):
    """Writes down what each optimizer step is made of, and when epochs begin."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.steps: dict[int, list[Batch]] = {}
        # Of epochs and of validations: what, at which step, in which epoch.
        self.events: list[tuple[str, int, int]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        trainer, (group,) = self.trainer, self.trainer.optimizers[0].param_groups
        logger_step = trainer.fit_loop.epoch_loop._batches_that_stepped
        seen = Batch(trainer.current_epoch, int(batch), batch_idx, group["lr"], logger_step)
        self.steps.setdefault(trainer.global_step, []).append(seen)
        return self.layer(batch).sum()

    def on_train_epoch_start(self) -> None:
        self.note("on_train_epoch_start")

    def on_train_epoch_end(self) -> None:
        self.note("on_train_epoch_end")

    def note(self, event: str) -> None:
        self.events.append((event, self.trainer.global_step, self.trainer.current_epoch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "epoch"}}


class Validated(Traced):
    """The same, validated; its learning rate halves, since the score gets no better."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.note("validation_step")
        self.log("score", float(self.trainer.global_step))

    def val_dataloader(self) -> list[Tensor]:
        return [torch.zeros(1, 1)]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "score"}}


class ValidatedByEpoch(Validated):
    """The same, with a learning rate that does not depend on it."""

    configure_optimizers = Traced.configure_optimizers


def interrupted_before(micro_batch: int) -> Callback:
    """In place of so many micro-batches of a run or its restart."""
    return at(raising(Interruption()), "on_train_batch_start", call=micro_batch)


def saved_and_interrupted(path: Path) -> Callable[[Any, Any], None]:
    def action(trainer: pl.Trainer, _: Any) -> None:
        trainer.save_checkpoint(path)
        raise Interruption

    return action


class Trace(NamedTuple):
    """Of a run and its restarts: a step that is done again counts as it was done last, an event counts once."""

    steps: dict[int, list[Batch]]
    events: set[tuple[str, int, int]]
    global_step: int


def trace(
    trainers: Sequence[pl.Trainer],
    stream: type[Stream],
    path: Path,
    *,
    module: type[Traced] = Traced,
    saves_after: bool = False,
) -> Trace:
    """Fits a new module with each of the Trainers, which goes on from ``path`` once that is there."""
    steps: dict[int, list[Batch]] = {}
    events: set[tuple[str, int, int]] = set()
    for trainer in trainers:
        torch.manual_seed(0)
        trained = module()
        with contextlib.suppress(Interruption):
            trainer.fit(trained, stream(), ckpt_path=path if path.exists() else None)
        if saves_after:
            trainer.save_checkpoint(path)
        steps.update(trained.steps)
        events.update(trained.events)
    return Trace(steps, events, trainers[-1].global_step)


class Save(NamedTuple):
    """When a checkpoint is written, by arguments of ModelCheckpoint, and what is trained."""

    arguments: dict[str, Any]
    module: type[Traced] = Traced


#: Arguments of ModelCheckpoint.
MOMENTS: dict[str, dict[str, Any]] = {
    "each step": {"every_n_train_steps": 1, "save_top_k": 0},
    "each validation": {"monitor": "score", "save_on_train_epoch_end": False},
    "each epoch": {"save_on_train_epoch_end": True},
    "on an exception": {
        "save_on_exception": True,
        "every_n_train_steps": 100,
        "filename": "last",
        "enable_version_counter": False,
    },
}
SAVES = {name: Save(arguments) for name, arguments in MOMENTS.items()} | {
    "each step, before validation": Save(MOMENTS["each step"], Validated),
    "each validation": Save(MOMENTS["each validation"], ValidatedByEpoch),
}


def interrupted(
    folder: Path,
    before: Sequence[int],
    make_callbacks: Callable[[], list[Callback]],
    save: Save,
    stream: type[Stream],
    **arguments: Any,
) -> Trace:
    """A run that is interrupted before its n-th micro-batch, restarted, and so on; the last restart reaches its end."""
    trainers = [
        quiet_trainer(
            callbacks=[
                *make_callbacks(),
                ModelCheckpoint(folder, save_last=True, **save.arguments),
                interrupted_before(n),
            ],
            enable_checkpointing=True,
            num_sanity_val_steps=0,
            **arguments,
        )
        for n in (*before, 0)
    ]
    return trace(trainers, stream, folder / "last.ckpt", module=save.module)
