"""What a pipeline owes to projects of others: rules by name on all stages, dropout, odd layers, odd optimizers."""

import itertools
import os

import pytest
import torch
from gloo import RankError, run_ranks
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from pipelined_models import PipelinedGPT, PipelinedMLP, fit, labelled, losses_of, token_batches
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_mp import AutocastPrecision, Float8Precision, PipelineParallelStrategy, PrecisionAudit, PrecisionPolicy
from lightning_mp.pipelining import PipelineLayer, pipelined_loss, pipelined_output
from lightning_mp.pipelining.checkpoints import OptimizerParts
from lightning_mp.pipelining.layers import read_layers
from lightning_mp.pipelining.microbatches import batch_digest
from lightning_mp.pipelining.partition import split_model

RULES = [("*.head", "fp32"), ("model.blocks.0.mlp", "fp32"), *PrecisionPolicy.default().rules]


def test_rules_about_modules_of_any_stage_hold_and_the_audit_shows_all_stages():
    """Each stage has a part of the modules only, and a rule about the others is no rule about nothing."""

    def rank(strategy, devices):
        module, audit = PipelinedGPT(), PrecisionAudit(batch=0)
        plugin = AutocastPrecision("bf16-mixed", policy=RULES)
        fit(module, strategy, devices, plugin=plugin, callbacks=[audit], max_epochs=1)
        # The step itself has no outputs on stages, and the model is called by nobody.
        modules = [row for row in audit.records.modules if row.name not in ("", "model")]
        rows = [(row.name, row.class_name, row.weights, row.outputs, row.weight_gradients) for row in modules]
        products = {(row.module, row.compute) for row in audit.records.operations if row.kind == "matmul"}
        return module.train_losses, rows, products, audit.findings

    [wanted] = run_ranks(lambda _: rank("ddp", 1), 1)
    got = run_ranks(lambda _: rank(PipelineParallelStrategy(microbatches=4), 2), 2)
    assert {("model.head", "fp32"), ("model.blocks.0.mlp.up", "fp32"), ("model.blocks.2.mlp.up", "bf16")} <= wanted[2]
    for losses, rows, products, findings in got:
        assert losses == pytest.approx(wanted[0], rel=4e-3)
        assert rows == wanted[1]
        assert wanted[2] <= products
        assert findings == wanted[3] == ()


def test_a_rule_that_fits_no_stage_is_refused():
    def rank(_):
        plugin = AutocastPrecision("bf16-mixed", policy={"model.blocks.7": "fp32"})
        with pytest.raises(ValueError, match=r"'model\.blocks\.7': fp32, matches none of the model's"):
            fit(PipelinedGPT(), PipelineParallelStrategy(), 2, plugin=plugin)
        return True

    assert run_ranks(rank, 2) == [True, True]


@pytest.mark.full
def test_fp8_layers_are_chosen_in_the_whole_model():
    """The first and the last Linear are those of the model, not of each stage; what is skipped may be elsewhere."""
    pytest.importorskip("torchao")

    def rank(strategy, devices):
        plugin = Float8Precision(emulate=True, skip=["model.blocks.0.mlp"])
        module = PipelinedGPT()
        fit(module, strategy, devices, plugin=plugin, max_epochs=1, limit_train_batches=1, limit_val_batches=0)
        left = [name for name, part in module.named_modules() if "Float8" in type(part).__name__]
        return module.train_losses, [(layer.name, layer.skipped_because) for layer in plugin.layers], left

    [wanted] = run_ranks(lambda _: rank("ddp", 1), 1)
    assert wanted[2] == []
    for losses, layers, left in run_ranks(lambda _: rank(PipelineParallelStrategy(microbatches=1), 2), 2):
        assert layers == wanted[1]
        assert losses == pytest.approx(wanted[0], rel=2e-2)
        assert left == []


