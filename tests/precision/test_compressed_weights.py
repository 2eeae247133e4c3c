"""fp32 parameters whose memory is given away between steps: whoever touches one finds its numbers; no write is lost."""

import copy
import io
import pickle
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lent_models import FLAT, Fitted, fit, mlp, same
from lightning.pytorch.plugins.precision import Precision
from master_loops import master_weights
from small_models import loader, quiet_trainer, weights
from split_reference import EVERY_CLASS, away, bits, round_to_24_bits
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_mp import MasterWeightsPrecision
from lightning_mp.training.precision.masters.split_parameters import SplitLoan, SplitMemory, SplitParameter

STORAGES = ["remainder", "24bit"]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-2)


def compressed(storage: str = "remainder", **arguments: Any) -> MasterWeightsPrecision:
    return master_weights(storage=storage, weight_by=None, **arguments)


def kinds(module: nn.Module) -> set[type]:
    return {type(parameter) for parameter in module.parameters()}


class Flat(Fitted):
    data = FLAT

    def __init__(self, make_net: Callable[[], nn.Module] = mlp, make_optimizer: Any = adamw) -> None:
        super().__init__(make_net, make_optimizer)


# -- one parameter -----------------------------------------------------------------------------------------------------


def split_one(values: Tensor, rest_dtype: torch.dtype = torch.int16, step: int = 0) -> tuple[Any, SplitLoan]:
    parameter = nn.Parameter(values.clone())
    loan = SplitLoan(parameter, parameter.detach().bfloat16())
    loan.is_seen = True
    SplitMemory([loan], rest_dtype).compress([loan], lambda: step)
    assert type(parameter) is SplitParameter
    return parameter, loan


def test_every_number_is_found_again() -> None:
    numbers = EVERY_CLASS[~EVERY_CLASS.isnan()]
    parameter, loan = split_one(numbers)
    assert torch.equal(bits(loan.copy), bits(away(numbers)))
    assert torch.equal(bits(parameter.detach()), bits(numbers))
    assert type(parameter) is nn.Parameter
    parameter, loan = split_one(numbers, torch.int8, 3)
    assert torch.equal(bits(parameter.detach()), bits(round_to_24_bits(numbers, 3)))


ASKED = {
    "gradient": lambda p: p.grad is None,
    "sizes": lambda p: (p.shape, p.ndim, len(p), p.numel(), p.size(0)) == ((8, 8), 2, 8, 64, 8),
    "dtype": lambda p: p.dtype == torch.float32 and p.is_floating_point() and p.device.type == "cpu",
    "autograd": lambda p: p.requires_grad and p.is_leaf and p.grad_fn is None and p._version >= 0,
    "identity": lambda p: bool(hash(p)) and p in {p} and isinstance(p, nn.Parameter),
}


@pytest.mark.parametrize("name", ASKED)
def test_what_reads_no_numbers_leaves_a_parameter_without_memory(name: str) -> None:
    parameter, _ = split_one(torch.randn(8, 8))
    assert ASKED[name](parameter)
    assert type(parameter) is SplitParameter


READS: dict[str, Callable[[Any, nn.Module], Any]] = {
    "arithmetic": lambda p, _: p + 0,
    "operator": lambda p, _: torch.ops.aten.clone(p),
    "numpy": lambda p, _: torch.tensor(p.detach().numpy()),
    "data": lambda p, _: p.data.clone(),
    "list": lambda p, _: torch.tensor(p.tolist()),
    "deepcopy": lambda p, _: copy.deepcopy(p),
    "deepcopy of its module": lambda _, net: copy.deepcopy(net)[0].weight,
    "pickle": lambda p, _: pickle.loads(pickle.dumps(p)),
    "state_dict": lambda _, net: net.state_dict()["0.weight"].clone(),
    "torch.save": lambda _, net: saved(net)["0.weight"],
    "list of tensors": lambda p, _: torch._foreach_mul([p], 1.0)[0],
    "dlpack": lambda p, _: torch.from_dlpack(p.detach()).clone(),
    "vector": lambda p, _: nn.utils.parameters_to_vector([p]).view(16, 8),
    "layer": lambda p, _: F.linear(torch.eye(8), p).T,
    "functional_call": lambda p, net: (
        torch.func.functional_call(net[0], {"weight": p, "bias": torch.zeros(16)}, torch.eye(8)).T
    ),
    "compiled": lambda p, _: torch.compile(lambda q: q * 1, backend="eager")(p),
    "inside of a transform": lambda p, _: torch.func.vmap(lambda row: row + 0 * p[0])(p.detach().clone()),
    "inference": lambda p, _: torch.inference_mode()(lambda: p * 1)().clone(),
    # Last, because torch 2.15 holds what it has sent.
    "all_reduce": lambda p, _: (torch.no_grad()(dist.all_reduce)(p), p.detach().clone())[1],
}


