"""Runs of everything that are interrupted, resumed elsewhere and rescheduled, against a model of what must hold."""

import itertools
import random
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
from gloo import run_ranks
from soak_legs import Leg, Precision, run_leg
from soak_model import Run

#: Of the way that the weights went, by the dtype that products are rounded to.
TOLERANCE = {"16": 2e-3, "bf16": 2e-2}
LEGS_OF_A_RUN = 8
FEW_RUNS = 3

pytestmark = [pytest.mark.full, pytest.mark.timeout(0), pytest.mark.filterwarnings("ignore")]


class Soak:
    """A run, leg after leg, and the model beside it."""

    def __init__(self, seed: int, folder: Path, micro_batches: int = 12) -> None:
        self.choose, self.folder, self.micro_batches = random.Random(seed), folder, micro_batches
        self.precision: Precision = self.choose.choice(get_args(Precision))
        self.fused = self.choose.random() < 0.5
        self.model = Run.start(scaled=self.precision.startswith("16"))
        self.saved: Path | None = None
        self.legs = self.steps = 0

    def make_leg(self) -> Leg:
        """Any ranks, schedule, faults and end.

        Where weights are sharded, a window cannot be gone on with, and torch has no fused SGD.
        """
        choose = self.choose
        sharded = not self.model.is_inside and not self.fused and choose.random() < 0.25
        ends_by_crash = not sharded and choose.random() < 0.6
        saved_after = choose.randint(1, self.micro_batches)
        micro_batches = saved_after + choose.choice((0, 0, 1, 3))
        faults = {
            choose.randrange(micro_batches): choose.choice(("overflow", "overflow", "oom"))
            for _ in range(choose.randint(0, self.micro_batches // 4))
        }
        thresholds = [0, *(self.model.attempts + choose.randint(1, 6) for _ in range(choose.randint(0, 2)))]
        folder = self.folder / str(self.legs)
        folder.mkdir(parents=True)
        return Leg(
            ranks=2 if sharded else choose.randint(1, 3),
            strategy="fsdp2" if sharded else "ddp",
            precision=self.precision,
            fused=self.fused,
            schedule={step: choose.randint(1, 4) for step in thresholds},
            first_row=self.model.next_row,
            micro_batches=micro_batches,
            faults={at: fault for at, fault in faults.items() if fault != "oom" or not sharded},
            saved_after=saved_after if ends_by_crash else None,
            resume=self.saved,
            folder=folder,
        )

    def go_on(self) -> None:
        """One leg on all its ranks, and the same in the model."""
        leg = self.make_leg()
        found = run_ranks(partial(run_leg, leg=leg), leg.ranks)
        steps, micro_batches = self.model_of(leg)
        for rank in found:
            # A step that is skipped before the optimizer is called sets no rate; that of the next one is its own.
            expected = [pytest.approx(lr) if made else None for made, lr in steps]
            assert rank.rates[: len(steps)] == expected, leg
            assert leg.saved_after is not None or len(rank.rates) == len(steps), leg
            assert rank.state == self.expected_state(micro_batches), leg
            for ours, wanted in zip(rank.weights, self.model.weights, strict=True):
                allowed = TOLERANCE[self.precision.split("-")[0]] * self.model.way
                assert float((ours - wanted).norm()) <= allowed, leg  # nan is not
        self.saved = leg.folder / "saved.ckpt"
        self.legs += 1
        self.steps += len(found[0].rates)

    def expected_state(self, micro_batches: int) -> dict[str, float]:
        model = self.model
        return {
            "micro_batches": micro_batches,
            "global_step": model.attempts,
            "attempts": model.attempts,
            "skipped": model.skipped,
            "tokens": model.tokens,
            "skipped_tokens": model.skipped_tokens,
            "scale": model.scale,
        }

    def model_of(self, leg: Leg) -> tuple[list[Any], int]:
        """The model goes as far as the leg's checkpoint: its steps until there, and its micro-batches."""
        steps: list[Any] = []
        heard = 0
        for micro_batch in itertools.count():
            step = self.model.micro_batch(leg.ranks, leg.schedule, finite=leg.faults.get(micro_batch) != "overflow")
            steps += [step] if step is not None else []
            if leg.saved_after is None and step is not None and micro_batch + 1 >= leg.micro_batches:
                heard += 1  # on several ranks the others hear of a signal one step later
            if micro_batch + 1 == leg.saved_after or heard == min(leg.ranks, 2):
                return steps, micro_batch + 1
        raise AssertionError


def test_a_run_of_everything_is_what_it_would_have_been_without_its_interruptions(
    tmp_path: Path, soak_steps: int
) -> None:
    """Promises 2, 3, 4 and 6, with all callbacks on; `make soak` takes 20,000 steps."""
    steps, long = 0, soak_steps > 0
    for seed in itertools.count():
        soak = Soak(seed, tmp_path / str(seed), micro_batches=120 if long else 12)
        for _ in range(LEGS_OF_A_RUN):
            soak.go_on()
        steps += soak.steps
        if seed + 1 >= FEW_RUNS and steps >= soak_steps:
            return
