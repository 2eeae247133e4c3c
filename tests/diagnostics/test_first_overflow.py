"""What of all that was seen is the first, and which scale is the largest: pure functions."""

import math
from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch
from small_models import Parts
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_mp.monitors.diagnostics.overflow.first_overflow import FirstOverflow, find_first_overflow
from lightning_mp.monitors.diagnostics.overflow.observations import OverflowObservation, Place, take_reading
from lightning_mp.monitors.diagnostics.overflow.report import OverflowReport
from lightning_mp.monitors.diagnostics.overflow.search import OverflowFinding, largest_finite_scale
from lightning_mp.monitors.diagnostics.overflow.tensor_watch import TensorWatch


def run(net: nn.Module, x: torch.Tensor, *, reduce=torch.sum):
    with TensorWatch(net) as watch:
        watch.note(Place("batch", "", "", "batch"), x)
        loss = reduce(net(x))
        watch.note(Place("loss", "", "", "the loss"), loss)
        with watch.backward():
            loss.backward()
    return find_first_overflow(watch.observations())


def two_layers(forward, **more):
    return Parts(forward, up=lambda: nn.Linear(3, 3), down=lambda: nn.Linear(3, 3), **more)


def test_a_mask_is_no_first_overflow():
    """It is added in a module of its own, so that -inf passes between modules."""

    def scores(module, x):
        masked = module.mask(x.masked_fill(torch.eye(3, dtype=torch.bool), -math.inf))
        return module.up(module.softmax(masked)) * module.factor

    def first(factor):
        module = two_layers(scores, mask=nn.Identity, softmax=lambda: nn.Softmax(-1), factor=lambda: factor)
        return run(module, torch.ones(3, 3, requires_grad=True))

    assert first(1.0) is None
    assert (first(math.inf).phase, first(math.inf).module) == ("loss", "")


def test_a_minus_infinity_that_is_not_taken_away_is_one():
    net = nn.Sequential(nn.Linear(3, 3), Parts(lambda _, x: x.clamp(max=0).mul(0).sub(1e39)), nn.Linear(3, 3))
    first = run(net, torch.ones(2, 3))
    assert (first.phase, first.module, first.kind) == ("forward", "1", "-inf")


def test_infinities_that_the_loss_does_not_see_do_no_harm():
    where = two_layers(lambda m, x: torch.where(m.up(x * math.inf).isfinite(), 0.0, x.detach() * m.up.bias))
    assert run(where, torch.ones(2, 3)) is None


def test_of_two_modules_that_share_an_input_the_right_one_is_named():
    class Bad(nn.Module):
        def forward(self, x):
            return x + (x * 0).sqrt()

    module = two_layers(lambda module, x: module.bad(y := module.up(x)) + module.down(y), bad=Bad)
    first = run(module, torch.ones(2, 3))
    assert (first.phase, first.module, first.tensor) == ("backward", "bad", "gradient of argument 'x'")


def test_operations_between_modules_belong_to_the_module_that_makes_them():
    between = two_layers(lambda module, x: module.down(module.up(x) * math.inf))
    first = run(nn.Sequential(nn.Linear(3, 3), between), torch.ones(2, 3))
    assert (first.phase, first.module) == ("forward", "1")
    assert first.tensor == "argument 'input' of 1.down"

    kink = two_layers(lambda module, x: module.down((y := module.up(x)) + (y * 0).sqrt()))
    first = run(nn.Sequential(nn.Linear(3, 3), kink), torch.ones(2, 3))
    assert (first.phase, first.module, first.tensor) == ("backward", "1", "gradient of output of 1.up")


def test_a_parameter_gradient_is_named():
    embedding = nn.Embedding(3, 3)
    embedding.weight.register_hook(lambda gradient: gradient * math.inf)
    first = run(nn.Sequential(embedding, nn.Linear(3, 3)), torch.tensor([0, 1]))
    assert (first.phase, first.module, first.tensor) == ("backward", "0", "gradient of weight")


def test_structures_are_looked_into_and_left_alone():
    def pair(_, x, *, extra):
        assert extra["a"] is not None
        return {"y": (x, [x * extra["a"]])}

    def outer(module, x):
        output = module.pair(x, extra={"a": torch.tensor(math.inf)})
        assert type(output) is dict
        assert type(output["y"]) is tuple
        return output["y"][0] + output["y"][1][0].nan_to_num(0, 0)

    x = torch.ones(2, 3, requires_grad=True)
    first = run(Parts(outer, pair=lambda: Parts(pair)), x, reduce=lambda y: y.sum() + math.inf)
    assert (first.module, first.tensor) == ("", "argument 'extra'['a'] of pair")


@pytest.mark.parametrize("boundary", [1.0, 1.5, 7.0, 4096.0, 40000.0])
@pytest.mark.parametrize("scale", [2.0**16, 65537.0, 2.0**24])
def test_bisection_finds_the_largest_finite_scale(scale, boundary):
    asked = []

    def is_finite(candidate):
        asked.append(candidate)
        return candidate <= max(boundary, scale / 2 ** math.ceil(math.log2(scale)))

    found = largest_finite_scale(scale, is_finite)
    candidates = [scale / 2**k for k in range(1, math.ceil(math.log2(scale)) + 1)]
    assert found == max(c for c in candidates if is_finite(c))
    assert len(asked) - len(candidates) <= 5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.float8_e5m2])
