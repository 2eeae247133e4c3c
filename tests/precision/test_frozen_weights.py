"""Frozen weights under AutocastPrecision: cast once, never stale, and nothing else changes. The casts are counted."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gloo import run_ranks
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from small_models import Regression, loader, quiet_trainer, regression_batches, sgd, weights
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_mp import AutocastPrecision, LossScaler
from lightning_mp.precision.frozen_weight_cache import FrozenWeightCache

LOW = torch.bfloat16
WIDTH = 8


class CountCasts(Callback):
    """How often each parameter was cast to 16 bit during fit, by name: `_to_copy` or `copy_` that read its storage."""

    class Mode(TorchDispatchMode):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model
            self.casts: dict[str, int] = {}

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if func._schema.name in ("aten::_to_copy", "aten::copy_") and out.dtype in (LOW, torch.float16):
                read = {t.untyped_storage().data_ptr() for t in tree_leaves(args) if isinstance(t, Tensor)}
                for name, parameter in self.model.named_parameters():
                    if parameter.untyped_storage().data_ptr() in read:
                        self.casts[name] = self.casts.get(name, 0) + 1
            return out

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.mode = self.Mode(pl_module)
        self.mode.__enter__()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.mode.__exit__(None, None, None)


class Adapted(Regression):
    """A frozen base, its middle layer used twice per forward, with trainable adapters of rank 2 on top."""

    def __init__(self, *, adapters: bool = True) -> None:
        super().__init__(sgd)
        self.base = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.base.requires_grad_(False)
        self.adapters = (
            nn.ModuleList(
                nn.Sequential(nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)) for _ in range(2)
            )
            if adapters
            else None
        )
        self.hook: Callable[[Adapted, int], None] | None = None

    def features(self, x: Tensor) -> Tensor:
        for index in (0, 1, 1):
            hidden = self.base[index](x)
            x = torch.tanh(hidden + self.adapters[index](x) if self.adapters is not None else hidden)
        return x

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step([self.features(batch[0]), batch[1]], batch_idx)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.hook is not None:
            self.hook(self, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self.parameters())


class Validated(Adapted):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)


def frozen_names(module: nn.Module) -> list[str]:
    return [name for name, parameter in module.named_parameters() if not parameter.requires_grad]


def plugin(precision: str = "bf16-mixed", **arguments: Any) -> AutocastPrecision:
    scaler = LossScaler(init_scale=1024.0) if precision == "16-mixed" else None
    return AutocastPrecision(precision, scaler=scaler, **arguments)  # type: ignore[arg-type]


def fit(
    module: Any, *callbacks: Callback, num_batches: int = 4, precision: str = "bf16-mixed", **arguments: Any
) -> Any:
    val = [loader(regression_batches(2))] if isinstance(module, Validated) else []
    trainer = quiet_trainer(plugins=[plugin(precision)], callbacks=list(callbacks), **arguments)
    trainer.fit(module, loader(regression_batches(num_batches)), *val)
    return module


def stock_weights(module: Any, num_batches: int = 4, **arguments: Any) -> list[Tensor]:
    """The same run under torch's autocast alone."""
    optimizer = module.configure_optimizers()
    for index, batch in enumerate(regression_batches(4)):
        module.on_train_batch_start(batch, index)
        optimizer.zero_grad()
        with torch.autocast("cpu", LOW):
            loss = module.training_step(batch, index)
        loss.backward()
        optimizer.step()
    return weights(module)


# -- how often -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_a_frozen_weight_is_cast_once_in_a_run(precision: str):
    """D50: torch casts it at every use, here 8 times for the layer that is used twice in each of 4 forwards."""
    module, counter = Adapted(), CountCasts()
    fit(module, counter, precision=precision)
    assert {name: counter.mode.casts[name] for name in frozen_names(module)} == dict.fromkeys(frozen_names(module), 1)
    # Trainable ones once per forward, as before.
    assert counter.mode.casts["adapters.1.0.weight"] == 4


def test_torch_alone_casts_a_frozen_weight_at_every_use():
    """D50, what is mended here; if this fails, torch has mended it."""
    module = Adapted()
    with CountCasts.Mode(module) as mode:
        stock_weights(module)
    assert (mode.casts["base.0.weight"], mode.casts["base.1.weight"]) == (4, 8)


def test_each_loop_casts_it_once():
    """Sanity check, training and validation: what was written through `.data` in between is seen."""
    module, counter = Validated(), CountCasts()
    fit(module, counter, num_sanity_val_steps=1)
    assert {counter.mode.casts[name] for name in frozen_names(module)} == {3}


