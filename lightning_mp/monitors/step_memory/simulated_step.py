"""One training step on fake tensors, in the order of Lightning's loop, and what is alive at each moment."""

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from typing_extensions import override

from lightning_mp.ground.core import private_dispatch_api
from lightning_mp.ground.core.half_dtypes import CAST_DTYPES, HALF_DTYPES
from lightning_mp.ground.core.messages import place_of
from lightning_mp.ground.core.nested_tensors import tensors_in
from lightning_mp.ground.core.precisions import PrecisionSpec
from lightning_mp.ground.flops.grouped_products import GroupedProducts, backward_in_modes
from lightning_mp.ground.flops.meta_masks import MasksWithoutNumbers
from lightning_mp.ground.modules.stand_ins import batch_with, module_with, run_forward, sum_of_outputs
from lightning_mp.monitors.step_memory.kernels import CudaKernels, cpu_workspace_bytes
from lightning_mp.monitors.step_memory.live_storages import PARTS, LiveStorages, MemorySample, Part
from lightning_mp.monitors.step_memory.sharded_units import ShardedUnits, Sharding, gathered_dtype_of
from lightning_mp.monitors.step_memory.stand_in_optimizer import OptimizerFactory, StandInOptimizer, make_optimizers
from lightning_mp.training.gradients.old_gradients import module_needs_old_gradients
from lightning_mp.training.policy.applied import AppliedPolicy
from lightning_mp.training.policy.float8_layers import choose_float8_layers
from lightning_mp.training.policy.operations import KNOWN_OPERATIONS, by_autocast, operations_named
from lightning_mp.training.policy.policy import PrecisionPolicy
from lightning_mp.training.policy.weights_in_float32 import kept_in_float32, with_exact_parametrizations

_FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


def stand_in_for(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """An empty tensor of the same shape; in a fake tensor mode it has no memory."""
    if tensor.layout != torch.strided:
        raise ValueError(f"estimate_memory() was given a {tensor.layout} tensor. Pass dense tensors.")
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device="cpu")


class StandInModel:
    """A copy of a module with stand-ins for its tensors, cast and wrapped as the plugin of a precision would.

    Create it in a fake tensor mode.
    """

    def __init__(
        self,
        module: nn.Module,
        precision: PrecisionSpec,
        *,
        policy: PrecisionPolicy | None,
        device_type: str,
        sharding: Sharding | None = None,
    ) -> None:
        self._precision = precision
        self.fp32_gradients = precision.fp32_gradients and sharding is None  # FSDP2 reduces in fp32
        self._is_autocast = precision.autocast or precision.master_bytes > 0
        if precision.master_bytes > 0:
            policy = with_exact_parametrizations(policy, module)
        kept = _kept_in_float32(module, precision, policy)
        if sharding is not None and self._is_autocast:
            kept = gathered_dtype_of(module, sharding.units, precision, policy)
        self.module = module_with(module, lambda tensor: stand_in_for(tensor, kept(tensor)))
        chosen = choose_float8_layers(self.module) if precision.fp8 else []
        fp8 = [layer.module for layer in chosen if layer.skipped_because is None]
        for layer in fp8:
            layer.forward = partial(_fp8_linear, layer, _emulated_product if device_type == "cpu" else _product)  # type: ignore[method-assign]
        self._policy: AppliedPolicy | None = None
        rules = _rules(policy, device_type) if self._is_autocast else policy
        if rules is not None:
            self._policy = AppliedPolicy(rules, self.module, "cpu", fp8)

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """What a plugin puts around a forward."""
        dtype = self._precision.compute_dtype
        casts = self._is_autocast or self._policy is not None
        with ExitStack() as stack:
            if casts:
                stack.enter_context(torch.autocast("cpu", dtype, cache_enabled=self._precision.cache_weights))
            elif self._precision.weight_dtype != torch.float32:
                stack.callback(torch.set_default_dtype, torch.get_default_dtype())
                torch.set_default_dtype(dtype)
            if self._policy is not None:
                stack.enter_context(self._policy.in_force(dtype))
            yield

    @contextmanager
    def backward_context(self) -> Iterator[None]:
        """What a plugin puts around a backward: rules hold for what a checkpoint runs again."""
        with ExitStack() as stack:
            stack.enter_context(torch.autocast("cpu", enabled=False))  # its end empties the cache
            if self._policy is not None:
                stack.enter_context(self._policy.in_force(self._precision.compute_dtype))
            yield

    def cast_input(self, tensor: Tensor) -> Tensor:
        """A stand-in for a tensor of the batch, in the format of 16-bit weights."""
        narrow = self._precision.weight_dtype != torch.float32 and not self._is_autocast
        return stand_in_for(tensor, self._precision.weight_dtype if narrow and tensor.is_floating_point() else None)


