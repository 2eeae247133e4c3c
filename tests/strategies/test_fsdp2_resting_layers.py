"""FSDP2 trains layers that rest in some micro-batches or epochs as one process does, with and without windows."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from fsdp2_runs import fsdp2, full_weights
from gloo import run_same_ranks as run_ranks
from lightning.pytorch.callbacks import BaseFinetuning
from small_models import loader, quiet_trainer
from torch import Tensor, nn

from lightning_mp import AccumulationScheduler, AutocastPrecision, LossScaler, MasterWeightsPrecision

WIDTH, ROWS, MICRO_BATCHES = 8, 4, 6


class Pair(nn.Module):
    """Two layers in one unit; a micro-batch takes the first, or both."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        x = self.first(x)
        return self.second(x) if both else x


class Resting(pl.LightningModule):
    """``both`` and ``last`` say of each micro-batch whether the second layers and the last unit are used."""

    def __init__(self, both: Sequence[bool], last: Sequence[bool]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.pairs = nn.ModuleList(Pair() for _ in range(3))
        self.both, self.last = both, last

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for pair in self.pairs[: 3 if self.last[batch_idx] else 2]:
            batch = pair(batch, self.both[batch_idx])
        return batch.float().square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


class Thaw(BaseFinetuning):
    """The first two units are frozen in the first epoch."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.pairs[:2])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(list(pl_module.pairs[:2]), optimizer, lr=0.1)


def plugins(precision: str) -> list[Any]:
    if precision == "32-true":
        return []
    scaler = LossScaler(init_scale=16.0) if precision.startswith("16") else None
    kind = AutocastPrecision if precision.endswith("mixed") else MasterWeightsPrecision
    return [kind(precision, scaler=scaler)]


def train(
    rank: int, devices: int, precision: str, module: Callable[[], Resting], callbacks: Callable[[], list[Any]]
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randn(ROWS, WIDTH, generator=generator)[rank::devices] for _ in range(MICRO_BATCHES)]
    trainer = quiet_trainer(
        devices=devices,
        strategy=fsdp2({Pair}) if devices > 1 else "auto",
        plugins=plugins(precision),
        callbacks=callbacks(),
        max_epochs=3,
    )
    trained = module()
    trainer.fit(trained, loader(rows))
    return full_weights(trained)


class Cell(NamedTuple):
    """One run: its precision, which layers are used in which micro-batch, and its callbacks."""

    precision: str
    both: Sequence[bool]
    last: Sequence[bool]
    callbacks: Callable[[], list[Any]]

    def train(self, rank: int, devices: int) -> dict[str, Tensor]:
        return train(rank, devices, self.precision, partial(Resting, self.both, self.last), self.callbacks)


def assert_trained_alike(cells: Sequence[Cell]) -> None:
    """All of them one after the other in the same two processes."""
    ranks = run_ranks(lambda rank: [cell.train(rank, 2) for cell in cells], 2)
    for cell, first, second in zip(cells, *ranks, strict=True):
        start = {name: value.detach() for name, value in Resting(cell.both, cell.last).state_dict().items()}
        expected = cell.train(0, 1)
        for name, before in start.items():
            assert torch.equal(first[name], second[name]), (cell, name)
            moved, should = first[name].float() - before, expected[name].float() - before
            # 16-bit gradients of products that are summed in another order, three epochs long
            tolerance = 1e-5 if cell.precision == "32-true" else 0.03 * float(should.abs().max()) + 2e-3
            message = partial("{cell}, {name}: {}".format, cell=cell, name=name)
            torch.testing.assert_close(moved, should, rtol=0, atol=tolerance, msg=message)
        assert any(not torch.equal(first[name], before) for name, before in start.items())


def windows(size: int) -> list[Any]:
    return [AccumulationScheduler({0: size})]


def windows_that_grow() -> list[Any]:
    return [AccumulationScheduler({0: 1, 2: 2}, unit="step")]


def windows_and_thaw(size: int) -> list[Any]:
    return [*windows(size), Thaw()]


ALWAYS = [True] * MICRO_BATCHES
NEVER = [False] * MICRO_BATCHES
LAST_OF_TWO = [False, True] * (MICRO_BATCHES // 2)
FIRST_OF_TWO = [True, False] * (MICRO_BATCHES // 2)

QUICK = ("bf16-mixed",)
OTHERS = ("32-true", "16-mixed", "bf16-true")
PRECISIONS = pytest.mark.parametrize("precisions", [QUICK, pytest.param(OTHERS, marks=pytest.mark.full)])


@pytest.mark.full
@pytest.mark.parametrize(
    ("both", "last"),
    [(LAST_OF_TWO, ALWAYS), (FIRST_OF_TWO, LAST_OF_TWO), (LAST_OF_TWO, FIRST_OF_TWO)],
    ids=["fresh in the last micro-batch", "rests in the last micro-batch", "a unit that rests in the last micro-batch"],
)
def test_layers_that_rest_in_some_micro_batches_of_a_window(both: Sequence[bool], last: Sequence[bool]) -> None:
    """D54: before torch 2.15 fresh 16-bit gradients beside fp32 sums end in an assertion (pytorch/pytorch#196996)."""
    assert_trained_alike([Cell(precision, both, last, partial(windows, 2)) for precision in QUICK + OTHERS])


@PRECISIONS
def test_a_unit_that_nobody_uses(precisions: Sequence[str]) -> None:
    """Before torch 2.15 the first backward without a reduction asks it for gradients, also in the middle of a run."""
    assert_trained_alike([Cell(precision, NEVER, NEVER, windows_that_grow) for precision in precisions])


@pytest.mark.full
@PRECISIONS
def test_units_that_are_unfrozen(precisions: Sequence[str]) -> None:
    """Before torch 2.15 a unit that was frozen in the first forward has no dtypes, and its gradients get the wrong."""
    thawed = [partial(windows_and_thaw, window) for window in (1, 2)]
    assert_trained_alike([Cell(each, ALWAYS, ALWAYS, callbacks) for each in precisions for callbacks in thawed])
