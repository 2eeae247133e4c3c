"""What a run of PipelineParallelStrategy does besides training as one process: overflows, odd batches, other loops."""

import itertools
import os

import lightning.pytorch as pl
import pytest
import torch
from gloo import on_ranks
from gloo import run_same_ranks as run_ranks
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from pipelined_models import PipelinedGPT, PipelinedMLP, fit, labelled, losses_of, token_batches
from small_models import Outcomes, at, plant_inf
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_mp import AutocastPrecision, LossScaler, OverflowMonitor, PipelineParallelStrategy
from lightning_mp.pipelining import pipelined_loss, pipelined_output
from lightning_mp.pipelining.microbatches import batch_digest


@pytest.mark.full
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("ranks", "stages"), [(2, 2), (4, 2)])
def test_all_stages_skip_when_one_rank_overflows(ranks, stages, fused):
    """Promise 3: whichever rank it is, the step is skipped by all and the scale falls for all."""

    def rank(_, planted):
        module = PipelinedMLP(torch.optim.AdamW, lr=1e-2, fused=fused)
        outcomes = Outcomes()
        plugin = AutocastPrecision("16-mixed", scaler=LossScaler(init_scale=1024.0))
        callbacks = [at(plant_inf(), "on_after_backward", rank=planted, step=1), outcomes]
        fit(module, PipelineParallelStrategy(stages, 4), ranks, plugin=plugin, callbacks=callbacks, max_epochs=1)
        seen = [(bool(outcome.skipped), float(outcome.loss_scale)) for outcome in outcomes.seen]
        return seen, all(bool(p.isfinite().all()) for p in module.parameters())

    for planted in range(0, ranks, ranks - 1):
        results = run_ranks(lambda r, planted=planted: rank(r, planted), ranks)
        assert all(finite for _, finite in results)
        for outcomes, _ in results:
            assert [skipped for skipped, _ in outcomes] == [False, True, *[False] * (len(outcomes) - 2)]
            assert outcomes == results[0][0]


@pytest.mark.full
def test_a_batch_is_the_same_in_any_number_of_microbatches():
    """Also in one that does not divide it, and when rows have different numbers of labels, or none at all."""

    def losses_by_microbatches(_):
        for microbatches in (1, 3, 20):
            module = PipelinedGPT()
            strategy = PipelineParallelStrategy(microbatches=microbatches)
            fit(module, strategy, 2, train=token_batches(14, 7), max_epochs=1)
            yield module.train_losses, module.val_losses

    [(wanted, wanted_val)] = run_ranks(lambda _: one_process(), 1)
    for losses, val_losses in run_ranks(lambda rank: list(losses_by_microbatches(rank)), 2)[0]:
        assert losses == pytest.approx(wanted, rel=2e-6)
        assert val_losses == pytest.approx(wanted_val, rel=2e-6)


def one_process():
    module = PipelinedGPT()
    fit(module, "ddp", 1, train=token_batches(14, 7), max_epochs=1)
    return module.train_losses, module.val_losses


@pytest.mark.full
def test_sequences_of_changing_length_get_a_schedule_each():
    lengths = [8, 5, 8, 3, 5]
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(0, 32, (2, 4, n), generator=generator) for n in lengths]

    def rank(_, strategy, devices):
        module = PipelinedGPT()
        loader = DataLoader([(ids[0], ids[1]) for ids in batches], batch_size=None)
        fit(module, strategy(), devices, train=loader, max_epochs=1)
        return module.train_losses

    [wanted] = run_ranks(lambda r: rank(r, lambda: "ddp", 1), 1)
    got = run_ranks(lambda r: rank(r, PipelineParallelStrategy, 2), 2)
    assert got[0] == pytest.approx(wanted, rel=2e-6)


def test_predictions_of_all_samples_are_on_all_stages():
    def rank(_, strategy, devices):
        module = PipelinedMLP()
        trainer = pl.Trainer(
            accelerator="cpu", devices=devices, strategy=strategy(), logger=False, enable_progress_bar=False
        )
        return trainer.predict(module, labelled(10))

    [wanted] = run_ranks(lambda r: rank(r, lambda: "ddp", 1), 1)
    for got in run_ranks(lambda r: rank(r, lambda: PipelineParallelStrategy(microbatches=3), 2), 2):
        torch.testing.assert_close(got, wanted)