def test_readings(dtype):
    reading = take_reading(torch.tensor([1.0, -4.0, math.inf]).to(dtype))
    assert reading.tolist()[1:] == [1.0, 0.0, 4.0]
    assert take_reading(torch.zeros(0, dtype=dtype)) is None
    assert take_reading(torch.tensor([1])) is None


def seen(role, module="m", *, inf=False, largest=1.0, shape=(4,), enclosing="", call=1):
    place = Place(role, module, "Module", role, enclosing, call)
    return OverflowObservation(place, shape, torch.float16, nan=False, posinf=inf, neginf=False, largest=largest)


def test_what_went_into_the_loss_is_the_last_output():
    outputs = [seen("output", "first", largest=9.0, call=1), seen("output", "last", largest=5.0, call=2)]
    assert find_first_overflow([*outputs, seen("loss", "", inf=True)]).largest_input == 5.0


def test_what_went_into_a_backward_is_what_was_finite():
    """A module that is used twice is given its own inf a second time."""
    given = seen("output_gradient", largest=3.0)
    spoilt = seen("output_gradient", inf=True, largest=6e4, call=2)
    first = find_first_overflow([given, seen("input_gradient", inf=True), spoilt])
    assert (first.phase, first.largest_input) == ("backward", 3.0)


@pytest.mark.parametrize(
    ("enclosing", "shape", "phase"), [("", (), "loss"), ("m", (), "forward"), ("", (4,), "forward")]
)
def test_only_a_number_that_no_module_takes_in_is_the_loss(enclosing, shape, phase):
    output = seen("output", inf=True, shape=shape, enclosing=enclosing)
    assert find_first_overflow([output, seen("loss", "", inf=True)]).phase == phase


def finding(rank, verdict, finite_scale=None):
    first = FirstOverflow("backward", "m", "Linear", "output", "inf", "float16", (4,), 1.0)
    return OverflowFinding(rank, 0, 1, 0, verdict, first, finite_scale)


def test_a_report_counts_the_halvings_that_a_scale_was_too_high():
    text = str(OverflowReport(3, 1024.0, findings=[finding(0, "scale", 16.0)]))
    assert "the loss scale was too high; at 16, 6 halvings below, the micro-batch is finite" in text


def test_a_report_tells_four_ranks_in_full_and_names_the_others():
    text = str(OverflowReport(3, 1024.0, findings=[finding(rank, "model") for rank in range(6)]))
    assert [f"on rank {rank}:" in text for rank in range(6)] == [True] * 4 + [False] * 2
    assert "The same problem on ranks 4, 5." in text


@pytest.mark.parametrize("where", ["forward", "hook"])
def test_a_module_that_failed_and_was_passed_over_calls_nobody(where):
    def refuse(*_):
        raise NotImplementedError

    def tries(module, x):
        try:
            return module.up(x)
        except NotImplementedError:
            return module.down(x * math.inf)

    module = two_layers(tries)
    if where == "hook":
        module.up.register_forward_pre_hook(refuse)
    else:
        module.up = Parts(refuse)
    first = run(nn.Sequential(nn.Linear(3, 3), module), torch.ones(2, 3))
    assert (first.phase, first.module, first.tensor) == ("forward", "1", "argument 'input' of 1.down")


@pytest.mark.parametrize("reentrant", [False, True], ids=["nonreentrant", "reentrant"])
def test_what_a_checkpoint_computes_again_has_the_caller_of_the_first_time(reentrant):
    def inner(module, x):
        y = module.up(x)
        return module.down(y + (y * 0).sqrt())

    kink = two_layers(lambda module, x: checkpoint(inner, module, x, use_reentrant=reentrant))
    first = run(nn.Sequential(nn.Linear(3, 3), kink), torch.ones(2, 3))
    assert (first.phase, first.module, first.tensor) == ("backward", "1", "gradient of output of 1.up")


def test_modules_get_what_they_were_given():
    """A parameter, and containers of a class of their own, which know more than their entries."""

    class Output(OrderedDict):
        pass

    def outer(module, x):
        output = module.inner(x, module.weight)
        assert type(output) is Output
        return output["y"]

    def inner(_, x, weight):
        assert isinstance(weight, nn.Parameter)
        return Output(y=x * weight)

    module = Parts(outer, inner=lambda: Parts(inner), weight=lambda: nn.Parameter(torch.ones(3)))
    assert run(module, torch.ones(2, 3)) is None


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


@pytest.mark.parametrize("container", [tuple, lambda pair: Pair(*pair), lambda pair: OrderedDict(enumerate(pair))])
def test_gradients_are_seen_in_containers_of_any_class(container):
    """Also in one that cannot be made anew, so that the tensors in it stay what they were."""

    inner = Parts(lambda _, x: container((2 * x, 3 * x)))
    outer = Parts(lambda module, x: sum(module.inner(x)[place] for place in (0, 1)), inner=lambda: inner)
    with TensorWatch(outer) as watch:
        outer(torch.ones(2, requires_grad=True)).sum().backward()
    roles = [observation.place.role for observation in watch.observations()]
    assert roles.count("output_gradient") == 2
