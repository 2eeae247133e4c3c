"""``lightning-mp plan`` with a run of one's own, a machine and a shape; ``memory``, ``advise`` and ``formats``."""

import argparse
import ast
import json
import re
import shlex
from pathlib import Path

import pytest
import torch
import yaml

from lightning_mp import recommend
from lightning_mp.__main__ import main
from lightning_mp.ground.core.bit_layouts import FORMATS
from lightning_mp.ground.core.cli_parser import OneLineParser

SHAPE = "--layers 126 --width 16384 --heads 128 --kv-heads 8 --ffn 53248 --vocab 128256"
CONFIGS = Path(__file__).resolve().parents[1] / "support" / "published_configs.json"
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


def words_of(printed):
    """Without the ends of lines, which are where the terminal is."""
    return " ".join(printed.split())


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
    assert "optimum for its compute" in printed
    assert "1024 x H100 SXM, 989.4 TFLOP/s dense bf16 each, MFU 40% (as given):" in words_of(printed)
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
    assumed = "No shape was given. Assumed, in the proportions of Llama 2: 32 layers, width 4096, 32 heads"
    assert assumed in words_of(printed)
    assert "It fits in 10 of 12 layouts; the first choice is FSDP 64." in printed
    printed = output(capsys, "plan --params 70B --device h100").out
    assert "It does not fit with this many GPUs; " in words_of(printed)
    assert content(capsys, f"plan {SMALL} --tokens 1B --device h100")["assumed_shape"] is None
    assert "layouts" not in content(capsys, "plan --params 1M --device h100"), "the table of tokens has more"


def test_every_layout_of_a_mixture_has_a_time(capsys):
    mixture = "--layers 32 --width 4096 --heads 32 --kv-heads 8 --ffn 14336 --vocab 32000 --experts 8"
    found = content(capsys, f"plan {mixture} --tokens 1T --device h100 --gpus 64")["layouts"]
    assert {"DDP 64", "FSDP 64"} <= {row["name"] for row in found}
    assert all(row["seconds_at_least"] for row in found)


def test_layouts_show_memory_the_wire_and_the_largest_micro_batch(capsys):
    words = f"plan {SMALL} --tokens 10B --device h100 --gpus 8 --context 1024 --precision bf16-true"
    first = content(capsys, words)["layouts"][0]
    assert first["verdict"] == "fits"
    assert first["largest_micro_batch"] > 8
    assert first["inside_bytes"] > 0
    printed = output(capsys, words).out
    assert "FSDP 8" in printed
    assert "GPUs of 80 GB; those that do not fit come last" in words_of(printed)
    assert "weights" not in printed
    assert "communication" not in printed
    wide = output(capsys, f"{words} --wide").out
    assert {"weights", "states", "activations", "other", "sent", "hidden"} < set(wide.split())