def _kept_in_float32(
    module: nn.Module, precision: PrecisionSpec, policy: PrecisionPolicy | None
) -> Callable[[Tensor], torch.dtype | None]:
    """The format in which a tensor of the module is held; None for its own.

    Of weights with 16-bit copies the copies are the module's, and the fp32 parameters are with the optimizer.
    """
    if precision.weight_dtype == torch.float32:
        return lambda tensor: None
    if precision.master_bytes == 0:
        return lambda tensor: precision.weight_dtype if tensor.dtype in CAST_DTYPES else None
    kept = {
        id(parameter)
        for part in kept_in_float32(module, policy, precision.compute_dtype)
        for parameter in part.parameters(recurse=False)
    }
    lent = {id(p) for p in module.parameters() if p.requires_grad and p.dtype in CAST_DTYPES}

    def dtype_of(tensor: Tensor) -> torch.dtype | None:
        if id(tensor) not in lent:  # frozen weights and buffers
            return None
        return torch.float32 if id(tensor) in kept else precision.weight_dtype

    return dtype_of


def _rules(policy: PrecisionPolicy | None, device_type: str) -> PrecisionPolicy | None:
    """The rules of the policy, and what autocast of the device type does beyond that of the CPU, where this runs."""
    rules: list[Any] = list(policy.rules) if policy is not None else []
    ruled = {name for rule in rules if rule.kind == "op" for name in operations_named(str(rule.pattern))}
    rules += [
        (f"op:{name}", "fp32")
        for name in sorted(KNOWN_OPERATIONS - ruled)
        if by_autocast(name, device_type) == "fp32" and by_autocast(name, "cpu") != "fp32"
    ]
    return PrecisionPolicy(rules) if rules else None


# -- fp8 ---------------------------------------------------------------------------------------------------------------


def _fp8_linear(layer: nn.Linear, product_of: Callable[..., Tensor], x: Tensor) -> Tensor:
    product: Callable[..., Tensor] = _Fp8Product.apply
    low = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
    output = product(x.to(low), layer.weight.t(), product_of)
    return output if layer.bias is None else output + layer.bias.to(output.dtype)


