"""MasterWeightsPrecision on two real processes: DDP of every kind, FSDP1, FSDP2, tensor parallelism."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cpu_fsdp import CpuFsdp
from gloo import RankError
from gloo import run_same_ranks as run_ranks
from lion_pytorch import Lion
from master_loops import OPTIMIZERS, clip_by_hand, counted_casts, joint, master_weights
from master_ranks import (
    BATCHES,
    STEPS,
    GatheredInFp32,
    Ranked,
    Sharded,
    Split,
    ddp,
    full,
    model_parallel,
    two_ranks_by_hand,
)
from schedulefree import AdamWScheduleFree
from small_models import fit, loader, quiet_trainer
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import SGD, AdamW

from lightning_mp import AutocastPrecision, FSDP2Strategy

# torch warns of in-place operations on a sharded layer's output; there are none here.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")


def check_ranks(train: Callable[[int], list[Tensor]], expected: list[Tensor], *, atol: float = 0.0) -> None:
    first, second = run_ranks(train, 2)
    for ours, other, theirs in zip(first, second, expected, strict=True):
        assert torch.equal(ours, other)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)


# -- DDP: the copies are leaves, and reduced in 16 bit -----------------------------------------------------------------


def check_ddp(kind: dict[str, Any], precision: str = "bf16-true", *, window: int = 1) -> None:
    make = partial(Ranked, uses_all="find_unused_parameters" not in kind)

    def train(rank: int) -> list[Tensor]:
        module = make(seed=7 * rank)  # ranks start apart, and get the weights of rank 0
        plugin = master_weights(precision, weight_by=None)
        fit(module, BATCHES[rank], devices=2, strategy=ddp(**kind), plugin=plugin, accumulate_grad_batches=window)
        return full(module)

    check_ranks(train, two_ranks_by_hand(make, precision, window=window), atol=2e-5 if precision == "16-true" else 0.0)


@pytest.mark.parametrize(
    ("kind", "precision"),
    [
        ({}, "16-true"),
        ({"gradient_as_bucket_view": True}, "bf16-true"),
        ({"find_unused_parameters": True}, "bf16-true"),
    ],
    ids=["fp16", "bucket views", "unused parameters"],
)
@pytest.mark.parametrize("window", [1, 3])
def test_ddp_equals_one_process(kind: dict[str, Any], precision: str, window: int) -> None:
    check_ddp(kind, precision, window=window)


def test_ddp_with_a_static_graph_equals_one_process() -> None:
    """Without a window: torch asserts, with masters or without, where the first backward of a run does not reduce."""
    check_ddp({"static_graph": True})


plain_sgd = partial(torch.optim.SGD, lr=0.1)  # without weight decay


class ByHand(Ranked):
    def __init__(self, backward: str = "manual_backward") -> None:
        super().__init__(plain_sgd)
        self.automatic_optimization = False
        self.how = backward

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        loss.backward() if self.how == "backward" else self.manual_backward(loss)
        optimizer.step()


class Penalised(Ranked):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + self.more.weight.square().sum()


class Clamped(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(input)


class Writing(Ranked):
    def __init__(self) -> None:
        super().__init__()
        self.more = Clamped(8, 1)


class Hooked(Ranked):
    def __init__(self) -> None:
        super().__init__()
        self.more.weight.register_post_accumulate_grad_hook(lambda p: None)


def test_manual_optimization_and_hooks_under_ddp() -> None:
    def train(rank: int) -> list[Tensor]:
        module = ByHand()
        module.more.weight.register_hook(lambda gradient: gradient * 0)
        start = module.more.weight.detach().clone()
        fit(module, BATCHES[rank], devices=2, strategy=ddp(), plugin=master_weights())
        assert torch.equal(module.more.weight, start)
        return full(module)

    first, second = run_ranks(train, 2)
    by_hand = two_ranks_by_hand(partial(Ranked, plain_sgd))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    names = [name for name, _ in Ranked().named_parameters()]
    same = {n for n, a, b in zip(names, first, by_hand, strict=True) if torch.equal(a, b)}
    assert same == {*names} - {"more.weight", "more.bias"}  # the bias belongs to another weight


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            partial(ByHand, "backward"),
            r"loss.backward\(\) adds gradients to the 16-bit copies.*manual_backward\(loss\)",
        ),
        (Penalised, "more.weight was used outside of a module's forward, .*policy={'name.of.module': 'fp32'}"),
        (Writing, "forward writes to more.weight, of which DDP has hooked 16-bit copies.*policy="),
        (Hooked, "hooks of register_post_accumulate_grad_hook would see gradients that are not averaged"),
    ],
)
def test_what_ddp_would_not_average_is_refused(make: Callable[[], Ranked], said: str) -> None:
    def train(rank: int) -> None:
        fit(make(), BATCHES[rank], devices=2, strategy=ddp(), plugin=master_weights())

    with pytest.raises(RankError, match=f"(?s){said}"):
        run_ranks(train, 2)


def test_the_named_policy_cures_it() -> None:
    policy = {"more": "fp32", "op:norms": "fp32", "op:losses": "fp32"}

    def train(rank: int) -> list[Tensor]:
        module = Penalised()
        fit(module, BATCHES[rank], devices=2, strategy=ddp(), plugin=master_weights(policy=policy))
        return full(module)

    def autocast(rank: int) -> list[Tensor]:
        module = Penalised()
        fit(module, BATCHES[rank], devices=2, strategy=ddp(), plugin=AutocastPrecision("bf16-mixed", policy=policy))
        return full(module)

    check_ranks(train, run_ranks(autocast, 2)[0], atol=1e-3)


def test_a_collective_that_writes_to_weights_counts() -> None:
    """As local SGD: it moves no version counter."""

    class Averaged(Ranked):
        def on_train_batch_end(self, *_: Any) -> None:
            for parameter in self.parameters():
                with torch.no_grad():
                    parameter.add_(0.25 * self.global_rank)
                    dist.broadcast(parameter, 0)

    def train(rank: int) -> list[Tensor]:
        module = Averaged()
        fit(module, BATCHES[rank], devices=2, strategy=ddp(), plugin=master_weights())
        return full(module)

    check_ranks(train, two_ranks_by_hand(Ranked))


# -- sharded parameters ------------------------------------------------------------------------------------------------


class Whole(Ranked):
    trains_its_own = False  # no forward of FSDP would gather it


@pytest.mark.parametrize("kind", [Sharded, GatheredInFp32], ids=["fully_shard", "in fp32"])
def test_fsdp2_equals_one_process(kind: type[Ranked]) -> None:
    """The fp32 shards are the masters; nothing is lent."""

    def train(rank: int) -> list[Tensor]:
        module = kind()
        fit(module, BATCHES[rank], devices=2, strategy=model_parallel(kind), plugin=master_weights())
        assert {p.dtype for p in module.parameters()} == {torch.float32}
        return full(module)

    check_ranks(train, two_ranks_by_hand(Whole))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("distributed", [False, True], ids=["one file", "shards"])
@pytest.mark.parametrize("kind", [Sharded, Split])
def test_sharded_runs_resume_exactly(kind: type[Ranked], distributed: bool, tmp_path: Path) -> None:
    # Split has DTensors and plain tensors, of which no foreach function takes a mix. Lightning steps on loading.
    optimizer = "adam" if kind is Split else "adamw_foreach"

    def train(rank: int, epochs: int, *, resume: bool = False, save: bool = False) -> list[Tensor]:
        module = kind(OPTIMIZERS[optimizer])
        strategy = model_parallel(kind, save_distributed_checkpoint=distributed)
        trainer = quiet_trainer(devices=2, strategy=strategy, plugins=[master_weights()], max_epochs=epochs)
        batches = BATCHES[0 if kind is Split else rank]
        trainer.fit(module, loader(batches), ckpt_path=tmp_path / "x.ckpt" if resume else None)
        if save:
            trainer.save_checkpoint(tmp_path / "x.ckpt")
        return full(module)

    straight = run_ranks(lambda rank: train(rank, 2), 2)[0]
    run_ranks(lambda rank: train(rank, 1, save=True), 2)
    resumed = run_ranks(lambda rank: train(rank, 2, resume=True), 2)[0]
    assert all(torch.equal(a, b) for a, b in zip(straight, resumed, strict=True))


def test_tensor_parallel_equals_one_process_but_for_the_order_of_sums() -> None:
    """A row-parallel product is a sum of two 16-bit products, each rounded; 16 bits of a sum are the rest of it."""

    def train(rank: int) -> list[Tensor]:
        module = Split()
        fit(module, BATCHES[0], devices=2, strategy=model_parallel(Split), plugin=master_weights())
        return full(module)

    def whole(rank: int) -> list[Tensor]:
        module = Ranked()
        del module.net[1]
        fit(module, BATCHES[0], plugin=master_weights())
        return full(module)

    check_ranks(train, whole(0), atol=5e-4)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
def test_under_fsdp1_the_shards_are_the_masters(precision: str) -> None:
    """It casts inputs and targets to 16 bit, too, which others do not."""

    def train(rank: int, plugin: Any) -> Any:
        module = Ranked()
        strategy = CpuFsdp(process_group_backend="gloo", use_orig_params=True) if plugin else ddp()
        trainer = fit(module, BATCHES[rank], devices=2, strategy=strategy, plugins=[plugin] if plugin else [])
        assert {p.dtype for p in module.parameters()} == {torch.float32}
        model: Any = trainer.model
        with FullyShardedDataParallel.summon_full_params(model) if plugin else nullcontext():
            return full(module)

    fp32 = run_ranks(lambda rank: train(rank, None), 2)[0]
    check_ranks(lambda rank: train(rank, master_weights(precision)), fp32, atol=5e-3)


MAKE: dict[str, Any] = {
    "joint": joint,
    "adamw": lambda p: AdamW(p, 1e-2, foreach=True),
    "adamw_fused": lambda p: AdamW(p, 1e-3, fused=True),
    "sgd_momentum": lambda p: SGD(p, 0.05, momentum=0.9),
    "lion": lambda p: Lion(p, 1e-3),
    "schedule_free": lambda p: AdamWScheduleFree(p, 1e-3),
}


def by_norm(parameters: list[Any], optimizer: Any) -> None:
    clip_by_hand(parameters, 0.1, fused=bool(optimizer.defaults.get("fused")))


def by_value(parameters: list[Any], optimizer: Any) -> None:
    nn.utils.clip_grad_value_(parameters, 0.01)


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("how", ["plain", "clipped", "skipped"])
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.parametrize("optimizer", MAKE)
def test_every_optimizer_on_ranks_equals_a_loop_by_hand(optimizer: str, strategy: str, window: int, how: str) -> None:
    """Clipped by norm under DDP, and by value under FSDP2, where a norm is a sum over shards in another order."""
    lends = strategy == "ddp"
    make = partial(Ranked if lends else Whole, MAKE[optimizer])
    algorithm, limit, value = ("norm", by_norm, 0.1) if lends else ("value", by_value, 0.01)
    clipping = {"gradient_clip_val": value, "gradient_clip_algorithm": algorithm} if how == "clipped" else {}
    overflows = (2,) if how == "skipped" else ()

    def train(rank: int) -> tuple[list[Tensor], list[Tensor], set[int]]:
        module = make()
        module.overflows = set(overflows) if rank == 1 else set()
        start = full(module)
        shards = FSDP2Strategy(shard=["net.*", "more"], process_group_backend="gloo")
        settings = {"strategy": ddp() if lends else shards, "accumulate_grad_batches": window, **clipping}
        with counted_casts() as casts:
            fit(module, BATCHES[rank], devices=2, plugin=master_weights(weight_by=None), **settings)
        return full(module), start, set(casts.values())

    expected = two_ranks_by_hand(make, window=window, limit=limit if clipping else None, overflows=overflows)
    for ours, start, casts in run_ranks(train, 2):
        assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
        assert not all(torch.equal(a, b) for a, b in zip(ours, start, strict=True))
        assert casts == ({STEPS // window + 1} if lends else set())  # one more when DDP is made
