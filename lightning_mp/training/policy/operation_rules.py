"""Rules about functional operations, carried out by a ``TorchFunctionMode``.

The lists of operations that autocast itself casts differ between device types: CUDA's hold softmax and the norms, the
CPU's do not. The mode sees every call of torch in the thread, however it is written, and casts where a rule says
something that autocast does not do by itself; rules that autocast carries out by itself need no mode.

torch.compile traces through the mode, the casts become part of its graph, and it guards on the rules. A backward that
begins inside the mode keeps it, so that activation checkpoints recompute what they computed.

In eager execution every call of torch inside the mode takes one more Python call (about a microsecond).
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from lightning_mp.training.policy.fails_in_16_bit import numbers_overflow
from lightning_mp.training.policy.module_rules import PolicyScope, cast_tensors, dtypes_to_cast
from lightning_mp.training.policy.operations import FAMILIES, by_autocast, functions_of, promoted_by_rules
from lightning_mp.training.policy.rules import LOW, Dtype

if TYPE_CHECKING:
    from lightning_mp.training.policy.resolved import ResolvedPolicy

# They change their statistics in place: cast copies of those would take the change. Their kernels take a 16-bit input
# beside fp32 weights.
_CASTS_INPUT_ONLY = frozenset({"batch_norm", "instance_norm"})

# One torch function that calls others where no mode sees them.
_ATTENTION_WITH_WEIGHTS = F.multi_head_attention_forward


class OperationRule(NamedTuple):
    """What to do with a function."""

    dtype: Dtype
    low_by_autocast: bool = False  # whether autocast itself brings its inputs to 16 bit
    input_only: bool = False  # whether only the first argument is cast
    with_weights_only: bool = False  # whether the rule is about attention that returns its weights
    mixed_only: bool = False  # whether inputs that share one dtype are left as they are
    overflow_only: bool = False  # whether it is about numbers that are too large for the 16-bit inputs


def operation_rules(policy: "ResolvedPolicy", device_type: str) -> dict[Callable[..., Any], OperationRule]:
    """The rules that autocast on this device type does not carry out by itself, by the function they are about.

    With them come the operations that autocast on CUDA gives inputs of one dtype, the widest: a rule brings dtypes
    together that fail without it.
    """
    rules: dict[Callable[..., Any], OperationRule] = {}
    for operation, number in policy.operations.items():
        dtype = policy.rules[number].dtype
        native = by_autocast(operation, device_type)
        if native is not None and native == ("fp32" if dtype == torch.float32 else dtype):
            continue
        mixed_only = policy.leaves_to_autocast(operation, device_type)
        # Only a rule that names the operation itself is about every call: a mask of 0 needs no fp32.
        overflow_only = operation in FAMILIES["fills"] and not policy.is_named(operation)
        rule = OperationRule(
            dtype, native == LOW, operation in _CASTS_INPUT_ONLY, mixed_only=mixed_only, overflow_only=overflow_only
        )
        rules |= dict.fromkeys(functions_of(operation), rule)
    if F.softmax in rules and rules[F.softmax].dtype == torch.float32:
        rules.setdefault(_ATTENTION_WITH_WEIGHTS, OperationRule(torch.float32, with_weights_only=True))
    if rules:
        widest = OperationRule(torch.float32, mixed_only=True)
        for operation in promoted_by_rules(device_type):
            rules = dict.fromkeys(functions_of(operation), widest) | rules
    return rules


class OperationRules(TorchFunctionMode):
    """A context in which functions run as their rules say, wherever autocast is on."""

    def __init__(self, rules: Mapping[Callable[..., Any], OperationRule], scope: PolicyScope) -> None:
        super().__init__()
        self.rules = rules
        self.scope = scope

    @override
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Casts and calls the function, without autocast; other functions are called as they are."""
        kwargs = kwargs or {}
        rule = self.rules.get(func)
        if rule is None:
            if func is torch.Tensor.backward:
                return self._backward(*args, **kwargs)
            if func is checkpoint:
                return self._checkpoint(*args, **kwargs)
            if func is torch.Tensor.unflatten:
                # Until torch 2.14 torch.compile cannot trace its `super().unflatten` inside of a mode, but can
                # trace the method (pytorch/pytorch#179897).
                return args[0].unflatten(*args[1:], **kwargs)
            return func(*args, **kwargs)
        device_type = self.scope.device_type
        if self.scope.low is None or not torch.is_autocast_enabled(device_type):
            return func(*args, **kwargs)
        current = torch.get_autocast_dtype(device_type)
        dtype = current if isinstance(rule.dtype, str) else rule.dtype
        if rule.low_by_autocast and dtype == current:
            return func(*args, **kwargs)  # with autocast's cache of cast weights
        if rule.mixed_only and (kwargs.get("out") is not None or len(dtypes_to_cast((args, kwargs))) < 2):
            return func(*args, **kwargs)  # a cast copy of out would take the result
        if rule.overflow_only and not numbers_overflow(args, kwargs):
            return func(*args, **kwargs)
        if rule.with_weights_only and not _returns_weights(args, kwargs):
            return func(*args, **kwargs)  # fused attention: its softmax accumulates in fp32
        return _run(func, rule, dtype, device_type, args, kwargs)

    def _checkpoint(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Only torch.compile comes here: it shows checkpoints to modes, and traces their function without any."""
        with self:
            pass  # entering the mode here first is what lets torch.compile enter it inside of the function
        return checkpoint(partial(_call_inside, self, function), *args, **kwargs)

    def _backward(
        self,
        loss: Tensor,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """``loss.backward()`` that does not leave the mode, so that checkpoints recompute under it.

        A tensor handed to torch would end the mode until backward is over; gradient edges do not.
        """
        if gradient is None and loss.numel() == 1:
            gradient = torch.ones_like(loss)
        if gradient is None or loss.grad_fn is None:  # torch says what is wrong
            torch.autograd.backward(loss, gradient, retain_graph, create_graph, inputs=inputs)
            return
        if inputs is not None:
            inputs = [_edge(item) for item in ((inputs,) if isinstance(inputs, Tensor | GradientEdge) else inputs)]
        with self:
            torch.autograd.backward(_edge(loss), gradient, retain_graph, create_graph, inputs=inputs)


def _run(
    func: Callable[..., Any],
    rule: OperationRule,
    dtype: torch.dtype,
    device_type: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    if rule.input_only and args:
        args = (cast_tensors(args[0], dtype), *args[1:])
    elif not rule.input_only:
        args, kwargs = cast_tensors(args, dtype), cast_tensors(kwargs, dtype)
    with torch.autocast(device_type, enabled=False):
        return func(*args, **kwargs)


def _call_inside(mode: TorchFunctionMode, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with mode:
        return function(*args, **kwargs)


def _edge(value: Any) -> Any:
    return get_gradient_edge(value) if isinstance(value, Tensor) else value


def _returns_weights(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call of multi_head_attention_forward computes its softmax as a separate operation."""
    position = 15  # of need_weights in the signature
    needed = bool(kwargs.get("need_weights", args[position] if len(args) > position else True))
    if needed and not torch.compiler.is_compiling():
        rank_zero_warn(
            "PrecisionPolicy: softmax is to run in fp32, and nn.MultiheadAttention computes it in one function with"
            " its products when it returns attention weights, so all of it runs in fp32. Pass need_weights=False for"
            " fused 16-bit attention."
        )
    return needed
