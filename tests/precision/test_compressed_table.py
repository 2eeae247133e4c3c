"""The table of lent weights with storage="remainder": to the bit a loop by hand; each weight is split once a step."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import master_loops
import pytest
import test_lent_weights as lent
from split_reference import away
from test_lent_weights import (  # noqa: F401  # collected here, too
    test_a_gan_whose_critic_is_clamped_in_its_step,
    test_a_validation_changes_nothing,
    test_a_weight_that_its_own_forward_writes_to_is_kept_in_fp32,
    test_a_write_between_steps_counts,
    test_after_a_fit_nothing_is_left,
    test_an_exception_in_a_forward_leaves_the_parameters,
    test_any_optimizer_steps_fp32_weights_with_fp32_gradients,
    test_averages_are_of_fp32_weights,
    test_blocks_change_no_bit,
    test_functional_calls_are_cast_by_autocast,
    test_hooks_of_parameters_run_and_count,
    test_manual_optimization,
    test_modules_hold_and_use_weights_in_any_way,
    test_monitors_change_nothing,
    test_optimizers_that_evaluate_the_loss,
    test_recomputed_modules_find_the_copies_of_their_forward,
    test_steps_use_weights_and_modules_in_any_way,
    test_target_networks_follow,
    test_weights_loaded_in_16_bit_are_widened_and_it_is_said,
)
from torch import nn

from lightning_mp.precision.masters.split_parameters import SPLIT_CLASSES, SplitMemory

pytestmark = pytest.mark.full


@contextmanager
def counted_splits() -> Iterator[Counter[int]]:
    """How often each parameter with a gradient, by its id, is split."""
    splits: Counter[int] = Counter()
    own = SplitMemory.compress

    def compress(self: SplitMemory, loans: Any, step: int) -> None:
        before = [loan.parameter for loan in self.loans if type(loan.parameter) not in SPLIT_CLASSES]
        own(self, loans, step)
        splits.update(id(p) for p in before if type(p) in SPLIT_CLASSES and p.grad is not None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SplitMemory, "compress", compress)
        yield splits


@pytest.fixture(autouse=True)
def _compressed(monkeypatch: pytest.MonkeyPatch) -> None:
    def cast(self: master_loops.LoopByHand) -> None:
        self.leaves = {p: nn.Parameter(away(p)) for _, _, p in self.places}

    monkeypatch.setattr(master_loops.LoopByHand, "cast", cast)
    monkeypatch.setattr(lent, "master_weights", partial(master_loops.master_weights, storage="remainder"))
    monkeypatch.setattr(lent, "counted_casts", counted_splits)
