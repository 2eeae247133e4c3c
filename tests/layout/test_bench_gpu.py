"""The GPU benchmark: its order, its arithmetic, what it keeps when the time is over, and one toy run of the whole."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from started_python import plain_environment

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import bench_gpu  # noqa: E402
from bench_cells import FLOOR_BYTES, float8_cells  # noqa: E402
from bench_report import Header, as_markdown, as_record, part_lines, write_report  # noqa: E402
from bench_schedule import (  # noqa: E402
    NOT_REACHED,
    Budget,
    Cell,
    Group,
    Measurement,
    Part,
    ratio,
    run_group,
    run_parts,
)


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


# -- order and time ----------------------------------------------------------------------------------------------------


def test_each_repeat_measures_every_cell_and_begins_with_another_one() -> None:
    clock, calls = FakeClock(), []
    run_group(make_group(["a", "b", "c"], clock, calls, 4), Budget(1e6, clock))
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
    group = make_group(["a", "b", "c"], clock, calls, 3, a="warm", b="1")
    run_group(group, Budget(1e6, clock))
    a, b, c = group.cells
    assert (a.error, a.rates) == ("RuntimeError: a broke", [])
    assert (b.error, b.rates) == ("RuntimeError: b broke", [100.0])
    assert (c.error, c.rates) == (None, [100.0, 200.0, 300.0])
    assert calls.count("a released") == 1


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


def fake_parts(clock: FakeClock, seconds_taken: list[float], share: float = 10.0) -> list[Part]:
    def measure(part: Part, budget: Budget, *, taken: float) -> None:
        while taken and budget.allows():
            clock.now, taken = clock.now + 1.0, taken - 1.0
        part.rows.append([part.title, "cut" if taken else "whole"])

    return [
        Part(f"part {n}", share, "Why.", ("a", "b"), lambda p, b, t=taken: measure(p, b, taken=t))
        for n, taken in enumerate(seconds_taken)
    ]


@pytest.mark.parametrize(
    ("seconds_taken", "found"),
    [
        ([10, 10, 10], ["whole", "whole", "whole"]),
        ([25, 10, 10], ["cut", "whole", "whole"]),  # no part takes the time of others
        ([2, 18, 11], ["whole", "whole", "cut"]),  # and one has what was left before it
    ],
)
def test_a_part_has_its_share_of_the_time_and_what_earlier_ones_left(
    seconds_taken: list[float], found: list[str]
) -> None:
    clock = FakeClock()
    parts = fake_parts(clock, seconds_taken)
    run_parts(parts, Budget(1e6, clock), lambda text: None)
    assert [part.rows[0][1] for part in parts] == found


@pytest.mark.parametrize("reached", range(4))
def test_what_the_clock_leaves_out_is_named_and_what_came_before_is_kept(reached: int) -> None:
    clock, saved = FakeClock(), []
    parts = fake_parts(clock, [10, 10, 10])
    run_parts(parts, Budget(10.0 * reached, clock), lambda text: saved.append([bool(p.rows) for p in parts]))
    assert [part.error for part in parts] == [None] * reached + [NOT_REACHED] * (3 - reached)
    assert [part.has_gaps for part in parts] == [False] * reached + [True] * (3 - reached)
    assert saved[:reached] == [[index <= done for index in range(3)] for done in range(reached)]


def test_a_part_that_fails_keeps_its_rows_and_its_error() -> None:
    def measure(part: Part, budget: Budget) -> None:
        part.rows.append(["x|y", "1"])
        raise RuntimeError("broke\nand a second line")

    parts = [Part(title, 1.0, "Why.", ("a", "b"), measure) for title in ("First", "Second")]
    budget = Budget(1e6, time.monotonic)
    run_parts(parts[:1], budget, lambda text: None)
    budget.cancelled = True
    run_parts(parts[1:], budget, lambda text: None)
    failed, late = as_record(make_header(), parts, "")["parts"]
    table = ["| a | b |", "| --- | --- |", "| x/y | 1 |"]
    assert part_lines(failed) == ["", "## First", "", "Why.", "", *table, "", "RuntimeError: broke"]
    assert part_lines(late) == ["", "## Second", "", "Why.", "", NOT_REACHED]


def test_a_cancelled_run_begins_nothing_more() -> None:
    """SIGTERM raises where it arrives, and is remembered where a finalizer swallows the exception."""
    clock, calls = FakeClock(), []
    parts = [
        Part(title, 1e6, "", group=make_group(names, clock, calls, 10_000))
        for title, names in (("first", ["a", "b"]), ("second", ["c"]))
    ]
    budget = Budget(1e6, clock)

    def cancel_after_first_repeat(text: str) -> None:
        budget.cancelled = "repeat 1" in text or budget.cancelled

    run_parts(parts, budget, cancel_after_first_repeat)
    assert calls == ["a warm", "b warm", "a 0", "b 0", "a released", "b released"]
    assert [cell.error for part in parts for cell in part.group.cells] == [None, None, NOT_REACHED]


def test_files_are_offered_after_every_cell_and_repeat() -> None:
    clock, calls = FakeClock(), []
    group = make_group(["a", "b"], clock, calls, 2)
    seen: list[tuple[str, int]] = []
    run_group(group, Budget(1e6, clock), lambda text: seen.append((text, sum(len(c.rates) for c in group.cells))))
    assert [count for _, count in seen] == [0, 0, 2, 4]
    assert seen[-1][0] == "repeat 2 of 2"


def test_without_torchao_fp8_says_so_and_takes_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    cells = float8_cells(bench_gpu.make_workload(True, 2))
    assert [cell.error for cell in cells] == ["torchao is not installed"] * 2
    for cell in cells:
        cell.make_runner = lambda: pytest.fail("not made")
    run_group(Group(cells, 2), Budget(1e6, time.monotonic))
    assert [cell.error for cell in cells] == ["torchao is not installed"] * 2


# -- arithmetic --------------------------------------------------------------------------------------------------------


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


def test_an_unknown_chip_gets_no_mfu() -> None:
    header = make_header(peak_flops_per_second={}, peak_source="no peak is known for 'X'")
    record = as_record(header, [Part("", 1.0, "", group=Group([cell_with([500.0])], 1))], "complete")
    assert record["parts"][0]["cells"][0]["mfu"] is None
    assert "not known for this device (no peak is known for 'X')" in as_markdown(record)


def test_the_floors_are_those_of_a_fused_step_over_all_bytes() -> None:
    """Beside published figures: TransformerEngine's fused Adam over fp32 masters, and over 16-bit remainders."""
    assert FLOOR_BYTES["fp32 masters"] == 30
    assert FLOOR_BYTES["remainder masters"] == 28
    assert FLOOR_BYTES["fp32 weights"] == 32


