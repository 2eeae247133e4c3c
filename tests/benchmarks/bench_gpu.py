"""What training with this package costs on one GPU, beside stock Lightning and beside a plain PyTorch loop.

    python tests/benchmarks/bench_gpu.py --out docs/results

Parts come in the order in which one asks: does anything wait, what does a step cost after backward, then throughput of
compiled models, master weights, eager models, a large model; memory; quality. Each has a share of the time, and takes
what earlier ones left. `bench_gpu_<date>.md` and `.json` are written after every step, and `--minutes` or SIGTERM ends
the run with what it has. `--only` measures some of the parts, for example those that an earlier run did not reach.
`--toy` runs all of it in seconds on a CPU, to test the benchmark.
"""

import argparse
import gc
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
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
    PEAK_FORMATS,
    Workload,
    copy_bytes_per_second,
    every_plugin,
    float8_cells,
    make_group,
    masters_cells,
    mixed_cells,
)
from bench_checks import memory, out_of_memory, waits  # noqa: E402
from bench_loss import loss_at_equal_steps  # noqa: E402
from bench_peers import float8_peers, masters_peers, mixed_peers  # noqa: E402
from bench_report import Header, as_record, write_report  # noqa: E402
from bench_schedule import Budget, Cell, Part, run_parts  # noqa: E402

from lightning_mp.language_model import GPTConfig  # noqa: E402
from lightning_mp.planning import CONVENTIONS, find_chip  # noqa: E402

GPT2_SMALL = GPTConfig(layers=12, heads=12, width=768, block_tokens=1024, vocab=50_304)
LARGE = GPTConfig(layers=24, heads=16, width=2048, block_tokens=1024, vocab=50_304)
"""GPT-3 XL (Brown et al. 2020, arXiv:2005.14165, table 2.1), with 16 heads because 24 do not divide its width."""
WIDE = GPTConfig(layers=8, heads=32, width=4096, block_tokens=1024, vocab=50_304)
"""As wide as Llama 2 7B (arXiv:2307.09288), where fp8 gains most in torchao's table."""
TOY = GPTConfig(layers=1, heads=2, width=16, block_tokens=16, vocab=64)
CUT_SHORT = "cut short by SIGTERM"


class CutShort(BaseException):
    """SIGTERM arrived. Not an Exception, so that no cell takes it for an error of its own."""


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Ours beside stock Lightning beside plain PyTorch on one GPU.")
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="folder for the .md and .json")
    parser.add_argument("--minutes", type=float, default=18, help="nothing new begins after this long")
    parser.add_argument("--repeats", type=int, help="timed segments per way; 3, or 2 with --toy")
    parser.add_argument("--batch-size", type=int, default=16, help="sequences per step")
    parser.add_argument(
        "--only", nargs="+", metavar="TEXT", help="only parts with a word that begins so in their title"
    )
    parser.add_argument(
        "--warm-up", action="store_true", help="two steps of each way: fills the compiler's caches, times mean nothing"
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
        # dynamo runs, the C++ compiler does not
        return Workload(TOY, 4, torch.device("cpu"), "eager", 1, segment_seconds=0.02, min_steps=2, max_steps=4)
    device = torch.device("cuda", 0)
    return Workload(GPT2_SMALL, batch_size, device, "inductor", 3, segment_seconds=0.8, min_steps=3, max_steps=60)


def make_parts(workload: Workload, repeats: int, *, toy: bool) -> list[Part]:
    """All of them, in order. Their shares are what three repeats took on one H200, with cold compile caches."""
    small, compiled = "GPT-2 small", replace(workload, compiled="whole")
    large = replace(workload, config=TOY if toy else LARGE, compiled="by block")
    windows = [(window, replace(large, accumulation=window)) for window in (1, 4)]

    def part(title: str, seconds: float, of: Workload, make_cells: Callable[[Workload], list[Cell]], why: str) -> Part:
        return Part(title, seconds, why, group=make_group(of, make_cells(of), repeats))

    return [
        waits(workload, 45, steps=5 if toy else 100),
        part(
            "From backward to stepped weights",
            80,
            replace(workload, batch_size=min(4, workload.batch_size), segment_seconds=workload.segment_seconds / 2),
            every_plugin,
            f"{small}, eager, with few tokens per step: read the two columns about what follows backward. Throughput "
            "is that of small batches.",
        ),
        part(
            f"{small}, bf16-mixed, compiled",
            145,
            compiled,
            lambda of: [*mixed_cells(of, "bf16-mixed")[:5], *mixed_peers(of, "bf16-mixed")],
            "The first way that is compiled fills torch's caches on disk, which the others read.",
        ),
        part(
            f"{small}, master weights, compiled",
            140,
            compiled,
            lambda of: [*masters_cells(of), *masters_peers(of)],
            "bf16 weights with fp32 masters, beside a loop with masters by hand; stock has no masters and bf16 "
            "moments. Also optimizers of other libraries that keep masters themselves.",
        ),
        part(
            "8 layers of width 4096, fp8, compiled by block",
            200,
            replace(large, config=TOY if toy else WIDE),
            lambda of: [*mixed_cells(of, "bf16-mixed")[:2], *float8_cells(of), *float8_peers(of)],
            "Compared with bf16-mixed: ours, and torchao by hand.",
        ),
        part(
            f"{small}, bf16-mixed and 16-mixed, eager",
            60,
            workload,
            lambda of: _in_turn(mixed_cells(of, "bf16-mixed"), mixed_cells(of, "16-mixed")),
            "Nothing is compiled.",
        ),
        *(
            part(
                f"1.3B, bf16-mixed, compiled by block, {window} micro-batch{'es' if window > 1 else ''} per step",
                150,
                of,
                lambda of: [*mixed_cells(of, "bf16-mixed")[:3], *mixed_peers(of, "bf16-mixed")],
                f"{of.batch_size} sequences of {of.config.block_tokens} tokens per step, "
                f"{of.config.parameters:,} parameters.",
            )
            for window, of in windows
        ),
        memory(workload, 20),
        out_of_memory(workload, 15),
        loss_at_equal_steps(workload, 45, toy=toy),
    ]


def _in_turn(*groups: list[Cell]) -> list[Cell]:
    return [cell for cells in zip(*groups, strict=True) for cell in cells]


def is_wanted(title: str, only: Sequence[str] | None) -> bool:
    """Whether a word of the title begins with one of the texts ("16-mixed" is not in bf16-mixed), or none is given."""
    words = (rf"(^| ){re.escape(text)}" for text in only or [""])
    return any(re.search(word, title, re.IGNORECASE) for word in words)


def make_header(options: argparse.Namespace, workload: Workload, arguments: Sequence[str]) -> Header:
    config = workload.config
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
            "repeats": options.repeats,
            "compile backend": workload.compile_backend,
            "data": "random tokens on the device",
        },
        flops_convention=f"palm convention, {CONVENTIONS['palm'].formula}, N = parameters in matmuls",
        peak_flops_per_second={name: peaks[key] for name, key in PEAK_FORMATS.items() if key in peaks},
        peak_source=chip.source if chip is not None else f"no peak is known for {device!r}",
        copy_bytes_per_second=copy_bytes_per_second(workload.device),
        toy=options.toy,
    )


