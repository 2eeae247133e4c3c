"""The test files that take longest. They are begun first, or one of them would be waited for alone at the end.

A worker takes whole files, in the order in which they are collected (`--dist loadfile --no-loadscope-reorder`).
"""

from collections.abc import MutableSequence

import pytest

#: Those of more than ten seconds in the full set, the longest first; in the quick set they are few seconds each.
LONGEST_FILES = (
    "test_strategy_matrix",
    "test_faults_launchers",
    "test_any_gradients",
    "test_float8_training_curve",
    "test_tensor_parallel_compile",
    "test_demo_strategies",
    "test_joint_optimizer_on_ranks",
    "test_faults_kill",
    "test_second_runs",
    "test_nothing_left",
    "test_soak",
    "test_strategy_launchers",
    "test_scaling_law_fit",
    "test_recipes",
    "test_many_nodes",
    "test_fsdp2_checkpoints",
    "test_resumed_on_other_ranks",
    "test_fsdp2_parameter_groups",
    "test_pipeline_added_groups",
    "test_tensor_parallel_sequence",
    "test_many_fits",
    "test_evidence",
    "test_tensor_parallel_float8",
    "test_fuzz_steps",
    "test_wheel",
    "test_pipeline_checkpoints",
    "test_demo_run",
    "test_activation_checkpointing_strategies",
    "test_resume_other_precision",
    "test_site",
    "test_faults_hang",
    "test_gradients_distributed",
    "test_tensor_parallel_gathered",
    "test_tensor_parallel_plan",
    "test_float8_distributed",
    "test_fsdp2_strategy",
    "test_demo_launchers",
    "test_forecast",
    "test_low_bit_states",
    "test_exact_resume_on_ranks",
    "test_tensor_parallel_heads",
    "test_memory_estimate",
    "test_strategy_checkpoints",
    "test_pipeline_runs",
    "test_pipeline_strategy",
    "test_buffer_broadcast",
    "test_fsdp2_resting_layers",
    "test_import_cost",
    "test_diagnosis_bed",
    "test_preflight_projects",
    "test_bench_gpu",
    "test_bench_cost",
)


def begin_with_the_longest(items: MutableSequence[pytest.Item]) -> None:
    """Sorts by file; what is not listed stays as it was, behind those that are."""
    place = {name: number for number, name in enumerate(LONGEST_FILES)}
    items[:] = sorted(items, key=lambda item: place.get(item.path.stem, len(place)))
