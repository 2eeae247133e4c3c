"""``lightning-mp advise`` and ``lightning-mp formats``: text, code, JSON, and one line for wrong input."""

import ast
import json

import pytest
import torch
import yaml

from lightning_mp import recommend
from lightning_mp.__main__ import main
from lightning_mp.core.number_formats import FORMATS


def output(capsys, words):
    assert main(words.split()) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out


def test_advise_prints_reasons_and_code(capsys):
    text = output(capsys, "advise --device t4 --params 100M --goal finetune")
    assert text.startswith("finetune on 1 x T4 (Turing)\n\n  precision: 16-mixed [certain]\n")
    assert "    Source: docs/precision.md, fp16 or bf16\n" in text
    assert text.endswith(recommend("T4", model="100M", goal="finetune").python())
    assert max(len(line) for line in text.splitlines()) <= 80


def test_advise_in_other_forms(capsys):
    words = "advise --device a100 --gpus 8 --layers 12 --width 768 --vocab 50257 --tokens-per-step 1M"
    ast.parse(output(capsys, f"{words} --python"))
    trainer = yaml.safe_load(output(capsys, f"{words} --yaml"))["trainer"]
    assert (trainer["devices"], trainer["strategy"]) == (8, "ddp")
    content = json.loads(output(capsys, f"{words} --json"))
    assert content["fits"] is True
    assert [row["what"] for row in content["choices"]] == [
        "precision", "policy", "memory", "strategy", "micro-batch", "accumulation"
    ]  # fmt: skip
    assert yaml.safe_load(content["yaml"])["trainer"] == trainer


def test_formats_are_those_of_torch(capsys):
    rows = {row["name"]: row for row in json.loads(output(capsys, "formats --json"))["formats"]}
    assert list(rows) == list(FORMATS)
    for name, row in rows.items():
        if name != "tf32":
            info = torch.finfo(FORMATS[name].torch_dtype)
            told = (row["largest_finite"], row["smallest_normal"], row["epsilon"])
            assert told == (info.max, info.smallest_normal, info.eps)
    lines = [line.split() for line in output(capsys, "formats").splitlines()]
    assert [line[0] for line in lines[1:]] == list(FORMATS)
    fp16 = next(line for line in lines if line[0] == "fp16")
    assert fp16 == ["fp16", "16", "5+10", "65504", "6.10e-05", "5.96e-08", "3.3", "9.77e-04"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("advise --device h900", "--device 'h900' is not known. Similar: H800 SXM, H200 SXM"),
        ("advise --device t4 --gpus 1.5", "--gpus must be a whole number, got '1.5'"),
        (
            "advise --device t4 --params 1.5",
            "--params must be single ones, 1,000 or more, got '1.5'. For billions write",
        ),
        ("advise --device a100 --memory-bytes 40", "--memory-bytes of '40' is less than a megabyte. Write 40GB"),
        ("advise --device t4 --params x", "--params cannot be read, got 'x'"),
        ("advise --device t4 --params 1B --layers 2 --width 64 --vocab 9", "pass --params, or the shape of a decoder"),
        ("advise --device t4 --layers 2", "needs `layers`, --width and --vocab"),
        ("advise --device t4 --goal fly", "argument --goal: invalid choice: 'fly'"),
        ("advise --device t4 --goal gan --tokens-per-step 1M", "--tokens-per-step cannot be used with goal 'gan'"),
        ("advise --device mps --gpus 4", "--gpus is for CUDA devices, got 4 of MPS"),
        ("advise --device t4 --config none.json", "none.json cannot be read or written (No such file"),
        ("advise --device t4 --json --yaml", "argument --yaml: not allowed with argument --json"),
        ("formats --yaml", "unrecognized arguments: --yaml"),
    ],
)
def test_wrong_input_is_refused_in_one_line(capsys, words, message):
    with pytest.raises(SystemExit) as exit_info:
        main(words.split())
    assert exit_info.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert message.replace("`layers`", "--layers") in printed.err
