"""Float8Precision in a Trainer: against a plain loop, with hooks, clipping, overflows, checkpoints and refusals."""

import itertools
import re
from typing import Any

import jsonargparse
import lightning.pytorch as pl
import pytest
import small_models
import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from small_models import adamw, fused_adamw, loader, quiet_trainer, weights
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torchao.float8.float8_linear_utils import _auto_filter_for_recipe

from lightning_mp import AutocastPrecision, Float8Precision
from lightning_mp.ground.core.float8_gains import SMALLEST_GAIN
from lightning_mp.training.policy import float8_layers
from lightning_mp.training.policy.float8_layers import choose_float8_layers
from lightning_mp.training.precision import float8
from lightning_mp.training.precision.float8 import why_no_float8_on
from lightning_mp.training.precision.fp8.conversion import RECIPES, convert_to_float8, float8_config

WIDTH = 32


class Net(pl.LightningModule):
    """Four layers, the two in the middle for fp8."""

    def __init__(self, optimizer: Any = adamw) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, WIDTH), nn.Linear(WIDTH, 1)
        )
        self.make_optimizer = optimizer
        self.losses: list[float] = []
        self.classes: list[list[str]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.note()
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x).float(), y.float())

    def note(self) -> None:
        self.classes.append([type(layer).__name__ for layer in self.net if isinstance(layer, nn.Linear)])

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.note()
        self.loss(batch)

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        scheduler = LambdaLR(optimizer, lambda step: 0.9**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


DURING = ["Linear", "Float8Linear", "Float8Linear", "Linear"]
AFTER = ["Linear"] * 4


def batches(count: int, batch_size: int = 12) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    xs = torch.randn(count, batch_size, WIDTH, generator=generator)
    return [[x, x.square().mean(1, keepdim=True)] for x in xs]


def fit(module: Net, count: int = 6, plugin: Any = None, callbacks: Any = (), **arguments: Any) -> pl.Trainer:
    return small_models.fit(
        module, batches(count), *callbacks, plugin=plugin or Float8Precision(skip_small=False), **arguments
    )


# -- training ----------------------------------------------------------------------------------------------------------


def plain_loop(module: Net, config: Any, count: int, clip: float | None) -> None:
    """Nothing of the plugin: autocast, backward, torch's own clipping, step."""
    convert_to_float8(choose_float8_layers(module), config)
    optimizer = module.make_optimizer(module.parameters())
    scheduler = LambdaLR(optimizer, lambda step: 0.9**step)
    for batch in batches(count):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = module.loss(batch)
        optimizer.zero_grad()
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("optimizer", [adamw, fused_adamw])
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("emulate", [None, True], ids=["real", "emulated"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_fit_equals_a_plain_loop(recipe, emulate, clip, optimizer):
    ours, reference = Net(optimizer), Net(optimizer)
    fit(ours, plugin=Float8Precision(recipe, skip_small=False, emulate=emulate), gradient_clip_val=clip)
    plain_loop(reference, float8_config(recipe, emulate=bool(emulate)), 6, clip)
    for a, b in zip(weights(ours), weights(reference), strict=True):
        if clip is None:
            assert torch.equal(a, b)
        else:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_fp8_is_really_used_and_bf16_for_the_rest():
    in_fp8, in_bf16 = Net(), Net()
    dtypes: list[torch.dtype] = []
    for layer in in_fp8.net:
        layer.register_forward_hook(lambda _, __, output: dtypes.append(output.dtype))
    fit(in_fp8, 1)
    fit(in_bf16, 1, plugin=AutocastPrecision("bf16-mixed"))
    assert set(dtypes) == {torch.bfloat16}
    assert in_fp8.losses != in_bf16.losses
    assert in_fp8.losses[0] == pytest.approx(in_bf16.losses[0], rel=0.05)


def test_layers_are_fp8_during_the_run_and_ordinary_afterwards():
    module = Net()
    trainer = fit(module, 2)
    assert module.classes == [DURING] * 2
    module.note()
    assert module.classes[-1] == AFTER
    trainer.test(module, loader(batches(1)), verbose=False)
    assert module.classes[2:] == [AFTER, DURING]
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader(batches(2)))
    assert module.classes[-2:] == [DURING] * 2
    module.note()
    assert module.classes[-1] == AFTER
    assert not any(layer._forward_pre_hooks for layer in module.net)


def test_what_was_decided_is_told(caplog):
    plugin = Float8Precision(skip_small=False, skip=["net.2"])
    with caplog.at_level("INFO"):
        fit(Net(), 1, plugin)
    assert {layer.name: layer.skipped_because for layer in plugin.layers} == {
        "net.0": "it is the first Linear",
        "net.2": "skip='net.2'",
        "net.4": None,
        "net.5": "out_features is 1, not a multiple of 16",
    }
    counted = "1 of 4 Linear layers; not net.0 (it is the first Linear), net.2 (skip='net.2')"
    assert f"Float8Precision('tensorwise'): {counted}" in caplog.text


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_resumed_run_ends_with_the_same_bits(tmp_path, recipe):
    straight, stopped, resumed = Net(), Net(), Net()
    quiet_trainer(plugins=[Float8Precision(recipe, skip_small=False)], max_epochs=2).fit(straight, loader(batches(3)))
    fit(stopped, 3, Float8Precision(recipe, skip_small=False)).save_checkpoint(tmp_path / "last.ckpt")
    trainer = quiet_trainer(plugins=[Float8Precision(recipe, skip_small=False)], max_epochs=2)
    trainer.fit(resumed, loader(batches(3)), ckpt_path=tmp_path / "last.ckpt")
    assert all(torch.equal(a, b) for a, b in zip(weights(straight), weights(resumed), strict=True))


# -- refusals ----------------------------------------------------------------------------------------------------------


def refused(message: str, plugin: Float8Precision, error: type[Exception] = MisconfigurationException) -> None:
    module = Net()
    before, parameters = weights(module), [id(p) for p in module.parameters()]
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        fit(module, plugin=plugin)
    module.note()
    assert module.classes == [AFTER]
    assert [id(p) for p in module.parameters()] == parameters
    assert all(torch.equal(a, b) for a, b in zip(before, weights(module), strict=True))


def test_nothing_left_to_multiply_in_fp8_is_refused():
    refused(
        "Float8Precision('tensorwise') would multiply nothing in fp8: 0 of 4 Linear layers; not net.0 (it is the first"
        " Linear), net.2, net.4 (skip='net.[24]'), net.5 (out_features is 1, not a multiple of 16). Use"
        " AutocastPrecision('bf16-mixed'), or shorten skip, or give skip_first_and_last=False or skip_small=False.",
        Float8Precision(skip_small=False, skip=["net.[24]"]),
    )


def test_what_the_refusal_of_nothing_offers_works():
    module = Net()
    fit(module, 1, Float8Precision(skip_small=False, skip=["net.[24]"], skip_first_and_last=False))
    assert module.classes == [["Float8Linear", "Linear", "Linear", "Linear"]]


def test_a_device_that_cannot_is_refused(monkeypatch):
    monkeypatch.setattr(float8, "why_no_float8_on", lambda *_, **__: "it has no fp8 units. Do this.")
    refused(
        "Float8Precision('tensorwise') cannot run on cpu: it has no fp8 units. Do this.",
        Float8Precision("tensorwise", skip_small=False),
    )


def test_a_device_whose_product_fails_is_refused_before_anything_happens(monkeypatch):
    def fail(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("fp8 is not for this chip")

    monkeypatch.setattr(torch, "_scaled_mm", fail)
    refused("Float8Precision('rowwise') cannot run on cpu: fp8 is not for this chip", Float8Precision("rowwise"))
    fit(Net(), plugin=Float8Precision(emulate=True, skip_small=False))


class Wide(pl.LightningModule):
    """On the meta device, since only shapes count."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        pairs = itertools.pairwise(widths)
        self.net = nn.Sequential(*(nn.Linear(*pair, bias=False, device="meta") for pair in pairs))


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("recipe", RECIPES)
def test_layers_from_the_smallest_gain_are_chosen(recipe, parts, monkeypatch):
    """Every one that is chosen also passes torchao's own filter, where there is one."""
    smallest = SMALLEST_GAIN[recipe].features
    monkeypatch.setattr(float8_layers, "tensor_parallel_parts", lambda *_: parts)
    sizes = [768 * parts, smallest * parts - 16 * parts, smallest * parts, 8192 * parts]
    layers = {pair: nn.Linear(*pair, device="meta") for pair in itertools.product(sizes, repeat=2)}
    model = nn.Sequential(nn.Linear(16, 16), *layers.values(), nn.Linear(16, 16))
    chosen = [
        layer.module
        for layer in choose_float8_layers(model, smallest=SMALLEST_GAIN[recipe])
        if not layer.skipped_because
    ]
    assert chosen == [layer for pair, layer in layers.items() if min(pair) >= smallest * parts]
    if recipe != "rowwise_with_gw_hp" and parts == 1:
        assert all(_auto_filter_for_recipe(recipe, [])(layer, "") for layer in chosen)


@pytest.mark.parametrize(
    ("recipe", "widths", "chosen"),
    [
        ("tensorwise", (64, 2048, 8192, 2048, 64), ["net.1", "net.2"]),  # 1.11x
        ("tensorwise", (64, 768, 3072, 768, 64), []),  # 0.83x
        ("rowwise", (64, 4096, 16384, 4096, 64), ["net.1", "net.2"]),  # 1.12x
        ("rowwise", (64, 2048, 8192, 2048, 64), []),  # 0.87x
    ],
)
def test_the_measured_widths(recipe, widths, chosen):
    plugin = Float8Precision(recipe)
    layers = plugin.choose_layers(Wide(*widths))
    assert [layer.name for layer in layers if layer.skipped_because is None] == chosen
    assert (plugin.why_no_layer(layers) is None) == bool(chosen)
    everything = Float8Precision(recipe, skip_small=False).choose_layers(Wide(*widths))
    assert [layer.name for layer in everything if layer.skipped_because is None] == ["net.1", "net.2"]


def test_a_model_without_a_gain_is_refused():
    refused(
        "Float8Precision('tensorwise') would multiply nothing in fp8: 0 of 4 Linear layers; not net.0 (it is the first"
        " Linear), net.2, net.4 (in_features is 64, and fp8 gains from 1536), net.5",
        Float8Precision(),
    )


def compiled_whole(module: Net) -> None:
    module.compile(backend="eager")


def compiled_layer(module: Net) -> None:
    module.net[2].compile(backend="eager")


def compiled_wrapper(module: Net) -> None:
    module.net = torch.compile(module.net, backend="eager")


@pytest.mark.parametrize("compile_it", [None, compiled_whole, compiled_layer, compiled_wrapper])
def test_without_compile_one_line_says_what_it_costs(compile_it, caplog):
    module = Net()
    if compile_it is not None:
        compile_it(module)
    with caplog.at_level("INFO"):
        fit(module, 1) if compile_it is not compiled_wrapper else quiet_trainer(
            plugins=[Float8Precision(skip_small=False)], limit_train_batches=0, max_steps=1
        ).fit(module, loader(batches(1)))
    said = [record.message for record in caplog.records if "no module is compiled" in record.message]
    assert len(said) == (compile_it is None)
    assert not said or "0.18x of bf16's tokens per second" in said[0]


def test_yaml_gives_names_and_classes():
    parser = jsonargparse.ArgumentParser()
    parser.add_argument("--plugin", type=Precision)
    skip = ["head", "torch.nn.MultiheadAttention"]
    arguments = {"class_path": "lightning_mp.Float8Precision", "init_args": {"recipe": "tensorwise", "skip": skip}}
    plugin = parser.instantiate(parser.parse_object({"plugin": arguments})).plugin
    assert isinstance(plugin, Float8Precision)
    assert plugin.recipe == "tensorwise"
    assert list(plugin.skip) == ["head", nn.MultiheadAttention]


# -- on a GPU ----------------------------------------------------------------------------------------------------------


def needs_fp8_units() -> None:
    reason = why_no_float8_on(torch.device("cuda"))
    if reason is not None:
        pytest.skip(f"needs a CUDA device with fp8: {reason}")


@pytest.mark.gpu
@pytest.mark.parametrize("emulate", [None, True], ids=["real", "emulated"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_loss_falls_on_cuda(recipe, emulate):
    if not emulate:
        needs_fp8_units()
    module = Net(fused_adamw)
    fit(
        module,
        60,
        plugin=Float8Precision(recipe, skip_small=False, emulate=emulate),
        accelerator="gpu",
        gradient_clip_val=1.0,
    )
    assert module.classes[0] == DURING
    assert sum(module.losses[-10:]) < 0.5 * sum(module.losses[:10])


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_an_fp8_layer_does_not_wait_for_the_device(recipe):
    needs_fp8_units()
    model = nn.Sequential(nn.Linear(64, 64)).cuda()
    convert_to_float8(choose_float8_layers(model, skip_first_and_last=False), float8_config(recipe))
    x = torch.randn(32, 64, device="cuda", requires_grad=True)
    for mode in ("default", "error"):  # the first time, kernels are loaded
        torch.cuda.set_sync_debug_mode(mode)
        try:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                model(x).float().sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_a_cuda_device_without_fp8_units_is_refused():
    if why_no_float8_on(torch.device("cuda")) is None:
        pytest.skip("needs a CUDA device older than compute capability 8.9")
    with pytest.raises(MisconfigurationException, match="compute capability"):
        fit(Net(), accelerator="gpu")
