"""Strategy x precision x clipping x accumulation against one process, with overflows on one rank in every run.

Of the runs that are made, every other one is trained: clipping sees the gradient of a whole window, after the last of
its micro-batches, so how many there were cannot matter to it under one strategy and precision only. Any three of the
four still occur together, and all four in every family of strategies. Layouts of 4 processes combine what layouts
of 2 do, and train each precision once, each with another clipping and number of micro-batches. What is refused is
refused in every cell.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest
import torch
from strategy_rows import FAMILIES, STRATEGIES, distributed
from strategy_runs import (
    ACCUMULATION,
    CELLS,
    CLIPPING,
    GRADIENT_WINDOW,
    LOSS_WINDOW,
    NUM_WINDOWS,
    ONE_PROCESS,
    PRECISIONS,
    Cell,
    Layout,
    Net,
    Run,
    batches,
    single,
)
from torch import Tensor, nn

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


# torch warns of in-place operations on a sharded layer's output; there are none here.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "strategies.md"

HEALTHY = [step for step in range(NUM_WINDOWS) if step not in (LOSS_WINDOW, GRADIENT_WINDOW)]

# "strategy; precision; micro-batches", as a pattern -> what is refused, and what to do instead.
REFUSALS = {
    r"; TF32;": r"TF32Precision cannot run on this device: .* Use Trainer\(precision='32-true'\)",
    r"^FSDP1.*; .*(remainder|24bit);": r"storage='(remainder|24bit)'\) cannot be used with .* Leave storage out",
    r"fp16 reduction; (bf16|fp8)": r"reduced in fp16, and nothing scales the loss .* or reduce in bf16",
}


def refusal(strategy: str, cell: Cell) -> str | None:
    key = f"{strategy}; {cell.precision}; {cell.accumulation}"
    return next((text for pattern, text in REFUSALS.items() if re.search(pattern, key)), None)


TRAINED = [cell for cell in CELLS if refusal("", cell) is None]


@cache
def chosen(strategy: str) -> list[Cell]:
    """Half of those that train, in turn, and all that are refused; all where one number of micro-batches is refused.

    On 4 processes one for each precision, and each clipping with each number of micro-batches.
    """
    trained = [cell for cell in CELLS if refusal(strategy, cell) is None]
    if {cell.accumulation for cell in trained} == set(ACCUMULATION):
        precisions = dict.fromkeys(cell.precision for cell in trained)
        alike = [name for name, layout in STRATEGIES.items() if layout.ranks == STRATEGIES[strategy].ranks]
        places = [list(axis) for axis in (alike, precisions, CLIPPING, ACCUMULATION)]
        at = {cell: list(map(list.index, places, (strategy, *cell))) for cell in trained}
        trained = [cell for cell in trained if sum(at[cell]) % 2 == 0]
        if STRATEGIES[strategy].ranks == 4:
            trained = [cell for cell in trained if at[cell][2] == (at[cell][0] + at[cell][1]) % len(CLIPPING)]
    return [cell for cell in CELLS if cell in trained or refusal(strategy, cell) is not None]


def tolerance(strategy: str, precision: str) -> float:
    """Twice the distance between 1 and the next number, in the coarsest 16-bit format; half of it in fp8.

    FSDP1 rounds batches and parameters that autocast does not, so it has twice as much.
    """
    if precision.startswith("fp8"):
        return torch.finfo(torch.float8_e4m3fn).eps / 2
    reduced = "bf16" in strategy  # with masters those of norms only, which are fp32
    eps = torch.finfo(torch.bfloat16 if reduced or "bf16" in precision else torch.float16).eps
    return (4 if strategy.startswith("FSDP1") and "mixed" in precision else 2) * eps


def storage_rounding(precision: str) -> float:
    """Relative rounding of weights that are 16 bit."""
    return tolerance("", precision) / 4 if "true" in precision else 0.0


def check(strategy: str, cell: Cell, runs: list[Run | str]) -> str:
    """Returns what the table says of the cell."""
    expected_refusal = refusal(strategy, cell)
    if expected_refusal is not None:
        messages = {run if isinstance(run, str) else "was not refused" for run in runs}
        assert len(messages) == 1, messages
        assert re.search(expected_refusal, *messages)
        # The class for tests stands for the one that users have.
        return messages.pop().replace("CpuFsdp", "FSDPStrategy")
    trained = [run for run in runs if isinstance(run, Run)]
    assert trained == runs, runs
    check_run(trained, single(cell), tolerance(strategy, cell.precision), cell, STRATEGIES[strategy])
    return EQUAL


def check_run(runs: list[Run], expected: Run, tolerance: float, cell: Cell, layout: Layout = ONE_PROCESS) -> None:
    first = runs[0]
    for run in runs:
        assert [step for step, stepped in enumerate(run.stepped) if stepped] == HEALTHY
        assert len(run.stepped) == NUM_WINDOWS
        assert run.scales == expected.scales
        assert [run.norms[step] for step in HEALTHY] == [first.norms[step] for step in HEALTHY]
        assert not any(math.isfinite(run.norms[step]) for step in (LOSS_WINDOW, GRADIENT_WINDOW))
        assert all(torch.equal(a, b) for a, b in zip(run.weights, first.weights, strict=True))
    samples, losses = whole_losses(runs, layout)
    assert samples == expected.samples
    assert losses == pytest.approx(expected.losses, rel=tolerance)
    assert [first.norms[step] for step in HEALTHY] == pytest.approx(
        [expected.norms[step] for step in HEALTHY], rel=tolerance
    )
    check_weights(first.weights, expected.weights, tolerance, storage_rounding(cell.precision))


def whole_losses(runs: list[Run], layout: Layout) -> tuple[list[int], list[float]]:
    """Of every micro-batch over all ranks; those that see the same data, and have a loss, have the same."""
    by_data = {layout.data_rank(rank): run for rank, run in enumerate(runs) if run.losses}
    assert len(by_data) == layout.data_ranks
    for rank, run in enumerate(runs):
        if run.losses:
            assert (run.losses, run.samples) == (by_data[layout.data_rank(rank)].losses, run.samples)
    samples = [sum(counts) for counts in zip(*(run.samples for run in by_data.values()), strict=True)]
    sums = zip(*(map(float.__mul__, run.losses, map(float, run.samples)) for run in by_data.values()), strict=True)
    return samples, [sum(of_ranks) / count for of_ranks, count in zip(sums, samples, strict=True)]


def check_weights(ours: list[Tensor], theirs: list[Tensor], tolerance: float, rounding: float) -> None:
    """Root mean squares: of the error against how far training has moved the weights."""
    initial = list(Net(1, plants=False).parameters())
    moved = [after - before.detach() for after, before in zip(theirs, initial, strict=True)]
    on_average = rms(torch.cat([tensor.flatten() for tensor in moved]))
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        allowed = tolerance * max(rms(moved[number]), on_average) + rounding * rms(b)
        assert rms(a - b) <= allowed, f"tensor {number}: {rms(a - b):.3g} > {allowed:.3g}"


def rms(tensor: Tensor) -> float:
    return float(tensor.square().mean().sqrt())


@cache
def results(strategy: str) -> dict[tuple[str, Cell], str]:
    return {(strategy, cell): check(strategy, cell, runs) for cell, runs in distributed(strategy, chosen)}


def plain(cell: Cell, *, mean_of_means: bool = False) -> Run:
    """The same by hand, in fp32: no step in the two windows, the mean over the samples of the others."""
    module = Net(cell.accumulation, plants=False)
    optimizer = module.configure_optimizers()
    data = batches(cell.accumulation)
    for window in range(NUM_WINDOWS):
        optimizer.zero_grad()
        micro_batches = data[window * cell.accumulation : (window + 1) * cell.accumulation]
        total = sum(len(x) for x, _ in micro_batches)
        for batch in micro_batches:
            loss = module.training_step(batch, 0)
            (loss * (1 / len(micro_batches) if mean_of_means else len(batch[0]) / total)).backward()
        skipped = window in (LOSS_WINDOW, GRADIENT_WINDOW)
        norm = float(nn.utils.clip_grad_norm_(module.parameters(), torch.inf))
        module.run.stepped.append(not skipped)
        module.run.norms.append(math.inf if skipped else norm)
        if skipped:
            continue
        limits = CLIPPING[cell.clipping]
        if limits.get("gradient_clip_algorithm") == "value":
            nn.utils.clip_grad_value_(module.parameters(), limits["gradient_clip_val"])
        elif limits:
            nn.utils.clip_grad_norm_(module.parameters(), limits["gradient_clip_val"])
        optimizer.step()
    module.run.weights = [p.detach() for p in module.parameters()]
    module.run.scales = [1024.0, 1024.0, 512.0, 512.0, 1024.0, 512.0] if cell.precision.startswith("16") else [1.0] * 6
    return module.run


@pytest.mark.quick_cases(12)
@pytest.mark.parametrize("cell", TRAINED, ids=lambda cell: "-".join(map(str, cell)))
def test_one_process_equals_a_plain_loop_in_fp32(cell: Cell) -> None:
    check_run([single(cell)], plain(cell), 4 * tolerance("", cell.precision), cell)


@pytest.mark.quick_cases(12)
@pytest.mark.parametrize("cell", TRAINED, ids=lambda cell: "-".join(map(str, cell)))
def test_the_tolerance_tells_wrong_runs_apart(cell: Cell) -> None:
    """Without clipping, clipped in the other way, or with a mean of means, weights would be too far away."""
    wrong = [plain(cell._replace(clipping=other)) for other in CLIPPING if other != cell.clipping]
    if cell.accumulation > 1:
        wrong.append(plain(cell, mean_of_means=True))
    for run in wrong:
        with pytest.raises(AssertionError, match="tensor"):
            check_weights(
                single(cell).weights, run.weights, tolerance("", cell.precision), storage_rounding(cell.precision)
            )


def test_any_three_axes_are_crossed_in_full_and_all_four_in_every_family() -> None:
    families = {strategy: family for family, layouts in FAMILIES.items() for strategy in layouts}
    every, made = (
        {(families[strategy], strategy, *cell) for strategy in STRATEGIES for cell in of(strategy)}
        for of in (lambda strategy: CELLS, chosen)
    )
    refused = {row for row in every if refusal(row[1], Cell(*row[2:])) is not None}
    assert refused < made < every
    of_two = {row for row in every if STRATEGIES[row[1]].ranks == 2}
    for axes in [(0, 2, 3, 4), *combinations(range(1, 5), 3)]:
        crossed, all_of_them = (
            {tuple(row[axis] for axis in axes) for row in of & of_two - refused} for of in (made, every)
        )
        assert crossed == all_of_them
    for strategy in (name for name, layout in STRATEGIES.items() if layout.ranks == 4):
        trained = [cell for cell in chosen(strategy) if refusal(strategy, cell) is None]
        assert len({cell.precision for cell in trained}) == len(trained) >= 5
        assert len({cell[1:] for cell in trained}) == min(len(trained), len(CLIPPING) * len(ACCUMULATION))


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_cell(strategy: str) -> None:
    """D02, D03, D04, D05, D14, D16, D17, D19, D20, D21: what goes wrong with stock parts would show in these cells."""
    assert list(results(strategy)) == [(strategy, cell) for cell in chosen(strategy)]


def whole_page() -> str:
    cells = {key: text for strategy in STRATEGIES for key, text in results(strategy).items()}
    return page(cells, {(strategy, cell.precision): tolerance(strategy, cell.precision) for strategy, cell in cells})


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_page_says_what_the_runs_gave() -> None:
    assert PAGE.read_text() == whole_page(), (
        "write it anew: PYTHONPATH=tests/support python tests/strategies/test_strategy_matrix.py"
    )


if __name__ == "__main__":
    PAGE.write_text(whole_page())
