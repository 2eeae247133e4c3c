"""What of all that was seen is the culprit, and which scale is the largest: pure functions."""

import math

import pytest
import torch
from torch import nn

from lightning_mp.post_mortem.culprit import find_culprit
from lightning_mp.post_mortem.search import largest_finite_scale
from lightning_mp.post_mortem.sightings import Place, take_reading
from lightning_mp.post_mortem.tensor_watch import TensorWatch


def run(net: nn.Module, x: torch.Tensor, *, reduce=torch.sum):
    with TensorWatch(net) as watch:
        watch.note(Place("batch", "", "", "batch"), x)
        loss = reduce(net(x))
        watch.note(Place("loss", "", "", "the loss"), loss)
        with watch.backward():
            loss.backward()
    return find_culprit(watch.sightings())


class Scores(nn.Module):
    """Adds a mask in a module of its own, so that -inf passes between modules."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.mask, self.softmax, self.out = nn.Identity(), nn.Softmax(-1), nn.Linear(3, 3)
        self.factor = factor

    def forward(self, x):
        masked = self.mask(x.masked_fill(torch.eye(3, dtype=torch.bool), -math.inf))
        return self.out(self.softmax(masked)) * self.factor


def test_a_mask_is_no_culprit():
    assert run(Scores(1.0), torch.ones(3, 3, requires_grad=True)) is None
    culprit = run(Scores(math.inf), torch.ones(3, 3, requires_grad=True))
    assert (culprit.phase, culprit.module) == ("loss", "")


def test_a_minus_infinity_that_is_not_taken_away_is_one():
    class Lowest(nn.Module):
        def forward(self, x):
            return x.clamp(max=0).mul(0).sub(1e39)

    net = nn.Sequential(nn.Linear(3, 3), Lowest(), nn.Linear(3, 3))
    culprit = run(net, torch.ones(2, 3))
    assert (culprit.phase, culprit.module, culprit.kind) == ("forward", "1", "-inf")


def test_infinities_that_the_loss_does_not_see_do_no_harm():
    class Where(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x):
            return torch.where(self.inner(x * math.inf).isfinite(), 0.0, x.detach() * self.inner.bias)

    assert run(Where(), torch.ones(2, 3)) is None


def test_of_two_modules_that_share_an_input_the_right_one_is_named():
    class Bad(nn.Module):
        def forward(self, x):
            return x + (x * 0).sqrt()

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.bad, self.last = nn.Linear(3, 3), Bad(), nn.Linear(3, 3)

        def forward(self, x):
            x = self.first(x)
            return self.bad(x) + self.last(x)

    culprit = run(Shared(), torch.ones(2, 3))
    assert (culprit.phase, culprit.module, culprit.tensor) == ("backward", "bad", "gradient of argument 'x'")


def test_operations_between_modules_belong_to_the_module_that_makes_them():
    class Between(nn.Module):
        def __init__(self, factor):
            super().__init__()
            self.up, self.down, self.factor = nn.Linear(3, 3), nn.Linear(3, 3), factor

        def forward(self, x):
            return self.down(self.up(x) * self.factor)

    net = nn.Sequential(nn.Linear(3, 3), Between(math.inf))
    culprit = run(net, torch.ones(2, 3))
    assert (culprit.phase, culprit.module) == ("forward", "1")
    assert culprit.tensor == "argument 'input' of 1.down"

    class Kink(Between):
        def forward(self, x):
            y = self.up(x)
            return self.down(y + (y * 0).sqrt())

    culprit = run(nn.Sequential(nn.Linear(3, 3), Kink(1.0)), torch.ones(2, 3))
    assert (culprit.phase, culprit.module, culprit.tensor) == ("backward", "1", "gradient of output of 1.up")


def test_a_parameter_gradient_is_named():
    embedding = nn.Embedding(3, 3)
    embedding.weight.register_hook(lambda gradient: gradient * math.inf)
    culprit = run(nn.Sequential(embedding, nn.Linear(3, 3)), torch.tensor([0, 1]))
    assert (culprit.phase, culprit.module, culprit.tensor) == ("backward", "0", "gradient of weight")


def test_structures_are_looked_into_and_left_alone():
    class Pair(nn.Module):
        def forward(self, x, *, extra):
            assert extra["a"] is not None
            return {"y": (x, [x * extra["a"]])}

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.pair = Pair()

        def forward(self, x):
            output = self.pair(x, extra={"a": torch.tensor(math.inf)})
            assert type(output) is dict
            assert type(output["y"]) is tuple
            return output["y"][0] + output["y"][1][0].nan_to_num(0, 0)

    x = torch.ones(2, 3, requires_grad=True)
    culprit = run(Outer(), x, reduce=lambda y: y.sum() + math.inf)
    assert (culprit.module, culprit.tensor) == ("", "argument 'extra'['a'] of pair")


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
