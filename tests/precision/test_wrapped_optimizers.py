"""Optimizers that wrap others, over masters: the state of both lasts, and is what it is over fp32 weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from master_loops import KINDS, MastersByHand, master_weights, masters_of, train_by_hand
from small_models import Regression, fit, regression_batches
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from lightning_mp.precision.masters.optimizer_hooks import MasterHooks
from lightning_mp.precision.masters.store import FullMasters, MasterStore, RemainderMasters

STORES = [FullMasters, RemainderMasters]
STEPS = 6


class Sharing(torch.optim.Optimizer):
    """Steps a base optimizer over its own groups, as Lookahead and SAM do."""

    def __init__(self, parameters: Any, make_base: Callable[..., torch.optim.Optimizer]) -> None:
        super().__init__(parameters, {})
        self.base = make_base(self.param_groups)
        self.param_groups = self.base.param_groups

    @property
    def inner(self) -> torch.optim.Optimizer:
        return self.base

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("slow", p.clone())
        self.inner.step()
        for group in self.param_groups:
            for p in group["params"]:
                p.lerp_(self.state[p]["slow"], 0.25)
                self.state[p]["slow"].copy_(p)
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "base": self.inner.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.inner.param_groups = self.param_groups
        self.inner.load_state_dict(state_dict["base"])
        self.param_groups = self.inner.param_groups


class Hiding(Sharing):
    """Keeps its base optimizer where nobody finds it."""

    def __init__(self, parameters: Any, make_base: Callable[..., torch.optim.Optimizer]) -> None:
        super().__init__(parameters, make_base)
        self.bases = [self.base]
        del self.base

    @property
    def inner(self) -> torch.optim.Optimizer:
        return self.bases[0]


BASES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, initial_accumulator_value=0.1),  # state in its constructor
}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))


def backward(module: nn.Module, step: int) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16)
    module(x).float().square().mean().backward()


class Hooked:
    """A bf16 net whose optimizer has masters."""

    def __init__(self, make: Callable[..., Sharing], store: MasterStore) -> None:
        self.module, self.store = net(), store
        values = [p.detach().clone() for p in self.module.parameters()]
        self.optimizer = make(self.module.to(torch.bfloat16).parameters())
        for parameter, value in zip(self.module.parameters(), values, strict=True):
            store.set(parameter, value)
        self.hooks = MasterHooks(self.optimizer, store)

    def train(self, steps: range) -> "Hooked":
        for step in steps:
            self.optimizer.zero_grad()
            backward(self.module, step)
            self.optimizer.step()
        return self


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("depth", [1, 2])
def test_state_of_both_is_that_of_fp32_copies_by_hand(depth: int, base: str, store: type[MasterStore]) -> None:
    def make(parameters: Any) -> Sharing:
        return Sharing(parameters, BASES[base] if depth == 1 else lambda p: Sharing(p, BASES[base]))

    reference = net()
    by_hand = MastersByHand(reference, torch.bfloat16, make, "fp32" if store is FullMasters else "remainder")
    for step in range(STEPS):
        backward(reference, step)
        by_hand.step()
    hooked = Hooked(make, store()).train(range(STEPS))
    for parameter, theirs in zip(hooked.module.parameters(), by_hand.masters, strict=True):
        assert torch.equal(hooked.store.get(parameter).detach(), theirs.detach())
    innermost = hooked.optimizer.inner if depth == 1 else hooked.optimizer.inner.inner
    assert set(map(id, innermost.state)) == set(map(id, hooked.module.parameters()))


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("base", ["sgd", "adamw_fused"])
def test_state_that_nobody_finds_lasts_too(base: str, store: type[MasterStore]) -> None:
    """One entry per parameter: with a new object in each step it was lost in each, and never freed."""
    found = Hooked(lambda p: Sharing(p, BASES[base]), store()).train(range(STEPS))
    hidden = Hooked(lambda p: Hiding(p, BASES[base]), store()).train(range(STEPS))
    assert len(hidden.optimizer.inner.state) == 4
    for ours, theirs in zip(hidden.module.parameters(), found.module.parameters(), strict=True):
        assert torch.equal(hidden.store.get(ours), found.store.get(theirs))


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("base", BASES)
def test_a_wrapper_that_saves_both_states_resumes_exactly(base: str, store: type[MasterStore]) -> None:
    def make(parameters: Any) -> Sharing:
        return Sharing(parameters, BASES[base])

    straight = Hooked(make, store()).train(range(STEPS))
    first, second = Hooked(make, store()).train(range(3)), Hooked(make, store())
    second.module.load_state_dict(first.module.state_dict())
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    second.train(range(3, STEPS))
    for ours, theirs in zip(second.module.parameters(), straight.module.parameters(), strict=True):
        assert torch.equal(second.store.get(ours), straight.store.get(theirs))


@pytest.mark.parametrize("kind", [Sharing, Hiding])
@pytest.mark.parametrize(("precision", "storage"), KINDS)
def test_in_a_trainer_it_is_the_loop_by_hand(precision: str, storage: str, kind: type[Sharing]) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return kind(parameters, BASES["sgd"])

    batches = regression_batches(8)
    trainer = fit(Regression(make, overflows=(3,)), batches, plugin=master_weights(precision, storage))
    scale = 1024.0 if precision == "16-true" else 1.0
    reference = Regression(make, overflows=(3,))
    expected = train_by_hand(reference, batches, precision, scale=scale, storage=storage)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(_masters(trainer), expected, strict=True))


def _masters(trainer: Any) -> list[torch.Tensor]:
    if isinstance(trainer.optimizers[0], Hiding):
        store = trainer.precision_plugin._masters.store
        return [store.get(p).detach() for p in trainer.lightning_module.parameters()]
    return masters_of(trainer)


@pytest.mark.parametrize("store", STORES)
def test_a_sharded_master_is_the_same_object_in_every_step(store: type[MasterStore]) -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        value = distribute_tensor(torch.randn(8, 4), mesh)
        parameter = nn.Parameter(value.to(torch.bfloat16))
        masters = store()
        masters.set(parameter, value.clone())
        expected = value.to_local().clone()
        optimizer = torch.optim.SGD(masters.swap_in([parameter]), lr=0.5, momentum=0.5)
        for step in range(3):
            (master,) = masters.swap_in([parameter])
            assert master is optimizer.param_groups[0]["params"][0]
            assert torch.equal(master.to_local(), expected)
            master.grad = torch.ones_like(master)
            optimizer.step()
            master.grad = None
            expected -= 0.5 * (2 - 0.5**step)
            masters.write_back([parameter], [master])
            if store is RemainderMasters:
                assert master.to_local().untyped_storage().nbytes() == 0
        masters.set(parameter, value)
        assert masters.swap_in([parameter])[0] is optimizer.param_groups[0]["params"][0]
    finally:
        torch.distributed.destroy_process_group()
