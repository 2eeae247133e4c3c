"""``make evidence`` at toy size: the same losses to the bit each time, a page of its own, and nothing made twice."""

import importlib
import json
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).parents[2] / "scripts"
TOY = ["--params", "9264", "--steps", "4", "--seeds", "2", "--rounds", "1", "--batch-size", "2"]


@pytest.fixture
def evidence(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    module = importlib.import_module("evidence")
    monkeypatch.setattr(module, "PRECISIONS", ("32-true", "lightning:bf16-mixed", "bf16-true"))
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    return module


def losses(out):
    precisions = json.loads((out / "text.json").read_text())["result"]["precisions"]
    return {name: values["final_losses"] for name, values in precisions.items()}


@pytest.mark.full
def test_two_runs_of_the_evidence_agree_to_the_bit(evidence, tmp_path, capsys):
    outs = [tmp_path / "first", tmp_path / "second"]
    for out in outs:
        arguments = ["--quick", "--parts", "text", *TOY, "--out", str(out), "--page", str(tmp_path / "quality.md")]
        assert evidence.main(arguments) == 0
    assert losses(outs[0]) == losses(outs[1])
    page = (tmp_path / "quality.md").read_text()
    assert "A quick run" in page
    assert "2 paired seeds of 4 steps" in page
    assert "| bf16-true | " in page
    assert "Not run yet: `make evidence ARGS='--parts vision'`." in page
    assert json.loads((tmp_path / "quality_text.json").read_text())["sizes"]["seeds"] == 2
    assert (tmp_path / "quality_text.png").is_file()
    assert "val/loss, 2 paired seeds of 4 steps" in (tmp_path / "quality_text.txt").read_text()


@pytest.mark.full
def test_adapters_train_from_one_model_and_what_is_missing_is_said(evidence, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(evidence, "find_spec", lambda name: None)
    arguments = ["--parts", "adapters", "vision", *TOY, "--out", str(tmp_path), "--page", str(tmp_path / "quality.md")]
    assert evidence.main(arguments) == 0
    lines = (tmp_path / "adapters.jsonl").read_text().splitlines()
    assert evidence.main(arguments) == 0
    assert (tmp_path / "adapters.jsonl").read_text().splitlines() == lines
    assert len({json.loads(line)["weights_digest"] for line in lines[1:]}) == 2  # each seed draws its adapters
    assert (
        "Not measured: scikit-learn, whose pictures it trains on, is not installed"
        in (tmp_path / "quality.md").read_text()
    )


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::UserWarning:torchao", "ignore::DeprecationWarning")
def test_masters_of_24_bits_are_paired_with_8_bit_moments_too(evidence, tmp_path, monkeypatch):
    monkeypatch.setattr(evidence, "MASTERS_OF_24_BITS", ("32-true", "bf16-true+24bit"))
    page, arguments = tmp_path / "quality.md", ["--quick", "--parts", "masters_of_24_bits", *TOY]
    assert evidence.main([*arguments, "--out", str(tmp_path), "--page", str(page)]) == 0
    result = json.loads((tmp_path / "masters_of_24_bits.json").read_text())["result"]["precisions"]
    assert list(result) == ["32-true", "bf16-true+24bit", "bf16-true+24bit, 8-bit moments"]
    losses = {tuple(found["final_losses"]) for found in result.values()}
    assert len(losses) == 3
    assert "| bf16-true+24bit, 8-bit moments | " in page.read_text()


def test_only_adapters_are_trained(evidence):
    sizes = evidence.replace(evidence.QUICK, params=9264)
    make_module, _ = evidence.text_runs(evidence.load_standard_library(max_bytes=10**6), sizes)
    module = evidence.with_adapters(make_module())
    trained = {name for name, weight in module.named_parameters() if weight.requires_grad}
    assert len(trained) == 8  # two of each of the four layers of one block
    assert all(name.endswith((".up", ".down")) for name in trained)


FOUND = {"mean_difference": 0.001, "interval": [-0.002, 0.0031], "verdict": "not worse"}


@pytest.mark.parametrize(
    ("changed", "cell"),
    [
        ({}, "not worse: +0.0010 (-0.0020 to +0.0031)"),
        ({"interval": [None, None], "verdict": "cannot tell yet"}, "cannot tell yet: +0.0010 (? to ?)"),
        ({"mean_difference": None, "verdict": "worse"}, "worse: runs diverged"),
    ],
)
def test_failed_and_unclear_results_stand_in_the_table_of_verdicts(monkeypatch, changed, cell):
    verdict = "not worse: +0.0010 (-0.0020 to +0.0031)"
    monkeypatch.syspath_prepend(SCRIPTS)
    page = importlib.import_module("evidence_page")
    precisions = {"32-true": {}, "16-mixed": {**FOUND, **changed}}
    result = {"baseline": "32-true", "confidence": 0.95, "margin": 0.004, "precisions": precisions}
    other = {**result, "precisions": {"32-true": {}, "bf16-true+24bit": FOUND}}
    lines = page.verdict_table([{"part": "text", "result": result}, {"part": "other", "result": other}])
    assert lines[-2:] == [f"| 16-mixed | {cell} | - |", f"| bf16-true+24bit | - | {verdict} |"]


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({}, ""),
        ({"seeds": 20}, ""),
        ({"seeds": 3, "steps": 60}, "Smaller than the default run: steps 60 instead of 100, seeds 3 instead of 10."),
    ],
)
def test_a_smaller_run_says_so(evidence, sizes, text):
    assert evidence.what_is_small(evidence.Sizes(**sizes), quick=False) == text
