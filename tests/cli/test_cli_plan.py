"""``lightning-mp plan`` and ``lightning-mp fit``: tables, JSON, and one line for wrong input."""

import json
import math
import os
import sys
from pathlib import Path

import pytest

from lightning_mp.__main__ import main
from lightning_mp.planning.scaling_laws.optimum import compute_optimal
from lightning_mp.planning.scaling_laws.scaling_law import LAWS

LAW = LAWS["besiroglu"]


@pytest.fixture
def csv():
    """Sixteen runs of a known law, one of them spoilt."""
    lines = ["N,D,loss"]
    for budget in (1e19, 4e19, 1.6e20, 6.4e20):
        for factor in (0.3, 0.7, 1.5, 4.0):
            parameters = factor * LAW.frontier.optimum(budget)[0]
            tokens = budget / (6 * parameters)
            noise = 1 + 0.001 * math.sin(100 * factor + budget / 1e18)
            lines.append(f"{parameters:.6g},{tokens:.6g},{LAW.loss(parameters, tokens) * noise:.6f}")
    lines[5] = lines[5].rsplit(",", 1)[0] + ",3.5"
    Path("runs.csv").write_text("\n".join(lines))
    return "runs.csv"


def output(capsys, *words):
    assert main(list(words)) == 0
    return capsys.readouterr()


def words_of(printed):
    return " ".join(printed.split())


def lines_by_name(text):
    joined = text.replace("\n" + 24 * " ", " ")
    return {line[2:24].strip(): line[24:] for line in joined.splitlines() if line.startswith("  ")}


@pytest.mark.parametrize(
    "words",
    [
        "plan --params 7B --device h100 --gpus 64",
        "plan --params 7B --device h100 --gpus 64 --wide",
        "memory --layers 32 --width 4096 --vocab 32000",
        "plan --flops 1e21 --unique-tokens 1B --inference-tokens 1T",
        "plan --params 7B",
        "advise --device v100 --params 1B",
        "formats",
    ],
)
def test_a_terminal_is_not_overrun_and_loses_nothing(capsys, monkeypatch, words):
    piped = output(capsys, *words.split()).out
    long = [line for line in piped.splitlines() if len(line) > 80 and "lightning_mp import" not in line]
    assert bool(long) is ("--wide" in words), "only --wide needs more than 80 columns"
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    printed = output(capsys, *words.split()).out
    assert [line for line in printed.splitlines() if len(line) > 80 and "lightning_mp import" not in line] == []
    assert set(piped.split()) == set(printed.split())
    assert piped.count("\n") <= printed.count("\n")


