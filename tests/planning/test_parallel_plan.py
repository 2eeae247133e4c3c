"""Bytes and times of parallel layouts, against numbers worked out by hand and published ones."""

from typing import Any

import pytest

from lightning_mp.ground.flops.hardware import find_chip
from lightning_mp.planning.communication import ParallelLayout
from lightning_mp.planning.layouts import (
    Machine,
    ParallelPlan,
    find_machine,
    known_machines,
    plan_parallelism,
    usual_layouts,
)
from lightning_mp.planning.memory.decoder_config import DecoderSize

SIZE = DecoderSize.of(6_738_415_616, layers=32, width=4096, vocabulary=32000)


def test_llama_2_is_taken_apart():
    """Touvron et al. 2023, arXiv:2307.09288: 32 layers, width 4096, inner width 11008, 32,000 tokens."""
    assert SIZE.block_matmul_weights == 4 * 4096**2 + 3 * 4096 * 11008
    assert SIZE.head_weights == SIZE.table_weights == 32000 * 4096
    assert SIZE.parameters == 6_738_415_616
    assert SIZE.matmul_weights == 6_738_415_616 - 32000 * 4096 - 65 * 4096
    tied = DecoderSize.of(124_337_664, layers=12, width=768, vocabulary=50257, tied_head=True)
    assert (tied.head_weights, tied.parameters) == (0, 124_337_664)
    assert tied.matmul_weights == 12 * tied.block_matmul_weights + tied.table_weights


def test_every_machine_has_a_chip_a_source_and_a_month():
    assert len({machine.name for machine in known_machines()}) == len(known_machines()) >= 4
    for machine in known_machines():
        assert find_chip(machine.chip) is not None
        assert "https://" in machine.source
        assert machine.checked >= "2026-11"


@pytest.mark.parametrize(
    ("name", "inside", "between"), [("DGX A100", 300, 25), ("DGX H100", 450, 50), ("DGX B200", 900, 50)]
)
def test_links_are_per_gpu_and_direction(name, inside, between):
    """NVLink of 600, 900 and 1800 GB/s in both directions; 8 adapters of 200 and 400 Gb/s for 8 GPUs."""
    machine = find_machine(name)
    assert (machine.inside_bytes_per_second, machine.between_bytes_per_second) == (inside * 1e9, between * 1e9)


def test_seconds_are_bytes_over_bandwidth_and_flops_over_peak():
    """64 GPUs, FSDP in nodes of 8 with copies between them, worked out from the table of docs/many_nodes.md."""
    machine = Machine("mine", "A100", 8, inside_bytes_per_second=1e11, between_bytes_per_second=1e10)
    plan = plan_parallelism(
        SIZE, ParallelLayout(copies=8, shards=8), machine, tokens_per_step=2**20, context_tokens=2048
    )
    n, micro_batches = SIZE.parameters, 2**20 // 2048 // 64
    assert plan.micro_batches == micro_batches == 8
    norms, table = 65 * 4096, 32000 * 4096
    low, wide = n - table - norms, norms - 4096
    gathered = micro_batches * (2 * 2 * low + 2 * 4 * wide + 4 * (table + 4096))
    assert plan.inside_bytes == pytest.approx(7 / 8 * (gathered + 4 * n), rel=1e-12)
    assert plan.between_bytes == pytest.approx(2 * 7 / 8 * 4 * n / 8, rel=1e-12)
    assert plan.inside_seconds == pytest.approx(plan.inside_bytes / 1e11)
    assert plan.between_seconds == pytest.approx(plan.between_bytes / 1e10)
    flops = 6 * SIZE.matmul_weights + 12 * 32 * 4096 * 2048
    assert plan.compute_seconds == pytest.approx(flops * 2**20 / (64 * 312e12), rel=1e-12)
    assert plan.awaited_seconds == plan.bubble == 0
    assert plan.seconds_at_least == max(plan.compute_seconds, plan.inside_seconds, plan.between_seconds)
    assert plan.wire_to_compute_ratio == max(plan.inside_seconds, plan.between_seconds) / plan.compute_seconds


