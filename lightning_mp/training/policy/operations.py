"""Functional operations that a rule can name, and what autocast does to them by itself."""

import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from lightning_mp.ground.core.private_dispatch_api import autocast_knows

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
        # No kernel in bf16, in fp16, or in either, on CPUs or on CUDA (torch 2.13, the dtypes of
        # torch/testing/_internal/common_methods_invocations.py): decompositions, FFTs, complex numbers.
        "fp32_only": (
            *(f"fft_{i}{kind}fft{dims}" for dims in ("", "2", "n") for i in ("", "i") for kind in ("", "r", "h")),
            *("stft", "complex", "polar", "view_as_complex"),
            *("linalg_cholesky", "linalg_cholesky_ex", "cholesky_inverse", "cholesky_solve", "linalg_qr", "linalg_lu"),
            *("linalg_lu_factor", "linalg_lu_factor_ex", "linalg_lu_solve", "linalg_ldl_factor", "linalg_ldl_solve"),
            *("linalg_svd", "linalg_svdvals", "linalg_eig", "linalg_eigvals", "linalg_eigh", "linalg_eigvalsh"),
            *("linalg_inv", "linalg_inv_ex", "inverse", "linalg_pinv", "pinverse", "linalg_tensorinv"),
            *("linalg_solve", "linalg_solve_ex", "linalg_solve_triangular", "linalg_lstsq", "linalg_tensorsolve"),
            *("linalg_det", "linalg_slogdet", "logdet", "linalg_cond", "linalg_matrix_rank"),
            *("linalg_householder_product", "cdist", "pdist", "quantile", "nanquantile"),
        ),
        # They write a number, which may be too large for the format: `masked_fill(mask, -1e9)` in fp16.
        "fills": ("masked_fill", "index_fill", "full_like", "new_full", "clamp", "pad", "scatter"),
    }
)
"""Families of operations, each a name that a rule can use."""

# Names that modules have, too.
_WITH_PREFIX_ONLY = frozenset({"clamp", "complex", "pad", "scatter"})

KNOWN_OPERATIONS = (
    frozenset(name for family in FAMILIES.values() for name in family) | {"batch_norm", "instance_norm"}
) - _WITH_PREFIX_ONLY
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
# Their functions are also named as in torch's own errors and profiles: `fft_rfft`, `linalg_svd`.
_PREFIXES: Mapping[str, Any] = MappingProxyType({"fft": torch.fft, "linalg": torch.linalg, "special": torch.special})
_MODULES_OF_OPERATIONS = re.compile(r"^(torch\.)?(nn\.functional\.|F\.|Tensor\.)?")

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
    >>> operations_named("cumsum"), operations_named("torch.fft.rfft"), operations_named("soft_max")
    (('cumsum',), ('fft_rfft',), ())
    """
    pattern = _MODULES_OF_OPERATIONS.sub("", pattern).replace(".", "_")
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
    >>> functions_of("linalg_det") >= {torch.linalg.det, torch.det, torch.Tensor.det}
    True
    """
    found = {getattr(namespace, operation, None) for namespace in _NAMESPACES}
    prefix, _, name = operation.partition("_")
    if hasattr(_PREFIXES.get(prefix), name):
        found |= {getattr(namespace, name, None) for namespace in (_PREFIXES[prefix], torch, torch.Tensor)}
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
