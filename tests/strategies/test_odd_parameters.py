"""Odd parameters under sharding: trained as on one process, or refused at set-up by name."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from cpu_fsdp import CpuFsdp
from fsdp2_runs import fsdp2
from gloo import run_same_ranks as run_ranks
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from small_models import loader, quiet_trainer
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from lightning_mp import AutocastPrecision, LossScaler, MasterWeightsPrecision

WIDTH = 8
# FSDP1 says that batch norms are wrapped apart; that is what is wanted.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Both mixed precision and an auto_wrap_policy were specified to FSDP"),
    pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated"),
]


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)
        if kind == "float64":
            self.double()
        elif kind == "a float64 layer":
            self.down.double()
        elif kind == "a float64 scale":
            self.scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
        elif kind == "complex":
            self.rotation = nn.Parameter(torch.eye(WIDTH, dtype=torch.complex64))
        elif kind == "sparse":
            self.table = nn.Embedding(4, WIDTH, sparse=True)
        elif kind == "batch norm":
            self.norm = nn.BatchNorm1d(WIDTH)
        elif kind == "weight norm":
            weight_norm(self.up)
        elif kind == "old weight norm":
            torch.nn.utils.weight_norm(self.up)
        elif kind == "spectral norm":
            spectral_norm(self.up)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x.to(self.up.bias.dtype) if self.up.bias.dtype == torch.float64 else x).relu()
        x = self.down(x.double() if self.kind == "a float64 layer" else x)
        if self.kind == "a float64 scale":
            x = x.double() * self.scale
        elif self.kind == "batch norm":
            x = self.norm(x)
        return x.float()


class Module(pl.LightningModule):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(kind), Block(kind)])
        if kind == "tied":
            self.blocks[0].up.weight = self.blocks[1].up.weight
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        loss = batch.float().square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def strategy(kind: str) -> Any:
    plan: Any = {"*.up": "column", "*.down": "row"}
    return {
        "one process": lambda: "auto",
        "FSDP2": lambda: fsdp2({Block}),
        "TP": lambda: fsdp2({Block}, tensor_parallel_size=2, tensor_parallel_plan=plan),
        "FSDP1": lambda: CpuFsdp(auto_wrap_policy={Block}),
        "FSDP1 in one unit": CpuFsdp,
    }[kind]()


def plugins(precision: str) -> list[Any]:
    if precision == "16-mixed":
        return [AutocastPrecision("16-mixed", scaler=LossScaler(init_scale=16.0))]
    made = {"bf16-mixed": AutocastPrecision, "bf16-true": MasterWeightsPrecision}
    return [made[precision](precision)] if precision in made else []


def fit(rank: int, kind: str, where: str, precision: str) -> list[float] | str:
    """The losses, or what was said at set-up; all ranks see the same batches."""
    module = Module(kind)
    trainer = quiet_trainer(
        devices=1 if where == "one process" else 2, strategy=strategy(where), plugins=plugins(precision)
    )
    batches = torch.randn(3, 4, WIDTH, generator=torch.Generator().manual_seed(1))
    try:
        trainer.fit(module, loader(list(batches)))
    except (MisconfigurationException, ValueError) as error:
        assert not module.losses
        return str(error)
    return module.losses


def fits(rank: int, cells: Sequence[tuple[str, str, str]]) -> list[list[float] | str]:
    """One cell of kind, strategy and precision after the other in the same processes."""
    return [fit(rank, *cell) for cell in cells]


@pytest.mark.full
@pytest.mark.parametrize(
    ("where", "precisions"),
    [("FSDP2", ("32-true", "bf16-mixed")), ("FSDP2", ("16-mixed",)), ("TP", ("32-true", "bf16-mixed", "16-mixed"))],
)
def test_float64_is_trained_as_on_one_process(where: str, precisions: tuple[str, ...]) -> None:
    kinds = ("float64", "a float64 layer", "a float64 scale")
    cells = [(kind, where, precision) for kind in kinds for precision in precisions]
    for on_rank in run_ranks(partial(fits, cells=cells), 2):
        for (kind, _, precision), losses in zip(cells, on_rank, strict=True):
            expected = fit(0, kind, "one process", precision)
            tolerance = 1e-12 if (kind, where) == ("float64", "FSDP2") else 5e-3
            assert losses == pytest.approx(expected, rel=tolerance), (kind, precision)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("precision", ["bf16-mixed", *(pytest.param(p, marks=pytest.mark.full) for p in ("16-mixed",))])
@pytest.mark.parametrize("where", ["FSDP1 in one unit", "FSDP1"])
def test_batch_norms_under_fsdp1_are_those_of_one_process(where: str, precision: str) -> None:
    """Without a policy for wrapping Lightning's own plugin keeps their statistics in 16 bit."""
    expected = fit(0, "batch norm", "one process", precision)
    for losses in run_ranks(partial(fit, kind="batch norm", where=where, precision=precision), 2):
        assert losses == pytest.approx(expected, rel=1e-5)