def test_the_order_is_that_of_an_experts_questions_and_fits_the_time() -> None:
    parts = bench_gpu.make_parts(bench_gpu.make_workload(False, 16), 3, toy=False)
    assert sum(part.seconds for part in parts) <= 60 * bench_gpu.parse_arguments([]).minutes
    assert [part.seconds for part in parts] == [20, 40, 130, 90, 60, 45, 45, 20, 15, 45]
    large, windowed = (part.group for part in parts[5:7])
    parameters = 24 * 12 * 2048**2 + 50_304 * 2048
    assert 1.30e9 < parameters < 1.32e9
    assert large.flops_per_token == windowed.flops_per_token == 6 * parameters + 12 * 24 * 2048 * 1024
    ways = [(cell.recipe, cell.precision) for cell in parts[2].group.cells]
    assert ways[:3] == [(way, "bf16-mixed") for way in ("ours", "plain", "stock")]


# -- toy runs ----------------------------------------------------------------------------------------------------------

TITLES = [
    "Waits for the device",
    "From backward to stepped weights",
    "GPT-2 small, bf16-mixed, compiled",
    "GPT-2 small, master weights, compiled",
    "GPT-2 small, bf16-mixed and 16-mixed, eager",
    "1.3B, bf16-mixed, compiled by block, 1 micro-batch per step",
    "1.3B, bf16-mixed, compiled by block, 4 micro-batches per step",
    "Memory beside its estimate",
    "A real out-of-memory",
    "Loss at equal steps",
]


@pytest.fixture(scope="module")
def toy_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, dict[str, Any]], str]]:
    """The final status, the record as it was written after each part, and the page."""
    stem, snapshots = tmp_path_factory.mktemp("bench") / "toy", {}
    workload = bench_gpu.make_workload(True, 2)
    parts = bench_gpu.make_parts(workload, 1, toy=True)
    options = bench_gpu.parse_arguments(["--toy"])
    write, ended = bench_gpu.write_report, [part.title for part in parts]

    def keep(record: dict[str, Any], stem: Path) -> Any:
        done = [p.title for p in parts if p.rows or (p.group is not None and not any(map(unfinished, p.group.cells)))]
        if done:
            snapshots.setdefault(done[-1], deepcopy(record))
        return write(record, stem)

    def unfinished(cell: Cell) -> bool:
        return cell.error is None and not cell.rates

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_gpu, "write_report", keep)
        status = bench_gpu.run(
            parts, bench_gpu.make_header(options, workload, ["--toy"]), stem, Budget(1e6, time.monotonic)
        )
    assert ended == TITLES
    return status, snapshots, stem.with_name("toy.md").read_text()


