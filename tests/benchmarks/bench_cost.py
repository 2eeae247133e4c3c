"""What training with this package costs beside stock Lightning and a plain PyTorch loop: counts, and time ratios.

    python tests/benchmarks/bench_cost.py --out docs/results/cost_cpu.md

Counts are the same on every machine and in every run; tests assert those that are promised. Times are ratios taken
within one run, and are only reported. `--toy` runs all of it in seconds, to test the command.
"""

import argparse
import os
import platform
import shlex
import sys
import tempfile
from collections.abc import Sequence
from datetime import date
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
for folder in (REPOSITORY, REPOSITORY / "tests" / "support", Path(__file__).resolve().parent):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import lightning  # noqa: E402
import torch  # noqa: E402
from bench_cells import quiet_lightning  # noqa: E402
from bench_cost_counts import (  # noqa: E402
    GROWTH,
    KEPT,
    PLUGINS,
    SETUPS,
    WAYS,
    bytes_per_parameter,
    count_step,
    growth_of_host_calls,
    host_calls,
)
from bench_cost_ranks import WINDOW, count_wire  # noqa: E402
from bench_cost_times import SIZES, TOY, time_imports, time_steps  # noqa: E402
from bench_schedule import Group, ratio  # noqa: E402


def progress(text: str) -> None:
    print(text, flush=True)


