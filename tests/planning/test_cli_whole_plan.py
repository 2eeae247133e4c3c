"""``lightning-mp plan`` with a run of one's own, a machine and a shape, and ``lightning-mp memory``."""

import json
import re
from pathlib import Path

import pytest

from lightning_mp.__main__ import main

SHAPE = "--layers 126 --width 16384 --heads 128 --kv-heads 8 --ffn 53248 --vocab 128256"
SMALL = "--layers 12 --width 768 --heads 12 --vocab 50257"
MODULE = """
import torch

def example():
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)), torch.zeros(16, 64)

def half():
    return torch.nn.Linear(2, 2)
"""


def output(capsys, words):
    assert main(words.split()) == 0
    return capsys.readouterr()


def content(capsys, words):
    return json.loads(output(capsys, f"{words} --json").out)


def test_a_run_far_from_the_optimum_has_loss_time_and_cost(capsys):
    words = "plan --params 8B --tokens 15T --device h100 --gpus 1024 --mfu 40% --price 2"
    found = content(capsys, words)
    assert found["flops"] == pytest.approx(6 * 8e9 * 15e12)
    assert found["loss_nats_per_token"] == pytest.approx(1.8172 + 482.01 / 8e9**0.3478 + 2085.43 / 15e12**0.3658)
    assert found["time"]["gpu_hours"] == pytest.approx([7.2e23 / (0.4 * 989.4e12 * 3600)] * 2)
    assert found["time"]["cost"] == pytest.approx([2 * hours for hours in found["time"]["gpu_hours"]])
    assert "times outside the models" in found["warnings"][0]
    printed = output(capsys, words).out
    assert "best of its compute" in printed
    assert "1024 x H100 SXM, 989.4 TFLOP/s dense bf16 each, MFU 40% (as given):" in printed
    assert "20.6 days" in printed
    assert "30%" in output(capsys, "plan --flops 1EFLOP --device h100").out


def test_405_billion_parameters_do_not_fit_on_8_gpus_and_copies_come_last(capsys):
    layouts = content(capsys, f"plan {SHAPE} --tokens 15T --device h100 --gpus 8")["layouts"]
    assert {layout["verdict"] for layout in layouts} == {"does not fit"}
    assert layouts[0]["name"] != "DDP 8"
    assert layouts[-1]["name"] in ("DDP 8", "DDP 8, checkpointed")


def test_without_a_shape_the_answer_is_for_the_proportions_of_llama_2(capsys):
    words = "plan --params 7B --device h100 --gpus 64"
    found = content(capsys, words)
    assert (found["assumed_shape"]["layers"], found["assumed_shape"]["width"]) == (32, 4096)
    assert found["layouts"][0]["verdict"] == "fits"
    printed = output(capsys, words).out
    assert "No shape was given. Assumed, in the proportions of Llama 2: 32 layers, width 4096, 32 heads" in printed
    assert "It fits: 15 of 20 layouts, of which FSDP 64 comes first." in printed
    assert "It does not fit with this many GPUs; " in output(capsys, "plan --params 70B --device h100").out
    assert content(capsys, f"plan {SMALL} --tokens 1B --device h100")["assumed_shape"] is None
    assert "layouts" not in content(capsys, "plan --params 1M --device h100"), "the table of tokens has more"


def test_every_layout_has_a_time_also_zero_and_experts(capsys):
    mixture = "--layers 32 --width 4096 --heads 32 --kv-heads 8 --ffn 14336 --vocab 32000 --experts 8"
    found = content(capsys, f"plan {mixture} --tokens 1T --device h100 --gpus 64")["layouts"]
    rows = {row["name"]: row for row in found}
    assert all(row["seconds_at_least"] for row in found)
    assert {"ZeRO-1 64", "ZeRO-2 64", "FSDP 64 x EP 8"} <= set(rows)
    assert rows["DDP 64"]["inside_bytes"] == rows["ZeRO-1 64"]["inside_bytes"] < rows["ZeRO-2 64"]["inside_bytes"]
    assert rows["FSDP 64 x EP 8"]["hides"] is False, "what tokens meet next waits for them"


def test_layouts_show_memory_the_wire_and_the_largest_micro_batch(capsys):
    words = f"plan {SMALL} --tokens 10B --device h100 --gpus 8 --context 1024 --precision bf16-masters"
    first = content(capsys, words)["layouts"][0]
    assert first["verdict"] == "fits"
    assert first["largest_micro_batch"] > 8
    assert first["inside_bytes"] > 0
    printed = output(capsys, words).out
    assert "ZeRO-2 8" in printed
    assert "GPUs of 80 GB; those that do not fit come last" in printed


