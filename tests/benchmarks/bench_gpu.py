"""Training throughput on one GPU: ours beside stock Lightning beside a plain PyTorch loop.

    python tests/benchmarks/bench_gpu.py --out docs/results

Times the gradient epilogue alone; makes the checks of `bench_checks.py`; then trains the demo's GPT at the size of
GPT-2 small in bf16-mixed, 16-mixed, master weights, fp8, TF32 and fp32, eager and compiled, and two larger models.
Writes `bench_gpu_<date>.md` and `.json`. The most important comparisons come first, files are written after every step,
and `--minutes` or SIGTERM ends the run with what it has. `--only` measures some of the tables, for example those that
an earlier run did not reach. `--toy` runs all of it in seconds on a CPU, to test the benchmark.
"""

import argparse
import gc
import re
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import date
from pathlib import Path
from types import FrameType

REPOSITORY = Path(__file__).resolve().parents[2]
for folder in (REPOSITORY, REPOSITORY / "tests" / "support", Path(__file__).resolve().parent):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import lightning  # noqa: E402
import torch  # noqa: E402
from bench_cells import (  # noqa: E402
    OTHER_PLUGINS,
    PEAK_FORMATS,
    Workload,
    make_group,
    training_flops_per_token,
)
from bench_checks import Check, memory, out_of_memory, run_check, waits  # noqa: E402
from bench_epilogue import EpilogueReport, measure  # noqa: E402
from bench_loss_in_time import loss_in_time  # noqa: E402
from bench_report import EPILOGUE_TITLE, Header, as_record, write_report  # noqa: E402
from bench_schedule import Budget, Group, describe, run_groups  # noqa: E402

from lightning_mp.language_model import GPTConfig  # noqa: E402
from lightning_mp.planning import CONVENTIONS, find_chip  # noqa: E402

FULL_ORDER = [
    ("", "bf16-mixed", False),
    ("", "16-mixed", False),
    ("", OTHER_PLUGINS, False),
    ("1.3B at 2,048 tokens", "bf16-mixed", False),
    ("350M at 4,096 tokens", "bf16-mixed", False),
    ("", "tf32", False),
    ("", "fp32", False),
    ("", "bf16-mixed", True),
    ("", OTHER_PLUGINS, True),
    ("1.3B at 2,048 tokens", OTHER_PLUGINS, False),
    ("350M at 4,096 tokens", OTHER_PLUGINS, True),
    ("", "16-mixed", True),
    ("", "tf32", True),
    ("", "fp32", True),
]
"""Model, precision, compiled. Most important first: a run that is cut short keeps these."""
TOY_ORDER = [
    ("", "16-mixed", False),
    ("", OTHER_PLUGINS, False),
    ("", "tf32", False),
    ("", "bf16-mixed", True),
    ("two layers", "bf16-mixed", False),
]
FIRST_GROUPS = 3
"""Measured before the loss after equal time."""
MODELS = {
    "350M at 4,096 tokens": (GPTConfig(layers=24, heads=16, width=1024, block_tokens=4096, vocab=50_304), 2),
    "1.3B at 2,048 tokens": (GPTConfig(layers=24, heads=16, width=2048, block_tokens=2048, vocab=50_304), 2),
    "two layers": (GPTConfig(layers=2, heads=2, width=16, block_tokens=16, vocab=64), 2),
}
"""Shape and sequences per step. 350M and 1.3B are GPT-3 Medium and XL (Brown et al. 2020, arXiv:2005.14165, table 2.1),
with 16 heads in XL because 24 do not divide its width."""
FIRST_WARM_UP_SECONDS = {False: 10.0, True: 75.0}
"""Assumed until one was seen (eager, compiled): GPT-2 small compiles in about a minute from cold."""
CUT_SHORT = "cut short by SIGTERM"


