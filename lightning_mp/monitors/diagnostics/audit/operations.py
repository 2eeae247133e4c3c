"""What an operation at torch's dispatcher is: its kind, the dtype it computes in, and the sizes of its product."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_mp.ground.core.nested_tensors import tensors_in
from lightning_mp.monitors.diagnostics.audit.records import Kind
from lightning_mp.training.policy.operations import FAMILIES

#: Functions of torch that a rule of a policy can name and that end in an operation of the dispatcher.
_FROM: dict[str, tuple[str, ...]] = {
    "mm": ("linear", "matmul", "mm", "einsum"),
    "addmm": ("linear", "addmm"),
    "bmm": ("matmul", "bmm", "einsum"),
    "baddbmm": ("baddbmm",),
    "mv": ("matmul", "mv"),
    "addmv": ("addmv", "linear"),
    "convolution": tuple(name for name in FAMILIES["matmuls"] if name.startswith("conv")),
    "scaled_dot_product_attention": ("scaled_dot_product_attention",),
    "softmax": ("softmax",),
    "log_softmax": ("log_softmax", "cross_entropy"),
    "safe_softmax": ("softmax", "scaled_dot_product_attention"),
    "logsumexp": ("logsumexp",),
    "layer_norm": ("layer_norm",),
    "group_norm": ("group_norm",),
    "fused_rms_norm": ("rms_norm",),
    "nll_loss": ("nll_loss", "cross_entropy"),
    "nll_loss2d": ("nll_loss", "cross_entropy"),
}

#: Positions of the factors of a product among the arguments.
_FACTORS: dict[str, tuple[int, int]] = {
    "mm": (0, 1),
    "bmm": (0, 1),
    "mv": (0, 1),
    "dot": (0, 1),
    "linear": (0, 1),
    "linear_pointwise": (0, 1),
    "mkl_linear": (0, 1),
    "scaled_mm": (0, 1),
    "scaled_grouped_mm": (0, 1),
    "grouped_mm": (0, 1),
    "int_mm": (0, 1),
    "addmm": (1, 2),
    "addmm_activation": (1, 2),
    "addbmm": (1, 2),
    "baddbmm": (1, 2),
    "addmv": (1, 2),
    "convolution": (0, 1),
    "convolution_overrideable": (0, 1),
    "convolution_pointwise": (0, 1),
    "convolution_backward": (0, 2),
    "linear_backward": (0, 1),
    "scaled_dot_product_attention": (0, 1),
    "scaled_dot_product_attention_backward": (1, 2),
}
_SOFTMAXES = {
    "softmax",
    "log_softmax",
    "safe_softmax",
    "logsumexp",
    "softmax_backward_data",
    "log_softmax_backward_data",
}
_NORMS = {"layer_norm", "group_norm", "fused_rms_norm", "layer_norm_backward", "group_norm_backward"}
_LOSSES = {*FAMILIES["losses"], "nll_loss2d"}
_CASTS = {"to_copy", "copy_"}
# They make or move tensors and compute nothing.
_SILENT = {
    "detach",
    "alias",
    "unsafe_view",
    "reshape_alias",
    "clone",
    "contiguous",
    "resize_",
    "set_",
    "fill_",
    "zero_",
    "lift_fresh",
    "local_scalar_dense",
    "pin_memory",
    "is_all_true",
    "isfinite",
    "fused_sdp_choice",
}
_SILENT_STARTS = ("empty", "new_", "zeros", "ones", "full", "rand", "as_strided", "record_function", "view_as")
_NAMESPACES_OF_COMMUNICATION = {"c10d", "_c10d_functional", "fsdp", "profiler", "prim", "_dtensor", "symm_mem"}
_FP8 = {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype) and "float8" in str(dtype)}


def identify(qualified_name: str) -> str | None:
    """The name of an operation of the dispatcher as a reader knows it; None for what computes nothing.

    >>> identify("aten::_softmax.out"), identify("aten::empty_like")
    ('softmax', None)
    >>> identify("aten::_scaled_dot_product_flash_attention_for_cpu_backward")
    'scaled_dot_product_attention_backward'
    """
    namespace, _, rest = qualified_name.partition("::")
    name = rest.partition(".")[0].lstrip("_").removeprefix("native_").removeprefix("cudnn_").removeprefix("miopen_")
    if namespace in _NAMESPACES_OF_COMMUNICATION or name in _SILENT or name.startswith(_SILENT_STARTS):
        return None
    if name.startswith(("scaled_dot_product", "flash_attention", "efficient_attention")):
        name = f"scaled_dot_product_attention{'_backward' if name.endswith('_backward') else ''}"
    return name.removesuffix("_forward")


def kind_of(name: str) -> Kind:
    """What an operation is.

    >>> kind_of("addmm"), kind_of("softmax"), kind_of("add")
    ('matmul', 'softmax', 'other')
    """
    if name in _FACTORS:
        return "matmul"
    if name in _SOFTMAXES:
        return "softmax"
    if name in _NORMS:
        return "norm"
    if name.removesuffix("_backward") in _LOSSES:
        return "loss"
    return "cast" if name in _CASTS else "other"


def candidates(operation: str) -> tuple[str, ...]:
    """The operations a rule of a policy can name that may have ended in this one; none if it is of no family.

    >>> candidates("addmm"), candidates("mse_loss"), candidates("add")
    (('linear', 'addmm'), ('mse_loss',), ())
    """
    return _FROM.get(operation, (operation,) if operation in _LOSSES else ())


def held_dtype(tensor: Tensor) -> torch.dtype:
    """A tensor's dtype; for one that holds fp8 numbers inside (torchao's tensors say bf16 outside) the fp8 dtype."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    for name in flatten()[0] if flatten is not None else ():
        inner = getattr(tensor, name)
        if isinstance(inner, Tensor) and held_dtype(inner) in _FP8:
            return held_dtype(inner)
    return tensor.dtype


