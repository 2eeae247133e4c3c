"""How a model says what its layers are, where it is split, and what it is told if that cannot be."""

import copy
import re
from itertools import combinations, pairwise

import lightning.pytorch as pl
import pytest
import torch
from gloo import RankError, run_ranks
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from pipelined_models import PipelinedGPT, PipelinedMLP, fit, labelled
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_mp import PipelineParallelStrategy
from lightning_mp.ground.modules.stage_placeholder import StagePlaceholder, full_model, stage_split_of
from lightning_mp.pipelining import PipelineLayer, pipelined_loss
from lightning_mp.pipelining.layers import pipeline_input, read_layers
from lightning_mp.pipelining.partition import balanced_split_points, split_model
from lightning_mp.strategies.pipeline_setup import description


def brute_force(costs, stages):
    def worst(splits):
        bounds = [0, *splits, len(costs)]
        return max(sum(costs[a:b]) for a, b in pairwise(bounds))

    return min(worst(splits) for splits in combinations(range(1, len(costs)), stages - 1))


@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.integers(1, 5))
def test_no_other_split_has_a_cheaper_slowest_stage(costs, stages):
    if len(costs) < stages:
        with pytest.raises(ValueError, match=f"{len(costs)} layers cannot be split into {stages} stages"):
            balanced_split_points(costs, stages)
        return
    splits = balanced_split_points(costs, stages)
    bounds = [*splits, len(costs)]
    assert splits[0] == 0
    assert all(a < b for a, b in pairwise(bounds))
    assert max(sum(costs[a:b]) for a, b in pairwise(bounds)) == brute_force(costs, stages)


def test_a_split_model_has_what_its_stage_holds_and_says_where_the_rest_is():
    whole = PipelinedGPT()
    model = copy.deepcopy(whole)
    split = split_model(model, read_layers(model), [0, 2], 0)
    names = {name for name, _ in model.named_parameters()}
    assert {name.split(".")[1] for name in names} == {"token_embedding", "position_embedding", "blocks"}
    assert all(name.startswith("model.blocks.0.") for name in names if "blocks" in name)
    assert stage_split_of(model) is split
    assert split.stages_of_parameters == {"model.token_embedding.weight": (0, 1)}
    assert split.names_of == {"model.token_embedding.weight": ("model.token_embedding.weight", "model.head.weight")}
    with pytest.raises(
        RuntimeError, match=r"model\.blocks\.1 is on stage 1 of the pipeline, and this rank has stage 0"
    ):
        model.model.blocks[1](torch.zeros(1, 2, 16))
    with pytest.raises(
        AttributeError, match=r"'weight' was requested from a module that is not on this rank: model\.head is on"
    ):
        _ = model.model.head.weight
    with full_model(model):
        assert {n: p.shape for n, p in model.named_parameters()} == {n: p.shape for n, p in whole.named_parameters()}
        assert model.model.blocks[2].mlp.up.weight.untyped_storage().nbytes() == 4
    assert isinstance(model.model.blocks[2], StagePlaceholder)
    assert torch.equal(model.model.token_embedding.weight, whole.model.token_embedding.weight)


def test_the_input_is_what_is_plain_or_what_the_module_says():
    x = torch.zeros(1)
    assert pipeline_input(nn.Module(), x) is x
    assert pipeline_input(nn.Module(), [x, 1]) is x
    assert pipeline_input(nn.Module(), {"labels": 1, "input_ids": x}) is x
    with pytest.raises(MisconfigurationException, match="of a batch of type 'dict'.*def pipeline_input"):
        pipeline_input(nn.Module(), {"image": x})


class Logs(PipelinedMLP):
    def pipeline_loss(self, output, batch):
        self.log("inner", 1.0)
        return super().pipeline_loss(output, batch)


class UsesAnotherStage(PipelinedMLP):
    def training_step(self, batch, batch_idx):
        x = batch[0]
        for layer in self.layers:
            x = layer(x)
        return x.sum()


class Text(TensorDataset):
    def __getitem__(self, index):
        return {"x": "text"}


