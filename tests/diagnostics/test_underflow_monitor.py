"""UnderflowMonitor against numpy, on every plugin; what it costs, by counting; what the user sees."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_models
import torch
from gradient_counter import VIEWS, CountGradientTraffic
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.plugins import MixedPrecision
from small_models import (
    Regression,
    adamw,
    at,
    fused_adamw,
    loader,
    quiet_trainer,
    raising,
    regression_batches,
    saving,
    sgd,
    weights,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_mp import AccumulationScheduler, AutocastPrecision, LossScaler, MasterWeightsPrecision
from lightning_mp.callbacks.underflow_monitor import UnderflowMonitor
from lightning_mp.ground.core import private_dispatch_api
from lightning_mp.monitors.diagnostics.underflow.exponents import ExponentHistogram

SCALE = 2.0**10
BATCHES = regression_batches(6)


def autocast(precision: str = "16-mixed") -> list[Any]:
    scaler = LossScaler(init_scale=SCALE) if precision == "16-mixed" else None
    return [AutocastPrecision(precision, scaler=scaler)]


def stock() -> list[Any]:
    return [MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=SCALE))]


def numpy_histogram(values: torch.Tensor) -> ExponentHistogram:
    array = np.abs(values.detach().double().numpy().reshape(-1))
    finite = array[np.isfinite(array)]
    mantissas, powers = np.frexp(finite[finite != 0])
    counts, ties = (
        np.unique(powers - 1, return_counts=True),
        np.unique(powers[mantissas == 0.5] - 1, return_counts=True),
    )
    return ExponentHistogram(
        {int(e): int(n) for e, n in zip(*counts, strict=True)},
        {int(e): int(n) for e, n in zip(*ties, strict=True)},
        int((finite == 0).sum()),
        int(array.size - finite.size),
        float(finite.max(initial=0.0)),
    )


class Recorder(Callback):
    """Keeps copies of what ``on_before_optimizer_step`` sees at the observed steps."""

    def __init__(self, every_n_steps: int = 1) -> None:
        self.every_n_steps = every_n_steps
        self.seen: dict[int, dict[str, torch.Tensor]] = {}

    def needs_gradients(self, step_index: int) -> bool:
        return step_index % self.every_n_steps == 0

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.seen[trainer.global_step] = {n: p.grad.clone() for n, p in pl_module.named_parameters()}


def fit(monitor: UnderflowMonitor, module: Any = None, batches: Any = BATCHES, **arguments: Any) -> Any:
    callbacks = [monitor, *arguments.pop("callbacks", [])]
    return small_models.fit(Regression() if module is None else module, batches, *callbacks, **arguments)


# -- what is counted ---------------------------------------------------------------------------------------------------

RUNS: dict[str, tuple[Any, Any, float]] = {
    # plugins, optimizer, what the hook's gradients have to be multiplied by
    "fp32": (lambda: None, adamw, 1.0),
    "fp16": (autocast, adamw, SCALE),
    "fp16, fused": (autocast, fused_adamw, SCALE),
    "bf16": (partial(autocast, "bf16-mixed"), adamw, 1.0),
    "fp16 weights": (lambda: [MasterWeightsPrecision("16-true", scaler=LossScaler(init_scale=SCALE))], adamw, SCALE),
    "stock fp16": (stock, adamw, SCALE),
    "stock fp16, fused": (stock, fused_adamw, 1.0),  # there, hooks see scaled gradients
}


@pytest.mark.parametrize("run", RUNS)
def test_gradients_are_counted_as_the_format_would_hold_them(run: str) -> None:
    """D12: also where a stock plugin shows scaled gradients."""
    plugins, optimizer, factor = RUNS[run]
    monitor, recorder = UnderflowMonitor(every_n_steps=5), Recorder()
    batches = [[x.half(), y.half()] for x, y in BATCHES] if run == "fp16 weights" else BATCHES
    fit(monitor, Regression(optimizer), batches, plugins=plugins(), callbacks=[recorder])
    latest = monitor.latest
    assert latest.step_index == 5
    assert latest.scale == (1.0 if run in ("fp32", "bf16") else SCALE)
    expected = {n: numpy_histogram(g.float() * factor) for n, g in recorder.seen[5].items()}
    assert latest.histograms == {"gradients": expected}
    assert latest.whole().num_values == sum(p.numel() for p in Regression().parameters())
    assert latest.whole().num_finite > 0


@pytest.mark.parametrize(("plugins", "optimizer"), [(autocast, fused_adamw), (stock, fused_adamw), (stock, adamw)])
def test_another_scale_than_the_runs_can_be_asked_for(plugins: Any, optimizer: Any) -> None:
    asked, present = UnderflowMonitor(every_n_steps=5, scale=2.0**3), UnderflowMonitor(every_n_steps=5)
    for monitor in (asked, present):
        fit(monitor, Regression(optimizer), plugins=plugins())
    shift = 10 - 3
    moved = {e - shift: n for e, n in present.latest.whole().counts.items()}
    assert asked.latest.whole().counts == moved
    assert asked.latest.scale == 8.0
    assert present.latest.scale == SCALE


def test_gradients_equal_a_plain_loop_with_accumulation() -> None:
    """The gradient of a window is the mean over its micro-batches, with Lightning's accumulation and with ours."""
    module = Regression(sgd)
    optimizer = module.configure_optimizers()
    expected = []
    for start in (0, 3):
        optimizer.zero_grad()
        for batch in BATCHES[start : start + 3]:
            (module.training_step(batch, 0) / 3).backward()
        expected.append(ExponentHistogram.sum_of(numpy_histogram(p.grad * 2.0**7) for p in module.parameters()))
        optimizer.step()
    for arguments in ({"accumulate_grad_batches": 3}, {"callbacks": [AccumulationScheduler({0: 3})]}):
        monitor = UnderflowMonitor(every_n_steps=1, scale=2.0**7)
        fit(monitor, Regression(sgd), **arguments)
        assert monitor.latest.whole() == expected[1]
        assert len(monitor.history) == 2


