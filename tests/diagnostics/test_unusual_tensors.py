"""Callbacks beside unusual tensors: the run trains as without them, and what is left out is named."""

import warnings
from collections.abc import Callable

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from small_models import WIDTH, Trained, fit, regression_batches, sgd, weights
from torch import Tensor, nn

from lightning_mp import (
    ActivationCheckpointing,
    AutocastPrecision,
    MicroBatchOnOOM,
    OverflowMonitor,
    OverflowPostMortem,
    PrecisionAudit,
    UnderflowMonitor,
)
from lightning_mp.ground.core.messages import WarnOnce
from lightning_mp.ground.core.nested_tensors import why_unreadable
from lightning_mp.ground.flops.flop_tally import FlopTally
from lightning_mp.monitors.diagnostics.overflow.tensor_watch import TensorWatch
from lightning_mp.monitors.diagnostics.underflow.watch import BackwardWatch

Loss = Callable[[nn.Module, Tensor], Tensor]


def net(loss: Loss, body: Callable[[], nn.Module] = lambda: nn.Linear(WIDTH, WIDTH)) -> Trained:
    """Any loss of a body, or two, and a batch ``[4, WIDTH]``."""
    return Trained(lambda module, batch: loss(module.body, batch[0]), sgd, body=body)


def nested(body: nn.Module, x: Tensor) -> Tensor:
    parts = torch.nested.nested_tensor([x[:1], x[1:]], layout=torch.jagged)
    return body(parts).values().float().square().mean()


def plain(body: nn.Module, x: Tensor) -> Tensor:
    return body(x).float().square().mean()


def batched(body: nn.Module, x: Tensor) -> Tensor:
    return torch.vmap(body)(x).float().square().mean()


def of_shape_one(body: nn.Module, x: Tensor) -> Tensor:
    return plain(body, x).reshape(1)


def half_batched(body: nn.Module, x: Tensor) -> Tensor:
    first, second = body.children()
    return torch.vmap(second)(first(x)).square().mean()


def trained(module: Trained, *callbacks: Callback, plugin: str | None = None) -> list[Tensor]:
    plugins = [AutocastPrecision(plugin)] if plugin is not None else []
    fit(module, regression_batches(3), *callbacks, plugins=plugins)
    return weights(module)


def mixed_by_rows(body: nn.Module, x: Tensor) -> Tensor:
    return (torch.eye(4).to_sparse_csr() @ body(x)).square().mean()


def assert_trains_as_without(
    callbacks: list[Callback], module: Callable[[], Trained], plugin: str | None = None
) -> None:
    watched = trained(module(), *callbacks, plugin=plugin)
    assert all(map(torch.equal, watched, trained(module(), plugin=plugin)))


@pytest.mark.parametrize("plugin", [None, "bf16-mixed"])
def test_exponents_of_nested_tensors_are_those_of_their_parts(plugin: str | None) -> None:
    kinds = ("gradients", "activations", "activation_gradients")
    monitors = {loss: UnderflowMonitor(every_n_steps=1, watch=kinds) for loss in (nested, plain)}
    for loss, monitor in monitors.items():
        assert_trains_as_without([monitor], lambda loss=loss: net(loss), plugin)
    seen, expected = (monitor.latest for monitor in monitors.values())
    assert seen is not None
    assert expected is not None
    assert seen.histograms == expected.histograms
    # What backward holds in 16 bit decides about the headroom.
    assert [s["gradients"].headroom_doublings for s in monitors[nested].history] == pytest.approx(
        [s["gradients"].headroom_doublings for s in monitors[plain].history]
    )


def test_a_nested_tensor_with_gaps_is_left_out_by_name() -> None:
    gaps = torch.nested.narrow(torch.ones(2, 4, 3), 1, torch.tensor([0, 1]), torch.tensor([2, 2]), layout=torch.jagged)
    assert "nested tensor with gaps" in why_unreadable(gaps)
    watch = BackwardWatch(torch.device("cpu"), WarnOnce("UnderflowMonitor"))
    with pytest.warns(UserWarning, match=r"UnderflowMonitor leaves out a gradient of shape .* nested tensor with gaps"):
        watch._note(gaps)
    assert watch.largest is None