def free_stem(folder: Path, name: str) -> Path:
    """A file stem that overwrites no earlier run of the day."""
    stem, number = folder / name, 2
    while stem.with_name(stem.name + ".json").exists():
        stem, number = folder / f"{name}-{number}", number + 1
    return stem


def run(parts: Sequence[Part], header: Header, stem: Path, budget: Budget) -> str:
    """Measures and writes; returns the final status."""

    def save(status: str) -> None:
        write_report(as_record(header, parts, status), stem)

    def on_progress(message: str) -> None:
        print(message, flush=True)
        save("running: if this line stays, the run was killed, and what stands below is what it had")

    def stop(signum: int, frame: FrameType | None) -> None:
        if not budget.cancelled:
            budget.cancelled = True  # an exception raised inside a finalizer is lost; this is not
            raise CutShort

    before, status = signal.signal(signal.SIGTERM, stop), "stopped by an error"
    try:
        with suppress(CutShort):
            run_parts(parts, budget, on_progress)
        gaps = any(part.has_gaps for part in parts)
        status = "finished with gaps: see the notes" if gaps else "complete"
        if budget.cancelled:
            status = CUT_SHORT
    except (KeyboardInterrupt, SystemExit):  # the Trainer turns the first into the second
        status = "cut short by Ctrl-C"
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
        save(status)
    return status


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parse_arguments(given)
    if not options.toy and not torch.cuda.is_available():
        print("This benchmark needs a CUDA device and torch sees none. Use --toy to try the benchmark itself on a CPU.")
        return 2
    workload = make_workload(options.toy, options.batch_size)
    if options.warm_up:
        options.repeats = 1
        workload = replace(workload, segment_seconds=0.0, min_steps=2, max_steps=2)
    parts = make_parts(workload, options.repeats, toy=options.toy)
    wanted = [part for part in parts if is_wanted(part.title, options.only)]
    if not wanted:
        titles = "; ".join(part.title for part in parts)
        print(f"--only {shlex.join(options.only)}: no title has a word that begins so. The titles: {titles}.")
        return 2
    if options.toy:
        torch.set_num_threads(1)
    gc.freeze()  # each segment collects garbage first, which need not look at all that was imported
    budget = Budget(60 * options.minutes, time.monotonic)
    header = make_header(options, workload, given)
    stem = free_stem(options.out, f"bench_gpu_{'toy_' if options.toy else ''}{header.date}")
    status = run(wanted, header, stem, budget)
    print(f"{status}: {stem}.md and .json")
    return 128 + signal.SIGTERM if status == CUT_SHORT else 0


if __name__ == "__main__":
    sys.exit(main())
