"""The GPU benchmark: its order, its arithmetic, what it keeps when the time is over, and one toy run of the whole."""

import json
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from started_python import plain_environment

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import bench_gpu  # noqa: E402
from bench_cells import float8_cells  # noqa: E402
from bench_report import Header, as_markdown, as_record, write_report  # noqa: E402
from bench_schedule import NOT_REACHED, Budget, Cell, Group, Measurement, Part, ratio, run_group  # noqa: E402


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


def make_group(names: list[str], clock: FakeClock, calls: list[str], repeats: int, **fail_at: str) -> Group:
    cells = [
        Cell(name, "16-mixed", "AdamW", lambda n=name: FakeRunner(n, clock, calls, fail_at.get(n))) for name in names
    ]
    return Group(cells, repeats)


def test_the_time_limit_keeps_finished_cells_and_names_the_rest() -> None:
    clock, calls = FakeClock(), []
    first, second = make_group(["a", "b"], clock, calls, 3), make_group(["c", "d"], clock, calls, 3)
    # two warm-ups and 3 repeats of two cells take 26 s; after 1.5 repeats the limit comes
    budget = Budget(22.5, clock)
    run_group(first, budget)
    run_group(second, budget)
    assert [len(cell.rates) for cell in first.cells] == [1, 2]
    assert [cell.error for cell in first.cells] == [None, None]
    assert [cell.error for cell in second.cells] == [NOT_REACHED, NOT_REACHED]
    assert ratio(*first.cells).repeats == 1


@pytest.mark.parametrize("last", range(11))
def test_a_clock_that_runs_out_after_any_part_keeps_what_is_before(last: int, tmp_path: Path) -> None:
    """The parts of the benchmark, with ways to train that take no time; those of the part ``last`` take all of it."""
    clock, calls = FakeClock(), []
    parts = bench_gpu.make_parts(bench_gpu.make_workload(True, 2), 1, toy=True)
    assert len(parts) == 11

    def measure(part: Part, budget: Budget) -> None:
        part.rows.append(["measured"])
        clock.now += 1e6 * (part is parts[last])

    class Last(FakeRunner):
        def measure(self) -> Measurement:
            found = super().measure()
            self.clock.now += 1e6
            return found

    for number, part in enumerate(parts):
        if part.group is None:
            part.measure = measure
        else:
            kind = Last if number == last else FakeRunner
            make = partial(kind, part.title, clock, calls)
            part.group = Group([Cell(part.title, "16-mixed", "AdamW", make)], 1)
    bench_gpu.run(parts, make_header(toy=True), tmp_path / "bench", Budget(60 * 8.5, clock))
    record = json.loads((tmp_path / "bench.json").read_text())
    assert record["status"] == ("complete" if last == 10 else "finished with gaps: see the notes")
    for number, part in enumerate(record["parts"]):
        errors = [part["error"], *(cell["error"] for cell in part["cells"])]
        rates = [rate for cell in part["cells"] for rate in cell["tokens_per_second"]]
        is_measured = any(rates) if part["cells"] else bool(part["rows"])
        assert is_measured == (number <= last), part["title"]
        assert (NOT_REACHED in errors) == (number > last), part["title"]


def test_without_torchao_fp8_says_so_and_takes_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    cells = float8_cells(bench_gpu.make_workload(True, 2))
    assert [cell.error for cell in cells] == ["torchao is not installed"] * 2
    for cell in cells:
        cell.make_runner = lambda: pytest.fail("not made")
    run_group(Group(cells, 2), Budget(1e6, time.monotonic))
    assert [cell.error for cell in cells] == ["torchao is not installed"] * 2


def cell_with(rates: list[float | None]) -> Cell:
    cell = Cell("ours", "16-mixed", "fused AdamW", lambda: pytest.fail("not run"), floor_bytes=32)
    cell.measurements = [None if rate is None else Measurement(rate, 3 * 2**29, 0, 0.008) for rate in rates]
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
        "flops_convention": "palm convention",
        "peak_flops_per_second": {"16-mixed": 1e12},
        "peak_source": "a datasheet",
        "copy_bytes_per_second": 4e12,
        "toy": False,
    }
    return Header(**{**values, **changes})


