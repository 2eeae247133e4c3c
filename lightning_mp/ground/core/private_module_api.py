"""What is not public of modules and of their weights: calls, where weights are found, their memory and parts."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._functorch import pyfunctorch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_mp.ground.core.private_sharding_api import sharding_groups

#: (owner, private name, why it is needed)
PRIVATE_NAMES: tuple[tuple[object, str, str], ...] = (
    (torch.Tensor, "grad_dtype", "a parameter whose memory is given away is asked for it"),
    (torch, "_functorch", "where the next name is kept"),
    (torch._functorch, "pyfunctorch", "work on weights that no transform of torch.func around it sees"),
    (torch._C, "_set_throw_on_mutable_data_ptr", "memory that nobody may write to"),
    (torch.UntypedStorage, "_cdata", "shows that a weight has moved to other memory"),
    (torch._C, "_storage_Use_Count", "shows that another tensor shares the memory of a weight"),
    (torch.nn.Module, "_compiled_call_impl", "is asked before a module's own call"),
    (torch.nn.Module, "_call_impl", "that call"),
    (torch.nn.Identity(), "_parameters", "where modules find their weights; made by their constructor"),
    (torch.nn.RNNBase, "_init_flat_weights", "makes the list in which recurrent layers find their weights, too"),
    (Tensor, "_backward_hooks", "hooks of parameters, shared with the leaves that DDP reduces"),
    (Tensor, "_post_accumulate_grad_hooks", "hooks that cannot be shared"),
)


class InterceptedCall:
    """Is called instead of a module's own call, until :meth:`remove`; subclasses define ``__call__``.

    ``Module.__call__`` looks for a compiled call first, and finds this. torch.compile traces it only for modules with
    hooks or a forward of their own; others it calls by their forward. Copies and
    pickles of the module leave it out.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        below = vars(module).get("_compiled_call_impl")
        #: What ``module.compile()`` has made of the call, if it was called.
        self.compiled_below: Callable[..., Any] | None = getattr(below, "compiled_below", below)
        self._below = below
        #: The call that it replaces.
        self.call: Callable[..., Any] = below if below is not None else module._call_impl
        vars(module)["_compiled_call_impl"] = self

    def remove(self) -> None:
        """Puts back what was there, unless the module was compiled since."""
        if vars(self.module).get("_compiled_call_impl") is self:
            del self.module._compiled_call_impl
            if self._below is not None:
                vars(self.module)["_compiled_call_impl"] = self._below


def holders_of_weights(module: torch.nn.Module) -> list[Any]:
    """The dictionary in which a module finds its own weights, and the list that recurrent layers have beside it."""
    flat = vars(module).get("_flat_weights")
    return [module._parameters, flat] if flat else [module._parameters]


def places_of_weights(module: torch.nn.Module) -> list[tuple[Any, Any, torch.nn.Parameter]]:
    """Where a module finds its own weights: one of :func:`holders_of_weights`, the key in it, and the weight."""
    return [
        (held, key, weight)
        for held in holders_of_weights(module)
        for key, weight in (held.items() if isinstance(held, dict) else enumerate(held))
        if isinstance(weight, torch.nn.Parameter)
    ]


def move_gradients(sources: Sequence[Tensor], targets: Sequence[Tensor], *, hooks: bool = True) -> None:
    """Gives tensors the gradients of others, which have none afterwards, and shares their hooks.

    Raises:
        RuntimeError: if there are hooks of a kind that cannot be shared.
    """
    for source, target in zip(sources, targets, strict=True):
        target.grad, source.grad = source.grad, None
        if hooks:
            target._backward_hooks = source._backward_hooks
            if source._post_accumulate_grad_hooks:
                raise RuntimeError(
                    "MasterWeightsPrecision under DDP: hooks of register_post_accumulate_grad_hook would see gradients"
                    " that are not averaged over ranks. Use on_before_optimizer_step, FSDP2Strategy or"
                    " AutocastPrecision."
                )


def set_grad_dtype(parameter: Tensor, dtype: torch.dtype) -> None:
    """Lets a parameter have gradients of a dtype, and casts the one that it has."""
    gradient, parameter.grad = parameter.grad, None
    parameter.grad_dtype = dtype
    parameter.grad = None if gradient is None else gradient.to(dtype)


def shares_memory(tensor: Tensor) -> bool:
    """Whether another tensor lies in the same memory: a view, an alias, a detached one."""
    return users_of_memory(tensor) > 1


def users_of_memory(tensor: Tensor) -> int:
    """How many tensors lie in the same memory; whatever else holds it, an array of numpy for one, counts too."""
    storage = tensor.untyped_storage()  # is a reference itself
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1


