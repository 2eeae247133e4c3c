"""The picture of a run says what happened."""

import math

import pytest
from run_columns import NUM_STEPS, run_columns

from lightning_mp.monitors.diagnostics.run_plot import RunPlot, smooth


def _run(precision="16-mixed", skipped=(), num_steps=NUM_STEPS):
    steps, validation = run_columns(precision, skipped, num_steps)
    return RunPlot(
        steps=steps,
        validation=validation,
        precision=precision,
        has_loss_scale=precision.startswith("16"),
        micro_batch_tokens=100,
        budget_tokens=6000,
        highest_loss=5.5,
    )


def _panels(run):
    return run.build_figure().axes[:3]


def _labels(panel):
    return [text.get_text() for text in panel.get_legend().get_texts()]


@pytest.mark.full
@pytest.mark.parametrize("precision", ["16-mixed", "16-true"])
def test_the_picture_is_written_with_three_panels(tmp_path, precision):
    _run(precision).write(tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert [panel.get_ylabel() for panel in _panels(_run(precision))] == [
        "nats per token",
        "loss scale",
        "learning rate",
    ]


def test_the_budget_line_stands_at_the_budget_in_every_panel():
    for panel in _panels(_run()):
        (line,) = [line for line in panel.get_lines() if line.get_label() == "budget"]
        assert list(line.get_xdata()) == [6000, 6000]


def test_the_axis_ends_where_the_run_ends():
    for run in (_run(), _run(num_steps=10)):
        for panel in _panels(run):
            assert panel.get_xlim() == pytest.approx((0, run.steps["tokens"][-1] * 1.02))
    assert "budget" not in _labels(_panels(_run(num_steps=10))[0])


def test_validation_losses_stand_at_their_tokens():
    loss, _, _ = _panels(_run())
    (line,) = [line for line in loss.get_lines() if line.get_label() == "validation"]
    assert list(line.get_xdata()) == [1000, 2000, 4000, 6000]
    assert list(line.get_ydata()) == [2.5, 2.3, 2.2, 2.1]


def test_skipped_steps_are_marked_in_every_panel_and_counted():
    panels = _panels(_run(skipped=(3, 7)))
    for panel in panels:
        assert [400, 400] in [list(line.get_xdata()) for line in panel.get_lines()]
        assert [800, 800] in [list(line.get_xdata()) for line in panel.get_lines()]
    assert _labels(panels[0]) == ["train (smoothed)", "validation", "skipped step", "budget"]
    assert panels[1].get_title(loc="left") == "Loss scale: 2 of 40 steps skipped"


def test_without_a_scaler_the_gradient_norm_is_shown_instead():
    _, scale, _ = _panels(_run("bf16-mixed"))
    assert scale.get_title(loc="left") == "bf16-mixed has no loss scale; gradient norm: 0 of 40 steps skipped"
    assert scale.get_ylabel() == "gradient norm"


def test_where_nobody_measured_the_norm_the_picture_says_so():
    _, scale, _ = _panels(_run("32-true"))
    assert [text.get_text() for text in scale.texts] == ["not measured in 32-true"]


def test_the_accumulation_ramp_is_marked():
    _, _, rate = _panels(_run())
    assert [text.get_text() for text in rate.texts] == [" 2 micro-batches per step"]
    assert rate.texts[0].xy[0] == 2000


@pytest.mark.full
def test_one_step_and_no_validation_can_be_drawn(tmp_path):
    _run(num_steps=1).write(tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
def test_losses_that_are_not_finite_leave_gaps(tmp_path):
    run = _run()
    run.steps["train_loss"][5] = math.nan
    run.steps["train_loss"][6] = math.inf
    run.write(tmp_path / "report.png")
    low, high = _panels(run)[0].get_ylim()
    assert math.isfinite(low)
    assert high < 6


def test_smoothing_weighs_old_values_by_their_half_life():
    smoothed = smooth([0.0] * 10 + [1.0] * 50, half_life=5)
    assert smoothed[9] == 0
    assert smoothed[-1] == pytest.approx(1, abs=2e-3)
    # after one half-life a jump is half way there
    assert smooth([0.0] * 1000 + [1.0] * 5, half_life=5)[-1] == pytest.approx(0.5)


def test_smoothing_leaves_out_what_is_not_finite():
    smoothed = smooth([math.nan, 1.0, math.inf, 3.0], half_life=1)
    assert math.isnan(smoothed[0])
    assert smoothed[1:3] == [1.0, 1.0]
    assert smoothed[3] == smooth([1.0, 3.0], half_life=1)[1]