class Draws(PipelinedMLP):
    """Notes its dropout masks, and what its steps draw themselves."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)) for _ in range(4))
        self.masks, self.drawn = [], []
        for layer in self.layers:
            layer[1].register_forward_hook(self._note)

    def _note(self, module, args, output):
        if module.training:
            self.masks.append(tuple((output != 0).flatten().tolist()))

    def training_step(self, batch, batch_idx):
        self.drawn.append(float(torch.rand(())))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("devices", [2, 4])
def test_dropout_masks_differ_and_steps_still_draw_the_same(devices):
    """Stages have one seed: their first layers must not drop the same places, nor steps see different noise."""

    def rank(_):
        torch.manual_seed(1)
        module = Draws()
        fit(module, PipelineParallelStrategy(2, 2), devices, train=labelled(16, 8), max_epochs=1)
        return module.masks, module.drawn

    results = run_ranks(rank, devices)
    masks = list(itertools.chain.from_iterable(masks for masks, _ in results))
    assert len(masks) == len(set(masks)) >= 16
    assert all(drawn == results[0][1] for _, drawn in results)
    assert len(set(results[0][1])) == len(results[0][1])


class Turned(nn.Module):
    """Returns a tensor whose memory is in another order."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x, mask=None):
        mask = x > 0 if mask is None else mask
        return torch.tanh(self.linear(x)).t().contiguous().t() * 1, mask.t().contiguous().t()


class TurnedModel(PipelinedMLP):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Turned() for _ in range(4))

    def pipeline_loss(self, output, batch):
        return F.mse_loss(output[0] * output[1], batch[1])


def test_layers_may_return_masks_and_tensors_of_any_layout():
    [wanted] = run_ranks(lambda _: losses_of(TurnedModel(), "ddp", 1, max_epochs=1), 1)
    # Microbatches of several rows: of one row every layout is the same.
    for got in run_ranks(
        lambda _: losses_of(TurnedModel(), PipelineParallelStrategy(microbatches=2), 2, max_epochs=1), 2
    ):
        assert got == pytest.approx(wanted, rel=2e-6)


class TwoBackwards(PipelinedGPT):
    """Different gradients add up in one step, of tied weights too; nothing hides how long they are."""

    def __init__(self):
        super().__init__(torch.optim.SGD, lr=0.1)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for places in (0, 1):
            loss = pipelined_loss(self, (batch[0].roll(places, 1), batch[1]))
            self.manual_backward(loss)
        optimizer.step()
        self.train_losses.append(float(loss.detach()))


@pytest.mark.full
def test_gradients_of_two_backwards_add_up_after_they_were_averaged():
    wanted = run_ranks(lambda _: losses_of(TwoBackwards(), "ddp", 2, max_epochs=1), 2)
    got = run_ranks(lambda _: losses_of(TwoBackwards(), PipelineParallelStrategy(2), 4, max_epochs=1), 4)
    for own, expected in zip(got, wanted * 2, strict=True):
        assert own == pytest.approx(expected, rel=1e-5)


