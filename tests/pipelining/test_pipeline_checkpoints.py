"""Checkpoints of PipelineParallelStrategy are those of one process; either goes on from the other's."""

from itertools import product

import pytest
import torch
from gloo import run_same_ranks as run_ranks
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from pipelined_models import PipelinedGPT, PipelinedMLP, fit, labelled

from lightning_mp import AutocastPrecision, LossScaler, MasterWeightsPrecision, PipelineParallelStrategy
from lightning_mp.pipelining.checkpoints import OptimizerParts

PLUGINS = {
    "32-true": lambda: None,
    "16-mixed": lambda: AutocastPrecision("16-mixed", scaler=LossScaler(init_scale=2**12, growth_interval=2)),
    "bf16-true": lambda: MasterWeightsPrecision("bf16-true"),
}
KINDS = {"one process": ("ddp", 1), "two stages": (None, 2), "three stages": (None, 3)}


def leg(model, kind, precision, path, ckpt_path=None, **trainer_args):
    """Weights and optimizer after a fit, in files as Lightning writes them."""
    strategy, devices = KINDS[kind]
    module = model(torch.optim.AdamW, lr=1e-2)
    trainer = fit(
        module,
        strategy or PipelineParallelStrategy(microbatches=4),
        devices,
        plugin=PLUGINS[precision](),
        ckpt_path=ckpt_path,
        **trainer_args,
    )
    trainer.save_checkpoint(path)
    return module.train_losses


def run(model, kind, *arguments, **trainer_args):
    return run_ranks(lambda _: leg(model, kind, *arguments, **trainer_args), KINDS[kind][1])[0]


def loaded(path):
    return torch.load(path, weights_only=False)


