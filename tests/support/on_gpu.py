"""`pytest --accelerator gpu`: Trainers of tests that ask for one CPU take the GPU.

Plain loops of the tests stay on the CPU, so results of both are compared within a tolerance: that of the lowest format
in which a moved Trainer of the test computed. Comparisons of whole numbers, and tests that move no Trainer, stay exact.
Ranks of distributed tests, which see no GPU, stay on the CPU. `--accelerator record` moves nothing and says what would
be moved.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

TESTS = str(Path(__file__).resolve().parents[1])
#: Relative to the largest number of a tensor. Several roundings of the format, for sums in another order; of fp32 more,
#: because Adam turns the sign of a small gradient into a step of the learning rate.
TOLERANCES = {"fp32": 1e-3, "fp16": 4e-3, "bf16": 2e-2, "fp8": 1e-1}
_FORMATS = {"16": "fp16", "bf16": "bf16", "fp8": "fp8"}


def takes_the_gpu(arguments: dict[str, Any]) -> bool:
    """Whether a Trainer of these arguments asks for one CPU, and for nothing that needs several devices."""
    return (
        arguments.get("accelerator") == "cpu"
        and arguments.get("devices", 1) in (1, "1", "auto")
        and arguments.get("num_nodes", 1) == 1
        and arguments.get("strategy", "auto") == "auto"
    )


@dataclass
class OnGpu:
    """What was moved; ``moves`` is False where it is only recorded."""

    moves: bool
    trainers: Counter[str] = field(default_factory=Counter)  #: that were moved, or would be, by test
    test: str = ""  #: that runs now
    formats: set[str] = field(default_factory=set)  #: that moved Trainers of this test compute in

    def begin(self, test: str) -> None:
        """A test begins."""
        self.test = test
        self.formats.clear()

    @property
    def tolerance(self) -> float:
        """Of this test; 0 where no Trainer was moved."""
        return max((TOLERANCES[name] for name in self.formats), default=0.0)

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Replaces the Trainer's constructor and, for calls from tests, torch's comparisons."""
        original, equal, assert_close = pl.Trainer.__init__, torch.equal, torch.testing.assert_close

        def init(trainer: pl.Trainer, *args: Any, **arguments: Any) -> None:
            is_moved = takes_the_gpu(arguments)
            if is_moved and self.moves:
                arguments |= {"accelerator": "gpu", "devices": 1}
            original(trainer, *args, **arguments)
            if is_moved:
                self.trainers[self.test] += 1
                if self.moves:
                    self.formats.add(_FORMATS.get(str(trainer.precision).partition("-")[0], "fp32"))

        def equal_within(one: Tensor, other: Tensor) -> bool:
            if not self.tolerance or not _is_called_by_a_test():
                return equal(one, other)
            return _are_close(one, other, self.tolerance)

        def assert_within(actual: Any, expected: Any, **arguments: Any) -> None:
            if self.tolerance and _is_called_by_a_test():
                least = {"rtol": self.tolerance, "atol": self.tolerance}
                arguments |= {name: max(arguments.get(name) or 0.0, size) for name, size in least.items()}
                arguments["check_device"] = False
            assert_close(actual, expected, **arguments)

        pl.Trainer.__init__ = init  # type: ignore[method-assign]
        torch.equal, torch.testing.assert_close = equal_within, assert_within  # type: ignore[assignment]
        try:
            yield
        finally:
            pl.Trainer.__init__ = original  # type: ignore[method-assign]
            torch.equal, torch.testing.assert_close = equal, assert_close


def _is_called_by_a_test() -> bool:
    return sys._getframe(2).f_code.co_filename.startswith(TESTS)


def _are_close(one: Tensor, other: Tensor, tolerance: float) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    one, other = one.detach().cpu(), other.detach().cpu()
    if not one.is_floating_point() or not one.numel():
        return bool((one == other).all())
    one, other = one.double(), other.double()
    finite = one.isfinite() & other.isfinite()
    if not bool((one[~finite].nan_to_num() == other[~finite].nan_to_num()).all()):
        return False
    largest = other[finite].abs().max().item() if finite.any() else 0.0
    return bool(((one - other)[finite].abs() <= tolerance * largest).all())
