"""ActivationCheckpointing: which modules it takes, that training stays the same to the last bit, and what is left."""

import copy
import pickle
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from checkpointed_models import DropBlock, LateStack, Stack, assert_same, fit, taken
from huggingface_models import LanguageModel, project
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from small_models import WIDTH, Trained, at, loader, quiet_trainer, raising, regression_batches, weights
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from lightning_mp import AutocastPrecision, LossScaler, MasterWeightsPrecision
from lightning_mp.callbacks.activation_checkpointing import ActivationCheckpointing


class Validated(Stack):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)


def runs(module: Stack) -> list[int]:
    return [len(block.runs) for block in module.blocks]


# -- the same training -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("built_in", ["init", "setup", "configure_model"])
def test_training_is_the_same_to_the_last_bit_wherever_modules_are_built(built_in: str) -> None:
    """D42: with dropout, running statistics and AdamW; modules built in `setup` and `configure_model` are found too."""
    reference = fit(Stack())
    module = fit(
        LateStack(built_in) if built_in == "configure_model" else Stack(built_in), callback := taken(DropBlock)
    )
    assert_same(module, reference)
    assert runs(module) == [8] * 4
    assert runs(reference) == [4] * 4
    assert callback.module_names == tuple(f"blocks.{index}" for index in range(4))


def autocast(precision: Any, policy: Any = None) -> Any:
    scaler = LossScaler(init_scale=1024.0) if precision == "16-mixed" else None
    return AutocastPrecision(precision, scaler=scaler, policy=policy)


PLUGINS: dict[str, Callable[[], Any]] = {
    "fp16": lambda: autocast("16-mixed"),
    "bf16": lambda: autocast("bf16-mixed"),
    "policy": lambda: autocast("bf16-mixed", {"class:BatchNorm1d": "fp32", "blocks.1": "fp32", "op:gelu": "fp32"}),
    "masters": lambda: MasterWeightsPrecision("bf16-true"),
    "masters-policy": lambda: MasterWeightsPrecision("bf16-true", policy={"class:BatchNorm1d": "fp32"}),
}


@pytest.mark.parametrize("name", PLUGINS)
def test_the_second_run_has_the_dtypes_of_the_first(name: str) -> None:
    """Autocast, a policy with modules and an operation in fp32 inside of checkpointed modules, 16-bit weights."""
    reference = fit(Stack(), plugins=[PLUGINS[name]()])
    module = fit(Stack(), taken(DropBlock), plugins=[PLUGINS[name]()])
    assert_same(module, reference)
    for block, plain in zip(module.blocks, reference.blocks, strict=True):
        assert len(block.runs) == 2 * len(plain.runs)
        assert set(block.runs) == set(plain.runs)
        assert "forward" not in vars(block)
        assert "forward" not in vars(block.norm)


class MakesTensors(DropBlock):
    """Makes a tensor in its forward, whose numbers depend on the default dtype."""

    def __init__(self) -> None:
        super().__init__(nn.LayerNorm)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.linspace(0, 1, WIDTH).to(x.dtype) * torch.rand(WIDTH))


@pytest.mark.parametrize(
    "arguments",
    [lambda: {"plugins": [MasterWeightsPrecision("bf16-true")]}, lambda: {"precision": "bf16-true"}],
    ids=["ours", "stock"],
)
def test_tensors_that_are_made_in_the_second_run_are_those_of_the_first(arguments: Callable[[], Any]) -> None:
    """16-bit precisions change the default dtype around forwards, and not around backwards."""

    class Makes(Stack):
        def build(self) -> None:
            super().build()
            self.blocks = nn.ModuleList(MakesTensors() for _ in range(self.num_blocks))

    reference = fit(Makes(), **arguments())
    assert_same(fit(Makes(), taken(MakesTensors), **arguments()), reference)
    assert torch.get_default_dtype() == torch.float32