def test_table_shows_median_spread_mfu_memory_floor_and_ratios(tmp_path: Path) -> None:
    ours, stock = cell_with([400.0, 500.0, 600.0]), cell_with([200.0, 250.0, 400.0])
    stock.recipe, stock.error = "stock", "OutOfMemoryError: a|b"
    group = Group([ours, stock], 5, parameters=500_000_000, flops_per_token=1_000_000_000)
    record = as_record(make_header(), [Part("16-mixed", 1.0, "", group=group)], "complete")
    row = next(line for line in as_markdown(record).splitlines() if line.startswith("| ours |"))
    assert row.split(" | ")[3:10] == [
        "500 (400 to 600)",
        "50.0%",  # 500 tokens/s * 1 GFLOP over 1 TFLOP/s
        "1.50 GiB",
        "8",
        "2.00",  # 500 million parameters * 32 bytes at 4 TB/s take 4 ms
        "2.000 (1.500 to 2.000)",
        "-",
    ]
    assert row.endswith("| 3 of 5 repeats |")
    assert "OutOfMemoryError: a/b; 3 of 5 repeats |" in as_markdown(record)
    json_path, markdown_path = write_report(record, tmp_path / "deep" / "bench")
    assert json.loads(json_path.read_text()) == json.loads(json.dumps(record))
    assert markdown_path.read_text() == as_markdown(record)
    assert sorted(path.name for path in json_path.parent.iterdir()) == ["bench.json", "bench.md"]


@pytest.mark.full
def test_a_toy_run_measures_every_part(tmp_path: Path) -> None:
    """What a CPU cannot tell is left open, and named; everything else is measured."""
    assert bench_gpu.main(["--toy", "--warm-up", "--out", str(tmp_path)]) == 0
    (json_path,) = tmp_path.glob("*.json")
    record = json.loads(json_path.read_text())
    assert record["status"] == "finished with gaps: see the notes"  # a CPU has no TF32
    assert [part["error"] for part in record["parts"]] == [None] * 11
    assert all(part["rows"] or part["cells"] for part in record["parts"])
    cells = [cell for part in record["parts"] for cell in part["cells"]]
    refused = [cell for cell in cells if cell["error"] and "is not installed" not in cell["error"]]
    (tf32,) = refused
    assert tf32["error"].startswith("MisconfigurationException: TF32Precision cannot run on this device: ")
    for cell in cells:
        if not cell["error"]:
            assert len(cell["tokens_per_second"]) == 1
            # Gradients of fp16 weights are fp16 themselves: the first scale of 2^16 is too much for some.
            assert cell["skipped_steps"] == 0 or cell["precision"] == "16-true"
    whole, without, split = record["parts"][9]["rows"]
    assert without[4].startswith("OutOfMemoryError: CUDA out of memory.")
    assert split[3] == "1"
    assert float(split[4]) == pytest.approx(float(whole[4]), rel=1e-3)  # bf16, and a mean of two means
    for way, seeds, value, difference in record["parts"][10]["rows"]:
        if difference != "torchao is not installed":
            assert (seeds, way.startswith("stock, bf16")) == ("3", difference == "-")
            assert 0 < float(value) < 4.16  # below that of equal odds, log(64)


@pytest.mark.full
def test_sigterm_keeps_what_was_measured(tmp_path: Path) -> None:
    """Of the parts that `--only` names, and of no others."""
    arguments = [sys.executable, str(BENCHMARKS / "bench_gpu.py"), "--toy", "--out", str(tmp_path)]
    arguments += ["--repeats", "10000", "--only", "16-MIXED", "nothing"]
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
    (part,) = record["parts"]
    assert part["title"] == "GPT-2 small, bf16-mixed and 16-mixed, eager"
    assert all(len(cell["tokens_per_second"]) >= 3 for cell in part["cells"])
    assert not list(tmp_path.glob("*.partial"))


def test_without_a_gpu_the_full_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert bench_gpu.main(["--out", str(tmp_path)]) == 2
    assert "needs a CUDA device and torch sees none. Use --toy" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
