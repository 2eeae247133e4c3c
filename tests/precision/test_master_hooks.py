"""Master weights under any optimizer, without a Trainer."""

import copy
from typing import Any

import pytest
import torch
from master_loops import OPTIMIZERS, MastersByHand
from torch import Tensor, nn

from lightning_mp.precision.masters.loaded_masters import MASTER_KEY
from lightning_mp.precision.masters.optimizer_hooks import MasterHooks
from lightning_mp.precision.masters.store import FullMasters, MasterStore, RemainderMasters

STORES = [FullMasters, RemainderMasters]
STEPS = 12


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))


def backward(module: nn.Module, step: int) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16)
    module(x).float().square().mean().backward()


class Hooked:
    """A bf16 net whose optimizer has masters."""

    def __init__(self, optimizer: Any, store: type[MasterStore] = FullMasters) -> None:
        self.module = net()
        values = [p.detach().clone() for p in self.module.parameters()]
        self.module.to(torch.bfloat16)
        self.store = store()
        for parameter, value in zip(self.module.parameters(), values, strict=True):
            self.store.set(parameter, value)
        self.optimizer = optimizer(self.module.parameters())
        self.hooks = MasterHooks(self.optimizer, self.store)

    @property
    def masters(self) -> list[Tensor]:
        return [self.store.get(p).detach().clone() for p in self.module.parameters()]

    def train(self, steps: range) -> "Hooked":
        for step in steps:
            self.optimizer.zero_grad()
            backward(self.module, step)
            self.optimizer.step()
        return self


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_sees_nothing_but_fp32(name: str, store: type[MasterStore]) -> None:
    """Bit-identical to the same optimizer over fp32 copies that were made by hand."""
    reference_module = net()
    storage = "fp32" if store is FullMasters else "remainder"
    reference = MastersByHand(reference_module, torch.bfloat16, OPTIMIZERS[name], storage)
    for step in range(STEPS):
        backward(reference_module, step)
        reference.step()
    hooked = Hooked(OPTIMIZERS[name], store).train(range(STEPS))
    for ours, theirs in zip(hooked.masters, reference.masters, strict=True):
        assert torch.equal(ours, theirs.detach())
    for parameter, theirs in zip(hooked.module.parameters(), reference.parameters, strict=True):
        assert torch.equal(parameter, theirs)
    for parameter, state in hooked.optimizer.state.items():
        assert parameter.dtype == torch.bfloat16
        assert {v.dtype for v in state.values() if isinstance(v, Tensor)} <= {torch.float32}


@pytest.mark.parametrize("store", STORES)
def test_parameters_and_groups_are_as_they_were(store: type[MasterStore]) -> None:
    hooked = Hooked(OPTIMIZERS["adamw_foreach"], store)
    parameters = list(hooked.module.parameters())
    groups = hooked.optimizer.param_groups
    lists = [group["params"] for group in groups]
    settings = copy.deepcopy([{k: v for k, v in group.items() if k != "params"} for group in groups])
    hooked.train(range(2))
    assert hooked.optimizer.param_groups is groups
    assert all(group["params"] is before for group, before in zip(groups, lists, strict=True))
    assert [id(p) for group in groups for p in group["params"]] == [id(p) for p in parameters]
    assert [{k: v for k, v in group.items() if k != "params"} for group in groups] == settings
    assert set(map(id, hooked.optimizer.state)) == set(map(id, parameters))
    assert all(p.dtype == p.grad.dtype == torch.bfloat16 for p in parameters)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("as_keyword", [False, True])
def test_a_closure_meets_16_bit_weights(store: type[MasterStore], as_keyword: bool) -> None:
    with_closure, without = Hooked(OPTIMIZERS["adamw_foreach"], store), Hooked(OPTIMIZERS["adamw_foreach"], store)
    seen: list[Any] = []

    def closure() -> float:
        seen.append({p.dtype for group in with_closure.optimizer.param_groups for p in group["params"]})
        with_closure.optimizer.zero_grad()
        backward(with_closure.module, len(seen) - 1)
        return 0.25

    for _ in range(3):
        result = with_closure.optimizer.step(closure=closure) if as_keyword else with_closure.optimizer.step(closure)
        assert result == 0.25
    assert seen == [{torch.bfloat16}] * 3
    without.train(range(3))
    assert all(torch.equal(a, b) for a, b in zip(with_closure.masters, without.masters, strict=True))


