"""What the post-mortem says: a diverged run by that name, the same trouble once, everything on one line."""

import logging
import re
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from planted_overflows import LogOfZero, Planted, TimesInBackward, TimesInForward, numbered_batches
from small_models import Regression, loader, quiet_trainer, regression_batches
from torch import nn

from lightning_mp import AutocastPrecision, LossScaler, MasterWeightsPrecision, OverflowMonitor, OverflowPostMortem
from lightning_mp.monitors.diagnostics.overflow.report import OverflowReport


def plugin() -> AutocastPrecision:
    return AutocastPrecision("16-mixed", scaler=LossScaler(init_scale=1024.0))


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    return [line for line in said if "skipped" in line]


def fit(module: Any, batches: Any, folder: Path, **settings: Any) -> OverflowPostMortem:
    post_mortem = OverflowPostMortem(replay=True, dirpath=folder, **settings)
    quiet_trainer(plugins=[plugin()], callbacks=[post_mortem]).fit(module, loader(batches))
    return post_mortem


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_diverged_model_is_called_diverged(kind: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Seen: weights near 1e6 were "a division by zero"."""
    module = Regression(partial(kind, lr=1e6))
    (report, *_) = fit(module, regression_batches(6), tmp_path, max_replays=1).reports
    (finding,) = report.findings
    assert (report.step_index > 0, finding.verdict) == (True, "diverged")
    assert report.growth is not None
    assert report.growth.rms > 1e3 > 1 > report.growth.rms_at_start
    text = messages(caplog)[0]
    assert (
        f"training has diverged: the values of {report.growth.parameter} are now about {report.growth.rms:.2g}" in text
    )
    assert "division by zero" not in text


def test_weights_that_were_large_from_the_start_have_not_diverged(tmp_path: Path) -> None:
    module = Planted(LogOfZero)
    with torch.no_grad():
        module.head.weight.mul_(100.0)
    (report,) = [r for r in fit(module, numbered_batches(4), tmp_path).reports if r.step_index == 2]
    assert (report.findings[0].verdict, report.growth) == ("model", None)


def test_a_resumed_run_is_compared_with_the_beginning(tmp_path: Path) -> None:
    first = OverflowPostMortem(dirpath=tmp_path)
    trainer = quiet_trainer(plugins=[plugin()], callbacks=[first])
    module = Regression(partial(torch.optim.AdamW, lr=1e4))
    trainer.fit(module, loader(regression_batches(2)))
    trainer.save_checkpoint(tmp_path / "diverged.ckpt")
    second, module = OverflowPostMortem(dirpath=tmp_path), Regression(overflows=[0])
    trainer = quiet_trainer(plugins=[plugin()], callbacks=[second], max_epochs=2)
    trainer.fit(module, loader(regression_batches(2)), ckpt_path=tmp_path / "diverged.ckpt", weights_only=True)
    assert second.reports[0].growth is not None


def test_the_same_trouble_is_told_once_then_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    planted = range(1, 13)
    module = Planted(partial(TimesInForward, factor=1e6), planted=planted)
    post_mortem = fit(module, numbered_batches(14), tmp_path, max_replays=20)
    assert len(post_mortem.reports) == len(planted)
    said = messages(caplog)
    assert said[0].startswith("Optimizer step 1 was skipped at loss scale 1024.")
    kind = "because numbers were too large for 16 bit in body.1.place (first at step 1)"
    assert said[1:] == [
        f"OverflowPostMortem: 10 optimizer steps were skipped: 10 {kind}.",
        f"OverflowPostMortem: 12 optimizer steps were skipped: 12 {kind}.",
    ]
    assert all("\n" not in line for line in said)


def test_steps_that_were_not_replayed_are_no_other_trouble(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    module = Planted(partial(TimesInForward, factor=1e6), planted=range(1, 5))
    fit(module, numbered_batches(6), tmp_path, max_replays=2)
    said = messages(caplog)
    assert said[1].endswith(" Not replayed: the limit of max_replays=2 is reached.")
    assert said[-1] == (
        "OverflowPostMortem: 4 optimizer steps were skipped: 2 because numbers were too large for 16 bit in"
        " body.1.place (first at step 1); 2 not replayed, with non-finite gradients in head.bias (first at step 3)."
    )


def test_other_trouble_is_told_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Both(TimesInBackward):
        """A gradient that is too large at first; later a forward that is."""

        def forward(self, x: Any) -> Any:
            if self.trigger.on and len(seen) >= 2:
                return x * 1e6
            return super().forward(x)

    seen: list[int] = []

    class Counted(Planted):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            super().on_train_batch_start(batch, batch_idx)
            if batch_idx == 3:
                seen.extend([0, 0])

    module = Counted(partial(Both, factor=2e4), planted=[1, 2, 3])
    module.body[2] = nn.Identity()
    post_mortem = fit(module, numbered_batches(5), tmp_path)
    verdicts = [report.findings[0].verdict for report in post_mortem.reports]
    assert verdicts == ["scale", "scale", "range"]
    said = messages(caplog)
    assert [line.split(" was")[0] for line in said[:2]] == ["Optimizer step 1", "Optimizer step 3"]
    assert "3 optimizer steps were skipped: 2 because the loss scale was too high (first at step 1)" in said[2]
    assert len(said) == 3


def test_large_scales_are_written_out() -> None:
    """Seen: 1.67772e+07, which is no power of two."""
    report = OverflowReport(step_index=0, loss_scale=2.0**24, parameters=[], ranks=[0], findings=[])
    assert "skipped at loss scale 16777216." in str(report)


@pytest.mark.parametrize(
    ("precision", "others", "said"),
    [
        ("32-true", [], "With Precision add lightning_mp.OverflowMonitor(guard=True) to the callbacks"),
        ("bf16-mixed", [], "With MixedPrecision add lightning_mp.OverflowMonitor(guard=True) to the callbacks"),
        ("32-true", [OverflowMonitor()], "OverflowPostMortem will see nothing: Precision has no loss scale"),
        ("bf16-mixed", [OverflowMonitor()], "will see nothing: MixedPrecision has no loss scale"),
        ("32-true", [OverflowMonitor(guard=True)], ""),
    ],
)
def test_without_a_scale_lightnings_plugins_need_the_guard(
    precision: Any, others: Any, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Seen: the callback that the error named skipped nothing either, and nothing was said of weights of NaN."""
    trainer = quiet_trainer(precision=precision, callbacks=[OverflowPostMortem(), *others])
    refused = pytest.raises(MisconfigurationException, match=re.escape(said)) if not others else nullcontext()
    with refused, caplog.at_level("INFO"):
        trainer.fit(Regression(), loader(regression_batches(2)))
    assert not others or said in caplog.text
    assert said or "will see nothing" not in caplog.text


class NoLoss(Regression):
    """No loss in some batches."""

    without: range

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx in self.without else super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:.training_step. returned .None.")
@pytest.mark.parametrize("without", [range(12), range(1, 2)])
@pytest.mark.parametrize(
    "precision",
    [
        plugin,
        partial(AutocastPrecision, "bf16-mixed"),
        partial(MasterWeightsPrecision, "16-true", scaler=LossScaler(init_scale=1024.0)),
    ],
)
def test_a_window_without_a_loss_is_no_overflow(precision: Any, without: range, tmp_path: Path) -> None:
    """Seen: "12 of 12 steps were skipped because gradients were not finite", and a report of each."""
    monitor, post_mortem = OverflowMonitor(stop_after_skips=5), OverflowPostMortem(replay=True, dirpath=tmp_path)
    trainer = quiet_trainer(plugins=[precision()], callbacks=[monitor, post_mortem])
    module = NoLoss()
    module.without = without
    trainer.fit(module, loader(regression_batches(12)))
    assert (trainer.global_step, monitor.skipped_steps, monitor.skip_streak) == (12, len(without), 0)
    assert post_mortem.reports == []