def test_the_share_lost_says_what_casting_the_gradients_would_lose() -> None:
    """A fp32 run whose first layers have tiny gradients: at scale 1 fp16 loses some, at the suggested scale fewer."""

    class Deep(Regression):
        def __init__(self) -> None:
            super().__init__(sgd)
            layers = [layer for _ in range(14) for layer in (nn.Linear(8, 8), nn.Tanh())]
            self.net = nn.Sequential(*layers, nn.Linear(8, 1))
            for layer in layers[::2]:
                nn.init.uniform_(layer.weight, -0.2, 0.2)

    def lost(scale: float | None) -> tuple[float, UnderflowMonitor]:
        monitor, recorder = UnderflowMonitor("fp16", every_n_steps=1, scale=scale), Recorder()
        fit(monitor, Deep(), callbacks=[recorder])
        gradients = torch.cat([g.flatten() for g in recorder.seen[5].values()]) * (scale or 1.0)
        became_zero = (gradients.half() == 0) & (gradients != 0)
        summary = monitor.history[-1]["gradients"]
        assert summary.underflow_fraction == became_zero.sum() / (gradients != 0).sum()
        assert gradients.half().isfinite().all()
        return summary.underflow_fraction, monitor

    at_1, monitor = lost(None)
    suggested = monitor.suggested_scale
    at_suggested, monitor = lost(suggested)
    assert at_1 > 0.1
    assert at_suggested < 0.1 * at_1
    assert monitor.suggested_scale == suggested > 2.0**8
    assert min(s["gradients"].headroom_doublings for s in monitor.history) == 1.0  # the margin


