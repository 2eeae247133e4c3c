"""2,000 steps of random runs, each against a loop in plain PyTorch: the same steps made, the same weights."""

from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from fuzz_reference import (
    GROWTH_INTERVAL,
    MAX_SCALE,
    PRECISIONS,
    SCALE,
    Case,
    Net,
    Result,
    batches_of,
    make_case,
    make_optimizer,
    reference,
    write,
)
from gloo import run_ranks
from lightning.pytorch.callbacks import Callback
from small_models import ResumableLoader, loader, quiet_trainer
from torch import Tensor, nn

from lightning_mp import AccumulationScheduler, AutocastPrecision, LossScaler, MasterWeightsPrecision, OverflowMonitor

SEEDS = range(168)
RESUMED_SEEDS = range(24)
#: Of the way that the weights went, by the dtype that products are rounded to.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}

pytestmark = [
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore:Optimizer step"),
    pytest.mark.filterwarnings("ignore:AccumulationScheduler. .*optimizer_step will be called once"),
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step"),
]


class Fuzzed(pl.LightningModule):
    def __init__(self, case: Case, rank: int = 0, ranks: int = 1, seen: int = 0) -> None:
        super().__init__()
        self.case, self.rank, self.ranks = case, rank, ranks
        self.net = Net(case)
        self.seen = seen
        self.attempts = seen // case.window

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = (part.chunk(self.ranks)[self.rank] for part in batch)
        loss = nn.functional.mse_loss(self.net(x).float(), y.float())
        if self.seen in self.case.bad and self.rank == 0:
            loss = loss * self.case.bad_value
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen += 1

    def configure_optimizers(self) -> torch.optim.Optimizer:
        parameters = [p for p in self.net.parameters() if p.requires_grad]
        return make_optimizer(self.case, parameters, fused=self.case.fused)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1 and self.case.added_group:
            self.net.late.requires_grad_(True)
            optimizer: Any = self.optimizers()
            optimizer.add_param_group({"params": list(self.net.late.parameters())})


class ClosureFirst(Fuzzed):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        optimizer.step()


class Through(Fuzzed):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)


