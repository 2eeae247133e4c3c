"""The demo from end to end, small: exact landing, exact resume, and a skipped step that explains itself."""

import csv
import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from small_models import at, raising, saving

import lightning_mp.demo.settings
import lightning_mp.language_model.module
from lightning_mp import OverflowMonitor, WarmupCosine
from lightning_mp.__main__ import main
from lightning_mp.checkpoints import latest_checkpoint
from lightning_mp.demo.prepare import prepare
from lightning_mp.demo.run import assemble, fit, run_job
from lightning_mp.demo.settings import Settings
from lightning_mp.language_model import (
    HeldOutBatches,
    LanguageModel,
    TextBatches,
    TextData,
    load_file,
    peak_learning_rate,
)

TINY = {"params": 9264, "tokens_per_parameter": 2.4, "batch_size": 4, "precision": "16-mixed"}
BUDGET_TOKENS = 22_234
NOT_FUSED = {"fused": False}
MICRO_BATCHES = 44  # of 512 tokens; 218 of the last one count


@pytest.fixture(autouse=True)
def _as_in_a_terminal() -> Iterator[None]:
    """A shell starts jobs in the background with Ctrl-C ignored, and Python then leaves it so."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def _short_windows(monkeypatch):
    """Accumulation starts where such short runs get to; samples are short and pictures empty."""
    monkeypatch.setattr(lightning_mp.demo.settings, "ACCUMULATION", {0: 1, 6: 3})
    monkeypatch.setattr("lightning_mp.demo.run._SAMPLE_TOKENS", 3)
    monkeypatch.setattr("lightning_mp.demo.report.RunPlot.write", lambda plot, path: None)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Text enough for less than one pass."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(b"".join(b"line %d of a text, %d\n" % (number, number**2) for number in range(700)))
    return str(path)


@pytest.fixture
def _no_report(monkeypatch):
    """Leaves out sample, picture and summary, which take as long as the training."""
    monkeypatch.setattr("lightning_mp.demo.run._show", lambda *_, **__: None)


def _run(out, text, *callbacks, resume=False, max_minutes=None, **changes):
    given = {} if resume else TINY | {"text": text} | changes
    return run_job(prepare(given, Path(out), resume=resume, max_minutes=max_minutes), callbacks)


def _checkpoint(out):
    return torch.load(latest_checkpoint(Path(out)), weights_only=True)


def _history(out):
    return json.loads((Path(out) / "version_0" / "history.json").read_text())


def _interrupt(*_):
    signal.raise_signal(signal.SIGINT)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, text):
    """A run without a stop."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(lightning_mp.demo.settings, "ACCUMULATION", {0: 1, 6: 3})
        out = tmp_path_factory.mktemp("uninterrupted")
        assert _run(out, text) == 0
    return out


