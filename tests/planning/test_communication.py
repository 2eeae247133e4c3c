"""The formulas of what a step sends, against operations and bytes counted on real processes (gloo)."""

from collections import Counter
from typing import Any

import fsdp2_runs as runs
import pytest
import torch
import torch.distributed as dist
from cpu_fsdp import CpuFsdp
from gloo import process_group, run_ranks
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from small_models import loader, quiet_trainer
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional as F
from wire_counter import Collective, CollectiveCounter, socket_bytes_sent

from lightning_mp import AccumulationScheduler, ActivationCheckpointing, AutocastPrecision, MasterWeightsPrecision
from lightning_mp.language_model.gpt import Block
from lightning_mp.planning.communication import ParallelLayout, Transfer, communication_per_step
from lightning_mp.planning.memory.decoder_config import DecoderSize
from lightning_mp.strategies import ReducedPrecisionDDPStrategy

CONFIG = runs.model().model.config
SIZE = DecoderSize(
    layers=CONFIG.layers,
    width=CONFIG.width,
    vocabulary=CONFIG.vocab,
    block_matmul_weights=12 * CONFIG.width**2,
    block_norm_weights=2 * CONFIG.width,
    table_weights=CONFIG.vocab * CONFIG.width,
    other_weights=(CONFIG.block_tokens + 1) * CONFIG.width,
)
# What the formulas leave out. Once per step: the sum of squares of the gradients, not finite after an overflow, and the
# number of ranks that have gradients; with AccumulationScheduler counts of the window in the same operation; under FSDP
# checksums of the sharding units that were run. In every micro-batch Lightning tells whether rank 0 got SIGTERM.
NORM_BYTES, UNITS_BYTES, WINDOW_BYTES, SIGTERM_BYTES = 16, 16, 64, 8


