"""Strategy x precision x clipping x accumulation against one process, with overflows on one rank in every run.

D02, D03, D04, D05, D14, D16, D17, D19, D20, D21: what goes wrong there with stock parts would show in these cells.
"""

import re
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
from strategy_runs import (
    CELLS,
    CLIPPING,
    GRADIENT_WINDOW,
    LOSS_WINDOW,
    NUM_WINDOWS,
    STRATEGIES,
    Cell,
    Net,
    Run,
    batches,
    distributed,
    single,
)
from strategy_table import page
from torch import nn

# torch warns of in-place operations on a sharded layer's output; there are none here.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")

PAGE = Path(__file__).resolve().parents[1] / "docs" / "strategies.md"

# (strategy, precision), as patterns -> what is refused, and what to do instead.
REFUSALS = {
    ("FSDP1", "remainder"): r"storage='remainder'\) cannot be used with .* Leave storage out",
    ("fp16 reduction", "bf16"): r"reduced in fp16, and nothing scales the loss .* or reduce in bf16",
}

# One cell with fp16 autocast, one with bf16 or masters; together every precision, clipping and accumulation.
SPANNING = {
    strategy: [
        Cell("16-mixed", list(CLIPPING)[index % 3], (1, 3)[index % 2]),
        Cell(["bf16-mixed", "16-true", "bf16-true"][index % 3], list(CLIPPING)[(index + 1) % 3], (3, 1)[index % 2]),
    ]
    for index, strategy in enumerate(STRATEGIES)
}


def tolerance(strategy: str, precision: str) -> float:
    """Twice the distance between 1 and the next number, in the coarsest format that is used."""
    reduced = "bf16" in strategy and "true" not in precision  # 16-bit gradients are reduced as they are
    return 2 * torch.finfo(torch.bfloat16 if reduced or "bf16" in precision else torch.float16).eps


def refusal(strategy: str, precision: str) -> str | None:
    return next((text for (a, b), text in REFUSALS.items() if a in strategy and b in precision), None)


def check(strategy: str, cell: Cell, runs: list[Run | str]) -> str:
    """Returns what the table says of the cell."""
    expected_refusal = refusal(strategy, cell.precision)
    first = runs[0]
    if isinstance(first, str):
        assert set(runs) == {first}
        assert expected_refusal is not None, f"{strategy}, {cell}: {first}"
        assert re.search(expected_refusal, first)
        # The class for tests stands for the one that users have.
        return first.replace("CpuFsdp", "FSDPStrategy")
    assert expected_refusal is None
    check_run(runs, single(cell), tolerance(strategy, cell.precision), STRATEGIES[strategy].data_ranks)
    return "equal"


def check_run(runs: list[Run], expected: Run, tolerance: float, data_ranks: int) -> None:
    first = runs[0]
    healthy = [step for step in range(NUM_WINDOWS) if step not in (LOSS_WINDOW, GRADIENT_WINDOW)]
    for run in runs:
        assert [step for step, stepped in enumerate(run.stepped) if stepped] == healthy
        assert run.scales == expected.scales
        assert [run.norms[step] for step in healthy] == [first.norms[step] for step in healthy]
        assert all(torch.equal(a, b) for a, b in zip(run.weights, first.weights, strict=True))
    different = runs[:: len(runs) // data_ranks]
    for step, loss in enumerate(expected.losses):
        samples = sum(run.samples[step] for run in different)
        mean = sum(run.losses[step] * run.samples[step] for run in different) / samples
        assert samples == expected.samples[step]
        assert mean == pytest.approx(loss, rel=tolerance)
    for step in healthy:
        assert first.norms[step] == pytest.approx(expected.norms[step], rel=tolerance)
    for ours, theirs in zip(first.weights, expected.weights, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


@cache
def results(strategy: str) -> dict[tuple[str, Cell], str]:
    return {(strategy, cell): check(strategy, cell, runs) for cell, runs in distributed(strategy, CELLS)}


def plain(cell: Cell) -> Run:
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
            (loss * len(batch[0]) / total).backward()
        skipped = window in (LOSS_WINDOW, GRADIENT_WINDOW)
        module.run.stepped.append(not skipped)
        module.run.norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), torch.inf)))
        if skipped:
            continue
        limits = CLIPPING[cell.clipping]
        if limits.get("gradient_clip_algorithm") == "value":
            nn.utils.clip_grad_value_(module.parameters(), limits["gradient_clip_val"])
        elif limits:
            nn.utils.clip_grad_norm_(module.parameters(), limits["gradient_clip_val"])
        optimizer.step()
    module.run.weights = [p.detach() for p in module.parameters()]
    return module.run


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(map(str, cell)))
def test_one_process_equals_a_plain_loop_in_fp32(cell: Cell) -> None:
    run, expected = single(cell), plain(cell)
    expected.scales = [1024.0, 1024.0, 512.0, 512.0, 1024.0, 512.0] if cell.precision.startswith("16") else [1.0] * 6
    check_run([run], expected, 2 * tolerance("", cell.precision), 1)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_some_cells_of_every_strategy(strategy: str) -> None:
    for cell, runs in distributed(strategy, SPANNING[strategy]):
        check(strategy, cell, runs)


def test_these_cells_span_the_matrix() -> None:
    cells = [cell for chosen in SPANNING.values() for cell in chosen]
    assert {(cell.clipping, cell.accumulation) for cell in cells} == set(product(CLIPPING, (1, 3)))
    assert {cell.precision for cell in cells} == {"16-mixed", "bf16-mixed", "16-true", "bf16-true"}
    assert any(refusal(strategy, cell.precision) for strategy, chosen in SPANNING.items() for cell in chosen)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_cell(strategy: str) -> None:
    assert len(results(strategy)) == len(CELLS)


def whole_page() -> str:
    cells = {key: text for strategy in STRATEGIES for key, text in results(strategy).items()}
    return page(cells, {(strategy, cell.precision): tolerance(strategy, cell.precision) for strategy, cell in cells})


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_page_says_what_the_runs_gave() -> None:
    assert PAGE.read_text() == whole_page(), "write it anew: python tests/test_strategy_matrix.py"


if __name__ == "__main__":
    PAGE.write_text(whole_page())