def compute_dtype(operation: str, args: Sequence[Any], results: Sequence[Tensor]) -> torch.dtype | None:
    """The dtype an operation computed in; None if it has nothing to do with floating-point numbers."""
    given = [tensor for tensor in tensors_in(args) if tensor.is_floating_point()]
    returned = [tensor for tensor in results if tensor.is_floating_point()]
    kind = kind_of(operation)
    if kind == "matmul":
        factors = [args[i] for i in _FACTORS[operation] if i < len(args) and isinstance(args[i], Tensor)]
        held = [held_dtype(factor) for factor in factors]
        return next((dtype for dtype in held if dtype in _FP8), held[0] if held else None)
    if kind == "cast":
        source = given[-1:] if operation == "copy_" else given[:1]
        return returned[0].dtype if source and returned and source[0].dtype != returned[0].dtype else None
    both = [held_dtype(tensor) for tensor in (*given[:1], *returned[:1])]
    return max(both, key=lambda dtype: dtype.itemsize, default=None)


def product_sizes(operation: str, args: Sequence[Any]) -> tuple[tuple[str, int], ...]:
    """The sizes of a product that decide about tensor cores, by name; none for other operations.

    A product of matrices is [rows, inner] @ [inner, columns]. Sizes of nested tensors that differ by part are left out.

    >>> product_sizes("addmm", (torch.ones(5), torch.ones(2, 3), torch.ones(3, 5)))
    (('rows', 2), ('inner', 3), ('columns', 5))
    """
    if operation not in _FACTORS or operation.endswith("_backward"):
        return ()
    left, right = (args[position] for position in _FACTORS[operation])
    return tuple((name, size) for name, size in _sizes(operation, left, right, args) if isinstance(size, int))


def _sizes(operation: str, left: Tensor, right: Tensor, args: Sequence[Any]) -> tuple[tuple[str, int], ...]:
    if operation.startswith("convolution"):
        transposed = len(args) > 6 and args[6] is True
        channels = right.shape[0], left.shape[1]
        return (("in_channels", channels[1]), ("out_channels", right.shape[1] if transposed else channels[0]))
    if operation == "scaled_dot_product_attention":
        return (("head_dim", left.shape[-1]),)
    if left.ndim < 2 or right.ndim < 2:
        return ()
    columns = right.shape[0] if operation in ("linear", "linear_pointwise", "mkl_linear") else right.shape[-1]
    return (("rows", left.shape[-2]), ("inner", left.shape[-1]), ("columns", columns))