def test_tied_frozen_weights_are_cast_once_for_all():
    class Tied(Adapted):
        def __init__(self) -> None:
            super().__init__()
            self.base[1].weight = self.base[0].weight

    module, counter = Tied(), CountCasts()
    fit(module, counter)
    assert counter.mode.casts["base.0.weight"] == 1


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d, nn.Conv3d])
def test_convolutions_compute_the_same_on_the_copy(kind: Any):
    dims = int(kind.__name__[4])
    layer = kind(4, 6, 3, stride=2, padding=1, dilation=1, groups=2).requires_grad_(False)
    x = torch.randn(2, 4, *[5] * dims)
    with torch.autocast("cpu", LOW):
        expected = layer(x)
        frozen = FrozenWeightCache([layer], LOW, "cpu")
        frozen.refresh("train")
        with CountCasts.Mode(layer) as mode:
            assert torch.equal(layer(x), expected)
        assert mode.casts == {}
    frozen.detach()
    assert "forward" not in vars(layer)


def test_gpt2s_linear_layer_is_known():
    transformers = pytest.importorskip("transformers")
    layer = transformers.pytorch_utils.Conv1D(6, 4).requires_grad_(False)
    x = torch.randn(2, 3, 4)
    with torch.autocast("cpu", LOW):
        expected = layer(x)
        FrozenWeightCache([layer], LOW, "cpu").refresh("train")
        with CountCasts.Mode(layer) as mode:
            assert torch.equal(layer(x), expected)
    assert mode.casts == {}


# -- the same result -----------------------------------------------------------------------------------------------


def test_training_equals_autocast_alone_and_the_base_stays():
    module = fit(Adapted())
    start = weights(Adapted())
    for ours, expected in zip(weights(module), stock_weights(Adapted()), strict=True):
        assert torch.equal(ours, expected)
    for (name, parameter), before in zip(module.named_parameters(), start, strict=True):
        assert torch.equal(parameter, before) != parameter.requires_grad, name
        assert parameter.dtype == torch.float32
    assert list(module.state_dict()) == list(Adapted().state_dict())


def test_a_frozen_weight_beside_a_trainable_bias():
    def only_biases(module: Adapted) -> Adapted:
        module.base[0].bias.requires_grad_(True)
        return module

    module, counter = only_biases(Adapted()), CountCasts()
    fit(module, counter)
    for ours, expected in zip(weights(module), stock_weights(only_biases(Adapted())), strict=True):
        assert torch.equal(ours, expected)
    assert (counter.mode.casts["base.0.weight"], counter.mode.casts["base.0.bias"]) == (1, 4)


def unfreeze(module: Adapted, batch_idx: int) -> None:
    if batch_idx == 2:
        module.base.requires_grad_(True)


def freeze(module: Adapted, batch_idx: int) -> None:
    module.adapters.requires_grad_(batch_idx < 2)


def load(module: Adapted, batch_idx: int) -> None:
    if batch_idx == 2:
        module.base.load_state_dict({name: value + 0.5 for name, value in module.base.state_dict().items()})


def write_in_place(module: Adapted, batch_idx: int) -> None:
    with torch.no_grad():
        module.base[0].weight.add_(0.25)


def replace(module: Adapted, batch_idx: int) -> None:
    if batch_idx == 2:
        module.base[1].weight = nn.Parameter(module.base[0].weight * 2, requires_grad=False)


def move(module: Adapted, batch_idx: int) -> None:
    module.base.double()
    module.base.float()
    for parameter in module.base.parameters():
        parameter.data = parameter.data.clone() + 0.125


def average(module: Adapted, batch_idx: int) -> None:
    """As the teacher of a student, from the second batch on: torch does not count what is written to `.data`."""
    for parameter in module.base.parameters():
        parameter.data.mul_(0.5).add_(batch_idx / 2)


def cut(module: Adapted, batch_idx: int) -> None:
    """Layers grow and shrink: a view of the first rows keeps the weight's address and torch's count."""
    inner, outer = module.base
    if batch_idx == 1:
        inner.weight.data = torch.cat([inner.weight.data, inner.weight.data + 1.0])
        inner.bias.data = torch.cat([inner.bias.data, inner.bias.data])
        outer.weight.data = torch.cat([outer.weight.data, outer.weight.data], 1)
    if batch_idx == 2:
        inner.weight.data, inner.bias.data = inner.weight.data[:WIDTH], inner.bias.data[:WIDTH]
        outer.weight.data = outer.weight.data[:, :WIDTH]
    if batch_idx == 3:
        inner.weight.data = inner.weight.data.t()


class Resized(Adapted):
    """Its layers change size."""

    def features(self, x: Tensor) -> Tensor:
        return self.base[1](torch.tanh(self.base[0](x))) + self.adapters[0](x)  # type: ignore[index]


