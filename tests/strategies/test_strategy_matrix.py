"""Strategy x precision x clipping x accumulation against one process, with overflows on one rank in every run.

Of the runs that are made, every other one is trained: clipping sees the gradient of a whole window, after the last of
its micro-batches, so how many there were cannot matter to it under one strategy and precision only. Any three of the
four still occur together, and all four in every family of strategies. Layouts of 4 processes combine what layouts
of 2 do, and train each precision once, each with another clipping and number of micro-batches. What is refused is
refused in every cell.
"""

import math
import re
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
    Cell,
    Layout,
    Net,
    Run,
    batches,
    single,
)
from strategy_table import EQUAL, page
from torch import Tensor, nn

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
