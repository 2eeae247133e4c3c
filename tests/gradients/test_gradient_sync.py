"""D37, D53: sharded gradients are reduced once per window, or after every micro-batch; the bytes of both are told."""

import io
import logging
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo import process_group, run_ranks
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from reductions_counter import CountReductions
from small_models import ShardedTokenModel, TokenModel, adamw, loader, quiet_trainer, token_batches, weights
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from lightning_mp import AccumulationScheduler, AutocastPrecision
from lightning_mp.training.gradients.sync import _FSDP1Sync, unsharded_gradient_bytes

# torch warns of in-place operations on a sharded layer's output; there are none here.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")

COUNTS = {0: [6, 3, 11, 8, 2, 9, 7], 1: [4, 10, 2, 5, 12, 3, 6]}


class Validated(TokenModel):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.training_step(batch, batch_idx)


def test_fsdp2_is_left_reducing_after_the_run() -> None:
    """A window was open when the run broke off; a plain loop that comes after it still reduces."""

    class Broken(ShardedTokenModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 1:
                raise KeyError("planted")
            return super().training_step(batch, batch_idx)

    def train(rank: int) -> bool:
        module = Broken(adamw)
        strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")
        trainer = quiet_trainer(devices=2, strategy=strategy, callbacks=[AccumulationScheduler({0: 3})])
        with pytest.raises(KeyError, match="planted"):
            trainer.fit(module, loader(token_batches(COUNTS[rank])))
        module.zero_grad()
        module.head(torch.ones(1, 8)).sum().backward()
        return module.head.weight.grad is not None

    assert run_ranks(train, 2) == [True, True]


def test_fsdp1_reduces_once_per_window() -> None:
    """FSDP1 itself on gloo, without a Trainer: Lightning's FSDPStrategy wants a GPU."""

    def train(rank: int) -> Any:
        with process_group():
            torch.manual_seed(0)
            reference = nn.Linear(6, 4)
            model = FullyShardedDataParallel(
                nn.Sequential(nn.Linear(6, 4)), device_id=torch.device("cpu"), use_orig_params=True
            )
            with torch.no_grad(), FullyShardedDataParallel.summon_full_params(model):
                model.module[0].weight.copy_(reference.weight)
                model.module[0].bias.copy_(reference.bias)
            sync = _FSDP1Sync([model])
            inputs = torch.randn(4, 2, 3, 6, generator=torch.Generator().manual_seed(1))
            counts = []
            with CountReductions() as counter:
                for index, batch in enumerate(inputs):
                    counter.calls.clear()
                    sync.begin(closes=index == 3)
                    model(batch[rank]).square().sum().backward()
                    sync.end()
                    counts.append(sum(n for name, n in counter.calls.items() if "reduce_scatter" in name))
            reference(inputs.flatten(0, 2)).square().sum().div(2).backward()
            with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
                gradients = [p.grad.clone() for p in model.parameters()]
            for ours, theirs in zip(gradients, reference.parameters(), strict=True):
                torch.testing.assert_close(ours, theirs.grad)
            return counts

    assert run_ranks(train, 2) == [[0, 0, 0, 1]] * 2


def test_bytes_are_predicted() -> None:
    """Checked against the gradients that a whole and a sharded backward really leave."""

    def measure(rank: int) -> Any:
        with process_group():
            mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
            model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
            whole = sum(p.numel() * p.element_size() for p in model.parameters())
            for layer in model:
                fully_shard(layer, mesh=mesh)
            model(torch.ones(2, 8)).sum().backward()
            shards = sum(p.grad.to_local().nbytes for p in model.parameters())  # type: ignore[union-attr]
            return unsharded_gradient_bytes(model), (whole, shards)

    for predicted, measured in run_ranks(measure, 2):
        assert predicted == measured


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("sync", ["window", "micro_batch"])
def test_the_bytes_of_both_ways_are_printed(sync: Any) -> None:
    """D53: of unsharded gradients that are kept during a window."""

    def train(rank: int) -> str:
        said = io.StringIO()
        logging.getLogger().addHandler(logging.StreamHandler(said))
        strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")
        trainer = quiet_trainer(devices=2, strategy=strategy, callbacks=[AccumulationScheduler({0: 3}, sync=sync)])
        trainer.fit(ShardedTokenModel(adamw), loader(token_batches(COUNTS[rank][:3])))
        return said.getvalue()

    said = run_ranks(train, 2)[0]
    # 187 weights of 4 bytes: 11 x 8 + 8 x 11 + 11
    assert "7.48e-07 GB" in said
    assert ("reduced once per window" in said) == (sync == "window")


@pytest.mark.parametrize("views", [False, True], ids=["copies", "views of buckets"])
def test_a_static_graph_takes_windows_from_the_first_step_on(views: bool) -> None:
    """torch's assertion ends a first backward that does not reduce; here it reduces, and the gradient is the same."""

    def train(rank: int, windows: str, plugins: list[Any], static_graph: bool) -> Any:
        accumulation: dict[str, dict[str, Any]] = {
            "Trainer's": {"accumulate_grad_batches": 3},
            "Lightning's callback": {"callbacks": [GradientAccumulationScheduler({0: 3})]},
            "ours": {"callbacks": [AccumulationScheduler({0: 3, 1: 2}, unit="step")]},
            "ours, later": {"callbacks": [AccumulationScheduler({0: 1, 1: 3}, unit="step")]},
        }
        module = Validated(adamw)
        strategy = DDPStrategy(process_group_backend="gloo", static_graph=static_graph, gradient_as_bucket_view=views)
        settings = accumulation[windows] | {"num_sanity_val_steps": 1}  # a forward without a backward
        trainer = quiet_trainer(devices=2, strategy=strategy, plugins=plugins, **settings)
        batches = token_batches(COUNTS[rank])
        trainer.fit(module, loader(batches), loader(batches))
        return weights(module)

    def compare(rank: int) -> list[Any]:
        bf16: Any = partial(AutocastPrecision, "bf16-mixed")
        return [
            [train(rank, windows, [bf16()] * in_bf16, static) for static in (True, False)]
            for windows, in_bf16 in (
                ("Trainer's", True),
                ("Lightning's callback", True),
                ("ours", True),
                ("ours", False),
                ("ours, later", True),
            )
        ]

    for of_rank in zip(*run_ranks(compare, 2), strict=True):
        for static, plain in of_rank:
            torch.testing.assert_close(static, plain, rtol=1e-5, atol=1e-7)
        assert all(map(torch.equal, of_rank[0][0], of_rank[1][0]))


@pytest.mark.parametrize("strategy", ["auto", "ddp"])
def test_micro_batch_is_refused_where_nothing_is_sharded(strategy: str) -> None:
    def train(rank: int) -> str:
        trainer = quiet_trainer(
            strategy=strategy,
            devices=2 if strategy == "ddp" else 1,
            callbacks=[AccumulationScheduler({0: 3}, sync="micro_batch")],
        )
        with pytest.raises(MisconfigurationException) as refused:
            trainer.fit(TokenModel(), loader(token_batches([3])))
        return str(refused.value)

    said = run_ranks(train, 2)[0] if strategy == "ddp" else train(0)
    assert "sync='micro_batch') is for sharded gradients" in said
    assert "Leave sync out: gradients are then reduced once per window." in said
