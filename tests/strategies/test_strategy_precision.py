"""What precision has on Lightning's strategies besides the weights: who decides, what is reduced and stored in fp32."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from cpu_fsdp import CpuFsdp
from gloo import run_same_ranks as run_ranks
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from small_models import loader, quiet_trainer
from strategy_rows import STRATEGIES
from strategy_runs import Net, regression_batches
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lightning_mp import AutocastPrecision, LossScaler, MasterWeightsPrecision

# torch warns of in-place operations on a sharded layer's output; there are none here.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")

SHARDED = ["FSDP1, full shard", "FSDP1, gradients and optimizer", "FSDP1, hybrid 2 x 2", "FSDP2", "FSDP2Strategy"]


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
