"""Schedule-free optimizers on several ranks: each evaluates and saves the averaged weights of one process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
from fsdp2_runs import fsdp2, full_weights
from gloo import run_same_ranks as run_ranks
from lightning.pytorch.strategies import DDPStrategy
from pipelined_models import PipelinedGPT, token_batches
from pipelined_models import fit as fit_pipeline
from small_models import WIDTH, ResumableLoader, at, loader, quiet_trainer, regression_batches, saving
from torch import Tensor, nn
from torch.optim import Muon

from lightning_mp import (
    AutocastPrecision,
    JointOptimizer,
    LossScaler,
    MasterWeightsPrecision,
    PipelineParallelStrategy,
    TF32Precision,
)
from lightning_mp.checkpoints import consolidate_checkpoint
from lightning_mp.training.precision import tf32

schedulefree = pytest.importorskip("schedulefree", reason="schedulefree is not installed")

STEPS, SAVED_AT = 20, 8
ROWS = regression_batches(STEPS)
HELD_OUT = regression_batches(STEPS + 1)[STEPS:]


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, 1))


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    return schedulefree.AdamWScheduleFree(net.parameters(), lr=1e-2, warmup_steps=2)


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return schedulefree.SGDScheduleFree(net.parameters(), lr=0.1)


def radam(net: nn.Module) -> torch.optim.Optimizer:
    return schedulefree.RAdamScheduleFree(net.parameters(), lr=1e-2)


def muon_and_adamw(net: nn.Module) -> torch.optim.Optimizer:
    rest = [p for name, p in net.named_parameters() if name != "0.weight"]
    return JointOptimizer([Muon([net[0].weight]), schedulefree.AdamWScheduleFree(rest, lr=1e-2)], module=net)


OPTIMIZERS = {"adamw": adamw, "sgd": sgd, "radam": radam, "beside muon": muon_and_adamw}
STRATEGIES: dict[str, Callable[[], Any]] = {"ddp": lambda: DDPStrategy(process_group_backend="gloo"), "fsdp2": fsdp2}


class Module(pl.LightningModule):
    """Records the whole weights of each validation."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.net, self.make = make_net(), make
        self.validated: list[dict[str, Tensor]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]).float(), batch[1].float())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(full_weights(self.net))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make(self.net)


def train(rank: int, make: Any, strategy: Any, plugin: Any, steps: int = STEPS, **arguments: Any) -> Module:
    """One of two ranks, each with half of the rows; validates after every fifth step, and may save in between."""
    module, save_to = Module(make), arguments.pop("save_to", None)
    trainer = quiet_trainer(
        devices=2,
        strategy=strategy,
        plugins=[plugin],
        max_epochs=-1,
        max_steps=steps,
        val_check_interval=5,
        num_sanity_val_steps=0,
        callbacks=[] if save_to is None else [at(saving(save_to), step=SAVED_AT)],  # with the weights that are trained
    )
    rows = [[part[rank::2] for part in batch] for batch in ROWS]
    trainer.fit(module, ResumableLoader(rows), loader(HELD_OUT), **arguments)
    return module


def by_hand(make: Any) -> tuple[list[dict[str, Tensor]], dict[str, Tensor], dict[str, Tensor]]:
    """One process and a plain loop: the weights at each validation, those saved, and those trained then."""
    net, validated = make_net(), []
    optimizer = make(net)
    optimizer.train()
    for step, batch in enumerate(ROWS, 1):
        optimizer.zero_grad()
        for rank in range(2):
            x, y = (part[rank::2] for part in batch)
            (nn.functional.mse_loss(net(x), y) / 2).backward()
        optimizer.step()
        trained = full_weights(net)
        optimizer.eval()
        if step == SAVED_AT:
            saved, trained_then = full_weights(net), trained
        if step % 5 == 0:
            validated.append(full_weights(net))
        optimizer.train()
    return validated, saved, trained_then


def saved_weights(path: Path) -> dict[str, Tensor]:
    file = consolidate_checkpoint(path, path.with_suffix(".one")) if path.is_dir() else path
    state = torch.load(file, weights_only=True)["state_dict"]
    return {name.removeprefix("net."): value for name, value in state.items()}


@pytest.mark.full
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_rank_evaluates_and_saves_the_average_of_one_process(strategy: str, name: str, tmp_path: Path) -> None:
    """In fp32, after 20 steps with four validations and a checkpoint between them."""
    make, path = OPTIMIZERS[name], tmp_path / "half.ckpt"

    def on_rank(rank: int) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
        with patch.object(tf32, "_why_not", lambda _: None):  # on the CPU these products are in fp32
            module = train(rank, make, STRATEGIES[strategy](), TF32Precision(), save_to=path)
        return module.validated, full_weights(module.net)

    validated, saved, trained = by_hand(make)
    close = {"rtol": 0, "atol": 1e-6}
    for on_this_rank, at_the_end in run_ranks(on_rank, 2):
        assert len(on_this_rank) == 4
        torch.testing.assert_close(on_this_rank, validated, **close)
        torch.testing.assert_close(at_the_end, validated[-1], **close)
    torch.testing.assert_close(saved_weights(path), saved, **close)
    assert max((saved[key] - trained[key]).abs().max() for key in saved) > 2e-5  # what would be there without eval()


class Pipelined(PipelinedGPT):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return schedulefree.AdamWScheduleFree(self.parameters(), lr=1e-2, eps=1e-3)


@pytest.mark.full
def test_pipeline_stages_evaluate_the_average_of_one_process() -> None:
    def on_rank(devices: int, strategy: Any) -> tuple[list[float], list[float]]:
        module = Pipelined()
        with patch.object(tf32, "_why_not", lambda _: None):
            fit_pipeline(module, strategy, devices, plugin=TF32Precision(), train=token_batches(32, 4))
        return module.train_losses, module.val_losses

    [alone] = run_ranks(lambda _: on_rank(1, "ddp"), 1)
    for losses in run_ranks(lambda _: on_rank(2, PipelineParallelStrategy()), 2):
        for ours, theirs in zip(losses, alone, strict=True):
            assert ours == pytest.approx(theirs, rel=2e-6)


PLUGINS: dict[str, Callable[[], Any]] = {
    "16-mixed": lambda: AutocastPrecision("16-mixed", scaler=LossScaler.static(256.0)),
    "remainder": lambda: MasterWeightsPrecision("bf16-true", storage="remainder"),
}


@pytest.mark.full
@pytest.mark.parametrize("precision", PLUGINS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_resumed_run_is_the_uninterrupted_one(strategy: str, precision: str, tmp_path: Path) -> None:
    path = tmp_path / "half.ckpt"

    def on_rank(rank: int) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
        def run(**arguments: Any) -> list[dict[str, Tensor]]:
            return train(rank, muon_and_adamw, STRATEGIES[strategy](), PLUGINS[precision](), **arguments).validated

        return run(save_to=path), run(ckpt_path=path)

    for straight, resumed in run_ranks(on_rank, 2):
        assert len(resumed) == 3
        for ours, theirs in zip(resumed, straight[1:], strict=True):
            assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
