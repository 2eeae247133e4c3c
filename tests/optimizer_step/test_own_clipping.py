"""A module's own hook clips there and then, in the order of its calls, and what it leaves is stepped with."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from fsdp2_runs import runs_in_a_weighted_window
from small_models import Regression, TokenModel, fit, regression_batches, weights
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_mp import AutocastPrecision, LossScaler, MasterWeightsPrecision

PLUGINS: dict[str, Any] = {
    "bf16-mixed": lambda: AutocastPrecision("bf16-mixed"),
    "16-mixed": lambda: AutocastPrecision("16-mixed", scaler=LossScaler("cpu", init_scale=64.0)),
    "bf16-true": lambda: MasterWeightsPrecision("bf16-true"),
    "16-true": lambda: MasterWeightsPrecision("16-true", scaler=LossScaler("cpu", init_scale=64.0)),
}
CALLS: dict[str, list[Any]] = {
    "norm": [(0.5, "norm")],
    "value": [(0.1, "value")],
    "value, norm": [(0.2, "value"), (0.5, "norm")],
    "norm, value": [(0.5, "norm"), (0.02, "value")],
    "norm, smaller norm": [(1.0, "norm"), (0.1, "norm")],
    "norm, larger norm": [(0.1, "norm"), (1.0, "norm")],
    "norm, noise": [(0.5, "norm"), 1.0],
    "noise, norm, noise": [1.0, (0.5, "norm"), 1.0],
}


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


def fused_sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0, fused=True)


class Clips(Regression):
    """Does the same with copies of its gradients as torch does it, and compares after each call."""

    def __init__(self, optimizer: Any, calls: list[Any], how: str = "clip_gradients") -> None:
        super().__init__(optimizer)
        self.calls, self.how, self.left = calls, how, list[Tensor]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return 50 * super().training_step(batch, batch_idx)

    def clip_as_torch_does(self, optimizer: Any) -> None:
        true = [nn.Parameter(p.detach().float()) for p in self.parameters()]
        for copy, parameter in zip(true, self.parameters(), strict=True):
            copy.grad = parameter.grad.detach().float().clone()
        for call in self.calls:
            if isinstance(call, float):
                for parameter in (*true, *self.parameters()):
                    parameter.grad.add_(call)
                continue
            limit, algorithm = call
            torch_clips = {"norm": nn.utils.clip_grad_norm_, "value": nn.utils.clip_grad_value_}[algorithm]
            torch_clips(true, limit)
            if self.how == "super":
                super().configure_gradient_clipping(optimizer, limit, algorithm)
            else:
                self.clip_gradients(optimizer, gradient_clip_val=limit, gradient_clip_algorithm=algorithm)
            for copy, parameter in zip(true, self.parameters(), strict=True):
                torch.testing.assert_close(parameter.grad.float(), copy.grad, rtol=1e-5, atol=1e-7)
        self.left = [copy.grad for copy in true]


class ClipsLast(Clips):
    def configure_gradient_clipping(self, optimizer: Any, *limits: Any, **named: Any) -> None:
        self.clip_as_torch_does(optimizer)


class ClipsBefore(Clips):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.clip_as_torch_does(optimizer)


def steps_with_what_the_hook_left(module: Clips, plugin: Any, **arguments: Any) -> None:
    before = [weight.float() for weight in weights(module)]
    fit(module, regression_batches(1), plugin=plugin, **arguments)
    assert module.left
    for now, was, gradient in zip(weights(module), before, module.left, strict=True):
        torch.testing.assert_close(was - now.float(), gradient, rtol=1e-2, atol=4e-3)


@pytest.mark.quick_cases(12)
@pytest.mark.parametrize("calls", CALLS)
@pytest.mark.parametrize("optimizer", [sgd, fused_sgd])
@pytest.mark.parametrize("precision", PLUGINS)
def test_calls_of_an_own_hook_clip_in_their_order(precision: str, optimizer: Any, calls: str) -> None:
    steps_with_what_the_hook_left(ClipsLast(optimizer, CALLS[calls]), PLUGINS[precision]())


@pytest.mark.parametrize("optimizer", [sgd, fused_sgd])
@pytest.mark.parametrize(
    ("kind", "how"), [(ClipsLast, "super"), (ClipsBefore, "clip_gradients")], ids=["super", "before the step"]
)
def test_by_super_and_from_the_hook_before(kind: Any, how: str, optimizer: Any) -> None:
    steps_with_what_the_hook_left(kind(optimizer, CALLS["noise, norm, noise"], how), PLUGINS["16-mixed"]())


@pytest.mark.parametrize("precision", PLUGINS)
def test_lightnings_own_test_of_clipping_by_norm(precision: str) -> None:
    """``test_gradient_clipping_by_norm`` of Lightning 2.6, whose hook calls ``super`` and reads the norm."""
    norms = []

    class TestModel(Regression):
        def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
            super().configure_gradient_clipping(*args, **kwargs)
            norms.append(torch.stack([p.grad.detach().norm(2) for p in self.parameters()]).norm(2))

    fit(TestModel(), regression_batches(4), plugin=PLUGINS[precision](), gradient_clip_val=0.05)
    assert len(norms) == 4
    torch.testing.assert_close(torch.stack(norms), torch.full((4,), 0.05))


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_an_overflow_is_skipped_whatever_the_hook_clips(algorithm: str) -> None:
    module = ClipsLast(fused_sgd, [])
    module.clip_as_torch_does = lambda optimizer: module.clip_gradients(optimizer, 0.5, algorithm)  # type: ignore[method-assign]
    module.overflows = {0}
    before = weights(module)
    plugin = PLUGINS["16-mixed"]()
    fit(module, regression_batches(1), plugin=plugin)
    assert all(map(torch.equal, weights(module), before))
    assert plugin.scaler.get_scale() == 32.0


class ClipsTokens(TokenModel):
    def __init__(self) -> None:
        super().__init__(sgd)
        self.norms: list[float] = []

    def configure_gradient_clipping(self, optimizer: Any, *limits: Any, **named: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="norm")
        gradients = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in self.parameters()]
        self.norms.append(float(torch.stack([g.norm() for g in gradients]).norm()))


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_over_ranks_and_in_a_weighted_window(strategy: str) -> None:
    """The whole gradient's norm is the limit, and the step that of one process with all micro-batches."""

    (_, whole), *both = runs = runs_in_a_weighted_window(ClipsTokens, strategy)
    for norms, _ in runs:
        assert norms == pytest.approx([0.01, 0.01], rel=1e-3)
    for _, ours in both:
        for name, value in whole.items():
            torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5)