def test_without_a_chip_the_answer_is_which_chips_would_do(capsys):
    seven = "--layers 32 --width 4096 --heads 32 --ffn 11008 --vocab 32000 --tokens 1T"
    chips = {row["memory_bytes"] // 10**9: row["layout"] for row in content(capsys, f"plan {seven}")["chips"]}
    assert chips[80] is None, "16 bytes for each of 6.7 billion parameters"
    assert chips[192] is None, "with the allocator at its worst"
    assert chips[max(chips)]["largest_micro_batch"] >= 1
    printed = output(capsys, f"plan {seven} --gpus 8").out
    row = next(line for line in printed.splitlines() if "A100, A800" in line)
    assert "FSDP 8, checkpointed" in row


def test_parameters_alone_are_enough_for_chips(capsys):
    found = content(capsys, "plan --params 1B")
    assert found["assumed_shape"]["layers"] == 16
    assert {row["memory_bytes"] // 10**9 for row in found["chips"] if row["layout"]} >= {80, 141}
    printed = output(capsys, "plan --params 7B --gpus 8 --context 2048").out
    assert "No shape was given. Assumed, in the proportions of Llama 2: 32 layers" in printed
    assert (
        "Chips, in bf16-mixed with Adam and sequences of 2,048 tokens, of which 8 GPUs suffice, with the layout that"
        in words_of(printed)
    )
    assert "On chips of 24 GB or less it may not fit." in printed
    assert "RTX 4090" not in printed, "only chips that suffice are listed"
    printed = words_of(output(capsys, "plan --params 175B --tokens 300B").out)
    assert "It does not fit on 1 GPU in bf16-mixed, not even of 288 GB (MI350X, MI355X): pass --gpus." in printed
    assert "128 GPUs of 80 GB suffice: FSDP 16 x TP 8, checkpointed." in printed


@pytest.mark.parametrize(
    ("precision", "without", "has"),
    [("", "V100", "A100"), ("--precision fp8-mixed", "A100", "H100"), ("--precision 16-mixed", "-", "V100")],
)
def test_chips_have_units_for_the_precision(precision, without, has, capsys):
    """Seen: a V100 for bf16, an A100 for fp8."""
    printed = output(capsys, f"plan --params 7B --gpus 8 {precision}").out.partition("\nChips")[2]
    assert (has in printed, f" {without}" in printed) == (True, False)
    assert max(map(len, printed.splitlines())) <= 80


def test_one_chip_suffices_and_the_legend_is_that_of_the_table(capsys):
    h100, v100 = "plan --params 1B --device h100", "plan --params 1B --device v100"
    assert "of which 1 GPU suffices, with" in words_of(output(capsys, "plan --params 1B").out)
    one = words_of(output(capsys, h100).out)
    assert ("Step: 4.19M tokens at the peaks of the chip" in one, "runs TP with PP" in one) == (True, False)
    assert "Step: the links of this chip are not known." in words_of(output(capsys, v100).out)
    assert "runs TP with PP" in words_of(output(capsys, f"{h100} --gpus 64").out)


def test_what_does_not_fit_is_told_how_many_gpus_would_do(capsys):
    printed = words_of(output(capsys, f"plan {SHAPE} --tokens 15T --device h100 --gpus 8").out)
    said = re.search(r"does not fit with this many GPUs; .* is the closest\. (\d+) GPUs suffice: (.*?)\.", printed)
    assert said is not None, printed
    enough = int(said[1])
    for gpus, verdict in ((enough, "fits"), (enough // 2, "does not fit")):
        rows = content(capsys, f"plan {SHAPE} --tokens 15T --device h100 --gpus {gpus}")["layouts"]
        ours = [row for row in rows if not re.search("TP.*PP", row["name"])]
        assert (ours[0]["verdict"] == "fits") is (verdict == "fits")
    assert said[2] in {
        row["name"] for row in content(capsys, f"plan {SHAPE} --tokens 1T --device h100 --gpus {enough}")["layouts"]
    }


def test_without_known_links_recomputing_comes_last(capsys):
    names = [row["name"] for row in content(capsys, "plan --params 1B --device mi300x --gpus 8")["layouts"]]
    in_layers = [name for name in names if name.startswith(("TP", "PP"))]
    assert (names[0], names[-len(in_layers) :]) == ("DDP 8", in_layers)
    for part in (names[: -len(in_layers)], in_layers):
        assert [name.endswith("checkpointed") for name in part] == sorted(
            name.endswith("checkpointed") for name in part
        )
    printed = output(capsys, "plan --params 7B --device 4090 --gpus 4").out
    assert "16 GPUs suffice: FSDP 16, checkpointed." in words_of(printed)


def test_steps_are_whole_sequences_on_any_number_of_gpus(capsys):
    found = content(capsys, "plan --params 1B --device h100 --gpus 24")
    assert (found["tokens_per_step"] % (24 * 4096), found["tokens_per_step"] // 2**22) == (0, 1)
    assert all(row["seconds_at_least"] for row in found["layouts"])
    printed = words_of(output(capsys, "plan --params 1B --device h100 --gpus 24").out)
    assert "Step: 4.23M tokens at the peaks" in printed
    odd = words_of(output(capsys, "plan --params 1B --device h100 --gpus 24 --tokens-per-step 1M").out)
    assert "--tokens-per-step (1,000,000) is not a multiple of 4,096 tokens in a micro-batch on 24 data ranks" in odd


def test_a_smaller_board_of_a_chip(capsys):
    words = f"plan {SMALL} --tokens 10B --device a100 --context 1024"
    large, small = (content(capsys, words + more) for more in ("", " --memory-bytes 40GB"))
    assert (large["memory_bytes"], small["memory_bytes"]) == (80e9, 40e9)
    assert large["layouts"][0]["largest_micro_batch"] > 2 * small["layouts"][0]["largest_micro_batch"] > 0


def test_money_buys_device_hours(capsys):
    bought = content(capsys, "plan --cost 100_000 --price 2.5 --device h100 --mfu 40%")
    hours = content(capsys, "plan --device-hours 40K --device h100 --mfu 40%")
    assert bought["flops"] == hours["flops"] == pytest.approx(40e3 * 3600 * 0.4 * 989.4e12)
    assert bought["time"]["cost"] == pytest.approx([1e5, 1e5])
    seven = content(capsys, "plan --params 7B --cost 100_000 --price 2.5 --device h100 --mfu 40%")
    assert seven["tokens"] == pytest.approx(bought["flops"] / (6 * 7e9))


def test_formats_follow_the_chip_and_the_precision(capsys):
    turing = content(capsys, f"plan {SMALL} --device t4 --device-hours 1000 --mfu 30%")
    assert (turing["precision"], turing["time"]["dtype"]) == ("16-mixed", "fp16")
    one = f"plan {SMALL} --tokens 10B --device h100 --gpus 8"
    times, steps = {}, {}
    for precision in ("bf16-mixed", "32-true", "fp8-mixed"):
        found = content(capsys, f"{one} --precision {precision}")
        times[precision] = found["time"]["dtype"]
        rows = {row["name"]: row["seconds_at_least"] for row in found["layouts"]}
        steps[precision] = rows["DDP 8"]
    assert times == {"bf16-mixed": "bf16", "32-true": "fp32", "fp8-mixed": "bf16"}
    assert steps["32-true"] == pytest.approx(steps["bf16-mixed"] * 989.4 / 66.9)
    assert steps["fp8-mixed"] == pytest.approx(steps["bf16-mixed"] * 989.4 / 1978.9)
    tf32 = content(capsys, f"{one} --precision 32-true --dtype tf32")
    assert tf32["time"]["dtype"] == "tf32"
    assert tf32["layouts"][0]["seconds_at_least"] < steps["32-true"] / 7


def test_of_a_mixture_n_is_what_a_token_meets(capsys):
    printed = output(
        capsys, "plan --layers 32 --width 4096 --kv-heads 8 --ffn 14336 --vocab 32000 --experts 8 --tokens 1T"
    ).out
    assert "12.9B active of 46.7B" in printed


def test_305_epochs_are_commented_on(capsys):
    printed = words_of(output(capsys, "plan --params 1B --tokens 305B --unique-tokens 1B").out)
    assert "305 epochs: they are worth 16.4 epochs of new tokens. Further epochs stopped paying after 36" in printed
    few = words_of(output(capsys, "plan --params 1B --tokens 4B --unique-tokens 1B").out)
    assert "The next token adds 82% of a new one; after 36 epochs it adds 10%." in few


def test_inference_makes_the_model_smaller(capsys):
    found = content(capsys, "plan --params 13B --inference-tokens 2T --law hoffmann-3")
    assert found["inference_aware"]["parameters"] == pytest.approx(7e9, rel=0.1)
    printed = words_of(output(capsys, "plan --params 13B --inference-tokens 2T --law hoffmann-3").out)
    assert "16% less compute over the lifetime of the model (Sardana et al. 2024)" in printed


def test_inference_beside_repeated_data_says_what_it_leaves_out(capsys):
    printed = words_of(output(capsys, "plan --flops 5e21 --unique-tokens 10B --inference-tokens 2T").out)
    assert "(Sardana et al. 2024). This counts repeated tokens as new ones." in printed


def test_memory_measures_a_module_and_draws_it(capsys, monkeypatch):
    Path("mine_for_memory.py").write_text(MODULE)
    monkeypatch.syspath_prepend(".")
    words = "memory --module mine_for_memory:example --precision bf16-true"
    found = content(capsys, words)
    assert found["end_of_forward"]["masters"] == 4 * (64 * 64 + 64 + 64 * 8 + 8)
    printed = output(capsys, f"{words} --plot step.svg").out
    assert "masters" in printed
    assert "Saved the plot to step.svg." in printed
    remedies = words_of(printed).partition("If it does not fit: ")[2]
    assert remedies.startswith("most of it is weights, gradients and optimizer states: shard them with FSDP2Strategy()")
    assert "ActivationCheckpointing(...) reduces the rest." in remedies
    assert Path("step.svg").exists()


def test_memory_of_a_shape_is_a_formula(capsys):
    found = content(capsys, f"memory {SMALL} --sequences 8 --context 1024")
    assert found["bytes_by_part"]["weights"] == found["bytes_by_part"]["optimizer states"] / 2
    printed = output(capsys, f"memory {SMALL}").out
    assert "by formulas" in words_of(printed)
    assert re.search(r"ActivationCheckpointing +([\d.]+) to ([\d.]+) GB", printed)
    assert "FSDP2Strategy on 8 GPUs" in printed
    assert "remainder" in printed
    assert "remainder" not in output(capsys, f"memory {SMALL} --precision 16-mixed").out


TRAINS = ("compare", "demo")
READS_RUNS = ("bits",)
MY_MODEL = """
import torch
def example():
    return torch.nn.Linear(8, 8), torch.randn(4, 8)
"""


@pytest.mark.parametrize("verb", ["advise", "bits", "compare", "demo", "fit", "formats", "memory", "plan"])
def test_every_example_of_the_help_runs_in_80_columns(capsys, monkeypatch, verb):
    """Those that train for minutes, or read what such runs wrote, are parsed."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.syspath_prepend(".")
    Path("my_project").mkdir()
    Path("my_project/model.py").write_text(MY_MODEL.lstrip())
    Path("config.json").write_text(json.dumps(json.loads(CONFIGS.read_text())["llama_3_8b"]))
    rows = [(n, 20 * n, 2 + 400 / n**0.34 + 400 / (20 * n) ** 0.28) for n in (1e7, 3e7, 1e8, 3e8, 1e9, 3e9)]
    rows += [(n, 60 * n, 2 + 400 / n**0.34 + 400 / (60 * n) ** 0.28) for n in (1e7, 3e7, 1e8, 3e8, 1e9, 3e9)]
    lines = ["parameters,tokens,loss", *(",".join(map(str, row)) for row in rows)]
    Path("runs.csv").write_text("\n".join(lines))
    with pytest.raises(SystemExit):
        main([verb, "--help"])
    examples = re.findall(r"^  (lightning-mp .+)$", capsys.readouterr().out.replace("\\\n", ""), re.MULTILINE)
    assert examples
    for example in examples:
        words = shlex.split(example.partition(" > ")[0])[1:]
        assert words[0] == verb
        with monkeypatch.context() as patched:
            if verb in (*TRAINS, *READS_RUNS):
                patched.setattr(OneLineParser, "parse_args", _parsed_only)
            assert main(words) == 0, example
        shown = capsys.readouterr().out
        if not {"--wide", "--json", "--yaml"} & set(words):
            too_long = [line for line in shown.splitlines() if len(line) > 80 and "lightning_mp import" not in line]
            assert too_long == [], example


def _parsed_only(parser, words):
    parsed = argparse.ArgumentParser.parse_args(parser, words)
    parsed.run = lambda parsed: 0
    return parsed


def test_the_width_of_a_head_can_be_told(capsys):
    assert content(capsys, "memory --layers 2 --width 100 --heads 3 --head-width 32 --vocab 10")["total_bytes"] > 0


def test_advise_prints_reasons_and_code(capsys):
    text = output(capsys, "advise --device t4 --params 100M --goal finetune").out
    assert text.startswith("finetune on 1 x T4 (Turing)\n\n  precision: 16-mixed [certain]\n")
    assert "    Source: docs/precision.md, fp16 or bf16\n" in text
    assert text.endswith(recommend("T4", model="100M", goal="finetune").python())
    assert max(len(line) for line in text.splitlines()) <= 80


def test_advise_shows_no_trainer_that_runs_out_of_memory(capsys):
    words = "advise --device t4 --params 7B --goal finetune"
    text = output(capsys, words).out
    assert "memory: does not fit [certain]" in text
    assert "trainer = " not in text
    assert words_of(text).endswith("memory does not suffice. --python prints it all the same.")
    assert "\ntrainer = pl.Trainer(\n" in output(capsys, f"{words} --python").out


def test_advise_in_other_forms(capsys):
    words = "advise --device a100 --gpus 8 --layers 12 --width 768 --vocab 50257 --tokens-per-step 1M"
    ast.parse(output(capsys, f"{words} --python").out)
    trainer = yaml.safe_load(output(capsys, f"{words} --yaml").out)["trainer"]
    assert (trainer["devices"], trainer["strategy"]) == (8, "ddp")
    found = content(capsys, words)
    assert found["fits"] is True
    assert [row["what"] for row in found["choices"]] == [
        "precision", "policy", "memory", "strategy", "micro-batch", "accumulation"
    ]  # fmt: skip
    assert yaml.safe_load(found["yaml"])["trainer"] == trainer


def test_formats_are_those_of_torch(capsys):
    rows = {row["name"]: row for row in content(capsys, "formats")["formats"]}
    assert list(rows) == list(FORMATS)
    for name, row in rows.items():
        if name != "tf32":
            info = torch.finfo(FORMATS[name].torch_dtype)
            told = (row["largest_finite"], row["smallest_normal"], row["epsilon"])
            assert told == (info.max, info.smallest_normal, info.eps)
    lines = [line.split() for line in output(capsys, "formats").out.splitlines()]
    assert [line[0] for line in lines[1:]] == list(FORMATS)
    fp16 = next(line for line in lines if line[0] == "fp16")
    assert fp16 == ["fp16", "16", "5+10", "65504", "6.10e-05", "5.96e-08", "3.3", "9.77e-04"]


@pytest.mark.parametrize("params", ["10k", "1e4", "10_000", "10000"])
def test_the_demo_reads_its_size_as_compare_does(capsys, params):
    """Refused for its budget, after the size was read."""
    with pytest.raises(SystemExit):
        main(f"demo --params {params} --tokens-per-parameter 0.01".split())
    said = capsys.readouterr().err
    assert "parameters) is smaller than one batch" in said
    assert "9,264 parameters" in said or "10," in said
