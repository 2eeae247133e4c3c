"""What a step with masters costs from the end of backward on: operations, bytes moved, and memory inside of it."""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from small_models import fit
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_mp import AutocastPrecision, MasterWeightsPrecision
from lightning_mp.language_model import GPT, GPTConfig
from lightning_mp.training.gradients import step_blocks

ROOM = ("empty", "empty_like", "new_empty", "empty_strided")


class StepCost(TorchDispatchMode):
    """Of the operations while ``active``: their number, the bytes that they are handed and write, the most that lived
    of the memory that they made."""

    def __init__(self) -> None:
        super().__init__()
        self.active = False
        self.start()

    def start(self) -> None:
        self.names: list[str] = []
        self.bytes = self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.active:
            return result
        name = func._schema.name.removeprefix("aten::")
        read = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        memories = {t.untyped_storage()._cdata for t in read}
        for tensor in made:
            self._follow(tensor, memories)
        is_view = made and not func._schema.is_mutable and all(t.untyped_storage()._cdata in memories for t in made)
        if name in ROOM or is_view or name == "detach":
            return result
        if name != "_local_scalar_dense":  # a foreach AdamW on the CPU reads the number of steps of each weight
            self.names.append(name)
        self.bytes += sum(t.nbytes for t in read + made)
        if name == "_fused_adamw_":  # parameters, both moments, and under a factor the gradients are written, too
            weights = sum(t.nbytes for t in args[0])
            self.bytes += 4 * weights if (kwargs or {}).get("grad_scale") is not None else 3 * weights
        elif name.startswith("_foreach") and name.endswith("_") and name != "_foreach_copy_":
            self.bytes += sum(t.nbytes for t in args[0])
        elif name == "copy_":
            self.bytes -= args[0].nbytes
        return result

    def _follow(self, tensor: Tensor, memories: set[int]) -> None:
        memory = tensor.untyped_storage()
        key, size = memory._cdata, memory.nbytes()
        if key in self._known | memories:
            return
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(memory, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        if key in self._known:
            self._known.discard(key)
            self.live -= size


class Cost(Callback):
    """The cost of each step."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.mode, self.rows = StepCost(), []
        self.parameters = sum(p.numel() for p in pl_module.parameters())
        self.mode.__enter__()
        # Not in on_after_backward: where a callback may write to gradients, overflows are looked for before it, too.
        trainer.strategy.post_backward = self._begin  # type: ignore[method-assign]

    def _begin(self, closure_loss: Tensor) -> None:
        self.mode.start()
        self.mode.active = True

    def on_train_batch_end(self, *_: Any) -> None:
        self.mode.active = False
        self.names = self.mode.names
        self.rows.append((len(self.mode.names), self.mode.bytes / self.parameters, self.mode.peak / self.parameters))

    def on_train_end(self, *_: Any) -> None:
        self.mode.__exit__(None, None, None)


class Language(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = GPT(GPTConfig(layers=6, heads=2, width=64, block_tokens=16, vocab=64))
        self.batch = torch.arange(34).view(2, 17) % 64

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(self.batch[:, :-1]).flatten(0, 1).float(), self.batch[:, 1:].flatten())


class Vision(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 64, 4, 4)
        self.blocks = nn.Sequential(
            *(nn.TransformerEncoderLayer(64, 2, 256, 0.0, batch_first=True, norm_first=True) for _ in range(4))
        )
        self.head = nn.Linear(64, 10)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        images = torch.ones(2, 3, 16, 16, dtype=self.patch.weight.dtype)
        return self.head(self.blocks(self.patch(images).flatten(2).mT).mean(1)).float().square().mean()


class ForeachLion(torch.optim.Optimizer):
    """Lion (Chen et al., 2023, algorithm 2) over all parameters of a group at once, as foreach optimizers are."""

    def __init__(self, parameters: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "weight_decay": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # it evaluates none
        for group in self.param_groups:
            weights = [p for p in group["params"] if p.grad is not None]
            gradients = [p.grad for p in weights]
            for parameter in (p for p in weights if not self.state[p]):
                self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)
            averages = [self.state[p]["exp_avg"] for p in weights]
            first, second = group["betas"]
            updates = torch._foreach_lerp(gradients, averages, first)
            torch._foreach_sign_(updates)
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(weights, updates, alpha=-group["lr"])
            torch._foreach_lerp_(averages, gradients, 1 - second)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW-fused": partial(torch.optim.AdamW, lr=1e-3, fused=True),
    "AdamW-foreach": partial(torch.optim.AdamW, lr=1e-3, foreach=True),
    "SGD-fused": partial(torch.optim.SGD, lr=1e-3, momentum=0.9, fused=True),
    "Lion": ForeachLion,
}


def watched(module: pl.LightningModule, plugin: Any, optimizer: str) -> Cost:
    """Of steps with clipping."""
    seen = Cost()
    module.configure_optimizers = lambda: OPTIMIZERS[optimizer](module.parameters())
    fit(module, [torch.ones(2)] * 4, seen, plugin=plugin, gradient_clip_val=1.0)
    return seen


def cost(module: pl.LightningModule, plugin: Any, optimizer: str) -> tuple[int, float, float]:
    """Of a step that is not the first."""
    seen = watched(module, plugin, optimizer)
    assert seen.rows[2][:2] == seen.rows[3][:2]
    return seen.rows[3]


MASTERS: dict[str, Any] = {
    "fp32": lambda: MasterWeightsPrecision("bf16-true"),
    "fp16": lambda: MasterWeightsPrecision("16-true"),
}
#: Operations and bytes per parameter with a fused AdamW.
FUSED = {"fp32": (40, 50), "fp16": (50, 60)}


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("model", [Language, Vision])
@pytest.mark.parametrize("storage", MASTERS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_is_few_operations_however_many_weights(model: Any, storage: str, optimizer: str) -> None:
    operations, moved, _ = cost(model(), MASTERS[storage](), optimizer)
    most_operations, most_moved = FUSED[storage]
    # Optimizers that are not fused have more kernels themselves; the bound on bytes is that of a fused AdamW.
    assert operations <= most_operations + (0 if optimizer.endswith("fused") else 20)
    if optimizer.endswith("fused"):
        assert moved <= most_moved


def test_autocast_in_fp16_adds_few_scalars() -> None:
    operations, moved, _ = cost(Language(), AutocastPrecision("16-mixed"), "AdamW-fused")
    assert operations <= 45
    assert moved <= 36.1


def test_the_epilogue_has_fifteen_scalars() -> None:
    """Between the norms of the gradients and the fused AdamW, with a loss scale and clipping by norm."""
    names = watched(Language(), AutocastPrecision("16-mixed"), "AdamW-fused").names
    between = names[names.index("_foreach_norm") + 1 : names.index("_foreach_add_")]
    scalars = [name for name in between if not name.startswith("profiler::")]
    assert len(scalars) <= 15, scalars


@pytest.mark.parametrize("storage", MASTERS)
@pytest.mark.parametrize("optimizer", ["AdamW-fused", "AdamW-foreach"])
def test_a_step_in_blocks_needs_little_memory(storage: str, optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a model of gigabytes: 16.5 bytes per parameter inside of a step."""

    class Wide(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(64)))

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.net(torch.ones(2, 64, dtype=self.net[0].weight.dtype)).float().square().mean()

    one = cost(Wide(), MASTERS[storage](), optimizer)
    monkeypatch.setattr(step_blocks, "_SMALLEST_BLOCK", 0)
    blocks = cost(Wide(), MASTERS[storage](), optimizer)
    assert one[2] >= 4
    assert blocks[2] <= (1.0 if optimizer == "AdamW-foreach" else 0.5)  # foreach makes temporaries itself
    assert blocks[1] == pytest.approx(one[1], rel=0.01), "nothing is moved twice"


