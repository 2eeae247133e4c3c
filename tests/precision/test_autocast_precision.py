"""AutocastPrecision against plain PyTorch loops, and what it refuses."""

import logging
from collections.abc import Iterable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from gradient_counter import CountGradientTraffic
from lightning.pytorch.callbacks import Callback, LambdaCallback
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from small_models import (
    Outcomes,
    Regression,
    adamw,
    at,
    fit,
    fused_adamw,
    loader,
    quiet_trainer,
    regression_batches,
    sgd,
    weights,
)
from torch import Tensor, nn

from lightning_mp import AutocastPrecision, LossScaler, OverflowMonitor

DTYPES = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}


def fused_sgd_with_momentum(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, fused=True)


OPTIMIZERS = {"sgd": sgd, "adamw": adamw, "fused_adamw": fused_adamw, "fused_momentum": fused_sgd_with_momentum}


def plugin(precision: str, init_scale: float = 2.0**10, **arguments: Any) -> AutocastPrecision:
    if precision == "bf16-mixed":
        return AutocastPrecision("bf16-mixed", **arguments)
    return AutocastPrecision("16-mixed", scaler=LossScaler(init_scale=init_scale), **arguments)


def plain_loop(module: Regression, batches: list[list[Tensor]], precision: str, clip: tuple[str, float] | None) -> None:
    """The recipe of torch's AMP examples; non-finite gradients are skipped in bf16 too."""
    optimizer = module.make_optimizer(module.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=precision == "16-mixed")
    for index, batch in enumerate(batches):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=DTYPES[precision]):
            loss = module.training_step(batch, index)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        parameters = [p for p in module.parameters() if p.grad is not None]
        if not all(torch.isfinite(p.grad).all() for p in parameters):
            # Not `scaler.step`: a fused SGD would take uninitialised memory for its momentum there.
            scaler.update()
            continue
        if clip is not None and clip[0] == "norm":
            nn.utils.clip_grad_norm_(parameters, clip[1])
        elif clip is not None:
            nn.utils.clip_grad_value_(parameters, clip[1])
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("overflows", [(), (0, 3)], ids=["healthy", "overflows"])
@pytest.mark.parametrize(
    "clip",
    [None, ("norm", 0.1), ("norm", 100.0), ("value", 0.01)],
    ids=["unclipped", "norm", "norm below the limit", "value"],
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", DTYPES)
def test_training_equals_a_plain_loop(
    precision: str, optimizer: str, clip: tuple[str, float] | None, overflows: tuple[int, ...]
) -> None:
    """D11, D47, D52: any optimizer, clipping and precision; a skipped first step leaves momentum alone."""
    batches = regression_batches(8)
    reference = Regression(OPTIMIZERS[optimizer], overflows=overflows)
    plain_loop(reference, batches, precision, clip)

    module = Regression(OPTIMIZERS[optimizer], overflows=overflows)
    clipping = {} if clip is None else {"gradient_clip_algorithm": clip[0], "gradient_clip_val": clip[1]}
    fit(module, batches, plugin=plugin(precision), **clipping)

    fused_rounding = clip is not None or "fused" in optimizer
    for ours, theirs in zip(weights(module), weights(reference), strict=True):
        assert torch.isfinite(ours).all()
        if fused_rounding:
            # One multiplication by a product of factors instead of two; Adam's first steps magnify that.
            torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6)
        else:
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
def test_hooks_see_true_gradients(fused: bool) -> None:
    """D12: the stock plugin shows gradients times the scale when the optimizer is fused."""
    optimizer = fused_adamw if fused else adamw
    batches = regression_batches(1)
    expected = Regression(optimizer)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = expected.training_step(batches[0], 0)
    (loss * 2.0**10).backward()

    shown: list[list[Tensor]] = []

    def look(_: Any, module: torch.nn.Module) -> None:
        shown.append([p.grad.clone() for p in module.parameters()])

    fit(Regression(optimizer), batches, at(look, "on_before_optimizer_step"), plugin=plugin("16-mixed"))
    for seen, parameter in zip(shown[0], expected.parameters(), strict=True):
        assert torch.equal(seen, parameter.grad / 2.0**10)


def test_a_hook_set_on_an_instance_counts_as_looking() -> None:
    seen: list[float] = []
    module = Regression(fused_adamw)
    spy = LambdaCallback(on_before_optimizer_step=lambda *_: seen.append(float(module.net[0].weight.grad.abs().max())))
    fit(module, regression_batches(1), spy, plugin=plugin("16-mixed", 2.0**16))
    assert 0 < seen[0] < 10, "the gradient was shown times the scale"


