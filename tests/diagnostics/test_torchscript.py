"""TorchScript modules inside of a model: it trains as under Lightning's own plugin, and monitors leave them out."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import small_models
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import MixedPrecision
from small_models import WIDTH, regression_batches, sgd, weights
from torch import Tensor, nn

from lightning_mp import AutocastPrecision, PrecisionAudit, UnderflowMonitor
from lightning_mp.monitors.diagnostics.overflow.tensor_watch import TensorWatch
from lightning_mp.training.policy.module_selection import as_patterns, select_modules
from lightning_mp.training.policy.unit_selection import unit_names

# torch warns of TorchScript's end, differently by release and by version of Python.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated"),  # torch 2.15
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]

COMPILERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "script": torch.jit.script,
    "trace": lambda module: torch.jit.trace(module, torch.zeros(2, WIDTH)),
}


class Compiled(pl.LightningModule):
    """A backbone in TorchScript under a plain head."""

    def __init__(self, compiler: str, *, frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        backbone = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.backbone = COMPILERS[compiler](backbone.requires_grad_(not frozen))
        self.head = nn.Linear(WIDTH, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features = self.backbone(batch[0])
        self.dtype_of_features = features.dtype
        return nn.functional.mse_loss(self.head(features).float(), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd([parameter for parameter in self.parameters() if parameter.requires_grad])


def fit(module: Compiled, plugin: Any, *callbacks: Callback) -> list[Tensor]:
    small_models.fit(module, regression_batches(4), *callbacks, plugin=plugin)
    return weights(module)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("compiler", COMPILERS)
def test_it_trains_as_under_lightnings_own_plugin(compiler: str, frozen: bool) -> None:
    # TorchScript profiles a function in its first calls in a process, and compiles it another way afterwards.
    fit(Compiled(compiler, frozen=frozen), MixedPrecision("bf16-mixed", "cpu"))
    stock = fit(Compiled(compiler, frozen=frozen), MixedPrecision("bf16-mixed", "cpu"))
    ours = fit(Compiled(compiler, frozen=frozen), AutocastPrecision("bf16-mixed"))
    assert all(map(torch.equal, ours, stock))


def test_a_policy_rules_the_whole_and_nothing_inside() -> None:
    ruled, unruled = Compiled("script"), Compiled("script")
    plugin = AutocastPrecision("bf16-mixed", policy={"backbone": "fp32", "backbone.*": "fp32"})
    with pytest.warns(UserWarning, match="PrecisionPolicy leaves out module 'backbone.0'.* runs in one precision"):
        fit(ruled, plugin)
    fit(unruled, AutocastPrecision("bf16-mixed"))
    assert ruled.dtype_of_features == torch.float32
    assert unruled.dtype_of_features == torch.bfloat16


def test_the_underflow_monitor_leaves_them_out_and_says_so_once() -> None:
    kinds = ("activations", "activation_gradients")
    monitor = UnderflowMonitor(every_n_steps=1, watch=kinds)
    fit(Compiled("script"), AutocastPrecision("bf16-mixed"))  # see above
    with pytest.warns(UserWarning, match="leaves out module 'backbone'.* hooks cannot be set on TorchScript") as caught:
        watched = fit(Compiled("script"), AutocastPrecision("bf16-mixed"), monitor)
    assert sum("TorchScript" in str(warning.message) for warning in caught) == 1
    assert monitor.latest is not None
    assert [list(monitor.latest.histograms[kind]) for kind in kinds] == [["head"], ["head"]]
    assert all(map(torch.equal, watched, fit(Compiled("script"), AutocastPrecision("bf16-mixed"))))


def test_the_audit_puts_their_operations_down_to_the_module_around() -> None:
    audit = PrecisionAudit()
    fit(Compiled("script"), AutocastPrecision("bf16-mixed"), audit)
    assert audit.records is not None
    products = [(row.module, row.compute) for row in audit.records.operations if row.kind == "matmul"]
    assert ("", "bf16") in products
    assert ("head", "bf16") in products
    assert audit.records.unseen == ("backbone.0",)


def test_a_post_mortem_watches_what_is_around_them() -> None:
    net = nn.Sequential(COMPILERS["script"](nn.Linear(2, 2)), nn.Linear(2, 2))
    with TensorWatch(net) as watch:
        loss = net(torch.ones(1, 2)).sum()
        with watch.backward():
            loss.backward()
    places = {seen.place.module for seen in watch.observations()}
    assert places == {"0", "1"}  # of the first one the gradients of its weights
    assert {seen.place.role for seen in watch.observations() if seen.place.module == "0"} == {"parameter_gradient"}


def test_they_are_no_units() -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList([COMPILERS["script"](nn.Linear(2, 2)) for _ in range(2)])
    model.head = nn.Linear(2, 2)
    assert unit_names(model, "auto") == []
    assert unit_names(model, 6) == ["head"]
    with pytest.raises(ValueError, match="'blocks.*' matches no module .* TorchScript modules cannot be chosen"):
        select_modules(model, as_patterns("blocks.*", "ActivationCheckpointing"), "ActivationCheckpointing")
