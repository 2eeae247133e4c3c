"""Frozen weights under autocast: cast once, not at every use.

torch's cache of cast weights takes only leaves that require a gradient, and forgets them after each forward. A frozen
weight, as of the base model under adapters, is therefore cast at every use. Here the forward of each linear or
convolutional module with a frozen parameter runs, under autocast, on a 16-bit copy of that parameter which is kept.

The module itself stays as it is: its parameters, their names, the state dict. The copies cost 2 bytes per frozen
parameter beside its 4.

A copy is made when it is first needed. It is made again before a forward when the weight was written to (the tensor's
version counts that), moved or replaced, and when another loop takes over (training, validation, ...). A weight that has
changed or is trained by the time it is used, as where one training step freezes and unfreezes nets, is cast by torch.

What is written through ``weight.data``, as moving averages often are, torch does not count. So before each forward 16
elements of every weight are compared with those of the forward before. A weight in which they differ is left to torch
for the rest of the run. On a GPU the comparison is read one forward later, but for the first three, so that nothing
waits for it. In a model without frozen weights, a frozen parameter that was put in the place of a trained one is seen
when another loop takes over; until then torch casts it.
"""

import operator
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from lightning_mp.core import private_api
from lightning_mp.core.host_copy import HostCopy
from lightning_mp.modules.class_forward import class_forward
from lightning_mp.modules.forward_wrapper import unwrap_forward
from lightning_mp.policy.module_rules import run_covered

__all__ = ["FrozenModule", "FrozenWeightCache", "run_on_copies"]


# The last argument has the name that it has in the module's own forward.
def _linear(module: Any, weight: Tensor, bias: Tensor | None, input: Tensor) -> Tensor:
    return F.linear(input, weight, bias)


def _convolution(module: Any, weight: Tensor, bias: Tensor | None, input: Tensor) -> Tensor:
    return private_api.convolve(module, input, weight, bias)


def _transposed_linear(module: Any, weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    return torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight).reshape(*x.shape[:-1], weight.shape[1])


# What the forward of these classes, and of subclasses that keep it, does with its two parameters.
_OPERATIONS: Mapping[Any, Callable[..., Tensor]] = {
    nn.Linear.forward: _linear,
    nn.Conv1d.forward: _convolution,
    nn.Conv2d.forward: _convolution,
    nn.Conv3d.forward: _convolution,
}


#: Elements of each weight that are compared, and for how many forwards of a loop the host waits for that.
_SAMPLED = 16
_WAITS = 3


