"""A replay leaves no trace, and nothing is paid before a step is skipped."""

import gc
import json
import math
import random
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from gradient_counter import CountGradientTraffic
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from planted_overflows import Planted, TimesInBackward, TimesInForward, numbered_batches
from small_models import Regression, adamw, fit, fused_adamw, loader, quiet_trainer, regression_batches
from torch import nn

from lightning_mp import AutocastPrecision, LossScaler, OverflowMonitor, OverflowPostMortem
from lightning_mp.monitors.diagnostics.overflow.replay import Replay
from lightning_mp.training.optimizer_step.outcome_dispatcher import StepOutcomeDispatcher

pytestmark = pytest.mark.filterwarnings("ignore:Optimizer step:RuntimeWarning")

SCALE = 1024.0


def ours() -> AutocastPrecision:
    return AutocastPrecision("16-mixed", scaler=LossScaler(init_scale=SCALE))


def stock() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=SCALE))


class Stateful(Planted):
    """Draws from every generator, and keeps state of every kind."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls: dict[str, int] = {}
        self.generator = torch.Generator().manual_seed(3)
        self.total = torch.zeros(())
        self.register_buffer("drawn", torch.zeros(3))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        noise = torch.rand(()) + random.random() + np.random.rand() + torch.rand((), generator=self.generator)
        loss = super().training_step(batch, batch_idx) * (1 + 0.1 * noise)
        self.drawn = self.drawn + noise
        self.total += noise
        self.calls[str(batch_idx)] = self.calls.get(str(batch_idx), 0) + 1
        self.last = noise
        self.log("noise", noise, on_step=True, on_epoch=True, batch_size=4)
        return loss


def everything(module: Stateful, trainer: pl.Trainer) -> dict[str, Any]:
    state = {name: value.clone() for name, value in module.state_dict().items()}
    state |= {f"metric {name}": value.clone() for name, value in trainer.callback_metrics.items()}
    state |= {"calls": module.calls, "num_calls": module.num_calls, "losses": module.losses, "total": module.total}
    state |= {"drawn next": (torch.rand(1), random.random(), float(np.random.rand()))}
    state |= {"module's own": torch.rand(1, generator=module.generator), "last": module.last}
    moments = trainer.optimizers[0].state_dict()["state"]
    return state | {f"moments {i} {name}": v for i, group in moments.items() for name, v in group.items()}


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a.nan_to_num(7e7), b.nan_to_num(7e7))
    if isinstance(a, tuple):
        return all(equal(x, y) for x, y in zip(a, b, strict=True))
    return repr(a) == repr(b)


@pytest.mark.filterwarnings("ignore:Gradient accumulation")  # a factor of the loss changes
@pytest.mark.parametrize(
    ("place", "factor"), [(TimesInForward, 1e6), (TimesInBackward, 2e4)], ids=["forward", "backward"]
)
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("optimizer", [adamw, fused_adamw], ids=["unfused", "fused"])
@pytest.mark.parametrize("plugin", [ours, stock])
def test_the_run_goes_on_as_if_there_had_been_no_replay(
    plugin: Any, optimizer: Any, micro_batches: int, place: Any, factor: float, tmp_path: Path
) -> None:
    """Bit-equal: weights, moments, running statistics, counters, random numbers, logged values."""

    def train(callbacks: list[Any]) -> dict[str, Any]:
        pl.seed_everything(5, verbose=False)
        module = Stateful(partial(place, factor=factor), planted=[2, 5], optimizer=optimizer)
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        trainer = quiet_trainer(
            plugins=[plugin()],
            callbacks=[OverflowMonitor(), *callbacks],
            accumulate_grad_batches=micro_batches,
            gradient_clip_val=0.5 if plugin is ours else None,
        )
        trainer.fit(module, loader(numbered_batches(9)))
        return everything(module, trainer)

    post_mortem = OverflowPostMortem(replay=True, dirpath=tmp_path)
    expected, got = train([]), train([post_mortem])
    assert len(post_mortem.reports) == 2
    assert all(report.findings for report in post_mortem.reports)
    assert [name for name in expected if not equal(expected[name], got[name])] == []
    assert expected.keys() == got.keys()


@pytest.mark.parametrize("optimizer", [adamw, fused_adamw], ids=["unfused", "fused"])
@pytest.mark.parametrize("replay", [False, True])
def test_healthy_steps_cost_nothing(replay: bool, optimizer: Any) -> None:
    """No wait, no pass over gradients, no hook on a module or parameter."""

    def count(callbacks: list[Any]) -> Any:
        module = Regression(optimizer)
        counter = CountGradientTraffic(module)
        hooks: set[int] = set()

        class Hooks(pl.Callback):
            def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
                for owner in pl_module.modules():
                    hooks.add(len(owner._forward_hooks) + len(owner._forward_pre_hooks) + len(owner._backward_hooks))
                hooks.update(len(p._backward_hooks or ()) for p in pl_module.parameters())

        fit(module, regression_batches(8), counter, *callbacks, Hooks(), plugin=ours(), accumulate_grad_batches=2)
        return counter.rows, hooks

    rows, hooks = count([])
    assert count([OverflowPostMortem(replay=replay)]) == (rows, hooks)
    assert hooks == {0}


def test_batches_are_let_go() -> None:
    held: list[int] = []

    class Held(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            held.append(sum(len(window) for window in post_mortem._fit.windows.values()))

    post_mortem = OverflowPostMortem(replay=True)
    fit(Regression(fused_adamw), regression_batches(12), post_mortem, Held(), plugin=ours(), accumulate_grad_batches=3)
    # Two windows with a fused optimizer, less what the outcome of the first has let go.
    assert max(held) == 5
    assert post_mortem._fit.windows == {}


@pytest.mark.parametrize("moment", ["checkpoint", "validation", "average", "end"])
def test_an_outcome_that_is_told_out_of_turn_is_replayed_later(moment: str, tmp_path: Path) -> None:
    """With a fused optimizer, checkpoints, averages and the end of the run settle it outside of the next step."""
    module = Planted(partial(TimesInBackward, factor=math.inf), optimizer=fused_adamw)
    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=3, save_on_train_epoch_end=False)
    callbacks: list[Any] = {
        "checkpoint": [checkpoint],
        "validation": [ModelCheckpoint(tmp_path, monitor="val", save_on_train_epoch_end=False)],
        "average": [EMAWeightAveraging()],
        "end": [],
    }[moment]
    arguments: dict[str, Any] = {"enable_checkpointing": bool(callbacks) and moment != "average"}
    if moment == "validation":
        module.validation_step = lambda batch, batch_idx: module.log(
            "val", module.training_step(batch, -1), batch_size=4
        )
        arguments["val_check_interval"] = 3
    post_mortem = OverflowPostMortem(replay=True, dirpath=tmp_path)
    trainer = quiet_trainer(plugins=[ours()], callbacks=[post_mortem, *callbacks], **arguments)
    batches = loader(numbered_batches(3 if moment == "end" else 5))
    trainer.fit(module, batches, val_dataloaders=loader(numbered_batches(1)) if moment == "validation" else None)
    (report,) = post_mortem.reports
    assert (report.step_index, report.note) == (2, "")
    assert report.findings[0].first_overflow.module == "body.1.place"
    assert report.parameters[-1] == "embedding.weight"


def test_an_outcome_that_is_told_inside_of_the_next_window_is_replayed(tmp_path: Path) -> None:
    class Settles(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 4:
                StepOutcomeDispatcher.of(trainer).flush_pending()

    module = Planted(partial(TimesInBackward, factor=math.inf), optimizer=fused_adamw)
    post_mortem = OverflowPostMortem(replay=True, dirpath=tmp_path)
    fit(module, numbered_batches(8), post_mortem, Settles(), plugin=ours(), accumulate_grad_batches=2)
    (report,) = post_mortem.reports
    assert (report.step_index, report.note) == (1, "")
    assert report.findings[0].first_overflow.module == "body.1.place"


@pytest.mark.parametrize("optimizer", [adamw, fused_adamw], ids=["unfused", "fused"])
def test_a_report_names_the_parameters_of_its_own_step(optimizer: Any, tmp_path: Path) -> None:
    """With a stock plugin too, which tells of a fused step when the gradients of the next one are there."""

    class OneByOne(Planted):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            parameter = {1: self.head.bias, 2: self.embedding.weight}.get(batch_idx)
            return loss if parameter is None else loss + (parameter.sum() * 0).sqrt()

    post_mortem = OverflowPostMortem(dirpath=tmp_path)
    trainer = quiet_trainer(plugins=[stock()], callbacks=[OverflowMonitor(), post_mortem])
    trainer.fit(OneByOne(nn.Identity, planted=[], optimizer=optimizer), loader(numbered_batches(4)))
    assert [r.step_index for r in post_mortem.reports] == [1, 2]
    assert post_mortem.reports[0].parameters in (["head.bias"], [])
    assert post_mortem.reports[1].parameters in (["embedding.weight"], [])


def test_no_graph_is_kept_of_a_batch_that_is_over() -> None:
    kept: list[int] = []

    class Graphs(pl.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            tensors = [thing for thing in gc.get_objects() if type(thing) is torch.Tensor]
            kept.append(sum(tensor.grad_fn is not None for tensor in tensors))

    fit(Regression(fused_adamw), regression_batches(4), OverflowPostMortem(replay=True), Graphs(), plugin=ours())
    assert kept == [kept[0]] * 4


def test_the_folder_is_made(tmp_path: Path) -> None:
    post_mortem = OverflowPostMortem(dirpath=tmp_path / "not" / "there")
    fit(Planted(partial(TimesInBackward, factor=math.inf)), numbered_batches(4), post_mortem, plugin=ours())
    assert (tmp_path / "not" / "there" / "overflow_step_2.json").is_file()


def test_an_exception_ends_it_without_a_replay(tmp_path: Path) -> None:
    class Broken(Planted):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                raise KeyError("planted")

    module = Broken(partial(TimesInBackward, factor=math.inf), optimizer=fused_adamw)
    post_mortem = OverflowPostMortem(replay=True, dirpath=tmp_path)
    trainer = quiet_trainer(plugins=[ours()], callbacks=[post_mortem])
    with pytest.raises(KeyError, match="planted"):
        trainer.fit(module, loader(numbered_batches(5)))
    assert [report.findings for report in post_mortem.reports] == [[]]
    assert "the run ended before" in post_mortem.reports[0].note


def test_a_replay_that_cannot_be_made_is_reported_and_the_run_goes_on(tmp_path: Path) -> None:
    class Once(Planted):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.num_calls > batch_idx:
                raise RuntimeError("only once")
            return super().training_step(batch, batch_idx)

    module = Once(partial(TimesInBackward, factor=math.inf))
    post_mortem = OverflowPostMortem(replay=True, dirpath=tmp_path)
    trainer = fit(module, numbered_batches(5), post_mortem, plugin=ours())
    assert "RuntimeError: only once" in post_mortem.reports[0].note
    assert trainer.global_step == 5


def test_a_replay_says_nothing_that_the_module_said_before(tmp_path: Path) -> None:
    class Warns(Planted):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            warnings.warn(f"mine {batch_idx}", UserWarning, stacklevel=1)
            return super().training_step(batch, batch_idx)

    module = Warns(partial(TimesInBackward, factor=math.inf))
    post_mortem = OverflowPostMortem(replay=True, dirpath=tmp_path)
    with pytest.warns(UserWarning, match="mine") as caught:
        fit(module, numbered_batches(4), post_mortem, plugin=ours())
    assert module.num_calls == 4
    assert len(post_mortem.reports[0].findings) == 1
    assert sorted(str(w.message) for w in caught if "mine" in str(w.message)) == [f"mine {i}" for i in range(4)]


def test_gradients_are_on_in_a_replay_wherever_it_is_made() -> None:
    """An outcome may be told inside of an optimizer, where they are off."""
    module = Planted(partial(TimesInForward, factor=1.0))
    with torch.no_grad(), Replay(quiet_trainer(), module, SCALE).state_restored():
        assert torch.is_grad_enabled()


def test_every_fit_has_its_own_number_of_replays(tmp_path: Path) -> None:
    post_mortem = OverflowPostMortem(replay=True, dirpath=tmp_path, max_replays=1)
    for _ in range(2):
        module = Planted(partial(TimesInBackward, factor=math.inf))
        fit(module, numbered_batches(4), post_mortem, plugin=ours())
    assert [len(report.findings) for report in post_mortem.reports] == [1, 1]


def test_reports_lie_beside_the_checkpoints(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=2)
    module = Planted(partial(TimesInForward, factor=1e6))
    trainer = quiet_trainer(
        plugins=[ours()],
        callbacks=[OverflowPostMortem(replay=True), checkpoint],
        enable_checkpointing=True,
        default_root_dir=tmp_path / "root",
    )
    trainer.fit(module, loader(numbered_batches(5)))
    written = json.loads((tmp_path / "kept" / "overflow_step_2.json").read_text())
    assert written["findings"][0]["first_overflow"]["module"] == "body.1.place"
    assert written["findings"][0]["verdict"] == "range"
    assert (written["loss_scale"], written["ranks"]) == (SCALE, [0])
    (text,) = [r.getMessage() for r in caplog.records if "was skipped" in r.getMessage()]
    assert "\n" not in text
    for piece in (
        "Optimizer step 2 was skipped at loss scale 1024. Non-finite gradients, last layer first: head.bias",
        "micro-batch 1 of 1 (batch_idx 2) on rank 0",
        "it starts in the forward, in body.1.place (TimesInForward): output holds",
        "(float16, shape [4, 8]); its inputs reach",
        "run body.1.place in fp32 with a PrecisionPolicy",
    ):
        assert piece in text, text


def test_stock_plugins_without_a_monitor_are_refused() -> None:
    trainer = quiet_trainer(plugins=[stock()], callbacks=[OverflowPostMortem()])
    with pytest.raises(MisconfigurationException, match=r"With MixedPrecision add lightning_mp.OverflowMonitor\(\)"):
        trainer.fit(Regression(adamw), loader(regression_batches(2)))


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter`")
def test_what_cannot_be_replayed_is_refused() -> None:
    class Manual(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

    class Draws(Regression):
        def training_step(self, dataloader_iter: Any) -> Any:
            raise AssertionError

    class Evaluates(Regression):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    for module, plugins, reason in (
        (Manual(), [ours()], "with automatic_optimization=False"),
        (Draws(), [ours()], r"with a training_step\(dataloader_iter\)"),
        (Evaluates(), [], "cannot be used with LBFGS"),
    ):
        callbacks = [OverflowPostMortem(replay=True), OverflowMonitor()]
        trainer = quiet_trainer(plugins=plugins, callbacks=callbacks)
        with pytest.raises(MisconfigurationException, match=reason):
            trainer.fit(module, loader(regression_batches(2)))
