"""The pack's callbacks on a pipeline: what they say is about the whole model, and the same on all stages."""

import json
import warnings

import pytest
import torch
from gloo import on_ranks
from gloo import run_same_ranks as run_ranks
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from pipelined_models import PipelinedGPT, PipelinedMLP, fit, token_batches
from torch import nn

import lightning_mp as mp
from lightning_mp.strategies.pipeline import PipelineParallelStrategy


def run(strategy, devices, callbacks, module=PipelinedGPT, **trainer_args):
    """Metrics and losses of each rank."""

    def rank(_):
        model = module(torch.optim.AdamW, lr=1e-3)
        plugin = mp.AutocastPrecision("16-mixed", scaler=mp.LossScaler(init_scale=2**12))
        trainer = fit(
            model,
            strategy(),
            devices,
            plugin=plugin,
            callbacks=callbacks(),
            train=token_batches(32, 8),
            **{"max_epochs": 1, **trainer_args},
        )
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("mp/")}
        return metrics, model.train_losses, trainer.global_step

    return run_ranks(rank, devices)


def both(callbacks, **trainer_args):
    """On one process, and on each of two stages."""
    [wanted] = run(lambda: "ddp", 1, callbacks, **trainer_args)
    return wanted, run(lambda: PipelineParallelStrategy(microbatches=4), 2, callbacks, **trainer_args)


@pytest.mark.full
def test_a_budget_by_parameters_is_that_of_the_whole_model():
    """Each stage would stop at its own budget, and wait for the others."""

    def rank(strategy, devices):
        module, budget = PipelinedGPT(), mp.ChinchillaBudget(tokens_per_parameter=0.05)
        fit(module, strategy, devices, callbacks=[budget], train=token_batches(32, 8), max_epochs=-1)
        return budget.budget_tokens, budget.tokens_spent, module.train_losses

    [wanted] = run_ranks(lambda _: rank("ddp", 1), 1)
    got = run_ranks(lambda _: rank(PipelineParallelStrategy(microbatches=4), 2), 2)
    assert wanted[0] == wanted[1] == round(0.05 * sum(p.numel() for p in PipelinedGPT().parameters()))
    for budget, spent, losses in got:
        assert (budget, spent) == wanted[:2]
        assert losses == pytest.approx(wanted[2], rel=1e-4)


@pytest.mark.full
def test_windows_are_weighted_by_tokens_over_batches_and_microbatches():
    """Promise 4."""
    wanted, got = both(lambda: [mp.AccumulationScheduler({0: 1, 2: 2}, unit="step", weight_by="token")])
    for _, losses, steps in got:
        assert losses == pytest.approx(wanted[1], rel=1e-4)
        assert steps == wanted[2]


@pytest.mark.full
def test_lost_gradients_are_counted_on_all_stages():
    def callbacks():
        return [mp.UnderflowMonitor(every_n_steps=1, scale=1.0)]

    wanted, got = both(callbacks)
    for metrics, _, _ in got:
        assert metrics == got[0][0]
        # A stage does not know which gradients never were in 16 bit, so it judges more of them.
        assert 0 <= wanted[0]["mp/headroom_doublings"] - metrics["mp/headroom_doublings"] <= 1
        for name in ("mp/underflow_fraction", "mp/subnormal_fraction", "mp/zero_fraction"):
            assert metrics[name] == pytest.approx(wanted[0][name], abs=2e-3)


@pytest.mark.full
@pytest.mark.parametrize("convention", ["exact", "6N"])
def test_operations_are_those_of_the_whole_model_over_all_stages(convention):
    """The first microbatch goes through once more to show its shape, and does not count."""

    def work(strategy, devices):
        def rank(_):
            monitor = mp.MFUMonitor(peak_flops=1e9, flops_per_token=convention)
            fit(PipelinedGPT(), strategy(), devices, callbacks=[monitor], train=token_batches(32, 8, masked=False))
            return monitor.throughput.work

        return run_ranks(rank, devices)

    [wanted] = work(lambda: "ddp", 1)
    for got in work(lambda: PipelineParallelStrategy(microbatches=4), 2):
        assert got.model_flops_per_token == wanted.model_flops_per_token > 0
        assert got.peak_flops_per_second == 2 * wanted.peak_flops_per_second


@pytest.mark.full
@pytest.mark.parametrize("pattern", ["Block", "model.blocks.2"])
def test_activations_are_recomputed_on_the_stages_that_have_the_modules(pattern):
    """A stage without any does not complain."""
    wanted, got = both(lambda: [mp.ActivationCheckpointing(pattern)])
    for _, losses, _ in got:
        assert losses == pytest.approx(wanted[1], rel=1e-4)


class Explodes(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * 1e30 if 10 < self.calls < 14 else x


class Exploding(PipelinedMLP):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.layers[1].append(Explodes())


@pytest.mark.full
def test_the_post_mortem_names_parameters_of_all_stages(tmp_path):
    def rank(_):
        callback = mp.OverflowPostMortem(dirpath=tmp_path)
        plugin = mp.AutocastPrecision("16-mixed", scaler=mp.LossScaler(init_scale=2**12))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # the report
            fit(Exploding(), PipelineParallelStrategy(microbatches=4), 2, plugin=plugin, callbacks=[callback])
        return [report.parameters for report in callback.reports]

    first, second = run_ranks(rank, 2)
    assert first == second
    named = first[0]
    assert {name.split(".")[1] for name in named} == {"0", "1", "2", "3", "4"}
    written = [json.loads(path.read_text()) for path in tmp_path.iterdir()]
    assert len(written) == len(first)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("callback", "says"),
    [
        (lambda: mp.MicroBatchOnOOM(), "works on a single device and with DDP, not with PipelineParallelStrategy"),
        (lambda: mp.GradientNoiseScale(), "GradientNoiseScale cannot be used with PipelineParallelStrategy"),
        (lambda: mp.OverflowPostMortem(replay=True), "again with PipelineParallelStrategy, whose stages run"),
    ],
)
@on_ranks(run_ranks, 2)
def test_callbacks_that_look_at_one_rank_are_refused(rank, callback, says):
    with pytest.raises(MisconfigurationException, match=says):
        fit(PipelinedMLP(), PipelineParallelStrategy(), 2, callbacks=[callback()])
