"""Who steps together, and who holds the same gradients, where it is not simply everybody."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gloo import on_ranks, process_group
from gloo import run_same_ranks as run_ranks
from lightning.pytorch.strategies import DDPStrategy
from small_models import Regression, loader, quiet_trainer, regression_batches, sgd
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from lightning_mp import AutocastPrecision, LossScaler, OverflowMonitor
from lightning_mp.training.gradients.fused_optimizers import one_mesh_per_group
from lightning_mp.training.gradients.replication import GradientReplication
from lightning_mp.training.optimizer_step.gradient_epilogue import GradientEpilogue

INF = float("inf")


def norm_of(parameters: list[nn.Parameter], ranks: GradientReplication) -> float:
    epilogue = GradientEpilogue(torch.optim.SGD(parameters, lr=0.1), None, ranks=ranks, device=torch.device("cpu"))
    epilogue.reduce(None)
    return epilogue.grad_norm.item()


def with_gradient(gradient: torch.Tensor) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient
    return parameter


def test_the_norm_over_two_pipeline_stages_of_two_ranks() -> None:
    """Each stage has its own sharded, replicated and plain parameters; taken for copies, they would count half."""

    def run(rank: int) -> float:
        with process_group():
            stages = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "tp"))
            stage, tp = rank // 2, stages["tp"]
            whole = torch.arange(1.0, 9.0).view(4, 2) * (1 + stage)
            sharded = with_gradient(distribute_tensor(whole, tp, [Shard(0)]))
            replicated = with_gradient(distribute_tensor(whole, tp, [Replicate()]))
            plain = with_gradient(whole.clone())
            ranks = GradientReplication(None, ranks_per_parameter=2, plain_replicas=2)
            return norm_of([sharded, replicated, plain], ranks)

    one_stage = 3 * torch.arange(1.0, 9.0).square().sum().item()
    assert run_ranks(run, 4) == pytest.approx([math.sqrt(one_stage + 4 * one_stage)] * 4, rel=1e-6)


def test_a_group_that_is_smaller_than_the_job_decides_for_itself() -> None:
    """Two models are trained on two ranks each; an overflow in one leaves the other alone, its scale too."""

    def run(rank: int) -> Any:
        with process_group():
            halves = [torch.distributed.new_group([0, 1]), torch.distributed.new_group([2, 3])]
            ranks = GradientReplication.every_rank(halves[rank // 2])
            norm = norm_of([with_gradient(torch.full((4,), 1.0 + rank // 2))], ranks)
            scaler = LossScaler("cpu", init_scale=4.0, process_group=halves[rank // 2])
            scaler.scale(torch.ones(()))
            parameter = with_gradient(torch.tensor([INF if rank == 1 else 4.0]))
            scaler.step(torch.optim.SGD([parameter], lr=1.0))
            scaler.update()
            return ranks.ranks_per_parameter, norm, scaler.get_scale(), parameter.item()

    assert run_ranks(run, 4) == [(2, 2.0, 2.0, 0.0)] * 2 + [(2, 4.0, 4.0, -1.0)] * 2


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("sharding", "plain_replicas"),
    [
        (ShardingStrategy.FULL_SHARD, 1),
        (ShardingStrategy.SHARD_GRAD_OP, 1),
        (ShardingStrategy.HYBRID_SHARD, 2),
        (ShardingStrategy.NO_SHARD, 4),
    ],
    ids=lambda value: getattr(value, "name", None),
)
@pytest.mark.filterwarnings("ignore:.*NO_SHARD.*:FutureWarning")
def test_fsdp1_says_how_often_each_shard_exists(sharding: ShardingStrategy, plain_replicas: int) -> None:
    """D17: the norm is that of one process under every sharding."""

    def run(rank: int) -> Any:
        with process_group():
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1))
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
            hybrid = {"device_mesh": mesh} if sharding == ShardingStrategy.HYBRID_SHARD else {}
            wrapped = FullyShardedDataParallel(
                model, sharding_strategy=sharding, device_id=torch.device("cpu"), use_orig_params=True, **hybrid
            )
            ranks = GradientReplication.of_fsdp1(wrapped)
            wrapped(torch.ones(2, 6)).square().sum().backward()
            return ranks.plain_replicas, norm_of([p for p in wrapped.parameters() if p.grad is not None], ranks)

    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1))
    alone(torch.ones(2, 6)).square().sum().backward()
    expected = math.sqrt(sum(p.grad.square().sum().item() for p in alone.parameters()))
    for replicas, norm in run_ranks(run, 4):
        assert replicas == plain_replicas
        assert norm == pytest.approx(expected, rel=1e-5)


def test_a_strategy_says_who_steps_together() -> None:
    """Each rank trains a model of its own, as pipeline stages are; the norm is over both, nothing counts half."""

    class Stages(DDPStrategy):
        asked = 0

        def gradient_replication(self) -> GradientReplication:
            Stages.asked += 1
            return GradientReplication(None, ranks_per_parameter=1, plain_replicas=1)

    def run(rank: int, strategy: type[DDPStrategy]) -> Any:
        monitor = OverflowMonitor()
        trainer = quiet_trainer(
            devices=2,
            strategy=strategy(process_group_backend="gloo"),
            plugins=[AutocastPrecision("bf16-mixed")],
            callbacks=[monitor],
        )
        trainer.fit(Regression(sgd), loader(regression_batches(3)))
        return monitor.grad_norm, Stages.asked

    stages = run_ranks(lambda rank: run(rank, Stages), 2)
    copies = run_ranks(lambda rank: run(rank, DDPStrategy), 2)
    for (norm, asked), (copied_norm, never_asked) in zip(stages, copies, strict=True):
        assert norm == pytest.approx(copied_norm * math.sqrt(2), rel=1e-6)
        assert (asked, never_asked) == (1, 0)  # once per fit


@on_ranks(run_ranks, 2)
def test_a_mesh_with_more_ranks_than_hold_the_parameters_is_refused(rank: int) -> None:
    with process_group():
        gradient = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)), [Shard(0)])
        with pytest.raises(
            ValueError,
            match=r"ranks_per_parameter=1\): it must be a multiple of 2, the ranks of a gradient's mesh \(2,\)",
        ):
            GradientReplication(None, 1, 1).copies([gradient], [gradient])


@on_ranks(run_ranks, 2)
def test_groups_of_one_kind_are_left_alone_and_split_ones_come_back_after_an_exception(rank: int) -> None:
    with process_group():
        mesh = init_device_mesh("cpu", (2,))
        plain, other = (nn.Parameter(torch.ones(2)) for _ in range(2))
        sharded = nn.Parameter(distribute_tensor(torch.ones(2), mesh, [Shard(0)]))
        groups = [{"params": [plain, sharded, other], "lr": 0.5}, {"params": [nn.Parameter(torch.ones(1))]}]
        optimizer = torch.optim.AdamW(groups, lr=0.1, fused=True)
        before, first = optimizer.param_groups, list(optimizer.param_groups)

        def inside() -> None:
            with one_mesh_per_group(optimizer):
                assert optimizer.param_groups is before
                assert [g["lr"] for g in before] == [0.5, 0.5, 0.1]
                assert [[id(p) for p in g["params"]] for g in before[:2]] == [[id(plain), id(other)], [id(sharded)]]
                assert before[2] is first[1]
                raise KeyError

        with pytest.raises(KeyError):
            inside()
        assert optimizer.param_groups is before
        assert all(now is then for now, then in zip(before, first, strict=True))
        looped = torch.optim.AdamW([plain, sharded], foreach=False)
        with one_mesh_per_group(looped):
            assert len(looped.param_groups) == 1


def test_the_scaler_leaves_plain_groups_alone() -> None:
    optimizer = SimpleNamespace(param_groups=[{"params": [nn.Parameter(torch.ones(1))], "fused": True}])
    (group,) = optimizer.param_groups
    with one_mesh_per_group(optimizer):  # type: ignore[arg-type]
        assert optimizer.param_groups[0] is group