def test_accumulation_and_every() -> None:
    reference = fit(Stack(), accumulate_grad_batches=2)
    module = fit(Stack(), taken("blocks.*", every=3), accumulate_grad_batches=2)
    assert_same(module, reference)
    assert runs(module) == [8, 4, 4, 8]


@pytest.mark.parametrize(("name", "kind"), [("gpt2", "GPT2Block"), ("llama", "LlamaDecoderLayer")])
def test_hugging_face_models(name: str, kind: str) -> None:
    """Their key-value caches are left out: a second run would find its own keys there."""

    def train(*callbacks: Callback) -> LanguageModel:
        torch.manual_seed(0)
        module, batches = project(name)
        assert module.model.config.use_cache
        return fit(module, *callbacks, batches=batches, limit_train_batches=4)

    reference = train()
    module = train(callback := taken(kind))
    assert len(callback.module_names) == 2
    assert module.losses == reference.losses
    assert_same(module, reference)


def test_forwards_without_gradients_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(
        "lightning_mp.training.activation_checkpointing.wrapper.checkpoint",
        lambda *a, **k: calls.append(0) or checkpoint(*a, **k),
    )
    module, batches = Validated(), loader(regression_batches(4))
    trainer = quiet_trainer(callbacks=[taken(DropBlock)], limit_train_batches=1)
    trainer.fit(module, batches, batches)
    assert len(calls) == 4  # one training batch
    assert runs(module) == [2 + 2 + 4] * 4  # twice in training, sanity check, validation
    trainer.validate(module, batches)
    assert len(calls) == 4


# -- which modules -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        (nn.Linear, ["blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down", "head"]),
        ("DropBlock", ["blocks.0", "blocks.1"]),
        (f"{DropBlock.__module__}.DropBlock", ["blocks.0", "blocks.1"]),
        ("torch.nn.Linear", ["blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down", "head"]),
        ("blocks.*", ["blocks.0", "blocks.1"]),  # also fits what is inside; the outer ones are taken
        ("*", ["blocks.0", "blocks.1", "head"]),  # neither the whole nor the list
        ("*.up", ["blocks.0.up", "blocks.1.up"]),
        ([DropBlock, "head"], ["blocks.0", "blocks.1", "head"]),
        ([DropBlock, nn.Linear], ["blocks.0", "blocks.1", "head"]),
    ],
)
def test_modules_by_class_name_and_glob(modules: Any, expected: list[str]) -> None:
    module = fit(Stack(num_blocks=2), callback := ActivationCheckpointing(modules), limit_train_batches=1)
    assert list(callback.module_names) == expected
    assert module.gradients


@pytest.mark.parametrize("pattern", ["blokcs.*", "TransformerLayer", "blocks", nn.Conv2d, "nowhere.Block"])
def test_a_pattern_that_fits_nothing_is_an_error(pattern: Any) -> None:
    """D42: names that exist are in the message; `blocks` is a list without a forward."""
    with pytest.raises(ValueError, match=r"matches no module of Stack that defines forward") as error:
        fit(Stack(), ActivationCheckpointing(["head", pattern]))
    message = str(error.value)
    assert "blocks.0, blocks.0.norm, blocks.0.up" in message
    assert "DropBlock (4)" in message
    if pattern == "blokcs.*":
        assert "Near misses: blocks.0" in message


def test_a_pattern_that_changes_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match=re.escape("all that '*.up' matches is inside modules that another pattern")):
        fit(Stack(), taken(DropBlock, "*.up"))


def test_a_module_in_two_places_is_wrapped_once() -> None:
    def shared() -> Stack:
        module = Stack()
        module.blocks[2] = module.blocks[0]
        return module

    module = fit(shared(), callback := taken(DropBlock))
    assert callback.module_names == ("blocks.0", "blocks.1", "blocks.3")
    reference = fit(shared())
    for ours, theirs in zip(module.gradients, reference.gradients, strict=True):
        assert all(map(torch.equal, ours, theirs))
    assert len(module.blocks[0].runs) == 2 * len(reference.blocks[0].runs)


