"""AutocastPrecision(fp32_eval_outputs=True): steps of evaluation see fp32 outputs of forwards in 16 bit."""

import copy
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from small_models import WIDTH, quiet_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_mp import AutocastPrecision


@dataclass
class Output:
    logits: Tensor
    name: str = "a"


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.inner: set[torch.dtype] = set()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if not torch.compiler.is_compiling():
            self.inner.add(hidden.dtype)
        return self.second(hidden.relu())

    def encode(self, x: Tensor) -> Tensor:
        return self.first(x)


class Net(pl.LightningModule):
    def __init__(self, call: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.parts, self.metric = Body(), nn.ModuleDict({"head": Body()}), MeanMetric()
        self.call = call
        self.seen: list[torch.dtype] = []
        self.copies: list[nn.Module] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.call(self, batch[0])

    def note(self, batch: Any) -> Tensor:
        output = self(batch[0])
        self.seen.append(output.dtype)
        self.copies.append(copy.deepcopy(self.body))
        self.metric(output.float().mean())
        return output.float().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.note(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.note(batch)

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


CALLS: dict[str, Callable[[Any, Tensor], Any]] = {
    "the module itself": lambda module, x: module(x).numpy(),
    "a child": lambda module, x: module.body(x).numpy(),
    "a child in a container": lambda module, x: module.parts["head"](x).numpy(),
    "a child after another": lambda module, x: module.parts["head"](torch.cat([module(x)] * 4, dim=1)).numpy(),
    "another method": lambda module, x: module.body.encode(x),
    "a dict": lambda module, x: {"logits": module.body.encode(x), "names": ["a"]},
    "a dataclass": lambda module, x: Output(module.body.encode(x)),
}


def data() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    return DataLoader(torch.randn(6, 1, WIDTH, generator=generator), 3)


def values(predicted: Any) -> list[Tensor]:
    if isinstance(predicted, list):
        return [tensor for each in predicted for tensor in values(each)]
    predicted = predicted["logits"] if isinstance(predicted, dict) else getattr(predicted, "logits", predicted)
    return [torch.as_tensor(predicted)]


def predicted(
    call: Callable[[Any, Tensor], Any], precision: Any, *, is_compiled: bool = False, **arguments: Any
) -> Any:
    module = Net(call)
    if is_compiled:
        module.body.compile(backend="eager", fullgraph=True)
    plugin = AutocastPrecision(precision, **arguments)
    outputs = values(quiet_trainer(plugins=[plugin]).predict(module, data()))
    assert all("forward" not in vars(part) for part in module.modules())
    assert is_compiled or module.body.inner <= {plugin.dtype}
    return outputs


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("name", CALLS)
def test_predictions_are_fp32_with_the_numbers_of_16_bit(name: str, precision: str, is_compiled: bool) -> None:
    call = CALLS[name]
    found = predicted(call, precision, is_compiled=is_compiled, fp32_eval_outputs=True)
    assert {tensor.dtype for tensor in found} == {torch.float32}
    body, head = Body(), Body()
    module = Net(call)
    body.load_state_dict(module.body.state_dict())
    head.load_state_dict(module.parts["head"].state_dict())
    low = AutocastPrecision(precision).dtype
    with torch.autocast("cpu", low), torch.no_grad():
        for tensor, batch in zip(found, data(), strict=True):
            x = batch[0]
            hidden = body(x) if "method" not in name and name[2] != "d" else body.encode(x)
            if "container" in name:
                hidden = head(x)
            if "after" in name:
                hidden = head(torch.cat([hidden] * 4, dim=1))
            assert hidden.dtype == low
            assert torch.equal(tensor, hidden.float())


def test_without_the_argument_predictions_stay_in_16_bit() -> None:
    found = predicted(lambda module, x: module(x), "bf16-mixed")
    assert {tensor.dtype for tensor in found} == {torch.bfloat16}


def test_training_steps_stay_in_16_bit_and_copies_keep_working() -> None:
    module = Net(lambda module, x: module(x))
    plugin = AutocastPrecision("bf16-mixed", fp32_eval_outputs=True)
    trainer = quiet_trainer(plugins=[plugin], max_epochs=2, num_sanity_val_steps=0)
    trainer.fit(module, data(), data())
    both = [torch.bfloat16] * 2 + [torch.float32] * 2
    assert module.seen == both * 2
    trainer.test(module, data(), verbose=False)
    assert module.seen[8:] == [torch.float32] * 2
    with torch.autocast("cpu", torch.bfloat16):
        assert {part(torch.zeros(1, WIDTH)).dtype for part in module.copies} == {torch.bfloat16}


def test_a_forward_that_fails_leaves_the_next_one_alone() -> None:
    calls = iter([True, False])

    def call(module: Any, x: Tensor) -> Any:
        with suppress(RuntimeError):
            module(x[:, :1] if next(calls) else x)
        return module(x).dtype == torch.float32

    trainer = quiet_trainer(plugins=[AutocastPrecision("bf16-mixed", fp32_eval_outputs=True)])
    assert trainer.predict(Net(call), data()) == [True, True]