REFUSED = {
    "an odd number of ranks": (
        lambda: fit(PipelinedMLP(), PipelineParallelStrategy(3), 2),
        r"PipelineParallelStrategy\(stages=3\) needs a multiple of 3 ranks, and the Trainer has 2",
    ),
    "torch's own scaler": (
        lambda: fit(
            PipelinedMLP(),
            PipelineParallelStrategy(),
            2,
            plugin=MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu")),
        ),
        "stages would skip different steps.*AutocastPrecision",
    ),
    "copies of the model": (
        lambda: fit(PipelinedMLP(), PipelineParallelStrategy(), 2, callbacks=[StochasticWeightAveraging(0.1)]),
        "cannot be used with StochasticWeightAveraging, which copies the model before it is split",
    ),
    "SyncBatchNorm": (
        lambda: fit(PipelinedMLP(), PipelineParallelStrategy(), 2, sync_batchnorm=True),
        "sync_batchnorm=True.*GroupNorm",
    ),
    "logging in the loss": (
        lambda: fit(Logs(), PipelineParallelStrategy(), 2),
        "self.log was called inside of a layer or of pipeline_loss.*beside 'loss'",
    ),
    "a forward by hand": (
        lambda: fit(UsesAnotherStage(), PipelineParallelStrategy(), 2),
        r"layers\.\d is on stage \d of the pipeline.*pipelined_loss",
    ),
    "batches without rows": (
        lambda: fit(
            PipelinedMLP(), PipelineParallelStrategy(), 2, train=DataLoader(Text(torch.zeros(4)), batch_size=None)
        ),
        "PipelineParallelStrategy cannot split a batch of type 'dict'.*one row for each sample",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_with_what_to_do(case):
    """Promise 1."""
    run, says = REFUSED[case]

    def rank(_):
        try:
            run()
        except Exception as error:
            # The stage without the fault may only see that the other one has gone.
            chain = [error]
            while chain[-1].__cause__ is not None:
                chain.append(chain[-1].__cause__)
            return " <- ".join(str(link) for link in chain)
        return "nothing was raised"

    assert any(re.search(says, told, re.DOTALL) for told in run_ranks(rank, 2))


@pytest.mark.full
def test_a_split_model_is_not_split_again():
    def rank(_):
        module = PipelinedMLP()
        fit(module, PipelineParallelStrategy(), 2, max_epochs=1)
        fit(module, PipelineParallelStrategy(), 2, max_epochs=1)  # the same stages go on
        with pytest.raises(MisconfigurationException, match="split into 2 stages by an earlier run, and this"):
            fit(module, PipelineParallelStrategy(1), 2)
        with pytest.raises(
            MisconfigurationException, match=r"split before \['layers\.\d'\] by an earlier run.*layers\.4"
        ):
            fit(module, PipelineParallelStrategy(split_points=["layers.4"]), 2)
        return len(module.train_losses)

    assert run_ranks(rank, 2) == [6, 6]


def test_its_name_is_known():
    from lightning.pytorch.strategies import StrategyRegistry

    assert isinstance(StrategyRegistry.get("mp_pipeline"), PipelineParallelStrategy)
    trainer = pl.Trainer(strategy="mp_pipeline", accelerator="cpu", devices=2, logger=False)
    assert isinstance(trainer.strategy, PipelineParallelStrategy)
    assert trainer.strategy.stages is None


def test_each_stage_says_what_it_holds_and_how_long_it_is_idle():
    model = PipelinedGPT()
    split = split_model(model, read_layers(model), [0, 2], 1)
    told = description(split, microbatches=3, replicas=2, schedule="1f1b")
    assert "2 stages, 2 copies of the model. stage 0: model.token_embedding to model.blocks.0, 3,744 parameters" in told
    assert "stage 1: model.blocks.1 to model.head, 6,736 parameters" in told
    assert "With 3 microbatches per batch stages of equal work are idle 25.0% of a step (1f1b" in told


def test_a_module_needs_no_trainer():
    module = PipelinedMLP()
    [batch] = labelled(4)
    assert pipelined_loss(module, batch).requires_grad


class Unused(PipelinedMLP):
    def __init__(self):
        super().__init__()
        self.layers[4].append(nn.Bilinear(2, 2, 2))

    def pipeline_layers(self):
        return [*self.layers[:4], PipelineLayer(lambda hidden, batch: self.layers[4][0](hidden), self.layers[4])]


class OtherNames(PipelinedMLP):
    """Values of evaluation may have names of their own; within a loop they stay."""

    def pipeline_loss(self, output, batch):
        loss = super().pipeline_loss(output, batch)
        late = self.training and len(self.train_losses) == 1
        return {"loss": loss} | ({} if self.training else {"error": loss}) | ({"late": loss} if late else {})


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "devices", "says"),
    [
        (Unused, 4, r"layers\.4\.2\.weight, layers\.4\.2\.bias got no gradient.*requires_grad_\(False\)"),
        (OtherNames, 2, r"pipeline_loss returned \['loss', 'late'\], and \['loss'\] the first time"),
    ],
)
def test_what_would_let_stages_wait_for_each_other_is_refused(model, devices, says):
    def rank(_):
        fit(model(), PipelineParallelStrategy(2), devices, max_epochs=1, limit_val_batches=1, val_check_interval=1)

    with pytest.raises(RankError, match=f"(?s){says}"):
        run_ranks(rank, devices)


def test_layers_of_other_stages_are_freed_one_by_one():
    """No rank needs memory for the whole model."""
    module = PipelinedMLP()
    freed = []

    def count(_):
        freed.append(sum(layer[0].weight.untyped_storage().nbytes() == 4 for layer in layers))

    layers = list(module.layers)
    split_model(module, read_layers(module), [0, 2], 0, materialize=count)
    assert freed == [0, 0, 0, 1, 2, 3]
