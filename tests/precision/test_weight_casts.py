"""16-bit casts of weights: never stale inside of a step, and gradients of several uses are summed in fp32.

The reference casts at every use, as Lightning 2.6 does and 2.7 no longer does; equality is to the bit.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from gloo import run_same_ranks as run_ranks
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from processor import needs_16_bit_lstm
from small_models import UncachedAutocast, fit, loader
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_mp import AutocastPrecision, Float8Precision

WIDTH = 16

Step = Callable[["Net"], Tensor]


class Net(pl.LightningModule):
    """A trainable and a frozen net; each training step runs ``step``, which may change weights between its forwards."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.step = step
        self.losses: list[float] = []
        self.evaluated: list[float] = []
        self.gradients: list[Tensor] = []

    def loss(self, x: Tensor | None = None) -> Tensor:
        x = self.x if x is None else x
        return self.net(self.frozen(x)).float().square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.x = batch
        loss = self.step(self)
        self.losses.append(loss.item())
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients += [p.grad.clone() for p in self.parameters() if p.grad is not None]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Evaluated(Net):
    """As ``ema_scope()`` of latent diffusion: one of two losses is that of other weights."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.evaluated.append(self.loss(batch).item())
        with changed(self, lambda p: p.data.mul_(0.5)):
            self.evaluated.append(self.loss(batch).item())
        return self.loss(batch)

    test_step = predict_step = validation_step


@contextmanager
def changed(module: nn.Module, change: Callable[[nn.Parameter], Any]) -> Iterator[None]:
    before = [p.detach().clone() for p in module.parameters()]
    with torch.no_grad():
        for p in module.parameters():
            change(p)
    yield
    for p, value in zip(module.parameters(), before, strict=True):
        p.data.copy_(value)


# -- weights that change inside of a step ------------------------------------------------------------------------------


def changes_in_place(net: Net) -> Tensor:
    """Sharpness-aware minimisation by hand."""
    first = net.loss()
    first.backward()
    with changed(net, lambda p: p.add_(0.1 if p.grad is None else 0.1 * p.grad)):
        return first.detach() + net.loss()


def changes_through_data(net: Net) -> Tensor:
    first = net.loss()
    for p in net.parameters():
        p.data = p.data + 0.25
    return first + net.loss()


def changes_one_element_of_a_frozen_weight(net: Net) -> Tensor:
    first = net.loss()
    net.frozen.weight.data.view(-1)[37] += 3.0
    return first + net.loss()


def move(p: nn.Parameter, sign: float) -> None:
    p.add_(sign * torch.linspace(-1, 1, p.numel()).view_as(p))


def evaluates_forwards_only(net: Net) -> Tensor:
    """MeZO: the difference of two losses without a graph says where to go; then one with a graph."""
    found = []
    for sign in (1.0, -1.0):
        with changed(net, partial(move, sign=sign)), torch.no_grad():
            found.append(net.loss())
    return net.loss() * (found[0] - found[1])


def evaluates_in_inference_mode(net: Net) -> Tensor:
    with changed(net, lambda p: p.mul_(2.0)), torch.inference_mode():
        teacher = net.loss().item()
    return (net.loss() - teacher).square()


def unrolls_an_inner_loop(net: Net) -> Tensor:
    """MAML with functional_call: fast weights are tensors with a graph."""
    fast = dict(net.net.named_parameters())
    hidden = net.frozen(net.x)
    for _ in range(3):
        inner = functional_call(net.net, fast, hidden).float().square().mean()
        slopes = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
        fast = {name: p - 0.5 * slope for (name, p), slope in zip(fast.items(), slopes, strict=True)}
    return functional_call(net.net, fast, hidden).float().square().mean()


def changes_between_two_backwards(net: Net) -> Tensor:
    """A recomputed forward of an activation checkpoint has the weights of that moment, not those of a cast before."""
    hidden = net.frozen(net.x).requires_grad_()
    net.net[0].weight.data.add_(0.5)
    first = checkpoint(net.net, hidden, use_reentrant=False).float().square().mean()
    net.net[0].weight.data.sub_(0.25)
    first.backward()
    return checkpoint(net.net, hidden, use_reentrant=True).float().square().mean()


def runs_a_recurrent_net(net: Net) -> Tensor:
    x = net.x[:, None].expand(-1, 4, -1)
    first = net.lstm(x)[0].float().square().mean()
    net.lstm.weight_hh_l0.data.mul_(0.5)
    return first + net.lstm(x)[0].float().square().mean()


def loads_other_weights(net: Net) -> Tensor:
    first = net.loss()
    state = copy.deepcopy(net.state_dict())
    net.load_state_dict({name: value + 0.5 for name, value in state.items()})
    second = net.loss()
    net.load_state_dict(state)
    return first + second + net.loss()


def freezes_in_turn(net: Net) -> Tensor:
    """As in a GAN's loop."""
    net.net.requires_grad_(False)
    net.frozen.requires_grad_(True)
    first = net.loss()
    net.net.requires_grad_(True)
    net.frozen.requires_grad_(False)
    with torch.no_grad():
        net.net[0].weight.add_(0.25)
    return first + net.loss()


