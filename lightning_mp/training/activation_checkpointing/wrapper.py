"""Activation checkpoints on any module: its forward keeps its inputs only, and runs again when backward comes to it.

``module.forward`` becomes ``functools.partial(run_checkpointed, module.forward, switch, state)``. Names of parameters
and buffers stay as they are, torch.compile traces through it, and a deep copy of the module gets its own method.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from types import TracebackType
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from lightning_mp.ground.core.devices import default_dtype
from lightning_mp.ground.core.messages import listed
from lightning_mp.ground.core.nested_tensors import tensors_in
from lightning_mp.ground.modules.forward_wrapper import WrappedForwards
from lightning_mp.training.activation_checkpointing.buffers import FoundBuffers, WatchedBuffers
from lightning_mp.training.activation_checkpointing.cost import StepCost


class CheckpointSwitch:
    """Whether checkpoints are made, and who counts what they cost. Copies of a module share it."""

    def __init__(self) -> None:
        self.on = False
        self.cost: StepCost | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "CheckpointSwitch":
        return self

    @override
    def __reduce__(self) -> tuple[type["CheckpointSwitch"], tuple[()]]:
        return CheckpointSwitch, ()  # loaded from a file it is off


class CheckpointedState:
    """What the second run of a module has to mind."""

    def __init__(self, module: nn.Module) -> None:
        self.buffers = WatchedBuffers(module)
        self.runs = RecomputeToEnd(module)


def run_checkpointed(
    forward: Callable[..., Any], switch: CheckpointSwitch, state: CheckpointedState, *args: Any, **kwargs: Any
) -> Any:
    """Runs a module's forward under a non-reentrant checkpoint; without gradients, as in evaluation, as it is.

    The random state, the autocast, the default dtype and the kernels allowed for attention
    (``torch.nn.attention.sdpa_kernel``) of the first run are those of the second, and so are the buffers; what a
    forward does to them is done once.
    """
    if not switch.on or not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    args = tuple(None if _is_cache(value) else value for value in args)
    kwargs = {name: None if _is_cache(value) else value for name, value in kwargs.items()}
    if torch.compiler.is_compiling():
        if _is_attention_restricted():
            # Where the compiler gives up inside of the module, as at hooks of FSDP2, the checkpoint runs uncompiled.
            forward = partial(_with_attention, forward, _attention_backends())
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)
    forward = state.runs.of_call(forward)
    cost, attention, dtype = switch.cost, _attention_backends(), torch.get_default_dtype()
    is_plain = len(attention) == len(_ATTENTION_SWITCHES) and dtype == torch.float32
    if cost is None and not state.buffers and is_plain:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)
    if cost is not None:
        cost.begin_call(kwargs)

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        found = FoundBuffers(state.buffers)
        return _first_run(found, cost), _SecondRun(found, cost, attention, dtype)

    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


# No dict: torch.compile cannot guard on keys of this kind.
_ATTENTION_SWITCHES: tuple[tuple[SDPBackend, Callable[[], bool]], ...] = (
    (SDPBackend.MATH, torch.backends.cuda.math_sdp_enabled),
    (SDPBackend.FLASH_ATTENTION, torch.backends.cuda.flash_sdp_enabled),
    (SDPBackend.EFFICIENT_ATTENTION, torch.backends.cuda.mem_efficient_sdp_enabled),
    (SDPBackend.CUDNN_ATTENTION, torch.backends.cuda.cudnn_sdp_enabled),
)


def _attention_backends() -> list[SDPBackend]:
    """Those that are allowed now, on any device: another kernel in the second run would save other tensors."""
    return [backend for backend, is_enabled in _ATTENTION_SWITCHES if is_enabled()]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_attention_restricted() -> bool:
    """Asked when code is compiled, where the switches themselves would break its graph."""
    return len(_attention_backends()) < len(_ATTENTION_SWITCHES)


def _with_attention(forward: Callable[..., Any], attention: list[SDPBackend], *args: Any, **kwargs: Any) -> Any:
    with sdpa_kernel(attention):
        return forward(*args, **kwargs)


def _is_cache(value: Any) -> bool:
    """A Hugging Face key-value cache: a second run would find its own keys in there, so training goes without."""
    return any(kind.__name__ == "Cache" and kind.__module__.startswith("transformers.") for kind in type(value).__mro__)


@contextmanager
def _first_run(found: FoundBuffers, cost: StepCost | None) -> Iterator[None]:
    with found, cost.first_run() if cost is not None else nullcontext():
        yield


class _SecondRun:
    """Around the second run: buffers are copies for that time. It may be entered again and again."""

    def __init__(
        self, found: FoundBuffers, cost: StepCost | None, attention: list[SDPBackend], dtype: torch.dtype
    ) -> None:
        self._found = found
        self._cost = cost
        self._attention = attention
        self._dtype = dtype
        self._stack = ExitStack()

    def __enter__(self) -> None:
        self._stack.enter_context(sdpa_kernel(self._attention))
        # Lightning's 16-bit precisions set another default dtype in a forward, and run backward outside it.
        self._stack.enter_context(default_dtype(self._dtype))
        if self._cost is not None:
            self._cost.begin_second_run()
        self._found.restore_snapshot()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._found.undo_restore()
        if self._cost is not None:
            self._cost.end_second_run()
        self._stack.close()


class CheckpointedModules:
    """Modules whose forwards are wrapped until :meth:`detach`, and what one of their micro-batches is counted by."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.switch = CheckpointSwitch()
        self.is_counted = False
        self._forwards = WrappedForwards()
        self._states: list[CheckpointedState] = []
        self._before_step: list[FoundBuffers] = []
        for module in modules:
            self._states.append(CheckpointedState(module))
            self._forwards.wrap(module, run_checkpointed, self.switch, self._states[-1])
        self.switch.on = True

    def begin_compiled_step(self) -> None:
        """Notes the buffers before the first forward of a compiled model, which no context can be put around."""
        for state in self._states:
            found = FoundBuffers(state.buffers)
            found.note()
            self._before_step.append(found)

    def end_compiled_forward(self) -> None:
        """Refuses what cannot be kept."""
        steps, self._before_step = self._before_step, []
        names = [name for found in steps for name in found.changed_unseen()]
        if names:
            raise MisconfigurationException(
                f"ActivationCheckpointing: a checkpointed module changes buffers in its forward ({listed(names)}), and"
                " the model is compiled: torch.compile would change them again in the recomputation, and compute with"
                " other values. Do not compile that module, or leave it out of ActivationCheckpointing."
            )

    def begin_counting(self, cost: StepCost) -> None:
        """Starts to count what a micro-batch saves and costs."""
        self.switch.cost = cost
        cost.begin()

    def end_counting(self) -> StepCost | None:
        """Ends it; what was counted, None if nothing is."""
        cost, self.switch.cost = self.switch.cost, None
        if cost is not None:
            cost.end()
        return cost

    def detach(self) -> None:
        """Restores every module's own forward; where other code wrapped it meanwhile, only switches the wrapper off."""
        self.end_counting()
        self.switch.on = False
        self._forwards.undo()
        self._states.clear()
        self._before_step.clear()