@pytest.mark.full
def test_each_part_is_written_as_it_ends(toy_run: Any) -> None:
    """So that a run that is killed after any of them leaves those before."""
    status, snapshots, page = toy_run
    assert status == "finished with gaps: see the notes"  # a CPU has no TF32
    assert list(snapshots) == TITLES
    for number, record in enumerate(snapshots.values(), start=1):
        measured = [
            bool(part["rows"]) and any(any(cell["tokens_per_second"]) for cell in part["cells"])
            if part["cells"]
            else bool(part["rows"])
            for part in record["parts"]
        ]
        assert measured == [True] * number + [False] * (len(TITLES) - number)
    assert "**Toy size: these figures say nothing about any device.**" in page
    assert [line[3:] for line in page.splitlines() if line.startswith("## ")] == TITLES


@pytest.mark.full
def test_toy_run_measures_every_cell(toy_run: Any) -> None:
    parts = toy_run[1][TITLES[-1]]["parts"]
    cells = [cell for part in parts for cell in part["cells"]]
    (tf32,) = (cell for cell in cells if cell["error"] and cell["precision"] != "fp8-mixed")
    assert tf32["recipe"] == "ours, TF32Precision"
    assert tf32["error"].startswith("MisconfigurationException: TF32Precision cannot run on this device: ")
    for part in parts[1:7]:
        for cell in part["cells"]:
            if cell["error"]:
                continue
            assert len(cell["tokens_per_second"]) == 1
            assert 0 < cell["step_seconds"] < 10
            assert (cell["floor_seconds"] is None) == ("no clipping" in cell["optimizer"])
            # Gradients of fp16 weights are fp16 themselves: the first scale of 2^16 is too much for some.
            assert cell["skipped_steps"] == 0 or cell["precision"] == "16-true"
            assert cell["mfu"] is None  # no peak is known for a CPU
            has_baselines = {r for r in ("stock", "plain") if r != cell["recipe"]}
            assert set(cell["ratios"]) <= has_baselines
            assert "plain" in cell["ratios"] or cell["recipe"] == "plain" or cell["precision"] == "16-true"


@pytest.mark.full
def test_toy_run_makes_every_check(toy_run: Any) -> None:
    """What a CPU cannot tell is left open; what it can is right."""
    parts = toy_run[1][TITLES[-1]]["parts"]
    waits, memory, out_of_memory, loss = parts[0], *parts[7:]
    assert [part["error"] for part in (waits, memory, out_of_memory, loss)] == [None] * 4
    ways = [("ours, all callbacks", "error"), ("stock", "warn"), ("ours, all callbacks", "warn")]
    assert [tuple(row[:3]) for row in waits["rows"]] == [(p, *way) for way in ways for p in ("bf16-mixed", "16-mixed")]
    assert {tuple(row[3:]) for row in waits["rows"]} == {("5", "not measured")}
    assert len(memory["rows"]) == 4
    assert all([row[2], row[3], row[5]] == ["not measured"] * 3 for row in memory["rows"])
    whole, without, split = out_of_memory["rows"]
    assert without[4].startswith("OutOfMemoryError: CUDA out of memory.")
    assert split[3] == "1"
    assert float(split[4]) == pytest.approx(float(whole[4]), rel=1e-3)  # bf16, and a mean of two means
    for way, seeds, value, difference in loss["rows"]:
        if difference == "torchao is not installed":
            continue
        assert (seeds, way.startswith("stock, bf16")) == ("3", difference == "-")
        assert 0 < float(value) < 4.16  # below that of equal odds, log(64)


class ExpiringClock:
    """Second by second: it is asked before each thing that is begun."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self) -> float:
        self.asked += 1
        return float(self.asked)


@pytest.mark.full
def test_a_clock_that_runs_out_inside_of_a_part_leaves_what_it_has(tmp_path: Path) -> None:
    """Each part alone, with time for two things: the rest says that it was not reached, and nothing fails."""
    workload = bench_gpu.make_workload(True, 2)
    header = bench_gpu.make_header(bench_gpu.parse_arguments(["--toy"]), workload, [])
    for part in bench_gpu.make_parts(workload, 1, toy=True):
        part.seconds = 1e6
        status = bench_gpu.run([part], header, tmp_path / "toy", Budget(8.0, ExpiringClock()))
        (record,) = json.loads((tmp_path / "toy.json").read_text())["parts"]
        notes = [row[-1] for row in record["rows"]] if part.group else [cell for row in record["rows"] for cell in row]
        if part.title == "A real out-of-memory":
            assert status == "complete"  # three short runs, which only mean something together
        else:
            assert status == "finished with gaps: see the notes"
            assert NOT_REACHED in notes
            assert part.group is not None or set(notes) - {NOT_REACHED}
        assert record["error"] is None


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
