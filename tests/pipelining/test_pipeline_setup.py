"""A model is split and comes to life on its stages: what is shared, put back after an exception, or refused."""

import contextlib

import pytest
import torch
from gloo import RankError, run_ranks
from pipelined_models import PipelinedMLP, losses_of
from torch import nn

from lightning_mp import PipelineParallelStrategy
from lightning_mp.ground.core.rank_rng import RankRNG
from lightning_mp.ground.modules.stage_placeholder import StagePlaceholder, full_model, release
from lightning_mp.pipelining.layers import read_layers
from lightning_mp.pipelining.partition import split_model


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(6))

    def forward(self, x):
        return x * self.factor


class Scaled(PipelinedMLP):
    def __init__(self):
        super().__init__()
        for layer in self.layers:
            layer.append(Scale())


def test_a_module_without_memory_that_nothing_can_initialise_is_refused():
    """The message is not hidden by Lightning's own clearing up, which moves the model to the CPU."""

    def fit(rank):
        with torch.device("meta"):
            module = Scaled()
        losses_of(module, PipelineParallelStrategy(split_points=["layers.2"]), 2)

    with pytest.raises(RankError, match="class Scale are on the meta device and have no reset_") as error:
        run_ranks(fit, 2)
    assert "Cannot copy out of meta tensor" not in str(error.value)


def split_in_two(module):
    split_model(module, read_layers(module), [0, 2], 0)
    return module


def test_a_buffer_that_layers_of_other_stages_share_stays():
    """One mask for all layers, as models of attention have it."""
    module, mask = PipelinedMLP(), torch.ones(6)
    for layer in module.layers:
        layer.register_buffer("mask", mask)
    assert split_in_two(module).layers[0].mask.tolist() == [1.0] * 6


def test_an_exception_in_configure_optimizers_leaves_the_model_split():
    module = split_in_two(PipelinedMLP())
    with contextlib.suppress(KeyError), full_model(module):
        assert not any(isinstance(layer, StagePlaceholder) for layer in module.layers)
        raise KeyError
    assert [isinstance(layer, StagePlaceholder) for layer in module.layers] == [False, False, True, True, True]


def test_an_exception_in_a_layer_leaves_the_random_numbers_of_the_process_alone():
    torch.manual_seed(1)
    wanted = float(torch.rand(()))
    torch.manual_seed(1)
    with contextlib.suppress(KeyError), RankRNG(0, seed=torch.initial_seed).drawn(torch.device("cpu")):
        torch.rand(())
        raise KeyError
    assert float(torch.rand(())) == wanted


def test_a_module_of_another_stage_keeps_no_gradient():
    layer = torch.nn.Linear(2, 2)
    layer(torch.ones(2)).sum().backward()
    release(layer, ())
    assert all(parameter.grad is None for parameter in layer.parameters())
