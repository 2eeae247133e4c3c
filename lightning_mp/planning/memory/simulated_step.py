"""One training step on fake tensors, in the order of Lightning's loop, and what is alive at each moment."""

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_mp.core import private_api
from lightning_mp.core.messages import place_of
from lightning_mp.core.nested_tensors import tensors_in
from lightning_mp.core.precisions import PrecisionSpec
from lightning_mp.flops.meta_masks import MasksWithoutNumbers
from lightning_mp.modules.stand_ins import batch_with, run_forward, sum_of_outputs
from lightning_mp.planning.memory.live_storages import PARTS, LiveStorages, MemorySample, Part
from lightning_mp.planning.memory.stand_in_kernels import StandInKernels
from lightning_mp.planning.memory.stand_in_model import StandInModel
from lightning_mp.planning.memory.stand_in_optimizer import OptimizerFactory, StandInOptimizer, make_optimizers
from lightning_mp.policy.policy import PrecisionPolicy

StepFunction = Callable[[nn.Module, Any], Any]
_KNOWN: tuple[Part, ...] = ("weights", "buffers", "batch", "weight casts", "gradients", "masters", "optimizer states")


def simulate_step(
    module: nn.Module,
    batch: Any,
    step: StepFunction | None,
    *,
    optimizer: str | OptimizerFactory | None,
    precision: PrecisionSpec,
    policy: PrecisionPolicy | None,
    device_type: str,
    prepare: Callable[[nn.Module], None] | None = None,
) -> list[MemorySample]:
    """What is alive during the second step of a run, when gradients and optimizer states are there.

    Lightning clears gradients between forward and backward, so those of the step before live through the forward.
    """
    has_padding = _has_padding(batch)
    fake = private_api.FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        model = StandInModel(module, precision, policy=policy, device_type=device_type)
        inputs = batch_with(batch, model.cast_input)
        if prepare is not None:
            prepare(model.module)
        made = make_optimizers(model.module, optimizer)
    optimizers = [StandInOptimizer(one, precision, device_type) for one in made]
    run = step if step is not None else _default_step(module)
    live = LiveStorages()
    live.add("weights", model.module.parameters())
    live.add("buffers", model.module.buffers(), unless=("weights",))
    live.add("batch", tensors_in(inputs))
    live.add("masters", [master for one in optimizers for master in one.masters])
    kernels = StandInKernels(device_type)
    with torch.random.fork_rng(enabled=True), private_api.observe_dispatch(live.after_operation), fake, kernels:
        _forward_and_backward(model, inputs, run, live, has_padding=has_padding)
    gradients = live.bytes_by_part.get("gradients", 0)
    for one in optimizers:
        one.step()  # the first one makes the states
        live.add("optimizer states", one.states)
    states = live.bytes_by_part.get("optimizer states", 0)
    before = [_second_step(sample, gradients, states) for sample in live.samples]
    live.samples.clear()
    live.phase = "optimizer step"
    live.sample()
    for one in optimizers:
        one.step(live)
    return before + live.samples


def _second_step(sample: MemorySample, gradients: int, states: int) -> MemorySample:
    """A moment of the first step as it is in the second: with states, and in the forward with the old gradients."""
    parts = {**sample.bytes_by_part, "optimizer states": states}
    if sample.phase == "forward":
        parts["gradients"] = gradients
    return MemorySample(sample.phase, {part: parts[part] for part in PARTS if parts.get(part)})


def _has_padding(batch: Any) -> bool:
    """Whether an attention mask of the batch, as Hugging Face's collators name it, leaves a token out."""
    if not isinstance(batch, Mapping):
        return isinstance(batch, list | tuple) and any(map(_has_padding, batch))
    return any(
        not bool(value.all())
        if isinstance(value, Tensor) and str(name).endswith("attention_mask") and value.ndim == 2 and not value.is_meta
        else _has_padding(value)
        for name, value in batch.items()
    )


def _forward_and_backward(
    model: StandInModel, inputs: Any, run: StepFunction, live: LiveStorages, *, has_padding: bool
) -> None:
    module = model.module
    with _readable_errors(), warnings.catch_warnings():
        # A LightningModule logs, and has no Trainer here.
        warnings.filterwarnings("ignore", message=r"You are trying to `self\.log\(\)`")
        # Every tensor here stands for another one.
        masks = MasksWithoutNumbers(lambda tensor: True, has_padding=has_padding)
        with model.forward_context(), _saved_as_activations(live), masks:
            output = run(module, inputs)
            loss = sum_of_outputs(output)
        live.sample()  # without the casts that nothing but autocast's cache has held
        if loss is None:
            raise ValueError(
                "estimate_memory() found nothing to differentiate: no output of the step has a gradient. Pass step=, a"
                " function from module and batch to the loss."
            )
        live.phase = "backward"
        live.sample()
        handles = [_count_gradient(parameter, live) for parameter in module.parameters() if parameter.requires_grad]
        with model.backward_context():
            loss.backward()
        for handle in handles:
            handle.remove()


def _count_gradient(parameter: Tensor, live: LiveStorages) -> Any:
    def count(parameter: Tensor) -> None:
        assert parameter.grad is not None
        live.add("gradients", [parameter.grad])
        live.sample()

    return parameter.register_post_accumulate_grad_hook(count)


@contextmanager
def _saved_as_activations(live: LiveStorages) -> Iterator[None]:
    def save(tensor: Tensor) -> Tensor:
        live.add("activations", [tensor], unless=_KNOWN)
        return tensor.detach()

    with saved_tensors_hooks(save, lambda tensor: tensor):
        yield


def _default_step(module: nn.Module) -> StepFunction:
    training_step: Any = getattr(module, "training_step", None)
    if not callable(training_step):
        return run_forward
    takes_index = len(inspect.signature(training_step).parameters) > 1

    def run(module: Any, batch: Any) -> Any:
        output = module.training_step(batch, 0) if takes_index else module.training_step(batch)
        return output["loss"] if isinstance(output, dict) else output

    return run


@contextmanager
def _readable_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if "is not attached to a `Trainer`" in str(error):
            raise ValueError(
                "estimate_memory() runs training_step without a Trainer, which this one needs"
                f" ({str(error).partition('.')[0]}). Pass step=, a function from module and batch to the loss."
            ) from error
        if type(error).__name__ not in ("DataDependentOutputException", "DynamicOutputShapeException"):
            raise
        raise ValueError(
            "estimate_memory() runs the step on fake tensors, which have no data, and"
            f" {place_of(error)} reads a value, for instance by .item(), an `if` on a tensor, or indexing with a mask."
            " Pass step= with a function that does not."
        ) from error
