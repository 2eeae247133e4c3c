"""A run that goes on in another precision: nothing is lost, or it is said what is."""

import logging
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from cpu_fsdp import CpuFsdp
from gloo import run_same_ranks as run_ranks
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from master_loops import as_kept
from small_models import loader, quiet_trainer
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

from lightning_mp import AutocastPrecision, Float8Precision, FSDP2Strategy, LossScaler, MasterWeightsPrecision
from lightning_mp.precision.masters.bf16_remainder import split

PRECISIONS: dict[str, Callable[[], list[Any]]] = {
    "stock-32": list,
    "stock-mixed": lambda: [MixedPrecision("bf16-mixed", "cpu")],
    "stock-true": lambda: [HalfPrecision("bf16-true")],
    "autocast": lambda: [AutocastPrecision("bf16-mixed")],
    "masters": lambda: [MasterWeightsPrecision("bf16-true")],
    "remainder": lambda: [MasterWeightsPrecision("bf16-true", storage="remainder")],
    "24bit": lambda: [MasterWeightsPrecision("bf16-true", storage="24bit")],
    "policy": lambda: [MasterWeightsPrecision("bf16-true", policy={"norms": "fp32"})],
    "fp8": lambda: [Float8Precision("rowwise", skip_small=False, emulate=True, skip_first_and_last=False)],
}
STOCK = ("stock-32", "stock-mixed", "stock-true")
MASTERS = ("masters", "remainder", "24bit", "policy")


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).float().square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class AtStart(pl.Callback):
    """What the run trains, in fp32, and its moments, when training begins."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.weights = trained(trainer)
        self.moments = moments(trainer)


def trained(trainer: pl.Trainer) -> list[Tensor]:
    """Masters where there are any; a policy keeps some weights in fp32."""
    weights = [p.detach().float().clone() for p in trainer.lightning_module.parameters()]
    if not isinstance(trainer.precision_plugin, MasterWeightsPrecision):
        return weights
    state = trainer.optimizers[0].state_dict()["state"]
    return [state.get(place, {}).get("master_param", weight).clone() for place, weight in enumerate(weights)]


def moments(trainer: pl.Trainer) -> list[Tensor]:
    state = trainer.optimizers[0].state_dict()["state"]
    return [state[i]["exp_avg"].float().clone() for i in sorted(state) if "exp_avg" in state[i]]


def leg(plugins: list[Any], epochs: int, path: Path, *, resume: bool) -> tuple[AtStart, pl.Trainer]:
    """One more epoch of two steps; the checkpoint is read from the path and written to it."""
    start = AtStart()
    module = Net()
    trainer = quiet_trainer(plugins=plugins, max_epochs=epochs, callbacks=[start])
    batches = list(torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(1)))
    trainer.fit(module, loader(batches), ckpt_path=path if resume else None)
    trainer.save_checkpoint(path)
    return start, trainer


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) > 0 and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def rounded(tensors: list[Tensor], *, ties_to_even: bool = True) -> list[Tensor]:
    return [(t.bfloat16() if ties_to_even else split(t)[0]).float() for t in tensors]


@pytest.mark.parametrize(
    ("before", "after"), [(a, b) for a in PRECISIONS for b in PRECISIONS if not {a, b} <= set(STOCK)]
)
def test_every_precision_goes_on_from_every_other(
    before: str, after: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Weights and moments are those of the run before, to the last bit that the precisions have.

    Only Lightning's own know nothing of masters: the run that writes the checkpoint says so.
    """
    path = tmp_path / "x.ckpt"
    with caplog.at_level(logging.INFO):
        _, first = leg(PRECISIONS[before](), 1, path, resume=False)
    told = "For Lightning's own precisions, which would resume from the rounded weights" in caplog.text
    assert told == (before in MASTERS)
    start, second = leg(PRECISIONS[after](), 2, path, resume=True)

    weights, first_moments = trained(first), moments(first)
    if "stock-true" in (before, after):
        first_moments = rounded(first_moments)
    lossy = after == "stock-true" or (before in MASTERS and after in STOCK)
    if lossy:
        to_16_bit = partial(rounded, ties_to_even=before != "24bit")  # of which one in 256 is a tie
        norm = weights[2:4] if before == "policy" and after != "stock-true" else to_16_bit(weights[2:4])
        weights = [*to_16_bit(weights[:2]), *norm, *to_16_bit(weights[4:])]
    if after == "24bit":  # what has no master is rounded when masters are made
        with_master = [before in MASTERS and not (before == "policy" and place in (2, 3)) for place in range(6)]
        weights = [as_kept(w, after, 2 if known else 0) for w, known in zip(weights, with_master, strict=True)]
    assert same(start.weights, weights)
    assert same(start.moments, first_moments)
    keys = {key for entry in second.optimizers[0].state.values() for key in entry}
    assert ("master_param" in keys) == (before in MASTERS and after in STOCK), "dead state is stock's alone"