REFUSED = [
    ("complex", "FSDP2", "bf16-mixed", r"blocks.0.rotation, blocks.1.rotation of Module are complex"),
    ("complex", "TP", "32-true", r"cannot shard complex parameters.*torch.view_as_real"),
    ("complex", "FSDP1", "bf16-mixed", r"FSDPStrategy cannot shard complex parameters"),
    ("sparse", "FSDP2", "32-true", r"cannot reduce sparse gradients, and blocks.0.table"),
    ("sparse", "TP", "bf16-mixed", r"blocks.1.table of Module have sparse=True. Leave sparse out"),
    ("sparse", "FSDP1", "bf16-true", r"FSDPStrategy cannot reduce sparse gradients"),
    ("float64", "FSDP1", "bf16-mixed", r"blocks.0.up.weight.* are float64: they would be rounded"),
    ("tied", "FSDP1", "bf16-mixed", r"blocks.0.up.weight and blocks.1.up.weight are one parameter.*two units"),
    ("tied", "FSDP1", "bf16-true", r"each of which would free what the other needs"),
    ("weight norm", "TP", "bf16-mixed", r"blocks.0.up has parametrizations.weight.original0.*Let it be 'whole'"),
    ("old weight norm", "TP", "bf16-mixed", r"blocks.0.up has weight_g, weight_v"),
    ("spectral norm", "TP", "32-true", r"blocks.0.up has parametrizations.weight.original"),
]


def test_what_cannot_be_sharded_is_refused_by_name() -> None:
    for on_rank in run_ranks(partial(fits, cells=[cell for *cell, _ in REFUSED]), 2):
        for (*cell, says), message in zip(REFUSED, on_rank, strict=True):
            assert isinstance(message, str), cell
            with pytest.raises(ValueError, match=says):
                raise ValueError(message)


class OwnPolicy(Module):
    """Sharded by its own ``configure_model``, in bf16."""

    def configure_model(self) -> None:
        for block in self.blocks:
            fully_shard(block, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


class OwnPlan(Module):
    """Split by its own ``configure_model``."""

    def configure_model(self) -> None:
        parallelize_module(self.blocks[0], self.device_mesh["tensor_parallel"], {"up": ColwiseParallel()})


def refused(rank: int, module: type[Module], strategy: Any, precision: str) -> str:
    trainer = quiet_trainer(devices=2, strategy=strategy(), plugins=plugins(precision))
    with pytest.raises(MisconfigurationException) as error:
        trainer.fit(module("plain"), loader([torch.ones(2, WIDTH)]))
    return str(error.value)


def model_parallel() -> ModelParallelStrategy:
    return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")


def test_fp16_over_a_users_own_bf16_policy_is_refused() -> None:
    message, _ = run_ranks(partial(refused, module=OwnPolicy, strategy=model_parallel, precision="16-mixed"), 2)
    assert "computes in torch.float16, but fully_shard gathers blocks.0, blocks.1 in torch.bfloat16" in message
    assert "set MixedPrecisionPolicy(param_dtype=torch.float16) or None" in message


def test_tensor_parallelism_on_a_model_that_splits_itself_names_configure_model() -> None:
    own = partial(refused, module=OwnPlan, strategy=partial(fsdp2, tensor_parallel_size=2), precision="bf16-mixed")
    message, _ = run_ranks(own, 2)
    assert "OwnPlan.configure_model has spread blocks.0.up.weight over ranks already" in message
    assert "use Lightning's ModelParallelStrategy" in message