_FILLS_WHAT_IT_SAVED = "RreluWithNoise"


class RecomputeToEnd:
    """Whether second runs of a module have to run to the end; found out in its first call in training."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._needed = any(isinstance(inner, nn.RReLU) for inner in module.modules())
        self._is_known = self._needed

    def of_call(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """What to run under the checkpoint of one call, in place of the forward."""
        if self._is_known and not self._needed:
            return forward
        return partial(_run, forward, self)

    def learn(self, args: Any, output: Any) -> bool:
        """Looks for such an operation in the graph between inputs and output, once."""
        if not self._is_known:
            self._is_known = self._module.training
            ends = {tensor.grad_fn for tensor in tensors_in(args)}
            self._needed = _has_node(_FILLS_WHAT_IT_SAVED, (tensor.grad_fn for tensor in tensors_in(output)), ends)
        return self._needed


def _run(forward: Callable[..., Any], runs: RecomputeToEnd, *args: Any, **kwargs: Any) -> Any:
    output = forward(*args, **kwargs)
    if runs.learn((args, kwargs), output):
        torch.ones((), requires_grad=True).square()  # saves a tensor: the last that the second run has to come to
    return output


def _has_node(name: str, nodes: Iterable[Any], ends: set[Any]) -> bool:
    # nodes, not their ids: Python's view of a node goes with its last reference, and its id is used again
    waiting, seen = [node for node in nodes if node is not None], set(ends)
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.name().startswith(name):
            return True
        waiting.extend(following for following, _ in node.next_functions if following is not None)
    return False
