"""The demo's picture and final table say what happened."""

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from run_columns import NUM_STEPS, run_columns
from tqdm import tqdm

from lightning_mp.demo.prepare import prepare
from lightning_mp.demo.report import format_table, plot_of, summarise
from lightning_mp.demo.run import ProgressBar, _printable


def _history(precision="16-mixed", skipped=(), num_steps=NUM_STEPS, **changes):
    steps, validation = run_columns(precision, skipped, num_steps)
    history = {
        "settings": {"precision": precision, "devices": 1, "tokens_per_parameter": 20.0},
        "plan": {"parameters": 300, "micro_batch_tokens": 100},
        "steps": steps,
        "validation": validation,
        "train_seconds": 2.0,
        "tokens_per_second": 3000.0,
        "mfu": None,
        "tokens": steps["tokens"][-1],
        "budget_tokens": 6000,
        "stopped_by": None,
        "device": "cpu",
        "peak_memory_bytes": 300 * 2**20,
    }
    return history | changes


def test_the_title_says_how_much_of_the_budget_was_spent():
    assert "6,000 tokens: exactly its budget of 20 per parameter" in plot_of(_history()).title
    assert "1,000 tokens: 17% of its budget" in plot_of(_history(num_steps=10)).title


def unwrapped(text):
    """With one line per value: the table is wrapped at 80 columns."""
    return re.sub(r"\n {19}", " ", text)


def test_the_picture_shows_the_loss_scale_where_there_is_one_and_a_token_is_a_byte():
    for precision, shown in {"16-mixed": "loss scale", "16-true": "loss scale", "bf16-mixed": "gradient norm"}.items():
        panels = plot_of(_history(precision)).build_figure().axes
        assert [panel.get_ylabel() for panel in panels[:2]] == ["nats per byte", shown]


def test_the_table_has_every_figure_in_both_units(tmp_path):
    text = unwrapped(format_table(summarise(_history(), tmp_path), tmp_path))
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


def test_the_table_fits_into_a_terminal(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    lines = format_table(summarise(_history(skipped=(3,)), tmp_path), tmp_path).splitlines()
    assert [line for line in lines if len(line) > 80 and str(tmp_path) not in line] == []
    assert next(line for line in lines if "not finite" in line).startswith(19 * " ")


def test_the_table_explains_a_skipped_step(tmp_path):
    (tmp_path / "overflow_step_3.json").write_text(json.dumps({"parameters": ["a.weight", "b.weight", "c.weight"]}))
    history = _history(skipped=(3,))
    history["steps"]["learning_rate"][4] = history["steps"]["learning_rate"][3]
    text = unwrapped(format_table(summarise(history, tmp_path), tmp_path))
    assert (
        "3: loss scale 65536 -> 32768, learning rate held at 3.700e-02, not finite: a.weight, b.weight and 1 more"
        in text
    )


def test_a_learning_rate_that_moved_on_a_skip_is_not_called_held(tmp_path):
    text = unwrapped(format_table(summarise(_history(skipped=(3,)), tmp_path), tmp_path))
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


@pytest.mark.parametrize("batches", [5, 99_999])
def test_the_bar_fits_into_80_columns(batches):
    names = {
        "v_num": 0,
        "train/loss": 12.3456,
        "mp/budget_fraction": 1.0,
        "mp/skipped_steps": 12.0,
        "mp/loss_scale": 1e9,
    }
    trainer = SimpleNamespace(progress_bar_metrics=names, loggers=[])
    shown = ProgressBar().get_metrics(trainer, None)
    assert shown == {"loss": "12.346", "budget": "100%", "skipped": "12"}
    postfix = ", ".join(f"{name}={value}" for name, value in shown.items())
    line = tqdm.format_meter(
        batches, batches, 59.0, ncols=79, prefix="Epoch 0: ", bar_format=ProgressBar.BAR_FORMAT, postfix=postfix
    )
    assert len(line) <= 79
    assert postfix in line
    names |= {"mp/skipped_steps": 0.0}
    assert "skipped" not in ProgressBar().get_metrics(trainer, None)
