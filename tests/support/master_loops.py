"""What master weights are compared with: loops that cast by hand, and the optimizers they are tried on."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from small_models import Regression
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from lightning_mp import JointOptimizer, LossScaler, MasterWeightsPrecision, PrecisionPolicy
from lightning_mp.ground.modules.norms import NORMS_WITH_STATISTICS
from lightning_mp.training.precision.autocast_context import AutocastRun
from lightning_mp.training.precision.masters.lent_weights import LentWeights

DTYPES = {"bf16-true": torch.bfloat16, "16-true": torch.float16}

Parameters = Iterable[nn.Parameter]

SCALE = 2.0**10
NORMS = (*NORMS_WITH_STATISTICS, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def master_weights(precision: str = "bf16-true", storage: str = "fp32", **arguments: Any) -> MasterWeightsPrecision:
    if precision == "16-true":
        arguments.setdefault("scaler", LossScaler(init_scale=SCALE))
    return MasterWeightsPrecision(precision, storage=storage, **arguments)


def scale_of(precision: str) -> float:
    return SCALE if precision == "16-true" else 1.0


def clipping(clip: tuple[str, float] | None) -> dict[str, Any]:
    return {} if clip is None else {"gradient_clip_algorithm": clip[0], "gradient_clip_val": clip[1]}


def joint(parameters: Parameters) -> JointOptimizer:
    """Muon for matrices and AdamW for the rest."""
    matrices, rest = [], []
    for p in parameters:
        (matrices if p.ndim == 2 else rest).append(p)
    return JointOptimizer([torch.optim.Muon(matrices, 1e-2), torch.optim.AdamW(rest, 1e-2)])


OPTIMIZERS: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=False),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "joint": joint,
}


class LoopByHand:
    """Casts fp32 weights to 16-bit leaves when a window begins, and has modules compute with them.

    Weights of norms and of parametrizations stay fp32, and so do a LightningModule's own. Of the product it shares the
    policy's autocast and nothing else.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype = torch.bfloat16) -> None:
        parametrized = [m for m in module.modules() if isinstance(m, ParametrizationList)]
        rules = [(ParametrizationList, "fp32")] if parametrized else []
        policy = PrecisionPolicy([*rules, *PrecisionPolicy.default().rules])
        exact = {part for m in parametrized for part in m.modules()}
        self.autocast = AutocastRun(module, "cpu", dtype, eval_dtype=dtype, policy=policy)
        self.module, self.dtype, self.leaves = module, dtype, dict[nn.Parameter, nn.Parameter]()
        self.places = [
            (m, name, p)
            for m in module.modules()
            if m not in exact and not isinstance(m, (*NORMS, pl.LightningModule))
            for name, p in m._parameters.items()
            if p is not None and p.requires_grad and p.dtype == torch.float32
        ]
        for p in module.parameters():
            p.grad_dtype = None  # any

    def cast(self) -> None:
        self.leaves = {p: nn.Parameter(p.detach().to(self.dtype)) for _, _, p in self.places}

    @contextmanager
    def leaves_in_place(self) -> Iterator[None]:
        for module, name, p in self.places:
            _put(module, name, self.leaves[p])
        try:
            yield
        finally:
            for module, name, p in self.places:
                _put(module, name, p)

    def forward(self, function: Callable[..., Any], *args: Any) -> Any:
        with self.autocast.forward(self.dtype), self.leaves_in_place():
            return function(*args)

    def backward(self, loss: Tensor) -> None:
        with self.autocast.backward(), self.leaves_in_place():
            loss.backward()

    def take_gradients(self, scale: float = 1.0) -> bool:
        """Gradients go to the parameters in fp32; returns whether they are finite.

        Where a weight was used outside of modules, too, both are added in 16 bit.
        """
        for p, leaf in self.leaves.items():
            if leaf.grad is not None:
                p.grad = leaf.grad if p.grad is None else leaf.grad + p.grad.to(self.dtype)
        having = [p for p in self.module.parameters() if p.grad is not None]
        for p in having:
            p.grad = p.grad.float() if p.grad.dtype == self.dtype else p.grad
            if scale != 1.0:
                p.grad /= scale
        return all(bool(p.grad.isfinite().all()) for p in having)

    def clear(self) -> None:
        for tensor in (*self.module.parameters(), *self.leaves.values()):
            tensor.grad = None

    def once(self, function: Callable[..., Any], *args: Any) -> Any:
        """A window of one micro-batch."""
        self.cast()
        loss = self.forward(function, *args)
        self.backward(loss)
        self.take_gradients()
        return loss


def _put(module: nn.Module, name: str, tensor: Tensor) -> None:
    if isinstance(module, nn.RNNBase):
        setattr(module, name, tensor)  # it has a list of them, too
    else:
        module._parameters[name] = tensor  # type: ignore[assignment]


def clip_by_hand(parameters: Sequence[Tensor], limit: float, *, fused: bool) -> None:
    """By norm, with the norm of norms in double precision; a fused kernel divides by the reciprocal."""
    having = [p.grad for p in parameters if p.grad is not None]
    norms = torch.stack([torch.linalg.vector_norm(g, dtype=torch.float32) for g in having])
    factor = (limit / (torch.linalg.vector_norm(norms, dtype=torch.float64) + 1e-6)).clamp(max=1.0)
    for g in having:
        g.div_(factor.reciprocal().float()) if fused else g.mul_(factor.float())


def train_by_hand(
    module: Regression,
    batches: Sequence[Sequence[Tensor]],
    precision: str,
    clip: tuple[str, float] | None = None,
    scale: float = 1.0,
) -> list[Tensor]:
    """Returns the weights after one pass over the batches; the scale is halved at each overflow."""
    loop, optimizer = LoopByHand(module, DTYPES[precision]), module.make_optimizer(module.parameters())
    for index, batch in enumerate(batches):
        loop.cast()
        loop.backward(loop.forward(module.training_step, batch, index) * scale)
        if loop.take_gradients(scale):
            if clip is not None:
                clipping = nn.utils.clip_grad_norm_ if clip[0] == "norm" else nn.utils.clip_grad_value_
                clipping(module.parameters(), clip[1])
            optimizer.step()
        elif precision == "16-true":
            scale /= 2
        loop.clear()
    loop.autocast.detach()
    return masters_of(optimizer)


def masters_of(trainer: pl.Trainer | torch.optim.Optimizer) -> list[Tensor]:
    """Copies of the weights of the optimizer, in its order."""
    optimizer = trainer.optimizers[0] if isinstance(trainer, pl.Trainer) else trainer
    return [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]


@contextmanager
def counted_casts() -> Iterator[Counter[int]]:
    """How often the copy of each parameter, by its id, is cast."""
    casts: Counter[int] = Counter()
    own = LentWeights._cast

    def cast(self: LentWeights, loans: Any, versions: Any) -> None:
        casts.update(id(loan.parameter) for loan in loans)
        own(self, loans, versions)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LentWeights, "_cast", cast)
        yield casts
