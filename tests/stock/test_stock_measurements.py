"""What Lightning and torch count, know and offer, with ours beside each.

A test that fails here says that upstream has changed: then rewrite the row of docs/defects.md that it names.
"""

import contextlib
import inspect
import pickle
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.precision import transformer_engine
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch.callbacks import Callback, ThroughputMonitor
from lightning.pytorch.callbacks.throughput_monitor import _plugin_to_compute_dtype
from lightning.pytorch.plugins.precision import FSDPPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, StrategyRegistry
from small_models import LIGHTNING_27, Parts, TokenModel, fit, token_batches
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.utils.flop_counter import FlopCounterMode

from lightning_mp import MFUMonitor, OverflowMonitor, PipelineParallelStrategy
from lightning_mp.ground.flops.flop_counter import count_flops
from lightning_mp.ground.flops.hardware import peak_flops
from lightning_mp.training.checkpoints.checked_folder import CheckedReader


@pytest.mark.parametrize(
    ("device", "stock_tflops", "dense_tflops"),
    [
        ("NVIDIA H200", None, 989.4),
        ("NVIDIA GH200 480GB", None, 989.4),
        ("NVIDIA B200", None, 2250.0),
        ("NVIDIA H100 NVL", 1978.9, 835.5),
        ("NVIDIA L40S", 121.0, 362.05),
        ("NVIDIA A40", 37.4, 149.7),
    ],
)
@pytest.mark.filterwarnings("ignore:FLOPs not found")
def test_peaks_are_unknown_or_wrong(
    device: str, stock_tflops: float | None, dense_tflops: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D39: in bf16."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: device)
    found = get_available_flops(torch.device("cuda", 0), torch.bfloat16)
    if LIGHTNING_27 and device in {"NVIDIA H100 NVL", "NVIDIA A40"}:  # corrected there
        stock_tflops = dense_tflops
    assert (found and found / 1e12) == (stock_tflops and pytest.approx(stock_tflops, rel=1e-2))
    assert peak_flops(device, "bf16") / 1e12 == pytest.approx(dense_tflops, rel=1e-2)


@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
def test_the_format_is_that_of_the_plugins_class() -> None:
    """D40: a plugin that one writes counts as fp32 whatever it computes in; ours looks at the products."""

    class Bf16Everywhere(Precision):
        precision = "bf16-true"

    assert _plugin_to_compute_dtype(Bf16Everywhere()) == torch.float32
    fsdp = FSDPPrecision("32-true")
    assert _plugin_to_compute_dtype(fsdp) == fsdp.mixed_precision_config.reduce_dtype


def test_the_throughput_monitor_waits_for_the_device_and_forgets_its_totals() -> None:
    """D41."""
    assert "torch.cuda.synchronize()" in inspect.getsource(ThroughputMonitor._update)
    stock, ours = ThroughputMonitor(batch_size_fn=len), MFUMonitor()
    module = TokenModel()
    module.flops_per_batch = 1  # type: ignore[assignment]
    fit(module, token_batches([6, 6, 6]), stock, ours)
    assert stock.state_dict() == {}
    assert ours.state_dict() != {}


def test_only_fsdp_has_activation_checkpoints_and_no_strategy_is_a_pipeline() -> None:
    """D42, D45."""

    def arguments(strategy: type) -> set[str]:
        return {name for name in inspect.signature(strategy).parameters if "activation_checkpointing" in name}

    assert arguments(FSDPStrategy)
    assert not arguments(DDPStrategy) | arguments(ModelParallelStrategy)
    theirs = [name for name in StrategyRegistry.available_strategies() if not name.startswith("mp_")]
    assert not [name for name in theirs if "pipe" in name]
    assert PipelineParallelStrategy


def test_there_is_no_hook_after_the_optimizer_step() -> None:
    """D46."""
    hooks = {name for name in dir(Callback) if "optimizer_step" in name}
    assert hooks == {"on_before_optimizer_step"}
    assert "on_after_optimizer_step" in dir(OverflowMonitor)


class Transformed(nn.Linear):
    """Stands for Transformer Engine's linear layer, which needs a GPU."""


class Normalised(nn.LayerNorm):
    """Stands for its layer norm, which always has a weight."""


def test_transformer_engine_unfreezes_and_unties_and_wants_affine_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """D26: Lightning's conversion, with stand-ins for the layers that it puts in."""
    engine = ModuleType("transformer_engine.pytorch")
    engine.Linear, engine.LayerNorm = Transformed, Normalised  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformer_engine", ModuleType("transformer_engine"))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", engine)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    model.requires_grad_(False)
    model[1].weight = model[0].weight
    transformer_engine._convert_layers(model)
    assert all(isinstance(layer, Transformed) for layer in model)
    assert model[0].weight is not model[1].weight
    assert all(p.requires_grad for p in model.parameters())
    with pytest.raises(AttributeError):
        transformer_engine._convert_layers(nn.Sequential(nn.LayerNorm(16, elementwise_affine=False)))


@pytest.mark.full
def test_gw_hp_under_autocast_ends_inside_torchao() -> None:
    """D27."""
    float8 = pytest.importorskip("torchao.float8")
    config = float8.Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp")
    object.__setattr__(config, "emulate", True)
    layer = float8.convert_to_float8_training(nn.Sequential(nn.Linear(16, 16, bias=False)), config=config)
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(torch.ones(16, 16, requires_grad=True))
    with pytest.raises(RuntimeError, match="dtype"):
        output.float().sum().backward()


def test_grouped_convolutions_are_counted_too_often() -> None:
    """D55: the gradient of the weight, once per group."""
    layer, groups = nn.Conv2d(8, 8, 3, padding=1, groups=4, bias=False), 4
    x = torch.zeros(2, 8, 5, 5)
    with FlopCounterMode(display=False) as counter:
        layer(x).sum().backward()
    assert counter.get_total_flops() == (1 + groups) * count_flops(layer, x).forward
    assert count_flops(layer, x).model == 2 * count_flops(layer, x).forward


def test_a_count_by_parameters_has_every_expert() -> None:
    """D56: 6 operations for each parameter and token, as model cards count; inputs need no gradient here."""
    experts = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(8))
    # two of eight layers per token, as a router chooses them
    model, tokens = Parts(lambda m, x: m.experts[1](x) + m.experts[4](x), experts=lambda: experts), 10
    by_parameters = 6 * sum(p.numel() for p in model.parameters()) * tokens
    counted = count_flops(model, torch.zeros(tokens, 16))
    assert by_parameters == 3 * counted.forward * 8 / 2
    assert counted.model == 2 * counted.forward


class TouchOnLoad:
    """A pickle that makes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_the_table_of_contents_of_a_checkpoint_runs_code(tmp_path: Path) -> None:
    """D57."""
    trace = tmp_path / "trace"
    (tmp_path / ".metadata").write_bytes(pickle.dumps(TouchOnLoad(trace)))
    with pytest.raises(ValueError, match=r"\.metadata refers to"):
        CheckedReader(tmp_path).read_metadata()
    assert not trace.exists()
    with contextlib.suppress(AttributeError):  # it is no table of contents, but by then it has been unpickled
        FileSystemReader(tmp_path).read_metadata()
    assert trace.exists()
