"""What torch and Lightning make of several ranks, with ours beside where it is not a test of its own.

All cases share two ranks. A test that fails here says that upstream has changed: then rewrite the row that it names, in
docs/defects.md.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from gloo import process_group, run_ranks
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import FSDPPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from reductions_counter import ReductionsPerStep
from small_models import Parts, Regression, Trained, fit, regression_batches, shard
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import Replicate, distribute_tensor

from lightning_mp import AccumulationScheduler, AutocastPrecision, FSDP2Strategy, LossScaler

# Lightning says so once per process, of batches without a loss.
pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore:`training_step` returned `None`")]

SCALE = 1024.0
WINDOW = 3


class CpuFsdpPrecision(FSDPPrecision):
    """Lightning's own step, with a scaler and autocast on the CPU."""

    def __init__(self) -> None:
        super().__init__("32-true")
        self.scaler = ShardedGradScaler("cpu", init_scale=SCALE)

    def forward_context(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.float16)


def one_weight(*, fused: bool) -> Trained:
    """A weight of 1 whose gradient is the batch; no loss for a batch of 0."""
    return Trained(
        lambda module, batch: module.weight * batch if batch else None,
        partial(torch.optim.SGD, lr=1.0, fused=fused),
        weight=lambda: nn.Parameter(torch.ones(())),
    )


def moved(plugin: Precision, batches: list[float], *, fused: bool, **arguments: Any) -> float:
    module = one_weight(fused=fused)
    fit(module, [torch.tensor(value) for value in batches], plugin=plugin, **arguments)
    return 1.0 - module.weight.item()


def our_plugin() -> AutocastPrecision:
    return AutocastPrecision("16-mixed", scaler=LossScaler(init_scale=SCALE))


def unscaled_before_a_fused_step() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.AdamW([weight], fused=True), ShardedGradScaler("cpu", init_scale=SCALE)
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)


def clipped_beside_a_dtensor() -> None:
    mesh = init_device_mesh("cpu", (2,))
    plain, sharded = nn.Parameter(torch.ones(2)), nn.Parameter(distribute_tensor(torch.ones(2), mesh, [Replicate()]))
    for parameter in (plain, sharded):
        parameter.grad = torch.ones_like(parameter)
    nn.utils.clip_grad_norm_([plain, sharded], 1.0)


def gradient_elements_without_a_reduction() -> int:
    """That a rank keeps of a layer of 64."""
    model: Any = fully_shard(nn.Linear(8, 8, bias=False), mesh=init_device_mesh("cpu", (2,)))
    model.set_requires_gradient_sync(False)
    model(torch.ones(1, 8)).sum().backward()
    [kept] = model._get_fsdp_state()._fsdp_param_group.fsdp_params
    return int(kept.unsharded_grad_data.numel())


