"""One line and code 2 for wrong input, also for an option that would do nothing."""

import sys
import traceback
from pathlib import Path

import pytest

from lightning_mp.__main__ import main

REFUSED = [
    ("plan", "pass one of --flops, --params, --tokens, --device-hours and --cost, or two of model"),
    (
        "plan --flops 1e21 --tokens 1B --params 1B",
        "pass one of --flops, --params, --tokens, --device-hours and --cost, or two of model (--params or a shape),"
        " --tokens and compute (--flops, --device-hours or --cost), got --flops and --params and --tokens",
    ),
    ("plan --flops -1e21", "--flops must be a positive finite number, got '-1e21'"),
    (
        "plan --tokens 20billions",
        "--tokens cannot be read, got '20billions'. Write digits, optionally with K, M, B or T",
    ),
    ("plan --flops 21", "21 FLOPs come to 0.23 parameters"),
    ("plan --flops 1e21 --law besirolu", "invalid choice: 'besirolu'. Did you mean besiroglu? See"),
    ("plna", "argument COMMAND: invalid choice: 'plna'. Did you mean plan? See lightning-mp --help."),
    (
        "plan --flops 1e21 --device h10",
        "device 'h10'. Similar: H100 SXM, H100 PCIe, H100 NVL. For another, give the FLOPs themselves. See",
    ),
    ("plan --device-hours 10", "--device-hours needs --device and --mfu, got no --device"),
    ("plan --device-hours 10 --device h100 --mfu 40", "got '40'. For 40%, write 0.4"),
    ("plan --device-hours 10 --device h900 --mfu 0.4", "no peak FLOP/s are known for the device 'h900'"),
    ("plan --flops 1e21 --mfu 0.4", "--mfu needs a chip. Pass --device, such as h100, or leave --mfu out"),
    ("plan --tokens 1B --unique-tokens 1B", "--unique-tokens needs a compute budget, got --tokens"),
    ("plan --params 1B --layers 2 --width 8 --vocab 8", "--params follows from the shape of the model"),
    ("plan --layers 2 --width 8", "got no --vocab"),
    ("plan --params 7 --tokens 140B", "--params must be at least 1,000, got '7'. For billions write 7B"),
    ("plan --params 7B --tokens 15", "--tokens must be at least 1,000, got '15'. For billions write 15B"),
    ("plan --flops 1e21 --unique-tokens 10", "--unique-tokens must be at least 1,000, got '10'"),
    ("plan --flops 1e21 --gpus 8", "--gpus needs a chip. Pass --device"),
    ("plan --flops 1e21 --device h100 --gpus 1.5", "--gpus must be a whole number, got '1.5'"),
    ("plan --flops 1e21 --device t4 --precision bf16-mixed", "no bf16 peak is known for T4. Known for it: fp32, fp16"),
    ("plan --flops 1e21 --device a100 --precision fp8-mixed", "no fp8 peak is known for A100"),
    ("plan --flops 5PF/weeks", "--flops cannot be read, got '5PF/weeks'. Write 1e21, 1EFLOP or 5PF-days"),
    ("plan --layers 2 --width 64 --vocab 100 --heads 3", "(64) must be a multiple of --heads, got 3"),
    ("plan --flops 1e21 --memory-bytes 40GB", "--memory-bytes needs a chip. Pass --device"),
    ("plan --flops 1e21 --device a100 --memory-bytes 40", "--memory-bytes of '40' is less than a megabyte. Write 40GB"),
    ("plan --flops 1e21 --device a100 --memory-bytes -1GB", "--memory-bytes must be a positive finite number"),
    ("plan --cost 1000 --device h100 --mfu 0.4", "--cost needs --price of one GPU for an hour"),
    ("plan --cost 1K --price 2 --device h100", "got no --mfu"),
    ("plan --cost 1K --price 2 --device h100 --mfu 0.4 --device-hours 9", "--device-hours follow from --cost"),
    ("plan --device-hours 9 --device h100", "where no MFU was measured, 0.3 and 0.5 give the usual range"),
    ("plan --config none.json --tokens 1B", "none.json cannot be read or written (No such file"),
    ("plan --flops 1e21 --inference-tokens 1T --law kaplan", "--inference-tokens needs a law that predicts a loss"),
    ("plan --flops 1e21 --device h100 --mfu 140%", "--mfu is a fraction of the whole, over 0 and at most 1"),
    ("plan --flops 1e21 --precision 16-mixed", "--precision needs a chip or a model"),
    ("plan --flops 1e21 --context 128", "--context needs a chip or a model"),
    ("plan --flops 1e21 --tied-head", "--tied-head belongs to a shape"),
    ("plan --params 1B --tokens-per-step 1M", "--tokens-per-step needs a chip"),
    ("plan --flops 1e21 --device-hours 10 --device h100 --mfu 0.4", "got --flops and --device-hours"),
    ("advise --device h900", "--device 'h900' is not known. Similar: H800 SXM, H200 SXM"),
    ("advise --device t4 --gpus 1.5", "--gpus must be a whole number, got '1.5'"),
    ("advise --device t4 --params 1.5", "--params must be at least 1,000, got '1.5'. For billions write"),
    ("advise --device a100 --memory-bytes 40", "--memory-bytes of '40' is less than a megabyte. Write 40GB"),
    ("advise --device t4 --params x", "--params cannot be read, got 'x'"),
    ("advise --device t4 --params 1B --layers 2 --width 64 --vocab 9", "pass --params, or the shape of a decoder"),
    ("advise --device t4 --layers 2", "needs --layers, --width and --vocab"),
    ("advise --device t4 --goal fly", "argument --goal: invalid choice: 'fly'"),
    ("advise --device t4 --goal gan --tokens-per-step 1M", "--tokens-per-step cannot be used with goal 'gan'"),
    ("advise --device mps --gpus 4", "--gpus is for CUDA devices, got 4 of MPS"),
    ("advise --device t4 --config none.json", "none.json cannot be read or written (No such file"),
    ("advise --device t4 --json --yaml", "argument --yaml: not allowed with argument --json"),
    ("memory", "pass one of --module, --config and the shape"),
    ("memory --module json:loads --plot step.doc", "--plot step.doc cannot be drawn: its name must end with one of"),
    ("memory --module json:loads --plot none/step.png", "--plot none/step.png: there is no folder none"),
    ("memory --module json", "--module must be written PACKAGE:FUNCTION"),
    ("memory --module nothing_here:example", "--module nothing_here:example cannot be imported"),
    ("memory --layers 2 --width 8 --vocab 8 --ranks 2", "--ranks belongs to --module"),
    ("memory --layers 2 --width 8 --vocab 8 --kv-heads 3 --heads 4", "must be a multiple of --kv-heads"),
    ("memory --layers 2 --width 256 --vocab 1000 --strategy fsdp2", "--strategy belongs to --module"),
    ("memory --layers 2 --width 256 --vocab 1000 --device-type cpu", "--device-type belongs to --module"),
    ("memory --module tempfile:gettempdir --context 128", "--context belongs to the shape of a decoder"),
    ("memory --module tempfile:gettempdir --tied-head", "--tied-head belongs to a shape (--layers, --width, --vocab)"),
    ("memory --layers 2 --width 100 --heads 3 --vocab 10", "--heads, got 3, or give --head-width"),
    ("compare --module tempfile:gettempdir --params 10k", "--params belongs to the demo's model"),
    ("compare --module tempfile:gettempdir --batch-size 4", "--batch-size belongs to the demo's model"),
    ("compare --seeds 3", "--seeds: there are no paired runs without --steps"),
    ("fit", "the following arguments are required: RUNS.CSV"),
    ("fit missing.csv", "missing.csv cannot be read or written (No such file or directory)"),
    ("fit .", ". cannot be read or written (Is a directory)"),
    ("fit few.csv", "a law of 5 constants needs at least 6 runs, got 1"),
    ("fit bad.csv", "bad.csv, line 2: `loss` must be a positive finite number, got '-3'"),
    ("fit few.csv --samples 5", "--samples must be a whole number, 100 or more, got 5"),
    (
        "fit few.csv --confidence 95",
        "--confidence is a fraction of the whole, over 0 and at most 1, got '95'. For 95%, write 0.95",
    ),
    ("fit few.csv --plot fit.doc", "--plot fit.doc cannot be drawn: its name must end with one of .png, .pdf"),
    ("fit few.csv --plot no/fit.png", "--plot no/fit.png: there is no folder no"),
    ("fit few.csv --flops x", "--flops cannot be read, got 'x'"),
    ("formats --yaml", "lightning-mp formats: unrecognized arguments: --yaml. See lightning-mp formats --help"),
    ("memory --conttext 4", "lightning-mp memory: unrecognized arguments: --conttext 4. Did you mean --context?"),
]


