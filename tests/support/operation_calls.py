"""How to call each operation of a policy's families with two 4 x 4 tensors, of one dtype or of two."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_mp.training.policy.operations import FAMILIES

Call = Callable[[Tensor, Tensor], Tensor]


def _convolution(name: str, dims: int) -> Call:
    return lambda a, b: getattr(F, name)(a.view(1, 4, 4, *[1] * (dims - 1)), b.view(4, 4, *[1] * dims))


def _loss(name: str) -> Call:
    return lambda a, b: getattr(F, name)(a, b)


def _row(x: Tensor) -> Tensor:
    return x.select(0, 0)  # fake CUDA tensors take no [] here


def _batch(x: Tensor) -> Tensor:
    return x.unsqueeze(0)


#: What is missing takes a single tensor with floating-point numbers.
CALLS: dict[str, Call] = {
    "layer_norm": lambda a, b: F.layer_norm(a, (4,), _row(b)),
    "rms_norm": lambda a, b: F.rms_norm(a, (4,), _row(b)),
    "group_norm": lambda a, b: F.group_norm(a, 2, _row(b)),
    "linear": F.linear,
    "matmul": torch.matmul,
    "mm": torch.mm,
    "mv": lambda a, b: torch.mv(a, _row(b)),
    "addmm": lambda a, b: torch.addmm(a, b, a),
    "addmv": lambda a, b: torch.addmv(_row(a), b, _row(a)),
    "bmm": lambda a, b: torch.bmm(_batch(a), _batch(b)),
    "addbmm": lambda a, b: torch.addbmm(a, _batch(b), _batch(a)),
    "baddbmm": lambda a, b: torch.baddbmm(_batch(a), _batch(b), _batch(a)),
    "einsum": lambda a, b: torch.einsum("ij,kj->ik", a, b),
    "multi_dot": lambda a, b: torch.linalg.multi_dot([a, b, a]),
    "scaled_dot_product_attention": lambda a, b: F.scaled_dot_product_attention(_batch(a), _batch(b), _batch(a)),
    "binary_cross_entropy": lambda a, b: F.binary_cross_entropy(a.sigmoid(), b.sigmoid()),
    "cosine_embedding_loss": lambda a, b: F.cosine_embedding_loss(a, b, torch.ones(4, device=a.device).long()),
    "gaussian_nll_loss": lambda a, b: F.gaussian_nll_loss(a, b, a.square() + 1),
    "kl_div": lambda a, b: F.kl_div(a, b, reduction="batchmean"),
    "margin_ranking_loss": lambda a, b: F.margin_ranking_loss(a, b, a),
    "triplet_margin_loss": lambda a, b: F.triplet_margin_loss(a, b, a),
    "triplet_margin_with_distance_loss": lambda a, b: F.triplet_margin_with_distance_loss(a, b, a),
}
_WITH_CLASSES = {"cross_entropy", "nll_loss", "ctc_loss", "multi_margin_loss", "multilabel_margin_loss"}
CALLS |= {f"{kind}{n}d": _convolution(f"{kind}{n}d", n) for kind in ("conv", "conv_transpose") for n in (1, 2, 3)}
CALLS |= {name: _loss(name) for name in FAMILIES["losses"] if name not in CALLS.keys() | _WITH_CLASSES}