CHANGES: list[Step] = [
    changes_in_place,
    changes_through_data,
    changes_one_element_of_a_frozen_weight,
    evaluates_forwards_only,
    evaluates_in_inference_mode,
    unrolls_an_inner_loop,
    changes_between_two_backwards,
    pytest.param(runs_a_recurrent_net, marks=needs_16_bit_lstm),
    loads_other_weights,
    freezes_in_turn,
]

# What these cover computes as under autocast anyway: what a policy does to casts is all there is to see.
POLICIES = {"no policy": None, "modules": {"net.0": "low", "net.1": "fp32"}}


def batches(count: int = 2) -> list[Tensor]:
    return list(torch.randn(count, 8, WIDTH, generator=torch.Generator().manual_seed(1)))


def run(plugin: Any, step: Step, **arguments: Any) -> Net:
    net = Evaluated(step)
    trainer = fit(net, batches(), plugin=plugin, validation=batches(1), num_sanity_val_steps=1, **arguments)
    trainer.test(net, loader(batches(1)), verbose=False)
    trainer.predict(net, loader(batches(1)))
    return net


def assert_same(ours: Net, stock: Net) -> None:
    assert ours.losses == stock.losses
    assert ours.evaluated == stock.evaluated
    assert ours.gradients
    assert all(torch.equal(a, b) for a, b in zip(ours.gradients, stock.gradients, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), stock.parameters(), strict=True))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("step", CHANGES, ids=lambda step: step.__name__)
def test_what_is_changed_inside_of_a_step_is_seen(step: Step, policy: str) -> None:
    stock = run(UncachedAutocast("bf16-mixed", "cpu"), step)
    assert_same(run(AutocastPrecision("bf16-mixed", policy=POLICIES[policy]), step), stock)  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [changes_in_place, changes_through_data], ids=lambda step: step.__name__)
def test_layers_that_fp8_leaves_out_are_cast_at_each_use(step: Step) -> None:
    pytest.importorskip("torchao")

    class WithAnFp8Layer(Net):
        def __init__(self, step: Step) -> None:
            super().__init__(step)
            self.unused = nn.Linear(WIDTH, WIDTH)

    def fitted(plugin: Any) -> Net:
        net = WithAnFp8Layer(step)
        fit(net, batches(), plugin=plugin)
        return net

    ours = fitted(Float8Precision(emulate=True, skip_small=False, skip=["net", "frozen"], skip_first_and_last=False))
    assert_same(ours, fitted(UncachedAutocast("bf16-mixed", "cpu")))


@pytest.mark.parametrize("mode", ["eager", "aot_eager"])
@pytest.mark.quick_cases(1)
def test_compiled_layers_see_what_is_changed(mode: str) -> None:
    def compiled(net: Net) -> Tensor:
        if not hasattr(net, "compiled"):
            object.__setattr__(net, "compiled", torch.compile(net.net, backend=mode, fullgraph=True))
        first = net.compiled(net.x)
        net.net[0].weight.data.add_(0.5)
        return (first + net.compiled(net.x)).float().square().mean()

    torch._dynamo.reset()
    ours = run(AutocastPrecision("bf16-mixed"), compiled)
    torch._dynamo.reset()
    assert_same(ours, run(UncachedAutocast("bf16-mixed", "cpu"), compiled))


class Sharded(Net):
    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            fully_shard(self.net)
            fully_shard(self)


def changes_its_part(net: Net) -> Tensor:
    """On two ranks: whole weights, or this rank's part of them."""
    first = net.net(net.x).float().square().mean()
    with torch.no_grad():
        for p in net.net.parameters():
            p.add_(0.125)
    return first + net.net(net.x).float().square().mean()


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_ranks_see_what_is_changed(kind: str) -> None:
    def trained(plugin: Any) -> tuple[list[float], list[Tensor]]:
        net = Sharded(changes_its_part)
        del net.lstm, net.frozen
        strategy: Any = DDPStrategy if kind == "ddp" else ModelParallelStrategy
        fit(net, batches(), strategy=strategy(process_group_backend="gloo"), devices=2, plugin=plugin)
        whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in net.parameters()]
        return net.losses, [p.detach().clone() for p in whole]

    def both(rank: int) -> Any:
        return trained(AutocastPrecision("bf16-mixed")), trained(UncachedAutocast("bf16-mixed", "cpu"))

    for ours, stock in run_ranks(both, 2):
        assert ours[0] == stock[0]
        assert all(torch.equal(a, b) for a, b in zip(ours[1], stock[1], strict=True))


