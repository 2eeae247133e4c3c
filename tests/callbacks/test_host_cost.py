"""What the pack costs the host: Python calls per micro-batch beside stock Lightning, counted and not timed."""

import sys
from pathlib import Path
from typing import Any

import pytest
from all_callbacks import all_callbacks
from call_counter import CountCalls, Layers, calls, counted
from lightning.pytorch.plugins.precision import MixedPrecision
from small_models import fit, token_batches

from lightning_mp import AutocastPrecision

STOCK = MixedPrecision("bf16-mixed", "cpu")

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:ChinchillaBudget. max_steps=.* ends before the budget", "ignore:ChinchillaBudget. the run ended after"
    ),
    pytest.mark.filterwarnings("ignore:TokenLearningRate. the horizon is"),
]


@pytest.mark.parametrize("micro_batches", [5, pytest.param(100, marks=pytest.mark.full)])
def test_the_plugin_costs_a_tenth_of_stock_and_all_callbacks_six_tenths(tmp_path: Path, micro_batches: int) -> None:
    """Between logging steps; on one at most three times as much. Among 100 is a step that is observed for underflow."""
    stock = calls(tmp_path, micro_batches, STOCK)
    plugin = calls(tmp_path, micro_batches, AutocastPrecision("bf16-mixed"))
    every = calls(tmp_path, micro_batches, AutocastPrecision("bf16-mixed"), all_callbacks().values())
    observed = " and an observed step" if micro_batches == 100 else ""
    print(f"\nPython calls over {micro_batches} micro-batches{observed}: {plugin / stock:.2f}; {every / stock:.2f}")
    assert plugin <= 1.10 * stock
    assert every <= 1.60 * stock
    on_a_logging_step = calls(
        tmp_path, micro_batches, AutocastPrecision("bf16-mixed"), all_callbacks().values(), log_every_n_steps=1
    )
    assert on_a_logging_step <= 3 * stock


class CountCallsAfterBackward(CountCalls):
    """Only those between the end of a backward and that of its batch, where the step is."""

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self.at_start_of(trainer.global_step)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Counts nothing here."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.last - 1:
            sys.setprofile(None)


def test_a_step_costs_the_host_a_hundred_calls_more_than_stock_and_none_per_weight() -> None:
    """Ours checks and clips in this time; stock, which refuses to clip with a fused optimizer, does neither."""

    def after_backward(plugin: Any, layers: int, **clipping: float) -> int:
        with counted(CountCallsAfterBackward(1)) as counter:
            fit(Layers(layers), token_batches([6] * 8), counter, plugin=plugin, **clipping)
        return counter.calls

    small, large = [
        (after_backward(AutocastPrecision("bf16-mixed"), n, gradient_clip_val=1.0), after_backward(STOCK, n))
        for n in (1, 3)
    ]
    print(f"\nCalls between backward and the end of the batch: {small}, with three times the layers {large}")
    assert small[0] <= small[1] + 100
    assert large[0] - small[0] <= large[1] - small[1]