class _Copy(NamedTuple):
    source: nn.Parameter
    storage: Tensor
    """The memory that was copied; kept alive, so that no other memory can come to its address."""
    version: int
    loop: str
    parameter: nn.Parameter

    @property
    def is_current(self) -> bool:
        """Whether the weight is frozen still, and what it was, as far as torch counts what is written to it."""
        source = self.source
        return (
            not source.requires_grad
            and private_api.version_of(source) == self.version
            and source.data_ptr() == self.storage.data_ptr()
            and source.shape == self.storage.shape  # `weight.data = weight.data[:n]` keeps the address
            and source.stride() == self.storage.stride()
        )

    def sample(self) -> Tensor:
        """Some elements, ``[16]``: the same ones each time, from anywhere in the weight's memory."""
        memory, start = self.storage, self.storage.storage_offset()
        elements = min(memory.numel(), memory.untyped_storage().nbytes() // memory.element_size() - start)
        return memory.as_strided((_SAMPLED,), (elements // _SAMPLED,), start)


class FrozenModule:
    """A module, and the 16-bit copies of its frozen parameters by name.

    A deep copy is empty: a copied module casts as torch does.
    """

    def __init__(self, module: nn.Module | None, operation: Callable[..., Tensor] | None, dtype: torch.dtype) -> None:
        self.module = module
        self.operation = operation
        self.dtype = dtype
        self.copies: dict[str, nn.Parameter] = {}
        self._made: dict[str, _Copy] = {}

    def use(self, copies: dict[str, _Copy]) -> None:
        """From now on, these."""
        self._made, self.copies = copies, {name: copy.parameter for name, copy in copies.items()}

    @property
    def is_current(self) -> bool:
        """Whether the module still has the parameters that were copied, as they were."""
        # The compiler cannot trace all of it, and guards what it has traced by `requires_grad`.
        if torch.compiler.is_compiling():
            return not any(getattr(self.module, name).requires_grad for name in self.copies)
        return all(getattr(self.module, name) is copy.source and copy.is_current for name, copy in self._made.items())

    def __deepcopy__(self, memo: dict[int, Any]) -> "FrozenModule":
        return FrozenModule(None, None, self.dtype)

    def __reduce__(self) -> Any:
        return FrozenModule, (None, None, self.dtype)


def run_on_copies(
    forward: Callable[..., Any], frozen: FrozenModule, device_type: str, *args: Any, **kwargs: Any
) -> Any:
    """Runs a module's operation on the copies, if autocast would cast to their dtype; else the module's own forward."""
    module, operation = frozen.module, frozen.operation
    if (
        module is None
        or operation is None
        or not torch.is_autocast_enabled(device_type)
        or torch.get_autocast_dtype(device_type) != frozen.dtype
        or not frozen.is_current
    ):
        return forward(*args, **kwargs)
    weight = frozen.copies.get("weight", module.weight)
    bias = frozen.copies.get("bias", module.bias)
    return operation(module, weight, bias, *args, **kwargs)


class FrozenWeightCache:
    """The copies of one model's frozen weights.

    Args:
        modules: those whose weights autocast runs in 16 bit. Of linear and convolutional modules (not transposed ones,
            and padded with zeros) the frozen parameters are kept; other modules, subclasses with a forward of their
            own, parametrized modules, and those whose ``forward`` was replaced are left to autocast.
        dtype: the 16-bit dtype.
        device_type: of the run.
    """

    def __init__(self, modules: Iterable[nn.Module], dtype: torch.dtype, device_type: str) -> None:
        self._dtype = dtype
        self._device_type = device_type
        self._candidates = [(module, operation) for module in modules if (operation := _operation_of(module))]
        self._wrapped: dict[nn.Module, tuple[FrozenModule, partial[Any]]] = {}
        self._copies: dict[int, _Copy] = {}
        self._loop: str | None = None
        # Where nothing is frozen, one look at these tells that nothing has been since.
        self._trainable: list[nn.Parameter] = []
        # Those that are written to unseen, by id.
        self._changing: dict[int, nn.Parameter] = {}
        self._watch = _Watch(reads_at_once=True)

    def refresh(self, loop: str) -> None:
        """Makes the copies what the weights are now; called before each forward.

        Args:
            loop: name of the loop that runs the forward.
        """
        if not self._wrapped and loop == self._loop and False not in self._learns():
            return
        if loop != self._loop:
            self._loop, self._watch = loop, _Watch(reads_at_once=self._device_type == "cpu")
        # Copies that were made in inference mode could not be used in training.
        with torch.inference_mode(False), torch.no_grad():
            self._make_copies(loop)
            changing = {
                id(copy.source): copy.source for copy in self._watch.look() if self._copies.get(id(copy.source)) is copy
            }
            if changing:
                self._changing |= changing
                self._make_copies(loop)
            self._watch.begin(list(self._copies.values()))

    def _make_copies(self, loop: str) -> None:
        self._trainable = []
        used: dict[int, _Copy] = {}
        for module, operation in self._candidates:
            copies = {}
            for name in ("weight", "bias"):
                parameter = getattr(module, name)
                if _is_frozen(parameter, self._device_type) and id(parameter) not in self._changing:
                    copies[name] = used[id(parameter)] = self._copy_of(parameter, loop)
                elif parameter is not None and parameter.requires_grad:
                    self._trainable.append(parameter)
            self._use(module, operation, copies)
        self._copies = used

    def _learns(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self._trainable]

    def detach(self) -> None:
        """Gives the modules their own forwards back and drops the copies."""
        self._loop, self._trainable = None, []
        for module, operation in self._candidates:
            self._use(module, operation, {})
        self._copies.clear()
        self._changing.clear()

    def _use(self, module: nn.Module, operation: Callable[..., Tensor], copies: dict[str, _Copy]) -> None:
        if not copies:
            frozen, wrapper = self._wrapped.pop(module, (None, None))
            if frozen is not None and wrapper is not None:
                frozen.module = None
                unwrap_forward(module, wrapper)
            return
        if module not in self._wrapped:
            if not _forward_is_its_own(module):
                return
            frozen = FrozenModule(module, operation, self._dtype)
            wrapper = partial(run_on_copies, module.forward, frozen, self._device_type)
            module.forward = wrapper
            self._wrapped[module] = frozen, wrapper
        self._wrapped[module][0].use(copies)

    def _copy_of(self, source: nn.Parameter, loop: str) -> _Copy:
        """The copy of a frozen parameter, shared by all modules that share the parameter."""
        known = self._copies.get(id(source))
        if (
            known is None
            or known.source is not source
            or known.parameter.device != source.device
            or known.parameter.shape != source.shape
        ):
            parameter = nn.Parameter(source.to(self._dtype), requires_grad=False)
        elif known.loop != loop or not known.is_current:
            parameter = known.parameter
            parameter.copy_(source)  # at its old address, for graphs that were captured
        else:
            return known
        copy = self._copies[id(source)] = _Copy(
            source, source.detach(), private_api.version_of(source), loop, parameter
        )
        return copy


class _Watch:
    """Looks for weights that are written to without torch's counting it, by comparing some of their elements.

    Args:
        reads_at_once: whether each look is read at once, as reading is no waiting; else the first three only.
    """

    def __init__(self, *, reads_at_once: bool) -> None:
        self._reads_at_once = reads_at_once
        self._copies: list[_Copy] = []
        # Views of the weights' memory, made once: a model may have thousands.
        self._samples: list[Tensor] = []
        self._elements = torch.empty(0)
        self._looks = 0
        self._last_look: tuple[list[_Copy], HostCopy] | None = None

    def begin(self, copies: list[_Copy]) -> None:
        """Keeps elements of the weights for the looks to come, unless these are kept already."""
        if len(copies) != len(self._copies) or not all(map(operator.is_, copies, self._copies)):
            self._copies, self._samples = copies, [copy.sample() for copy in copies]
            self._elements = self._elements_now()

    def look(self) -> list[_Copy]:
        """Those of the copies whose weights have changed since; as of the look before if this one is not read yet."""
        if not self._copies:
            return []
        changed = (self._elements_now() != self._elements).any(1)
        self._looks += 1
        look, self._last_look = self._last_look, (self._copies, HostCopy(changed))
        if self._reads_at_once or self._looks <= _WAITS:
            look = self._last_look
        if look is None:
            return []
        copies, flags = look
        return [copy for copy, flag in zip(copies, flags.read(), strict=True) if flag]

    def _elements_now(self) -> Tensor:
        if not self._samples:
            return torch.empty(0)
        device = self._samples[0].device
        return torch.stack([sample.to(device) for sample in self._samples])


def _operation_of(module: nn.Module) -> Callable[..., Tensor] | None:
    """What the module's forward computes; None if it is none that is known here."""
    kind = type(module)
    if (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D"):  # GPT-2's linear layer
        return _transposed_linear
    if parametrize.is_parametrized(module) or getattr(module, "padding_mode", "zeros") != "zeros":
        return None
    return _OPERATIONS.get(class_forward(module))


def _forward_is_its_own(module: nn.Module) -> bool:
    """Whether the module's forward is its own, or set by a policy that lets it run in 16 bit."""
    forward = vars(module).get("forward")
    return forward is None or (isinstance(forward, partial) and forward.func is run_covered)


def _is_frozen(parameter: Any, device_type: str) -> bool:
    return (
        type(parameter) is nn.Parameter  # not a DTensor, a quantized or a lazy one
        and not parameter.requires_grad
        and parameter.dtype == torch.float32
        and parameter.device.type == device_type
        and parameter.layout == torch.strided
        and parameter.numel() > 0
        and not parameter.is_inference()
    )
