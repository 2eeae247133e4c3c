"""ActivationCheckpointing on modules whose forward changes buffers, or fills what autograd has saved."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from checkpointed_models import Stack, assert_same, fit
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from small_models import WIDTH
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_mp.callbacks.activation_checkpointing import ActivationCheckpointing
from lightning_mp.training.activation_checkpointing.buffers import FoundBuffers, WatchedBuffers
from lightning_mp.training.activation_checkpointing.wrapper import CheckpointedModules


class Codebook(nn.Module):
    """Vector quantisation with codes averaged in the forward (van den Oord et al. 2017, appendix A.1)."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("codes", torch.randn(5, WIDTH))
        self.register_buffer("is_set", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if not self.is_set:
                self.is_set.fill_(True)
                self.codes.copy_(torch.cat([x, x])[:5])
            chosen = torch.cdist(x, self.codes).argmin(-1)
            means = torch.zeros_like(self.codes).index_add_(0, chosen, x.detach().float())
        quantised = self.codes[chosen]
        if self.how == "in place":
            self.codes.lerp_(means, 0.3)
        elif self.how == "data":
            self.codes.data.mul_(0.7).add_(means, alpha=0.3)
        else:
            self.codes = self.codes.lerp(means, 0.3)
        return x * quantised + x


class State(nn.Module):
    """A recurrent state that is None at first."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("state", None)

    def forward(self, x: Tensor) -> Tensor:
        before = torch.ones_like(x) if self.state is None else self.state
        mixed = torch.tanh(self.mix(x)) * before
        self.state = mixed.detach()
        return mixed


class Counting(nn.Module):
    """What it computes depends on how often it ran in training; its table never changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("runs", torch.zeros(()))
        self.register_buffer("same_runs", self.runs)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.runs += 1
        return torch.sin(x * self.same_runs)


class Tracking(nn.Module):
    """A norm that divides by its running statistics in training too, as batch renormalisation does."""

    track_running_stats = True

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        normed = x / self.scale
        self.scale = self.scale.lerp(x.detach().float().square().mean(0).sqrt(), 0.1)
        return torch.tanh(normed)


class Applied(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.up(x))


def rrelu(x: Tensor) -> Tensor:
    return F.rrelu(x, training=True)


INNER: dict[str, Callable[[], nn.Module]] = {
    "spectral_norm": lambda: nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "spectral_norm, parametrization": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "codebook in place": lambda: Codebook("in place"),
    "codebook through .data": lambda: Codebook("data"),
    "codebook replaced": lambda: Codebook("replaced"),
    "state": State,
    "count, a buffer of two names": Counting,
    "norm of its own": Tracking,
    "batch norm": lambda: nn.BatchNorm1d(WIDTH, momentum=None),
    "rrelu": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.RReLU()),
    "rrelu in place": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.RReLU(inplace=True)),
    "rrelu as a function": lambda: Applied(rrelu),
    "dropout": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)),
}


class Block(nn.Module):
    """``times`` uses of the inner module."""

    def __init__(self, inner: nn.Module, times: int = 1) -> None:
        super().__init__()
        self.lead = nn.Linear(WIDTH, WIDTH)
        self.inner = inner
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        x = self.lead(x)
        for _ in range(self.times):
            x = self.inner(x)
        return x


class Blocks(Stack):
    def __init__(self, make: Callable[[], nn.Module], times: int = 1, *, shared: bool = False) -> None:
        self.make, self.times, self.shared = make, times, shared
        super().__init__(num_blocks=3)

    def build(self) -> None:
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(self.make(), self.times) for _ in range(self.num_blocks))
        if self.shared:
            self.blocks[2] = self.blocks[0]
        self.head = nn.Linear(WIDTH, 1)