def test_suggestion_suits_the_last_ten_observations() -> None:
    class Spike(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * (2.0**12 if batch_idx == 1 else 1.0)

    monitor, batches = UnderflowMonitor(every_n_steps=1), regression_batches(12)
    suggestions = []

    asks = at(lambda *_: suggestions.append(monitor.suggested_scale))
    fit(monitor, Spike(partial(torch.optim.SGD, lr=0.0)), batches, callbacks=[asks])
    assert all(late <= suggestions[0] / 2**9 for late in suggestions[1:11])
    assert suggestions[11] > suggestions[10] * 2**9


def test_the_last_observation_and_a_scale_are_printed_at_the_end(caplog: Any) -> None:
    monitor = UnderflowMonitor(every_n_steps=2)
    with caplog.at_level("INFO"):
        small_models.fit(Regression(), loader(regression_batches(5)), monitor, plugin=autocast()[0])
    (text,) = [text for text in caplog.messages if text.startswith("UnderflowMonitor")]
    assert text == (
        f"UnderflowMonitor, the last observation:\n{monitor.latest}\n"
        f"A loss scale of {monitor.suggested_scale:g} suits the last observations."
    )
    assert monitor.latest is not None
    assert monitor.latest.step_index == 4


@pytest.mark.parametrize("plugins", [autocast, stock])
def test_an_overflow_leaves_no_headroom_and_halves_the_scale(plugins: Any) -> None:
    monitor = UnderflowMonitor(every_n_steps=1)
    fit(monitor, Regression(overflows=[2]), plugins=plugins())
    overflow = monitor.history[2]["gradients"]
    assert (overflow.headroom_doublings, overflow.suggested_scale, overflow.scale) == (-np.inf, SCALE / 2, SCALE)
    assert [s["gradients"].scale for s in monitor.history] == [SCALE] * 3 + [SCALE / 2] * 3
    assert monitor.suggested_scale == SCALE / 2


# -- activations -------------------------------------------------------------------------------------------------------


def test_where_nothing_is_finite_no_scale_is_advised(caplog: Any) -> None:
    """A run in which every step overflows, whatever the scale."""
    monitor, plugin = UnderflowMonitor(every_n_steps=1), autocast()[0]
    with caplog.at_level("INFO"):
        small_models.fit(Regression(overflows=range(4)), loader(regression_batches(4)), monitor, plugin=plugin)
    (text,) = [text for text in caplog.messages if text.startswith("UnderflowMonitor")]
    assert text.endswith("\nNot finite: 100.00%. The table is of the others.")


def test_activations_and_their_gradients_of_a_window_are_counted() -> None:
    """The true activation gradients of a plain loop, times the scale; both micro-batches of the window."""
    module = Regression(sgd)
    kept: dict[str, list[torch.Tensor]] = {"0": [], "1": [], "2": []}
    for batch in BATCHES[:2]:
        x = batch[0]
        for name, layer in module.net.named_children():
            x = layer(x)
            x.retain_grad()
            kept[name].append(x)
        (nn.functional.mse_loss(x, batch[1]) / 2).backward()
    monitor = UnderflowMonitor(watch=("activations", "activation_gradients"), scale=4.0)
    fit(monitor, Regression(sgd), BATCHES[:2], accumulate_grad_batches=2)
    latest = monitor.latest
    assert latest.scale == 4.0
    for name, tensors in kept.items():
        outputs, gradients = torch.cat(tensors), torch.cat([t.grad for t in tensors])
        assert latest.histograms["activations"][f"net.{name}"] == numpy_histogram(outputs)
        assert latest.histograms["activation_gradients"][f"net.{name}"] == numpy_histogram(gradients * 4.0)
    assert latest.summary("activations").suggested_scale is None
    assert latest.summary("activations").scale == 1.0


@pytest.mark.parametrize("watch", ["activation_gradients", ("activation_gradients", "gradients")])
@pytest.mark.parametrize("plugins", [autocast, stock])
def test_activation_gradients_are_seen_with_the_runs_scale(plugins: Any, watch: Any) -> None:
    """fp16 holds them scaled; an overflow at this step halves the scale only after they were counted."""

    def largest(scale: float | None) -> tuple[float, float]:
        monitor = UnderflowMonitor(watch=watch, scale=scale)
        fit(monitor, Regression(sgd), BATCHES[:1], plugins=plugins())
        return monitor.latest.whole("activation_gradients").largest, monitor.latest.scale

    at_scale, scale = largest(None)
    at_one, one = largest(1.0)
    assert at_scale == at_one * SCALE
    assert (scale, one) == (SCALE, 1.0)


def test_scale_is_that_of_the_observed_step_also_when_it_moves_at_once() -> None:
    monitor = UnderflowMonitor(watch="activation_gradients", every_n_steps=1)
    fit(monitor, Regression(overflows=[1]), BATCHES[:3], plugins=autocast())
    assert [s["activation_gradients"].scale for s in monitor.history] == [SCALE, SCALE, SCALE / 2]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputed_forwards_are_not_counted_twice(use_reentrant: bool) -> None:
    class Recomputed(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            hidden = checkpoint(self.net[:2], x.clone().requires_grad_(), use_reentrant=use_reentrant)
            return nn.functional.mse_loss(self.net[2](hidden), y)

    plain, recomputed = (UnderflowMonitor(watch=("activations", "activation_gradients")) for _ in range(2))
    fit(plain, Regression(sgd), BATCHES[:1])
    fit(recomputed, Recomputed(sgd), BATCHES[:1])
    assert recomputed.latest == plain.latest


def test_hooks_stand_on_observed_steps_only_and_go_with_an_exception() -> None:
    def hooks_on(module: nn.Module) -> int:
        return sum(len(m._forward_hooks) for m in module.modules())

    hooks, module = [], Regression()
    looks = [
        at(lambda _, module: hooks.append(hooks_on(module)), "on_before_backward"),
        at(raising(RuntimeError("stop here")), "on_before_backward", call=5),
    ]
    monitor = UnderflowMonitor(every_n_steps=2, watch=("gradients", "activations"))
    with pytest.raises(RuntimeError, match="stop here"):
        fit(monitor, module, callbacks=looks)
    assert hooks == [3, 0, 3, 0, 3]
    assert hooks_on(module) == 0
    assert monitor.latest.step_index == 2
    fit(monitor, module)
    assert monitor.latest.step_index == 4


# -- what it costs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [adamw, fused_adamw], ids=["unfused", "fused"])
@pytest.mark.parametrize("plugins", [autocast, stock, partial(autocast, "bf16-mixed")], ids=["ours", "stock", "bf16"])
def test_steps_that_are_not_observed_cost_nothing_and_no_step_waits(optimizer: Any, plugins: Any) -> None:
    def rows(every_n_steps: int | None) -> list[Any]:
        module = Regression(optimizer)
        count = CountGradientTraffic(module)
        monitors = [UnderflowMonitor(every_n_steps=every_n_steps, watch=WATCH)] if every_n_steps else []
        small_models.fit(module, BATCHES, count, *monitors, plugins=plugins())
        return count.rows

    WATCH = ("gradients", "activations", "activation_gradients")
    without, with_monitor, always = rows(None), rows(3), rows(1)
    for index, (before, after) in enumerate(zip(without, with_monitor, strict=True)):
        assert after.host_waits == before.host_waits
        if index % 3:
            assert (after.passes, after.kernels) == (before.passes, before.kernels)
        else:
            assert after.passes > before.passes
    assert [row.host_waits for row in always] == [row.host_waits for row in without]


class _Operations(Callback):
    """Counts all operations of each micro-batch."""

    def __init__(self) -> None:
        self.counts = [0]  # of the time before the first one

    def on_train_start(self, *_: Any) -> None:
        self.observing = private_dispatch_api.observe_dispatch(self._count)
        self.observing.__enter__()

    def _count(self, operation: Any, *_: Any) -> None:
        self.counts[-1] += operation._schema.name not in {*VIEWS, "aten::select", "aten::expand"}

    def on_train_batch_start(self, *_: Any) -> None:
        self.counts.append(0)

    def on_train_end(self, *_: Any) -> None:
        self.observing.__exit__(None, None, None)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_an_observed_step_costs_at_most_28_operations_per_tensor(precision: str) -> None:
    """And other steps none. The watch of 16-bit gradients in backward is among them, and what is paid once."""
    counts = []
    for monitors in ([], [UnderflowMonitor(every_n_steps=3)]):
        module, count = Regression(fused_adamw), _Operations()
        module.net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(10)), module.net)
        quiet_trainer(callbacks=[count, *monitors], plugins=autocast(precision)).fit(module, loader(BATCHES))
        counts.append(count.counts)
    added = [after - before for before, after in zip(*counts, strict=True)]
    tensors = len(list(module.parameters()))
    assert 0 < max(added) <= 28 * tensors
    assert [added[step] for step in (2, 3, 5)] == [0] * 3


