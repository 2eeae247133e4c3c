"""When ranks reduce their gradients under sharding: once per window, or at every micro-batch."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_mp.ground.core import private_sharding_api
from lightning_mp.ground.core.patches import Patches
from lightning_mp.ground.modules.whole_parameters import whole_parameters
from lightning_mp.training.gradients.gradient_ops import local_shard

Sync = Literal["window", "micro_batch"]


class GradientSync:
    """Told what each micro-batch is, before its forward."""

    def begin(self, *, closes: bool) -> None:
        """A micro-batch begins; ``closes`` if the optimizer steps after it."""

    def end(self) -> None:
        """The micro-batch is over."""

    def detach(self) -> None:
        """Leaves the modules as they were."""
        self.end()


class _FSDP2Sync(GradientSync):
    """FSDP2's own switch, which holds until it is set again."""

    def __init__(self, units: Sequence[FSDPModule]) -> None:
        self._units = units
        for unit in units:
            private_sharding_api.allow_unused_layers(unit)

    @override
    def begin(self, *, closes: bool) -> None:
        for unit in self._units:
            unit.set_requires_gradient_sync(closes, recurse=False)  # the list has the inner units, too

    @override
    def detach(self) -> None:
        self.begin(closes=True)


class _FSDP1Sync(GradientSync):
    """FSDP1's ``no_sync``, around forward and backward of all micro-batches but the last."""

    def __init__(self, roots: list[FullyShardedDataParallel]) -> None:
        self._roots = roots
        self._stack = ExitStack()

    @override
    def begin(self, *, closes: bool) -> None:
        if not closes:
            for root in self._roots:
                no_sync: AbstractContextManager[None] = root.no_sync()
                self._stack.enter_context(no_sync)

    @override
    def end(self) -> None:
        self._stack.close()


def gradient_sync(trainer: "pl.Trainer", model: nn.Module, sync: Sync) -> GradientSync | None:
    """What carries out ``sync`` for the strategy of this run; None if the strategy does it by itself.

    DDP reduces in the last micro-batch of a window, FSDP in every one. Prints what ``sync`` costs under sharding.
    """
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    roots = _outermost_fsdp1(model) if isinstance(trainer.strategy, FSDPStrategy) else []
    if not units and not roots:
        if sync == "micro_batch":
            raise MisconfigurationException(
                "AccumulationScheduler(sync='micro_batch') is for sharded gradients, and"
                f" {type(trainer.strategy).__name__} does not shard them. Leave sync out: gradients are then reduced"
                " once per window."
            )
        return None
    unsharded, sharded = unsharded_gradient_bytes(model)
    if sync == "micro_batch":
        rank_zero_info(
            f"Gradient accumulation: gradients are reduced at every micro-batch and kept sharded,"
            f" {sharded / 1e9:.3g} GB per rank; sync='window' would reduce once per window and keep"
            f" {unsharded / 1e9:.3g} GB."
        )
        return None
    rank_zero_info(
        f"Gradient accumulation: gradients are reduced once per window; until then every rank keeps them unsharded,"
        f" {unsharded / 1e9:.3g} GB. If that does not fit, sync='micro_batch' keeps {sharded / 1e9:.3g} GB and"
        " reduces at every micro-batch."
    )
    return _FSDP2Sync(units) if units else _FSDP1Sync(roots)


def reduce_first_backward(trainer: "pl.Trainer", after_second_forward: Callable[[], None]) -> None:
    """Has ``DDP(static_graph=True)`` reduce in the first backward of a run, also where that does not close a window.

    DDP learns its graph there; where it is not to reduce, torch (2.15 too) ends with an internal assertion:
    https://github.com/pytorch/pytorch/issues/143580. The gradient is the same, as the next reduction leaves a mean over
    ranks as it is. In the second forward DDP lays out its buckets anew, and writes gradients that are views of them.
    """
    model = trainer.strategy.model
    if not isinstance(model, DistributedDataParallel) or not model.static_graph:
        return
    num_forwards = 0

    def block_backward_sync() -> AbstractContextManager[None]:
        return blocked.original() if num_forwards else nullcontext()

    def count(module: nn.Module, *_: Any) -> None:
        nonlocal num_forwards
        num_forwards += torch.is_grad_enabled()  # not those of a sanity check
        if num_forwards == 2:
            handle.remove()
            after_second_forward()

    patches = Patches.of(trainer)
    blocked = patches.replace(trainer.strategy, "block_backward_sync", block_backward_sync)
    handle = model.register_forward_hook(count)
    patches.at_end(handle.remove)


def unsharded_gradient_bytes(model: nn.Module) -> tuple[int, int]:
    """Bytes of gradients per rank: whole as they are kept by ``sync="window"``, and the shards of this rank.

    Under FSDP2 with tensor parallelism a rank's whole gradient is that of its part of the layers.

    Gradients are taken to have the dtype of their parameters, which FSDP2 exceeds if it reduces in a wider one.
    """
    unsharded = sum(parameter.data_parallel_bytes for parameter in whole_parameters(model) if parameter.learns)
    shards = [local_shard(parameter.detach()) for parameter in model.parameters() if parameter.requires_grad]
    return unsharded, sum(shard.numel() * shard.element_size() for shard in shards)


def _outermost_fsdp1(model: nn.Module) -> list[FullyShardedDataParallel]:
    if isinstance(model, FullyShardedDataParallel):
        return [model]
    return [root for child in model.children() for root in _outermost_fsdp1(child)]