class _Fp8Product(torch.autograd.Function):
    """Saves and makes what torchao's fp8 product does: the inputs in their own format, rounded copies on the way."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, weight: Tensor, product_of: Callable[..., Tensor]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.product_of = product_of
        return product_of(_rounded(x), _rounded(weight), x.dtype)

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        of_input = ctx.product_of(_rounded(gradient), _rounded(weight.t()), x.dtype)
        flat = gradient.reshape(-1, gradient.shape[-1])
        of_weight = ctx.product_of(_rounded(flat.t()), _rounded(x.reshape(-1, x.shape[-1])), x.dtype)
        return of_input, of_weight.t(), None


def _rounded(tensor: Tensor) -> Tensor:
    wide = tensor.to(torch.float32)
    scaled = wide * tensor.abs().amax(-1, keepdim=True).float()
    return scaled.clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(*left.shape[:-1], right.shape[-1], dtype=dtype, device=left.device)


def _emulated_product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """A CPU multiplies in fp32: both sides are widened and divided by their scales, the result is narrowed."""
    with torch.autocast("cpu", enabled=False):
        result = torch.empty(*left.shape[:-1], right.shape[-1], dtype=dtype, device=left.device)
        wide, other = left.float(), right.float()
        return result.copy_(torch.matmul(wide / 1.0, other / 1.0).to(dtype))


@contextmanager
def _without_one_dnn() -> Iterator[None]:
    """An LSTM is taken step by step: what a fused kernel keeps, oneDNN's or cuDNN's, fake tensors do not show."""
    set_flags: Callable[..., Sequence[Any]] = torch.backends.mkldnn.set_flags
    was_enabled = set_flags(_enabled=False, _fp32_precision=None)[0]
    try:
        yield
    finally:
        set_flags(_enabled=was_enabled, _fp32_precision=None)


StepFunction = Callable[[nn.Module, Any], Any]
DDPGradients = Literal["copied to buckets", "views"]
_KNOWN: tuple[Part | None, ...] = (
    None,
    "weights",
    "gathered weights",
    "buffers",
    "batch",
    "weight casts",
    "gradients",
    "masters",
    "optimizer states",
)


def simulate_step(
    module: nn.Module,
    batch: Any,
    step: StepFunction | None,
    *,
    optimizer: str | OptimizerFactory | None,
    precision: PrecisionSpec,
    policy: PrecisionPolicy | None,
    device_type: str,
    accumulates: bool = False,
    ddp_gradients: DDPGradients | None = None,
    sharding: Sharding | None = None,
    prepare: Callable[[nn.Module], None] | None = None,
) -> list[MemorySample]:
    """What is alive during the second step of a run, when gradients and optimizer states are there.

    Lightning clears gradients between forward and backward, so those of the step before live through the forward; the
    plugins of this package free them before it. Where the step ``accumulates``, the gradients of earlier micro-batches
    live through both, and each new one comes on top until it is added: at once, or, where it is that of a copy that a
    parameter was lent, when backward has ended. Under DDP copies are leaves, and gradients that are views move into
    their buckets as they come. With ``sharding``, FSDP2 gathers and reduces unit by unit.
    """
    fake = private_dispatch_api.FakeTensorMode(allow_non_fake_inputs=True)
    live = LiveStorages(cpu_workspace_bytes if device_type == "cpu" else None)
    units = None
    with fake:
        model = StandInModel(module, precision, policy=policy, device_type=device_type, sharding=sharding)
        inputs = batch_with(batch, model.cast_input)
        if prepare is not None:
            prepare(model.module)
        if sharding is not None:
            run_by = {"on_gloo": device_type == "cpu", "accumulates": accumulates}
            units = ShardedUnits(model.module, sharding, precision, policy, live, **run_by)
    optimizers = _stand_in_optimizers(model.module, optimizer, units, precision, device_type)
    run = step if step is not None else _default_step(module)
    has_padding = _has_padding(batch)  # reads numbers, which fails in a fake tensor mode
    _count_what_is_kept(model.module, inputs, optimizers, live, is_sharded=units is not None)
    learning = [parameter for parameter in model.module.parameters() if parameter.requires_grad]
    gradients = partial(
        _counted_gradients,
        learning,
        live,
        in_fp32=model.fp32_gradients,
        are_lent=precision.master_bytes > 0 and ddp_gradients is None and units is None,
        are_added=(accumulates or ddp_gradients == "views") and units is None,
    )
    with _on_fake_tensors(fake, live, device_type):
        for around in (nullcontext(),) if units is None else units.micro_batches():
            with around:
                of_units = run if units is None else partial(units.run, run)
                _forward_and_backward(model, inputs, of_units, live, gradients, has_padding=has_padding)
    states, summed = _make_states(optimizers, learning if units is None else units.shards.values(), live)
    if accumulates:  # where they are counted whole, shards have none yet
        in_forward = in_backward = summed if units is None or units.accumulates else 0
    else:
        in_forward, in_backward = 0 if _frees_gradients(module, precision) else summed, 0
    before = _in_a_later_step(live.samples, {"forward": in_forward, "backward": in_backward}, states)
    return before + _optimizer_steps(optimizers, live)


def _stand_in_optimizers(
    module: nn.Module,
    optimizer: str | OptimizerFactory | None,
    units: ShardedUnits | None,
    precision: PrecisionSpec,
    device_type: str,
) -> list[StandInOptimizer]:
    made = make_optimizers(module, optimizer)
    if units is not None:
        for one in made:
            units.use_shards(one)
    return [StandInOptimizer(one, precision, device_type) for one in made]


def _count_what_is_kept(
    module: nn.Module, inputs: Any, optimizers: Sequence[StandInOptimizer], live: LiveStorages, *, is_sharded: bool
) -> None:
    """Counts what is there before the step."""
    live.add(None if is_sharded else "weights", module.parameters())
    live.add("buffers", module.buffers(), unless=("weights",))
    live.add("batch", tensors_in(inputs))
    live.add("masters", [master for one in optimizers for master in one.masters])
    live.add("weights", [tensor for one in optimizers for tensor in one.padding])


@contextmanager
def _on_fake_tensors(fake: Any, live: LiveStorages, device_type: str) -> Iterator[None]:
    with (
        torch.random.fork_rng(enabled=True),
        _without_one_dnn(),
        private_dispatch_api.observe_dispatch(live.after_operation),
        fake,
        GroupedProducts(),
        CudaKernels() if device_type == "cuda" else nullcontext(),
    ):
        yield


def _make_states(
    optimizers: Sequence[StandInOptimizer], trained: Iterable[Tensor], live: LiveStorages
) -> tuple[int, int]:
    """Makes the first step of each optimizer; returns the bytes of their states, and of the gradients."""
    live.add("gradients", [parameter.grad for parameter in trained if parameter.grad is not None])
    for one in optimizers:
        one.step()
        live.add("optimizer states", one.states)
    return live.bytes_by_part.get("optimizer states", 0), live.bytes_by_part.get("gradients", 0)


def _optimizer_steps(optimizers: Sequence[StandInOptimizer], live: LiveStorages) -> list[MemorySample]:
    """The moments of one step of each optimizer, whose states are there."""
    live.samples.clear()
    live.phase = "optimizer step"
    live.sample()
    for one in optimizers:
        one.step(live)
    return live.samples


def _frees_gradients(module: nn.Module, precision: PrecisionSpec) -> bool:
    """Whether the last step's gradients are freed before the forward."""
    is_lightning_module = hasattr(module, "on_before_zero_grad")
    return precision.frees_gradients and not (is_lightning_module and module_needs_old_gradients(module))  # type: ignore[arg-type]


