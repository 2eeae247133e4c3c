"""``lightning-mp demo``: one line and exit code 2 for every wrong input, and nothing written."""

import shutil
from pathlib import Path

import pytest
import torch

from lightning_mp.__main__ import main
from lightning_mp.checkpoints import latest_checkpoint

TINY_RUN = ["--params", "9264", "--tokens-per-parameter", "0.3", "--batch-size", "4", "--precision", "32-true"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A text of 60,000 bytes, read in a moment."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(b"".join(b"line %d of a text\n" % number for number in range(3000)))
    return str(path)


def _refusal(capsys, *arguments):
    """The only line that a wrong command prints."""
    before = set(Path.cwd().rglob("*"))
    with pytest.raises(SystemExit) as exit_info:
        main(["demo", *arguments])
    assert exit_info.value.code == 2
    output = capsys.readouterr()
    assert output.err.count("\n") == 1, output.err
    assert "Traceback" not in output.err
    assert set(Path.cwd().rglob("*")) == before, "nothing may be written"
    return output.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--precision", "int4"], "argument --precision: invalid choice: 'int4' (choose from "),
        (["--precision", "fp8-mixed", "--recipe", "soup"], "argument --recipe: invalid choice: 'soup' (choose from "),
        (["--recipe", "rowwise"], "--recipe works only with --precision fp8-mixed, not bf16-mixed"),
        (["--precision", "bf16-true", "--storage", "tape"], "argument --storage: invalid choice: 'tape' (choose from "),
        (["--precision", "16-true", "--storage", "remainder"], "works only with --precision bf16-true, not 16-true"),
        (["--precision", "tf32", "--accelerator", "cpu"], "TF32Precision cannot run on this device: TF32 is a mode of"),
        (
            ["--accelerator", "cpu", "--tensor-parallel", "2", "--devices", "1"],
            "tensor_parallel_size=2) needs a multiple of 2 ranks, and the Trainer has 1",
        ),
        (
            ["--tensor-parallel", "2", "--devices", "2", "--strategy", "ddp"],
            "--tensor-parallel works only with --strategy auto or mp_fsdp2, not ddp: change one of the two",
        ),
        (["--stages", "2", "--devices", "2"], "--stages works only with --strategy mp_pipeline, not auto"),
        (
            ["--accelerator", "cpu", "--strategy", "mp_pipeline", "--stages", "2", "--devices", "1"],
            "PipelineParallelStrategy(stages=2) needs a multiple of 2 ranks, and the Trainer has 1",
        ),
        (["--params", "many"], "argument --params: `params` cannot be read, got 'many'"),
        (["--params", "-5"], "--params -5 is not allowed: give a positive number"),
        (["--params", "5000"], "a model of 5000 parameters cannot be built: the smallest has 9264"),
        (["--batch-size", "0"], "--batch-size 0 is not allowed: give a positive number"),
        (["--devices", "-1"], "--devices -1 is not allowed: give a positive number"),
        (["--seed", "-1"], "--seed -1 is not allowed: give a number from 0 to 4294967295"),
        (["--tokens-per-parameter", "nan"], "--tokens-per-parameter nan is not allowed: give a positive number"),
        (["--max-minutes", "0"], "--max-minutes 0 is not allowed: give a positive number of minutes"),
        (
            ["--params", "9264", "--tokens-per-parameter", "0.1"],
            "the budget of 926 tokens (0.1 for each of 9,264 parameters) is smaller than one batch of 1,024 tokens: "
            "raise --tokens-per-parameter or --params, or lower --batch-size or --devices",
        ),
        (
            ["--inject-overflow", "3"],
            "--inject-overflow works only with --precision 16-mixed or 16-true, not bf16-mixed",
        ),
        (["--precision", "16-mixed", "--inject-overflow", "-1"], "so give a number from 0 to 1093"),
        (
            ["--precision", "16-mixed", "--inject-overflow", "9999"],
            "is not allowed: this run has 1094 optimizer steps, so give a number from 0 to 1093",
        ),
        (["--accelerator", "abacus"], "argument --accelerator: invalid choice: 'abacus' (choose from "),
        (["--resume"], "--resume finds no checkpoint under runs/demo: start a run without --resume"),
        (["--text", "missing.txt"], "cannot be read (No such file or directory): give a readable file as --text"),
        (["--text", "."], "cannot be read (Is a directory): give a readable file as --text"),
        (["--strategy", "teleport"], "invalid strategy name: `strategy='teleport'`"),
        (["--colour"], "unrecognized arguments: --colour"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_input_is_refused_in_one_line(capsys, arguments, message):
    assert message in _refusal(capsys, *arguments)


def test_a_tiny_text_is_refused(capsys, tmp_path):
    (tmp_path / "tiny.txt").write_text("too short")
    message = _refusal(capsys, "--text", "tiny.txt")
    assert "the text has 0 blocks of 128 tokens, and one batch over all ranks needs 8: give a longer --text" in (
        message
    )


def test_a_device_that_is_not_there_is_refused(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    message = _refusal(capsys, "--accelerator", "cuda")
    assert "--accelerator 'cuda' is not available here. Use 'auto' or one of 'cpu'" in message


def test_a_precision_that_the_device_lacks_is_refused(capsys, monkeypatch):
    monkeypatch.setattr(torch.amp, "is_autocast_available", lambda device: False)
    message = _refusal(capsys, "--precision", "16-mixed", "--accelerator", "cpu")
    assert "torch has no torch.float16 autocast there. Use one of" in message


def test_a_run_that_lightning_refuses_leaves_nothing_behind(capsys, text):
    message = _refusal(capsys, *TINY_RUN, "--text", text, "--strategy", "fsdp", "--accelerator", "cpu")
    assert "fsdp" in message


def test_an_out_that_is_a_file_is_refused(capsys, tmp_path):
    (tmp_path / "taken").write_text("")
    assert "--out taken is a file: give a folder" in _refusal(capsys, "--out", "taken")
    below = _refusal(capsys, "--out", "taken/run/1")
    assert f"--out taken/run/1 is below {Path('taken').absolute()}, which is a file: give a folder" in below


def test_a_folder_that_cannot_be_made_is_refused_before_the_text_is_read(capsys, monkeypatch):
    monkeypatch.setattr("lightning_mp.demo.prepare.load_text", lambda path: pytest.fail("the text was read"))
    refused = _refusal(capsys, "--out", "/proc/run")
    assert "--out /proc/run cannot be written: /proc is not writable. Give another folder" in refused


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--params", "20000"], "--params 20000 differs from the run to resume, which has 9264: leave --params out"),
        (["--seed", "1"], "--seed 1 differs from the run to resume, which has 0"),
        (["--precision", "bf16-mixed"], "--precision bf16-mixed differs from the run to resume, which has 32-true"),
        (["--text", "other.txt"], "other.txt differs from the run to resume"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_resuming_a_run_with_other_settings_is_refused(capsys, finished_run, option, message):
    assert message in _refusal(capsys, "--resume", "--out", str(finished_run), *option)


def test_resuming_a_checkpoint_of_another_model_size_is_refused(capsys, finished_run):
    path = latest_checkpoint(finished_run)
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["hyper_parameters"]["width"] = 32
    torch.save(checkpoint, path)
    message = _refusal(capsys, "--resume", "--out", str(finished_run))
    assert "a model of another size (layers: 1, heads: 1, width: 32) than this run's (layers: 1, heads: 1" in message
    assert "leave --params out, or start a new run without --resume" in message


def test_resuming_with_a_changed_text_is_refused(capsys, finished_run, text):
    content = Path(text).read_bytes()
    Path(text).write_bytes(content + b"one more line\n")
    message = _refusal(capsys, "--resume", "--out", str(finished_run))
    Path(text).write_bytes(content)
    assert "is not the one that the run of" in message
    assert "restore that one, or start a new run without --resume" in message


def test_resuming_from_an_unusable_checkpoint_is_refused(capsys, finished_run):
    checkpoint = latest_checkpoint(finished_run)
    torch.save({"state_dict": {}}, checkpoint)
    refusal = _refusal(capsys, "--resume", "--out", str(finished_run))
    assert "was not written by this demo" in refusal
    assert "start a new run without --resume" in refusal
    checkpoint.write_bytes(bytes(100) + checkpoint.read_bytes()[100:])
    assert "cannot be read" in _refusal(capsys, "--resume", "--out", str(finished_run))


@pytest.fixture(scope="module")
def first_run(tmp_path_factory, text):
    """The folder of a run that has spent its budget."""
    out = tmp_path_factory.mktemp("first")
    with pytest.MonkeyPatch.context() as monkeypatch:
        _short_report(monkeypatch)
        assert main(["demo", *TINY_RUN, "--text", text, "--out", str(out)]) == 0
    return out


@pytest.fixture
def finished_run(tmp_path, first_run, monkeypatch):
    """A copy of it; reports are short from now on."""
    _short_report(monkeypatch)
    return shutil.copytree(first_run, tmp_path / "out")


def _short_report(monkeypatch):
    monkeypatch.setattr("lightning_mp.demo.run._SAMPLE_TOKENS", 3)
    monkeypatch.setattr("lightning_mp.demo.report.RunPlot.write", lambda plot, path: None)


def test_resuming_a_finished_run_says_so_and_shows_its_summary(capsys, finished_run):
    weights = torch.load(latest_checkpoint(finished_run), weights_only=True)["state_dict"]
    assert main(["demo", "--resume", "--out", str(finished_run)]) == 0
    output = capsys.readouterr().out
    assert "has already spent its whole budget" in output
    assert "2,779 (spent exactly)" in output
    after = torch.load(latest_checkpoint(finished_run), weights_only=True)["state_dict"]
    assert all(torch.equal(weights[name], after[name]) for name in weights)


@pytest.mark.full
def test_a_second_run_gets_its_own_folder(finished_run, text):
    assert main(["demo", *TINY_RUN, "--text", text, "--out", str(finished_run)]) == 0
    assert sorted(path.name for path in finished_run.iterdir()) == ["version_0", "version_1"]
