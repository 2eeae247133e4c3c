"""A pipeline where something is unusual: data, layers, optimizers and checkpoints that are legal all the same."""

import pickle
from typing import Any

import pytest
import torch
from gloo import run_ranks
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from pipelined_models import PipelinedGPT, PipelinedMLP, fit, labelled, token_batches
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_mp import PipelineParallelStrategy
from lightning_mp.pipelining import PipelineLayer, pipelined_loss, pipelined_output


class LabelsSometimes(PipelinedGPT):
    """Validates on batches without labels, or trains on them."""

    def pipeline_input(self, batch):
        return batch["input_ids"]

    def pipeline_loss(self, output, batch):
        if "labels" not in batch:
            return output.float().square().mean()
        return F.cross_entropy(output.float().flatten(0, 1), batch["labels"].flatten())

    def validation_step(self, batch, batch_idx):
        self.val_losses.append(float(pipelined_loss(self, batch)))


@pytest.mark.full
@pytest.mark.parametrize("trains_on_labels", [True, False])
def test_training_and_validation_may_have_batches_of_different_kinds(trains_on_labels):
    """Microbatches are weighted by tokens where there are labels, whichever loop was the first."""

    def rank(strategy: Any, devices: int) -> Any:
        batches = [{"input_ids": ids, "labels": labels} for ids, labels in token_batches(16, 8)]
        without = [{"input_ids": batch["input_ids"]} for batch in batches]
        train, validate = (batches, without) if trains_on_labels else (without, batches)
        module = LabelsSometimes(torch.optim.SGD, lr=0.1)
        loaders = {"train": DataLoader(train, batch_size=None), "validate": DataLoader(validate, batch_size=None)}
        fit(module, strategy, devices, val_check_interval=1, max_epochs=1, **loaders)
        return module.train_losses + module.val_losses

    wanted = run_ranks(lambda _: rank("ddp", 1), 1)[0]
    for losses in run_ranks(lambda _: rank(PipelineParallelStrategy(microbatches=4), 2), 2):
        assert losses == pytest.approx(wanted, rel=1e-5)


class EndsInCode(PipelinedMLP):
    """All modules are in one of two stages."""

    def pipeline_layers(self):
        return [*self.layers, PipelineLayer(lambda hidden, batch: 2 * hidden)]


def test_a_stage_that_holds_all_modules_is_not_split_again():
    """The others would not take part in it, and wait."""

    def rank(_):
        module = EndsInCode()
        for _ in range(2):
            fit(module, PipelineParallelStrategy(split_points=["5"]), 2, max_epochs=1, limit_val_batches=0)
        return module.train_losses

    first, second = run_ranks(rank, 2)
    assert first == second
    assert len(first) == 6


class TrainsAStranger(PipelinedMLP):
    def configure_optimizers(self):
        return torch.optim.SGD([*self.parameters(), nn.Parameter(torch.ones(3))], lr=0.1)


def test_an_optimizer_over_parameters_of_nobody_is_refused():
    def rank(_):
        with pytest.raises(MisconfigurationException, match=r"not part of the LightningModule to SGD: \(3,\)"):
            fit(TrainsAStranger(), PipelineParallelStrategy(), 2)

    run_ranks(rank, 2)


class OwnFormat(TorchCheckpointIO):
    """Four letters, and a pickle."""

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        with open(path, "wb") as file:
            file.write(b"mine" + pickle.dumps(checkpoint))

    def load_checkpoint(self, path, map_location=None, weights_only=None):
        with open(path, "rb") as file:
            assert file.read(4) == b"mine"
            return pickle.load(file)


@pytest.mark.full
def test_a_checkpoint_is_read_by_the_plugin_that_wrote_it(tmp_path):
    def rank(_):
        def strategy():
            return PipelineParallelStrategy(checkpoint_io=OwnFormat())

        straight = PipelinedMLP()
        fit(straight, strategy(), 2, max_epochs=2)
        fit(PipelinedMLP(), strategy(), 2, max_epochs=1).save_checkpoint(tmp_path / "x")
        resumed = PipelinedMLP()
        fit(resumed, strategy(), 2, max_epochs=2, ckpt_path=tmp_path / "x")
        return resumed.train_losses, straight.train_losses[3:]

    for resumed, wanted in run_ranks(rank, 2):
        assert resumed == wanted


def test_outputs_have_no_gradients_on_one_device_either():
    assert not pipelined_output(PipelinedMLP(), next(iter(labelled()))).requires_grad


@pytest.mark.parametrize("split_points", [[1], 5, [None]])
def test_splits_are_names(split_points):
    with pytest.raises(ValueError, match=r"PipelineParallelStrategy\(split_points=.*names of layers"):
        PipelineParallelStrategy(2, split_points=split_points)
