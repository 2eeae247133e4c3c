"""How many micro-batches a window has: thresholds, target batches, ramps, and the number of steps that comes of it."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from small_models import Regression, fit, quiet_trainer, regression_batches
from torch.utils.data import DataLoader

from lightning_mp import AccumulationScheduler
from lightning_mp.callbacks.accumulation_scheduler import parse_schedule
from lightning_mp.training.accumulation.schedule import Progress, TargetBatch, Thresholds, estimate_steps

positions = st.integers(0, 10**13)


@given(st.dictionaries(positions, st.integers(1, 512), min_size=1), positions)
def test_the_largest_threshold_that_is_reached_counts(table: dict[int, int], position: int) -> None:
    reached = [threshold for threshold in table if threshold <= position]
    expected = table[max(reached)] if reached else 1
    for unit, progress in (("step", Progress(step=position)), ("token", Progress(tokens=position))):
        assert Thresholds(table, unit).micro_batches(progress) == expected  # type: ignore[arg-type]


def test_a_published_ramp_is_reproduced() -> None:
    """GPT-3 (Brown et al. 2020, section 2.3, 175B): 32k to 3.2M tokens, linearly over the first 4-12 billion tokens."""
    ramp = TargetBatch({0: 32_000, 8_000_000_000: 3_200_000}, "token", unit="token", ramp="linear")
    micro_batch = 16 * 2_048
    lengths = [
        ramp.micro_batches(Progress(tokens=tokens, micro_batch_tokens=micro_batch))
        for tokens in (0, 4_000_000_000, 8_000_000_000, 300_000_000_000)
    ]
    assert lengths == [1, round(1_616_000 / micro_batch), round(3_200_000 / micro_batch), 98]


@given(
    st.dictionaries(st.integers(1, 10**6), st.integers(1, 10**6), max_size=4),
    st.integers(1, 10**6),
    st.integers(0, 2 * 10**6),
    st.integers(1, 10**4),
)
def test_whole_micro_batches_come_as_near_to_the_target_as_they_can(
    later: dict[int, int], first: int, position: int, size: int
) -> None:
    for ramp in ("stepped", "linear"):
        schedule = TargetBatch({0: first, **later}, "sample", unit="step", ramp=ramp)  # type: ignore[arg-type]
        progress = Progress(step=position, micro_batch_samples=size)
        length, target = schedule.micro_batches(progress), schedule.target(progress)
        assert length >= 1
        assert abs(length * size - target) <= abs((length + 1) * size - target)
        assert length == 1 or abs(length * size - target) <= abs((length - 1) * size - target)
        assert min([first, *later.values()]) <= target <= max([first, *later.values()])


def test_a_linear_ramp_meets_its_targets_and_a_stepped_one_keeps_them() -> None:
    table = {0: 100, 10: 200, 30: 100}
    linear = [TargetBatch(table, "sample", ramp="linear").target(Progress(step=s)) for s in (0, 5, 10, 20, 30, 99)]
    stepped = [TargetBatch(table, "sample").target(Progress(step=s)) for s in (0, 9, 10, 29, 30, 99)]
    assert linear == [100, 150, 200, 150, 100, 100]
    assert stepped == [100, 100, 200, 200, 100, 100]


# -- what a user writes ------------------------------------------------------------------------------------------------


def test_quantities_are_read_as_people_and_yaml_write_them() -> None:
    assert parse_schedule({"0": "1", "1_000": 2, "1.5B": "4", "2e9": 8}) == {
        0: 1,
        1000: 2,
        1_500_000_000: 4,
        2 * 10**9: 8,
    }
    scheduler = AccumulationScheduler(target_tokens="500K")
    assert scheduler.windows.targets == {0: 500_000}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "needs one of schedule, target_samples and target_tokens, and got none"),
        ({"schedule": {0: 1}, "target_samples": 8}, "and got schedule, target_samples"),
        ({"schedule": {0: 1}, "ramp": "linear"}, "ramp='linear'. is for target_samples and target_tokens"),
        ({"target_samples": 8, "ramp": "cosine"}, "ramp='cosine'. is unknown; it must be one of"),
        ({"target_samples": {10: 8}}, "The first target batch is given from epoch 10 on, and nothing before it"),
        (
            {"target_tokens": 0},
            "a batch in samples or tokens an integer from 1",
        ),
        ({"target_tokens": "1.5"}, "the entry 0: '1.5' is not valid"),
        ({"target_tokens": "20 billions"}, "the entry 0: '20 billions' is not valid"),
        ({"schedule": {"1.5B": 2, 1_500_000_000: 3}}, "the threshold 1500000000 is given twice"),
        (
            {"schedule": {0: 1}, "unit": "tokens"},
            "unit='tokens'. is unknown; it must be one of .'epoch', 'step', 'sample'",
        ),
        ({"schedule": {0: 1}, "sync": "never"}, "sync='never'. is unknown; it must be one of .'window', 'micro_batch'"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AccumulationScheduler(**arguments)


# -- how many steps ----------------------------------------------------------------------------------------------------


class Asking(Regression):
    """Asks in ``configure_optimizers``, where a learning-rate schedule needs the number."""

    def __init__(self, scheduler: AccumulationScheduler) -> None:
        super().__init__()
        self.scheduler = scheduler

    def configure_optimizers(self) -> Any:
        self.estimate = self.scheduler.estimated_steps(self.trainer)
        return super().configure_optimizers()


@pytest.mark.parametrize(
    "arguments",
    [
        {"schedule": {0: 4}},
        {"schedule": {0: 1, 1: 4, 2: 3}},
        {"schedule": {0: 1, 5: 2, 9: 7}, "unit": "step"},
        {"schedule": {0: 1, 20: 2, 70: 5}, "unit": "sample"},
        {"target_samples": {0: 4, 90: 16}, "unit": "sample", "ramp": "linear"},
    ],
    ids=str,
)
@pytest.mark.parametrize("limits", [{"max_epochs": 3}, {"max_epochs": 3, "max_steps": 7}, {"max_steps": 20}], ids=str)
def test_the_estimate_is_the_number_of_steps_that_are_made(arguments: dict[str, Any], limits: dict[str, int]) -> None:
    """D34."""
    scheduler = AccumulationScheduler(**arguments)
    module = Asking(scheduler)
    samples = [sample for x, y in regression_batches(10) for sample in zip(x, y, strict=True)]
    data = DataLoader(samples, batch_size=4)  # type: ignore[arg-type]
    trainer = quiet_trainer(callbacks=[scheduler], **({"max_epochs": None} | limits))
    trainer.fit(module, data)
    assert trainer.global_step == module.estimate


def test_a_run_without_a_limit_has_no_estimate() -> None:
    assert estimate_steps(Thresholds({0: 2}), 10) == math.inf


def test_a_schedule_in_tokens_cannot_be_estimated() -> None:
    scheduler = AccumulationScheduler({0: 2}, unit="token")
    with pytest.raises(ValueError, match="a schedule in tokens does not determine the number of optimizer steps"):
        fit(Asking(scheduler), regression_batches(2), scheduler)


def test_an_estimate_in_samples_needs_a_batch_size() -> None:
    scheduler = AccumulationScheduler({0: 2}, unit="sample")
    with pytest.raises(MisconfigurationException, match="the data loader of type DataLoader has no batch_size"):
        fit(Asking(scheduler), regression_batches(2), scheduler)
