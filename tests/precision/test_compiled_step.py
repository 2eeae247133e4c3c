"""Steps in one compiled loop per parameter, beside those of the optimizers themselves."""

import re
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from fsdp2_runs import fsdp2
from gloo import run_ranks
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lion_pytorch import Lion
from master_loops import master_weights, masters_of
from small_models import Regression, loader, quiet_trainer, regression_batches
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code
from torch.distributed.tensor import DTensor

from lightning_mp.precision.masters.checks import check_strategy
from lightning_mp.precision.masters.compiled_step import CompiledStep, check_compiled_step
from lightning_mp.precision.masters.fp32_gradients import Fp32Gradients
from lightning_mp.precision.masters.optimizer_hooks import MasterHooks
from lightning_mp.precision.masters.store import MasterStore, Storage, make_store

# torch's own, while it compiles
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.01),
    "lion": lambda p: Lion(p, lr=1e-3, weight_decay=0.1),
}
# Bytes per parameter: gradient, weight, master and states, read and written.
CASES = [("adamw", "fp32", 28), ("adamw", "remainder", 26), ("sgd", "fp32", 20), ("lion", "remainder", 18)]

HAS_FMA = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


class Stepped:
    """Weights of several shapes, their masters and an optimizer."""

    def __init__(self, name: str, storage: Storage, *, compiled: bool) -> None:
        torch.manual_seed(0)
        values = [torch.randn(*shape) for shape in ((40, 8), (24,), (4, 3, 3, 3))]
        values[2] = values[2].to(memory_format=torch.channels_last)
        self.weights = [nn.Parameter(value.bfloat16()) for value in values]
        self.store: MasterStore = make_store(storage)
        for weight, value in zip(self.weights, values, strict=True):
            self.store.set(weight, value)
        self.store.begin([], {}, [], broadcast=False)
        self.optimizer = OPTIMIZERS[name](self.weights)
        self.gradients = Fp32Gradients()
        step = CompiledStep(self.optimizer, self.store) if compiled else None
        self.hooks = MasterHooks(self.optimizer, self.store, self.gradients, compiled=step)

    def step(self, index: int) -> None:
        generator = torch.Generator().manual_seed(index)
        for weight in self.weights:
            weight.grad = torch.randn(weight.shape, generator=generator).bfloat16()
        # A factor, as after clipping or under a loss scale, or none.
        self.gradients.factor = torch.tensor(0.37) if index % 2 else None
        (group,) = self.optimizer.param_groups
        group["lr"] *= 0.9
        if index == 2:
            self.weights[1].grad = None
        if index == 3:
            with torch.no_grad():
                self.weights[0].clamp_(-1, 1)
        if index == 4:
            if "betas" in group:
                group["betas"] = (0.3, 0.9)
            assert self.optimizer.step(lambda: 0.5) == 0.5
        else:
            self.optimizer.step()

    def tensors(self) -> list[Tensor]:
        """Masters, then states."""
        states = [self.optimizer.state[w] for w in self.weights]
        moments = [s[key] for s in states for key in sorted(s) if isinstance(s[key], Tensor) and s[key].dim()]
        return [self.store.get(w).detach().clone() for w in self.weights] + [t.clone() for t in moments]


def correct_sqrt(tensor: Tensor) -> Tensor:
    """That of torch, which calls MKL, is off by one unit in the last place now and then."""
    return torch.sqrt(tensor.double()).to(tensor.dtype)


@pytest.fixture(scope="module")
def compiler() -> None:
    try:
        torch.compile(lambda x: x + 1)(torch.ones(8))
    except RuntimeError as error:
        pytest.skip(f"torch.compile needs a C++ compiler and the headers of Python: {type(error).__name__}")