@pytest.mark.full
def test_a_run_lands_exactly_on_its_budget_and_leaves_its_files(uninterrupted):
    folder = uninterrupted / "version_0"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["tokens"] == summary["budget_tokens"] == BUDGET_TOKENS
    assert summary["optimizer_steps"] == 6 + -(-(MICRO_BATCHES - 6) // 3)
    assert _checkpoint(uninterrupted)["global_step"] == summary["optimizer_steps"] == 19
    assert summary["skipped_steps"] == 0
    assert summary["validation_bits_per_byte"] < 7.8
    assert summary["peak_memory_bytes"] > 2**20
    assert _history(uninterrupted)["stopped_by"] is None
    assert (folder / "report.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert (folder / "sample.txt").read_text(encoding="utf-8").startswith("def ")
    assert "val/loss" in (folder / "csv" / "version_0" / "metrics.csv").read_text()
    assert list((folder / "tensorboard").glob("events.out.tfevents.*"))


def test_the_trained_model_is_read_without_a_trainer(uninterrupted):
    model = LanguageModel.load_from_checkpoint(latest_checkpoint(uninterrupted), map_location="cpu", weights_only=True)
    assert _equal(dict(model.state_dict()), dict(_checkpoint(uninterrupted)["state_dict"]))


def test_the_plan_foretells_the_steps_and_the_learning_rate_ends_with_the_budget(uninterrupted):
    history = _history(uninterrupted)
    tokens, rates = (history["steps"][name] for name in ("tokens", "learning_rate"))
    assert len(tokens) == history["plan"]["optimizer_steps"]
    schedule = WarmupCosine(warmup=0.05, final=0.1, start=0.02)
    expected = [schedule(before / BUDGET_TOKENS) for before in (0, *tokens[:-1])]
    assert [rate / peak_learning_rate(9264) for rate in rates] == pytest.approx(expected)


def test_learning_rate_speed_and_the_last_values_are_logged(uninterrupted):
    with (uninterrupted / "version_0" / "csv" / "version_0" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    last, history = rows[-1], _history(uninterrupted)
    summary = json.loads((uninterrupted / "version_0" / "summary.json").read_text())
    assert int(last["step"]) == summary["optimizer_steps"] - 1
    assert float(last["val/loss"]) == summary["validation_loss"]
    assert float(last["mp/tokens"]) == summary["tokens"]
    assert float(last["mp/skipped_steps"]) == summary["skipped_steps"]
    assert float(last["mp/budget_fraction"]) == 1.0
    assert float(last["train/loss"]) == pytest.approx(history["steps"]["train_loss"][-1])
    assert float(last["train/learning_rate"]) == pytest.approx(history["steps"]["learning_rate"][-1])
    assert float(last["mp/tokens_per_second"]) > 0


@pytest.mark.parametrize(("tokens_per_parameter", "micro_batches"), [(0.0553, 1), (0.1, 2), (0.35, 7)])
def test_the_smallest_budgets_are_spent(text, tokens_per_parameter, micro_batches):
    """Validation is asked for 12 times; every micro-batch is an optimizer step here."""
    assert _run("out", text, tokens_per_parameter=tokens_per_parameter, precision="bf16-mixed") == 0
    budget = _history("out")["budget_tokens"]
    assert _history("out")["steps"]["tokens"] == [*(512 * (step + 1) for step in range(micro_batches - 1)), budget]
    assert _history("out")["validation"]["tokens"][-1] == budget


@pytest.mark.full
def test_piped_output_has_lines_only(text, capsys):
    assert _run("out", text) == 0
    output = "".join(capsys.readouterr())
    assert not any(character in output for character in "\r\x1b\b")
    assert "it/s" not in output
    assert re.search(r"^22,234 tokens: train loss \d\.\d+, validation loss \d\.\d+$", output, re.MULTILINE)


@pytest.mark.full
@pytest.mark.usefixtures("_no_report")
@pytest.mark.parametrize("stop_at", [0, 5, 7, 40], ids=lambda micro_batch: f"micro-batch {micro_batch}")
def test_ctrl_c_and_resume_equal_no_stop_bit_for_bit(uninterrupted, text, capsys, stop_at):
    assert _run("out", text, at(_interrupt, batch_idx=stop_at)) == 130
    assert "Resume with: lightning-mp demo --resume --out out/version_0" in capsys.readouterr().out
    window_end = stop_at if stop_at < 6 else stop_at + 2 - stop_at % 3
    assert _history("out")["steps"]["tokens"][-1] == 512 * (window_end + 1)
    assert _run("out", text, resume=True) == 0
    _assert_same_run("out", uninterrupted)
    assert _history("out")["validation"] == _history(uninterrupted)["validation"]


@pytest.mark.full
@pytest.mark.usefixtures("_no_report")
def test_stopping_after_every_step_equals_no_stop_bit_for_bit(uninterrupted, text):
    _run("out", text, max_minutes=1e-9)
    stops = 1
    while _history("out")["stopped_by"] == "time":
        _run("out", text, resume=True, max_minutes=1e-9)
        stops += 1
    assert stops == len(_history(uninterrupted)["steps"]["tokens"])
    _assert_same_run("out", uninterrupted)


@pytest.mark.full
@pytest.mark.usefixtures("_no_report")
def test_a_run_that_was_killed_goes_on_from_its_last_regular_checkpoint(uninterrupted, text):
    class Killed(Exception):
        pass

    def kill(*_):
        raise Killed

    with pytest.raises(Killed):
        _run("out", text, at(kill, batch_idx=30))
    tokens_saved = _checkpoint("out")["lightning_mp_demo"]["steps"]["tokens"][-1]
    assert 0 < tokens_saved < 31 * 512
    assert _run("out", text, resume=True) == 0
    _assert_same_run("out", uninterrupted)


def _assert_same_run(out, reference):
    got, expected = _checkpoint(out), _checkpoint(reference)
    for part in ("state_dict", "optimizer_states", "LossScaler", "AutocastPrecision"):
        assert _equal(got.get(part), expected.get(part)), part
    rows, expected_rows = _history(out), _history(reference)
    assert rows["steps"] == expected_rows["steps"]
    assert rows["tokens"] == expected_rows["tokens"] == BUDGET_TOKENS


def _equal(left, right):
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_equal(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(_equal, left, right))
    return left == right


@pytest.mark.full
@pytest.mark.usefixtures("_no_report")
def test_the_second_ctrl_c_stops_at_once_and_says_what_is_left(text, capsys):
    def interrupt_twice(*_):
        _interrupt()
        _interrupt()

    with pytest.raises(KeyboardInterrupt, match="No checkpoint had been written yet"):
        _run("early", text, at(interrupt_twice, batch_idx=0))
    with pytest.raises(KeyboardInterrupt, match=r"The last checkpoint is late.version_0.*.ckpt. Resume with: "):
        _run("late", text, at(interrupt_twice, batch_idx=40))


def test_ctrl_c_before_the_first_batch_ends_the_run_at_once(text):
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match="No checkpoint had been written yet"):
        _run("out", text, at(_interrupt, "on_fit_start"))
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.full
def test_ctrl_c_after_training_says_how_to_see_the_results(text, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("lightning_mp.demo.run._show", interrupted)
    with pytest.raises(
        KeyboardInterrupt, match=r"The last checkpoint is out.version_0.*Resume with: lightning-mp demo"
    ):
        _run("out", text)


@pytest.mark.full
def test_ctrl_c_in_the_last_step_does_not_spoil_a_finished_run(text, capsys):
    assert _run("out", text, at(_interrupt, batch_idx=MICRO_BATCHES - 1)) == 0
    assert "22,234 (spent exactly)" in capsys.readouterr().out


def test_ctrl_c_before_training_ends_without_a_traceback(text, capsys, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("lightning_mp.demo.prepare.prepare", interrupted)
    assert main(["demo"]) == 130
    assert "Interrupted. Nothing has been written." in capsys.readouterr().err


def test_the_time_limit_is_told_with_the_way_to_go_on(text, capsys):
    assert _run("out", text, max_minutes=1e-9) == 0
    output = capsys.readouterr().out
    assert "22,234 (2.3% spent)" in output
    assert "Stopped after --max-minutes. The last checkpoint is out/version_0/checkpoints/stopped" in output
    assert "Resume with: lightning-mp demo --resume --out out/version_0" in output


@pytest.mark.full
def test_an_injected_overflow_is_skipped_named_and_holds_the_learning_rate(text, capsys):
    assert _run("out", text, inject_overflow=4) == 0
    steps = _history("out")["steps"]
    assert [index for index, skipped in enumerate(steps["skipped"]) if skipped] == [4]
    assert steps["learning_rate"][4] == steps["learning_rate"][5] != steps["learning_rate"][6]
    assert steps["loss_scale"][5] == steps["loss_scale"][4] / 2
    report = json.loads(Path("out/version_0/overflow_step_4.json").read_text())
    assert report["parameters"] == ["model.blocks.0.mlp.up.weight"]
    output = capsys.readouterr().out
    assert "4: loss scale 65536 -> 32768, learning rate held at" in output
    assert "not finite: model.blocks.0.mlp.up.weight" in output


@pytest.mark.full
@pytest.mark.usefixtures("_no_report")
def test_the_held_learning_rate_is_recorded_also_where_a_skip_does_not_reach_the_optimizer(text, monkeypatch):
    fused = lightning_mp.language_model.module.AdamW
    monkeypatch.setattr(
        lightning_mp.language_model.module, "AdamW", lambda *args, **kwargs: fused(*args, **kwargs | NOT_FUSED)
    )
    assert _run("out", text, inject_overflow=4) == 0
    rates = _history("out")["steps"]["learning_rate"]
    assert rates[3] != rates[4] == rates[5] != rates[6]


@pytest.mark.full
@pytest.mark.usefixtures("_no_report")
def test_a_checkpoint_knows_the_last_outcome_without_help_of_other_callbacks(text):
    job = prepare(TINY | {"text": text}, Path("out"))
    trainer = assemble(job, [at(saving("middle.ckpt"), batch_idx=5)])
    trainer.callbacks = [callback for callback in trainer.callbacks if not isinstance(callback, OverflowMonitor)]
    fit(trainer, job)
    saved = torch.load("middle.ckpt", weights_only=True)["lightning_mp_demo"]
    assert {name: len(column) for name, column in saved["steps"].items()} == dict.fromkeys(saved["steps"], 6)


def test_a_run_that_is_refused_at_the_start_leaves_nothing_behind(text):
    with pytest.raises(MisconfigurationException, match="not like this"):
        _run("out", text, at(raising(MisconfigurationException("not like this")), "on_fit_start"))
    assert not Path("out/version_0").exists()


def test_seed_rank_and_world_size_reach_the_batches(text):
    corpus = load_file(Path(text))
    data = TextData(corpus, batch_size=2, num_batches=4, seed=9)
    data.trainer = SimpleNamespace(distributed_sampler_kwargs={"rank": 1, "num_replicas": 2})
    shape = {"batch_size": 2, "block_tokens": 128, "rank": 1, "world_size": 2}
    expected = TextBatches(corpus.train, num_batches=4, seed=9, **shape)
    assert _equal(list(data.train_dataloader()), list(expected))
    held_out = HeldOutBatches(corpus.validation, max_batches=32, **shape)
    assert _equal(list(data.val_dataloader()), list(held_out))


@pytest.mark.full
def test_the_default_precision_lands_exactly(text, capsys):
    assert _run("out", text, precision="bf16-mixed") == 0
    assert _history("out")["tokens"] == BUDGET_TOKENS
    assert "22,234 (spent exactly)" in capsys.readouterr().out


@pytest.mark.parametrize("schedule", [{0: 1}, {0: 4}, {0: 1, 200: 2}, {0: 3, 2: 1, 5: 4}], ids=str)
@pytest.mark.parametrize("micro_batches", [1, 2, 7, 200, 201, 994])
def test_optimizer_steps_are_counted_as_they_are_made(monkeypatch, micro_batches, schedule):
    monkeypatch.setattr("lightning_mp.demo.settings.ACCUMULATION", schedule)
    settings = Settings(params=9264, batch_size=1, tokens_per_parameter=micro_batches * 128 / 9264)
    assert settings.plan.micro_batches == micro_batches
    steps = left = 0
    for index in range(micro_batches):
        if left == 0:
            left = schedule[max(threshold for threshold in schedule if threshold <= steps)]
        left -= 1
        if left == 0 or index == micro_batches - 1:
            steps += 1
            left = 0
    assert settings.plan.optimizer_steps == steps
