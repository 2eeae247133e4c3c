"""Plugins that train the weights as they are given, and refuse 16-bit ones."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_mp.ground.core.half_dtypes import HALF_DTYPES
from lightning_mp.ground.core.messages import listed
from lightning_mp.ground.core.precisions import low_dtype
from lightning_mp.training.gradients.gradient_ops import local_shard
from lightning_mp.training.precision.base import GradientStepPrecision

# PEFT itself casts adapters, and leaves modules_to_save as they were loaded.
_CAST_TRAINED = " Where the rest is frozen, cast only what is trained: p.data = p.data.float()."


def lost_updates(weight: Tensor, size: float) -> int:
    """How many elements of a weight stay what they are when ``size`` is added, and when it is subtracted.

    >>> import torch
    >>> lost_updates(torch.tensor([0.01, 1.0, 2.0], dtype=torch.bfloat16), 1e-3)
    2
    """
    return int(((weight + size == weight) & (weight - size == weight)).sum())


class TrainableDtypeCheck:
    """Checks the parameters of an optimizer, now and when others are added."""

    def __init__(self, plugin: str, optimizer: Optimizer, names: Callable[[], Mapping[Tensor, str]]) -> None:
        self._plugin = plugin
        self._names = names
        self._checked = 0
        self._check(optimizer)
        self._handle = optimizer.register_step_pre_hook(lambda stepping, *_: self._check(stepping))

    def remove(self) -> None:
        """Removes the hook."""
        self._handle.remove()

    def _check(self, optimizer: Optimizer) -> None:
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        if count == self._checked:
            return
        self._checked = count
        trained = [(p, group) for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        self._refuse_fp16([p for p, _ in trained if p.dtype == torch.float16], len(trained))
        self._warn_about_bf16([(p, group) for p, group in trained if p.dtype == torch.bfloat16])

    def _listed(self, parameters: list[Tensor]) -> str:
        names = self._names()
        return listed([names.get(parameter, "?") for parameter in parameters])

    def _refuse_fp16(self, parameters: list[Tensor], trained: int) -> None:
        if parameters:
            raise MisconfigurationException(
                f"{self._plugin} trains fp32 weights, but {len(parameters)} of {trained} trainable parameters are"
                f" fp16: {self._listed(parameters)}. Adam would produce NaN. Load the model in fp32"
                " (from_pretrained(..., dtype=torch.float32)), or use MasterWeightsPrecision('16-true')."
                + _CAST_TRAINED
            )

    def _warn_about_bf16(self, trained: list[tuple[Tensor, dict[str, Any]]]) -> None:
        if not trained:
            return
        lost = elements = 0
        for parameter, group in trained:
            weight = local_shard(parameter.detach())
            elements += weight.numel()
            # A warm-up starts from zero.
            lost += lost_updates(weight, float(group.get("initial_lr", group.get("lr", 0.0))))
        rank_zero_warn(
            f"{self._plugin} trains fp32 weights, but {len(trained)} trainable parameters are bf16:"
            f" {self._listed([parameter for parameter, _ in trained])}. A step is rounded away in {lost:,} of"
            f" {elements:,} elements. Load the model in fp32 (from_pretrained(..., dtype=torch.float32)), or use"
            f" MasterWeightsPrecision('bf16-true').{_CAST_TRAINED}"
        )


class FullWeightsPrecision(GradientStepPrecision):
    """Base class of the plugins that train the weights as they are given; users take ``AutocastPrecision``."""

    @override
    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Starts reporting outcomes and checks what is trained, in a fit.

        Raises:
            MisconfigurationException: if trainable weights are fp16.
        """
        result = super().connect(model, optimizers, lr_schedulers)
        self._tell_of_frozen_weights()
        if self._run.is_fit:
            for optimizer in optimizers:
                self._connect_late(optimizer)
        return result

    def _tell_of_frozen_weights(self) -> None:
        """Those in the other 16-bit format; a norm on a CPU raises torch's "mixed dtype" error for them."""
        low = low_dtype(str(self.precision))
        named = self._run.trainer.lightning_module.named_parameters()
        other = [name for name, p in named if not p.requires_grad and p.dtype in HALF_DTYPES and p.dtype != low]
        if low is not None and other:
            rank_zero_info(
                f"{type(self).__name__}({self.precision!r}) computes in {low}, and {len(other)} frozen weights are in"
                f" the other 16-bit format ({listed(other)}): they are cast at each use, and a norm on a CPU raises"
                f" torch's error about a mixed dtype. Load them with dtype={low}."
            )

    @override
    def _connect_late(self, optimizer: Optimizer) -> None:
        run = self._run
        module, plugin = run.trainer.lightning_module, f"{type(self).__name__}({self.precision!r})"
        trained = TrainableDtypeCheck(plugin, optimizer, lambda: {p: name for name, p in module.named_parameters()})
        run.cleanups.callback(trained.remove)
