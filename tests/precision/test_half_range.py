"""Weights at the end of fp16's range: refused at set-up, held there in training, and named."""

import warnings
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import small_models
import torch
from cpu_fsdp import CpuFsdp
from gloo import run_ranks
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from master_loops import masters_of
from small_models import Trained, loader, quiet_trainer, shard
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from lightning_mp import LossScaler, MasterWeightsPrecision

LIMIT = 65504.0


class Drift(nn.Module):
    def __init__(self, start: float) -> None:
        super().__init__()
        self.drifts = nn.Parameter(torch.full((4,), start))
        self.stays = nn.Parameter(torch.ones(4))

    def forward(self, slope: float) -> Tensor:
        return (self.drifts.float() * slope).sum() + self.stays.float().sum()


class Drifting(pl.LightningModule):
    """A weight that grows by 30,720 a step for ``up`` steps and comes back afterwards, and one that stays small."""

    def __init__(self, up: int, *, start: float = 0.0, **settings: Any) -> None:
        super().__init__()
        self.net = Drift(start)
        self.up, self.settings = up, settings
        self.working: list[float] = []
        self.stepped: list[bool] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(-30720.0 if batch_idx < self.up else 30720.0)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0, **self.settings)

    def on_after_optimizer_step(self, optimizer: Any, outcome: Any) -> None:
        self.stepped.append(outcome.stepped)

    def on_train_batch_end(self, *_: Any) -> None:
        drifts = self.net.drifts.detach()
        self.working += (drifts.to_local() if hasattr(drifts, "to_local") else drifts)[:1].tolist()


def fit(module: pl.LightningModule, steps: int, **arguments: Any) -> pl.Trainer:
    plugin = MasterWeightsPrecision("16-true", scaler=LossScaler(init_scale=1.0))
    return small_models.fit(module, [torch.zeros(1)] * steps, plugin=plugin, **arguments)


@pytest.mark.parametrize("settings", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_a_weight_is_held_at_the_end_of_the_range_and_named(settings: dict[str, Any]) -> None:
    """It became -inf, the step was reported as made, and 44 steps later another parameter was blamed."""
    module = Drifting(4, **settings)
    with pytest.warns(UserWarning, match=r"elements of net.drifts have reached ±65,504.*Use 'bf16-true'") as caught:
        trainer = fit(module, 6)
    assert sum("65,504" in str(warning.message) for warning in caught) == 1
    assert module.working == [30720.0, 61440.0, LIMIT, LIMIT, 34784.0, 4064.0]
    assert module.stepped == [True] * 6
    assert masters_of(trainer)[0][0].item() == 4064.0, "the master comes back from where the weight is"


def test_it_is_named_although_the_fit_ends_with_that_step() -> None:
    with pytest.warns(UserWarning, match="net.drifts have reached"):
        fit(Drifting(3), 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_beyond_the_range_are_refused_at_set_up(dtype: torch.dtype) -> None:
    module = Drifting(0, start=1e5).to(dtype)
    with pytest.raises(MisconfigurationException, match=r"net.drifts has weights above 65,504.*Use 'bf16-true'"):
        fit(module, 1)
    assert float(module.net.drifts.detach().abs().max()) == (1e5 if dtype == torch.float32 else 99840.0)


def test_a_policy_may_keep_them_in_fp32() -> None:
    def large() -> nn.Linear:
        layer = nn.Linear(4, 4)
        with torch.no_grad():
            layer.bias.fill_(1e5)
        return layer

    plugin = MasterWeightsPrecision("16-true", policy={"first": "fp32"}, scaler=LossScaler(init_scale=1.0))
    module = Trained(
        lambda m, batch: m.second(m.first(batch) * 1e-5).float().sum(),
        partial(torch.optim.SGD, lr=1e-3),
        first=large,
        second=lambda: nn.Linear(4, 4),
    )
    quiet_trainer(plugins=[plugin]).fit(module, loader([torch.ones(2, 4)]))
    assert module.first.bias[0].item() == pytest.approx(1e5)


@pytest.mark.parametrize("part", [lambda: nn.Parameter(torch.ones(4)), lambda: nn.LayerNorm(4)], ids=["bare", "norm"])
def test_an_optimizer_of_weights_without_16_bit_copies_steps(part: Any) -> None:
    def loss(module: Any, batch: Tensor) -> Tensor:
        return (batch * module.part if isinstance(module.part, Tensor) else module.part(batch)).square().mean()

    module = Trained(loss, part=part)
    small_models.fit(module, [torch.arange(4.0)[None]] * 2, plugin=MasterWeightsPrecision("16-true"))
    assert any(float((weight.detach() - 1).abs().max()) > 0 for weight in module.parameters())


class Sharded(Drifting):
    def configure_model(self) -> None:
        shard(self, self.net)


def _train(rank: int, kind: str) -> Any:
    module = Sharded(3) if kind == "fsdp2" else Drifting(3)
    strategies: dict[str, Any] = {
        "ddp": lambda: DDPStrategy(process_group_backend="gloo"),
        "fsdp1": lambda: CpuFsdp(),
        "fsdp2": lambda: ModelParallelStrategy(
            data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo"
        ),
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = fit(module, 4, devices=2, strategy=strategies[kind]())
    told = sum("net.drifts" in str(w.message) and "±65,504" in str(w.message) for w in caught)
    if kind == "fsdp1":
        with FullyShardedDataParallel.summon_full_params(trainer.model):
            return module.net.drifts[0].item(), module.stepped, told
    return module.working[-1], module.stepped, told


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp1", marks=pytest.mark.full), "fsdp2"])
def test_all_ranks_hold_alike(kind: str) -> None:
    (first, first_stepped, told), (second, second_stepped, _) = run_ranks(lambda rank: _train(rank, kind), 2)
    assert first == second == 34784.0
    assert first_stepped == second_stepped == [True] * 4
    assert told == 1