class Blocks(pl.LightningModule):
    """Five layers in two groups."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer], *, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Linear(8, 8, bias=bias) for _ in range(5)))
        self.make = make

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        parameters = list(self.parameters())
        return self.make([{"params": parameters[:3]}, {"params": parameters[3:], "lr": 3e-2}], lr=1e-2)


@pytest.mark.parametrize("name", sorted(kind.__name__ for kind in step_blocks.SEPARABLE))
def test_blocks_change_no_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"momentum": 0.9} if name == "SGD" else {}
    ends = []
    for block in (10**6, 80):
        monkeypatch.setattr(step_blocks, "_SMALLEST_BLOCK", block)
        module = Blocks(partial(getattr(torch.optim, name), **settings), bias=name != "Muon")
        trainer = fit(module, list(torch.randn(4, 4, 8, generator=torch.Generator().manual_seed(1))), plugin=bf16())
        (optimizer,) = trainer.optimizers
        assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(module.parameters()))
        state = [optimizer.state[p] for p in module.parameters()]
        ends.append([*module.parameters(), *(t for t in tree_leaves(state) if isinstance(t, Tensor))])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def bf16() -> MasterWeightsPrecision:
    return MasterWeightsPrecision("bf16-true")


def test_hooks_of_others_find_all_parameters_in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_blocks, "_SMALLEST_BLOCK", 0)
    seen = []

    def make(*args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(*args, **kwargs)
        optimizer.register_step_post_hook(lambda stepped, *_: seen.append(len(stepped.param_groups[1]["params"])))
        return optimizer

    fit(Blocks(make), [torch.ones(1, 8)], plugin=bf16())
    assert seen == [7]


def test_a_step_that_raises_between_blocks_leaves_the_groups_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_blocks, "_SMALLEST_BLOCK", 0)

    class Breaks(Blocks):
        def on_before_zero_grad(self, optimizer: Any) -> None:
            optimizer.param_groups[1]["betas"] = (0.9, None)

    module = Breaks(torch.optim.AdamW)
    last = module.net[4].weight.detach().clone()
    with pytest.raises(TypeError):
        fit(module, [torch.ones(1, 8)], plugin=bf16())
    (optimizer,) = module.trainer.optimizers
    assert [p for group in optimizer.param_groups for p in group["params"]] == list(module.parameters())
    assert torch.equal(module.net[4].weight, last)
    assert {p.grad.dtype for p in module.parameters()} <= {torch.bfloat16, torch.float32}