MODELS = {model.__name__: model for model in (PipelinedGPT, PipelinedMLP)}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Of every model and precision: of a run without a stop, and of one that is resumed in other processes."""
    folder = tmp_path_factory.mktemp("checkpoints")
    cases = list(product(MODELS, PLUGINS))

    def straight(_):
        for model, precision in cases:
            for end, epochs in (("whole", 3), ("half", 2)):
                leg(MODELS[model], "two stages", precision, folder / f"{model} {precision} {end}", max_epochs=epochs)

    def resume(_):
        for model, precision in cases:
            half, resumed = (folder / f"{model} {precision} {end}" for end in ("half", "resumed"))
            leg(MODELS[model], "two stages", precision, resumed, str(half), max_epochs=3)

    run_ranks(straight, 2, timeout_seconds=240)
    run_ranks(resume, 2, timeout_seconds=240)
    return folder


@pytest.mark.full
@pytest.mark.timeout(500)
@pytest.mark.parametrize("precision", PLUGINS)
@pytest.mark.parametrize("model", MODELS)
def test_a_resumed_pipeline_ends_as_one_that_was_not_stopped(model, precision, checkpoints):
    """Promise 6, to the bit: weights, both moments, masters, scale."""
    whole, resumed = (loaded(checkpoints / f"{model} {precision} {end}") for end in ("whole", "resumed"))
    assert whole["global_step"] == resumed["global_step"] == 9
    for name, value in whole["state_dict"].items():
        assert torch.equal(resumed["state_dict"][name], value), name
    for number, of_parameter in whole["optimizer_states"][0]["state"].items():
        for name, value in of_parameter.items():
            assert torch.equal(resumed["optimizer_states"][0]["state"][number][name], value), (number, name)
    for key in ("AutocastPrecision", "MixedPrecision"):
        assert whole.get(key) == resumed.get(key)


@pytest.mark.full
@pytest.mark.parametrize("model", [PipelinedGPT, PipelinedMLP])
def test_a_checkpoint_is_laid_out_as_that_of_one_process(model, tmp_path):
    run(model, "one process", "32-true", tmp_path / "one.ckpt", max_epochs=1)
    run(model, "three stages", "32-true", tmp_path / "three.ckpt", max_epochs=1)
    one, three = loaded(tmp_path / "one.ckpt"), loaded(tmp_path / "three.ckpt")
    assert list(three["state_dict"]) == list(one["state_dict"])
    ours, theirs = three["optimizer_states"][0], one["optimizer_states"][0]
    assert [group["params"] for group in ours["param_groups"]] == [group["params"] for group in theirs["param_groups"]]
    assert sorted(ours["state"]) == sorted(theirs["state"])
    for number, of_parameter in theirs["state"].items():
        for name, value in of_parameter.items():
            torch.testing.assert_close(ours["state"][number][name], value, rtol=1e-3, atol=1e-6)
    model().load_state_dict(three["state_dict"])  # names and shapes of the whole model


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param("one process", "three stages", marks=pytest.mark.full),
        pytest.param("three stages", "one process", marks=pytest.mark.full),
        pytest.param("three stages", "two stages", marks=pytest.mark.full),
    ],
)
def test_another_number_of_stages_goes_on_from_a_checkpoint(before, after, tmp_path):
    path = tmp_path / "before.ckpt"
    first = run(PipelinedGPT, before, "32-true", path, max_epochs=1)
    resumed = run(PipelinedGPT, after, "32-true", tmp_path / "after.ckpt", str(path), max_epochs=2)
    wanted = run(PipelinedGPT, before, "32-true", tmp_path / "wanted.ckpt", max_epochs=2)
    assert first + resumed == pytest.approx(wanted, rel=1e-4)


@pytest.mark.full
def test_the_epoch_whose_last_batch_was_saved_is_ended_by_the_resumed_run(tmp_path):
    """D59: validated, too; with the strategy alone, and no callback that sees to it."""

    class SavesAfterTheLastBatch(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == trainer.num_training_batches - 1:
                trainer.save_checkpoint(tmp_path / "last.ckpt")

    def train(**trainer_args):
        module = PipelinedMLP()
        trainer = fit(module, PipelineParallelStrategy(microbatches=4), 2, **trainer_args)
        return module.train_losses, module.val_losses, trainer.current_epoch

    def run_all(rank):
        first = train(max_epochs=1, callbacks=[SavesAfterTheLastBatch()], limit_val_batches=0)
        resumed = train(max_epochs=3, ckpt_path=tmp_path / "last.ckpt")
        return first, resumed, train(max_epochs=3)

    (first, *_), resumed, straight = run_ranks(run_all, 2)[0]
    assert (first + resumed[0], *resumed[1:]) == straight


@pytest.mark.full
def test_the_best_checkpoint_is_loaded_for_a_test(tmp_path):
    def rank(_):
        module = PipelinedMLP()
        saver = ModelCheckpoint(tmp_path, monitor="val_loss")
        trainer = fit(module, PipelineParallelStrategy(), 2, callbacks=[saver], enable_checkpointing=True)

        before = trainer.callback_metrics["val_loss"]
        after = trainer.validate(module, labelled(10), ckpt_path="best", verbose=False, weights_only=False)
        return float(before), after[0]["val_loss"], saver.best_model_score

    for before, after, best in run_ranks(rank, 2):
        assert after == pytest.approx(float(best))
        assert before == pytest.approx(float(best))


@pytest.mark.full
def test_names_that_are_missing_are_told_with_the_whole_model_in_mind(tmp_path):
    run(PipelinedMLP, "two stages", "32-true", tmp_path / "a.ckpt", max_epochs=1)
    broken = loaded(tmp_path / "a.ckpt")
    del broken["state_dict"]["layers.4.0.bias"]
    broken["state_dict"]["layers.9.0.bias"] = torch.zeros(1)
    torch.save(broken, tmp_path / "broken.ckpt")

    def rank(_):
        with pytest.raises(RuntimeError, match=r"missing keys \['layers.4.0.bias'\].*\['layers.9.0.bias'\]"):
            fit(
                PipelinedMLP(torch.optim.AdamW, lr=1e-2),
                PipelineParallelStrategy(),
                2,
                ckpt_path=str(tmp_path / "broken.ckpt"),
            )
        return True

    assert run_ranks(rank, 2) == [True, True]


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