class CalledDirectly(runs.Recorded):
    """Its training step calls the network, not ``self(...)``."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(self.model(batch[0]).flatten(0, 1).float(), batch[1].flatten())


class CountedWindow(Callback):
    """Counts in the third window; in the second DDP still tells its ranks about buckets."""

    def __init__(self, micro_batches: int) -> None:
        self.first, self.last = 2 * micro_batches, 3 * micro_batches - 1
        self.counter = CollectiveCounter()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.first:
            self.counter.__enter__()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.last:
            self.counter.__exit__(None, None, None)


def counted(
    make: Any,
    ranks: int,
    *,
    module: Any = CalledDirectly,
    true: bool = False,
    recomputed: bool = False,
    **schedule: Any,
) -> Any:
    """What one rank does in a window; all ranks do the same."""
    micro_batches = schedule.pop("micro_batches", 1)

    def on_rank(rank: int) -> Counter[Collective]:
        torch.manual_seed(0)
        strategy = make()
        window = CountedWindow(micro_batches)
        callbacks: list[Any] = [window, *([ActivationCheckpointing("*.blocks.*")] if recomputed else [])]
        if micro_batches > 1:
            callbacks.append(AccumulationScheduler({0: micro_batches}, **schedule))
        trainer = quiet_trainer(
            devices=ranks,
            strategy=strategy,
            plugins=[MasterWeightsPrecision("bf16-true") if true else AutocastPrecision("bf16-mixed")],
            callbacks=callbacks,
            max_epochs=-1,
            max_steps=3,
        )
        parts = getattr(strategy, "tensor_parallel_size", 1)
        sizes = {"layers": CONFIG.layers, "heads": CONFIG.heads, "width": CONFIG.width}
        network = module(**sizes, block_tokens=CONFIG.block_tokens, vocab=CONFIG.vocab)
        rows = runs.batches(3 * micro_batches, rank // parts, ranks // parts)
        trainer.fit(network, loader(rows), loader(rows[:1]))
        return window.counter.count()

    first, *others = run_ranks(on_rank, ranks)
    assert all(other == first for other in others)
    return first


def agreements(ranks: int, *, sharded: int = 1, micro_batches: int = 1, copies: int = 2) -> Counter[Collective]:
    """``sharded`` ranks hold units together; several ``copies`` of the model, or a window, count their batches.

    The first micro-batch's SIGTERM is told before the count begins.
    """
    found = Counter({Collective("all_reduce", ranks, NORM_BYTES + (copies * micro_batches > 1) * WINDOW_BYTES): 1})
    found[Collective("all_reduce", sharded, UNITS_BYTES)] += sharded > 1
    found[Collective("broadcast", ranks, SIGTERM_BYTES)] += micro_batches - 1
    return +found


def by_formula(layout: ParallelLayout, **arguments: Any) -> Counter[Collective]:
    tokens = runs.ROWS * runs.TOKENS // layout.data_ranks
    found: Counter[Collective] = Counter()
    for part in communication_per_step(SIZE, layout, tokens_per_micro_batch=tokens, **arguments):
        found[Collective(part.collective, part.ranks, part.payload_bytes)] += part.count
    return found


def ddp() -> DDPStrategy:
    return DDPStrategy(process_group_backend="gloo")


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_ddp_reduces_all_gradients_once(ranks):
    seen = counted(ddp, ranks)
    gradients = by_formula(ParallelLayout(copies=ranks))
    assert gradients == {("all_reduce", ranks, 4 * SIZE.parameters): 1}
    assert seen == gradients + agreements(ranks)


def test_ddp_reduces_once_per_window():
    seen = counted(ddp, 2, micro_batches=3)
    assert seen == by_formula(ParallelLayout(copies=2), micro_batches=3) + agreements(2, micro_batches=3)


@pytest.mark.full
def test_gradients_in_16_bit_are_half():
    hooked = counted(lambda: ReducedPrecisionDDPStrategy("bf16", process_group_backend="gloo"), 2) - agreements(2)
    assert hooked == by_formula(ParallelLayout(copies=2), reduced_gradients=True)
    true = counted(ddp, 2, true=True) - agreements(2)
    assert true == by_formula(ParallelLayout(copies=2), precision="bf16-true")
    norms = (2 * CONFIG.layers + 1) * CONFIG.width  # fp32, and so a bucket of their own
    assert true == {("all_reduce", 2, 2 * (SIZE.parameters - norms)): 1, ("all_reduce", 2, 4 * norms): 1}
    assert hooked == {("all_reduce", 2, 2 * SIZE.parameters): 1}


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "strategy", "run", "formula"),
    [
        pytest.param(ParallelLayout(shards=2), {}, {}, {}, id="2"),
        pytest.param(ParallelLayout(shards=4), {}, {}, {}, id="4", marks=pytest.mark.full),
        pytest.param(
            ParallelLayout(shards=2),
            {"reshard_after_forward": False},
            {},
            {"reshard_after_forward": False},
            id="kept",
            marks=pytest.mark.full,
        ),
        pytest.param(ParallelLayout(copies=2, shards=2), {"replicate_size": 2}, {}, {}, id="hybrid"),
        pytest.param(
            ParallelLayout(shards=2),
            {},
            {"micro_batches": 3, "sync": "window"},
            {"micro_batches": 3, "gradient_sync": "window"},
            id="window",
        ),
        pytest.param(
            ParallelLayout(copies=2, shards=2),
            {"replicate_size": 2},
            {"micro_batches": 2, "sync": "micro_batch"},
            {"micro_batches": 2, "gradient_sync": "micro_batch"},
            id="hybrid, every micro-batch",
            marks=pytest.mark.full,
        ),
        pytest.param(ParallelLayout(shards=2), {}, {"true": True}, {"precision": "bf16-true"}, id="bf16-true"),
    ],
)
def test_fsdp2_gathers_and_reduces_what_the_formula_says(layout, strategy, run, formula):
    seen = counted(lambda: runs.fsdp2(**strategy), layout.gpus, **run)
    agreed = agreements(layout.gpus, sharded=layout.gpus, micro_batches=run.get("micro_batches", 1))
    assert seen == by_formula(layout, **formula) + agreed


@pytest.mark.parametrize(
    ("layout", "strategy", "formula"),
    [
        pytest.param(ParallelLayout(shards=2), {}, {}, id="full shard"),
        pytest.param(
            ParallelLayout(shards=2),
            {"sharding_strategy": "SHARD_GRAD_OP"},
            {"reshard_after_forward": False},
            id="gradients and optimizer",
            marks=pytest.mark.full,
        ),
        pytest.param(
            ParallelLayout(copies=2, shards=2),
            {"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 2)},
            {},
            id="hybrid",
            marks=pytest.mark.full,
        ),
    ],
)
def test_fsdp1_gathers_everything_in_16_bit(layout, strategy, formula):
    """Its units are flat: norms and tables travel with the matrices, as under Lightning's "bf16-true"."""
    seen = counted(lambda: CpuFsdp(auto_wrap_policy={Block}, **strategy), layout.gpus)
    assert seen == by_formula(layout, precision="lightning:bf16-true", **formula) + agreements(
        layout.gpus, sharded=layout.gpus
    )


