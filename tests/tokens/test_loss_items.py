"""What the items of a loss are, read from its graph."""

import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_mp.training.tokens import loss_items
from lightning_mp.training.tokens.loss_items import Items, Unknown, read_items
from lightning_mp.training.tokens.loss_weights import LossWeights

Loss = Callable[[Tensor], Tensor]
ROWS, CLASSES = 5, 4
LABELS = torch.tensor([1, -100, 2, 0, -100])
TARGETS = torch.linspace(-1, 1, ROWS * CLASSES).view(ROWS, CLASSES)
CLASS_WEIGHTS = torch.tensor([1.0, 2.0, 3.0, 4.0])
MASK = LABELS >= 0
PARAMETER = nn.Parameter(torch.tensor([0.5, 1.5]))


def logits() -> Tensor:
    return torch.randn(ROWS, CLASSES, generator=torch.Generator().manual_seed(0), requires_grad=True).tanh()


def each(o: Tensor) -> Tensor:
    return F.cross_entropy(o, LABELS.clamp(min=0), reduction="none") * MASK


def per_row(o: Tensor) -> list[Tensor]:
    return [F.cross_entropy(x[None], y[None]) for x, y in zip(o, LABELS, strict=True) if y >= 0]


# Each with what its means are over, and by what these are multiplied.
MEANS: dict[str, tuple[Loss, list[tuple[float, float]]]] = {
    "cross-entropy": (lambda o: F.cross_entropy(o, LABELS), [(3, 1)]),
    "smoothed": (lambda o: F.cross_entropy(o, LABELS, label_smoothing=0.1), [(3, 0.9), (3, 0.025)]),
    "class weights": (lambda o: F.cross_entropy(o, LABELS, weight=CLASS_WEIGHTS), [(6, 1)]),
    "probabilities": (lambda o: F.cross_entropy(o, TARGETS.softmax(1)), [(5, 1)]),
    "spatial": (lambda o: F.nll_loss(o.T[None, :, :, None].log_softmax(1), LABELS[None, :, None]), [(3, 1)]),
    "elements": (lambda o: F.mse_loss(o, TARGETS), [(20, 1)]),
    "mean": (lambda o: o.square().sum(1).mean(), [(5, 1)]),
    "mean of a dimension": (lambda o: o.square().sum(1).mean(0), [(5, 1)]),
    "masked": (lambda o: each(o).sum() / MASK.sum(), [(3, 1)]),
    "masked, halved": (lambda o: each(o).sum() / MASK.sum() / 2, [(3, 0.5)]),
    "negative divisor": (lambda o: -each(o).sum() / -MASK.sum(), [(3, 1)]),
    "sum by Python's number": (lambda o: F.cross_entropy(o, LABELS, reduction="sum") / 3, [(3, 1)]),
    "dot product": (lambda o: (MASK.float() @ each(o)) / MASK.sum(), [(3, 1)]),
    "no missing values": (lambda o: torch.nanmean(o.square()), [(20, 1)]),
    "loop": (lambda o: sum(per_row(o)) / len(per_row(o)), [(3, 1)]),  # type: ignore[arg-type, return-value]
    "loop of sums": (lambda o: sum(x.sum() for x in o) / len(o), [(5, 1)]),  # type: ignore[return-value]
    "stack of rows": (lambda o: torch.stack(per_row(o)).mean(), [(3, 1)]),
    "stack of two": (lambda o: torch.stack([F.mse_loss(o, TARGETS), o.abs().mean()]).mean(), [(20, 0.5), (20, 0.5)]),
    "stack, summed": (lambda o: torch.stack([F.mse_loss(o, TARGETS), o.abs().mean()]).sum(), [(20, 1), (20, 1)]),
    "masked, beside a mean": (
        lambda o: each(o).sum() / MASK.sum().clamp(min=1) + o.square().mean(),
        [(20, 1), (3, 1)],
    ),
    "several": (lambda o: F.cross_entropy(o, LABELS) + 0.3 * o.square().sum(1).mean(), [(3, 1), (5, 0.3)]),
    "decayed weights": (lambda o: F.mse_loss(o, TARGETS) + 0.1 * PARAMETER.square().sum(), [(20, 1)]),
    "learned weight": (lambda o: torch.exp(-PARAMETER[0]) * F.mse_loss(o, TARGETS) + PARAMETER[0], [(20, 1)]),
    "reshaped": (lambda o: F.mse_loss(o, TARGETS).view(1).clone().squeeze(), [(20, 1)]),
    "1 - similarity": (lambda o: 1 - F.cosine_similarity(o, TARGETS).mean(), [(5, 1)]),
    "nan_to_num": (lambda o: F.cross_entropy(o, LABELS).nan_to_num(), [(3, 1)]),
    "times a tensor": (lambda o: F.mse_loss(o, TARGETS) * torch.tensor(2.0), [(20, 2)]),
    "16 bits": (lambda o: F.cross_entropy(o.bfloat16(), LABELS), [(3, 1)]),
    "checkpointed": (lambda o: F.mse_loss(checkpoint(torch.sin, o, use_reentrant=False), TARGETS), [(20, 1)]),
    # They count nothing.
    "times 0": (lambda o: o.sum() * 0.0, []),
    "items times 0": (lambda o: (0 * o).mean(), []),
    "weights times 0": (lambda o: 0.0 * PARAMETER.sum(), []),
    "no items": (lambda o: o[:0].square().sum(), []),
    "0 of max(1, 0)": (lambda o: (each(o) * MASK.logical_not()).sum() / max(1, 0), [(0, 1)]),
}