def test_nested_tensors_are_audited() -> None:
    audit = PrecisionAudit()
    assert_trains_as_without([audit], lambda: net(nested), "bf16-mixed")
    assert audit.records is not None
    products = [row for row in audit.records.operations if row.module == "body" and row.kind == "matmul"]
    assert {row.compute for row in products} == {"bf16"}
    assert all(isinstance(size, int) for row in products for _, size in row.sizes)
    assert audit.findings == ()


def test_outputs_inside_of_vmap_are_left_out_by_name() -> None:
    monitor = UnderflowMonitor(every_n_steps=1, watch=("gradients", "activations", "activation_gradients"))
    with pytest.warns(UserWarning, match=r"UnderflowMonitor leaves out the output of module 'body'.* torch\.vmap"):
        assert_trains_as_without([monitor], lambda: net(batched))
    assert monitor.latest is not None
    assert not any(monitor.latest.histograms["activations"]["body"].counts.values())
    assert any(monitor.latest.histograms["gradients"]["body.weight"].counts.values())


def test_a_post_mortem_leaves_out_what_runs_inside_of_vmap() -> None:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
    message = r"OverflowPostMortem leaves out the argument 'input' of module '0'.* torch\.vmap"
    with TensorWatch(net) as watch:
        with pytest.warns(UserWarning, match=message):
            outputs = torch.vmap(net)(torch.ones(4, WIDTH))
        with watch.backward():
            outputs.sum().backward()
    assert [seen.place.tensor for seen in watch.observations()] == ["gradient of bias", "gradient of weight"]


def two_parts() -> nn.Module:
    return nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), nn.Tanh())


def test_checkpoints_are_counted_beside_vmap() -> None:
    checkpointing = ActivationCheckpointing("body.0")
    assert_trains_as_without([checkpointing], lambda: net(half_batched, two_parts))
    assert checkpointing.report is not None
    assert checkpointing.report.calls == 1


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
def test_memory_of_an_opaque_layout_is_left_out_of_what_checkpoints_save() -> None:
    checkpointing = ActivationCheckpointing("body")
    with pytest.warns(
        UserWarning, match=r"ActivationCheckpointing leaves out the memory of a tensor of shape \(4, 4\)"
    ):
        assert_trains_as_without([checkpointing], lambda: net(mixed_by_rows))
    assert checkpointing.report is not None


def test_what_checkpoints_save_in_a_lazy_module_is_that_of_the_same_module() -> None:
    bodies: list[Callable[[], nn.Module]] = [lambda: nn.LazyLinear(WIDTH), lambda: nn.Linear(WIDTH, WIDTH)]
    reports = []
    for body in bodies:
        checkpointing = ActivationCheckpointing("body")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Lazy modules are a new feature", UserWarning)
            warnings.filterwarnings("ignore", "The total number of parameters detected may be inaccurate")
            assert_trains_as_without([checkpointing], lambda body=body: net(plain, body))
        reports.append(checkpointing.report)
    assert reports[0] == reports[1]


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
def test_the_growth_of_lazy_weights_is_left_out_by_name() -> None:
    with pytest.warns(UserWarning, match=r"OverflowPostMortem leaves out the growth of body\.weight.* lazy") as caught:
        assert_trains_as_without(
            [OverflowMonitor(), OverflowPostMortem()], lambda: net(plain, lambda: nn.LazyLinear(3))
        )
    assert sum("leaves out" in str(warning.message) for warning in caught) == 1


def test_a_complex_product_counts_as_four_real_ones() -> None:
    layer, x = nn.Linear(6, 5, dtype=torch.complex64), torch.ones(3, 6, dtype=torch.complex64)
    with FlopTally() as tally:
        layer(x).abs().sum().backward()
    assert (tally.count.forward, tally.count.backward) == (4 * 2 * 3 * 6 * 5, 4 * 2 * 3 * 6 * 5)
    assert tally.count.main_format == "fp32"


def test_a_product_of_integers_has_no_floating_point_operations() -> None:
    with FlopTally() as tally:
        torch.ones(3, 6, dtype=torch.int64) @ torch.ones(6, 5, dtype=torch.int64)
    assert (tally.count.forward, tally.count.main_format, tally.count.unknown) == (0, None, ())


@pytest.mark.parametrize("plugin", [None, "bf16-mixed"])
def test_a_loss_of_shape_one_trains_in_parts(plugin: str | None) -> None:
    assert_trains_as_without([MicroBatchOnOOM()], lambda: net(of_shape_one), plugin)