def test_a_copy_has_the_shape_of_its_weight():
    ours, stock = Resized(), Resized()
    ours.hook = stock.hook = cut
    for trained, expected in zip(weights(fit(ours)), stock_weights(stock), strict=True):
        assert torch.equal(trained, expected)


@pytest.mark.parametrize("hook", [unfreeze, freeze, load, write_in_place, replace, move, average])
def test_a_copy_is_never_stale(hook: Callable[[Adapted, int], None]):
    ours, stock = Adapted(), Adapted()
    ours.hook = stock.hook = hook
    for trained, expected in zip(weights(fit(ours)), stock_weights(stock), strict=True):
        assert torch.equal(trained, expected)


def test_nets_that_are_frozen_and_trained_in_turn_inside_of_a_step():
    """As in BigGAN's loop: the discriminator is frozen when a step begins, then trained, then frozen again and used."""

    class Nets(Adapted):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            for trained, frozen in ((self.base, self.adapters), (self.adapters, self.base)):
                trained.requires_grad_(True)
                frozen.requires_grad_(False)
                optimizer.zero_grad()
                self.manual_backward(Adapted.training_step(self, batch, batch_idx))
                optimizer.step()

    ours = Nets()
    quiet_trainer(plugins=[AutocastPrecision("bf16-mixed", cache_weights=False)]).fit(
        ours, loader(regression_batches(4))
    )
    stock = Nets()
    quiet_trainer(plugins=[MixedPrecision("bf16-mixed", "cpu")]).fit(stock, loader(regression_batches(4)))
    for trained, expected in zip(weights(ours), weights(stock), strict=True):
        assert torch.equal(trained, expected)


def test_a_device_is_asked_one_forward_late_what_was_written_through_data():
    """Not in the first three forwards, where moving averages begin."""
    layer = nn.Linear(8, 8).requires_grad_(False)
    for quiet_forwards, late in ((0, 0), (5, 1)):
        frozen = FrozenWeightCache([layer], LOW, "cpu")
        frozen.refresh("train")
        frozen._watch._reads_at_once = False
        for _ in range(quiet_forwards):
            frozen.refresh("train")
        layer.weight.data.add_(1.0)
        for forward in range(3):
            frozen.refresh("train")
            assert list(frozen._copies) == [id(layer.weight)] * (forward < late) + [id(layer.bias)]
        frozen.detach()


def test_a_merge_through_data_is_seen_by_validation():
    """As adapters are merged: torch does not count what is written through `weight.data`."""

    class Merging(Validated):
        def on_validation_start(self) -> None:
            self.base[0].weight.data += 1.0

        def on_validation_end(self) -> None:
            self.base[0].weight.data -= 1.0

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.seen = self.base[0](batch[0])
            self.expected = nn.functional.linear(batch[0], self.base[0].weight, self.base[0].bias)

    module = fit(Merging())
    assert torch.equal(module.seen, module.expected)


def test_validation_before_training_leaves_training_intact():
    module = fit(Validated(), num_sanity_val_steps=1)
    for ours, expected in zip(weights(module), stock_weights(Adapted()), strict=True):
        assert torch.equal(ours, expected)


def test_a_copy_made_in_inference_mode_can_be_used_in_training():
    layer = nn.Linear(4, 4).requires_grad_(False)
    frozen = FrozenWeightCache([layer], LOW, "cpu")
    with torch.inference_mode():
        frozen.refresh("validate")
    frozen.refresh("train")
    x = torch.randn(2, 4, requires_grad=True)
    with torch.autocast("cpu", LOW):
        layer(x).sum().backward()
    assert x.grad is not None


def test_resumed_from_a_checkpoint_the_loaded_weights_are_used(tmp_path):
    def trained(max_epochs: int, start: Adapted, **arguments: Any) -> Any:
        trainer = quiet_trainer(plugins=[plugin()], max_epochs=max_epochs)
        trainer.fit(start, loader(regression_batches(4)), **arguments)
        return trainer

    trained(1, Adapted()).save_checkpoint(tmp_path / "last.ckpt")
    resumed, straight = Adapted(), Adapted()
    nn.init.zeros_(resumed.base[0].weight)
    trained(2, resumed, ckpt_path=tmp_path / "last.ckpt")
    trained(2, straight)
    for ours, expected in zip(weights(resumed), weights(straight), strict=True):
        assert torch.equal(ours, expected)


# -- where it holds off --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rules", [{"base.0": "fp32"}, {"linear": "fp32"}], ids=["module", "operation"])
def test_a_policy_keeps_fp32_weights_from_being_rounded(rules: dict[str, str]):
    module = Adapted()
    seen: list[tuple[Tensor, Tensor]] = []
    module.base[0].register_forward_hook(lambda _, args, out: seen.append((args[0], out)))
    quiet_trainer(plugins=[plugin(policy=rules)]).fit(module, loader(regression_batches(1)))
    assert torch.equal(seen[0][1], module.base[0](seen[0][0].float()))


