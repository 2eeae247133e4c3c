"""Checkpoints of sharded runs, as one file and as one per rank: a resumed run ends at the same bits."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_fsdp import CpuFsdp
from gloo import RankError
from gloo import run_same_ranks as run_ranks
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from small_models import ResumableLoader, loader, quiet_trainer, weights
from strategy_rows import ParallelNet
from strategy_runs import Net, Outcomes, regression_batches
from torch import nn

from lightning_mp import AtomicCheckpoints, AutocastPrecision, LossScaler, MasterWeightsPrecision
from lightning_mp.training.checkpoints.consolidate import consolidate_checkpoint
from lightning_mp.training.checkpoints.sharded import without_synthetic_step

pytestmark = [
    # torch warns of in-place operations on a sharded layer's output; there are none here.
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor"),
    # Lightning's FSDP1 and torch under it call what torch has deprecated.
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:`_get_pg_default_device` will be deprecated"),
    pytest.mark.filterwarnings("ignore:Multiple backends are registered with this ProcessGroup"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]

BATCHES = regression_batches(3)
STEPS = len(BATCHES)


class AdamWNet(Net):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)


class ShardedAdamWNet(AdamWNet):
    configure_model = ParallelNet.configure_model


def fsdp1(kind: str) -> FSDPStrategy:
    return CpuFsdp(auto_wrap_policy={nn.Linear}, state_dict_type=kind)


def fsdp2(kind: str) -> ModelParallelStrategy:
    return ModelParallelStrategy(
        data_parallel_size=2,
        tensor_parallel_size=1,
        save_distributed_checkpoint=kind == "sharded",
        process_group_backend="gloo",
    )


PLUGINS: dict[str, Any] = {
    "16-mixed": lambda: AutocastPrecision("16-mixed", scaler=LossScaler(init_scale=1024.0, growth_interval=2)),
    "16-true": lambda: MasterWeightsPrecision("16-true", scaler=LossScaler(init_scale=1024.0, growth_interval=2)),
    "bf16-true": lambda: MasterWeightsPrecision("bf16-true"),
}


def fit(make: Any, precision: str, epochs: int, **arguments: Any) -> tuple[Any, Any]:
    strategy = make()
    module = (ShardedAdamWNet if isinstance(strategy, ModelParallelStrategy) else AdamWNet)(1, plants=False)
    trainer = quiet_trainer(
        devices=2, strategy=strategy, plugins=[PLUGINS[precision]()], callbacks=[Outcomes()], max_epochs=epochs
    )
    trainer.fit(module, loader(BATCHES), **arguments)
    return trainer, module


KINDS = ("full", "sharded")


@pytest.fixture(scope="module")
def resumed_runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], Any]:
    """Of each rank, by kind and precision: the straight run, its half and the resumed one, and the half's checkpoint.

    All of one strategy are made by the same processes.
    """

    @cache
    def of_a_strategy(make: Any) -> tuple[list[Any], Path]:
        folder = tmp_path_factory.mktemp("resumed")

        def train(kind: str, precision: str) -> Any:
            path = folder / f"{kind} {precision}.ckpt"
            _, straight = fit(lambda: make(kind), precision, 2)
            trainer, half = fit(lambda: make(kind), precision, 1)
            trainer.save_checkpoint(path)
            trainer, resumed = fit(lambda: make(kind), precision, 2, ckpt_path=path, weights_only=False)
            assert trainer.global_step == 2 * STEPS
            return straight.run, half.run, resumed.run

        def train_all(rank: int) -> Any:
            return {(kind, precision): train(kind, precision) for kind in KINDS for precision in PLUGINS}

        return run_ranks(train_all, 2, timeout_seconds=150), folder

    return of_a_strategy


@pytest.mark.parametrize("precision", PLUGINS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [fsdp1, fsdp2])
@pytest.mark.full
def test_a_resumed_run_is_the_same_to_the_bit(
    make: Any, kind: str, precision: str, resumed_runs: Callable[[Any], Any]
) -> None:
    """D43: the full checkpoint of FSDP1 on CPU, too. Weights, moments, masters and loss scale."""
    ranks, folder = resumed_runs(make)
    path = folder / f"{kind} {precision}.ckpt"
    for runs in ranks:
        straight, half, resumed = runs[kind, precision]
        assert half.scales + resumed.scales == straight.scales
        assert half.norms + resumed.norms == straight.norms
        assert all(torch.equal(a, b) for a, b in zip(resumed.weights, straight.weights, strict=True))
        assert not any(torch.equal(a, b) for a, b in zip(half.weights, straight.weights, strict=True))
    assert path.is_dir() == (kind == "sharded")
    if kind == "full":
        alone = Net(1, plants=False)
        alone.load_state_dict(torch.load(path, weights_only=False)["state_dict"])
        assert all(torch.equal(a.float(), b) for a, b in zip(weights(alone), half.weights, strict=True))


def test_fsdp1_on_the_cpu_is_refused_by_lightning() -> None:
    """D43: so that only a strategy of one's own can come to the crash below."""
    with pytest.raises(ValueError, match="The strategy `fsdp` requires a GPU accelerator, but"):
        quiet_trainer(strategy="fsdp")