def refuse_writes(tensor: Tensor) -> None:
    """Writes to a tensor's memory raise."""
    torch._C._set_throw_on_mutable_data_ptr(tensor)


_KEEPS_NUMBERS_UNREAD = (
    *("grad", "grad_dtype", "requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks", "_version"),
    *(
        "shape",
        "dtype",
        "device",
        "is_leaf",
        "grad_fn",
        "ndim",
        "layout",
        "is_cuda",
        "is_sparse",
        "is_cpu",
        "is_nested",
    ),
    *("is_meta", "is_quantized", "is_mkldnn", "is_mps", "itemsize"),
)


def functions_that_read_no_numbers() -> frozenset[Any]:
    """What ``__torch_function__`` is called with for what asks a parameter for its gradient, its size and the like."""
    attributes = [
        getattr(getattr(Tensor, name), slot)
        for name in _KEEPS_NUMBERS_UNREAD
        for slot in ("__get__", "__set__", "__delete__")
        if hasattr(getattr(Tensor, name), slot)
    ]
    methods = [Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.is_floating_point, Tensor.is_complex]
    methods += [Tensor.requires_grad_, Tensor.register_hook, Tensor.register_post_accumulate_grad_hook]
    methods += [Tensor.element_size, Tensor.__len__, torch.is_floating_point, torch.is_complex, torch.numel]
    return frozenset([*attributes, *methods])


@contextmanager
def unnoticed() -> Iterator[None]:
    """Whatever is going on: gradients, inference, transforms of torch.func, modes and subclasses of tensors."""
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        pyfunctorch.temporarily_clear_interpreter_stack(),
        torch._C.DisableTorchFunction(),
    ):
        yield


class WatchedShard(DTensor):
    """A DTensor that calls :meth:`touched` before anything reads its part, which DTensor does by one attribute."""

    __slots__ = ()

    @property
    @override
    def _local_tensor(self) -> Tensor:  # type: ignore[override]  # an attribute there
        self.touched()
        return part_of(self)

    def touched(self) -> None:
        """Has to make a DTensor of it again."""
        raise NotImplementedError


_LOCAL_TENSOR: Any = vars(DTensor)["_local_tensor"]


def part_of(tensor: DTensor) -> Tensor:
    """This rank's part, where nobody is to notice."""
    part: Tensor = _LOCAL_TENSOR.__get__(tensor)
    return part


def set_part(tensor: DTensor, part: Tensor) -> None:
    """Replaces this rank's part by another tensor of the same shape."""
    _LOCAL_TENSOR.__set__(tensor, part)


def with_part(like: DTensor, part: Tensor) -> DTensor:
    """A part as a tensor that is distributed like another one."""
    mesh, placements = like.device_mesh, like.placements
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())


@cache
def _with_unnoticed_gather(kind: Any) -> Any:
    """FSDP2 checks the local tensor for all-gather hooks at each all-gather."""

    class UnnoticedGather(kind):  # type: ignore[misc]  # a class that is only known when it is here
        @property
        def _sharded_local_tensor(self) -> Tensor:
            return part_of(self.sharded_param)

    return UnnoticedGather


class GatheredShard:
    """One parameter of FSDP2, for which it may gather other memory than that of the parameter.

    Raises:
        AttributeError: if this release of torch keeps what it gathers elsewhere.
    """

    def __init__(self, parameter: Any) -> None:
        self._parameter = parameter
        self._own_class: Any = parameter.__class__
        self.numel = int(parameter._sharded_param_data.numel())  #: of each rank's part, with what makes all equal
        parameter._sharded_local_tensor  # noqa: B018  # is there
        parameter.__class__ = _with_unnoticed_gather(self._own_class)

    @property
    def sharded(self) -> Any:
        """What the optimizer holds."""
        return self._parameter.sharded_param

    def gather(self, part: Tensor) -> None:
        """Takes this, in a row, as the rank's part from now on."""
        self._parameter._sharded_param_data = part

    def end(self) -> None:
        """Leaves it as FSDP2 has it."""
        self._parameter.__class__ = self._own_class


def make_ready(root: FSDPModule) -> None:
    """What FSDP2 does before its first forward, which looks at the parts of parameters."""
    root._get_fsdp_state()._lazy_init()


def shards_gathered_in(unit: object, dtype: torch.dtype) -> list[GatheredShard]:
    """Those parameters of a unit of FSDP2 of which it makes copies of this dtype."""
    parameters = [parameter for group in sharding_groups(unit) for parameter in group.fsdp_params]
    return [GatheredShard(parameter) for parameter in parameters if parameter.mp_policy.param_dtype == dtype]
