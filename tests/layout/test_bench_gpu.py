"""The GPU benchmark: its order, its arithmetic, what it keeps, and one toy run of the whole."""

import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import pytest
import torch
from started_python import plain_environment

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from bench_checks import Check  # noqa: E402
from bench_report import Header, as_markdown, as_record, write_report  # noqa: E402
from bench_schedule import NOT_REACHED, Budget, Cell, Group, Measurement, ratio, run_groups  # noqa: E402


class FakeClock:
    """Seconds that pass only when something is run."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class FakeRunner:
    """Takes 10 s to warm up and 1 s to measure, and writes down what was called."""

    def __init__(self, name: str, clock: FakeClock, calls: list[str], fail_at: str | None = None) -> None:
        self.name, self.clock, self.calls, self.fail_at = name, clock, calls, fail_at
        self.repeat = 0

    def warm_up(self) -> None:
        self._call("warm", 10.0)

    def measure(self) -> Measurement:
        self._call(f"{self.repeat}", 1.0)
        self.repeat += 1
        return Measurement(100.0 * self.repeat, peak_memory_bytes=2**30 * self.repeat)

    def release(self) -> None:
        self.calls.append(f"{self.name} released")

    def _call(self, what: str, seconds: float) -> None:
        self.calls.append(f"{self.name} {what}")
        self.clock.now += seconds
        if self.fail_at == what:
            raise RuntimeError(f"{self.name} broke\nand a second line")


def make_group(names: list[str], clock: FakeClock, calls: list[str], compiled: bool = False, **fail_at: str) -> Group:
    cells = [
        Cell(name, "16-mixed", compiled, "AdamW", 1.0, lambda n=name: FakeRunner(n, clock, calls, fail_at.get(n)))
        for name in names
    ]
    return Group("16-mixed", compiled, cells)


def test_each_repeat_measures_every_cell_and_begins_with_another_one() -> None:
    clock, calls = FakeClock(), []
    run_groups([make_group(["a", "b", "c"], clock, calls)], repeats=4, budget=Budget(1e6, clock))
    assert calls == [
        *("a warm", "b warm", "c warm"),
        *("a 0", "b 0", "c 0"),
        *("b 1", "c 1", "a 1"),
        *("c 2", "a 2", "b 2"),
        *("a 3", "b 3", "c 3"),
        *("a released", "b released", "c released"),
    ]


def test_a_cell_that_fails_keeps_its_error_and_stops_nobody_else() -> None:
    clock, calls = FakeClock(), []
    group = make_group(["a", "b", "c"], clock, calls, a="warm", b="1")
    run_groups([group], repeats=3, budget=Budget(1e6, clock))
    a, b, c = group.cells
    assert (a.error, a.rates) == ("RuntimeError: a broke", [])
    assert (b.error, b.rates) == ("RuntimeError: b broke", [100.0])
    assert (c.error, c.rates) == (None, [100.0, 200.0, 300.0])
    assert calls.count("a released") == 1


def test_the_time_limit_keeps_finished_cells_and_names_the_rest() -> None:
    clock, calls = FakeClock(), []
    first, second = make_group(["a", "b"], clock, calls), make_group(["c", "d"], clock, calls)
    # two warm-ups and 3 repeats of two cells take 26 s; after 1.5 repeats the limit comes
    run_groups([first, second], repeats=3, budget=Budget(22.5, clock))
    assert [len(cell.rates) for cell in first.cells] == [1, 2]
    assert [cell.error for cell in first.cells] == [None, None]
    assert [cell.error for cell in second.cells] == [NOT_REACHED, NOT_REACHED]
    assert ratio(*first.cells).repeats == 1


def test_a_cancelled_run_begins_nothing_more() -> None:
    """SIGTERM raises where it arrives, and is remembered where a finalizer swallows the exception."""
    clock, calls = FakeClock(), []
    first, second = make_group(["a", "b"], clock, calls), make_group(["c"], clock, calls)
    budget = Budget(1e6, clock)

    progress: list[str] = []

    def cancel_after_first_repeat(text: str) -> None:
        progress.append(text)
        budget.cancelled = "repeat 1" in text or budget.cancelled

    run_groups([first, second], repeats=10_000, budget=budget, on_progress=cancel_after_first_repeat)
    assert calls == ["a warm", "b warm", "a 0", "b 0", "a released", "b released"]
    assert len(progress) == 4  # two warm-ups, one repeat, and the cell that was not reached
    assert [cell.error for cell in (*first.cells, *second.cells)] == [None, None, NOT_REACHED]


def test_nothing_is_warmed_up_that_would_pass_the_time_limit() -> None:
    clock, calls = FakeClock(), []
    first, second = make_group(["a"], clock, calls), make_group(["b"], clock, calls)
    run_groups([first, second], repeats=1, budget=Budget(20.0, clock))  # 9 s left, a warm-up took 10 s
    assert "b warm" not in calls
    assert second.cells[0].error == NOT_REACHED


def test_files_are_offered_after_every_cell_and_repeat() -> None:
    clock, calls = FakeClock(), []
    group = make_group(["a", "b"], clock, calls)
    seen: list[tuple[str, int]] = []
    run_groups(
        [group],
        repeats=2,
        budget=Budget(1e6, clock),
        on_progress=lambda text: seen.append((text, sum(len(cell.rates) for cell in group.cells))),
    )
    assert [count for _, count in seen] == [0, 0, 2, 4]
    assert seen[-1][0] == "16-mixed, eager: repeat 2 of 2"


def cell_with(rates: list[float | None]) -> Cell:
    cell = Cell("ours", "16-mixed", False, "fused AdamW", 1.0, lambda: pytest.fail("not run"))
    cell.measurements = [None if rate is None else Measurement(rate, 3 * 2**29) for rate in rates]
    return cell


def test_ratios_are_taken_within_a_repeat() -> None:
    """A device that halves its speed in the middle changes no ratio."""
    ours, stock = cell_with([110.0, 60.0, 55.0, None]), cell_with([100.0, 50.0, 50.0, 50.0])
    found = ratio(ours, stock)
    assert (found.low, found.high, found.repeats) == (1.1, 1.2, 3)
    assert found.median == pytest.approx(1.1)
    assert ratio(ours, cell_with([None] * 4)) is None


def make_header(**changes: object) -> Header:
    values = {
        "date": "2026-01-02",
        "command": "python bench_gpu.py",
        "device": "NVIDIA H200",
        "versions": {"torch": "2.11"},
        "model": "GPT",
        "settings": {"batch size": 16, "repeats": 5},
        "flops_per_token": 1_000_000_000,
        "flops_convention": "palm convention",
        "flops_parameters": 1,
        "peak_flops_per_second": {"16-mixed": 1e12},
        "peak_source": "a datasheet",
        "toy": False,
    }
    return Header(**{**values, **changes})


def test_table_shows_median_spread_mfu_memory_and_ratios(tmp_path: Path) -> None:
    ours, stock = cell_with([400.0, 500.0, 600.0]), cell_with([200.0, 250.0, 400.0])
    stock.recipe, stock.error = "stock", "OutOfMemoryError: a|b"
    record = as_record(make_header(), [Group("16-mixed", False, [ours, stock])], "complete")
    row = next(line for line in as_markdown(record).splitlines() if line.startswith("| ours |"))
    assert row.split(" | ")[4:9] == [
        "500 (400 to 600)",
        "50.0%",  # 500 tokens/s * 1 GFLOP over 1 TFLOP/s
        "1.50 GiB",
        "2.000 (1.500 to 2.000)",
        "-",
    ]
    assert row.endswith("| 3 of 5 repeats |")
    assert "OutOfMemoryError: a/b; 3 of 5 repeats |" in as_markdown(record)
    json_path, markdown_path = write_report(record, tmp_path / "deep" / "bench")
    assert json.loads(json_path.read_text()) == record
    assert markdown_path.read_text() == as_markdown(record)
    assert sorted(path.name for path in json_path.parent.iterdir()) == ["bench.json", "bench.md"]


def test_an_unknown_chip_gets_no_mfu() -> None:
    header = make_header(peak_flops_per_second={}, peak_source="no peak is known for 'X'")
    record = as_record(header, [Group("16-mixed", False, [cell_with([500.0])])], "complete")
    assert record["groups"][0]["cells"][0]["mfu"] is None
    assert "not known for this device (no peak is known for 'X')" in as_markdown(record)


def command(out: Path, *options: str) -> list[str]:
    return [sys.executable, str(BENCHMARKS / "bench_gpu.py"), "--toy", "--out", str(out), *options]


@pytest.fixture(scope="module")
def toy_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    out = tmp_path_factory.mktemp("bench")
    found = subprocess.run(
        command(out), capture_output=True, text=True, timeout=110, env=plain_environment(), check=False
    )
    return found, out


@pytest.mark.full
def test_toy_run_measures_every_cell(toy_run: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    finished, out = toy_run
    assert finished.returncode == 0, finished.stdout + finished.stderr
    (json_path,) = out.glob("bench_gpu_toy_*.json")
    record = json.loads(json_path.read_text())
    cells = [cell for group in record["groups"] for cell in group["cells"]]
    # What a device cannot do is a row with the reason.
    (tf32,) = (cell for cell in cells if cell["error"])
    assert tf32["recipe"] == "ours, TF32Precision"
    assert tf32["error"].startswith("MisconfigurationException: TF32Precision cannot run on this device: ")
    cells.remove(tf32)
    assert record["status"] == "finished with gaps: see the notes"
    assert record["toy"] is True
    recipes = [[cell["recipe"] for cell in group["cells"]] for group in record["groups"]]
    mixed = ["ours", "stock", "plain", "ours, OverflowMonitor", "ours, all callbacks", "stock, no clipping"]
    others = ["ours", "plain", *(f"ours, MasterWeightsPrecision {kind}" for kind in ("fp32", "remainder", "fp16"))]
    others += ["stock", "ours, Float8Precision rowwise", "ours, Float8Precision tensorwise"]
    assert recipes == [mixed, others, ["ours, TF32Precision", "stock", "plain"], mixed, mixed[:3]]
    for cell in cells:
        assert len(cell["tokens_per_second"]) == 2
        assert 0 < cell["min"] <= cell["median"] == median(cell["tokens_per_second"]) <= cell["max"]
        # Gradients of fp16 weights are fp16 themselves: the first scale of 2^16 is too much for some.
        assert cell["skipped_steps"] == 0 or cell["precision"] == "16-true"
        assert cell["mfu"] is None  # no peak is known for a CPU
        assert set(cell["ratios"]) == {"stock", "plain"} - {cell["recipe"]}


@pytest.mark.full
def test_toy_run_says_that_its_figures_mean_nothing(
    toy_run: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    (markdown_path,) = toy_run[1].glob("bench_gpu_toy_*.md")
    text = markdown_path.read_text()
    assert "**Toy size: these figures say nothing about any device.**" in text
    assert [line for line in text.splitlines() if line.startswith("## ")] == [
        "## 16-mixed, eager",
        "## master weights and fp8, eager",
        "## tf32, eager",
        "## bf16-mixed, compiled",
        "## two layers, bf16-mixed, eager",
        "## The gradient epilogue alone",
        "## Waits for the device",
        "## Memory beside its estimate",
        "## A real out-of-memory",
        "## Loss after equal time",
    ]


@pytest.mark.full
def test_toy_run_makes_every_check(toy_run: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    """What a CPU cannot tell is left open; what it can is right."""
    (json_path,) = toy_run[1].glob("*.json")
    waits, memory, out_of_memory, timed = json.loads(json_path.read_text())["checks"]
    assert [check["error"] for check in (waits, memory, out_of_memory, timed)] == [None] * 4
    ways = [("stock", "warn"), ("ours, all callbacks", "warn"), ("ours, all callbacks", "error")]
    assert [tuple(row[:3]) for row in waits["rows"]] == [(p, *way) for p in ("bf16-mixed", "16-mixed") for way in ways]
    assert {tuple(row[3:]) for row in waits["rows"]} == {("5", "not measured")}
    assert len(memory["rows"]) == 4
    assert all([row[2], row[3], row[5]] == ["not measured"] * 3 for row in memory["rows"])
    whole, without, split = out_of_memory["rows"]
    assert without[4].startswith("OutOfMemoryError: CUDA out of memory.")
    assert split[3] == "1"
    assert float(split[4]) == pytest.approx(float(whole[4]), rel=1e-3)  # bf16, and a mean of two means
    assert len(timed["rows"]) == 7
    for _, steps, seconds, loss in timed["rows"]:
        assert int(steps) > 1
        assert float(seconds) > 0
        assert 0 < float(loss) < math.log(64)  # below that of equal odds


@pytest.mark.full
def test_toy_run_sets_the_epilogue_beside_its_floor(
    toy_run: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    (json_path,) = toy_run[1].glob("*.json")
    epilogue = json.loads(json_path.read_text())["epilogue"]
    assert epilogue["gradient_bytes"] == 4 * 4_400  # the toy's parameters in fp32
    assert epilogue["floor_seconds"] * epilogue["copy_bytes_per_second"] == pytest.approx(epilogue["gradient_bytes"])
    assert [row["passes"] for row in epilogue["rows"]] == [1, 3, 3, 5]
    for row in epilogue["rows"]:
        assert len(row["seconds"]) == 2
        assert 1 < row["low"] <= row["times_floor"] <= row["high"]  # tensors this small are all overhead


def test_an_epilogue_that_cannot_be_measured_leaves_its_error() -> None:
    for epilogue, text in [
        ("RuntimeError: no kernel", "RuntimeError: no kernel"),
        (None, "Not measured: the run"),
    ]:
        record = as_record(make_header(), [Group("16-mixed", False, [cell_with([500.0])])], "complete", epilogue)
        assert f"## The gradient epilogue alone\n\n{text}" in as_markdown(record)


def test_the_passes_that_the_epilogue_table_states_are_made() -> None:
    """Counted at the dispatcher; every call finds the same gradients."""
    import bench_epilogue
    from gradient_counter import GradientBytes

    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in [(40, 30), (7,), (50, 60)]]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape)
    before = [parameter.grad.clone() for parameter in parameters]
    for name, (passes, way) in bench_epilogue._ways(parameters, torch.device("cpu")).items():
        with GradientBytes(parameters) as counter:
            way()
        assert counter.bytes / sum(p.nbytes for p in parameters) == passes, (name, counter.kernels)
        assert all(torch.equal(p.grad, b) for p, b in zip(parameters, before, strict=True))


def test_without_torchao_the_fp8_row_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import bench_cells
    import bench_gpu

    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    group = bench_cells.make_group(bench_gpu.make_workload(True, 2), bench_cells.OTHER_PLUGINS, False)
    group.cells = [cell for cell in group.cells if "Float8" in cell.recipe]
    run_groups([group], repeats=1, budget=Budget(1e6, time.monotonic))
    assert group.cells[0].error is not None
    assert group.cells[0].error.startswith("ModuleNotFoundError: ")
    assert "torchao" in group.cells[0].error


@pytest.mark.full
def test_sigterm_keeps_what_was_measured(tmp_path: Path) -> None:
    """Of the tables that `--only` names, and of no others."""
    arguments = command(tmp_path, "--repeats", "10000", "--only", "16-MIXED", "nothing")
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=plain_environment()) as process:
        try:
            assert process.stdout is not None
            assert any("repeat 3 of 10000" in line for line in process.stdout)
            time.sleep(0.3)  # somewhere inside a later segment
            process.send_signal(signal.SIGTERM)
            rest, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 128 + signal.SIGTERM
    assert "cut short by SIGTERM" in rest
    (json_path,) = tmp_path.glob("*.json")
    record = json.loads(json_path.read_text())
    assert record["status"] == "cut short by SIGTERM"
    (group,) = record["groups"]
    assert group["title"] == "16-mixed, eager"
    assert all(len(cell["tokens_per_second"]) >= 3 for cell in group["cells"])
    assert (record["checks"], record["epilogue"]) == ([], {"error": "Left out by --only."})
    assert not list(tmp_path.glob("*.partial"))


def test_without_a_gpu_the_full_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import bench_gpu

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert bench_gpu.main(["--out", str(tmp_path)]) == 2
    assert "needs a CUDA device and torch sees none. Use --toy" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_flops_of_a_larger_model_are_its_own() -> None:
    """MFU of the 1.3B model: its FLOPs per token are 6 N plus attention over 2,048 tokens, not those of the header."""
    import bench_gpu

    workload = bench_gpu.make_workload(False, 16)
    (large,) = bench_gpu.make_groups(workload, [("1.3B at 2,048 tokens", "bf16-mixed", False)])
    parameters = 24 * 12 * 2048**2 + 50_304 * 2048
    assert 1.30e9 < parameters < 1.32e9
    assert large.flops_per_token == 6 * parameters + 12 * 24 * 2048 * 2048
    large.cells[0].measurements = [Measurement(100.0, None)]
    record = as_record(make_header(peak_flops_per_second={"bf16-mixed": 1e12}), [large], "complete")
    assert record["groups"][0]["cells"][0]["mfu"] == pytest.approx(100 * large.flops_per_token / 1e12)


def test_a_run_without_gaps_is_complete() -> None:
    import bench_gpu

    check = Check("title", "", ("a",), lambda check, budget: None)
    group = Group("16-mixed", False, [cell_with([1.0, 2.0])])
    assert not bench_gpu.has_gaps([check, group], "Left out by --only.", repeats=2)
    assert bench_gpu.has_gaps([check, group], None, repeats=2)
    assert bench_gpu.has_gaps([check, group], "left out", repeats=3)
    check.error = NOT_REACHED
    assert bench_gpu.has_gaps([check, group], "left out", repeats=2)