def a_layer_first_used_in_the_last_micro_batch() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    layers = {name: lambda: nn.Linear(8, 8) for name in ("always", "late")}
    whole = Parts(lambda m, x, late: m.late(m.always(x)) if late else m.always(x), **layers)
    model: Any = fully_shard(whole, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
    for last in (False, True):
        model.set_requires_gradient_sync(last)
        model(torch.ones(1, 8), last).float().sum().backward()


class Replacing(Precision):
    """Gives back another module than the one that it got."""

    def convert_module(self, module: nn.Module) -> nn.Module:
        self.converted = one_weight(fused=False)
        return self.converted


class Look(Callback):
    """At the module that is trained."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.module = trainer.model.module  # type: ignore[union-attr]


def ddp_trains_what_convert_module_returned() -> bool:
    plugin, look = Replacing(), Look()
    moved(plugin, [1.0], fused=False, devices=2, strategy=DDPStrategy(process_group_backend="gloo"), callbacks=[look])
    return look.module is plugin.converted


class Sharded(Regression):
    def configure_model(self) -> None:
        shard(self, self.net)


def reductions(module: pl.LightningModule, strategy: Any, callbacks: list[Callback], **arguments: Any) -> list[int]:
    """Per window."""
    counts = ReductionsPerStep()
    fit(module, regression_batches(2 * WINDOW), counts, *callbacks, devices=2, strategy=strategy, **arguments)
    return counts.counts


def stock_reductions() -> list[int]:
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")
    return reductions(Sharded(), strategy, [], accumulate_grad_batches=WINDOW)


def our_reductions() -> list[int]:
    strategy = FSDP2Strategy("net", process_group_backend="gloo")
    return reductions(Regression(), strategy, [AccumulationScheduler({0: WINDOW})])


BY_VALUE = {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}
CASES: dict[str, Callable[[], Any]] = {
    "D05": unscaled_before_a_fused_step,
    "D15": lambda: moved(CpuFsdpPrecision(), [1.0, 0.0, 1.0], fused=False),
    "D15, ours": lambda: moved(our_plugin(), [1.0, 0.0, 1.0], fused=False),
    "D16": lambda: moved(CpuFsdpPrecision(), [1.0], fused=True, **BY_VALUE),
    "D16, ours": lambda: moved(our_plugin(), [1.0], fused=True, **BY_VALUE),
    "D20": clipped_beside_a_dtensor,
    "D53": gradient_elements_without_a_reduction,
    "D25": ddp_trains_what_convert_module_returned,
    "D37": stock_reductions,
    "D37, ours": our_reductions,
    "D54": a_layer_first_used_in_the_last_micro_batch,
}


def outcome(case: Callable[[], Any]) -> Any:
    """What it returns, or the error that it ends with."""
    try:
        return case()
    except (RuntimeError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Any]:
    def all_cases(rank: int) -> dict[str, Any]:
        with process_group():  # which Trainers use, too
            return {name: outcome(case) for name, case in CASES.items()}

    first, second = run_ranks(all_cases, 2)
    assert first == second
    return first


def test_a_fused_step_after_unscaling_raises_in_the_sharded_scaler(outcomes: dict[str, Any]) -> None:
    """D05."""
    assert outcomes["D05"].startswith("RuntimeError: output with shape [] doesn't match the broadcast shape [1]")


def test_fsdp_precision_raises_after_a_batch_without_a_loss(outcomes: dict[str, Any]) -> None:
    """D15."""
    assert outcomes["D15"].startswith("RuntimeError: unscale_() has already been called on this optimizer")
    assert outcomes["D15, ours"] == 2.0


def test_fsdp_precision_clips_scaled_gradients_by_value(outcomes: dict[str, Any]) -> None:
    """D16: with a fused optimizer."""
    assert outcomes["D16"] == pytest.approx(0.5 / SCALE, rel=1e-3)
    assert outcomes["D16, ours"] == 0.5


def test_clip_grad_norm_refuses_plain_tensors_beside_dtensors(outcomes: dict[str, Any]) -> None:
    """D20."""
    assert "mixed torch.Tensor and DTensor" in outcomes["D20"]


def test_ddp_drops_what_convert_module_returns(outcomes: dict[str, Any]) -> None:
    """D25."""
    assert outcomes["D25"] is False


def test_model_parallel_strategy_reduces_with_every_micro_batch(outcomes: dict[str, Any]) -> None:
    """D37."""
    assert outcomes["D37"] == [WINDOW, WINDOW]
    assert outcomes["D37, ours"] == [1, 1]


def test_a_rank_keeps_whole_gradients_until_they_are_reduced(outcomes: dict[str, Any]) -> None:
    """D53: all 64 elements, where a shard has 32."""
    assert outcomes["D53"] == 64


@pytest.mark.skipif(torch.__version__ >= "2.15", reason="torch 2.15 has mended it")
def test_a_layer_first_used_in_the_last_micro_batch_ends_in_an_assertion(outcomes: dict[str, Any]) -> None:
    """D54."""
    assert outcomes["D54"].startswith("AssertionError")
    assert "uniform" in outcomes["D54"]