class Writer(Callback):
    """Writes into the gradients that it is shown."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if pl_module.attempts in pl_module.case.hook_steps:
            write(pl_module.case.hook, [p for p in pl_module.parameters() if p.grad is not None])


class Outcomes(Callback):
    """What became of each attempt, and the weights at the end as a checkpoint has them: masters, where there are."""

    def __init__(self, saved: Path) -> None:
        self.saved = saved
        self.stepped: list[bool] = []
        self.scales: list[float] = []

    def on_after_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any, outcome: Any) -> None:
        self.stepped.append(outcome.stepped)
        self.scales.append(outcome.loss_scale)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        pl_module.attempts = trainer.global_step

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(self.saved)

    def result(self, case: Case) -> Result:
        weights = torch.load(self.saved, weights_only=False)["state_dict"]
        return Result(
            self.stepped, self.scales, [weights[f"net.{name}"].float() for name, _ in Net(case).named_parameters()]
        )


MODULES = {"none": Fuzzed, "closure first": ClosureFirst, "through": Through}


def scheduler_of(case: Case) -> AccumulationScheduler:
    return AccumulationScheduler({0: case.window}, weight_by="sample")


def parts_of(case: Case) -> dict[str, Any]:
    scaler = {"growth_interval": GROWTH_INTERVAL, "max_scale": MAX_SCALE, "init_scale": SCALE}
    scaled: dict[str, Any] = {"scaler": LossScaler(**scaler)} if case.scaled else {}
    # Windows are closed by one evaluation, so they are refused beside optimizers that make more.
    callbacks: list[Any] = [] if case.optimizer == "SAM" else [scheduler_of(case)]
    if case.hook != "none":
        callbacks.append(Writer())
    if case.precision == "32 guarded":
        return {"precision": "32-true", "callbacks": [*callbacks, OverflowMonitor(guard=True)]}
    if case.masters:
        precision, storage = [*case.precision.split(), "fp32"][:2]
        plugin: Any = MasterWeightsPrecision(precision, storage=storage, fp32_checkpoints=True, **scaled)
    else:
        plugin = AutocastPrecision(case.precision, **scaled)
    return {"plugins": [plugin], "callbacks": callbacks}


def train(
    case: Case, saved: Path, rank: int = 0, ranks: int = 1, *, first: int = 0, ckpt_path: Any = None, **arguments: Any
) -> Result:
    """A run, or a leg of it that begins with the attempt ``first``."""
    outcomes, parts = Outcomes(saved), parts_of(case)
    trainer = quiet_trainer(
        gradient_clip_val=None if case.clip is None else case.clip[1],
        gradient_clip_algorithm=None if case.clip is None else case.clip[0],
        **({"max_epochs": case.epochs} | arguments | parts | {"callbacks": [*parts["callbacks"], outcomes]}),
    )
    module = MODULES[case.override](case, rank, ranks, seen=first * case.window)
    data: Any = ResumableLoader(batches_of(case)) if case.legs else loader(batches_of(case))
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return outcomes.result(case)


def check(case: Case, ours: Result, wanted: Result) -> None:
    assert ours.stepped == wanted.stepped, case
    if case.scaled:
        assert ours.scales == wanted.scales, case
    starts = [p.detach() for p in Net(case).parameters()]
    way, off = [], []
    for our, weight, start in zip(ours.weights, wanted.weights, starts, strict=True):
        if torch.equal(weight, start):  # frozen
            assert torch.equal(our, weight), case
        else:
            way.append((weight - start).flatten())
            off.append((our - weight).flatten())
    share = torch.cat(off).norm() / torch.cat(way).norm() if way else torch.zeros(())
    assert share <= TOLERANCE[case.dtype], f"{share:.1e} of the way off: {case}"  # nan is not


def test_the_fuzz_is_two_thousand_steps() -> None:
    cases = [make_case(seed) for seed in SEEDS] + [make_case(seed, resumed=True) for seed in RESUMED_SEEDS]
    assert sum(case.steps for case in cases) >= 2_000
    assert {case.precision for case in cases} == {*PRECISIONS}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_run_ends_as_plain_pytorch(seed: int, tmp_path: Path) -> None:
    case = make_case(seed)
    check(case, train(case, tmp_path / "end.ckpt"), reference(case))


def leg(rank: int, *, case: Case, number: int, folder: Path) -> Result:
    """Each leg makes its share of the attempts and writes where the next one goes on."""
    ranks, share = case.legs[number], case.steps // len(case.legs)
    return train(
        case,
        folder / f"{number}.ckpt",
        rank,
        ranks,
        first=number * share,
        ckpt_path=folder / f"{number - 1}.ckpt" if number else None,
        max_epochs=-1,
        max_steps=(number + 1) * share,
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
    )


def same_legs(rank: int, *, cases: list[Case], number: int, folder: Path) -> list[Result]:
    """Of runs that have as many ranks in this leg, one after the other in the same processes."""
    found = []
    for case in cases:
        own = folder / str(case.seed)
        own.mkdir(exist_ok=True)
        found.append(leg(rank, case=case, number=number, folder=own))
    return found


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Result]:
    """All runs, by seed. The legs with one number, those of one rank first, then those of two and of three."""
    folder = tmp_path_factory.mktemp("resumed")
    cases = [make_case(seed, resumed=True) for seed in RESUMED_SEEDS]
    ours = {case.seed: Result([], [], []) for case in cases}
    for number, ranks in product(range(3), (1, 2, 3)):
        group = [case for case in cases if case.legs[number : number + 1] == (ranks,)]
        if not group:
            continue
        of_ranks = run_ranks(partial(same_legs, cases=group, number=number, folder=folder), ranks, 300)
        for case, *found in zip(group, *of_ranks, strict=True):
            assert all((rank.stepped, rank.scales) == (found[0].stepped, found[0].scales) for rank in found), case
            before = ours[case.seed]
            ours[case.seed] = Result(
                before.stepped + found[0].stepped, before.scales + found[0].scales, found[0].weights
            )
    return ours


@pytest.mark.parametrize("seed", RESUMED_SEEDS)
def test_a_random_run_resumed_on_other_ranks_ends_as_plain_pytorch(seed: int, resumed: dict[int, Result]) -> None:
    case = make_case(seed, resumed=True)
    check(case, resumed[seed], reference(case))
