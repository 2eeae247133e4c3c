"""A pipeline where something is unusual: data, layers, optimizers and checkpoints that are legal all the same."""

import pickle
from typing import Any

import pytest
import torch
from cpu_fsdp import CpuFsdp
from gloo import COMPILER, on_ranks
from gloo import run_same_ranks as run_ranks
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from pipelined_models import PipelinedGPT, PipelinedMLP, fit, labelled, losses_of, token_batches
from small_models import Parts
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


@on_ranks(run_ranks, 2)
def test_an_optimizer_over_parameters_of_nobody_is_refused(rank):
    with pytest.raises(MisconfigurationException, match=r"not part of the LightningModule to SGD: \(3,\)"):
        fit(TrainsAStranger(), PipelineParallelStrategy(), 2)


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


def turned(module, x, mask=None):
    """Returns a tensor whose memory is in another order."""
    mask = x > 0 if mask is None else mask
    return torch.tanh(module.linear(x)).t().contiguous().t() * 1, mask.t().contiguous().t()


class TurnedModel(PipelinedMLP):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Parts(turned, linear=lambda: nn.Linear(6, 6)) for _ in range(4))

    def pipeline_loss(self, output, batch):
        return F.mse_loss(output[0] * output[1], batch[1])


@pytest.mark.full
def test_layers_may_return_masks_and_tensors_of_any_layout():
    [wanted] = run_ranks(lambda _: losses_of(TurnedModel(), "ddp", 1, max_epochs=1), 1)
    # Microbatches of several rows: of one row every layout is the same.
    for got in run_ranks(
        lambda _: losses_of(TurnedModel(), PipelineParallelStrategy(microbatches=2), 2, max_epochs=1), 2
    ):
        assert got == pytest.approx(wanted, rel=2e-6)


class Llama(PipelinedMLP):
    """A model of transformers: each block takes positions and mask from its microbatch."""

    def __init__(self):
        super().__init__(torch.optim.AdamW, lr=1e-2)
        from huggingface_models import llama

        del self.layers
        torch.manual_seed(3)
        self.model = llama()

    def pipeline_layers(self):
        model = self.model.model

        def layer(block):
            def run(hidden, batch):
                positions = torch.arange(hidden.shape[1])[None]
                keep = torch.ones(hidden.shape[1], hidden.shape[1], dtype=torch.bool).tril()
                keep = keep & batch["attention_mask"].bool()[:, None, None, :]
                mask = torch.zeros(keep.shape).masked_fill(~keep, torch.finfo(torch.float32).min)
                embeddings = model.rotary_emb(hidden, positions)
                return block(hidden, attention_mask=mask, position_ids=positions, position_embeddings=embeddings)

            return PipelineLayer(run, block)

        return [model.embed_tokens, *map(layer, model.layers), model.norm, self.model.lm_head]

    def pipeline_loss(self, logits, batch):
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())

    def configure_optimizers(self):
        return self.optimizer(self.parameters(), **self.optimizer_args)


class WholeLlama(Llama):
    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.train_losses.append(float(loss.detach()))
        return loss


@pytest.mark.full
def test_a_llama_of_transformers_trains_as_by_its_own_forward():
    from huggingface_models import collated_by_transformers

    def rank(model, strategy, devices):
        module = model()
        loader = collated_by_transformers()
        fit(module, strategy, devices, train=loader, validate=loader, max_epochs=1, limit_train_batches=4)
        return module.train_losses

    [wanted] = run_ranks(lambda _: rank(WholeLlama, "ddp", 1), 1)
    for losses in run_ranks(lambda _: rank(Llama, PipelineParallelStrategy(microbatches=2), 2), 2):
        assert losses == pytest.approx(wanted, rel=1e-5)


class Summed(PipelinedGPT):
    """Divides by a number that the batch brings, as trainers do that accumulate over batches."""

    def pipeline_input(self, batch):
        return batch["ids"]

    def training_step(self, batch, batch_idx):
        loss = pipelined_loss(self, batch)
        self.train_losses.append(float(loss.detach()))
        return loss

    def pipeline_loss(self, output, batch):
        total = F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
        return total / batch["num_items_in_batch"]


def test_a_loss_that_is_divided_by_a_number_of_the_batch_adds_up_over_microbatches():
    def rank(strategy, devices):
        module = Summed()
        batches = [
            {"ids": ids, "labels": labels, "num_items_in_batch": int((labels >= 0).sum())}
            for ids, labels in token_batches(16, 8)
        ]
        loader = DataLoader(batches, batch_size=None)
        fit(module, strategy, devices, train=loader, limit_val_batches=0, max_epochs=1)
        return module.train_losses

    [wanted] = run_ranks(lambda _: rank("ddp", 1), 1)
    for losses in run_ranks(lambda _: rank(PipelineParallelStrategy(microbatches=4), 2), 2):
        assert losses == pytest.approx(wanted, rel=2e-6)


class InSequence(PipelinedMLP):
    """Its layers are modules, not names of modules."""

    def pipeline_layers(self):
        return list(self.layers)


@pytest.mark.full
@pytest.mark.parametrize("model", [InSequence, PipelinedMLP])
def test_layers_run_in_their_wrappers(model):
    """Those of FSDP1 gather weights, those of torch.compile run compiled code."""

    def rank(strategy: Any, devices: int, compiles: bool = False) -> Any:
        module, runs = model(), []

        def backend(graph: Any, examples: Any) -> Any:
            return lambda *inputs: runs.append(1) or graph(*inputs)

        if compiles:
            for index, layer in enumerate(module.layers):
                module.layers[index] = torch.compile(layer, backend=backend)
        return losses_of(module, strategy, devices, max_epochs=1, use_distributed_sampler=False), bool(runs)

    [(wanted, _)] = run_ranks(lambda _: rank("ddp", 1), 1)
    for losses, _ in run_ranks(lambda _: rank(CpuFsdp(auto_wrap_policy={nn.Sequential}), 2), 2):
        assert losses == pytest.approx(wanted, rel=1e-5)
    for losses, is_compiled in run_ranks(
        lambda _: rank(PipelineParallelStrategy(microbatches=4), 2, compiles=True), 2, imports=COMPILER
    ):
        assert losses == pytest.approx(wanted, rel=1e-5)
        assert is_compiled
