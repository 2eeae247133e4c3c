"""Functional operations that a rule can name, and what autocast does to them by itself."""

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from lightning_mp.core.private_api import autocast_knows

FAMILIES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        # Not batch_norm and instance_norm: whatever their input, they compute in fp32 with fp32 statistics and weights,
        # and only their output is 16 bit. In fp32 it would double the activations of a convolutional net.
        "norms": ("layer_norm", "group_norm", "rms_norm", "local_response_norm"),
        "softmaxes": ("softmax", "log_softmax", "softmin", "gumbel_softmax", "logsumexp"),
        "losses": (
            "cross_entropy",
            "nll_loss",
            "mse_loss",
            "l1_loss",
            "smooth_l1_loss",
            "huber_loss",
            "kl_div",
            "binary_cross_entropy",
            "binary_cross_entropy_with_logits",
            "ctc_loss",
            "cosine_embedding_loss",
            "gaussian_nll_loss",
            "hinge_embedding_loss",
            "margin_ranking_loss",
            "multi_margin_loss",
            "multilabel_margin_loss",
            "multilabel_soft_margin_loss",
            "poisson_nll_loss",
            "soft_margin_loss",
            "triplet_margin_loss",
            "triplet_margin_with_distance_loss",
        ),
        "matmuls": (
            "linear",
            "matmul",
            "mm",
            "bmm",
            "mv",
            "addmm",
            "addbmm",
            "baddbmm",
            "addmv",
            "einsum",
            "multi_dot",
            "conv1d",
            "conv2d",
            "conv3d",
            "conv_transpose1d",
            "conv_transpose2d",
            "conv_transpose3d",
            "scaled_dot_product_attention",
        ),
    }
)
"""Families of operations, each a name that a rule can use."""

KNOWN_OPERATIONS = frozenset(name for family in FAMILIES.values() for name in family) | {"batch_norm", "instance_norm"}
"""Operations that a rule may name without the prefix ``op:``."""

PRODUCTS_WITH_A_VECTOR = frozenset({"mv", "addmv"})
"""Products that read each element once: 16 bit gains them little, and autocast on CPUs leaves them in fp32."""

# In torch 2.13: aten/src/ATen/autocast_mode.h (AT_FORALL_FP32, AT_FORALL_FP32_SET_OPT_DTYPE,
# AT_FORALL_LOWER_PRECISION_FP) for CUDA and XPU, autocast_mode.cpp (AutocastMPS, AutocastCPU) for the others.
_LOSSES_EVERYWHERE = frozenset(FAMILIES["losses"]) - {
    # python code over several operations, which no list holds
    "gaussian_nll_loss",
    "multilabel_soft_margin_loss",
    "triplet_margin_with_distance_loss",
    # on the list of one device type only
    "binary_cross_entropy",
    "ctc_loss",
}
_FP32_BY_AUTOCAST: Mapping[str, frozenset[str]] = {
    "cpu": _LOSSES_EVERYWHERE | {"binary_cross_entropy", "ctc_loss"},
    # CUDA refuses binary_cross_entropy under autocast, with an explanation; that error is left to torch.
    "cuda": _LOSSES_EVERYWHERE
    | {
        "binary_cross_entropy",
        "layer_norm",
        "group_norm",
        "softmax",
        "log_softmax",
        "softmin",
        "logsumexp",
        *filter(autocast_knows, ("rms_norm",)),  # until torch 2.13 it may follow its input
    },
    "mps": _LOSSES_EVERYWHERE | {"layer_norm", "group_norm", "softmax", "log_softmax", "softmin", "logsumexp"},
}
_LOW_BY_AUTOCAST: Mapping[str, frozenset[str]] = {
    "cpu": frozenset(FAMILIES["matmuls"]) - {"mv", "addmv"},
    "cuda": frozenset(FAMILIES["matmuls"]),
    "mps": frozenset(FAMILIES["matmuls"]) - {"conv3d", "conv_transpose3d"},
}