def test_models_that_checkpoint_by_themselves_are_refused() -> None:
    module, batches = project("gpt2")
    # transformers 5 has given it a second name and warns of the first.
    model = module.model
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    with pytest.raises(MisconfigurationException, match="gradient_checkpointing switched on"):
        fit(module, taken("GPT2Block"), batches=batches)


def test_wrappers_that_checkpoint_are_refused() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    module = Stack()
    module.blocks[1] = checkpoint_wrapper(module.blocks[1])
    with pytest.raises(MisconfigurationException, match=r"a wrapper around 'blocks.1._checkpoint_wrapped_module'"):
        fit(module, taken(DropBlock))


# -- what is left ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", [None, "on_train_batch_start", "on_before_backward", "on_train_batch_end"])
@pytest.mark.parametrize("plugin", [None, "policy"])
def test_everything_is_taken_off(where: str | None, plugin: str | None) -> None:
    module = Stack()
    own = module.blocks[0].forward = partial(DropBlock.forward, module.blocks[0])  # the user's stays
    callbacks = [taken(DropBlock), *([at(raising(RuntimeError("planted")), where)] if where else [])]
    plugins = [PLUGINS[plugin]()] if plugin else []
    if where:
        with pytest.raises(RuntimeError, match="planted"):
            fit(module, *callbacks, plugins=plugins)
    else:
        fit(module, *callbacks, plugins=plugins)
    assert module.blocks[0].forward is own
    assert not any("forward" in vars(inner) for inner in module.modules() if inner is not module.blocks[0])
    # No hook is left either: tensors are saved as they are.
    x = torch.ones(2, requires_grad=True)
    assert isinstance((x * x).grad_fn._saved_self, Tensor)
    assert not torch.nn.modules.module._global_forward_hooks


def test_a_second_fit_is_like_the_first() -> None:
    callback = taken(DropBlock)
    trainer = quiet_trainer(callbacks=[callback])
    first = Stack()
    trainer.fit(first, loader(regression_batches(2)))
    report = callback.report
    module = fit(Stack(), callback)
    assert_same(module, fit(Stack()))
    assert callback.report == report


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_made_in_the_fit_is_a_module_of_its_own(copier: Any) -> None:
    class Copies(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                self.copy = copier(pl_module.blocks)

    module = fit(Stack(), taken(DropBlock), copies := Copies())
    assert copies.copy[0].forward.args[0].__self__ is copies.copy[0]
    before = runs(module)
    x = torch.randn(4, WIDTH, requires_grad=True)
    copies.copy[0](x).sum().backward()
    assert runs(module) == before
    assert x.grad is not None


def test_double_backward_runs_again_and_again() -> None:
    """A gradient penalty: the second run must be as good as often as it is asked for, statistics included."""

    class Penalty(Stack):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x = batch[0].clone().requires_grad_()
            loss = super().training_step([x, batch[1]], batch_idx)
            (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
            return loss + gradient.square().sum()

    assert_same(fit(Penalty(), taken(DropBlock)), fit(Penalty()))


def test_attention_runs_again_by_the_kernel_that_was_allowed() -> None:
    """A module that asks for a kernel around its forward: backward, where the second run is, knows nothing of that."""

    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            mixed: Tensor = nn.functional.scaled_dot_product_attention(*[self.mix(x).unflatten(-1, (2, 4))] * 3)
            return mixed.flatten(-2)

    def loss(module: Any, batch: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return module.block(batch).square().mean()

    ends, data = [], loader(list(torch.randn(3, 2, 6, 8)))
    for callbacks in ([], [ActivationCheckpointing(Attending)]):
        module = Trained(loss, block=Attending)
        quiet_trainer(callbacks=callbacks, plugins=[AutocastPrecision("bf16-mixed")]).fit(module, data)
        ends.append(weights(module))
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
