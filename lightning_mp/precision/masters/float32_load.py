"""Checkpoints that a strategy reads after its set-up: into fp32 weights, so that nothing is rounded on the way."""

import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_mp.checkpoints.atomic import standing_checkpoint
from lightning_mp.core.patches import Patches
from lightning_mp.precision.masters.casting import cast_weights_, uncast_weights_
from lightning_mp.precision.masters.half_range import check_half_range
from lightning_mp.precision.masters.loaded_masters import MastersIntoWeights, expecting_masters
from lightning_mp.precision.masters.optimizer_hooks import MasterHooks
from lightning_mp.precision.masters.store import MasterStore

__all__ = ["EvaluatedLoad", "Float32Load", "MastersLoad", "Recast"]


@dataclass(frozen=True)
class Recast:
    """What was cast to 16 bit, to be cast again.

    Attributes:
        module: the model.
        dtype: fp16 or bf16.
        in_float32: modules in it whose own weights are held in fp32.
        parameters: those that are cast.
    """

    module: nn.Module
    dtype: torch.dtype
    in_float32: Collection[nn.Module]
    parameters: Sequence[nn.Parameter]

    def cast(self) -> dict[nn.Parameter, Tensor]:
        """Returns what the parameters were.

        Raises:
            MisconfigurationException: if they do not fit.
        """
        check_half_range(self.module, self.dtype, self.in_float32)
        with warnings.catch_warnings():  # it was said at set-up
            warnings.filterwarnings("ignore", message="Only fp32 weights are stored")
            return cast_weights_(self.module, self.dtype, self.in_float32)


class MastersLoad:
    """Lets ``ModelParallelStrategy`` and its kind read the masters of a folder with shards into fp32 weights.

    Args:
        strategy: restores checkpoints after its set-up.
        module: the model.
        hooks: of its optimizers.
    """

    def __init__(self, strategy: Strategy, module: nn.Module, hooks: Sequence[MastersIntoWeights]) -> None:
        self._strategy = strategy
        self._module = module
        self._into_weights = hooks
        self._reads_all = isinstance(strategy, ModelParallelStrategy)
        # Others open a file first, and read from it by this method.
        method = "load_checkpoint" if self._reads_all else "load_model_state_dict"
        assert strategy.lightning_module is not None
        self._patch = Patches.of(strategy.lightning_module.trainer).replace(strategy, method, self._load)

    def remove(self) -> None:
        """Gives the strategy its own method back."""
        self._patch.undo()

    def _load(self, source: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._reads_all:
            return self._patch.original(source, *args, **kwargs)
        path = standing_checkpoint(Path(self._strategy.broadcast(source)))
        with expecting_masters(self._module, self._into_weights, path):
            return self._patch.original(source, *args, **kwargs)


class EvaluatedLoad(MastersLoad):
    """While a checkpoint is read that is only evaluated, the model holds fp32 weights, as it does after the run.

    Args:
        strategy: restores checkpoints after its set-up.
        recast: how the weights become 16 bit again.
        before: what they were before they were cast; the checkpoint's weights take the place of those in fp32.
    """

    def __init__(self, strategy: Strategy, recast: Recast, before: dict[nn.Parameter, Tensor]) -> None:
        super().__init__(strategy, recast.module, [])
        self._recast = recast
        self._before = before

    def _load(self, source: Any, *args: Any, **kwargs: Any) -> Any:
        wide = {p: value for p, value in self._before.items() if value.dtype == torch.float32}
        uncast_weights_(self._module, wide)
        try:
            return super()._load(source, *args, **kwargs)
        finally:
            loaded = self._recast.cast()
            self._before.update({p: loaded[p] for p in wide})


class Float32Load(MastersLoad):
    """While a checkpoint is read, the model holds its masters in the place of the 16-bit weights.

    What is read becomes the masters, to the last bit and whatever the weights were before. The optimizers' state is
    read as if their weights were fp32, which also keeps it in fp32.

    Args:
        strategy: restores checkpoints after its set-up.
        recast: how the weights become 16 bit again.
        store: their masters.
        optimizers: with the hooks of the masters, in this order.
        hooks: those hooks.
    """

    def __init__(
        self,
        strategy: Strategy,
        recast: Recast,
        store: MasterStore,
        optimizers: Sequence[Optimizer],
        hooks: Sequence[MasterHooks],
    ) -> None:
        super().__init__(strategy, recast.module, [])
        self._store = store
        self._optimizers = optimizers
        self._hooks = hooks
        self._recast = recast

    def _load(self, source: Any, *args: Any, **kwargs: Any) -> Any:
        for hooks in self._hooks:
            hooks.swap_out()
            hooks.paused = True
        self._into_weights = [MastersIntoWeights(optimizer) for optimizer in self._optimizers]
        uncast_weights_(self._module, {p: self._full(p) for p in self._recast.parameters})
        try:
            result = super()._load(source, *args, **kwargs)
        finally:
            loaded = self._recast.cast()
            # What is frozen now had a master if it was trained before: on which epoch it is unfrozen, callbacks know.
            with_master = frozenset[Tensor]().union(*(into_weights.taken for into_weights in self._into_weights))
            for parameter in (p for p in loaded if p in self._store or p in with_master):
                self._store.set(parameter, loaded[parameter], given=True)
            for into_weights in self._into_weights:
                into_weights.remove()
            for hooks in self._hooks:
                hooks.paused = False
        return result

    def _full(self, parameter: Tensor) -> Tensor:
        return (self._store.get(parameter) if parameter in self._store else parameter).detach().float()
