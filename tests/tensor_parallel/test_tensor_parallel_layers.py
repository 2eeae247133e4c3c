"""Layers that are split: the input that they share, and what stays frozen."""

from typing import Any

import pytest
import torch
from gloo import process_group
from gloo import run_same_ranks as run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_mp.training.tensor_parallel.layers import SharedInput, split_layer
from lightning_mp.training.tensor_parallel.sequence_parallel import work_on_parts


def test_a_shared_input_is_made_once_for_each_value_of_each_tensor() -> None:
    shared, first, second = SharedInput(), torch.ones(2), torch.ones(2)
    made: list[int] = []

    def made_for(value: Tensor) -> int:
        shared(value, lambda: made.append(1) or value.clone())
        return len(made)

    assert [made_for(first), made_for(first), made_for(second), made_for(first)] == [1, 1, 2, 3]
    first.add_(1)
    assert made_for(first) == 4
    with torch.no_grad():
        assert made_for(first) == 5
    shared.forget()
    with torch.no_grad():
        assert made_for(first) == 6


@pytest.mark.parametrize("styles", [("column", "row"), ("column_gather",), ("vocab_parallel_head",)])
def test_layers_let_the_input_that_they_shared_go(styles: tuple[Any, ...]) -> None:
    """Kept, it would hold the activations of a layer until the next one."""

    def run(rank: int) -> list[int]:
        with process_group():
            mesh, shared, value = init_device_mesh("cpu", (1,)), SharedInput(), torch.ones(2, 3, 4)
            hidden, made = value, []
            for style in styles:
                layer = nn.Linear(4, 4)
                split_layer(layer, style, mesh, shared=shared)
                hidden = layer(hidden)
            shared(value, lambda: made.append(1) or value)
            return made

    assert run_ranks(run, 1) == [[1]]


def test_frozen_layers_stay_frozen_when_they_are_split() -> None:
    def run(rank: int) -> Any:
        with process_group():
            mesh, linear, norm = init_device_mesh("cpu", (2,)), nn.Linear(4, 4), nn.LayerNorm(4)
            linear.bias.requires_grad_(False)
            norm.weight.requires_grad_(False)
            split_layer(linear, "column", mesh, shared=SharedInput())
            work_on_parts(norm, mesh, lambda: False)
            return [parameter.requires_grad for layer in (linear, norm) for parameter in layer.parameters()]

    assert run_ranks(run, 2) == [[True, False, False, True]] * 2
