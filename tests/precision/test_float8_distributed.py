"""Float8Precision on two processes: DDP and FSDP2, with weights gathered in fp8 or not."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchao.float8  # noqa: F401  # once, before the ranks are forked
from gloo import FLOAT8
from gloo import run_ranks as run_any_ranks
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from small_models import adamw, fit, loader, quiet_trainer, shard, weights
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_mp import Float8Precision
from lightning_mp.training.precision.fp8.conversion import RECIPES

WIDTH = 32
run_ranks = partial(run_any_ranks, imports=FLOAT8)

# torch warns of in-place operations on a sharded layer's output; there are none here.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")


class Net(pl.LightningModule):
    """Four layers; those in the middle multiply in fp8."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, WIDTH), nn.Linear(WIDTH, 1)
        )
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x).float(), y.float())
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return adamw(self.parameters())


class Sharded(Net):
    """FSDP2, in one group per layer."""

    def configure_model(self) -> None:
        shard(self, *(layer for layer in self.net if isinstance(layer, nn.Linear)))


def batches(rank: int, count: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    xs = torch.randn(count, 16, WIDTH, generator=generator)
    return [[x, x.square().mean(1, keepdim=True)] for x in xs]


def strategy(kind: str) -> Any:
    if kind == "ddp":
        return DDPStrategy(process_group_backend="gloo")
    return ModelParallelStrategy(
        data_parallel_size=2,
        tensor_parallel_size=1,
        process_group_backend="gloo",
        save_distributed_checkpoint=kind == "fsdp2, sharded checkpoints",
    )


def train(rank: int, module: Net, plugin: Float8Precision, kind: str, count: int = 20, **arguments: Any) -> pl.Trainer:
    return fit(module, batches(rank, count), devices=2, strategy=strategy(kind), plugin=plugin, **arguments)


def full(module: Net) -> list[Tensor]:
    return [p.full_tensor() if isinstance(p, DTensor) else p for p in weights(module)]


def classes(module: Net) -> list[str]:
    return [type(layer).__name__ for layer in module.net if isinstance(layer, nn.Linear)]


@pytest.mark.full
@pytest.mark.parametrize("recipe", RECIPES)
def test_all_ranks_end_alike_and_fsdp2_close_to_ddp(recipe):
    """D25: DDP discards what convert_module returns. Layers are converted after FSDP2 has sharded them."""

    def run(rank: int) -> Any:
        results = {}
        for kind, module in (("ddp", Net()), ("fsdp2", Sharded())):
            during: list[str] = []
            module.on_train_batch_start = lambda *_, module=module, during=during: during.extend(classes(module))
            train(rank, module, Float8Precision(recipe, skip_small=False), kind)
            results[kind] = full(module), module.losses, during[:4], classes(module)
        return results

    first, second = run_ranks(run, 2)
    assert first["ddp"][2:] == (["Linear", "Float8Linear", "Float8Linear", "Linear"], ["Linear"] * 4)
    assert first["fsdp2"][2:] == (
        ["FSDPLinear", "FSDPFloat8Linear", "FSDPFloat8Linear", "FSDPLinear"],
        ["FSDPLinear"] * 4,
    )
    for kind in ("ddp", "fsdp2"):
        assert all(torch.equal(a, b) for a, b in zip(first[kind][0], second[kind][0], strict=True))
        assert sum(first[kind][1][-5:]) < 0.5 * sum(first[kind][1][:5])
    # Values on the edge between two fp8 numbers fall to either side, so runs part by more than rounding in fp32.
    assert first["fsdp2"][1][0] == first["ddp"][1][0]
    assert first["fsdp2"][1][-1] == pytest.approx(first["ddp"][1][-1], rel=0.2)


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp2, sharded checkpoints"])
@pytest.mark.full
def test_a_run_on_fsdp2_is_resumed_with_the_same_bits(tmp_path, kind):
    def run(rank: int) -> Any:
        def make() -> tuple[Sharded, Float8Precision]:
            return Sharded(), Float8Precision("tensorwise", skip_small=False)

        straight, plugin = make()
        train(rank, straight, plugin, kind, 3, max_epochs=2)
        stopped, plugin = make()
        train(rank, stopped, plugin, kind, 3).save_checkpoint(tmp_path / "last.ckpt")
        resumed, plugin = make()
        trainer = quiet_trainer(devices=2, strategy=strategy(kind), plugins=[plugin], max_epochs=2)
        trainer.fit(resumed, loader(batches(rank, 3)), ckpt_path=tmp_path / "last.ckpt")
        return full(straight), full(resumed)

    for straight, resumed in run_ranks(run, 2):
        assert all(torch.equal(a, b) for a, b in zip(straight, resumed, strict=True))
    if kind == "fsdp2":
        checkpoint = torch.load(Path(tmp_path) / "last.ckpt", weights_only=True)
        assert list(checkpoint["state_dict"]) == list(Net().state_dict())
        assert {type(value) for value in checkpoint["state_dict"].values()} == {Tensor}