class Manual(PipelinedMLP):
    """Two losses in a step, two backwards and one step of the optimizer."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for _ in range(2):
            loss = pipelined_loss(self, batch)
            self.manual_backward(0.5 * loss)
        self.clip_gradients(optimizer, 0.2, "norm")
        optimizer.step()
        self.train_losses.append(float(loss.detach()))


@pytest.mark.full
@pytest.mark.parametrize("devices", [2, 4])
def test_manual_optimization(devices):
    def rank(_, strategy, devices):
        module = Manual()
        fit(module, strategy(), devices, max_epochs=1, plugin=AutocastPrecision("bf16-mixed"))
        return module.train_losses

    wanted = run_ranks(lambda r: rank(r, lambda: "ddp", devices // 2), devices // 2)
    got = run_ranks(lambda r: rank(r, lambda: PipelineParallelStrategy(2), devices), devices)
    assert got[0] == pytest.approx(wanted[0], rel=5e-3)


class Frozen(PipelinedMLP):
    """The first two layers do not train, from the second epoch on the second one does."""

    def __init__(self):
        super().__init__()
        self.layers[0].requires_grad_(False)
        self.layers[1].requires_grad_(False)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_epoch_start(self):
        if self.current_epoch == 1 and any(True for _ in self.layers[1].parameters()):
            self.layers[1].requires_grad_(True)


@pytest.mark.parametrize(
    "limit_val_batches", [0, pytest.param(1.0, marks=pytest.mark.full)], ids=["no validation", "a validation between"]
)
def test_frozen_layers_may_thaw_at_an_epoch(limit_val_batches):
    arguments = {"limit_val_batches": limit_val_batches, "max_epochs": 2}
    [wanted] = run_ranks(lambda _: losses_of(Frozen(), "ddp", 1, **arguments), 1)
    strategy = {"split_points": ["layers.2"]}
    got = run_ranks(lambda _: losses_of(Frozen(), PipelineParallelStrategy(**strategy), 2, **arguments), 2)
    assert got[0] == pytest.approx(wanted, rel=2e-6)
    assert got[1] == got[0]


class Normed(PipelinedMLP):
    """Running statistics, which see each microbatch once."""

    def __init__(self):
        super().__init__()
        for layer in self.layers:
            layer.append(nn.BatchNorm1d(6))


def test_the_pass_that_finds_out_shapes_leaves_no_trace_in_running_statistics():
    def rank(_):
        module = Normed()
        fit(module, PipelineParallelStrategy(microbatches=2), 2, train=labelled(16), max_epochs=1)
        return [int(m.num_batches_tracked) for m in module.modules() if isinstance(m, nn.BatchNorm1d)]

    tracked = run_ranks(rank, 2)
    assert set(tracked[0] + tracked[1]) == {4}  # 2 batches of 2 microbatches


def test_a_model_without_memory_comes_to_life_stage_by_stage():
    def rank(_, empty):
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=PipelineParallelStrategy(),
            logger=False,
            enable_progress_bar=False,
            max_epochs=1,
            enable_checkpointing=False,
            enable_model_summary=False,
        )
        with trainer.init_module(empty_init=empty):
            module = PipelinedMLP()
        assert module.layers[0][0].weight.is_meta == empty
        trainer.fit(module, labelled(8), labelled(8))
        return module.train_losses, sum(p.numel() for p in module.parameters())

    (losses, own), (_, other) = run_ranks(lambda r: rank(r, True), 2)
    assert own + other == sum(p.numel() for p in PipelinedMLP().parameters())
    assert torch.isfinite(torch.tensor(losses)).all()


class Different(TensorDataset):
    """Gives every rank other data."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + int(torch.distributed.get_rank()), y


@on_ranks(run_ranks, 2)
def test_stages_with_different_data_are_refused(rank):
    loader = DataLoader(Different(torch.zeros(8, 6), torch.zeros(8, 6)), batch_size=4)
    with pytest.raises(MisconfigurationException, match="stages 0 and 1 of one pipeline got different batches"):
        fit(PipelinedMLP(), PipelineParallelStrategy(), 2, train=loader)


@pytest.mark.full
def test_the_scale_and_the_skips_are_monitored():
    def rank(_):
        module = PipelinedMLP()
        monitor = OverflowMonitor()
        plugin = AutocastPrecision("16-mixed", scaler=LossScaler(init_scale=2.0**19))
        trainer = fit(module, PipelineParallelStrategy(), 2, plugin=plugin, callbacks=[monitor])
        return {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("mp/")}

    first, second = run_ranks(rank, 2)
    assert first.pop("mp/grad_norm") == pytest.approx(second.pop("mp/grad_norm"))
    assert first == second
    assert first["mp/skipped_steps"] == 2  # of 6; of more the monitor warns


def test_on_one_device_the_same_module_runs_its_layers():
    module = PipelinedMLP()
    x = torch.randn(3, 6)
    wanted = x
    for layer in module.layers:
        wanted = layer(wanted)
    assert torch.equal(pipelined_output(module, (x, x)), wanted)
    assert torch.equal(pipelined_loss(module, (x, x)), nn.functional.mse_loss(wanted, x))


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


@pytest.mark.quick_cases(1)
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


@pytest.mark.full
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


def test_digests_tell_order_and_shape():
    batch = torch.arange(6.0).view(2, 3)
    assert batch_digest(batch) == batch_digest([batch.clone()])
    assert batch_digest(batch) != batch_digest(batch.flip(0))
    assert batch_digest(torch.zeros(2, 3)) != batch_digest(torch.zeros(3, 2))


@pytest.mark.full
@on_ranks(run_ranks, 2)
def test_batches_are_compared_at_the_start_of_every_evaluation(number):
    """Training data may be the same on all stages, and validation data not."""
    x = torch.full((8, 6), float(number))
    other = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x), batch_size=4)
    with pytest.raises(MisconfigurationException, match=r"stages 0 and 1 of one pipeline got different batches"):
        fit(PipelinedMLP(), PipelineParallelStrategy(), 2, validate=other)