def test_without_a_chip_the_answer_is_which_chips_would_do(capsys):
    seven = "--layers 32 --width 4096 --heads 32 --ffn 11008 --vocab 32000 --tokens 1T"
    chips = {row["memory_bytes"] // 10**9: row["layout"] for row in content(capsys, f"plan {seven}")["chips"]}
    assert chips[80] is None, "16 bytes for each of 6.7 billion parameters"
    assert chips[192]["largest_micro_batch"] >= 1
    printed = output(capsys, f"plan {seven} --gpus 8").out
    row = next(line for line in printed.splitlines() if "A100, A800" in line)
    assert "FSDP 8, checkpointed" in row


def test_305_epochs_are_commented_on(capsys):
    printed = output(capsys, "plan --params 1B --tokens 305B --unique-tokens 1B").out
    assert "305 epochs: they are worth 16.4 epochs of new tokens. Further epochs stopped paying after 36" in printed
    few = output(capsys, "plan --params 1B --tokens 4B --unique-tokens 1B").out
    assert "The next token adds 82% of a new one; after 36 epochs it adds 10%." in few


def test_inference_makes_the_model_smaller(capsys):
    found = content(capsys, "plan --params 13B --inference-tokens 2T --law hoffmann-3")
    assert found["inference_aware"]["parameters"] == pytest.approx(7e9, rel=0.1)
    printed = output(capsys, "plan --params 13B --inference-tokens 2T --law hoffmann-3").out
    assert "16% less compute over the life (Sardana et al. 2024)" in printed


def test_memory_measures_a_module_and_draws_it(capsys, monkeypatch):
    Path("mine_for_memory.py").write_text(MODULE)
    monkeypatch.syspath_prepend(".")
    words = "memory --module mine_for_memory:example --precision bf16-masters"
    found = content(capsys, words)
    assert found["end_of_forward"]["masters"] == 4 * (64 * 64 + 64 + 64 * 8 + 8)
    printed = output(capsys, f"{words} --plot step.svg").out
    assert "masters" in printed
    assert "Saved the plot to step.svg." in printed
    assert Path("step.svg").exists()


def test_memory_of_a_shape_is_a_formula(capsys):
    found = content(capsys, f"memory {SMALL} --sequences 8 --context 1024")
    assert found["bytes_by_part"]["weights"] == found["bytes_by_part"]["optimizer states"] / 2
    assert "by formulas" in output(capsys, f"memory {SMALL}").out


def test_every_verb_has_examples_and_json(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.startswith("lightning-mp ")
    with pytest.raises(SystemExit):
        main(["--help"])
    verbs = re.findall(r"^    (\w+) ", capsys.readouterr().out, re.MULTILINE)
    assert {"demo", "plan", "advise", "memory", "formats", "fit", "layouts"} <= set(verbs)
    for verb in verbs:
        with pytest.raises(SystemExit) as exit_info:
            main([verb, "--help"])
        printed = capsys.readouterr().out
        assert exit_info.value.code == 0
        assert f"examples:\n  lightning-mp {verb}" in printed, verb
        assert "--json" in printed, verb


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("plan --params 1B --layers 2 --width 8 --vocab 8", "--params follows from the shape of the model"),
        ("plan --layers 2 --width 8", "got no --vocab"),
        (
            "plan --params 7 --tokens 140B",
            "--params must be single ones, 1,000 or more, got '7'. For billions write 7B",
        ),
        (
            "plan --params 7B --tokens 15",
            "--tokens must be single ones, 1,000 or more, got '15'. For billions write 15B",
        ),
        ("plan --flops 1e21 --unique-tokens 10", "--unique-tokens must be single ones, 1,000 or more, got '10'"),
        ("plan --flops 1e21 --gpus 8", "--gpus needs a chip. Pass --device"),
        ("plan --flops 1e21 --device h100 --gpus 1.5", "--gpus must be a whole number, got '1.5'"),
        ("plan --config none.json --tokens 1B", "none.json cannot be read or written (No such file"),
        ("plan --flops 1e21 --inference-tokens 1T --law kaplan", "--inference-tokens needs a law that predicts a loss"),
        ("plan --flops 1e21 --device h100 --mfu 140%", "--mfu is a fraction of the whole, over 0 and at most 1"),
        ("memory", "pass one of --module, --config and the shape"),
        (
            "memory --module json:loads --plot step.doc",
            "--plot step.doc cannot be drawn: its name must end with one of",
        ),
        ("memory --module json:loads --plot none/step.png", "--plot none/step.png: there is no folder none"),
        ("memory --module json", "--module must be written PACKAGE:FUNCTION"),
        ("memory --module nothing_here:example", "--module nothing_here:example cannot be imported"),
        ("memory --layers 2 --width 8 --vocab 8 --ranks 2", "--ranks belongs to --module"),
        ("memory --layers 2 --width 8 --vocab 8 --kv-heads 3 --heads 4", "must be a multiple of --kv-heads"),
    ],
)
def test_wrong_input_is_one_line_and_code_2(capsys, words, message):
    with pytest.raises(SystemExit) as exit_info:
        main(words.split())
    assert exit_info.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert message in printed.err
