"""Several ranks: all take part in a replay or none, and rank 0 names the rank that went wrong."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_fsdp import CpuFsdp
from gloo import run_ranks
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from planted_overflows import Planted, TimesInBackward, TimesInForward, numbered_batches
from small_models import adamw, fused_adamw, loader, quiet_trainer, shard
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_mp import AutocastPrecision, LossScaler, OverflowMonitor, OverflowPostMortem

# torch warns of in-place operations on a sharded layer's output; there are none here.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Optimizer step:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor"),
]

SCALE = 1024.0


class Sharded(Planted):
    def configure_model(self) -> None:
        shard(self, self.embedding, *self.body[:3], self.head)


class Unsharded(Planted):
    """For FSDP1, whose 16-bit parameters torch's batch norm does not take."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.body[2] = nn.Identity()


def strategy_for(module: Planted) -> Any:
    if isinstance(module, Sharded):
        return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")
    kind = CpuFsdp if isinstance(module, Unsharded) else DDPStrategy
    return kind(process_group_backend="gloo")


def train(
    rank: int,
    make: Any,
    folder: Path,
    *,
    replay: bool = True,
    stock: bool = False,
    micro_batches: int = 1,
    num_batches: int = 5,
) -> Any:
    module = make()
    plugin = (
        MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=SCALE))
        if stock
        else AutocastPrecision("16-mixed", scaler=LossScaler(init_scale=SCALE))
    )
    post_mortem = OverflowPostMortem(replay=True, dirpath=folder)
    trainer = quiet_trainer(
        devices=2,
        strategy=strategy_for(module),
        plugins=[plugin],
        callbacks=[OverflowMonitor(), *([post_mortem] if replay else [])],
        accumulate_grad_batches=micro_batches,
    )
    torch.manual_seed(rank)
    trainer.fit(module, loader(numbered_batches(num_batches)))
    if isinstance(module, Unsharded):
        return post_mortem.reports, [], module.losses
    full = [p.full_tensor() if isinstance(p, DTensor) else p for p in module.parameters()]
    buffers = [buffer.nan_to_num(7e7) for buffer in module.buffers()]
    return post_mortem.reports, [value.detach().numpy() for value in (*full, *buffers)], module.losses


@pytest.mark.parametrize("optimizer", [adamw, fused_adamw], ids=["unfused", "fused"])
@pytest.mark.parametrize("kind", [Planted, Sharded, Unsharded], ids=["ddp", "fsdp2", "fsdp1"])
@pytest.mark.full
def test_the_rank_at_fault_is_named_on_every_rank(kind: Any, optimizer: Any, tmp_path: Path) -> None:
    """And the run goes on bit-equal to one without the post-mortem."""
    make = partial(kind, partial(TimesInBackward, factor=2e4), planted=[3], optimizer=optimizer, rank=1)
    run = partial(train, make=make, folder=tmp_path, micro_batches=2, num_batches=8)
    with_replay = run_ranks(lambda rank: run(rank), 2)
    without = run_ranks(lambda rank: run(rank, replay=False), 2)
    for (reports, weights, losses), (_, expected, expected_losses) in zip(with_replay, without, strict=True):
        assert reports == with_replay[0][0]
        (report,) = reports
        (finding,) = report.findings
        assert report.step_index == 1
        assert (finding.rank, finding.micro_batch, finding.verdict) == (1, 1, "scale")
        assert (finding.first_overflow.phase, finding.first_overflow.module) == ("backward", "body.1.place")
        assert report.parameters[-1] == "embedding.weight"
        assert all((a == b).all() for a, b in zip(weights, expected, strict=True))
        assert losses == expected_losses
    assert (tmp_path / "overflow_step_1.json").exists()


def test_two_ranks_go_wrong_in_two_places(tmp_path: Path) -> None:
    class Both(Planted):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss / 0 if batch_idx == 2 and self.global_rank == 0 else loss

    make = partial(Both, partial(TimesInForward, factor=1e6), rank=1)
    reports = run_ranks(lambda rank: train(rank, make, tmp_path)[0], 2)
    assert reports[0] == reports[1]
    places = [(f.rank, f.first_overflow.phase, f.first_overflow.module, f.verdict) for f in reports[0][0].findings]
    assert places == [(0, "loss", "", "model"), (1, "forward", "body.1.place", "range")]


@pytest.mark.full
def test_fp32_is_tried_by_all_ranks_where_weights_are_gathered(tmp_path: Path) -> None:
    make = partial(Sharded, partial(TimesInForward, factor=1e6), rank=1)
    reports = run_ranks(lambda rank: train(rank, make, tmp_path)[0], 2)
    assert reports[0] == reports[1]
    (finding,) = reports[0][0].findings
    assert (finding.rank, finding.verdict, finding.finite_in_fp32) == (1, "range", True)


def test_a_replay_that_fails_on_one_rank_stops_on_all(tmp_path: Path) -> None:
    class Once(Planted):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.num_calls > batch_idx and self.global_rank == 1:
                raise RuntimeError("only once")
            return super().training_step(batch, batch_idx)

    make = partial(Once, partial(TimesInBackward, factor=math.inf))
    reports = run_ranks(lambda rank: train(rank, make, tmp_path)[0], 2)
    assert reports[0] == reports[1]
    assert "rank 1: RuntimeError: only once" in reports[0][0].note


def test_a_stock_plugin_under_ddp(tmp_path: Path) -> None:
    make = partial(Planted, partial(TimesInBackward, factor=math.inf), optimizer=fused_adamw, rank=1)
    reports = run_ranks(lambda rank: train(rank, make, tmp_path, stock=True)[0], 2)
    assert reports[0] == reports[1]
    (finding,) = reports[0][0].findings
    assert (finding.rank, finding.verdict, finding.first_overflow.module) == (1, "model", "body.1.place")


def test_ranks_that_may_decide_differently_are_refused(tmp_path: Path) -> None:
    def refused(rank: int) -> str:
        try:
            train(rank, partial(Sharded, partial(TimesInForward, factor=1e6)), tmp_path, stock=True)
        except Exception as error:
            return str(error)
        return ""

    for message in run_ranks(refused, 2):
        assert "torch's GradScaler under ModelParallelStrategy" in message