@pytest.mark.parametrize(("words", "message"), REFUSED)
def test_wrong_input_is_one_line_and_code_2(capsys, words, message):
    Path("few.csv").write_text("N,D,loss\n1e8,2e9,3\n")
    Path("bad.csv").write_text("N,D,loss\n1e8,2e9,-3\n")
    with pytest.raises(SystemExit) as exit_info:
        main(words.split())
    assert exit_info.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert message in printed.err
    assert sorted(path.name for path in Path.cwd().iterdir()) == ["bad.csv", "few.csv"], "nothing may be written"


PROJECT = '''
import torch
import lightning.pytorch as pl
from lightning_mp import ChinchillaBudget


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(10, 3)

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def unequal():
    """Four rows against five classes."""
    return Model(), (torch.randn(4, 10), torch.zeros(5, dtype=torch.long))


def without_file():
    return open("/nowhere/train.bin")


def refused():
    return ChinchillaBudget(tokens="many")
'''


@pytest.fixture
def project(monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the folder of the test, and a second one that imports what is not there."""
    Path("own_project.py").write_text(PROJECT)
    Path("own_broken.py").write_text("import not_installed_anywhere\n")
    monkeypatch.syspath_prepend("")
    monkeypatch.delitem(sys.modules, "own_project", raising=False)
    return "own_project"


@pytest.mark.parametrize(
    ("command", "function", "kind"),
    [
        (["memory"], "unequal", ValueError),
        (["compare", "--rounds", "1", "--accelerator", "cpu"], "unequal", ValueError),
        (["memory"], "without_file", FileNotFoundError),
        (["compare"], "without_file", FileNotFoundError),
    ],
)
def test_an_error_of_the_users_module_says_where(
    project: str, command: list[str], function: str, kind: type[Exception]
) -> None:
    with pytest.raises(kind) as caught:
        main([*command, "--module", f"{project}:{function}"])
    files = [Path(frame.filename).name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert "own_project.py" in files


@pytest.mark.usefixtures("project")
def test_a_module_that_imports_what_is_missing_says_where() -> None:
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere") as caught:
        main(["memory", "--module", "own_broken:example"])
    assert "own_broken.py" in {Path(frame.filename).name for frame in traceback.extract_tb(caught.value.__traceback__)}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["memory", "--module", "own_project:refused"], "`tokens` cannot be read, got 'many'"),
        (["memory", "--module", "own_project:missing"], "cannot be imported (module 'own_project' has no function"),
        (["memory", "--module", "own_project.part:example"], "cannot be imported (No module named 'own_project.part'"),
        (["memory", "--module", ".own_project:example"], "--module must be written PACKAGE:FUNCTION"),
        (["fit", "nowhere.csv"], "nowhere.csv cannot be read or written (No such file or directory)"),
        (["memory", "--config", "nowhere.json"], "nowhere.json"),
    ],
)
@pytest.mark.usefixtures("project")
def test_what_this_package_refuses_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1