@pytest.mark.parametrize("optimizer", [adamw, fused_adamw], ids=["unfused", "fused"])
@pytest.mark.parametrize("plugins", [autocast, stock, lambda: None], ids=["ours", "stock", "fp32"])
def test_it_does_not_change_the_run(optimizer: Any, plugins: Any) -> None:
    def train(*callbacks: Callback) -> list[torch.Tensor]:
        module = Regression(optimizer)
        quiet_trainer(callbacks=list(callbacks), plugins=plugins()).fit(module, loader(BATCHES))
        return weights(module)

    watch = ("gradients", "activations", "activation_gradients")
    plain, watched = train(), train(UnderflowMonitor(every_n_steps=2, watch=watch))
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))


def test_an_observation_is_one_transfer_read_one_step_later(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    class Copy:
        def __init__(self, values: torch.Tensor) -> None:
            events.append("start")
            self.values = values.tolist()

        def read(self) -> list[float]:
            events.append("read")
            return self.values

    monkeypatch.setattr("lightning_mp.callbacks.underflow_monitor.HostCopy", Copy)
    steps = at(lambda trainer, _: events.append(f"batch {trainer.global_step}"), "on_train_batch_start")
    fit(UnderflowMonitor(every_n_steps=2, watch=("gradients", "activations")), callbacks=[steps])
    assert events == [
        *("batch 0", "start", "batch 1", "read", "batch 2", "start", "batch 3", "read"),
        *("batch 4", "start", "batch 5", "read"),
    ]


# -- what the user sees ------------------------------------------------------------------------------------------------


def test_numbers_reach_the_logger_and_tensorboard_gets_the_histogram(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monitor = UnderflowMonitor(every_n_steps=2, watch=("gradients", "activations"))
    csv, board = CSVLogger(tmp_path), TensorBoardLogger(tmp_path)
    fit(monitor, logger=[csv, board], log_every_n_steps=1)
    text = (Path(csv.log_dir) / "metrics.csv").read_text().splitlines()
    header, values = text[0].split(","), text[-1].split(",")
    logged = dict(zip(header, values, strict=True))
    summary = monitor.latest.summary()
    assert float(logged["mp/underflow_fraction"]) == summary.underflow_fraction
    assert float(logged["mp/subnormal_fraction"]) == pytest.approx(summary.subnormal_fraction)
    assert float(logged["mp/zero_fraction"]) == summary.zero_fraction
    assert float(logged["mp/headroom_doublings"]) == summary.headroom_doublings
    assert float(logged["mp/suggested_scale"]) == monitor.suggested_scale
    assert "mp/underflow_fraction/activations" in logged
    events = EventAccumulator(board.log_dir, size_guidance={"histograms": 0}).Reload()
    assert events.Tags()["histograms"] == ["mp/exponents/gradients", "mp/exponents/activations"]
    seen = events.Histograms("mp/exponents/gradients")
    assert [event.step for event in seen] == [0, 2, 4]
    written = seen[-1].histogram_value
    counts = monitor.latest.whole().counts
    limits = {int(e) - 1: int(n) for e, n in zip(written.bucket_limit, written.bucket, strict=True) if n}
    assert limits == counts
    assert (written.num, written.sum) == (sum(counts.values()), sum(e * n for e, n in counts.items()))


def test_it_prints_the_layers_that_lose_most_first() -> None:
    monitor = UnderflowMonitor("fp8_e4m3fn", every_n_steps=1)
    assert monitor.latest is None
    fit(monitor)
    lines = str(monitor.latest).splitlines()
    assert lines[0] == "Step 5, fp8_e4m3fn at scale 1"
    assert lines[1].split() == ["gradients", "lost", "subnormal", "zeros", "largest", "headroom"]
    assert lines[2].startswith("all ")
    shares = [float(line.split()[1].rstrip("%")) for line in lines[3:]]
    assert len(shares) == 4
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0


@pytest.mark.full
def test_pictures_are_written(tmp_path: Path) -> None:
    monitor = UnderflowMonitor(every_n_steps=1, watch=("gradients", "activations"))
    with pytest.raises(ValueError, match="nothing to plot: no optimizer step was observed yet"):
        monitor.plot(tmp_path / "early.png")
    fit(monitor)
    monitor.plot(tmp_path / "whole.png")
    monitor.plot(str(tmp_path / "layers.svg"), "activations", by_layer=True)
    assert (tmp_path / "whole.png").read_bytes().startswith(b"\x89PNG")
    assert "<!-- net.0 -->" in (tmp_path / "layers.svg").read_text()
    with pytest.raises(ValueError, match=r"plot\(kind='activation_gradients'\): this monitor watches \('gradients', "):
        monitor.plot(tmp_path / "no.png", "activation_gradients")


@pytest.mark.full
def test_layers_that_pass_no_16_bit_have_no_row_in_the_picture(tmp_path: Path) -> None:
    class WithNorm(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.LayerNorm(self.net[0].in_features), *self.net)

    monitor = UnderflowMonitor(every_n_steps=1)
    fit(monitor, WithNorm(), plugins=[AutocastPrecision("bf16-mixed")])
    monitor.plot(tmp_path / "layers.svg", by_layer=True)
    drawn = (tmp_path / "layers.svg").read_text()
    assert "<!-- net.1.weight -->" in drawn
    assert "<!-- net.0.weight -->" not in drawn
    assert "; 2 that pass no 16 bit are left out -->" in drawn


def test_a_checkpoint_carries_what_was_seen(tmp_path: Path) -> None:
    first = UnderflowMonitor(every_n_steps=1, watch=("gradients", "activations"))
    trainer = fit(first, max_epochs=1)
    path = tmp_path / "run.ckpt"
    trainer.save_checkpoint(path)
    second = UnderflowMonitor(every_n_steps=1, watch=("gradients", "activations"))
    fit(second, batches=BATCHES[:2])  # a run of its own, which is forgotten
    trainer = quiet_trainer(max_epochs=1, callbacks=[second])
    trainer.fit(Regression(), loader(BATCHES), ckpt_path=path, weights_only=True)
    assert second.latest == first.latest
    assert second.history == first.history
    assert len(second.history) == 6


def test_a_checkpoint_in_the_middle_settles_the_observation_under_way(tmp_path: Path) -> None:
    monitor = UnderflowMonitor(every_n_steps=1)
    fit(monitor, callbacks=[at(saving(tmp_path / "middle.ckpt"), step=3)])
    state = torch.load(tmp_path / "middle.ckpt", weights_only=True)["callbacks"][monitor.state_key]
    assert [s["gradients"]["step_index"] for s in state["history"]] == [0, 1, 2]
