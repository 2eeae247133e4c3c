"""What master weights are compared with: loops that keep fp32 copies by hand, and the optimizers they are tried on."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from small_models import Regression
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_mp import LossScaler, MasterWeightsPrecision
from lightning_mp.precision.masters.bf16_remainder import round_to_24_bits, split

DTYPES = {"bf16-true": torch.bfloat16, "16-true": torch.float16}

Parameters = Iterable[nn.Parameter]

SCALE = 2.0**10
# (precision, storage)
KINDS = [("bf16-true", "fp32"), ("bf16-true", "remainder"), ("bf16-true", "24bit"), ("16-true", "fp32")]


def master_weights(precision: str = "bf16-true", storage: str = "fp32", **arguments: Any) -> MasterWeightsPrecision:
    if precision == "16-true":
        arguments.setdefault("scaler", LossScaler(init_scale=SCALE))
    return MasterWeightsPrecision(precision, storage=storage, **arguments)


def scale_of(precision: str) -> float:
    return SCALE if precision == "16-true" else 1.0


def clipping(clip: tuple[str, float] | None) -> dict[str, Any]:
    return {} if clip is None else {"gradient_clip_algorithm": clip[0], "gradient_clip_val": clip[1]}


def huggingface_adafactor(parameters: Parameters) -> torch.optim.Optimizer:
    """A third-party optimizer, which writes through ``parameter.data`` and treats 16-bit parameters in its own way."""
    from transformers.optimization import Adafactor

    return Adafactor(parameters, lr=1e-2, relative_step=False, scale_parameter=False)


OPTIMIZERS: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=False),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.9),
    "huggingface_adafactor": huggingface_adafactor,
}


def as_kept(master: Tensor, storage: str, steps: int = 0) -> Tensor:
    """What is kept of a master after so many steps."""
    return round_to_24_bits(master, steps) if storage == "24bit" else master


@torch.no_grad()
def write_back(masters: Iterable[Tensor], weights: Iterable[Tensor], storage: str, steps: int) -> None:
    """What a store does after so many steps: masters as they are kept, and 16-bit weights of them."""
    for master, weight in zip(masters, weights, strict=True):
        master.copy_(as_kept(master, storage, steps))
        weight.copy_(master if storage == "fp32" else split(master)[0])


class MastersByHand:
    """16-bit weights, and an optimizer over fp32 copies of what they were."""

    def __init__(
        self, module: nn.Module, dtype: torch.dtype, make_optimizer: Callable[..., Any], storage: str = "fp32"
    ) -> None:
        self.storage = storage
        self.steps = 0
        self.parameters = list(module.parameters())
        self.masters = [nn.Parameter(p.detach().clone()) for p in self.parameters]
        module.to(dtype)
        self._write()
        self.optimizer = make_optimizer(self.masters)

    def step(self, scale: float = 1.0, clip: tuple[str, float] | None = None) -> bool:
        """Steps with the parameters' gradients, or skips; returns whether it did."""
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            master.grad = parameter.grad.float() / scale
            parameter.grad = None
        stepped = all(torch.isfinite(m.grad).all() for m in self.masters)
        if stepped:
            if clip is not None:
                clipping = nn.utils.clip_grad_norm_ if clip[0] == "norm" else nn.utils.clip_grad_value_
                clipping(self.masters, clip[1])
            self.optimizer.step()
            self.steps += 1
            self._write()
        return stepped

    def _write(self) -> None:
        write_back(self.masters, self.parameters, self.storage, self.steps)


def train_by_hand(
    module: Regression,
    batches: Sequence[Sequence[Tensor]],
    precision: str,
    clip: tuple[str, float] | None = None,
    scale: float = 1.0,
    storage: str = "fp32",
) -> list[Tensor]:
    """Returns the masters after one pass over the batches; the scale is halved at each overflow."""
    dtype = DTYPES[precision]
    by_hand = MastersByHand(module, dtype, module.make_optimizer, storage)
    for index, batch in enumerate(batches):
        loss = module.training_step([x.to(dtype) for x in batch], index)
        (loss.float() * scale).backward()
        if not by_hand.step(scale, clip):
            scale = scale / 2 if precision == "16-true" else scale
    return [m.detach() for m in by_hand.masters]


def masters_of(trainer: pl.Trainer) -> list[Tensor]:
    """The masters as a checkpoint would hold them, in the order of the optimizer's parameters."""
    state = trainer.optimizers[0].state_dict()["state"]
    return [state[index]["master_param"].clone() for index in sorted(state)]


class CountCasts(TorchDispatchMode):
    """How often a 16-bit weight is written, and how often any copy of a weight is made elsewhere."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.weights = {p.untyped_storage().data_ptr() for p in module.parameters()}
        self.written: Counter[int] = Counter()
        self.copied: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in ("aten::copy_", "aten::_foreach_copy_"):
            for target in tree_leaves(args[0]):
                self.written[target.untyped_storage().data_ptr()] += 1
        elif name in ("aten::_to_copy", "aten::clone"):
            for source in tree_leaves(args):
                if isinstance(source, Tensor) and source.untyped_storage().data_ptr() in self.weights:
                    self.copied[name] += 1
        return func(*args, **(kwargs or {}))