class CutShort(BaseException):
    """SIGTERM arrived. Not an Exception, so that no cell takes it for an error of its own."""


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Ours beside stock Lightning beside plain PyTorch on one GPU.")
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="folder for the .md and .json")
    parser.add_argument("--minutes", type=float, default=8.5, help="nothing new begins after this long")
    parser.add_argument("--repeats", type=int, help="timed segments per cell; 3, or 2 with --toy")
    parser.add_argument("--batch-size", type=int, default=16, help="sequences per step")
    parser.add_argument(
        "--only", nargs="+", metavar="TEXT", help="only tables with a word that begins so in their title"
    )
    parser.add_argument("--toy", action="store_true", help="a tiny model on the CPU, to test the benchmark itself")
    parsed = parser.parse_args(arguments)
    if parsed.repeats is None:
        parsed.repeats = 2 if parsed.toy else 3
    if parsed.repeats < 1 or parsed.batch_size < 1:
        parser.error("--repeats and --batch-size must be at least 1")
    if not parsed.minutes >= 0:
        parser.error("--minutes must not be negative")
    return parsed


def make_workload(toy: bool, batch_size: int) -> Workload:
    if toy:
        config = GPTConfig(layers=1, heads=2, width=16, block_tokens=16, vocab=64)
        # dynamo runs, the C++ compiler does not
        return Workload(config, 2, torch.device("cpu"), "eager", 1, segment_seconds=0.02, min_steps=2, max_steps=4)
    config = GPTConfig(layers=12, heads=12, width=768, block_tokens=1024, vocab=50_304)
    return Workload(
        config, batch_size, torch.device("cuda", 0), "inductor", 3, segment_seconds=0.8, min_steps=3, max_steps=60
    )


def make_groups(workload: Workload, order: Sequence[tuple[str, str, bool]]) -> list[Group]:
    """Groups of the workload's own model, or of one of `MODELS` where a name is given."""
    groups = []
    for model, precision, compiled in order:
        config, batch_size = MODELS.get(model, (workload.config, workload.batch_size))
        sized = replace(workload, config=config, batch_size=batch_size)
        groups.append(make_group(sized, precision, compiled, model))
    return groups


def make_sections(workload: Workload, toy: bool) -> list[Check | Group]:
    """All tables but the epilogue's, most important first."""
    groups = make_groups(workload, TOY_ORDER if toy else FULL_ORDER)
    checks = [waits(workload, steps=5 if toy else 100), memory(workload), out_of_memory(workload)]
    loss = loss_in_time(workload, seconds=0.2 if toy else 8.0)
    return [*checks, *groups[:FIRST_GROUPS], loss, *groups[FIRST_GROUPS:]]


def is_wanted(title: str, only: Sequence[str] | None) -> bool:
    """Whether a word of the title begins with one of the texts ("16-mixed" is not in bf16-mixed), or none is given."""
    words = (rf"(^| ){re.escape(text)}" for text in only or [""])
    return any(re.search(word, title, re.IGNORECASE) for word in words)


def make_header(options: argparse.Namespace, workload: Workload, arguments: Sequence[str]) -> Header:
    config = workload.config
    parameters, flops = training_flops_per_token(config)
    device = torch.cuda.get_device_name(workload.device) if workload.device.type == "cuda" else "CPU"
    chip = find_chip(device)
    peaks = chip.peak_flops if chip is not None else {}
    versions = {"torch": torch.__version__, "lightning": lightning.__version__, "python": sys.version.split()[0]}
    if torch.version.cuda:
        versions["CUDA"] = torch.version.cuda
    return Header(
        date=date.today().isoformat(),
        command=shlex.join(["python", "tests/benchmarks/bench_gpu.py", *arguments]),
        device=device,
        versions=versions,
        model=f"GPT, {config.parameters:,} parameters: {config.layers} layers, {config.heads} heads, "
        f"width {config.width}, vocabulary {config.vocab}, {config.block_tokens} tokens",
        settings={
            "batch size": workload.batch_size,
            "gradient accumulation": 1,
            "repeats": options.repeats,
            "compile backend": workload.compile_backend,
            "data": "random tokens on the device",
        },
        flops_per_token=flops,
        flops_convention=f"palm convention, {CONVENTIONS['palm'].formula}, N = {parameters:,} parameters in matmuls",
        flops_parameters=parameters,
        peak_flops_per_second={name: peaks[key] for name, key in PEAK_FORMATS.items() if key in peaks},
        peak_source=chip.source if chip is not None else f"no peak is known for {device!r}",
        toy=options.toy,
    )