@pytest.mark.full
@pytest.mark.skipif(torch.__version__ >= "2.15", reason="torch 2.15 has mended it")
def test_the_stock_full_checkpoint_ends_the_process(tmp_path: Path) -> None:
    """D43, the reason for CpuFsdp's own gathering: when this fails, torch has repaired it."""

    class Stock(CpuFsdp):
        lightning_module_state_dict = FSDPStrategy.lightning_module_state_dict

    def train(rank: int) -> None:
        trainer, _ = fit(Stock, "16-mixed", 1)
        trainer.save_checkpoint(tmp_path / "full.ckpt")

    with pytest.raises(RankError, match="was ended by SIGSEGV"):
        run_ranks(train, 2)


@pytest.mark.full
def test_fsdp1_says_that_it_cannot_go_on_from_a_folder_without_state(tmp_path: Path) -> None:
    """All steps were skipped; it holds with AtomicCheckpoints, and a later checkpoint is read."""

    def train(rank: int) -> None:
        def run(steps: int, path: Path | None = None) -> Any:
            strategy, plugin = fsdp1("sharded"), AutocastPrecision("16-mixed", scaler=LossScaler(init_scale=2.0**24))
            trainer = quiet_trainer(
                devices=2,
                strategy=strategy,
                plugins=[plugin],
                callbacks=[AtomicCheckpoints()],
                max_steps=steps,
                max_epochs=-1,
            )
            trainer.fit(Net(1, plants=False), ResumableLoader(BATCHES), ckpt_path=path)
            return trainer

        run(1).save_checkpoint(tmp_path / "skipped.ckpt")
        with pytest.raises(MisconfigurationException, match="skipped.ckpt, which has no optimizer state"):
            run(18, tmp_path / "skipped.ckpt")
        run(17).save_checkpoint(tmp_path / "later.ckpt")
        assert run(18, tmp_path / "later.ckpt").global_step == 18

    run_ranks(train, 2)


@pytest.mark.full
@pytest.mark.parametrize("make", [fsdp1, fsdp2])
def test_a_folder_of_lightnings_strategies_becomes_a_file(make: Any, tmp_path: Path) -> None:
    """On one device the optimizer, too, has what the ranks had."""

    def train(rank: int) -> Any:
        trainer, _ = fit(lambda: make("sharded"), "16-mixed", 1)
        trainer.save_checkpoint(tmp_path / "folder.ckpt")
        trainer, _ = fit(lambda: make("full"), "16-mixed", 1)
        trainer.save_checkpoint(tmp_path / "file.ckpt")

    run_ranks(train, 2)
    file = consolidate_checkpoint(tmp_path / "folder.ckpt", tmp_path / "whole.ckpt")
    ours, theirs = (torch.load(path, weights_only=False) for path in (file, tmp_path / "file.ckpt"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours["state_dict"][name], value) for name, value in theirs["state_dict"].items())
    (our_state,), (their_state,) = ours["optimizer_states"], theirs["optimizer_states"]
    assert our_state["param_groups"] == their_state["param_groups"]
    assert our_state["state"].keys() == their_state["state"].keys()
    for number, values in their_state["state"].items():
        assert all(torch.equal(our_state["state"][number][name], value) for name, value in values.items())


@pytest.mark.parametrize("gradient", [None, torch.ones(3)], ids=["none", "of a window"])
def test_asking_for_the_state_before_the_first_step_leaves_gradients_alone(gradient: Any) -> None:
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = gradient
    with without_synthetic_step(torch.optim.AdamW([parameter])):
        assert parameter.grad is not None
    assert parameter.grad is gradient
    assert gradient is None or gradient.equal(torch.ones(3))
