"""What precision has on Lightning's strategies besides the weights: who decides, what is reduced and stored in fp32."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from cpu_fsdp import CpuFsdp
from gloo import run_same_ranks as run_ranks
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from small_models import loader, quiet_trainer
from strategy_rows import STRATEGIES, ParallelNet
from strategy_runs import WIDTH, Net, Outcomes, regression_batches
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lightning_mp import AutocastPrecision, LossScaler, MasterWeightsPrecision

# torch warns of in-place operations on a sharded layer's output; there are none here.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")

SHARDED = ["FSDP1, full shard", "FSDP1, gradients and optimizer", "FSDP1, hybrid 2 x 2", "FSDP2", "FSDP2Strategy"]


class NormFirst(ParallelNet):
    """The optimizer's first gradient lies on the mesh of the data-parallel ranks, later ones on both meshes."""

    fused = plants_here = False

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            [*self.norm.parameters(), *self.head.parameters(), *self.up.parameters(), *self.down.parameters()],
            lr=1e-2,
            fused=self.fused,
        )

    def on_after_backward(self) -> None:
        """In one shard of the column-parallel layer, on the last rank."""
        if self.plants_here and self.index == 3:
            self.up.weight.grad.to_local()[0, 0] = torch.inf  # type: ignore[union-attr]


def train_two_meshes(rank: int, plugin: Any, *, fused: bool = False) -> Any:
    module = NormFirst(1, plants=False)
    module.fused, module.plants_here = fused, rank == 3
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=2, process_group_backend="gloo")
    trainer = quiet_trainer(devices=4, strategy=strategy, plugins=[plugin], callbacks=[Outcomes()])
    trainer.fit(module, loader(regression_batches(6)))
    return trainer.precision_plugin.scaler.get_scale(), module.run


@pytest.mark.full
def test_ranks_of_two_meshes_skip_together() -> None:
    """D02: only one rank of four sees the inf, on a mesh that the optimizer's first gradient is not on."""

    def unfused_and_fused(rank: int) -> Any:
        scalers = [LossScaler(init_scale=64.0) for _ in range(2)]
        plugins = [AutocastPrecision("16-mixed", scaler=scaler) for scaler in scalers]
        return [
            train_two_meshes(rank, plugin, fused=fused) for fused, plugin in zip((False, True), plugins, strict=True)
        ]

    for runs in zip(*run_ranks(unfused_and_fused, 4), strict=True):
        for scale, run in runs:
            assert scale == 32.0
            assert run.stepped == [True, True, False, True, True, True]
            assert all(torch.equal(a, b) for a, b in zip(run.weights, runs[0][1].weights, strict=True))


@pytest.mark.full
def test_stock_ranks_of_two_meshes_do_not() -> None:
    """D02, the reason for the test above: when this fails, torch has repaired it."""
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=64.0))
    scales = [scale for scale, _ in run_ranks(lambda rank: train_two_meshes(rank, plugin), 4)]
    assert len(set(scales)) == 2


class OneWeight(Net):
    """The gradient of the weight is the batch itself."""

    def __init__(self) -> None:
        super().__init__(1, plants=False)
        self.up = nn.Linear(2, 2, bias=False)
        nn.init.zeros_(self.up.weight)
        self.down = self.norm = self.head = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).float().sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class OneShardedWeight(OneWeight):
    def configure_model(self) -> None:
        if not isinstance(self.up.weight, DTensor):
            fully_shard(self.up, mesh=self.device_mesh["data_parallel"])


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("strategy", ["DDP", *SHARDED])
def test_gradients_are_reduced_in_fp32(strategy: str) -> None:
    """D18: the mean of 1 and 2^-12 has 13 significant bits, more than fp16 and bf16 have."""
    layout = STRATEGIES[strategy]

    def fit(rank: int, precision: Any) -> list[Any]:
        made = layout.make()
        if isinstance(made, CpuFsdp):
            made.kwargs.pop("auto_wrap_policy")
        module = (OneShardedWeight if type(made) is ModelParallelStrategy else OneWeight)()
        scaler = LossScaler(init_scale=1.0) if precision == "16-mixed" else None
        plugin = AutocastPrecision(precision, scaler=scaler)
        trainer = quiet_trainer(devices=layout.ranks, strategy=made, plugins=[plugin])
        trainer.fit(module, loader([torch.full((1, 2), [1.0, 2.0**-12][rank % 2])]))
        return module.run.weights[0].tolist()

    wanted = [[-(1.0 + 2.0**-12) / 2] * 2] * 2
    found = run_ranks(lambda rank: [fit(rank, precision) for precision in ("16-mixed", "bf16-mixed")], layout.ranks)
    assert found == [[wanted, wanted]] * layout.ranks


class Buffers(Net):
    """A batch norm's running statistics and a table, neither of which 16 bits can hold."""

    def __init__(self) -> None:
        super().__init__(1, plants=False)
        self.batch_norm = nn.BatchNorm1d(WIDTH, affine=False)
        self.register_buffer("table", torch.full((WIDTH,), 1.0 + 2.0**-20))
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tensors = (self.table, self.batch_norm.running_mean, self.batch_norm.running_var)
        self.seen.append([tensor.dtype for tensor in tensors])
        x, y = batch
        return super().training_step((self.batch_norm(x) + self.table.to(x.dtype), y), batch_idx)