def free_stem(folder: Path, name: str) -> Path:
    """A file stem that overwrites no earlier run of the day."""
    stem, number = folder / name, 2
    while stem.with_name(stem.name + ".json").exists():
        stem, number = folder / f"{name}-{number}", number + 1
    return stem


def _measure_epilogue(workload: Workload, options: argparse.Namespace) -> EpilogueReport | str:
    """An error here ends this table only."""
    try:
        calls = 2 if options.toy else 50
        return measure(workload.config, workload.device, repeats=options.repeats, calls=calls)
    except Exception as error:
        return describe(error)


def has_gaps(sections: Sequence[Check | Group], epilogue: EpilogueReport | str | None, repeats: int) -> bool:
    """Whether anything that was to be measured is missing."""
    groups = [section for section in sections if isinstance(section, Group)]
    checks = [section for section in sections if isinstance(section, Check)]
    return (
        epilogue is None
        or any(check.error for check in checks)
        or any(len(cell.rates) < repeats for group in groups for cell in group.cells)
    )


def run(
    options: argparse.Namespace, workload: Workload, sections: list[Check | Group], header: Header, stem: Path
) -> str:
    """Measures and writes; returns the final status."""
    times_epilogue = is_wanted(EPILOGUE_TITLE, options.only)
    epilogue: EpilogueReport | str | None = None if times_epilogue else "Left out by --only."
    groups = [section for section in sections if isinstance(section, Group)]
    checks = [section for section in sections if isinstance(section, Check)]

    def save(status: str) -> None:
        write_report(as_record(header, groups, status, epilogue, checks), stem)

    def on_progress(message: str) -> None:
        print(message, flush=True)
        save("running: if this line stays, the run was killed, and what stands below is what it had")

    gc.freeze()  # each segment collects garbage first, which need not look at all that was imported
    budget = Budget(60 * options.minutes, time.monotonic)
    if not options.toy:
        budget.expected_warm_up_seconds.update(FIRST_WARM_UP_SECONDS)

    def stop(signum: int, frame: FrameType | None) -> None:
        if not budget.cancelled:
            budget.cancelled = True  # an exception raised inside a finalizer is lost; this is not
            raise CutShort

    signal.signal(signal.SIGTERM, stop)
    status = "stopped by an error"
    try:
        with suppress(CutShort):
            if times_epilogue and budget.allows():
                epilogue = _measure_epilogue(workload, options)
                on_progress(f"the gradient epilogue alone: {epilogue if isinstance(epilogue, str) else 'measured'}")
            for section in sections:
                if isinstance(section, Check):
                    run_check(section, budget)
                    on_progress(f"{section.title}: {section.error or 'done'}")
                else:
                    run_groups([section], repeats=options.repeats, budget=budget, on_progress=on_progress)
        gaps = has_gaps(sections, epilogue, options.repeats)
        status = "finished with gaps: see the notes" if gaps else "complete"
        if budget.cancelled:
            status = CUT_SHORT
    except (KeyboardInterrupt, SystemExit):  # the Trainer turns the first into the second
        status = "cut short by Ctrl-C"
        raise
    finally:
        save(status)
    return status


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parse_arguments(given)
    if not options.toy and not torch.cuda.is_available():
        print("This benchmark needs a CUDA device and torch sees none. Use --toy to try the benchmark itself on a CPU.")
        return 2
    workload = make_workload(options.toy, options.batch_size)
    sections = make_sections(workload, options.toy)
    titles = [EPILOGUE_TITLE, *(section.title for section in sections)]
    if not any(is_wanted(title, options.only) for title in titles):
        print(
            f"--only {shlex.join(options.only)}: no title has a word that begins so. The titles: {'; '.join(titles)}."
        )
        return 2
    sections = [section for section in sections if is_wanted(section.title, options.only)]
    if options.toy:
        torch.set_num_threads(1)
    header = make_header(options, workload, given)
    stem = free_stem(options.out, f"bench_gpu_{'toy_' if options.toy else ''}{header.date}")
    status = run(options, workload, sections, header, stem)
    print(f"{status}: {stem}.md and .json")
    return 128 + signal.SIGTERM if status == CUT_SHORT else 0


if __name__ == "__main__":
    sys.exit(main())
