"""Where Lightning's loops go on after a restart, with ours beside each.

A test that fails here says that upstream has changed: then rewrite the row of docs/defects.md that it names.
"""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from restarts import BATCHES, SAVES, SizedStream, Stream, Trace, TurningStream, interrupted, trace
from small_models import quiet_trainer

from lightning_mp import AtomicCheckpoints

pytestmark = [
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended"),
]


def samples(run: Trace) -> list[tuple[int, int]]:
    """Epoch and number of each batch, in order."""
    return [(batch.epoch, batch.sample) for step in sorted(run.steps) for batch in run.steps[step]]


IN_ORDER = [(epoch, sample) for epoch in range(3) for sample in range(BATCHES)]


def stock_and_ours(tmp_path: Path, before: tuple[int, ...], stream: type[Stream]) -> list[Any]:
    callbacks = {"stock": list, "ours": lambda: [AtomicCheckpoints()]}
    return [
        samples(interrupted(tmp_path / name, before, make, SAVES["each step"], stream, max_epochs=3))
        for name, make in callbacks.items()
    ]


def test_after_an_epochs_last_batch_a_restart_skips_the_next_epoch(tmp_path: Path) -> None:
    """D59. The iterator of a stateful loader goes on from its end, so that the epoch after it is empty."""
    stock, ours = stock_and_ours(tmp_path, (BATCHES + 1,), SizedStream)
    assert stock == [pair for pair in IN_ORDER if pair[0] != 1]
    assert ours == IN_ORDER


def test_a_loader_without_a_length_loses_a_batch(tmp_path: Path) -> None:
    """D60. Its state is that after the batch which was fetched ahead."""
    stock, ours = stock_and_ours(tmp_path, (2,), Stream)
    assert stock == [pair for pair in IN_ORDER if pair != (0, 1)]
    assert ours == IN_ORDER


def test_inside_a_later_epoch_the_order_is_that_of_the_first_one(tmp_path: Path) -> None:
    """D62. The loader goes on before its sampler is told the epoch: a sample comes twice, another one never."""
    stock, ours = stock_and_ours(tmp_path, (BATCHES + 2,), TurningStream)
    in_order = [(epoch, (sample + epoch) % BATCHES) for epoch, sample in IN_ORDER]
    assert ours == in_order
    assert stock == in_order[: BATCHES + 1] + IN_ORDER[BATCHES + 1 : 2 * BATCHES] + in_order[2 * BATCHES :]


def test_a_run_that_ended_inside_an_epoch_takes_it_for_finished(tmp_path: Path) -> None:
    """D61. It goes on in another epoch."""
    seen = {}
    for name, callbacks in {"stock": [], "ours": [AtomicCheckpoints()]}.items():
        trainers = [quiet_trainer(max_epochs=-1, max_steps=steps, callbacks=callbacks) for steps in (2, 4)]
        seen[name] = samples(trace(trainers, SizedStream, tmp_path / f"{name}.ckpt", saves_after=True))
    assert seen["stock"] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert seen["ours"] == IN_ORDER[:4]


def test_loaders_are_made_in_the_epoch_in_which_a_run_resumes(tmp_path: Path) -> None:
    """D66, #21492: every second epoch has new data; epoch 1 has that of epoch 0, and after a resume its own."""

    class Stages(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))
            self.seen: list[int] = []

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader([torch.full((1,), float(self.current_epoch))], batch_size=None)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.seen.append(int(batch))
            return (self.weight * batch).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def run(epochs: int, ckpt_path: Any = None) -> list[int]:
        module = Stages()
        trainer = quiet_trainer(max_epochs=epochs, reload_dataloaders_every_n_epochs=2)
        trainer.fit(module, ckpt_path=ckpt_path, weights_only=False)
        trainer.save_checkpoint(tmp_path / f"{epochs}.ckpt")
        return module.seen

    assert run(4) == [0, 0, 2, 2]
    assert run(1) == [0]
    assert run(4, tmp_path / "1.ckpt") == [1, 1, 3]