@pytest.mark.parametrize("after", ["stock-32", "stock-mixed"])
@pytest.mark.parametrize("storage", ["fp32", "remainder"])
def test_with_fp32_checkpoints_stock_goes_on_exactly(storage: Any, after: str, tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    ours = MasterWeightsPrecision("bf16-true", storage=storage, fp32_checkpoints=True)
    _, first = leg([ours], 1, path, resume=False)
    start, _ = leg(PRECISIONS[after](), 2, path, resume=True)
    assert same(start.weights, trained(first))


@pytest.mark.parametrize("fp32_checkpoints", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("last", ["masters", "remainder", "autocast"])
@pytest.mark.parametrize("between", ["stock-32", "stock-mixed", "stock-true", "autocast", "fp8"])
def test_masters_that_another_run_carried_along_do_not_come_back(
    between: str, last: str, fp32_checkpoints: bool, tmp_path: Path
) -> None:
    path = tmp_path / "x.ckpt"
    leg([MasterWeightsPrecision("bf16-true", fp32_checkpoints=fp32_checkpoints)], 1, path, resume=False)
    _, second = leg(PRECISIONS[between](), 2, path, resume=True)
    stale = pytest.warns(UserWarning, match="ignores the fp32 masters of 6 parameters")
    with stale if between in STOCK else nullcontext():
        start, _ = leg(PRECISIONS[last](), 3, path, resume=True)
    assert same(start.weights, trained(second))


@pytest.mark.parametrize(("before", "after"), [("bf16-true", "16-true"), ("16-true", "bf16-true")])
def test_masters_of_the_other_16_bit_format_are_taken(before: Any, after: Any, tmp_path: Path) -> None:
    """They round to the weights that were saved, not to those that the model has now."""

    def ours(precision: Any) -> MasterWeightsPrecision:
        scaler = LossScaler(init_scale=1.0) if precision == "16-true" else None
        return MasterWeightsPrecision(precision, scaler=scaler)

    path = tmp_path / "x.ckpt"
    _, first = leg([ours(before)], 1, path, resume=False)
    with pytest.warns(UserWarning, match="holds no loss scale") if after == "16-true" else nullcontext():
        start, _ = leg([ours(after)], 2, path, resume=True)
    assert same(start.weights, trained(first))


@pytest.mark.parametrize("after", ["masters", "autocast"])
def test_an_optimizer_without_state_has_masters_all_the_same(after: str, tmp_path: Path) -> None:
    class Plain(Net):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    def fit(plugins: list[Any], epochs: int, resume: Path | None) -> tuple[list[Tensor], pl.Trainer]:
        seen: list[Tensor] = []

        class Look(pl.Callback):
            def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
                seen.extend(trained(trainer))

        trainer = quiet_trainer(plugins=plugins, max_epochs=epochs, callbacks=[Look()])
        trainer.fit(Plain(), loader([torch.ones(4, 16)] * 2), ckpt_path=resume)
        return seen, trainer

    _, first = fit(PRECISIONS["masters"](), 1, None)
    first.save_checkpoint(tmp_path / "x.ckpt")
    start, _ = fit(PRECISIONS[after](), 2, tmp_path / "x.ckpt")
    assert same(start, trained(first))


@pytest.mark.parametrize("after", ["masters", "autocast"])
def test_weights_that_were_changed_in_the_checkpoint_win(after: str, tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    leg(PRECISIONS["masters"](), 1, path, resume=False)
    checkpoint = torch.load(path, weights_only=False)
    checkpoint["state_dict"]["net.0.weight"].fill_(3.0)
    torch.save(checkpoint, path)
    with pytest.warns(UserWarning, match="weights in 1 of 6 parameters; there the model's weights are used"):
        start, _ = leg(PRECISIONS[after](), 2, path, resume=True)
    assert start.weights[0].unique().tolist() == [3.0]


def test_a_checkpoint_is_not_changed_by_who_looks_at_it(tmp_path: Path) -> None:
    """The masters are in the file for the next run, too."""
    path = tmp_path / "x.ckpt"
    leg(PRECISIONS["masters"](), 1, path, resume=False)
    saved = torch.load(path, weights_only=True)
    quiet_trainer(plugins=PRECISIONS["autocast"]()).fit(Net(), loader([torch.ones(4, 16)]), ckpt_path=path)
    again = torch.load(path, weights_only=True)
    assert all("master_param" in entry for entry in again["optimizer_states"][0]["state"].values())
    assert saved.keys() == again.keys()


# -- sharded models, whose checkpoints are read after set-up -----------------------------------------------------------


class SeededNet(Net):
    """Each leg, and each rank of it, starts from weights of its own."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        for layer in (self.net[0], self.net[2]):
            layer.reset_parameters()


class ShardedNet(SeededNet):
    def configure_model(self) -> None:
        if not isinstance(self.net[0].weight, DTensor):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().float().clone()


class WholeAtStart(pl.Callback):
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.weights = whole_weights(trainer)
        self.moments = whole_moments(trainer)


def whole_weights(trainer: pl.Trainer) -> list[Tensor]:
    masters = getattr(trainer.precision_plugin, "_masters", None)
    return [whole(p if masters is None else masters.store.get(p)) for p in trainer.lightning_module.parameters()]


def whole_moments(trainer: pl.Trainer) -> list[Tensor]:
    state = trainer.optimizers[0].state
    assert all(state[p]["exp_avg"].dtype == torch.float32 for p in state)
    return [whole(state[p]["exp_avg"]) for p in trainer.lightning_module.parameters()]


def model_parallel(*, distributed: bool) -> ModelParallelStrategy:
    return ModelParallelStrategy(
        data_parallel_size=2,
        tensor_parallel_size=1,
        process_group_backend="gloo",
        save_distributed_checkpoint=distributed,
    )


def fsdp2(*, distributed: bool) -> FSDP2Strategy:
    return FSDP2Strategy(process_group_backend="gloo", save_distributed_checkpoint=distributed)


def sharded_legs(rank: int, before: str, after: str, strategy: Callable[[], Any], path: Path) -> Any:
    """Whether weights and moments are those of the leg before, and what was said about rounded weights."""
    start = WholeAtStart()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for precision, epochs in ((before, 1), (after, 2)):
            chosen = strategy()
            trainer = quiet_trainer(
                devices=2,
                strategy=chosen,
                plugins=PRECISIONS[precision](),
                max_epochs=epochs,
                callbacks=[start] if epochs == 2 else [],
            )
            module = (SeededNet if isinstance(chosen, FSDP2Strategy) else ShardedNet)(epochs)
            trainer.fit(module, loader([torch.randn(4, 16)] * 2), ckpt_path=path if epochs == 2 else None)
            if epochs == 1:
                trainer.save_checkpoint(path)
                first = whole_weights(trainer), whole_moments(trainer)
    told = [str(warning.message) for warning in caught if "rounded" in str(warning.message)]
    return same(start.weights, first[0]), same(start.moments, first[1]), told


@pytest.mark.full
@pytest.mark.parametrize(
    ("before", "after", "strategy"),
    [
        ("masters", "remainder", partial(model_parallel, distributed=True)),
        *(
            (before, after, partial(make, distributed=distributed))
            for make in (model_parallel, fsdp2)
            for distributed in (False, True)
            for before, after in [
                ("masters", "autocast"),
                ("autocast", "masters"),
                ("stock-32", "remainder"),
                ("remainder", "masters"),
            ]
            if before != "stock-32" or make is model_parallel
        ),
    ],
)
def test_sharded_runs_go_on_exactly(before: str, after: str, strategy: Callable[[], Any], tmp_path: Path) -> None:
    """Whatever the weights of the new process were: nothing of them is left below the last bit of the loaded ones."""
    run = partial(sharded_legs, before=before, after=after, strategy=strategy, path=tmp_path / "x.ckpt")
    assert run_ranks(run, 2) == [(True, True, [])] * 2


def fsdp1_legs(rank: int, after: str, path: Path) -> list[tuple[str, list[Tensor]]]:
    """Masters under DDP, then FSDP1, whose shards are fp32."""
    warnings.filterwarnings("ignore", message=r"FSDP.state_dict_type\(\)", category=FutureWarning)
    seen = []

    class Look(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            with FullyShardedDataParallel.summon_full_params(trainer.model):
                seen.append(("start", [p.detach().clone() for p in pl_module.parameters()]))

    batches = [torch.ones(4, 16)] * 2
    ddp = quiet_trainer(devices=2, strategy=DDPStrategy(process_group_backend="gloo"), plugins=PRECISIONS["masters"]())
    ddp.fit(Net(), loader(batches))
    ddp.save_checkpoint(path)
    seen.append(("end", trained(ddp)))
    fsdp = quiet_trainer(devices=2, strategy=CpuFsdp(), plugins=PRECISIONS[after](), max_epochs=2, callbacks=[Look()])
    fsdp.fit(Net(), loader(batches), ckpt_path=path)
    return seen


@pytest.mark.full
@pytest.mark.parametrize("after", ["autocast", "masters"])
def test_masters_become_the_shards_of_fsdp1(after: str, tmp_path: Path) -> None:
    for seen in run_ranks(partial(fsdp1_legs, after=after, path=tmp_path / "x.ckpt"), 2):
        both = dict(seen)
        assert same(both["start"], both["end"])
