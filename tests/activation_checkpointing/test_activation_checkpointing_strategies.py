"""ActivationCheckpointing under DDP, FSDP1 and FSDP2 in two real processes, and inside of torch.compile."""

from collections.abc import Callable
from typing import Any

import pytest
import small_models
import torch
from checkpointed_models import DropBlock, LateStack, Stack, assert_same, fit, taken
from cpu_fsdp import CpuFsdp
from gloo import run_ranks
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from small_models import loader, quiet_trainer, regression_batches
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

from lightning_mp import AutocastPrecision
from lightning_mp.training.activation_checkpointing.cost import StorageBytes

BATCHES = {rank: regression_batches(6)[3 * rank : 3 * rank + 3] for rank in (0, 1)}


class Plain(Stack):
    norm = nn.LayerNorm  # FSDP1 leaves batch norms out of 16 bit, and warns


class Sharded(LateStack):
    """FSDP2 on each block, and on the layers inside where ``nested``."""

    norm = nn.LayerNorm
    nested = False

    def configure_model(self) -> None:
        if not hasattr(self, "blocks"):
            self.build()
            for block in self.blocks:
                for layer in (block.up, block.down) if self.nested else ():
                    fully_shard(layer, mesh=self.device_mesh["data_parallel"])
                fully_shard(block, mesh=self.device_mesh["data_parallel"])


class Nested(Sharded):
    nested = True


STRATEGIES: dict[str, tuple[Callable[[], Stack], Callable[[], Any]]] = {
    "ddp": (Plain, lambda: DDPStrategy(process_group_backend="gloo")),
    "fsdp1": (Plain, lambda: CpuFsdp(auto_wrap_policy=ModuleWrapPolicy({DropBlock}))),
    "fsdp2": (lambda: Sharded("late"), lambda: ModelParallelStrategy(2, 1, process_group_backend="gloo")),
    "fsdp2-nested": (lambda: Nested("late"), lambda: ModelParallelStrategy(2, 1, process_group_backend="gloo")),
}


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("ddp", "bf16-mixed"),
        ("fsdp1", "fp32"),
        ("fsdp1", "bf16-mixed"),
        ("fsdp2", "bf16-mixed"),
        ("fsdp2-nested", "fp32"),
    ],
)
@pytest.mark.full
def test_it_trains_the_same_under_any_strategy(name: str, precision: str) -> None:
    """Gradients of both ranks to the last bit; the same names; gathered weights are not counted as saved."""

    def train(rank: int, checkpointed: bool) -> Any:
        make_module, make_strategy = STRATEGIES[name]
        module = make_module()
        callbacks = [taken(DropBlock)] if checkpointed else []
        plugins = [AutocastPrecision("bf16-mixed")] if precision == "bf16-mixed" else []
        small_models.fit(module, BATCHES[rank], *callbacks, devices=2, strategy=make_strategy(), plugins=plugins)
        gradients = [[local(g) for g in step] for step in module.gradients]
        left = [name for name, inner in module.named_modules() if name and "forward" in vars(inner)]
        report = callbacks[0].report if checkpointed else None
        return gradients, [name for name, _ in module.named_parameters()], runs_of(module), left, report

    for ours, theirs in run_ranks(lambda rank: (train(rank, True), train(rank, False)), 2):
        mine, names, counts, left, report = ours
        reference, other_names, *_ = theirs
        assert names == other_names
        assert left == []
        assert counts == [6] * 4
        assert len(mine) == 3
        for step, other in zip(mine, reference, strict=True):
            assert all(map(torch.equal, step, other))
        single = report_of_one_process(precision)
        assert report.recompute_flops == single.recompute_flops > 0
        if name == "fsdp1" and precision == "bf16-mixed":
            # It gathers weights in 16 bit, so autocast makes no copies that backward would keep.
            assert report.saved_bytes < single.saved_bytes
            continue
        assert (report.saved_bytes, report.saved_bytes_without) == (single.saved_bytes, single.saved_bytes_without)


def local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def runs_of(module: Any) -> list[int]:
    return [len(inner.runs) for inner in module.modules() if isinstance(inner, DropBlock)]


def report_of_one_process(precision: str) -> Any:
    callback = taken(DropBlock)
    plugins = [AutocastPrecision("bf16-mixed")] if precision == "bf16-mixed" else []
    quiet_trainer(callbacks=[callback], plugins=plugins).fit(Plain(), loader(BATCHES[0][:1]))
    return callback.report


COMPILERS: dict[str, Callable[[Stack], Any]] = {
    "in place": lambda module: [block.compile(backend="aot_eager", fullgraph=True) for block in module.blocks],
    "wrapped": lambda module: setattr(
        module, "blocks", nn.ModuleList(torch.compile(b, backend="aot_eager", fullgraph=True) for b in module.blocks)
    ),
    "whole": lambda module: torch.compile(module, backend="aot_eager"),
}


class PureBlock(DropBlock):
    """Takes no notes: a list that grows makes torch compile anew. No dropout: compiled, it saves random states."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class PureStack(Plain):
    def build(self) -> None:
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(PureBlock(self.norm) for _ in range(self.num_blocks))
        self.head = nn.Linear(8, 1)


class WatchSaved(Callback):
    """Saved bytes of every micro-batch, seen from outside."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.held = StorageBytes()
        self.known = StorageBytes()
        for tensor in (*pl_module.parameters(), *batch):
            self.known.add(tensor)
        self.hooks = saved_tensors_hooks(self.pack, lambda tensor: tensor)
        self.hooks.__enter__()

    def pack(self, tensor: Tensor) -> Tensor:
        self.held.add(tensor)
        return tensor.detach()

    def on_before_backward(self, *_: Any) -> None:
        self.hooks.__exit__()


# torch looks at blocks' inputs while it compiles them by themselves.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    ("how", "policy"),
    [("in place", None), ("wrapped", {"class:LayerNorm": "fp32"}), ("whole", {"class:LayerNorm": "fp32"})],
    ids=COMPILERS,
)
@pytest.mark.full
def test_it_works_inside_of_torch_compile(how: str, policy: Any, caplog: pytest.LogCaptureFixture) -> None:
    """One graph per block, the same bits as compiled without it, and less saved; counting would uncompile it."""

    def train(*callbacks: Callback) -> tuple[PureStack, int]:
        torch.compiler.reset()
        module, watch = PureStack(), WatchSaved()
        compiled = COMPILERS[how](module)
        plugins = [AutocastPrecision("bf16-mixed", policy=policy)]
        fit(compiled if how == "whole" else module, *callbacks, watch, plugins=plugins)
        assert not torch._dynamo.utils.counters["graph_break"]
        return module, (watch.held - watch.known).total_bytes

    reference, held_without = train()
    with caplog.at_level("INFO"):
        module, held = train(callback := taken(PureBlock))
    assert_same(module, reference)
    assert len(callback.module_names) == 4
    assert held < held_without / 2
    assert callback.report is None
    assert sum("not counted, because the model is compiled" in record.message for record in caplog.records) == 1