def _in_a_later_step(samples: Iterable[MemorySample], gradients: Mapping[str, int], states: int) -> list[MemorySample]:
    """Moments of the first step as they are in a later one: with states, and gradients that are there already."""
    found = []
    for sample in samples:
        parts = {**sample.bytes_by_part, "optimizer states": states}
        parts["gradients"] = parts.get("gradients", 0) + gradients[sample.phase]
        found.append(MemorySample(sample.phase, {part: parts[part] for part in PARTS if parts.get(part)}))
    return found


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
    model: StandInModel,
    inputs: Any,
    run: StepFunction,
    live: LiveStorages,
    gradients: Callable[[], AbstractContextManager[None]],
    *,
    has_padding: bool,
) -> None:
    module = model.module
    with _readable_errors(), warnings.catch_warnings():
        # A LightningModule logs, and has no Trainer here.
        warnings.filterwarnings("ignore", message=r"You are trying to `self\.log\(\)`")
        # Every tensor here represents another one.
        masks = MasksWithoutNumbers(lambda tensor: True, has_padding=has_padding)
        live.phase = "forward"
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
        with gradients(), model.backward_context():
            backward_in_modes(loss)


@contextmanager
def _counted_gradients(
    parameters: Sequence[Tensor], live: LiveStorages, *, in_fp32: bool, are_lent: bool, are_added: bool
) -> Iterator[None]:
    """Counts gradients from their end on, until they are added to those of earlier micro-batches.

    Those of copies that parameters were lent are converted and added last: autograd runs the nodes that were made first
    when nothing else is left to run.
    """
    waiting: list[Tensor] = []

    def count(parameter: Tensor) -> None:
        live.add("gradients", tensors_in(parameter.grad))
        live.sample()
        if are_lent:
            waiting.append(parameter)
        else:
            settle(parameter)

    def settle(parameter: Tensor) -> None:
        assert parameter.grad is not None
        if in_fp32 and parameter.dtype in HALF_DTYPES:
            wide = parameter.grad.float()
            parameter.grad = None
            parameter.grad_dtype = torch.float32
            parameter.grad = wide
        live.add(None if are_added else "gradients", [parameter.grad])
        live.sample()

    handles = [parameter.register_post_accumulate_grad_hook(count) for parameter in parameters]
    yield
    for parameter in waiting:
        settle(parameter)
    for handle in handles:
        handle.remove()


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