# -- torch's cache, which is a choice ----------------------------------------------------------------------------------


def uses(times: int) -> Step:
    def step(net: Net) -> Tensor:
        return torch.stack([(net.net(net.x + use).float() - use).square().mean() for use in range(times)]).sum()

    return step


def error(found: Net, exact: Net) -> float:
    flat, reference = (torch.cat([g.flatten() for g in net.gradients[:4]]) for net in (found, exact))
    return float((flat - reference).norm() / reference.norm())


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("times", [1, 2, 16])
def test_gradients_of_several_uses_are_summed_in_fp32(times: int, policy: str) -> None:
    """D63."""
    stock = run(UncachedAutocast("bf16-mixed", "cpu"), uses(times))
    plugin = AutocastPrecision("bf16-mixed", policy=POLICIES[policy])  # type: ignore[arg-type]
    assert_same(run(plugin, uses(times)), stock)


def test_the_cache_costs_what_the_documentation_says() -> None:
    exact, default = run(None, uses(16)), run(AutocastPrecision("bf16-mixed"), uses(16))
    cached = run(AutocastPrecision("bf16-mixed", cache_weights=True), uses(16))
    assert error(default, exact) < 0.7 * error(cached, exact)
    stale = run(AutocastPrecision("bf16-mixed", cache_weights=True), changes_through_data)
    assert stale.losses != run(UncachedAutocast("bf16-mixed", "cpu"), changes_through_data).losses


class Casts(TorchDispatchMode):
    """Counts the casts to bf16 of one tensor."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.tensor, self.count = tensor, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and out.dtype == torch.bfloat16:
            self.count += args[0].untyped_storage().data_ptr() == self.tensor.untyped_storage().data_ptr()
        return out


@pytest.mark.parametrize(("cache_weights", "count"), [(False, 3), (True, 1)])
@pytest.mark.parametrize("policy", POLICIES)
def test_how_often_a_weight_is_cast_in_a_step(cache_weights: bool, count: int, policy: str) -> None:
    def step(net: Net) -> Tensor:
        with Casts(net.net[0].weight) as casts:
            loss = uses(3)(net)
        assert casts.count == count
        return loss

    plugin = AutocastPrecision("bf16-mixed", cache_weights=cache_weights, policy=POLICIES[policy])  # type: ignore[arg-type]
    fit(Net(step), batches(), plugin=plugin)


def uses_of_frozen(net: Net) -> Tensor:
    return net.net(net.frozen(net.x) + net.frozen(-net.x) + net.frozen(2 * net.x)).float().square().mean()


@pytest.mark.parametrize(
    ("plugin", "dtype", "count"),
    [
        (lambda: UncachedAutocast("bf16-mixed", "cpu"), torch.float32, 3),
        (lambda: AutocastPrecision("bf16-mixed"), torch.float32, 3),
        (lambda: AutocastPrecision("bf16-mixed"), torch.bfloat16, 0),
    ],
    ids=["stock", "ours", "ours-bf16"],
)
def test_only_a_frozen_weight_in_16_bit_is_never_cast(
    plugin: Callable[[], Any], dtype: torch.dtype, count: int
) -> None:
    """D50."""
    counts = []

    def step(net: Net) -> Tensor:
        with Casts(net.frozen.weight) as casts:
            loss = uses_of_frozen(net)
        counts.append(casts.count)
        return loss

    net = Net(step)
    net.frozen.to(dtype)
    fit(net, batches(), plugin=plugin())
    assert counts == [count, count]


@pytest.mark.parametrize("cache_weights", [True, False])
def test_the_context_for_manual_use_says_the_same(cache_weights: bool) -> None:
    plugin = AutocastPrecision("bf16-mixed", device="cpu", cache_weights=cache_weights)
    with plugin.autocast_context_manager():
        assert torch.is_autocast_cache_enabled() == cache_weights


def test_the_contexts_left_after_a_run_say_the_same() -> None:
    plugin = AutocastPrecision("bf16-mixed")
    fit(Net(Net.loss), batches(), plugin=plugin)
    with plugin.forward_context():
        assert not torch.is_autocast_cache_enabled()
