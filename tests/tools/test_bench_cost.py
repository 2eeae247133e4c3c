"""What `make bench` counts, where it is promised, and one toy run of the command.

What is counted for one of them is not counted again for another.
"""

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from bench_cost_counts import GROWTH, SETUPS, Setup, bytes_per_parameter, count_step, growth_of_host_calls  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:ChinchillaBudget. the data end before the budget",
        "ignore:ChinchillaBudget. max_steps=.* ends before the budget",
    ),
    pytest.mark.filterwarnings(
        "ignore:TokenLearningRate. the horizon is", "ignore:ChinchillaBudget. the run ended after"
    ),
]


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_a_step_costs_with_all_callbacks_what_it_costs_without(setup: Setup) -> None:
    """Promise 5, beside a loop written by hand: a fused step has one pass, however many micro-batches there are."""
    ours, every, plain = (count_step(setup, way) for way in ("ours", "ours, all callbacks", "plain"))
    assert every == ours
    assert ours is not None
    assert plain is not None
    assert ours.passes == (1 if setup.fused else 3)
    assert ours.casts == plain.casts
    assert ours.host_waits == (0 if setup.fused else 1)


@pytest.mark.full
def test_what_the_host_does_more_than_stock_does_not_grow_with_the_model() -> None:
    """Python calls per micro-batch, with 15 and 51 parameter tensors: not one more is ours."""
    small, large = growth_of_host_calls(2, GROWTH[:2])
    assert large.parameter_tensors > 3 * small.parameter_tensors
    for way in ("ours", "ours, all callbacks"):
        assert large.calls[way] - large.calls["stock"] == small.calls[way] - small.calls["stock"]


@pytest.mark.parametrize(
    ("name", "bytes_kept"),
    [
        ("stock, 32-true", 16),
        ("ours, bf16-mixed", 16),
        ("ours, bf16-true, fp32 masters", 16),
        ("ours, bf16-true, remainder", 14),
        ("stock, bf16-true (no masters)", 8),
    ],
)
def test_bytes_per_parameter(name: str, bytes_kept: int) -> None:
    """With AdamW; its step counters are the rest."""
    assert sum(bytes_per_parameter(name).values()) == pytest.approx(bytes_kept, abs=0.01)


@pytest.mark.full
def test_the_wire_carries_what_stock_puts_on_it_and_small_agreements() -> None:
    """Per window on 2 ranks: under DDP one, two with all callbacks on; under FSDP2 each unit is reduced once."""
    from bench_cost_ranks import WINDOW, count_wire

    wires = count_wire(2)
    stock, ours, every = (wires["DDP", way] for way in ("stock", "ours", "ours, 16-mixed, all callbacks"))
    more = [wire.collectives["all_reduce"] - stock.collectives["all_reduce"] for wire in (ours, every)]
    assert more == [1, 2]
    for wire in (ours, every):
        assert wire.collectives["broadcast"] == stock.collectives["broadcast"]
        assert wire.payload_bytes <= stock.payload_bytes + 128
    reductions = [wires["FSDP2", way].collectives["reduce_scatter"] for way in ("stock", "ours", "plain")]
    assert reductions == [WINDOW * 3, 5, 3]  # FSDP2Strategy makes five units of what are three by hand: norms are apart


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_command_writes_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import bench_cost

    monkeypatch.setattr(bench_cost.torch, "set_num_threads", lambda count: None)
    page = tmp_path / "deep" / "cost.md"
    assert bench_cost.main(["--toy", "--repeats", "1", "--segment-seconds", "0.02", "--out", str(page)]) == 0
    text = page.read_text()
    assert "**Toy size: times say nothing about any machine.**" in text
    assert [line for line in text.splitlines() if line.startswith("## ")] == [
        "## One optimizer step",
        "## Python calls per micro-batch",
        "## Bytes per parameter",
        "## Collectives per optimizer step",
        "## Time",
    ]
    assert "| stock | refused by Lightning |" in text
    assert "| toy | 16-mixed | ours, all callbacks | fused AdamW |" in text
    assert "Error" not in text


def test_arguments_that_measure_nothing_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    import bench_cost

    with pytest.raises(SystemExit):
        bench_cost.main(["--repeats", "0"])
    assert "--repeats must be at least 1 and --segment-seconds above 0" in capsys.readouterr().err
