"""UnderflowMonitor in two real processes: each value is counted once, whoever holds it."""

from typing import Any

import pytest
import torch
from cpu_fsdp import CpuFsdp
from gloo import run_ranks
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from small_models import TokenModel, adamw, fit, fused_adamw, sgd, shard, token_batches
from torch.distributed.tensor import DTensor

from lightning_mp import AutocastPrecision, LossScaler
from lightning_mp.callbacks.underflow_monitor import UnderflowMonitor
from lightning_mp.monitors.diagnostics.underflow.exponents import ExponentHistogram

# torch warns of in-place operations on a sharded layer's output; there are none here.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")

COUNTS = {0: [6, 3, 11, 8], 1: [4, 10, 2, 5]}


class Sharded(TokenModel):
    """The head is sharded; the embedding stays whole on every rank, and its gradient is averaged by hand."""

    sharded = ("head", "embedding")

    def configure_model(self) -> None:
        shard(self, *(getattr(self, name) for name in self.sharded))


class PartlySharded(Sharded):
    sharded = ("head",)

    def on_after_backward(self) -> None:
        torch.distributed.all_reduce(self.embedding.weight.grad)
        self.embedding.weight.grad /= 2


class Full(Callback):
    """What the whole gradient is at each step, gathered."""

    def __init__(self) -> None:
        self.seen: list[dict[str, torch.Tensor]] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        named = pl_module.named_parameters()
        full = {n: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad.clone() for n, p in named}
        self.seen.append(full)


def fsdp2() -> ModelParallelStrategy:
    return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")


def ddp() -> DDPStrategy:
    return DDPStrategy(process_group_backend="gloo")


def observe(rank: int, module: Any, strategy: Any, plugins: Any, *callbacks: Callback, **settings: Any) -> Any:
    monitor = UnderflowMonitor(every_n_steps=2, **settings)
    fit(module, token_batches(COUNTS[rank]), monitor, *callbacks, devices=2, strategy=strategy, plugins=plugins)
    return monitor


def scaled() -> list[Any]:
    return [AutocastPrecision("16-mixed", scaler=LossScaler(init_scale=1024.0))]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("optimizer", [adamw, fused_adamw], ids=["unfused", "fused"])
@pytest.mark.parametrize(
    ("module", "strategy", "kept"),
    [(TokenModel, ddp, ("embedding.weight",)), (Sharded, fsdp2, ()), (PartlySharded, fsdp2, ("embedding.weight",))],
    ids=["ddp", "fsdp2", "fsdp2, partly"],
)
def test_every_value_is_counted_once(module: Any, strategy: Any, kept: Any, optimizer: Any) -> None:
    """The gradient of a whole embedding never is in 16 bit; that of a sharded one counts, because nobody can tell."""

    def train(rank: int) -> Any:
        full = Full()
        monitor = observe(rank, module(optimizer), strategy(), scaled(), full)
        expected = {n: ExponentHistogram.of(g, 1024.0) for n, g in full.seen[2].items()}
        return monitor.latest, expected, monitor.history

    (first, expected, history), (second, _, other_history) = run_ranks(train, 2)
    assert first.step_index == 2
    assert first.kept_in_fp32 == kept
    assert first.histograms == {"gradients": expected | dict.fromkeys(kept, ExponentHistogram())}
    assert first == second
    assert history == other_history


def test_without_a_plugin_too() -> None:
    def train(rank: int) -> Any:
        full = Full()
        monitor = observe(rank, Sharded(sgd), fsdp2(), None, full, scale=8.0)
        return monitor.latest.histograms["gradients"], {
            n: ExponentHistogram.of(g, 8.0) for n, g in full.seen[2].items()
        }

    for seen, expected in run_ranks(train, 2):
        assert seen == expected


@pytest.mark.full
def test_fsdp1_shards_are_added() -> None:
    """Under DDP the fp32 embedding does not count, so the head is compared."""

    def head(monitor: UnderflowMonitor) -> ExponentHistogram:
        rows = monitor.latest.histograms["gradients"]
        return ExponentHistogram.sum_of(rows[name] for name in ("head.weight", "head.bias"))

    def train(rank: int) -> Any:
        module = TokenModel(sgd)
        monitor = observe(rank, module, CpuFsdp(process_group_backend="gloo"), scaled())
        return head(monitor), sorted(name for name, h in monitor.latest.histograms["gradients"].items() if h.num_values)

    def train_ddp(rank: int) -> Any:
        return head(observe(rank, TokenModel(sgd), ddp(), scaled()))

    (first, names), (second, _) = run_ranks(train, 2)
    whole = run_ranks(train_ddp, 2)[0]
    assert first == second
    assert (first.num_values, first.num_zeros) == (whole.num_values, whole.num_zeros)
    assert first.largest == pytest.approx(whole.largest, rel=1e-5)
    assert names == ["embedding.weight", "head.bias", "head.weight"]


def test_activations_are_those_of_each_ranks_own_batches_and_nobody_waits() -> None:
    """Rank 1 runs a module more than rank 0: without a reduction nothing can hang."""

    class Uneven(TokenModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss + 0.0 * self.head(self.embedding(batch[0])).sum() if self.global_rank else loss

    def train(rank: int) -> Any:
        watch = ("gradients", "activations", "activation_gradients")
        latest = observe(rank, Uneven(sgd), ddp(), scaled(), watch=watch).latest
        return latest.histograms["gradients"], latest.whole("activations").num_values

    (gradients, first), (other_gradients, second) = run_ranks(train, 2)
    assert gradients == other_gradients
    tokens = [token_batches(COUNTS[rank])[2][0].numel() for rank in (0, 1)]
    assert (first, second) == (tokens[0] * (8 + 11), 2 * tokens[1] * (8 + 11))