@pytest.mark.full
def test_calling_self_in_the_training_step_gathers_nothing_twice():
    """As most LightningModules do; with torch's own hooks what is outside of the blocks would be gathered again."""
    seen = counted(runs.fsdp2, 2, module=runs.Recorded)
    assert seen == by_formula(ParallelLayout(shards=2)) + agreements(2, sharded=2)


@pytest.mark.parametrize(
    ("shards", "micro_batches", "sequence", "sync"),
    [(1, 1, False, "window"), (2, 1, False, "window"), (1, 2, True, "window"), (2, 2, True, "micro_batch")],
)
@pytest.mark.full
def test_tensor_parallelism_sends_activations(shards, micro_batches, sequence, sync):
    layout = ParallelLayout(shards=shards, tensor=2)
    plan = "auto_sequence" if sequence else "auto"
    seen = counted(
        lambda: runs.fsdp2(tensor_parallel_size=2, tensor_parallel_plan=plan),
        layout.gpus,
        micro_batches=micro_batches,
        sync=sync,
    )
    due = by_formula(layout, micro_batches=micro_batches, sequence_parallel=sequence, gradient_sync=sync)
    agreed = agreements(layout.gpus, sharded=shards, micro_batches=micro_batches, copies=layout.data_ranks)
    assert seen == due + agreed


@pytest.mark.full
@pytest.mark.parametrize("sequence", [False, True])
def test_recomputed_blocks_reduce_attention_again(sequence):
    plan = "auto_sequence" if sequence else "auto"
    seen = counted(lambda: runs.fsdp2(tensor_parallel_size=2, tensor_parallel_plan=plan), 2, recomputed=True)
    due = by_formula(ParallelLayout(tensor=2, checkpointed=True), sequence_parallel=sequence)
    assert seen == due + agreements(2, copies=1)


def sent(transfers: list[Transfer]) -> float:
    return sum(part.bytes_sent for part in transfers)


