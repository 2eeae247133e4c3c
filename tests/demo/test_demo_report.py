"""The demo's picture and final table say what happened."""

import json
import math
from pathlib import Path

import pytest

from lightning_mp.demo.prepare import prepare
from lightning_mp.demo.report import build_figure, draw_report, format_table, smooth, summarise
from lightning_mp.demo.run import _printable

NUM_STEPS = 40


def _history(precision="16-mixed", skipped=(), num_steps=NUM_STEPS, **changes):
    """A run of 40 steps; the last 20 have two micro-batches of 100 tokens."""
    tokens = [100 * (step + 1 + max(0, step - 19)) for step in range(num_steps)]
    scaled = precision.startswith("16")
    scales = [2.0 ** (16 - sum(skip < step for skip in skipped)) if scaled else 1.0 for step in range(num_steps)]
    history = {
        "settings": {"precision": precision, "devices": 1, "tokens_per_parameter": 20.0},
        "plan": {"parameters": 300, "micro_batch_tokens": 100},
        "steps": {
            "tokens": tokens,
            "train_loss": [2.0 + 3.5 * 0.9**step for step in range(num_steps)],
            "learning_rate": [1e-3 * (num_steps - step) for step in range(num_steps)],
            "loss_scale": scales,
            "skipped": [step in skipped for step in range(num_steps)],
            "grad_norm": [None if precision == "32-true" else 1.0 for _ in range(num_steps)],
        },
        "validation": {"tokens": tokens[9::10], "loss": [2.5, 2.3, 2.2, 2.1][: num_steps // 10]},
        "train_seconds": 2.0,
        "tokens_per_second": 3000.0,
        "mfu": None,
        "tokens": tokens[-1],
        "budget_tokens": 6000,
        "stopped_by": None,
        "device": "cpu",
        "peak_memory_bytes": 300 * 2**20,
    }
    return history | changes


def _panels(history):
    return build_figure(history).axes[:3]


def _labels(panel):
    return [text.get_text() for text in panel.get_legend().get_texts()]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("precision", ["16-mixed", "16-true"])
def test_the_picture_is_written_with_three_panels(tmp_path, precision):
    draw_report(_history(precision), tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert [panel.get_ylabel() for panel in _panels(_history(precision))] == [
        "nats per byte",
        "loss scale",
        "learning rate",
    ]


def test_the_budget_line_stands_at_the_budget_in_every_panel():
    for panel in _panels(_history()):
        (line,) = [line for line in panel.get_lines() if line.get_label() == "budget"]
        assert list(line.get_xdata()) == [6000, 6000]


def test_the_axis_ends_where_the_run_ends():
    for history in (_history(), _history(num_steps=10)):
        for panel in _panels(history):
            assert panel.get_xlim() == pytest.approx((0, history["tokens"] * 1.02))
    assert "budget" not in _labels(_panels(_history(num_steps=10))[0])


def test_validation_losses_stand_at_their_tokens():
    loss, _, _ = _panels(_history())
    (line,) = [line for line in loss.get_lines() if line.get_label() == "validation"]
    assert list(line.get_xdata()) == [1000, 2000, 4000, 6000]
    assert list(line.get_ydata()) == [2.5, 2.3, 2.2, 2.1]


def test_skipped_steps_are_marked_in_every_panel_and_counted():
    panels = _panels(_history(skipped=(3, 7)))
    for panel in panels:
        assert [400, 400] in [list(line.get_xdata()) for line in panel.get_lines()]
        assert [800, 800] in [list(line.get_xdata()) for line in panel.get_lines()]
    assert _labels(panels[0]) == ["train (smoothed)", "validation", "skipped step", "budget"]
    assert panels[1].get_title(loc="left") == "Loss scale: 2 of 40 steps skipped"


def test_without_a_scaler_the_gradient_norm_is_shown_instead():
    _, scale, _ = _panels(_history("bf16-mixed"))
    assert scale.get_title(loc="left") == "bf16-mixed has no loss scale; gradient norm: 0 of 40 steps skipped"
    assert scale.get_ylabel() == "gradient norm"


def test_where_nobody_measured_the_norm_the_picture_says_so():
    _, scale, _ = _panels(_history("32-true"))
    assert [text.get_text() for text in scale.texts] == ["not measured in 32-true"]


def test_the_accumulation_ramp_is_marked():
    _, _, rate = _panels(_history())
    assert [text.get_text() for text in rate.texts] == [" 2 micro-batches per step"]
    assert rate.texts[0].xy[0] == 2000


def test_the_title_says_how_much_of_the_budget_was_spent():
    assert "6,000 tokens: exactly its budget of 20 per parameter" in build_figure(_history()).get_suptitle()
    stopped = _history(num_steps=10)
    assert "1,000 tokens: 17% of its budget" in build_figure(stopped).get_suptitle()


@pytest.mark.full
def test_one_step_and_no_validation_can_be_drawn(tmp_path):
    draw_report(_history(num_steps=1), tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
def test_losses_that_are_not_finite_leave_gaps(tmp_path):
    history = _history()
    history["steps"]["train_loss"][5] = math.nan
    history["steps"]["train_loss"][6] = math.inf
    draw_report(history, tmp_path / "report.png")
    low, high = _panels(history)[0].get_ylim()
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


def test_the_table_has_every_figure_in_both_units(tmp_path):
    text = format_table(summarise(_history(), tmp_path), tmp_path)
    lines = dict(line.split("  ", 1) for line in text.splitlines() if not line.startswith(" "))
    values = {name: value.strip() for name, value in lines.items()}
    assert values["tokens"] == "6,000"
    assert values["budget"] == "6,000 (spent exactly)"
    assert values["optimizer steps"] == "40"
    assert values["skipped"] == "0"
    # 5% of 40 steps: the last two
    expected = 2.0 + 3.5 * (0.9**38 + 0.9**39) / 2
    bits = expected / math.log(2)
    assert values["train loss"] == f"{expected:.3f} nats, {bits:.3f} bits per byte, mean of the last 5% of the steps"
    assert values["validation loss"] == "2.100 nats, 3.030 bits per byte"
    assert values["tokens per second"] == "3,000 on cpu"
    assert values["peak memory"] == "300 MiB resident"
    assert values["results in"] == str(tmp_path)


def test_the_table_shows_mfu_where_it_is_known(tmp_path):
    text = format_table(summarise(_history(mfu=0.412), tmp_path), tmp_path)
    assert "MFU                41.2%" in text


def test_the_table_explains_a_skipped_step(tmp_path):
    (tmp_path / "overflow_step_3.json").write_text(json.dumps({"parameters": ["a.weight", "b.weight", "c.weight"]}))
    history = _history(skipped=(3,))
    history["steps"]["learning_rate"][4] = history["steps"]["learning_rate"][3]
    text = format_table(summarise(history, tmp_path), tmp_path)
    assert (
        "3: loss scale 65536 -> 32768, learning rate held at 3.700e-02, not finite: a.weight, b.weight and 1 more"
        in text
    )


def test_a_learning_rate_that_moved_on_a_skip_is_not_called_held(tmp_path):
    text = format_table(summarise(_history(skipped=(3,)), tmp_path), tmp_path)
    assert "learning rate 3.700e-02 -> 3.600e-02, not finite: unknown" in text


def test_many_skips_are_cut_short_with_a_pointer(tmp_path):
    text = format_table(summarise(_history(skipped=range(8)), tmp_path), tmp_path)
    assert text.count("skipped step") == 5
    assert "and 3 more, see summary.json" in text


def test_a_skip_in_the_last_step_has_nothing_after_it(tmp_path):
    text = format_table(summarise(_history(skipped=(39,)), tmp_path), tmp_path)
    assert "39: loss scale 65536, not finite: unknown" in text


def test_the_summary_of_a_stopped_run_without_validation(tmp_path):
    summary = summarise(_history(num_steps=5), tmp_path)
    assert "6,000 (8.3% spent)" in format_table(summary, tmp_path)
    assert "validation loss    none" in format_table(summary, tmp_path)
    assert summary["validation_bits_per_byte"] is None


def test_a_sample_cannot_command_the_terminal():
    assert _printable(b"def f():\n\treturn \x1b[2J\xc3\xa9\xff\x00") == "def f():\n\treturn \u00b7[2J\u00e9\ufffd\u00b7"


def test_a_new_run_gets_the_next_free_folder():
    for version in (2, 10):
        Path("out", f"version_{version}").mkdir(parents=True)
    Path("text.txt").write_bytes(bytes(4000))
    settings = {"params": 9264, "tokens_per_parameter": 0.3, "batch_size": 1, "text": "text.txt"}
    assert prepare(settings, Path("out")).folder == Path("out/version_11")
