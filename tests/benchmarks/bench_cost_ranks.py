"""What goes over the wire in one optimizer step on 1, 2 and 4 ranks: ours beside stock beside a plain loop."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from all_callbacks import all_callbacks
from bench_cells import BenchmarkModule, LossModel
from bench_cost_counts import CONFIG, our_plugin, stock_plugin
from gloo import process_group, run_ranks
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from small_models import fit
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from wire_counter import CollectiveCounter, socket_bytes_sent

from lightning_mp import AccumulationScheduler, FSDP2Strategy
from lightning_mp.language_model.gpt import Block

WINDOW = 4
COUNTED_WINDOW = 2
"""In the second window DDP still tells its ranks about buckets."""


@dataclass(frozen=True)
class Wire:
    """One rank's optimizer step with its micro-batches."""

    collectives: dict[str, int]
    payload_bytes: int
    """Of the whole tensors that the collectives are about."""
    socket_bytes: int
    """That this rank's sockets sent, gloo's own messages included."""


class CountedWindow(Callback):
    """From the first micro-batch of a window to that of the next one."""

    def __init__(self) -> None:
        self.counter = CollectiveCounter()
        self.wire: Wire | None = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.at_start_of(batch_idx)

    def at_start_of(self, micro_batch: int) -> None:
        if micro_batch == COUNTED_WINDOW * WINDOW:
            self.sent = socket_bytes_sent()
            self.counter.__enter__()
        if micro_batch == (COUNTED_WINDOW + 1) * WINDOW:
            self.counter.__exit__(None, None, None)
            seen = self.counter.seen
            self.wire = Wire(
                dict(Counter(collective.name for collective in seen)),
                sum(collective.payload_bytes for collective in seen),
                socket_bytes_sent() - self.sent,
            )


class Sharded(BenchmarkModule):
    """Shards itself, as Lightning's ModelParallelStrategy asks."""

    def configure_model(self) -> None:
        if self.device_mesh is not None:
            _shard(self.model, self.device_mesh["data_parallel"])


def _shard(model: Any, mesh: Any) -> None:
    for block in model.gpt.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _batches(rank: int) -> Iterator[list[Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    for _ in range((COUNTED_WINDOW + 1) * WINDOW + 1):
        ids = torch.randint(CONFIG.vocab, (2, CONFIG.block_tokens + 1), generator=generator)
        yield [ids[:, :-1], ids[:, 1:]]


def _under_lightning(rank: int, ranks: int, strategy: Any, plugin: Any, module: Any, **arguments: Any) -> Wire:
    counted = CountedWindow()
    callbacks = [counted, *arguments.pop("callbacks", [])]
    fit(module, list(_batches(rank)), devices=ranks, strategy=strategy, plugin=plugin, callbacks=callbacks, **arguments)
    assert counted.wire is not None
    return counted.wire


def _plain(rank: int, ranks: int, *, sharded: bool) -> Wire:
    """The loop that one writes by hand, with one reduction per window; bf16 autocast."""
    counted = CountedWindow()
    module = BenchmarkModule(LossModel(CONFIG), fused=False)
    model: Any = module.model
    if sharded:
        _shard(model, init_device_mesh("cpu", (ranks,)))
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for index, batch in enumerate(_batches(rank)):
        counted.at_start_of(index)
        closes = (index + 1) % WINDOW == 0
        if sharded:
            model.set_requires_gradient_sync(closes)
        with nullcontext() if sharded or closes else model.no_sync():
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(*batch) / WINDOW
            loss.backward()
        if closes:
            optimizer.step()
            optimizer.zero_grad()
    assert counted.wire is not None
    return counted.wire


def _ddp() -> DDPStrategy:
    return DDPStrategy(process_group_backend="gloo")


def _module(kind: type[BenchmarkModule] = BenchmarkModule) -> BenchmarkModule:
    torch.manual_seed(0)
    return kind(LossModel(CONFIG), fused=False)


def _stock_ddp(rank: int, ranks: int) -> Wire:
    return _under_lightning(rank, ranks, _ddp(), stock_plugin("bf16-mixed"), _module(), accumulate_grad_batches=WINDOW)


def _our_ddp(rank: int, ranks: int) -> Wire:
    callbacks = [AccumulationScheduler({0: WINDOW})]
    return _under_lightning(rank, ranks, _ddp(), our_plugin("bf16-mixed"), _module(), callbacks=callbacks)


def _our_ddp_with_all(rank: int, ranks: int) -> Wire:
    callbacks = list(all_callbacks(WINDOW).values())
    return _under_lightning(rank, ranks, _ddp(), our_plugin("16-mixed"), _module(), callbacks=callbacks)


def _stock_fsdp2(rank: int, ranks: int) -> Wire:
    strategy = ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1, process_group_backend="gloo")
    plugin = stock_plugin("bf16-mixed")
    return _under_lightning(rank, ranks, strategy, plugin, _module(Sharded), accumulate_grad_batches=WINDOW)


def _our_fsdp2(rank: int, ranks: int, **schedule: Any) -> Wire:
    strategy = FSDP2Strategy((Block,), process_group_backend="gloo")
    callbacks = [AccumulationScheduler({0: WINDOW}, **schedule)]
    return _under_lightning(rank, ranks, strategy, our_plugin("bf16-mixed"), _module(), callbacks=callbacks)


WAYS: dict[str, dict[str, Callable[[int, int], Wire]]] = {
    "DDP": {
        "plain": lambda rank, ranks: _plain(rank, ranks, sharded=False),
        "stock": _stock_ddp,
        "ours": _our_ddp,
        "ours, 16-mixed, all callbacks": _our_ddp_with_all,
    },
    "FSDP2": {
        "plain": lambda rank, ranks: _plain(rank, ranks, sharded=True),
        "stock": _stock_fsdp2,
        "ours": _our_fsdp2,
        'ours, sync="micro_batch"': lambda rank, ranks: _our_fsdp2(rank, ranks, sync="micro_batch"),
    },
}


@cache
def count_wire(ranks: int) -> dict[tuple[str, str], Wire]:
    """By strategy and way, of rank 0 except for the bytes of its sockets, which are those of the busiest rank."""

    def all_ways(rank: int) -> dict[tuple[str, str], Wire]:
        logging.disable(logging.WARNING)
        with process_group():  # which Trainers use, too
            return {
                (strategy, way): count(rank, ranks) for strategy, ways in WAYS.items() for way, count in ways.items()
            }

    of_ranks = run_ranks(all_ways, ranks, timeout_seconds=120)
    return {
        key: Wire(wire.collectives, wire.payload_bytes, max(found[key].socket_bytes for found in of_ranks))
        for key, wire in of_ranks[0].items()
    }