def table(heading: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """A Markdown table."""
    lines = [heading, ["---"] * len(heading), *rows]
    return [f"| {' | '.join(str(cell).replace('|', '/') for cell in line)} |" for line in lines]


def section_of_steps(toy: bool) -> list[str]:
    rows = []
    for setup in SETUPS[-2:] if toy else SETUPS:
        progress(f"step: {setup}")
        for way in WAYS:
            counts = count_step(setup, way)
            if counts is None:
                rows.append([setup, way, "refused by Lightning", *["-"] * 4])
            else:
                cells = [f"{counts.passes:.3g}", counts.gradient_bytes, counts.kernels, counts.casts, counts.host_waits]
                rows.append([setup, way, *cells])
    return [
        "## One optimizer step",
        "",
        "From the end of backward to the optimizer's own kernel. A pass is every byte of the gradients read or written "
        "once; bytes are those of a model whose fp32 gradients take the bytes of one pass. Kernels are operations on "
        "gradients, a foreach operation being one. Casts of weights are those of all micro-batches of the step. A host "
        "wait is a value that Python reads from a tensor: on a GPU each of them waits for the device. Ours looks for "
        "non-finite gradients in bf16, too: with an optimizer that is not fused, that is a wait which stock does not "
        "have, and on a GPU the plugin says so when a fit is set up.",
        "",
        *table(["step", "way", "passes", "bytes", "kernels", "weight casts", "host waits"], rows),
    ]


def section_of_calls(toy: bool) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        progress("Python calls per micro-batch")
        found = host_calls(Path(folder), 5 if toy else 25)
        progress("Python calls of models of several sizes")
        grown = growth_of_host_calls(2 if toy else 5, GROWTH[:2] if toy else GROWTH)
    rows = [[way, f"{calls:,.0f}", f"{calls / found['stock']:.2f}"] for way, calls in found.items()]
    growth_rows = [
        [
            f"{row.parameters:,}",
            row.parameter_tensors,
            *(f"{calls:,.0f}" for calls in row.calls.values()),
            f"{row.calls['ours, all callbacks'] / row.calls['stock']:.2f}",
        ]
        for row in grown
    ]
    return [
        "## Python calls per micro-batch",
        "",
        "Python and built-in functions, in bf16-mixed with a fused AdamW, on a transformer of two tiny layers, where "
        "the host's share is largest. Between logging steps unless the row says otherwise, "
        "and without the steps that `UnderflowMonitor` observes, one in 100, "
        "which `tests/callbacks/test_host_cost.py` counts.",
        "",
        *table(["way", "calls", "times stock"], rows),
        "",
        "The same for models that grow in depth. Width adds no call.",
        "",
        *table(
            ["parameters", "tensors", *(f"{way}" for way in grown[0].calls), "all callbacks, times stock"], growth_rows
        ),
    ]


def section_of_bytes(toy: bool) -> list[str]:
    rows = []
    for name in list(PLUGINS)[:2] if toy else PLUGINS:
        progress(f"bytes: {name}")
        parts = bytes_per_parameter(name)
        rows.append([name, *(f"{parts[part]:.2f}" for part in KEPT), f"{sum(parts.values()):.2f}"])
    return [
        "## Bytes per parameter",
        "",
        "What a decoder with AdamW keeps at the end of backward in its second step, counted on the tensors of a run.",
        "",
        *table(["precision", *KEPT, "sum"], rows),
    ]


def section_of_ranks(toy: bool) -> list[str]:
    rows = []
    for ranks in (2,) if toy else (1, 2, 4):
        progress(f"collectives: {ranks} ranks")
        for (strategy, way), wire in count_wire(ranks).items():
            names = ", ".join(f"{count} {name}" for name, count in sorted(wire.collectives.items())) or "none"
            cells = [sum(wire.collectives.values()), names, f"{wire.payload_bytes:,}", f"{wire.socket_bytes:,}"]
            rows.append([strategy, ranks, way, *cells])
    return [
        "## Collectives per optimizer step",
        "",
        f"A step of {WINDOW} micro-batches. Payload is the bytes of the whole tensors that the collectives are about; "
        "sent is what the sockets of the busiest rank really sent over gloo, its own messages included. Stock and ours "
        "tell ranks with each micro-batch whether rank 0 got SIGTERM: Lightning does, with 8 bytes.",
        "",
        *table(["strategy", "ranks", "way", "collectives", "which", "payload bytes", "bytes sent"], rows),
    ]


def _time_rows(size: str, group: Group) -> list[list[object]]:
    rows: list[list[object]] = []
    for cell in group.cells:
        # Of seconds, not of rates: the baseline's tokens per second over those of the cell.
        baselines = [group.baseline(cell, name) for name in ("stock", "plain")]
        times = [ratio(baseline, cell) or "-" if baseline is not None else "1" for baseline in baselines]
        rows.append([size, cell.precision, cell.recipe, cell.optimizer, *times, cell.error or ""])
    return rows


def section_of_times(toy: bool, repeats: int, segment_seconds: float) -> list[str]:
    progress("imports")
    imports, modules, added = time_imports(REPOSITORY, 1 if toy else 5)
    sizes = TOY if toy else SIZES
    timed = time_steps(sizes, repeats=repeats, segment_seconds=segment_seconds, on_progress=progress)
    rows = [row for size, groups in timed.items() for group in groups for row in _time_rows(size, group)]
    shapes = "; ".join(
        f"{size} is {config.parameters:,} parameters, {batch} x {config.block_tokens} tokens per step"
        for size, (config, batch, _) in sizes.items()
    )
    return [
        "## Time",
        "",
        f"Importing the package takes {imports} times as long as importing Lightning alone, median and range "
        f"of {imports.repeats} fresh interpreters; it adds {added} modules to {modules}.",
        "",
        f"Seconds per step over those of stock and of the plain loop, median and range over {repeats} repeats. All "
        "ways are measured in each repeat, beginning with another one, and ratios are taken within a repeat. Lightning "
        "refuses clipping with a fused optimizer under autocast: there stock clips with the foreach optimizer. "
        f"One thread, while the load average of the machine was {os.getloadavg()[0]:.1f}; {shapes}. A CPU computes "
        "slowly, so that the host's share is smaller than on a GPU: the counts above say more.",
        "",
        *table(["model", "precision", "way", "optimizer", "times stock", "times plain", "note"], rows),
    ]


def machine_class() -> str:
    """The CPU's name and how many of its threads there are."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} threads" if names else platform.machine()


def header(arguments: Sequence[str], toy: bool) -> list[str]:
    command = shlex.join(["python", "tests/benchmarks/bench_cost.py", *arguments])
    return [
        "# Toy run of the cost benchmark" if toy else "# What it costs, on a CPU",
        "",
        *(["**Toy size: times say nothing about any machine.**", ""] if toy else []),
        f"Written on {date.today().isoformat()} by `make bench`, which runs `{command}`, on {machine_class()}, with "
        f"Python {platform.python_version()}, torch {torch.__version__} and lightning {lightning.__version__}.",
        "",
        "Plain is a loop written by hand, stock is Lightning with its own plugins, ours is Lightning with a plugin of "
        "this package; all callbacks are `OverflowMonitor`, `OverflowPostMortem`, `UnderflowMonitor`, `MFUMonitor`, "
        "`AccumulationScheduler`, `ChinchillaBudget` and `TokenLearningRate`. Everything but times is counted and the "
        "same in every run; `tests/tools/test_bench_cost.py` asserts what is promised. Times are reported only.",
    ]


def write(page: Path, sections: Sequence[Sequence[str]]) -> None:
    """After each section, so that a run that is cut short keeps what it has."""
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n\n".join("\n".join(lines) for lines in sections) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("docs/results/cost_cpu.md"), help="the page to write")
    parser.add_argument("--repeats", type=int, default=5, help="timed segments per way")
    parser.add_argument("--segment-seconds", type=float, default=0.6, help="how long each of them lasts")
    parser.add_argument("--toy", action="store_true", help="little of everything, to test the command itself")
    options = parser.parse_args(given)
    if options.repeats < 1 or options.segment_seconds <= 0:
        parser.error("--repeats must be at least 1 and --segment-seconds above 0")
    torch.set_num_threads(1)
    with quiet_lightning():
        sections = [header(given, options.toy)]
        for section in (section_of_steps, section_of_calls, section_of_bytes, section_of_ranks):
            sections.append(section(options.toy))
            write(options.out, sections)
        sections.append(section_of_times(options.toy, options.repeats, options.segment_seconds))
        write(options.out, sections)
    progress(f"wrote {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
