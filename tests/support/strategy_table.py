"""docs/strategies.md, written from what the runs of every cell gave."""

import math
from collections.abc import Iterator, Mapping, Sequence

from strategy_rows import FAMILIES
from strategy_runs import ACCUMULATION, CLIPPING, GRADIENT_WINDOW, LOSS_WINDOW, NUM_WINDOWS, PRECISIONS, Cell

__all__ = ["EQUAL", "page"]

EQUAL = "equal"

_TEXT = f"""# Precision plugins on strategies

Which precision plugin works on which strategy, and how close its runs are to a run on one process. Written by
`PYTHONPATH=tests/support python tests/strategies/test_strategy_matrix.py`; `make test-full` compares it with new runs.

## How to read the tables

Each field stands for {len(CLIPPING)} training runs of {NUM_WINDOWS} optimizer steps on 2 or 4 processes (CPU, gloo):
without clipping, clipped by norm, clipped by value; in turn with
{" and with ".join(map(str, ACCUMULATION))} micro-batches per step.

A **number** is the relative tolerance within which these runs equal one process that sees all data with the same
plugin: the loss of every micro-batch, the norm of every true gradient before clipping, and the final weights
(relative to how far training has moved them). Exactly equal on all ranks, to the bit, are norms, decisions, loss
scales and final weights. Two overflows are planted on the last rank, an infinite loss in step {LOSS_WINDOW + 1} and
an infinite element of its own shard of a gradient in step {GRADIENT_WINDOW + 1}: all ranks skip these two steps
together, and no other.

A number in **brackets** is a refusal: before anything is computed the run raises that message [below](#refusals).

| coarsest format | tolerance | which is |
|---|---|---|
| fp16 | 2^-9 | twice the distance from 1 to the next number |
| bf16 | 2^-6 | twice the distance from 1 to the next number |
| fp8 (e4m3) | 2^-4 | half that distance: each sum has many such roundings, which cancel in part |

FSDP1 has twice as much under autocast, because it rounds more. 16-bit weights ("16-true", "bf16-true") may also
differ by half the distance, times their size. A run without its clipping, with the other clipping, or with
micro-batches of different sizes weighted equally is outside of these tolerances, which is tested too. The one process
is tested against a plain fp32 PyTorch loop, within four times the tolerance.

## What runs

| name | plugin |
|---|---|
| 16-mixed, bf16-mixed | `AutocastPrecision` |
| 16-true, bf16-true | `MasterWeightsPrecision`, with fp32 masters |
| bf16-true, remainder | `MasterWeightsPrecision("bf16-true", storage="remainder")` |
| fp8-mixed | `Float8Precision(emulate=True, skip_first_and_last=False)`: rounded to fp8, multiplied in fp32 |
| TF32 | `TF32Precision`, which a CPU does not have |

With 1 micro-batch the optimizer is SGD with momentum, unfused, and all ranks have equally many samples. With 3
(`AccumulationScheduler`) it is a fused AdamW, micro-batches differ in size, and ranks in their number of samples.
"""

_ABOUT = {
    "`DDPStrategy`": """\
The last two are `ReducedPrecisionDDPStrategy` by its names `mp_ddp_bf16_reduce` and `mp_ddp_fp16_reduce`; 16-bit
gradients, as masters have them, are reduced as they are. With a static graph, windows of several micro-batches work
from the second step on.""",
    "`FSDPStrategy`": """\
Through a subclass for tests that tells torch to use the CPU. Under autocast FSDP1 does two things differently: it casts
floating-point batches to 16 bit, targets too, and gathers all parameters in 16 bit. With a `policy` that names modules
it does neither.""",
    "`ModelParallelStrategy`": """\
The model shards and splits itself in `configure_model`.""",
    "`FSDP2Strategy`": """\
The model knows nothing of it: `FSDP2Strategy(shard=nn.Linear)`, with `replicate_size=2`, and with
`tensor_parallel_size=2` and `tensor_parallel_plan={"up": "column", "down": "row"}`.""",
    "`PipelineParallelStrategy`": """\
Experimental. Two stages, split in the middle of the residual block; up to 4 microbatches per batch, of different sizes
where 4 does not divide it.""",
}

_NOT_VERIFIED = """
## What is not verified

Nothing on this page ran on a GPU or over NCCL, on more than 4 processes, or on more than one machine.
"""


def page(results: Mapping[tuple[str, Cell], str], tolerances: Mapping[tuple[str, str], float]) -> str:
    """The whole page.

    Args:
        results: "equal", or the message of the refusal.
        tolerances: of each strategy and precision.
    """
    messages = list(dict.fromkeys(text for text in results.values() if text != EQUAL))
    equal = sum(text == EQUAL for text in results.values())
    lines = [_TEXT, "## The tables", "", f"{len(results)} runs: {equal} are equal, {len(results) - equal} are refused."]
    for family, layouts in FAMILIES.items():
        lines += ["", f"### {family}", "", _ABOUT[family], "", *_header()]
        for strategy, layout in layouts.items():
            fields = []
            for precision in PRECISIONS:
                found = {
                    cell: text
                    for (name, cell), text in results.items()
                    if (name, cell.precision) == (strategy, precision)
                }
                fields.append(_field(found, messages, tolerances[strategy, precision]))
            lines.append(f"| {strategy} | {layout.ranks} | {' | '.join(fields)} |")
    lines += ["", "## Refusals", ""]
    lines += [f"{number}. {message}" for number, message in enumerate(messages, start=1)]
    return "\n".join(lines) + "\n" + _NOT_VERIFIED


def _header() -> Iterator[str]:
    yield f"| strategy | processes | {' | '.join(PRECISIONS)} |"
    yield "|" + "---|" * (2 + len(PRECISIONS))


def _field(found: Mapping[Cell, str], messages: Sequence[str], tolerance: float) -> str:
    """The tolerance, the number of a refusal, or both with the cells that each is about."""
    parts = []
    for text in dict.fromkeys(found.values()):
        cells = [cell for cell, other in found.items() if other == text]
        shown = f"2^{math.log2(tolerance):.0f}" if text == EQUAL else f"[{messages.index(text) + 1}]"
        parts.append(shown if len(cells) == len(found) else f"{_which(cells, found)}: {shown}")
    return "; ".join(parts)


def _which(cells: Sequence[Cell], found: Mapping[Cell, str]) -> str:
    """What these cells have in common, if it is the number of micro-batches or the clipping; else each of them."""
    for number in ACCUMULATION:
        if set(cells) == {cell for cell in found if cell.accumulation == number}:
            return _micro_batches(number)
    for clipping in CLIPPING:
        if set(cells) == {cell for cell in found if cell.clipping == clipping}:
            return _clipped(clipping)
    return ", ".join(f"{_clipped(cell.clipping)} with {_micro_batches(cell.accumulation)}" for cell in cells)


def _micro_batches(number: int) -> str:
    return f"{number} micro-batch{'es' * (number > 1)}"


def _clipped(clipping: str) -> str:
    return "no clipping" if clipping == "none" else f"clipped by {clipping}"
