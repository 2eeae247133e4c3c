"""What the notebooks share; their own cells check what it counts in whole runs."""

import torch
from small_models import Regression
from torch import nn

from lightning_mp import AccumulationScheduler, AutocastPrecision
from lightning_mp.demo.notebook import Table, saved_bytes, smooth, train


def test_a_table_is_shown_as_markdown():
    assert Table(["a", "b"], [[1, "x"]])._repr_markdown_() == "| a | b |\n| --- | --- |\n| 1 | x |"


def test_a_smoothed_curve_has_the_mean_of_each_window():
    assert smooth(torch.tensor([0.0, 2.0, 4.0, 9.0]), 2).tolist() == [1.0, 3.0, 6.5]


def test_saved_bytes_are_those_that_backward_needs_without_weights():
    linear, x = nn.Linear(4, 8), torch.zeros(16, 4, requires_grad=True)
    assert saved_bytes(linear, lambda: linear(x)) == x.nbytes
    assert saved_bytes(linear, lambda: linear(x).sigmoid()) == x.nbytes + 16 * 8 * 4  # and its own output


def test_a_run_records_losses_outcomes_and_times():
    data = [(torch.randn(4, 8), torch.randn(4, 1)) for _ in range(6)]
    run = train(Regression(), data, AccumulationScheduler({0: 2}), plugins=[AutocastPrecision("bf16-mixed")])
    assert run.losses.shape == (6,)
    assert run.skipped == [False] * 3
    assert run.loss_scales == [1.0] * 3
    assert run.seconds_per_step > 0
    assert run.trainer.global_step == 3
