"""MasterWeightsPrecision on two real processes: DDP with and without bucket views, FSDP1, FSDP2, tensor parallelism."""

from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import pytest
import torch
from cpu_fsdp import CpuFsdp
from gloo import run_same_ranks as run_ranks
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from master_loops import DTYPES, KINDS, OPTIMIZERS, MastersByHand, master_weights, masters_of, scale_of
from small_models import Regression, fit, loader, quiet_trainer, regression_batches
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_mp.precision.masters import store

# torch warns of in-place operations on a sharded layer's output; there are none here.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")

BATCHES = {rank: regression_batches(8)[4 * rank : 4 * rank + 4] for rank in (0, 1)}


def ddp(**arguments: Any) -> DDPStrategy:
    return DDPStrategy(process_group_backend="gloo", **arguments)


def full(tensors: list[Tensor]) -> list[Tensor]:
    return [(t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for t in tensors]


def two_ranks_by_hand(precision: str, optimizer: str, storage: str) -> list[Tensor]:
    """The same training in one process, gradients averaged in 16 bit as DDP does."""
    dtype, scale = DTYPES[precision], scale_of(precision)
    module = Regression(OPTIMIZERS[optimizer])
    by_hand = MastersByHand(module, dtype, module.make_optimizer, storage)
    for index in range(4):
        gradients = []
        for rank in (0, 1):
            loss = module.training_step([x.to(dtype) for x in BATCHES[rank][index]], index)
            gradients.append(torch.autograd.grad(loss * scale, list(module.parameters())))
        for parameter, first, second in zip(module.parameters(), *gradients, strict=True):
            parameter.grad = first / 2 + second / 2
        by_hand.step(scale)
    return [m.detach() for m in by_hand.masters]


@pytest.mark.parametrize("bucket_view", [False, True], ids=["own-gradients", "bucket-views"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw_fused"])
@pytest.mark.parametrize(("precision", "storage"), KINDS)
def test_ddp_equals_one_process(precision: str, storage: str, optimizer: str, bucket_view: bool) -> None:
    """A change of ``parameter.data``'s dtype would unhook DDP: from the second step on the ranks would train apart."""

    def train(rank: int) -> list[Tensor]:
        module = Regression(OPTIMIZERS[optimizer])
        strategy = ddp(gradient_as_bucket_view=bucket_view)
        trainer = fit(module, BATCHES[rank], devices=2, strategy=strategy, plugin=master_weights(precision, storage))
        assert {p.grad.dtype for p in module.parameters()} == {p.dtype for p in module.parameters()}
        return masters_of(trainer)

    first, second = run_ranks(train, 2)
    expected = two_ranks_by_hand(precision, optimizer, storage)
    for ours, other, theirs in zip(first, second, expected, strict=True):
        assert torch.equal(ours, other)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)


@pytest.mark.parametrize("storage", ["fp32", "remainder"])
def test_masters_below_the_16_bits_are_those_of_rank_zero(storage: str) -> None:
    """DDP gives every rank rank 0's 16-bit weights; what lies below them must come along."""

    def train(rank: int) -> tuple[list[Tensor], list[Tensor]]:
        module = Regression(lambda p: torch.optim.SGD(p, lr=0.0))
        torch.manual_seed(rank + 7)
        with torch.no_grad():
            for p in module.parameters():
                p.normal_()
        start = [p.detach().clone() for p in module.parameters()]
        trainer = fit(module, BATCHES[rank][:1], devices=2, strategy=ddp(), plugin=master_weights(storage=storage))
        return start, masters_of(trainer)

    (start, first), (_, second) = run_ranks(train, 2)
    for ours, other, expected in zip(first, second, start, strict=True):
        assert torch.equal(ours, expected)
        assert torch.equal(other, expected)


# -- sharded parameters ------------------------------------------------------------------------------------------------


class Sharded(Regression):
    def configure_model(self) -> None:
        if not isinstance(self.net[0].weight, DTensor):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


class TensorParallel(Regression):
    def configure_model(self) -> None:
        if not isinstance(self.net[0].weight, DTensor):
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)


def model_parallel(parallelism: type[Regression], **arguments: Any) -> ModelParallelStrategy:
    data, tensor = (2, 1) if parallelism is Sharded else (1, 2)
    return ModelParallelStrategy(
        data_parallel_size=data, tensor_parallel_size=tensor, process_group_backend="gloo", **arguments
    )


@pytest.mark.parametrize("storage", get_args(store.Storage))
@pytest.mark.parametrize("parallelism", [Sharded, TensorParallel], ids=["fsdp2", "tp"])
@pytest.mark.full
def test_model_parallel_equals_ddp(parallelism: type[Regression], storage: str) -> None:
    """Masters are sharded like their parameters; no step finds a weight changed by somebody else."""

    def follow(*_: Any) -> Any:
        raise AssertionError("FSDP2 and DTensor do not count as somebody else")

    def train(rank: int) -> Any:
        module = parallelism(OPTIMIZERS["adamw_foreach"])
        ours = master_weights(storage=storage)
        trainer = quiet_trainer(devices=2, strategy=model_parallel(parallelism), plugins=[ours])
        batches = BATCHES[rank if parallelism is Sharded else 0]
        with patch.object(store, "rounds_to", follow):  # after the fit nobody watches, and weights are compared
            trainer.fit(module, loader(batches))
        each = {"fp32": 4, "remainder": 2, "24bit": 1}[storage]
        local = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in module.parameters())
        assert ours._masters is not None
        assert ours._masters.store.nbytes == each * local
        assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
        return full(masters_of(trainer))

    def reference(rank: int) -> list[Tensor]:
        module = Regression(OPTIMIZERS["adamw_foreach"])
        trainer = quiet_trainer(devices=2, strategy=ddp(), plugins=[master_weights(storage=storage)])
        trainer.fit(module, loader(BATCHES[rank if parallelism is Sharded else 0]))
        return masters_of(trainer)

    first, second = run_ranks(train, 2)
    for ours, other, theirs in zip(first, second, run_ranks(reference, 2)[0], strict=True):
        assert torch.equal(ours, other)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-4)