def test_a_closure_that_raises_leaves_16_bit_weights() -> None:
    hooked = Hooked(OPTIMIZERS["adamw_foreach"]).train(range(1))
    before = hooked.masters

    def closure() -> None:
        raise KeyError("no batch")

    for _ in range(2):
        with pytest.raises(KeyError):
            hooked.optimizer.step(closure)
        assert {p.dtype for group in hooked.optimizer.param_groups for p in group["params"]} == {torch.bfloat16}
    assert all(torch.equal(a, b) for a, b in zip(hooked.masters, before, strict=True))


def test_an_optimizer_that_calls_its_closure_often() -> None:
    """Between the calls the weights move: the 16-bit ones too."""
    hooked = Hooked(lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=4))
    losses = []

    def closure() -> Tensor:
        hooked.optimizer.zero_grad()
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
        loss = hooked.module(x).float().square().mean()
        loss.backward()
        losses.append(loss.item())
        return loss

    hooked.optimizer.step(closure)
    assert len(losses) >= 4
    assert losses[-1] < losses[0]
    assert {p.dtype for p in hooked.module.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("store", STORES)
def test_an_exception_in_the_step_leaves_16_bit_weights(store: type[MasterStore]) -> None:
    class Breaks(torch.optim.SGD):
        broken = True

        def step(self, closure: Any = None) -> Any:
            if self.broken:
                raise KeyError("broken")
            return super().step(closure)

    hooked = Hooked(lambda p: Breaks(p, lr=1e-2), store)
    backward(hooked.module, 0)
    before = hooked.masters
    with pytest.raises(KeyError):
        hooked.optimizer.step()
    hooked.hooks.swap_out()
    assert {p.dtype for group in hooked.optimizer.param_groups for p in group["params"]} == {torch.bfloat16}
    assert all(torch.equal(a, b) for a, b in zip(hooked.masters, before, strict=True))
    hooked.optimizer.broken = False
    hooked.optimizer.step()
    assert not torch.equal(hooked.masters[0], before[0])


def test_a_step_after_an_exception_that_nobody_cleaned_up_is_right() -> None:
    """Above all it must not step with gradients of the step that raised."""

    class BreaksOnce(torch.optim.SGD):
        steps = 0

        def step(self, closure: Any = None) -> Any:
            self.steps += 1
            if self.steps == 1:
                raise KeyError("broken")
            return super().step(closure)

    hooked = Hooked(lambda p: BreaksOnce(p, lr=1e-2))
    before = hooked.masters
    backward(hooked.module, 0)
    with pytest.raises(KeyError):
        hooked.optimizer.step()
    hooked.module.zero_grad()
    hooked.module[2](torch.ones(1, 16).to(torch.bfloat16)).float().sum().backward()
    hooked.optimizer.step()
    after = hooked.masters
    assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [True, True, False, False]
    assert torch.equal(after[2], before[2] - 1e-2)


@pytest.mark.parametrize("store", STORES)
def test_a_step_around_the_parents_step_is_one_step(store: type[MasterStore]) -> None:
    """torch calls the hooks of both; what the subclass does before and after must meet masters, too."""

    class Around(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            loss = closure() if closure is not None else None
            parameters = self.param_groups[0]["params"]
            for p in parameters:
                p.grad.sub_(p.grad.mean())
            super().step()
            for p in parameters:
                p.mul_(1 - 1e-5)
            return loss

    torch.optim.SGD(net().parameters(), lr=1e-3)  # from here on torch has hooked the parent's step
    reference_module = net()
    storage = "fp32" if store is FullMasters else "remainder"
    reference = MastersByHand(reference_module, torch.bfloat16, lambda p: Around(p, lr=1e-2), storage)
    for step in range(4):
        backward(reference_module, step)
        reference.step()

    hooked = Hooked(lambda p: Around(p, lr=1e-2), store).train(range(2))
    for step in (2, 3):

        @torch.enable_grad()
        def closure(step: int = step) -> float:
            hooked.optimizer.zero_grad()
            backward(hooked.module, step)
            return 0.5

        assert hooked.optimizer.step(closure) == 0.5
        assert {p.dtype for group in hooked.optimizer.param_groups for p in group["params"]} == {torch.bfloat16}
    for ours, theirs in zip(hooked.masters, reference.masters, strict=True):
        assert torch.equal(ours, theirs.detach())


def test_an_optimizer_with_a_list_of_its_own_is_refused() -> None:
    class Keeps(torch.optim.SGD):
        def __init__(self, parameters: Any, lr: float) -> None:
            super().__init__(parameters, lr=lr)
            self.mine = list(self.param_groups[0]["params"])

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for p in self.mine:
                p.sub_(p.grad, alpha=1e-2)

    hooked = Hooked(lambda p: Keeps(p, lr=1e-2))
    with pytest.raises(
        RuntimeError, match="cannot be used with Keeps, which changed 4 16-bit weights.*Use AutocastPrecision"
    ):
        hooked.train(range(1))
    assert {p.dtype for group in hooked.optimizer.param_groups for p in group["params"]} == {torch.bfloat16}


def test_parameters_without_a_gradient_and_frozen_ones_are_left_alone() -> None:
    hooked = Hooked(OPTIMIZERS["adamw_foreach"])
    hooked.module[0].weight.requires_grad_(False)
    before = hooked.masters
    versions = [p._version for p in hooked.module.parameters()]
    hooked.module[2](torch.ones(1, 16).to(torch.bfloat16)).float().sum().backward()
    hooked.optimizer.step()
    after = hooked.masters
    assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [True, True, False, False]
    assert len(hooked.optimizer.state) == 2
    written = [p._version - v for p, v in zip(hooked.module.parameters(), versions, strict=True)]
    assert written == [0, 0, 1, 1], "the others are not even written anew"


def test_a_parameter_that_joins_later_gets_a_master() -> None:
    hooked = Hooked(OPTIMIZERS["sgd"])
    late = nn.Parameter(torch.ones(3).to(torch.bfloat16))
    hooked.optimizer.add_param_group({"params": [late], "lr": 1e-4, "weight_decay": 0.0})
    for _ in range(10):
        late.grad = torch.ones(3).to(torch.bfloat16)
        hooked.optimizer.step()
        hooked.optimizer.zero_grad()
    # Momentum 0.9, ten steps of 1e-4 along a constant gradient.
    assert hooked.store.get(late)[0].item() == pytest.approx(1 - 1e-4 * sum(10 * (1 - 0.9**n) for n in range(1, 11)))


def test_sparse_gradients() -> None:
    embedding = nn.Embedding(10, 4, sparse=True).to(torch.bfloat16)
    optimizer, store = torch.optim.SparseAdam(embedding.parameters(), lr=1e-3), FullMasters()
    store.set(embedding.weight, torch.ones(10, 4))
    MasterHooks(optimizer, store)
    for _ in range(3):
        optimizer.zero_grad()
        embedding(torch.tensor([1, 3])).float().sum().backward()
        optimizer.step()
    moved = (store.get(embedding.weight) != 1).any(1)
    assert moved.nonzero().flatten().tolist() == [1, 3]
    assert store.get(embedding.weight)[1, 0].item() == pytest.approx(1 - 3e-3, abs=1e-6)


# -- checkpoints -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loaded_into", STORES)
@pytest.mark.parametrize("saved_from", STORES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_resuming_is_bit_exact(
    name: str, saved_from: type[MasterStore], loaded_into: type[MasterStore], tmp_path: Any
) -> None:
    """Through a file that `weights_only=True` reads, from one storage to the other."""
    straight = Hooked(OPTIMIZERS[name], saved_from).train(range(STEPS))

    first = Hooked(OPTIMIZERS[name], saved_from).train(range(5))
    torch.save({"model": first.module.state_dict(), "optimizer": first.optimizer.state_dict()}, tmp_path / "x.pt")
    saved = torch.load(tmp_path / "x.pt", weights_only=True)
    second = Hooked(OPTIMIZERS[name], loaded_into)
    second.module.load_state_dict(saved["model"])
    second.optimizer.load_state_dict(saved["optimizer"])
    assert all(torch.equal(a, b) for a, b in zip(first.masters, second.masters, strict=True))
    second.train(range(5, STEPS))
    assert all(torch.equal(a, b) for a, b in zip(straight.masters, second.masters, strict=True))
    for ours, theirs in zip(second.optimizer.state.values(), straight.optimizer.state.values(), strict=True):
        for key, value in theirs.items():
            assert torch.equal(ours[key], value) if isinstance(value, Tensor) else ours[key] == value


def test_the_state_dict_is_torchs_and_the_masters() -> None:
    hooked = Hooked(OPTIMIZERS["adam"]).train(range(2))
    own = {id(state) for state in hooked.optimizer.state.values()}
    state_dict = hooked.optimizer.state_dict()
    assert {frozenset(entry) for entry in state_dict["state"].values()} == {
        frozenset({"step", "exp_avg", "exp_avg_sq", MASTER_KEY})
    }
    assert {entry[MASTER_KEY].dtype for entry in state_dict["state"].values()} == {torch.float32}
    assert all(MASTER_KEY not in state for state in hooked.optimizer.state.values() if id(state) in own)


def test_masters_of_an_optimizer_without_state_are_saved() -> None:
    hooked = Hooked(lambda p: torch.optim.SGD(p, lr=1e-2)).train(range(1))
    assert [set(entry) for entry in hooked.optimizer.state_dict()["state"].values()] == [{MASTER_KEY}] * 4


def test_the_state_of_an_fp32_run_is_loaded_unrounded() -> None:
    """torch casts moments to the dtype of the parameters, which are bf16 here."""
    fp32 = net()
    optimizer = OPTIMIZERS["adam"](fp32.parameters())
    for step in range(3):
        optimizer.zero_grad()
        fp32(torch.randn(4, 8, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
    state_dict = optimizer.state_dict()
    hooked = Hooked(OPTIMIZERS["adam"])
    masters = hooked.masters
    hooked.optimizer.load_state_dict(state_dict)
    for ours, theirs in zip(hooked.optimizer.state.values(), state_dict["state"].values(), strict=True):
        assert torch.equal(ours["exp_avg"], theirs["exp_avg"])
        assert torch.equal(ours["exp_avg_sq"], theirs["exp_avg_sq"])
    assert all(torch.equal(a, b) for a, b in zip(hooked.masters, masters, strict=True))
    assert all(MASTER_KEY not in entry for entry in state_dict["state"].values())


def test_loading_leaves_the_callers_dictionary_alone() -> None:
    hooked = Hooked(OPTIMIZERS["adam"]).train(range(2))
    state_dict = hooked.optimizer.state_dict()
    hooked.optimizer.load_state_dict(state_dict)
    assert all(MASTER_KEY in entry for entry in state_dict["state"].values())


def test_masters_of_another_model_give_way_to_its_weights() -> None:
    trained = Hooked(OPTIMIZERS["sgd"]).train(range(STEPS))
    fresh = Hooked(OPTIMIZERS["sgd"])
    weights = [p.detach().clone() for p in fresh.module.parameters()]
    with pytest.warns(UserWarning, match="weights in 4 of 4 parameters; there the model's weights are used"):
        fresh.optimizer.load_state_dict(trained.optimizer.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(weights, fresh.module.parameters(), strict=True))


def test_removed_hooks_do_nothing() -> None:
    hooked = Hooked(OPTIMIZERS["adam"])
    hooked.hooks.remove()
    hooked.train(range(1))
    assert {state["exp_avg"].dtype for state in hooked.optimizer.state.values()} == {torch.bfloat16}
    assert all(MASTER_KEY not in entry for entry in hooked.optimizer.state_dict()["state"].values())