@pytest.mark.parametrize("schedule", [Schedule1F1B, pytest.param(ScheduleGPipe, marks=pytest.mark.full)])
@pytest.mark.parametrize("stages", [2, pytest.param(4, marks=pytest.mark.full)])
def test_a_pipeline_sends_activations_and_their_gradients(stages, schedule):
    micro_batches, rows, width = 4, 8, 16

    def on_rank(rank: int) -> Counter[Collective]:
        with process_group():
            torch.manual_seed(rank)
            stage = PipelineStage(nn.Linear(width, width), rank, stages, torch.device("cpu"))
            pipeline = schedule(stage, micro_batches, loss_fn=lambda y, t: (y - t).square().mean())
            batch = torch.ones(rows, width)
            inputs = [batch] if rank == 0 else []
            targets = {"target": batch} if rank == stages - 1 else {}
            pipeline.step(*inputs, **targets)  # tells the shapes, too
            with CollectiveCounter() as counter:
                pipeline.step(*inputs, **targets)
            return counter.count()

    size = DecoderSize(stages, width, 1, width * width, 0, 0)
    part = communication_per_step(
        size,
        ParallelLayout(stages=stages),
        tokens_per_micro_batch=rows // micro_batches,
        micro_batches=micro_batches,
        precision="32-true",
    )[-1]
    sent = [
        sum(n for operation, n in seen.items() if operation == ("send", stages, part.payload_bytes))
        for seen in run_ranks(on_rank, stages)
    ]
    ends, middle = micro_batches, 2 * micro_batches
    assert sent == [ends, *[middle] * (stages - 2), ends]
    assert part.count == max(sent)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_sockets_send_what_the_factors_say(ranks):
    """Bytes that left this process by TCP. gloo's reduce-scatter is an all-reduce, so it sends twice its due."""
    payload = 1 << 20

    def on_rank(rank: int) -> dict[str, int]:
        with process_group():
            whole, part = torch.zeros(payload // 4), torch.zeros(payload // 4 // ranks)

            def send() -> None:
                if rank == 0:
                    dist.send(whole, 1)
                elif rank == 1:
                    dist.recv(whole, 0)

            operations = {
                "all_reduce": lambda: dist.all_reduce(whole),
                "all_gather": lambda: dist.all_gather(list(whole.chunk(ranks)), part),
                "send": send,
            }
            sent = {}
            for name, operation in operations.items():
                operation()  # connects
                dist.barrier()
                before = socket_bytes_sent()
                operation()
                dist.barrier()
                sent[name] = socket_bytes_sent() - before
            return sent

    first = run_ranks(on_rank, ranks)[0]
    for name, sent in first.items():
        due = Transfer("", name, payload, ranks if name != "send" else 2).bytes_sent
        assert due <= sent <= due * 1.003, name


def test_two_levels_send_as_much_as_a_ring():
    for collective in ("all_reduce", "all_gather", "reduce_scatter"):
        for ranks, stride, per_node in [
            (16, 1, 8),
            (64, 1, 8),
            (8, 8, 8),
            (4, 2, 8),
            (16, 4, 8),
            (2, 16, 8),
            (8, 1, 8),
        ]:
            part = Transfer("", collective, 3 * 2**20, ranks, 5, stride)
            inside, between = part.bytes_by_link(per_node)
            assert inside + between == pytest.approx(part.bytes_sent, rel=1e-15)
            assert (between == 0) == (ranks * stride <= per_node)
            assert (inside == 0) == (stride >= per_node)


def test_a_node_sends_the_least_that_an_all_reduce_can():
    """2 (m - 1) / m of the payload leave each of m nodes, however many GPUs it has."""
    for nodes, per_node in [(2, 8), (4, 4), (8, 1)]:
        _, between = Transfer("", "all_reduce", 10**9, nodes * per_node).bytes_by_link(per_node)
        assert between * per_node == pytest.approx(2 * (nodes - 1) / nodes * 10**9)


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="12 ranks that are 1 apart do not fill nodes of 8 GPUs evenly"):
        Transfer("gradients", "all_reduce", 8, 12).bytes_by_link(8)
    two = ParallelLayout(shards=2)
    with pytest.raises(
        ValueError, match="`precision` 'fp8' is not known. Did you mean 'fp8-mixed'\\? Use one of 32-true"
    ):
        communication_per_step(SIZE, two, tokens_per_micro_batch=8, precision="fp8")
    with pytest.raises(ValueError, match="Unknown `gradient_sync` 'step'. Use one of window, micro_batch"):
        communication_per_step(SIZE, two, tokens_per_micro_batch=8, gradient_sync="step")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`micro_batches` must be a whole number, 1 or more, got 0"):
        communication_per_step(SIZE, two, tokens_per_micro_batch=8, micro_batches=0)
    with pytest.raises(ValueError, match=r"`layers` \(2\) cannot be divided evenly over 4 stages"):
        communication_per_step(SIZE, ParallelLayout(stages=4), tokens_per_micro_batch=8)
    with pytest.raises(ValueError, match="Use copies in place of shards"):
        ParallelLayout(stages=2, shards=2)
    with pytest.raises(ValueError, match=r"ParallelLayout\(tensor=0\): it must be a whole number, 1 or more"):
        ParallelLayout(tensor=0)
