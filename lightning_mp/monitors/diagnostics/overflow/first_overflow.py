"""The first tensor that was not finite, out of everything that was seen in one forward and backward."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_mp.monitors.diagnostics.overflow.observations import OverflowObservation

Phase = Literal["data", "weights", "forward", "loss", "backward"]


@dataclass(frozen=True)
class FirstOverflow:
    """Where a run first went wrong."""

    # "data" (the batch), "weights" (a parameter or buffer), "forward", "loss" (the training step after its last module,
    # or a module that returns the loss) or "backward"
    phase: Phase
    module: str  # full name of the module; "" is the training step itself
    module_class: str  # its class name; "" where only the name is known
    tensor: str  # which tensor, in words
    kind: str  # what it held: "nan", "inf", "-inf", or several of them
    dtype: str  # its dtype, as "float16"
    shape: tuple[int, ...]  # its shape on this rank
    # largest finite absolute value among the module's inputs, in backward among the gradients it was given; None if
    # none was seen
    largest_input: float | None


def find_first_overflow(observations: Sequence[OverflowObservation]) -> FirstOverflow | None:
    """The first non-finite tensor that matters, or None.

    Forward counts only if the loss is not finite: an inf that a mask or a ``torch.where`` takes away again does no
    harm. In the same way -inf by itself is taken for a mask as long as a module that got it returned finite values.
    Backward counts in the order in which gradients were made, last layer first.
    """
    backward = [s for s in observations if s.place.role.endswith("_gradient")]
    forward = [s for s in observations if not s.place.role.endswith("_gradient")]
    if any(s.place.role == "loss" and not s.finite for s in forward):
        return _forward_first_overflow(_first_that_matters(forward), forward)
    first = next((s for s in backward if not s.finite), None)
    return _backward_first_overflow(first, backward) if first is not None else None


def _first_that_matters(forward: Sequence[OverflowObservation]) -> OverflowObservation:
    absorbing = {s.place.call for s in forward if s.place.role == "input" and s.only_neginf}
    absorbed = any(s.place.role == "output" and s.place.call in absorbing and s.finite for s in forward)
    wrong = [s for s in forward if not s.finite]
    if absorbed:
        wrong = [s for s in wrong if not s.only_neginf or s.place.role == "loss"]
    first = next(s for s in wrong if s.place.role != "buffer")
    # A buffer counts where it is used: running statistics, say, are only written to in training.
    maker = first.place.enclosing if first.place.role == "input" else first.place.module
    used = (s for s in wrong if s.place.role == "buffer" and s.place.module == maker and not s.only_neginf)
    return next(used, first)


def _forward_first_overflow(first: OverflowObservation, forward: Sequence[OverflowObservation]) -> FirstOverflow:
    place = first.place
    if place.role == "batch":
        return _first_overflow("data", first, module_class="")
    if place.role in ("parameter", "buffer"):
        return _first_overflow("weights", first)
    if place.role == "loss":
        inputs = [s for s in forward if s.place.role == "output" and not s.place.enclosing]
        return _first_overflow("loss", first, module_class="", inputs=inputs[-1:])
    if place.role == "input":
        # Made between two modules, in the forward of the one that called both.
        tensor = f"{place.tensor} of {place.module}"
        return _first_overflow("forward", first, module=place.enclosing, module_class="", tensor=tensor)
    inputs = [s for s in forward if s.place.role == "input" and s.place.call == place.call]
    is_loss = not first.shape and not place.enclosing
    return _first_overflow("loss" if is_loss else "forward", first, inputs=inputs)


def _backward_first_overflow(first: OverflowObservation, backward: Sequence[OverflowObservation]) -> FirstOverflow:
    place = first.place
    if place.role == "output_gradient":
        # The module was given it: it was made by the operations that used its output.
        tensor = f"{place.tensor} of {place.module}"
        return _first_overflow("backward", first, module=place.enclosing, module_class="", tensor=tensor)
    given = [s for s in backward if s.place.role == "output_gradient" and s.place.module == place.module and s.finite]
    return _first_overflow("backward", first, inputs=given)


def _first_overflow(
    phase: Phase,
    first: OverflowObservation,
    *,
    module: str | None = None,
    module_class: str | None = None,
    tensor: str | None = None,
    inputs: Sequence[OverflowObservation] = (),
) -> FirstOverflow:
    return FirstOverflow(
        phase,
        first.place.module if module is None else module,
        first.place.module_class if module_class is None else module_class,
        tensor or first.place.tensor,
        first.kind,
        str(first.dtype).removeprefix("torch."),
        first.shape,
        max((s.largest for s in inputs), default=None),
    )