class ShardedBuffers(Buffers):
    configure_model = ParallelNet.configure_model


@pytest.mark.parametrize("strategy", ["DDP", "FSDP1, full shard", "FSDP2"])
@pytest.mark.full
# Batch norms become units of their own, in fp32, and torch says so.
@pytest.mark.filterwarnings("ignore:Both mixed precision and an auto_wrap_policy were specified to FSDP")
def test_buffers_stay_fp32_for_a_whole_run(strategy: str) -> None:
    """D49: Lightning's FSDP "mixed" holds them in 16 bit."""
    layout = STRATEGIES[strategy]
    data = regression_batches(3)
    precisions: list[Any] = ["16-mixed", "bf16-mixed", "16-true", "bf16-true"]

    def fit(rank: int, precision: Any) -> Any:
        made = layout.make()
        if isinstance(made, CpuFsdp):
            made.kwargs.pop("auto_wrap_policy")  # torch warns that it would leave out batch norms
        module = (ShardedBuffers if isinstance(made, ModelParallelStrategy) else Buffers)()
        mixed = precision.endswith("mixed")
        plugin = AutocastPrecision(precision) if mixed else MasterWeightsPrecision(precision)
        trainer = quiet_trainer(devices=2, strategy=made, plugins=[plugin])
        trainer.fit(module, loader(data))
        return module.seen, module.table, module.batch_norm.running_mean

    def running_mean(precision: str) -> Tensor:
        """FSDP1 casts batches; nothing else does, so that the norm sees fp32 numbers."""
        dtype = torch.bfloat16 if "bf16" in precision else torch.float16
        casts = strategy.startswith("FSDP1")
        norm = nn.BatchNorm1d(WIDTH)
        for x, _ in data:
            norm(x.to(dtype).float() if casts else x)
        return norm.running_mean

    for on_rank in run_ranks(lambda rank: [fit(rank, precision) for precision in precisions], 2):
        for precision, (dtypes, table, mean) in zip(precisions, on_rank, strict=True):
            assert dtypes == [[torch.float32] * 3] * 3, precision
            assert table.tolist() == [1.0 + 2.0**-20] * WIDTH, precision
            torch.testing.assert_close(mean, running_mean(precision), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("precision", ["16-true", "bf16-true"])
def test_ddp_trains_the_converted_module(precision: str) -> None:
    """D25: DDP drops what ``convert_module`` returns; its buckets have the dtype of the copies."""
    dtype = torch.float16 if precision == "16-true" else torch.bfloat16

    class Seen(Net):
        def on_train_start(self) -> None:
            wrapped = self.trainer.strategy.model
            wrapped.register_comm_hook(None, self.reduce)

        def reduce(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            self.dtypes = {bucket.buffer().dtype}
            return default_hooks.allreduce_hook(None, bucket)

    def fit(rank: int) -> Any:
        module = Seen(1, plants=False)
        plugin = MasterWeightsPrecision(precision)  # type: ignore[arg-type]
        strategy = DDPStrategy(process_group_backend="gloo")
        quiet_trainer(devices=2, strategy=strategy, plugins=[plugin]).fit(module, loader(regression_batches(2)))
        return module.dtypes

    assert run_ranks(fit, 2) == [{dtype}] * 2


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
def test_a_missing_loss_under_fsdp1() -> None:
    """D15: with FSDPPrecision the next step raises "unscale_() has already been called". On several ranks Lightning
    takes no missing loss."""

    class Missing(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx == 1 else loss

    def fit(rank: int) -> Any:
        module = Missing(1, plants=False)
        plugin = AutocastPrecision("16-mixed", scaler=LossScaler(init_scale=64.0))
        trainer = quiet_trainer(strategy=CpuFsdp(), plugins=[plugin], callbacks=[Outcomes()])
        trainer.fit(module, loader(regression_batches(4)))
        return module.run.stepped, module.run.scales, all(torch.isfinite(w).all() for w in module.run.weights)

    assert run_ranks(fit, 1) == [([True, False, True, True], [64.0] * 4, True)]


@pytest.mark.parametrize("policy", [None, {"up": "fp32"}], ids=["no policy", "policy"])
def test_fsdp1_casts_batches_unless_a_policy_names_modules(policy: Any) -> None:
    """As docs/strategies.md says."""

    class Seen(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.seen = [tensor.dtype for tensor in batch]
            return super().training_step(batch, batch_idx)

    def fit(rank: int) -> Any:
        module = Seen(1, plants=False)
        plugin = AutocastPrecision("bf16-mixed", policy=policy)
        quiet_trainer(devices=2, strategy=CpuFsdp(), plugins=[plugin]).fit(module, loader(regression_batches(1)))
        return module.seen

    dtype = torch.bfloat16 if policy is None else torch.float32
    assert run_ranks(fit, 2) == [[dtype, dtype]] * 2
