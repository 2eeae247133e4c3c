"""Precision on a pipeline: rules hold by name on all stages, fp8 is chosen in the whole model, fp32 stays fp32."""

import pytest
import torch
from gloo import FLOAT8, on_ranks
from gloo import run_same_ranks as run_ranks
from lightning.pytorch.plugins.precision import MixedPrecision
from pipelined_models import PipelinedGPT, PipelinedMLP, fit, losses_of
from small_models import Parts
from torch import nn

from lightning_mp import AutocastPrecision, Float8Precision, PipelineParallelStrategy, PrecisionAudit, PrecisionPolicy

RULES = [("*.head", "fp32"), ("model.blocks.0.mlp", "fp32"), *PrecisionPolicy.default().rules]


@pytest.mark.full
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


@on_ranks(run_ranks, 2)
def test_a_rule_that_fits_no_stage_is_refused(rank):
    plugin = AutocastPrecision("bf16-mixed", policy={"model.blocks.7": "fp32"})
    with pytest.raises(ValueError, match=r"'model\.blocks\.7': fp32, matches none of the model's"):
        fit(PipelinedGPT(), PipelineParallelStrategy(), 2, plugin=plugin)


@pytest.mark.full
def test_fp8_layers_are_chosen_in_the_whole_model():
    """The first and the last Linear are those of the model, not of each stage; what is skipped may be elsewhere."""
    pytest.importorskip("torchao")

    def rank(strategy, devices):
        plugin = Float8Precision(emulate=True, skip_small=False, skip=["model.blocks.0.mlp"])
        module = PipelinedGPT()
        fit(module, strategy, devices, plugin=plugin, max_epochs=1, limit_train_batches=1, limit_val_batches=0)
        left = [name for name, part in module.named_modules() if "Float8" in type(part).__name__]
        return module.train_losses, [(layer.name, layer.skipped_because) for layer in plugin.layers], left

    [wanted] = run_ranks(lambda _: rank("ddp", 1), 1, imports=FLOAT8)
    assert wanted[2] == []
    for losses, layers, left in run_ranks(
        lambda _: rank(PipelineParallelStrategy(microbatches=1), 2), 2, imports=FLOAT8
    ):
        assert layers == wanted[1]
        assert losses == pytest.approx(wanted[0], rel=2e-2)
        assert left == []


def without_autocast(module, x):
    with torch.autocast("cpu", enabled=False):
        return torch.tanh(module.linear(x.float()))


class FullPrecision(PipelinedMLP):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Parts(without_autocast, linear=lambda: nn.Linear(6, 6)) for _ in range(4))


@pytest.mark.full
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