class WithoutAutocast(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return torch.tanh(self.linear(x.float()))


class FullPrecision(PipelinedMLP):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(WithoutAutocast() for _ in range(4))


def test_backwards_run_outside_of_autocast_under_lightnings_own_plugin_too():
    """All stages run their backwards inside of training_step, and fp32 layers must not get products in bf16 there."""

    [wanted] = run_ranks(lambda _: losses_of(FullPrecision(), "ddp", 1, plugin=MixedPrecision("bf16-mixed", "cpu")), 1)
    for got in run_ranks(
        lambda _: losses_of(
            FullPrecision(), PipelineParallelStrategy(microbatches=2), 2, plugin=MixedPrecision("bf16-mixed", "cpu")
        ),
        2,
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


class Looks(PipelinedMLP):
    """Looks at losses and outputs of one batch wherever it likes."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            self.seen.append(float(pipelined_loss(self, batch)))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.seen.append(float(pipelined_output(self, batch).square().mean()))
        self.seen.append(float(pipelined_loss(self, batch)))


def test_losses_and_outputs_of_one_batch_do_not_get_in_each_others_way():
    """Under no_grad after a loop in inference mode, too: what is kept for shapes must serve both."""

    def rank(strategy, devices):
        module = Looks()
        module.register_buffer("of_rank", torch.tensor(float(os.environ["RANK"])))
        trainer = fit(module, strategy, devices, train=labelled(16, 8), validate=labelled(16, 8))
        # What is in no layer starts from rank 0, too; and nothing that was wrapped is left.
        assert module.of_rank == 0
        assert "clip_grad_by_norm" not in vars(trainer.precision_plugin)
        return module.seen, module.train_losses, module.val_losses

    [wanted] = run_ranks(lambda _: rank("ddp", 1), 1)
    for got in run_ranks(lambda _: rank(PipelineParallelStrategy(microbatches=2), 2), 2):
        for ours, theirs in zip(got, wanted, strict=True):
            assert ours == pytest.approx(theirs, rel=2e-6)


@pytest.mark.full
def test_an_optimizer_with_states_from_the_start_goes_on_from_its_checkpoint(tmp_path):
    """Adagrad has its states before the first step, for all parameters that it has seen."""

    def rank(strategy, devices, path, ckpt_path=None, max_epochs=1):
        module = PipelinedMLP(torch.optim.Adagrad, lr=0.1)
        trainer = fit(module, strategy, devices, max_epochs=max_epochs, ckpt_path=ckpt_path)
        held = len(trainer.optimizers[0].state)
        trainer.save_checkpoint(path)
        return module.train_losses, held, sum(1 for _ in module.parameters())

    first, second = tmp_path / "first.ckpt", tmp_path / "second.ckpt"
    [(wanted, *_)] = run_ranks(lambda _: rank("ddp", 1, tmp_path / "one.ckpt", max_epochs=2), 1)
    begun = run_ranks(lambda _: rank(PipelineParallelStrategy(), 2, first), 2)
    gone_on = run_ranks(lambda _: rank(PipelineParallelStrategy(), 2, second, str(first), 2), 2)
    for (losses, held, own), (later, *_) in zip(begun, gone_on, strict=True):
        assert held == own
        assert losses + later == pytest.approx(wanted, rel=1e-5)


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


def test_digests_tell_order_and_shape():
    batch = torch.arange(6.0).view(2, 3)
    assert batch_digest(batch) == batch_digest([batch.clone()])
    assert batch_digest(batch) != batch_digest(batch.flip(0))
    assert batch_digest(torch.zeros(2, 3)) != batch_digest(torch.zeros(3, 2))


def test_layers_of_other_stages_are_freed_one_by_one():
    """No rank needs memory for the whole model."""
    module = PipelinedMLP()
    freed = []

    def count(_):
        freed.append(sum(layer[0].weight.untyped_storage().nbytes() == 4 for layer in layers))

    layers = list(module.layers)
    split_model(module, read_layers(module), [0, 2], 0, bring_to_life=count)
    assert freed == [0, 0, 0, 1, 2, 3]


def test_an_optimizers_part_is_found_by_place_and_its_groups_are_compared():
    parts = OptimizerParts(groups=((0,), (1, 2)), names=("a", "b", "c"), numbers=(2, 0))
    groups = [{"lr": 1.0, "params": ["a"]}, {"lr": 2.0, "params": ["b", "c"]}]
    state = {"state": {"a": {"step": 1}, "c": {"step": 3}}, "param_groups": groups}
    assert parts.own(state) == {
        "state": {0: {"step": 3}, 1: {"step": 1}},
        "param_groups": [{"lr": 1.0, "params": [1]}, {"lr": 2.0, "params": [0]}],
    }
    with pytest.raises(
        ValueError, match=r"groups of \[1\] parameters, and configure_optimizers made groups of \[1, 2\]"
    ):
        parts.own({**state, "param_groups": groups[:1]})


def test_checkpoints_that_cannot_be_loaded_are_refused_with_what_to_do(tmp_path):
    strategy = PipelineParallelStrategy()
    with pytest.raises(MisconfigurationException, match="a folder with shards.*consolidate_checkpoint"):
        strategy.load_checkpoint(tmp_path)
    strategy.optimizers = []
    with pytest.raises(ValueError, match="state of 1 optimizers, and configure_optimizers made 0"):
        strategy.load_optimizer_state_dict({"optimizer_states": [{}]})
