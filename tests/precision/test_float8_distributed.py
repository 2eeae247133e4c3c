"""Float8Precision on two processes: DDP and FSDP2, with weights gathered in fp8 or not."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchao.float8  # noqa: F401  # once, before the ranks are forked
from cpu_fsdp import CpuFsdp
from gloo import FLOAT8
from gloo import run_ranks as run_any_ranks
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from small_models import adamw, loader, quiet_trainer, weights
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_mp import Float8Precision, OverflowMonitor
from lightning_mp.precision.fp8.conversion import RECIPES

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
    """FSDP2, in one group per layer; `convert_first` as fp8 all-gather needs it."""

    def __init__(self, *, convert_first: bool = False) -> None:
        super().__init__()
        self.convert_first = convert_first

    def configure_model(self) -> None:
        if isinstance(self.net[0].weight, DTensor):
            return
        if self.convert_first:
            self.trainer.precision_plugin.convert_module(self)
        mesh = self.device_mesh["data_parallel"]
        for layer in self.net:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)


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
    trainer = quiet_trainer(devices=2, strategy=strategy(kind), plugins=[plugin], **arguments)
    trainer.fit(module, loader(batches(rank, count)))
    return trainer


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
            train(rank, module, Float8Precision(recipe), kind)
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


@pytest.mark.full
def test_gathering_weights_in_fp8_changes_no_bit():
    """Each rank rounds its shard with the factor of the whole weight, so it is the same as rounding after gathering."""

    def run(rank: int, fsdp_all_gather: bool) -> Any:
        module = Sharded(convert_first=fsdp_all_gather)
        plugin = Float8Precision("tensorwise", fsdp_all_gather=fsdp_all_gather)
        train(rank, module, plugin, "fsdp2", 10)
        return full(module), module.losses, classes(module)

    in_fp8 = run_ranks(lambda rank: run(rank, True), 2)
    in_fp32 = run_ranks(lambda rank: run(rank, False), 2)
    assert in_fp8[0][2] == ["FSDPLinear", "FSDPFloat8Linear", "FSDPFloat8Linear", "FSDPLinear"]
    for rank in (0, 1):
        assert in_fp8[rank][1] == in_fp32[rank][1]
        assert all(torch.equal(a, b) for a, b in zip(in_fp8[rank][0], in_fp32[rank][0], strict=True))


class TensorParallel(Net):
    def configure_model(self) -> None:
        plan = {"2": ColwiseParallel(), "4": RowwiseParallel()}
        parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)


@pytest.mark.full
def test_a_plugin_whose_layers_stay_in_fp8_serves_their_module_again_and_another():
    """What FSDP2 gathers in fp8 cannot be taken back at the end of a run; that is one module's affair."""

    def run(rank: int) -> Any:
        plugin = Float8Precision("tensorwise", fsdp_all_gather=True)
        module, other, alone = (Sharded(convert_first=True) for _ in range(3))
        for _ in range(2):
            train(rank, module, plugin, "fsdp2", 4)
        train(rank, other, plugin, "fsdp2", 4)
        train(rank, alone, Float8Precision("tensorwise", fsdp_all_gather=True), "fsdp2", 4)
        return [classes(each) for each in (module, other)], len(module.losses), other.losses, alone.losses

    for kinds, steps, losses, expected in run_ranks(run, 2):
        assert kinds == [["FSDPLinear", "FSDPFloat8Linear", "FSDPFloat8Linear", "FSDPLinear"]] * 2
        assert steps == 8
        assert losses == expected


@pytest.mark.full
def test_tensor_parallel_layers_multiply_in_fp8():
    """Both ranks see the same batches, so one process on its own is the reference, but for factors of shards' rows."""

    def run(rank: int) -> Any:
        module = TensorParallel()
        parallel = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2, process_group_backend="gloo")
        trainer = quiet_trainer(devices=2, strategy=parallel, plugins=[Float8Precision()])
        trainer.fit(module, loader(batches(0, 8)))
        return full(module), module.losses

    (first, losses), (second, _) = run_ranks(run, 2)
    alone = Net()
    quiet_trainer(plugins=[Float8Precision()]).fit(alone, loader(batches(0, 8)))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert losses == pytest.approx(alone.losses, abs=0.01)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.full
def test_fsdp1_is_close_to_ddp(recipe):
    def run(rank: int) -> Any:
        module, reference = Net(), Net()
        fsdp1 = CpuFsdp(auto_wrap_policy={nn.Linear})
        plugin = Float8Precision(recipe)
        quiet_trainer(devices=2, strategy=fsdp1, plugins=[plugin]).fit(module, loader(batches(rank, 10)))
        train(rank, reference, Float8Precision(recipe), "ddp", 10)
        return module.losses, reference.losses, [layer.name for layer in plugin.layers]

    for losses, expected, names in run_ranks(run, 2):
        # FSDP1 rounds weights to bf16 before they are rounded to fp8.
        assert losses == pytest.approx(expected, abs=0.01)
        assert names == ["net.0", "net.2", "net.4", "net.5"]


def test_fp8_all_gather_of_layers_that_are_sharded_already_is_refused():
    def run(rank: int) -> str:
        with pytest.raises(ValueError, match="converted before fully_shard") as raised:
            train(rank, Sharded(), Float8Precision("tensorwise", fsdp_all_gather=True), "fsdp2")
        return str(raised.value)

    assert run_ranks(run, 2)[0] == (
        "fsdp_all_gather=True needs layers converted before fully_shard, but net.2 is already sharded."
        " In configure_model call self.trainer.precision_plugin.convert_module(self) first."
    )


@pytest.mark.parametrize(
    ("kind", "fsdp_all_gather"), [("fsdp2", False), ("fsdp2", True), ("fsdp2, sharded checkpoints", True)]
)
@pytest.mark.full
def test_a_run_on_fsdp2_is_resumed_with_the_same_bits(tmp_path, kind, fsdp_all_gather):
    def run(rank: int) -> Any:
        def make() -> tuple[Sharded, Float8Precision]:
            plugin = Float8Precision("tensorwise", fsdp_all_gather=fsdp_all_gather)
            return Sharded(convert_first=fsdp_all_gather), plugin

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


@pytest.mark.full
def test_an_overflow_on_one_rank_skips_on_all():
    class Plant(pl.Callback):
        def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
            if trainer.global_rank == 1 and trainer.global_step == 1:
                pl_module.net[2].weight.grad.to_local()[0, 0] = torch.inf

    def run(rank: int) -> Any:
        module, monitor = Sharded(convert_first=True), OverflowMonitor()
        plugin = Float8Precision("tensorwise", fsdp_all_gather=True)
        train(rank, module, plugin, "fsdp2", 4, callbacks=[monitor, Plant()], gradient_clip_val=0.1)
        return full(module), monitor.skipped_steps

    (first, skipped), (second, also_skipped) = run_ranks(run, 2)
    assert skipped == also_skipped == 1
    assert all(torch.isfinite(a).all() and torch.equal(a, b) for a, b in zip(first, second, strict=True))