def test_waiting_and_the_bubble_lengthen_the_step():
    plan = plan_parallelism(
        SIZE, ParallelLayout(tensor=2, stages=4), "DGX H100", tokens_per_step=2**16, context_tokens=4096
    )
    assert plan.micro_batches == 8
    assert plan.bubble == 3 / 11
    flops = 6 * SIZE.matmul_weights + 12 * 32 * 4096 * 4096
    assert plan.compute_seconds == pytest.approx(flops * 2**16 / (8 * 989.4e12), rel=1e-12)
    send = 2 * 4096 * 4096 * 4 / 450e9  # a micro-batch of two tensor-parallel ranks, in fp32, inside the node
    assert plan.awaited_seconds == pytest.approx(plan.inside_seconds + plan.between_seconds - 2 * 8 * send)
    assert plan.fill_and_drain_seconds == pytest.approx(2 * 3 * send)
    assert plan.seconds_at_least == pytest.approx(
        (plan.compute_seconds + plan.awaited_seconds) * 11 / 8 + plan.fill_and_drain_seconds
    )


@pytest.mark.parametrize(
    ("inside", "between", "bound"), [(1e18, 1e18, "compute"), (1e9, 1e18, "inside"), (1e18, 1e9, "between")]
)
def test_the_slowest_part_is_named(inside, between, bound):
    machine = Machine("mine", "H100 SXM", 8, inside, between)
    plan = plan_parallelism(SIZE, ParallelLayout(shards=16), machine, tokens_per_step=2**16, context_tokens=4096)
    assert plan.bound_by == bound
    assert plan.wire_to_compute_ratio == max(plan.inside_seconds, plan.between_seconds) / plan.compute_seconds


def test_tensor_parallelism_waits():
    machine = Machine("mine", "H100 SXM", 8, 1e9, 1e18)
    plan = plan_parallelism(SIZE, ParallelLayout(tensor=8), machine, tokens_per_step=2**16, context_tokens=4096)
    assert plan.bound_by == "waiting"


def test_reductions_of_tensor_parallelism_in_this_packages_format_and_in_megatrons():
    """107% of the computing time is this package's fp32, not the machine's: 16 bit both ways takes 71%."""
    arguments = {"tokens_per_step": 2**22, "context_tokens": 4096}
    ours, megatron = (
        plan_parallelism(SIZE, ParallelLayout(tensor=8), "DGX H100", **arguments, tensor_reduce_dtype=dtype)
        for dtype in ("fp32", "16bit")
    )
    assert ours.wire_to_compute_ratio == pytest.approx(1.07, abs=0.005)
    # Shoeybi et al. 2019: two all-reduces forward and two backward in each of 32 blocks, one each for table and head.
    megatron_bytes = 128 * 2 * 7 / 8 * (4 * 32 + 2) * (8 * 4096) * 4096 * 2
    of_the_loss = 128 * 2 * 7 / 8 * 8 * 4096 * 12
    assert megatron.inside_bytes == pytest.approx(megatron_bytes + of_the_loss, rel=1e-12)
    assert megatron.wire_to_compute_ratio == pytest.approx(0.715, abs=0.005)


def test_layouts_use_all_gpus():
    for gpus in (1, 4, 8, 12, 64, 256, 1024):
        layouts = usual_layouts(gpus, 8, layers=32)
        assert all(layout.gpus == gpus for layout in layouts)
        assert len(set(layouts)) == len(layouts)
    assert not any(layout.stages > 1 for layout in usual_layouts(64, 8, layers=30))


def plan(**seconds: Any) -> ParallelPlan:
    return ParallelPlan(ParallelLayout(copies=2), 1, (), 0.0, 0.0, **seconds, compute_seconds=1.0, bubble=0.25)


@pytest.mark.parametrize(("awaited", "bound_by"), [(0.0, "compute"), (0.5, "compute"), (0.6, "waiting")])
def test_a_step_waits_when_more_than_half_of_it_is_no_computing(awaited: float, bound_by: str) -> None:
    assert plan(inside_seconds=0.1, between_seconds=0.2, awaited_seconds=awaited).bound_by == bound_by


def test_the_wire_is_compared_with_computing_alone() -> None:
    assert plan(inside_seconds=3.0, between_seconds=2.0, awaited_seconds=0.5).wire_to_compute_ratio == 3.0
