"""docs/strategies.md, written from what the runs of every cell gave."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence

from strategy_rows import FAMILIES
from strategy_runs import ACCUMULATION, CLIPPING, GRADIENT_WINDOW, LOSS_WINDOW, NUM_WINDOWS, PRECISIONS, Cell

EQUAL = "equal"

_TEXT = f"""# Precision plugins on strategies

Which precision plugins run on which strategies, and how close they are to one process. Written by
`PYTHONPATH=tests/support python tests/strategies/test_strategy_matrix.py`; `make test-full` compares it with new runs.

## How to read the tables

Each strategy and precision is trained for {NUM_WINDOWS} optimizer steps on 2 or 4 processes (CPU, gloo). On 2 processes
{len(CLIPPING)} times: without clipping, clipped by norm, clipped by value; in turn with
{" and with ".join(map(str, ACCUMULATION))} micro-batches per step. On 4 processes once, in turn with each of these.

**Tolerance** is relative to one process that sees all data with the same plugin, and applies to the loss of every
micro-batch, the norm of every true gradient before clipping, and the final weights (relative to how far training has
moved them). Norms, decisions, loss scales and final weights are equal on all ranks, to the bit. Two overflows are
planted on the last rank, an infinite loss in step {LOSS_WINDOW + 1} and an infinite element of its own shard of a
gradient in step {GRADIENT_WINDOW + 1}: all ranks skip these two steps together, and no other.

**Refused** combinations raise the message with that [number](#refusals) before anything is computed.

| coarsest format | usual tolerance | which is |
|---|---|---|
| fp16 | 2^-9 | twice the distance from 1 to the next number |
| bf16 | 2^-6 | twice the distance from 1 to the next number |
| fp8 (e4m3) | 2^-4 | half that distance: each sum has many such roundings, which cancel in part |

FSDP1 rounds more under autocast: twice as much. Under masters ("16-true", "bf16-true") weights may also differ by half
the distance, times their size. A run without clipping, with the other clipping, or with micro-batches weighted equally
is outside these tolerances, as tests show. The one process is within four times the tolerance of a plain fp32 loop.

## What runs

| name | plugin |
|---|---|
| 16-mixed, bf16-mixed | `AutocastPrecision` |
| 16-true, bf16-true | `MasterWeightsPrecision`, with fp32 masters |
| bf16-true, remainder | `MasterWeightsPrecision("bf16-true", storage="remainder")` |
| bf16-true, 24bit | `MasterWeightsPrecision("bf16-true", storage="24bit")` |
| fp8-mixed | `Float8Precision("rowwise", emulate=True, skip_small=False, skip_first_and_last=False)` |
| TF32 | `TF32Precision`, which a CPU does not have |

With 1 micro-batch the optimizer is unfused SGD with momentum, and ranks have equal numbers of samples. With 3
(`AccumulationScheduler`) it is a fused AdamW, and micro-batches and ranks differ in their numbers of samples.
"""

_ABOUT = {
    "`DDPStrategy`": """\
The last two are `ReducedPrecisionDDPStrategy` by its names `mp_ddp_bf16_reduce` and `mp_ddp_fp16_reduce`; 16-bit
gradients, as masters have them, are reduced as they are, and the fp32 ones of norms in that format. With a static
graph, the first micro-batch of a run reduces its gradient even if its window stays open.""",
    "`FSDPStrategy`": """\
Run through a subclass that tells torch to use the CPU. Under autocast FSDP1 also casts floating-point batches to 16
bit, targets too, and gathers all parameters in 16 bit; with a `policy` that names modules it does neither.""",
    "`ModelParallelStrategy`": """\
The model shards and splits itself in `configure_model`.""",
    "`FSDP2Strategy`": """\
The model is unchanged: `FSDP2Strategy(shard=nn.Linear)`, with `replicate_size=2`, and with
`tensor_parallel_size=2` and `tensor_parallel_plan={"up": "column", "down": "row"}`.""",
    "`PipelineParallelStrategy`": """\
Experimental. Two stages, split in the residual block; up to 4 microbatches per batch, of different sizes where 4 does
not divide it.""",
}

_NOT_VERIFIED = """
## What is not verified

More than one GPU, more than 4 processes, more than one machine. On one H200, DDP, FSDP1, `FSDP2Strategy`,
`ModelParallelStrategy` and `reduced_precision_hook` trained with one rank over NCCL.
"""


def page(results: Mapping[tuple[str, Cell], str], tolerances: Mapping[tuple[str, str], float]) -> str:
    """The whole page.

    Args:
        results: "equal", or the message of the refusal.
        tolerances: of each strategy and precision.
    """
    messages = list(dict.fromkeys(_shortened(text) for text in results.values() if text != EQUAL))
    equal = sum(text == EQUAL for text in results.values())
    lines = [_TEXT, "## The tables", "", f"{len(results)} runs: {equal} are equal, {len(results) - equal} are refused."]
    for family, layouts in FAMILIES.items():
        lines += ["", f"### {family}", "", _ABOUT[family], "", *_HEADER]
        for strategy, layout in layouts.items():
            refused: dict[str, list[str]] = {}
            wider = []
            for precision in PRECISIONS:
                found = {
                    cell: text
                    for (name, cell), text in results.items()
                    if (name, cell.precision) == (strategy, precision)
                }
                for where in _refused(found, messages):
                    refused.setdefault(where, []).append(precision)
                tolerance = tolerances[strategy, precision]
                if EQUAL in found.values() and tolerance != _usual_tolerance(precision):
                    wider.append(f"{precision} 2^{math.log2(tolerance):.0f}")
            cells = [", ".join(wider) or "usual", "; ".join(map(_listed, refused.values(), refused))]
            lines.append(f"| {strategy} | {layout.ranks} | {' | '.join(cells)} |")
    lines += ["", "## Refusals", ""]
    lines += [f"{number}. {message}" for number, message in enumerate(messages, start=1)]
    return "\n".join(lines) + "\n" + _NOT_VERIFIED


_HEADER = ("| strategy | processes | tolerance | refused |", "|---|---|---|---|")


def _usual_tolerance(precision: str) -> float:
    """Of the table at the top of the page."""
    return 2.0 ** (-4 if precision.startswith("fp8") else -6 if "bf16" in precision else -9)


def _shortened(message: str) -> str:
    """Messages that differ only in the plugin's name are listed once."""
    return re.sub(r"\(\w+ has no scaler\)", "(... has no scaler)", message)


def _refused(found: Mapping[Cell, str], messages: Sequence[str]) -> Iterator[str]:
    """The number of each refusal, after the cells that it is about where others are equal."""
    for text in dict.fromkeys(found.values()):
        cells = [cell for cell, other in found.items() if other == text]
        if text != EQUAL:
            where = "" if len(cells) == len(found) else f"with {_which(cells, found)} "
            yield f"{where}[{messages.index(_shortened(text)) + 1}]"


def _listed(precisions: Sequence[str], where: str) -> str:
    return f"{'all but TF32' if len(precisions) == len(PRECISIONS) - 1 else ', '.join(precisions)} {where}"


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
