"""Any optimizer over masters is the same optimizer over fp32 copies that were made by hand, whatever it keeps."""

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from master_loops import MastersByHand, masters_of, train_by_hand
from small_models import Regression, fit, loader, quiet_trainer, regression_batches
from third_party_optimizers import THIRD_PARTY, ScheduleFree
from torch import Tensor, nn

from lightning_mp import LossScaler, MasterWeightsPrecision
from lightning_mp.precision.masters.optimizer_hooks import MasterHooks
from lightning_mp.precision.masters.store import FullMasters, MasterStore, RemainderMasters

# They evaluate the loss themselves, or want sparse gradients: each has its own test.
_OTHERS = ("LBFGS", "SparseAdam")


def torch_optimizers() -> dict[str, Callable[..., torch.optim.Optimizer]]:
    """All that torch has, by the kernels that each of them has."""
    found = {}
    for name, kind in sorted(vars(torch.optim).items()):
        if not (inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)):
            continue
        if kind is torch.optim.Optimizer or name in _OTHERS:
            continue
        arguments = inspect.signature(kind).parameters
        settings: dict[str, Any] = {"momentum": 0.9} if name == "SGD" else {}
        if name == "Adagrad":
            settings["initial_accumulator_value"] = 0.1  # no 16-bit number
        found[name] = partial(kind, lr=1e-2, **settings)
        for kernel in ("foreach", "fused"):
            if kernel in arguments:
                found[f"{name}-{kernel}"] = partial(kind, lr=1e-2, **{kernel: True}, **settings)
    return found


OPTIMIZERS = torch_optimizers() | THIRD_PARTY


def net() -> nn.Sequential:
    """Matrices only, because Muon takes nothing else."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16, bias=False), nn.GELU(), nn.Linear(16, 1, bias=False))


def backward(module: nn.Module, step: int) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16)
    module(x).float().square().mean().backward()


def tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    for entry in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        yield from tensors(entry)


class Run:
    """A bf16 net with masters, and the same by hand."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer], store: type[MasterStore]) -> None:
        reference = net()
        self.by_hand = MastersByHand(reference, torch.bfloat16, make, "fp32" if store is FullMasters else "remainder")
        self.reference, self.module, self.store = reference, net(), store()
        values = [p.detach().clone() for p in self.module.parameters()]
        self.module.to(torch.bfloat16)
        # As in a Trainer: the optimizer is made over 16-bit weights, the masters come later.
        self.optimizer = make(self.module.parameters())
        for parameter, value in zip(self.module.parameters(), values, strict=True):
            self.store.set(parameter, value, is_exact_fp32=True)
        self.hooks = MasterHooks(self.optimizer, self.store)

    def train(self, steps: range) -> None:
        for step in steps:
            backward(self.reference, step)
            self.by_hand.step()
            self.optimizer.zero_grad()
            backward(self.module, step)
            self.optimizer.step()

    def check(self) -> None:
        for parameter, theirs in zip(self.module.parameters(), self.by_hand.masters, strict=True):
            assert torch.equal(self.store.get(parameter).detach(), theirs.detach())
        for parameter, working in zip(self.module.parameters(), self.by_hand.parameters, strict=True):
            assert torch.equal(parameter, working)
        state = self.optimizer.state
        assert {t.dtype for t in tensors(dict(state)) if t.is_floating_point()} <= {torch.float32}
        for ours, theirs in zip(state.values(), self.by_hand.optimizer.state.values(), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(tensors(ours), tensors(theirs), strict=True))


@pytest.mark.parametrize("store", [FullMasters, RemainderMasters])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_is_fp32_wherever_it_is_made(name: str, store: type[MasterStore]) -> None:
    run = Run(OPTIMIZERS[name], store)
    run.train(range(5))
    run.check()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_is_fp32_after_loading(name: str) -> None:
    """torch casts what it loads to the dtype of the 16-bit weights."""
    first, second = Run(OPTIMIZERS[name], FullMasters), Run(OPTIMIZERS[name], FullMasters)
    first.train(range(3))
    second.by_hand = first.by_hand
    second.reference = first.reference
    second.module.load_state_dict(first.module.state_dict())
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    second.train(range(3, 6))
    second.check()


@pytest.mark.parametrize("name", ["Adagrad", "Adagrad-fused", "state in constructor"])
@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
def test_state_made_in_the_constructor_under_a_trainer(name: str, precision: Any) -> None:
    """Adagrad's sum stayed 16 bit: weights of -inf in fp16, and an error of torch's fused kernel."""
    scaler = LossScaler(init_scale=256.0) if precision == "16-true" else None
    trainer = quiet_trainer(plugins=[MasterWeightsPrecision(precision, scaler=scaler)])
    batches = regression_batches(5)
    trainer.fit(Regression(OPTIMIZERS[name]), loader(batches))
    expected = train_by_hand(Regression(OPTIMIZERS[name]), batches, precision, scale=256.0 if scaler else 1.0)
    for ours, theirs in zip(masters_of(trainer), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6 if name.endswith("fused") and scaler else 0)


def test_an_optimizer_that_moves_weights_outside_of_steps_moves_masters() -> None:
    run = Run(ScheduleFree, FullMasters)
    run.train(range(3))
    for optimizer in (run.optimizer, run.by_hand.optimizer):
        optimizer.eval()
    averaged = [p.detach().clone() for p in run.module.parameters()]
    for ours, theirs in zip(averaged, run.by_hand.masters, strict=True):
        assert torch.equal(ours, theirs.detach().bfloat16())
    for optimizer in (run.optimizer, run.by_hand.optimizer):
        optimizer.train()
    with torch.no_grad():
        for parameter, master in zip(run.by_hand.parameters, run.by_hand.masters, strict=True):
            parameter.copy_(master)
    run.train(range(3, 6))
    run.check()
    run.hooks.remove()
    assert "eval" not in vars(run.optimizer)


def test_a_failed_load_changes_nothing() -> None:
    """Whoever raises, and wherever: the groups hold 16-bit weights all the time, and the next step is right."""
    run = Run(OPTIMIZERS["Adam"], FullMasters)
    run.train(range(2))
    good = run.optimizer.state_dict()
    other = torch.optim.Adam([torch.zeros(1) for _ in range(3)]).state_dict()

    def refuse(*_: Any) -> None:
        raise KeyError("mine")

    for register in (run.optimizer.register_load_state_dict_pre_hook, None):
        handle = register(refuse) if register is not None else None
        with pytest.raises(KeyError if handle is not None else ValueError):
            run.optimizer.load_state_dict(good if handle is not None else other)
        if handle is not None:
            handle.remove()
        assert {p.dtype for group in run.optimizer.param_groups for p in group["params"]} == {torch.bfloat16}
    run.train(range(2, 4))
    run.check()


def test_a_step_after_a_failed_load_takes_true_gradients() -> None:
    """Masters that were left in the groups took gradients times the loss scale."""

    class Loads(Regression):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                with pytest.raises(ValueError, match="parameter group"):
                    self.trainer.optimizers[0].load_state_dict(torch.optim.SGD(map(torch.zeros, (1, 2))).state_dict())

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1e-2)

    masters = []
    for kind in (Regression, Loads):
        plugin = MasterWeightsPrecision("16-true", scaler=LossScaler(init_scale=1024.0))
        trainer = fit(kind(sgd), regression_batches(5), plugin=plugin)
        masters.append(masters_of(trainer))
    assert all(torch.equal(a, b) for a, b in zip(*masters, strict=True))