# Of AT_FORALL_PROMOTE, what torch refuses with inputs of two dtypes unless autocast casts them to the widest. inner
# calls dot and tensordot.
_PROMOTED_BY_CUDA = ("bilinear", "cross", "dot", "index_put", "inner", "scatter_add", "tensordot", "vdot")

_NAMESPACES: tuple[Any, ...] = (F, torch, torch.Tensor, torch.special, torch.linalg)

_OPERATION_OF_MODULE: tuple[tuple[type[nn.Module], str], ...] = (
    (nn.Linear, "linear"),
    (nn.MultiheadAttention, "linear"),
    (nn.Conv1d, "conv1d"),
    (nn.Conv2d, "conv2d"),
    (nn.Conv3d, "conv3d"),
    (nn.ConvTranspose1d, "conv_transpose1d"),
    (nn.ConvTranspose2d, "conv_transpose2d"),
    (nn.ConvTranspose3d, "conv_transpose3d"),
    (nn.LayerNorm, "layer_norm"),
    (nn.GroupNorm, "group_norm"),
    (nn.RMSNorm, "rms_norm"),
    (nn.BatchNorm1d, "batch_norm"),
    (nn.BatchNorm2d, "batch_norm"),
    (nn.BatchNorm3d, "batch_norm"),
    (nn.SyncBatchNorm, "batch_norm"),
    (nn.InstanceNorm1d, "instance_norm"),
    (nn.InstanceNorm2d, "instance_norm"),
    (nn.InstanceNorm3d, "instance_norm"),
)


def operations_named(pattern: str) -> tuple[str, ...]:
    """The operations that the pattern of a rule names, none if there is no such operation.

    >>> operations_named("softmaxes")
    ('softmax', 'log_softmax', 'softmin', 'gumbel_softmax', 'logsumexp')
    >>> operations_named("cumsum"), operations_named("soft_max")
    (('cumsum',), ())
    """
    if pattern in FAMILIES:
        return FAMILIES[pattern]
    if pattern in KNOWN_OPERATIONS:
        return (pattern,)
    if any(character in pattern for character in "*?["):
        return tuple(sorted(name for name in KNOWN_OPERATIONS if fnmatchcase(name, pattern)))
    # Names with underscores at the end change their argument in place: a cast copy would take the change.
    hidden = pattern.startswith("_") or pattern.endswith("_")
    return (pattern,) if functions_of(pattern) and not hidden else ()


def functions_of(operation: str) -> frozenset[Callable[..., Any]]:
    """The functions and methods of torch behind the name of an operation.

    >>> functions_of("softmax") >= {torch.softmax, F.softmax, torch.Tensor.softmax}
    True
    """
    found = (getattr(namespace, operation, None) for namespace in _NAMESPACES)
    return frozenset(function for function in found if callable(function) and not isinstance(function, type))


def by_autocast(operation: str, device_type: str) -> str | None:
    """What autocast does to an operation on a device type: "fp32", "low", or None (it follows its inputs).

    >>> by_autocast("softmax", "cuda"), by_autocast("softmax", "cpu"), by_autocast("linear", "cpu")
    ('fp32', None, 'low')
    """
    device_type = "cuda" if device_type == "xpu" else device_type
    if operation in _FP32_BY_AUTOCAST.get(device_type, ()):
        return "fp32"
    return "low" if operation in _LOW_BY_AUTOCAST.get(device_type, ()) else None


def promoted_by_rules(device_type: str) -> tuple[str, ...]:
    """Operations that take several input dtypes under autocast on CUDA, and not by themselves on this device."""
    return () if device_type in ("cuda", "xpu") else _PROMOTED_BY_CUDA


def operation_of_module(module: nn.Module) -> str | None:
    """The operation for which a module of ``torch.nn`` holds the weights; None for other modules.

    >>> operation_of_module(nn.LayerNorm(4)), operation_of_module(nn.Sequential())
    ('layer_norm', None)
    """
    return next((name for kind, name in _OPERATION_OF_MODULE if isinstance(module, kind)), None)