class Negated(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return -super().forward(x)


def test_what_it_does_not_know_is_left_to_autocast():
    own_forward = nn.Linear(4, 4)
    own_forward.forward = lambda x: x + 1  # type: ignore[method-assign]
    parametrized = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    reflecting = nn.Conv1d(4, 4, 3, padding=1, padding_mode="reflect")
    modules = [Negated(4, 4), own_forward, parametrized, reflecting, nn.Embedding(4, 4), nn.LSTM(4, 4)]
    for module in modules:
        module.requires_grad_(False)
    before = [module.forward for module in modules]
    frozen = FrozenWeightCache(modules, LOW, "cpu")
    frozen.refresh("train")
    assert [module.forward for module in modules] == before


class Wrapping(nn.Conv1d):
    """Pads in a way of its own, where torch's classes leave room for it: its forward is theirs."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(nn.functional.pad(input, (1, 1), mode="circular"), weight, bias)


@pytest.mark.parametrize("layer", [nn.Linear(4, 6), nn.Conv1d(4, 6, 3), Wrapping(4, 6, 3)])
def test_a_layer_is_called_and_computes_as_its_class_says(layer: Any):
    layer.requires_grad_(False)
    x = torch.randn(2, 4, 4)
    with torch.autocast("cpu", LOW):
        expected = layer(input=x)
        FrozenWeightCache([layer], LOW, "cpu").refresh("train")
        assert torch.equal(layer(input=x), expected)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_weights_without_elements_or_in_a_sparse_layout_are_left_to_torch():
    sparse = nn.Linear(4, 2, bias=False)
    sparse.weight = nn.Parameter(sparse.weight.detach().to_sparse())
    layers = nn.ModuleList([nn.Linear(0, 2), nn.Linear(4, 0), sparse]).requires_grad_(False)
    frozen = FrozenWeightCache(layers, LOW, "cpu")
    for _ in range(2):
        frozen.refresh("train")
    with torch.autocast("cpu", LOW):
        assert torch.equal(layers[0](torch.ones(1, 0))[0], layers[0].bias.to(LOW))
        assert layers[1](torch.ones(1, 4)).shape == (1, 0)


def test_outside_of_autocast_the_fp32_weights_are_used():
    layer = nn.Linear(4, 4).requires_grad_(False)
    x = torch.randn(2, 4)
    expected = layer(x)
    FrozenWeightCache([layer], LOW, "cpu").refresh("train")
    assert torch.equal(layer(x), expected)
    with torch.autocast("cpu", torch.float16):
        assert layer(x).dtype == torch.float16


def test_a_deep_copy_goes_without_and_teardown_takes_everything_away():
    class Copying(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            self.wrapped = "forward" in vars(pl_module.base[0])
            self.copy = copy.deepcopy(pl_module.base[0])
            nn.init.zeros_(self.copy.weight)
            with torch.autocast("cpu", LOW):
                self.out = self.copy(torch.ones(1, WIDTH))[0]

    copying = Copying()
    module = fit(Adapted(), copying)
    assert copying.wrapped
    assert torch.equal(copying.out, copying.copy.bias.to(LOW))
    assert not any("forward" in vars(part) for part in module.modules())
    with torch.autocast("cpu", LOW):
        assert torch.equal(copying.copy(torch.ones(1, WIDTH))[0], copying.out)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_in_one_graph_it_computes_the_same_without_casts(backend: str):
    torch._dynamo.reset()
    model = Adapted()
    frozen = FrozenWeightCache(model.modules(), LOW, "cpu")
    compiled = torch.compile(model.features, fullgraph=True, backend=backend)
    x = regression_batches(1)[0][0]
    with torch.autocast("cpu", LOW):
        expected = model.features(x)
        for _ in range(2):
            frozen.refresh("train")
            assert torch.equal(compiled(x), expected)
        with CountCasts.Mode(model) as mode:
            model.features(x)
    assert set(mode.casts) == {name for name in mode.casts if name.startswith("adapters")}
    frozen.detach()
    with torch.autocast("cpu", LOW):
        assert torch.equal(compiled(x), expected)


def test_two_ranks_under_ddp_equal_one():
    def run(rank: int) -> list[Tensor]:
        module = Adapted()
        strategy = DDPStrategy(process_group_backend="gloo")
        trainer = quiet_trainer(devices=2, strategy=strategy, plugins=[plugin()])
        trainer.fit(module, loader(regression_batches(4)))
        return weights(module)

    first, second = run_ranks(run, 2)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    for ours, expected in zip(first, weights(fit(Adapted())), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-7)