@pytest.mark.parametrize("name", MEANS)
def test_the_means_of_a_loss_are_read(name: str) -> None:
    loss, expected = MEANS[name]
    value = loss(logits())
    for reading in (read_items(value), read_items(value / 4 * torch.tensor(65536.0), divided=True)):
        assert isinstance(reading, Items)
        found = [(mean.total, mean.factor) for mean in reading.means]
        assert [total for total, _ in found] == [total for total, _ in expected]
        assert [factor for _, factor in found] == pytest.approx([factor for _, factor in expected])
    value.sum().backward()  # nothing of the graph was used up


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.square().mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


UNKNOWN: dict[str, tuple[Loss, str]] = {
    "sum": (lambda o: F.cross_entropy(o, LABELS, reduction="sum"), "a sum that nothing divides"),
    "sum times 1 / n": (lambda o: o.sum() * (1 / 5), "a sum that nothing divides"),
    "root": (lambda o: F.mse_loss(o, TARGETS).sqrt(), "of Sqrt, which is no mean"),
    "maximum": (lambda o: o.max(), "of Max, which is no mean"),
    "einsum": (lambda o: torch.einsum("ij,ij->", o, TARGETS) / 5, "no mean"),
    "product": (lambda o: F.mse_loss(o, TARGETS) * o.mean(), "multiplies or divides by what depends on the batch"),
    "ratio": (lambda o: o.mean() / o.abs().mean(), "multiplies or divides by what depends on the batch"),
    "reciprocal": (lambda o: 1 / o.abs().mean(), "no mean"),
    "divided by many": (lambda o: (o.sum() / TARGETS).mean(), "adds a mean to each item"),
    "joined to items": (lambda o: (each(o) + o.mean()).mean(), "adds a mean to each item"),
    "weighted stack": (
        lambda o: (CLASS_WEIGHTS[:2] * torch.stack([o.mean(), o.abs().mean()])).sum() / 2,
        "weights stacked losses",
    ),
    "own function": (Own.apply, "of Own, which is no mean"),  # type: ignore[dict-item]
    "compiled": (torch.compile(lambda o: F.mse_loss(o, TARGETS), backend="aot_eager"), "of CompiledFunction"),
    "reentrant": (lambda o: checkpoint(F.mse_loss, o, TARGETS, use_reentrant=True), "of CheckpointFunction"),
    "weights alone": (lambda o: PARAMETER.square().sum(), "nothing in it counts items"),
    "endless": (lambda o: sum(o.mean() for _ in range(1200)), "more than 2048 nodes"),  # type: ignore[return-value]
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_every_other_loss_is_unknown_and_says_why(name: str) -> None:
    loss, reason = UNKNOWN[name]
    reading = read_items(loss(logits()))
    assert isinstance(reading, Unknown)
    assert reason in reading.reason


FACTORS: dict[str, tuple[Callable[[Tensor, Any], Tensor], bool]] = {
    "of the whole": (lambda o, r: r * F.mse_loss(o, TARGETS), False),
    "of another term": (lambda o, r: F.mse_loss(o, TARGETS) + r * o.abs().mean(), True),
    "of means of a kind": (lambda o, r: r * F.cross_entropy(o, LABELS) + (1 - r) * F.cross_entropy(-o, LABELS), True),
}


@pytest.mark.parametrize("name", FACTORS)
@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_the_factors_of_what_is_counted_add_up_to_the_same(name: str, kind: Any) -> None:
    """Those of other terms may be annealed, and be tensors on the device."""
    (loss, is_known), weights, o = FACTORS[name], LossWeights(), logits()
    weights.settle([read_items(loss(o, kind(0.5)))])
    assert weights.of(read_items(loss(o, kind(0.5))))[1] is True
    assert weights.of(read_items(loss(o, kind(0.25))))[1] is is_known


def test_a_term_of_0_that_becomes_a_mean_is_unknown() -> None:
    """It may have been a mean over none; a term that joins over the same items is known."""
    o, zero, joined = logits(), LossWeights(), LossWeights()
    both = read_items(F.mse_loss(o, TARGETS) + o.abs().mean())
    zero.settle([read_items(F.mse_loss(o, TARGETS) + 0 * o.sum())])
    joined.settle([read_items(F.mse_loss(o, TARGETS))])
    assert zero.of(both)[1] is False
    assert joined.of(both)[1] is True


def test_a_sum_without_items_weighs_nothing_and_a_term_that_is_switched_off_is_unknown() -> None:
    weights, o = LossWeights(), logits()
    weights.settle([read_items(1.0 * (each(o)[:3]).sum() / 3)])
    for selected in (each(o)[:0], each(o)[1:2] * MASK[1:2]):  # a selection of none, and a masked sample
        assert weights.of(read_items(1.0 * selected.sum() / 1e-6))[:2] == (pytest.approx(0, abs=1e-5), True)
    assert weights.of(read_items(0.0 * each(o).sum() / 3))[1] is False


@pytest.mark.parametrize("kept", [0, 1, 2])
@pytest.mark.parametrize(
    "summed",
    [
        lambda o, mask: (o.abs().sum(1) * mask).sum(),
        lambda o, mask: (mask[:, None] * o.abs()).view(-1).sum(),
        lambda o, mask: torch.where(mask, o.abs().sum(1), 0.0).sum(),
        lambda o, mask: F.cross_entropy(o, torch.where(mask, 1, -100), reduction="sum"),
    ],
)
def test_a_masked_sum_over_max_1_n_is_unknown_beside_another_mean_if_that_is_1(summed: Any, kept: int) -> None:
    """It may be over one item or none; the same where it is the whole loss, which is 0 then."""
    mask = torch.arange(ROWS) < kept
    for number in (max(1, kept), mask.sum().clamp(min=1)):
        o, weights = logits(), LossWeights()
        alone = read_items(summed(o, mask) / number)
        assert isinstance(alone, Items)
        assert [mean.total for mean in alone.means] == [kept]
        for other in (lambda o: o[: max(1, kept)].square().sum(1).mean(), lambda o: o.abs().sum() / max(1, kept)):
            weights.settle([read_items(other(o[:2]) + summed(o[:2], mask[:2]) / max(1, kept))])
            assert weights.is_equal is (kept < 2)


def test_the_targets_of_all_sums_are_counted_if_the_batch_says_what_divides_them() -> None:
    o = logits()
    chunks = [F.cross_entropy(o[rows], LABELS[rows], reduction="sum") for rows in (slice(2), slice(2, None))]
    reading = read_items(0.5 * sum(chunks) / 12, counts_targets=True)
    assert isinstance(reading, Items)
    assert [(mean.total, mean.factor) for mean in reading.means] == [(3, 0.5)]
    assert reading.divisor == 12
    other = read_items(chunks[0] / 12 + o.square().mean(), counts_targets=True)
    assert other == Unknown("not all of it is divided by num_items_in_batch")


@pytest.mark.parametrize("loss", [torch.zeros(()), torch.zeros((), requires_grad=True) / 4])
def test_a_constant_counts_nothing(loss: Tensor) -> None:
    assert read_items(loss, divided=loss.requires_grad) == Items()


def test_what_is_above_lightnings_division_is_not_guessed() -> None:
    reading = read_items(logits().square().mean().sqrt(), divided=True)
    assert reading == Unknown("what it passed through after training_step is not Lightning's")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("number", [3001, 70_000])
def test_targets_are_counted_exactly_in_16_bits(dtype: torch.dtype, number: int) -> None:
    """torch's own divisor is 3008, or infinite."""
    reading = read_items(
        F.cross_entropy(torch.zeros(number, 2, dtype=dtype, requires_grad=True), torch.zeros(number).long())
    )
    assert isinstance(reading, Items)
    assert [mean.total for mean in reading.means] == [number]


@pytest.mark.parametrize(("rows", "is_even"), [((2, 2), True), ((2, 3), False)])
def test_a_mean_of_means_says_whether_they_are_over_equally_many(rows: tuple[int, int], is_even: bool) -> None:
    reading = read_items(torch.stack([F.mse_loss(logits()[:n], TARGETS[:n]) for n in rows]).mean())
    assert isinstance(reading, Items)
    assert [(mean.parts, bool(mean.is_even)) for mean in reading.means] == [(2, is_even)]


def test_another_division_of_a_mean_makes_another_kind_of_it() -> None:
    whole, halved = (read_items(F.mse_loss(logits(), TARGETS) / number) for number in (1.0, 2.0))
    assert isinstance(whole, Items)
    assert isinstance(halved, Items)
    assert whole.means[0].kind != halved.means[0].kind
    assert [whole.means[0].factor, halved.means[0].factor] == [1.0, 0.5]


def once() -> tuple[Callable[[Tensor], object], Callable[[object], Tensor]]:
    """Hooks of torch's tutorial: what is unpacked is gone."""
    store: dict[object, Tensor] = {}

    def pack(tensor: Tensor) -> object:
        key = object()
        store[key] = tensor.detach().clone()
        return key

    return pack, store.pop


@pytest.mark.parametrize("name", ["cross-entropy", "elements", "masked", "several"])
def test_nothing_that_a_hook_has_packed_is_unpacked(name: str) -> None:
    with torch.autograd.graph.saved_tensors_hooks(*once()):
        value = MEANS[name][0](logits())
    reading = read_items(value)
    assert isinstance(reading, Items if name == "elements" else Unknown)
    value.backward()


class Watch(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **kwargs or {})


@pytest.fixture(params=[None, Watch])
def watched(request: pytest.FixtureRequest) -> Iterator[type[TorchFunctionMode] | None]:
    if request.param is None:
        yield None
        return
    with request.param():
        yield request.param


@pytest.mark.parametrize("name", ["masked, halved", "sum by Python's number", "times a tensor"])
def test_numbers_are_read_under_a_dispatch_mode(name: str, watched: object) -> None:
    loss, expected = MEANS[name]
    reading = read_items(loss(logits()))
    assert isinstance(reading, Items)
    assert [mean.total for mean in reading.means] == [total for total, _ in expected]


class Waits(TorchDispatchMode):
    """Counts numbers that are read from tensors, for which a step on a GPU waits."""

    reads = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.reads += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **kwargs or {})


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers in tensors are as on a device."""
    on_host = loss_items.on_host

    def as_of_a_device(value: Tensor) -> Any:
        try:
            return value.detach().float().reshape(())
        except RuntimeError:  # a number that Python has given, which is in the host's memory there too
            return on_host(value)

    monkeypatch.setattr(loss_items, "on_host", as_of_a_device)


@pytest.mark.usefixtures("device")
def test_a_masked_sum_over_1_beside_another_mean_is_unknown_on_a_device_too() -> None:
    weights, o = LossWeights(), logits()

    def reading(kept: int) -> Items | Unknown:
        mask = torch.arange(ROWS) < kept
        other = o[:kept].abs().sum(1).mean()
        return read_items((o.abs().sum(1) * mask).sum() / mask.sum().clamp(min=1) + other)

    weights.settle([reading(2)])
    assert not weights.is_equal
    assert [bool(weights.of(reading(kept))[1]) for kept in (2, 3, 1)] == [True, True, False]


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("name", MEANS)
def test_numbers_on_a_device_stay_there(name: str) -> None:
    loss, expected = MEANS[name]
    value = loss(logits())
    with Waits() as waits:
        reading = read_items(value)
    assert waits.reads == 0
    if isinstance(reading, Items):
        assert [float(mean.total) for mean in reading.means] == [total for total, _ in expected]


@pytest.mark.parametrize(
    ("name", "most"), [("cross-entropy", 12), ("elements", 12), ("masked", 15), ("smoothed", 20), ("several", 20)]
)
def test_a_loss_is_read_and_weighed_in_few_python_calls(name: str, most: int) -> None:
    value, weights, entered = MEANS[name][0](logits()), LossWeights(), []
    weights.settle([read_items(value)])
    weights.of(read_items(value))
    gc.collect()
    gc.disable()  # a collection would call finalizers
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, argument: entered.append(frame.f_code.co_name) if event == "call" else None)
    try:
        weights.of(read_items(value))
    finally:
        sys.setprofile(before)
        gc.enable()
    assert len(entered) <= most, entered