def saved(net: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    file.seek(0)
    return torch.load(file)


def test_whoever_touches_a_parameter_finds_its_numbers() -> None:
    """In a hook of a fit; it is split again, and the run is that of a module that nobody touches."""

    class Touched(Flat):
        touched = False

        def on_train_batch_start(self, *_: Any) -> None:
            if self.global_step != 2 or self.touched:
                return
            self.touched, weight, net = True, self.net[0].weight, self.net
            again = partial(self.trainer.precision_plugin._compressed.begin_step, [])
            right = weight.detach().clone()
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            for name, read in READS.items():
                again()
                assert type(weight) is SplitParameter, name
                found = read(weight, net)
                assert torch.equal(found.detach(), right), name
                assert type(weight) is nn.Parameter, name
                del found
            dist.destroy_process_group()

    module, plain = Touched(), Flat()
    fit(module, epochs=1, plugin=compressed())
    assert module.touched
    fit(plain, epochs=1, plugin=compressed())
    assert kinds(module) == {nn.Parameter}
    assert same(weights(module), weights(plain))


def test_transforms_of_a_bare_parameter_read_nan() -> None:
    """The one known access without ``__torch_function__``; nothing stale, and writes raise."""
    parameter, _ = split_one(torch.randn(8, 8))
    assert torch.func.grad(lambda q: (q * q).sum())(parameter).isnan().all()
    with torch._C.DisableTorchFunction(), pytest.raises(RuntimeError, match="Cannot access data pointer"):
        parameter.data[0, 0].fill_(1.0)


def test_memory_that_something_else_holds_stays_whole() -> None:
    """Writes to a view, or an array of numpy, count as they do for any parameter."""
    parameter, loan = split_one(torch.ones(8, 8))
    memory: Any = loan.memory
    view = parameter.detach()
    memory.compress([loan], lambda: 0)
    assert type(parameter) is nn.Parameter
    view.fill_(4.0)
    memory.compress([loan], lambda: 0)
    assert bool((parameter == 4).all())
    array = parameter.detach().numpy()
    del view
    memory.compress([loan], lambda: 0)
    array[:] = 5.0
    assert bool((parameter == 5).all())
    del array
    memory.compress([loan], lambda: 0)
    assert type(parameter) is SplitParameter
    assert bool((parameter == 5).all())
    parameter.data = torch.full((8, 8), 6.0)
    memory.compress([loan], lambda: 0)
    assert type(parameter) is SplitParameter
    assert bool((parameter == 6).all())


# -- a run -------------------------------------------------------------------------------------------------------------


class Busy(Flat):
    """Touches its weights inside of a step, between steps and in validation, and writes to them."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + 1e-2 * sum(p.square().sum() for p in self.parameters())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("norm", F.mse_loss(self.out(batch[0]), batch[1]) + self.net[0].weight.norm())

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            self.net[0].weight.clamp_(-0.3, 0.3)
        self.net[2].weight.data.clamp_(-0.1, 0.1)


class Held(Flat):
    """An array that is older than the fit writes to a weight after each step."""

    def __init__(self) -> None:
        super().__init__(make_optimizer=lambda p: torch.optim.SGD(p, 0.1))
        self.held = self.net[0].weight.detach().numpy()

    def on_train_batch_end(self, *_: Any) -> None:
        self.held[0] = 4.0


class Transformed(Flat):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        weight = self.net[0].weight
        gradient = torch.func.grad(lambda x: F.linear(x, weight).square().sum())(batch[0])
        return super().training_step(batch, batch_idx) + 1e-3 * (gradient.detach() * batch[1]).mean()


@pytest.mark.parametrize("settings", [{}, {"accumulate_grad_batches": 3}, {"gradient_clip_val": 0.1}], ids=str)
@pytest.mark.parametrize("kind", [Flat, Busy, Held, Transformed])
def test_a_run_is_that_with_fp32_masters(kind: type[Flat], settings: dict[str, Any]) -> None:
    """No weight of these lies at a tie, where alone copies differ."""
    ends = []
    for plugin in (compressed("fp32"), compressed(), compressed("24bit")):
        module = kind()
        trainer = quiet_trainer(plugins=[plugin], max_epochs=3, val_check_interval=1, **settings)
        trainer.fit(module, loader(FLAT), loader(FLAT[:2]) if kind is Busy else None)
        ends.append(weights(module))
    assert same(ends[0], ends[1])
    assert not same(ends[0], ends[2])
    torch.testing.assert_close(ends[0], ends[2], rtol=0, atol=2e-2)


@pytest.mark.parametrize("storage", STORAGES)
def test_a_measurement_changes_nothing(storage: str) -> None:
    """Also of weights at ties, one in 256 with 24 bits, and in manual optimization."""

    class Measured(Flat):
        manual, measures = False, False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if self.measures:
                self.log("norm", sum(p.norm() for p in self.parameters()))
            if not self.manual:
                return loss
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            if self.measures:
                assert sum(p.norm() for p in self.parameters()) > 0
            return super().training_step(batch, batch_idx).detach()

        def on_train_batch_end(self, *_: Any) -> None:
            if self.measures:
                assert sum(p.norm() for p in self.parameters()) > 0

    for manual in (False, True):
        ends = []
        for measures in (False, True):
            module = Measured(lambda: nn.Sequential(nn.Linear(8, 256), nn.GELU(), nn.Linear(256, 8)))
            module.manual, module.measures, module.automatic_optimization = manual, measures, not manual
            fit(module, plugin=compressed(storage))
            ends.append(weights(module))
        assert same(*ends)


def allocated_bytes(module: pl.LightningModule, trainer: pl.Trainer) -> float:
    """Of parameters, gradients, copies, rests and moments, per parameter."""
    lent = trainer.precision_plugin._lent
    held = [*module.parameters(), *(p.grad for p in module.parameters())]
    with torch._C.DisableTorchFunction():
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in held if t is not None}
    tensors = [loan.copy for loan in lent.loans]
    tensors += [loan.memory.split.rest for loan in lent.loans if getattr(loan, "memory", None) is not None]
    tensors += [t for state in trainer.optimizers[0].state.values() for t in state.values() if t.ndim]
    storages |= {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values()) / sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(("storage", "expected"), [("fp32", 16), ("remainder", 14), ("24bit", 13)])
def test_bytes_per_parameter_between_steps(storage: str, expected: int) -> None:
    """Weight and copy, gradient, rest, and two moments; validation and logging of gradients give nothing back."""
    seen = []

    class Counted(Flat):
        def on_before_zero_grad(self, optimizer: Any) -> None:
            if self.global_step:
                assert sum(p.grad.norm() for p in self.parameters()) > 0
                seen.append(allocated_bytes(self, self.trainer))

    module = Counted(lambda: nn.Sequential(nn.Linear(8, 512), nn.Linear(512, 8, bias=False)))
    fit(module, plugin=compressed(storage))
    assert seen == [pytest.approx(expected, abs=0.02)] * len(seen)
    assert len(seen) > 5


@pytest.mark.parametrize("added", ["group", "unfrozen", "used late"])
def test_a_layer_that_joins_late_is_split_from_then_on(added: str) -> None:
    kinds_seen: list[type] = []

    class Late(Flat):
        def __init__(self) -> None:
            super().__init__(lambda: nn.ModuleList([mlp(), nn.Linear(8, 8)]))
            if added == "unfrozen":
                self.net[1].requires_grad_(False)

        def out(self, x: Tensor) -> Tensor:
            out: Tensor = self.net[0](x)
            is_late = added == "used late" and self.current_epoch == 0
            return out if is_late else self.net[1](out)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.net[0].parameters() if added == "group" else self.parameters(), 0.1)

        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.net[1].requires_grad_(True)
                if added == "group":
                    self.trainer.optimizers[0].add_param_group({"params": list(self.net[1].parameters())})

        def on_train_batch_end(self, *_: Any) -> None:
            kinds_seen.append(type(self.net[1].weight))

    ends = []
    for storage in ("fp32", "remainder"):
        module = Late()
        fit(module, plugin=compressed(storage))
        ends.append(weights(module))
    assert same(*ends)
    own = kinds_seen[-12:]
    assert own == [nn.Parameter] * 6 + [SplitParameter] * 6


@pytest.mark.parametrize("by_data", [False, True])
def test_a_forward_that_begins_to_write_to_its_weights_late(by_data: bool) -> None:
    class Late(nn.Linear):
        steps = 0

        def forward(self, x: Tensor) -> Tensor:
            self.steps += self.training
            if self.steps > 2:
                with torch.no_grad():
                    (self.weight.data if by_data else self.weight)[0].zero_()
            return super().forward(x)

    modules = [
        Flat(lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU(), Late(8, 8)), lambda p: torch.optim.SGD(p, 0.1))
        for _ in range(2)
    ]
    fit(modules[1], plugin=Precision())
    if by_data:  # no version shows it: what is written keeps a rest, below half the last bit of bf16
        fit(modules[0], plugin=compressed())
    else:
        with pytest.warns(UserWarning, match="forward writes to net.2.weight"):
            fit(modules[0], plugin=compressed())
    torch.testing.assert_close(weights(modules[0]), weights(modules[1]), rtol=0, atol=5e-3)


@pytest.mark.parametrize("make", [adamw, lambda p: torch.optim.AdamW(p, 1e-2, fused=True)], ids=["foreach", "fused"])
def test_gradients_lie_as_their_parameters_do(make: Any) -> None:
    """Kernels read both as they lie; autograd lays a gradient out like the parameter, which has no memory."""

    def net() -> nn.Module:
        layers = (nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 4, 3, padding=1), nn.GELU(), nn.Conv2d(4, 2, 3, padding=1))
        return nn.Sequential(*layers, nn.Flatten()).to(memory_format=torch.channels_last)

    ends = []
    for storage in ("fp32", "remainder"):
        for observed in (False, True):
            module = Flat(net, make)
            if observed:
                module.on_before_optimizer_step = lambda optimizer: None  # type: ignore[method-assign]
            fit(module, plugin=compressed(storage))
            assert module.net[1].weight.stride() == (18, 1, 6, 2)
            ends.append(weights(module))
    assert all(same(ends[0], end) for end in ends)


def test_a_backward_through_a_graph_that_is_older_than_a_step_raises() -> None:
    class Old(Flat):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer, loss = self.optimizers(), super().training_step(batch, batch_idx)
            self.manual_backward(loss, retain_graph=True)
            optimizer.step()  # type: ignore[union-attr]
            self.manual_backward(loss)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        fit(Old(), plugin=compressed())


# -- checkpoints, refusals, cost ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("second", ["fp32", "remainder", "24bit", "32-true"])
@pytest.mark.parametrize("first", ["remainder", "24bit", "32-true"])
def test_every_storage_resumes_every_other(first: str, second: str, tmp_path: Path) -> None:
    """Weights are fp32 under Lightning's keys; a storage resumes itself to the bit, 24 bits with the same noise."""

    def plugin(storage: str) -> Any:
        return Precision() if storage == "32-true" else compressed(storage)

    def wide() -> Flat:
        return Flat(lambda: nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)))

    trainer = fit(wide(), plugin=plugin(first))
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    content = torch.load(tmp_path / "x.ckpt", weights_only=True)
    assert {value.dtype for value in content["state_dict"].values()} == {torch.float32}
    began, first_kinds = [], []

    class Resumed(Flat):
        def on_train_start(self) -> None:
            began.extend(weights(self))

        def on_before_zero_grad(self, optimizer: Any) -> None:
            first_kinds.append(kinds(self))

    module: Any = wide()
    module.__class__ = Resumed
    resuming = quiet_trainer(plugins=[plugin(second)], max_epochs=4)
    torch.manual_seed(7)
    resuming.fit(module, loader(FLAT), ckpt_path=tmp_path / "x.ckpt")
    assert all(torch.equal(a, b) for a, b in zip(began, content["state_dict"].values(), strict=True))
    is_known = {first, second} <= set(STORAGES)  # that forward writes to no weight, from the first step on
    assert first_kinds[0] == ({SplitParameter} if is_known else {nn.Parameter})
    if first == second:
        whole = wide()
        fit(whole, epochs=4, plugin=plugin(first))
        assert same(weights(whole), weights(module))