@pytest.mark.full
@pytest.mark.usefixtures("compiler")
@pytest.mark.skipif(not HAS_FMA, reason="torch's own kernels round after each product without AVX2")
@pytest.mark.parametrize(("name", "storage", "moved"), CASES)
def test_a_compiled_step_is_the_optimizers_own_in_one_loop(
    name: str, storage: Any, moved: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    counters.clear()
    ours, codes = run_and_get_code(lambda: Stepped(name, storage, compiled=True))
    assert loops(codes) == [moved]
    compiled = counters["stats"]["unique_graphs"]

    theirs = Stepped(name, storage, compiled=False)
    for index in range(5):
        ours.step(index)
        with monkeypatch.context() as patched:
            patched.setattr(Tensor, "sqrt", correct_sqrt)
            theirs.step(index)
        assert ours.optimizer.param_groups[0]["params"] == ours.weights
        assert all(map(torch.equal, ours.tensors(), theirs.tensors()))
        assert all(map(torch.equal, ours.weights, theirs.weights))
    # One for all shapes, learning rates, factors and steps.
    assert counters["stats"]["unique_graphs"] == compiled


SIZES = {"at::BFloat16": 2, "float": 4, "int16_t": 2}


def loops(codes: list[str]) -> list[int]:
    """Bytes per parameter that each loop of generated C++ reads and writes; what has no index is one number."""
    found = []
    for kernel in "\n".join(codes).split('extern "C"')[1:]:
        assert kernel.count("for(int64_t") == 1
        sizes = {name: SIZES[kind] for kind, name in re.findall(r"(at::BFloat16|float|int16_t)\* (\w+)", kernel)}
        index = r"(?: \+ |\[)static_cast<int64_t>\(x0\)"
        read = set(re.findall(rf"(?:loadu\(|= )(\w+){index}", kernel))
        written = set(re.findall(rf"(?:store\(|^ *)(\w+){index}", kernel, re.MULTILINE))
        found.append(sum(sizes[name] for name in [*read, *written]))
    return found


@pytest.mark.full
@pytest.mark.usefixtures("compiler")
@pytest.mark.skipif(not HAS_FMA, reason="torch's own kernels round after each product without AVX2")
def test_a_fit_with_compiled_steps_accumulates_clips_skips_and_resumes(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fit(epochs: int, *, compiled: bool = True, ckpt_path: Any = None) -> Any:
        module = Regression(OPTIMIZERS["adamw"], overflows=() if ckpt_path else (3,))
        trainer = quiet_trainer(
            plugins=[master_weights(storage="remainder", compiled_step=compiled)],
            max_epochs=epochs,
            gradient_clip_val=0.1,
            accumulate_grad_batches=2,
        )
        with patch.object(CompiledStep, "step", autospec=True, side_effect=CompiledStep.step) as step:
            trainer.fit(module, loader(regression_batches(6)), ckpt_path=ckpt_path)
        assert step.call_count == (3 * (1 if ckpt_path else epochs) - (ckpt_path is None) if compiled else 0)
        return trainer

    torch._dynamo.reset()
    straight = fit(2)
    with monkeypatch.context() as patched:
        patched.setattr(Tensor, "sqrt", correct_sqrt)
        eager = fit(2, compiled=False)
    fit(1).save_checkpoint(tmp_path / "x.ckpt")
    resumed = fit(2, ckpt_path=tmp_path / "x.ckpt")
    assert all(map(torch.equal, masters_of(straight), masters_of(resumed)))
    assert all(map(torch.equal, masters_of(straight), masters_of(eager)))
    assert all(master.isfinite().all() for master in masters_of(straight))


def two_groups(parameters: Any) -> torch.optim.Optimizer:
    first, *others = parameters
    groups = [{"params": [first], "weight_decay": 0.1}, {"params": others, "lr": 5e-3}]
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.0)


@pytest.mark.full
@pytest.mark.usefixtures("compiler")
def test_shards_in_two_groups_are_stepped_as_by_the_optimizer() -> None:
    def on_rank(rank: int) -> list[list[Tensor]]:
        masters = []
        for compiled in (True, False):
            torch._dynamo.reset()
            plugin = master_weights(storage="remainder", compiled_step=compiled)
            trainer = quiet_trainer(devices=2, strategy=fsdp2("net.0"), plugins=[plugin], max_epochs=2)
            trainer.fit(Regression(two_groups), loader(regression_batches(4)))
            own = masters_of(trainer)
            masters.append([m.full_tensor() if isinstance(m, DTensor) else m for m in own])
        return masters

    (ours, theirs), (others, _) = run_ranks(on_rank, 2)
    assert all(map(torch.equal, ours, others))
    assert any(not torch.equal(m, m.bfloat16().float()) for m in ours)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


REFUSED: dict[str, Any] = {
    "has no compiled step for Adam: torch.optim.AdamW": lambda p: torch.optim.Adam(p),
    "does not support fused=True": lambda p: torch.optim.AdamW(p, fused=True),
    "does not support amsgrad=True, foreach=True": lambda p: torch.optim.AdamW(p, amsgrad=True, foreach=True),
    "does not support maximize=True": lambda p: torch.optim.SGD(p, lr=0.1, maximize=True),
    "does not support decoupled_wd=True": lambda p: Lion(p, decoupled_weight_decay=True),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_compiled_is_refused(words: str) -> None:
    with pytest.raises(MisconfigurationException, match=words):
        quiet_trainer(plugins=[master_weights(compiled_step=True)]).fit(
            Regression(REFUSED[words]), loader(regression_batches(1))
        )


def test_24_bits_and_fsdp1_are_refused() -> None:
    with pytest.raises(MisconfigurationException, match="storage='24bit'\\) is not supported. Use storage='remainder'"):
        check_compiled_step(torch.optim.AdamW([nn.Parameter(torch.ones(1))]), "24bit")
    with pytest.raises(MisconfigurationException, match="FSDPStrategy, where the optimizer steps fp32 shards itself"):
        check_strategy(
            object.__new__(FSDPStrategy), nn.Linear(1, 1), storage="fp32", fp32_gradients=False, compiled_step=True
        )


def test_a_compiler_that_is_missing_is_told_at_set_up() -> None:
    with (
        torch.compiler.set_stance("force_eager"),
        pytest.raises(MisconfigurationException, match=r"could not compile a step for cpu.*C\+\+ compiler"),
    ):
        Stepped("adamw", "fp32", compiled=True)


def test_hooks_of_others_around_the_step_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CompiledStep, "_try_out", lambda self: None)
    stepped = Stepped("adamw", "fp32", compiled=True)
    stepped.optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match="AdamW itself, and a step hook of other code would find no parameters"):
        stepped.step(0)