class Penalised(Blocks):
    """Each second run is made twice, for a gradient penalty."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].clone().requires_grad_()
        loss = super().training_step([x, batch[1]], batch_idx)
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + gradient.square().sum()


def compare(make: Callable[[], Any], **arguments: Any) -> Any:
    """Trains with checkpoints and without, and finds no difference."""
    module = fit(make(), ActivationCheckpointing(Block), **arguments)
    reference = fit(make(), **arguments)
    assert_same(module, reference)
    return module


@pytest.mark.parametrize("name", INNER)
def test_training_is_the_same_to_the_last_bit(name: str) -> None:
    compare(lambda: Blocks(INNER[name]))


@pytest.mark.parametrize("name", ["spectral_norm, parametrization", "codebook replaced", "state", "rrelu"])
@pytest.mark.parametrize("kind", ["several uses", "one module at two places", "accumulation", "penalty", "bf16"])
def test_it_is_the_same_where_a_module_runs_again_and_again(name: str, kind: str) -> None:
    if kind == "penalty":
        compare(lambda: Penalised(INNER[name]))
    elif kind in ("accumulation", "bf16"):
        compare(
            lambda: Blocks(INNER[name]),
            **({"accumulate_grad_batches": 3} if kind == "accumulation" else {"precision": "bf16-mixed"}),
        )
    else:
        compare(lambda: Blocks(INNER[name], 2, shared=kind == "one module at two places"))


@pytest.mark.parametrize("make", [Counting, INNER["spectral_norm"], lambda: nn.BatchNorm1d(WIDTH)])
def test_a_module_that_is_set_to_train_later(make: Callable[[], nn.Module]) -> None:
    """In evaluation its forward changes nothing; the first one in training is learned from anew."""

    class Thawed(Blocks):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            for block in self.blocks:
                block.train(batch_idx >= 2)

    compare(lambda: Thawed(make))


class Late(nn.Module):
    """Changes its buffer when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))
        self.is_changing = False

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sin(x * self.scale.clone())
        if self.is_changing:
            self.scale += 1
        return y


def test_a_change_that_comes_later_is_named_and_kept_from_then_on() -> None:
    block = Block(Late())
    plain = copy.deepcopy(block)
    CheckpointedModules([block])
    x = torch.randn(3, WIDTH, requires_grad=True)
    same = []
    for is_changing in (False, True, True, False, True):
        block.inner.is_changing = plain.inner.is_changing = is_changing
        warns = pytest.warns(
            UserWarning, match="Block changed its buffer inner.scale for the first time after its first"
        )
        with warns if len(same) == 1 else nullcontext():
            (found,) = torch.autograd.grad(block(x).sum(), x)
        (expected,) = torch.autograd.grad(plain(x).sum(), x)
        same.append(torch.equal(found, expected))
    assert same == [True, False, True, True, True]
    assert torch.equal(block.inner.scale, plain.inner.scale)


def test_only_buffers_of_modules_that_change_theirs_are_kept() -> None:
    model = nn.Sequential(Counting(), nn.Linear(2, 2))
    model[1].register_buffer("table", torch.zeros(1000))
    watched = WatchedBuffers(model)

    def kept(forward: Callable[[], Any]) -> list[str]:
        with FoundBuffers(watched):
            forward()
        found = FoundBuffers(watched)
        with found:
            forward()
        return [buffer.name for buffer in found._found if buffer.copy is not None]

    assert kept(lambda: None) == []
    model.train(False)
    assert kept(lambda: model[0](torch.ones(1))) == []
    model[0].train()
    assert kept(lambda: model[0](torch.ones(1))) == ["runs", "same_runs"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("spectral_norm", "inner.weight_u, inner.weight_v"),
        ("norm of its own", "inner.scale"),
        ("batch norm", None),
        ("rrelu", None),
    ],
)
def test_compiled_modules_that_change_buffers_are_refused(name: str, names: str | None) -> None:
    """torch.compile has no context around its second runs; norms of torch it recomputes right."""

    class Compiled(Blocks):
        def on_train_start(self) -> None:
            super().on_train_start()
            torch.compiler.reset()
            for block in self.blocks:
                block.compile(backend="aot_eager")

    def make() -> Compiled:
        return Compiled(INNER[name] if name != "batch norm" else lambda: nn.BatchNorm1d(WIDTH))

    if names is None:
        compare(make)
    else:
        with pytest.raises(MisconfigurationException, match=rf"in its forward .{names}.*, and the model is"):
            fit(make(), ActivationCheckpointing(Block))


@pytest.mark.parametrize("name", ["spectral_norm, parametrization", "codebook in place", "rrelu"])
def test_a_copy_has_buffers_of_its_own(name: str) -> None:
    torch.manual_seed(0)
    block = Block(INNER[name]())
    checkpointed = CheckpointedModules([block])
    x = torch.randn(4, WIDTH, requires_grad=True)
    block(x).sum().backward()
    before = [buffer.clone() for buffer in block.buffers()]
    twin = copy.deepcopy(block)
    twin(x).sum().backward()
    assert all(map(torch.equal, block.buffers(), before))
    checkpointed.detach()