def test_a_checkpoint_inside_of_the_run_holds_the_same(tmp_path: Path) -> None:
    class Saving(Flat):
        def on_train_batch_end(self, *_: Any) -> None:
            self.trainer.save_checkpoint(tmp_path / f"{self.trainer.precision_plugin.storage}-{self.global_step}.ckpt")

    for storage in ("fp32", "remainder"):
        fit(Saving(), epochs=1, plugin=compressed(storage))
    for step in range(1, 7):
        first, second = (torch.load(tmp_path / f"{s}-{step}.ckpt", weights_only=True) for s in ("fp32", "remainder"))
        assert same(list(first["state_dict"].values()), list(second["state_dict"].values()))


def test_a_micro_batch_costs_few_calls_per_weight() -> None:
    """fp32 masters take 18.5 with AdamW, plain fp32 weights 13.5."""

    def calls(layers: int, storage: str) -> int:
        counts = [0]

        class Deep(Flat):
            def on_train_batch_start(self, *_: Any) -> None:
                if self.global_step == 4:
                    sys.setprofile(lambda frame, event, arg: counts.append(event == "call"))

            def on_train_batch_end(self, *_: Any) -> None:
                sys.setprofile(None)

        net = [nn.Linear(8, 8) for _ in range(layers)]
        fit(Deep(lambda: nn.Sequential(*net)), epochs=1, plugin=compressed(storage))
        return sum(counts)

    each = {storage: (calls(60, storage) - calls(10, storage)) / 100 for storage in ("fp32", "remainder")}
    assert each["fp32"] <= 22
    assert each["remainder"] < 23
    assert each["remainder"] - each["fp32"] <= 5


@pytest.mark.filterwarnings("ignore:SGD.step.. was called on the optimizer itself")
@pytest.mark.parametrize("past", [False, True], ids=["through the plugin", "past it"])
def test_tiny_updates_add_up_whoever_makes_the_steps(past: bool) -> None:
    """24 bits: each step rounds with another noise; after one past the plugin weights stay whole."""
    update, steps = 2.0**-17, 512

    class Creeps(pl.LightningModule):
        automatic_optimization = False

        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(64, 1, bias=False)
            nn.init.ones_(self.net.weight)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(-self.net(batch).sum())
            (optimizer.optimizer if past else optimizer).step()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=update)

    module = Creeps()
    quiet_trainer(plugins=[compressed("24bit")]).fit(module, loader([torch.ones(1, 64)] * steps))
    assert float((module.net.weight.detach() - 1).mean()) == pytest.approx(steps * update, rel=0.25)