def test_gradients_changed_by_a_hook_are_clipped_as_changed() -> None:
    class Enlarge(Regression):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            for p in self.parameters():
                p.grad.mul_(1000.0)

    for optimizer in (sgd, lambda p: torch.optim.SGD(p, lr=1e-2, fused=True)):
        module = Enlarge(optimizer)
        before = weights(module)
        fit(module, regression_batches(1), plugin=plugin("16-mixed"), gradient_clip_val=0.5)
        moved = torch.cat([(a - b).flatten() for a, b in zip(weights(module), before, strict=True)])
        assert moved.norm().item() == pytest.approx(1e-2 * 0.5, rel=1e-4)


@pytest.mark.parametrize("precision", DTYPES)
def test_with_torchs_cache_a_weight_is_cast_at_most_once_per_forward(precision: str) -> None:
    """D22, and a no_grad forward before the real one is safe."""

    class Twice(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            with torch.no_grad():
                self.net(batch[0])
            self.net(batch[0])
            return super().training_step(batch, batch_idx)

    module = Twice()
    counter = CountGradientTraffic(module)
    cached = plugin(precision, cache_weights=True)
    fit(module, regression_batches(3), counter, plugin=cached)
    assert counter.rows[-2].weight_casts == len(list(module.parameters()))
    assert all(p.grad is not None for p in module.parameters())


@pytest.mark.parametrize(
    ("precision", "optimizer", "clip", "passes", "waits"),
    [
        ("16-mixed", fused_adamw, {}, 1, 0),
        ("16-mixed", fused_adamw, {"gradient_clip_val": 1.0}, 1, 0),
        ("16-mixed", fused_adamw, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, 3, 0),
        ("16-mixed", adamw, {}, 3, 1),
        ("16-mixed", adamw, {"gradient_clip_val": 1.0}, 3, 1),
        ("16-mixed", adamw, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, 3, 1),
        ("bf16-mixed", adamw, {}, 1, 1),
    ],
    ids=["fused", "fused-norm", "fused-value", "unfused", "unfused-norm", "unfused-value", "unfused-bf16"],
)
@pytest.mark.parametrize("monitors", [False, True], ids=["bare", "monitored"])
def test_promise_5_passes_over_gradients_and_host_waits(
    precision: str, optimizer: Any, clip: dict[str, Any], passes: int, waits: int, monitors: bool
) -> None:
    """Promise 5: one pass with a fused optimizer, at most three otherwise; no wait when fused."""
    module = Regression(optimizer)
    counter = CountGradientTraffic(module)
    callbacks: list[Callback] = [counter, *([OverflowMonitor()] if monitors else [])]
    fit(module, regression_batches(5), plugin=plugin(precision), callbacks=callbacks, **clip)
    healthy = counter.rows[-2]
    assert healthy.passes == passes, healthy
    assert healthy.host_waits == waits, healthy


class _SetUpAsOnCuda(SingleDeviceStrategy):
    """The run is on the CPU; while the plugin is connected it is told otherwise."""

    is_connecting = False

    @property
    def root_device(self) -> torch.device:
        return torch.device("cuda") if self.is_connecting else super().root_device

    def setup_precision_plugin(self) -> None:
        self.is_connecting = True
        super().setup_precision_plugin()
        self.is_connecting = False


@pytest.mark.parametrize(
    ("precision", "optimizer", "text"),
    [
        ("bf16-mixed", adamw, "AdamW is not fused, so the host waits for the device once per step, to keep non-finite"),
        ("bf16-mixed", partial(torch.optim.NAdam, lr=1e-3), "NAdam cannot skip a step on the device, so the host"),
        ("bf16-mixed", fused_adamw, None),
        ("16-mixed", adamw, None),  # Lightning's own waits, too
    ],
)
def test_a_wait_that_stock_does_not_have_is_said_at_set_up(
    precision: Any, optimizer: Any, text: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    for strategy in (SingleDeviceStrategy(device="cpu"), _SetUpAsOnCuda(device="cpu")):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            trainer = quiet_trainer(plugins=[AutocastPrecision(precision)], strategy=strategy, max_steps=1)
            trainer.fit(Regression(optimizer), loader(regression_batches(1)))
        told = [record.getMessage() for record in caplog.records if "waits for the device" in record.getMessage()]
        expects_one = text is not None and isinstance(strategy, _SetUpAsOnCuda)
        assert len(told) == expects_one
        assert all(f"AutocastPrecision({precision!r}): {text}" in message for message in told)


# Lightning says this once per process, so that a test cannot expect it.
ignore_none_warning = pytest.mark.filterwarnings("ignore:`training_step` returned `None`")


@ignore_none_warning
def test_no_loss_at_all_is_not_a_step_of_the_scaler() -> None:
    class AlwaysNone(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            return None

    module = AlwaysNone(sgd)
    ours = plugin("16-mixed")
    fit(module, regression_batches(2), plugin=ours)
    assert ours.scaler is not None
    assert ours.scaler.get_scale() == 2.0**10


@ignore_none_warning
@pytest.mark.parametrize("optimizer", [sgd, adamw, fused_adamw])
def test_the_step_after_a_batch_without_a_loss_is_made(optimizer: Any) -> None:
    """D15: ``FSDPPrecision`` raises there, "unscale_() has already been called". The same plugin serves FSDP here."""

    class SometimesNone(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:  # type: ignore[override]
            return None if batch_idx % 2 else super().training_step(batch, batch_idx)

    batches = regression_batches(7)
    module, without = SometimesNone(optimizer), Regression(optimizer)
    fit(module, batches, plugin=plugin("16-mixed"))
    fit(without, batches[::2], plugin=plugin("16-mixed"))
    assert all(torch.equal(a, b) for a, b in zip(weights(module), weights(without), strict=True))


class TwoOptimizers(Regression):
    """Each layer has an optimizer of its own; the loss of one of their steps is infinite at batch 1."""

    automatic_optimization = False

    def __init__(self, overflowing: int) -> None:
        super().__init__(fused_adamw)
        self.overflowing = overflowing

    def configure_optimizers(self) -> Any:
        return [self.make_optimizer(self.net[index].parameters()) for index in (0, 2)]

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        for index, optimizer in enumerate(self.optimizers()):
            loss = nn.functional.mse_loss(self.net(batch[0]).float(), batch[1].float())
            optimizer.zero_grad()
            self.manual_backward(loss * torch.inf if (batch_idx, index) == (1, self.overflowing) else loss)
            optimizer.step()


@pytest.mark.parametrize(("overflowing", "scaler"), [(0, LossScaler), (1, LossScaler), (1, torch.amp.GradScaler)])
def test_of_several_optimizers_each_outcome_is_its_own(overflowing: int, scaler: Any) -> None:
    """D09, D14: a fused kernel's decision is read a step late, when torch's scaler has added all up in one tensor."""

    own, outcomes = AutocastPrecision("16-mixed", scaler=scaler("cpu", init_scale=1024.0)), Outcomes()
    fit(TwoOptimizers(overflowing), regression_batches(3), outcomes, plugin=own)
    skipped = [outcome.skipped for outcome in outcomes.seen]
    assert skipped == [False, False, overflowing == 0, overflowing == 1, False, False]
    assert own.scaler is not None
    assert own.scaler.get_scale() == 512.0


# -- checkpoints -------------------------------------------------------------------------------------------------------


def saved_scale(trainer: pl.Trainer, path: Any) -> dict[str, Any]:
    trainer.save_checkpoint(path)
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize("key", ["MixedPrecision", "FSDPPrecision"])
def test_the_scale_is_read_from_a_stock_checkpoint(tmp_path: Any, key: str) -> None:
    """D23: keyed by class name, the scale of another plugin is silently lost."""
    stock = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=8.0))
    trainer = fit(Regression(), regression_batches(2), plugin=stock)
    checkpoint = saved_scale(trainer, tmp_path / "stock.ckpt")
    checkpoint[key] = checkpoint.pop("MixedPrecision")
    torch.save(checkpoint, tmp_path / "stock.ckpt")

    ours = plugin("16-mixed")
    fit(Regression(), regression_batches(2), plugin=ours, max_epochs=2, ckpt_path=tmp_path / "stock.ckpt")
    assert ours.scaler is not None
    assert ours.scaler.get_scale() == 8.0


def test_a_stock_plugin_reads_our_checkpoint(tmp_path: Any) -> None:
    trainer = fit(Regression(), regression_batches(2), plugin=plugin("16-mixed", 16.0))
    trainer.save_checkpoint(tmp_path / "ours.ckpt")
    stock = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    fit(Regression(), regression_batches(2), plugin=stock, max_epochs=2, ckpt_path=tmp_path / "ours.ckpt")
    assert stock.scaler is not None
    assert stock.scaler.get_scale() == 16.0


def test_a_checkpoint_without_a_scale_warns(tmp_path: Any) -> None:
    trainer = fit(Regression(), regression_batches(2))
    trainer.save_checkpoint(tmp_path / "fp32.ckpt")
    with pytest.warns(UserWarning, match="holds no loss scale, so the scale starts again at 1024"):
        quiet_trainer(plugins=[plugin("16-mixed")], max_epochs=2).fit(
            Regression(), loader(regression_batches(2)), ckpt_path=tmp_path / "fp32.ckpt"
        )


# -- after a run -------------------------------------------------------------------------------------------------------

CONTEXTS = ("forward_context", "train_step_context", "val_step_context", "test_step_context", "predict_step_context")


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("precision", DTYPES)
def test_after_a_fit_its_contexts_are_what_they_were(precision: str, context: str) -> None:
    """As stock's are, for inference with the Trainer's plugin."""
    made, module = plugin(precision), Regression()
    fit(module, regression_batches(1), plugin=made)
    with getattr(made, context)(), torch.no_grad():
        assert module.net(torch.ones(1, 8)).dtype == DTYPES[precision]
    assert module.net(torch.ones(1, 8)).dtype == torch.float32


def test_after_a_fit_evaluation_has_its_own_precision() -> None:
    made, module = plugin("bf16-mixed", eval_precision="32-true"), Regression()
    fit(module, regression_batches(1), plugin=made)
    with made.predict_step_context():
        assert module.net(torch.ones(1, 8)).dtype == torch.float32


def test_after_a_fit_a_policy_is_no_longer_in_force_and_says_so() -> None:
    made = plugin("bf16-mixed", policy={"net.0": "fp32", "*": "low"})
    fit(Regression(), regression_batches(1), plugin=made)
    with pytest.raises(
        MisconfigurationException,
        match=r"^AutocastPrecision\('bf16-mixed'\): its context was entered after the run, and its policy is in force"
        r" on the module for the time of a run only\. Use trainer\.predict",
    ):
        made.predict_step_context()


@pytest.mark.parametrize(
    ("algorithm", "limit"), [(GradClipAlgorithmType.NORM, 1.0), (GradClipAlgorithmType.VALUE, 0.25)]
)
@pytest.mark.parametrize("precision", DTYPES)
def test_after_a_fit_it_clips_gradients_as_they_are(precision: str, algorithm: Any, limit: float) -> None:
    made, module = plugin(precision), Regression(sgd)
    trainer = fit(module, regression_batches(1), plugin=made)
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    made.clip_gradients(trainer.optimizers[0], limit, algorithm)
    ours = [p.grad for p in module.parameters()]
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    MixedPrecision("bf16-mixed", "cpu").clip_gradients(trainer.optimizers[0], limit, algorithm)
    for mine, p in zip(ours, module.parameters(), strict=True):
        torch.testing.assert_close(mine, p.grad)


def two_groups(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    first, *others = parameters
    return torch.optim.AdamW([{"params": [first]}, {"params": others}], lr=1e-2)


def fewer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(parameters)[:2], lr=1e-2)


@pytest.mark.parametrize(
    ("optimizer", "text"),
    [
        (sgd, "Optimizer 0 of the checkpoint is not this SGD: its settings are amsgrad, betas, .* has no dampening,"),
        (two_groups, "Optimizer 0 of the checkpoint is not this AdamW: it has 1 parameter groups, here are 2"),
        (
            fewer,
            r"Optimizer 0 of the checkpoint is not this AdamW: its groups have \[4\] parameters, here they have \[2\]",
        ),
    ],
    ids=["settings", "groups", "parameters"],
)
def test_another_optimizers_checkpoint_is_refused_before_its_scale_is_taken(
    optimizer: Any, text: str, tmp_path: Any
) -> None:
    trainer = fit(Regression(adamw), regression_batches(1), plugin=plugin("16-mixed", init_scale=64.0))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    made = plugin("16-mixed")
    with pytest.raises(ValueError, match=f"^{text}.* Resume with the optimizers that were saved, or take the weights"):
        quiet_trainer(plugins=[made], max_epochs=2).fit(
            Regression(optimizer), loader(regression_batches(1)), ckpt_path=tmp_path / "a.ckpt", weights_only=True
        )
    assert made.scaler is not None
    assert made.scaler.get_scale() == 1024.0


def test_a_checkpoint_of_other_schedulers_and_of_an_older_torch_is_taken(tmp_path: Any) -> None:
    """Settings that came later are missing in it, and it has those of its own scheduler."""
    trainer = fit(Regression(adamw), regression_batches(1), plugin=plugin("16-mixed"))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    checkpoint = torch.load(tmp_path / "a.ckpt", weights_only=True)
    (group,) = checkpoint["optimizer_states"][0]["param_groups"]
    del group["decoupled_weight_decay"]
    group["max_lr"] = group["initial_lr"] = 1.0
    torch.save(checkpoint, tmp_path / "a.ckpt")
    again = quiet_trainer(plugins=[plugin("16-mixed")], max_epochs=2)
    again.fit(Regression(adamw), loader(regression_batches(1)), ckpt_path=tmp_path / "a.ckpt", weights_only=True)
    assert again.global_step == 2