@pytest.mark.full
@pytest.mark.parametrize("storage", get_args(store.Storage))
def test_a_second_fit_under_fsdp2_goes_on_from_the_masters_of_the_first(storage: str) -> None:
    def train(rank: int, sharded: bool) -> list[Tensor]:
        module = (Sharded if sharded else Regression)(OPTIMIZERS["adamw_foreach"])
        for _ in range(2):
            strategy = model_parallel(Sharded) if sharded else ddp()
            trainer = fit(module, BATCHES[rank], devices=2, strategy=strategy, plugin=master_weights(storage=storage))
        return full(masters_of(trainer))

    first, second = run_ranks(lambda rank: train(rank, True), 2)
    for ours, other, theirs in zip(first, second, run_ranks(lambda rank: train(rank, False), 2)[0], strict=True):
        assert torch.equal(ours, other)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=4e-4)


@pytest.mark.parametrize("distributed", [False, True], ids=["full-checkpoint", "distributed-checkpoint"])
@pytest.mark.parametrize(("parallelism", "storage"), [(Sharded, "remainder"), (TensorParallel, "fp32")])
@pytest.mark.full
def test_sharded_runs_resume_exactly(
    parallelism: type[Regression], storage: str, distributed: bool, tmp_path: Path
) -> None:
    """Masters go through torch's checkpoints by name, too: the optimizer's state is all that they need."""

    def train(rank: int, epochs: int, *, resume: bool = False, save: bool = False) -> list[Tensor]:
        module = parallelism(OPTIMIZERS["adamw_foreach"])
        strategy = model_parallel(parallelism, save_distributed_checkpoint=distributed)
        trainer = quiet_trainer(
            devices=2, strategy=strategy, plugins=[master_weights(storage=storage)], max_epochs=epochs
        )
        batches = BATCHES[rank if parallelism is Sharded else 0]
        trainer.fit(module, loader(batches), ckpt_path=tmp_path / "x.ckpt" if resume else None)
        if save:
            trainer.save_checkpoint(tmp_path / "x.ckpt")
        return full(masters_of(trainer))

    straight = run_ranks(lambda rank: train(rank, 2), 2)[0]
    run_ranks(lambda rank: train(rank, 1, save=True), 2)
    resumed = run_ranks(lambda rank: train(rank, 2, resume=True), 2)[0]
    assert all(torch.equal(a, b) for a, b in zip(straight, resumed, strict=True))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
def test_under_fsdp_the_shards_are_the_masters(precision: str) -> None:
    seen: list[Any] = []

    class Watched(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            seen.append((batch[0].dtype, self.net(batch[0]).dtype))
            return super().training_step(batch, batch_idx)

    def train(rank: int) -> Any:
        module = Watched(OPTIMIZERS["adamw_foreach"])
        trainer = quiet_trainer(
            devices=2, strategy=CpuFsdp(process_group_backend="gloo"), plugins=[master_weights(precision)]
        )
        trainer.fit(module, loader(BATCHES[rank]))
        dtypes = {p.dtype for p in trainer.model.parameters()}
        with FullyShardedDataParallel.summon_full_params(trainer.model):
            return [p.detach().clone() for p in module.parameters()], dtypes, set(seen)

    def fp32(rank: int) -> list[Tensor]:
        module = Regression(OPTIMIZERS["adamw_foreach"])
        fit(module, BATCHES[rank], devices=2, strategy=ddp())
        return [p.detach().clone() for p in module.parameters()]

    (first, dtypes, inside), (second, *_) = run_ranks(train, 2)
    assert dtypes == {torch.float32}
    assert inside == {(DTYPES[precision], DTYPES[precision])}
    for ours, other, theirs in zip(first, second, run_ranks(fp32, 2)[0], strict=True):
        assert torch.equal(ours, other)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-3)