@pytest.mark.parametrize("command", ["", "demo", "plan", "advise", "memory", "compare", "fit", "formats", "bits"])
def test_help_fits_into_a_terminal(capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    printed = capsys.readouterr().out
    assert [line for line in printed.splitlines() if len(line) > 80] == []
    assert "\n  lightning-mp " in printed or not command


@pytest.mark.parametrize("words", ["formats", "formats --help", "plan --flops 1e21 --json"])
def test_a_reader_that_has_enough_ends_the_command_quietly(capfd, monkeypatch, words):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(words.split()) == 141
    assert capfd.readouterr().err == ""


def test_the_table_of_a_plan(capsys):
    printed = output(capsys, "plan", "--flops", "1e21")
    assert printed.err == ""
    start = "Compute-optimal under besiroglu: Besiroglu et al. 2024, arXiv:2404.10102, Table 1"
    assert " ".join(printed.out.split()).startswith(start)
    lines = lines_by_name(printed.out)
    assert lines["parameters N"] == "2.78B (all parameters)"
    assert lines["tokens D"] == "60B"
    assert lines["tokens per parameter"] == "21.6"
    assert lines["FLOPs 6 N D"] == "1e21"
    assert lines["predicted loss"] == "2.306 nats per token"
    assert lines["range of the law"] == "inside (70M to 16B parameters, 5B to 500B tokens)"
    spread = [line.split() for line in printed.out.split("do not agree:")[1].splitlines() if line.strip()][1:]
    assert [row[0] for row in spread] == list(LAWS)
    assert spread[-1] == ["kaplan", "4.68B", "35.6B", "7.6", "1e21", "-", "3.1"]


def test_device_hours_name_the_chip_and_its_peak(capsys):
    words = ["plan", "--device-hours", "1000", "--device", "h100", "--mfu", "0.4"]
    lines = lines_by_name(output(capsys, *words).out)
    assert lines["machine"] == "1,000 hours of H100 SXM, 989.4 TFLOP/s dense bf16, MFU 40%"
    assert lines["FLOPs 6 N D"] == "1.42e21"
    content = json.loads(output(capsys, *words, "--dtype", "fp8", "--json").out)
    assert (content["device"], content["dtype"], content["mfu"]) == ("H100 SXM", "fp8", 0.4)
    assert content["flops"] == pytest.approx(1000 * 3600 * 0.4 * 1978.9e12)


def test_unique_tokens_show_epochs(capsys):
    words = ["plan", "--flops", "9.3e21", "--unique-tokens", "25B"]
    assert lines_by_name(output(capsys, *words).out)["epochs"] == "9.65 over 25B unique tokens"
    assert json.loads(output(capsys, *words, "--json").out)["epochs"] == pytest.approx(9.65, abs=0.01)


@pytest.mark.parametrize(
    ("option", "argument"), [("--params", "parameters"), ("--tokens", "tokens"), ("--flops", "flops")]
)
def test_json_of_a_plan_equals_the_function(capsys, option, argument):
    value = {"parameters": "1.3B", "tokens": "26B", "flops": "2e20"}[argument]
    content = json.loads(output(capsys, "plan", option, value, "--law", "hoffmann-3", "--json").out)
    plan = compute_optimal(**{argument: value}, law="hoffmann-3")
    assert (content["law"], content["parameters"], content["tokens"]) == ("hoffmann-3", plan.parameters, plan.tokens)
    assert (content["flops"], content["loss_nats_per_token"]) == (plan.flops, plan.loss)
    assert [row["tokens"] for row in content["spread"]] == [row.tokens for row in plan.spread]
    assert content["warnings"] == []


def test_a_plan_far_outside_is_warned_about_beside_the_result(capsys):
    printed = output(capsys, "plan", "--flops", "1e26")
    assert printed.err.startswith("warning: 1.02T parameters on 16.4T tokens lie 63.5 times outside the models")
    assert printed.err.count("\n") == 1
    assert "63 times outside (70M to 16B parameters" in printed.out
    printed = output(capsys, "plan", "--flops", "1e26", "--json")
    assert printed.err == ""
    assert "63.5 times outside" in json.loads(printed.out)["warnings"][0]


@pytest.mark.full
def test_the_table_of_a_fit(capsys, csv):
    printed = output(capsys, "fit", csv, "--samples", "100")
    assert printed.err == ""
    assert "fitted to 16 runs: " in printed.out
    table = printed.out.partition("constant")[2].splitlines()[1:7]
    constants = {line.split()[0]: line.split()[1:] for line in table}
    assert list(constants) == ["E", "A", "B", "alpha", "beta", "a"]
    assert float(constants["alpha"][0]) == pytest.approx(LAW.alpha, rel=0.05)
    assert "Certificate    a minimum: " in printed.out
    assert "Bootstrap      100 samples, 0 of them not converged" in printed.out
    assert "Outliers       1\n" in printed.out
    assert "Forecast test the 2 runs of most compute, left out and predicted: largest error" in words_of(printed.out)
    assert max(map(len, printed.out.splitlines())) <= 80
    assert "Best model for 6.4e21 FLOPs, " in printed.out


@pytest.mark.full
def test_the_picture_of_a_fit(capsys, csv):
    printed = output(capsys, "fit", csv, "--samples", "100", "--plot", "fit.svg")
    assert "Saved the plot to fit.svg." in printed.out
    assert Path("fit.svg").read_text().startswith("<?xml")


def test_json_of_a_fit(capsys, csv):
    content = json.loads(output(capsys, "fit", csv, "--samples", "100", "--flops", "1e21", "--json").out)
    assert content["constants"]["beta"] == pytest.approx(LAW.beta, rel=0.05)
    low, high = content["intervals"]["a"]
    assert low < content["exponent_a"] < high
    assert [outlier["run"] for outlier in content["outliers"]] == [5]
    assert content["certificate"]["converged"] is True
    assert content["plan"]["flops"] == 1e21
    assert content["plan"]["parameters"] == pytest.approx(LAW.frontier.optimum(1e21)[0], rel=0.05)
    assert content["held_out"]["runs"] == 2
    assert content["warnings"] == []


@pytest.mark.full
def test_a_fit_that_is_not_certified_says_so_first_and_gives_no_plan(capsys):
    """Losses that do not depend on the model's size: A and alpha are free."""
    lines = ["N,D,loss"]
    lines += [f"{n},{d},{2 + 1e3 * d**-0.4}" for n in (1e8, 3e8, 1e9, 3e9) for d in (1e9, 3e9, 1e10, 3e10)]
    Path("flat.csv").write_text("\n".join(lines))
    printed = output(capsys, "fit", "flat.csv", "--samples", "100", "--plot", "flat.svg")
    assert printed.out.startswith("NOT CERTIFIED, so there is no plan. The ")
    assert "Best model" not in printed.out
    assert printed.err == ""
    assert "NOT CERTIFIED" in Path("flat.svg").read_text()
    assert json.loads(output(capsys, "fit", "flat.csv", "--samples", "100", "--json").out)["plan"] is None


@pytest.mark.full
def test_a_fit_is_not_used_far_outside_its_runs_without_a_warning(capsys, csv):
    printed = output(capsys, "fit", csv, "--samples", "100", "--flops", "1e26")
    assert "times outside the models that 'fit' was fitted to" in printed.err


def test_a_plot_without_matplotlib_names_the_extra(capsys, monkeypatch, csv):
    monkeypatch.setattr("lightning_mp.ground.core.pictures.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        main(["fit", csv, "--plot", "fit.png"])
    assert "--plot needs matplotlib: pip install '.[plots]'" in capsys.readouterr().err
