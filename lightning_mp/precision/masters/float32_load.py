"""Checkpoints that a strategy reads after its set-up: into fp32 weights, so that nothing is rounded on the way."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_mp.checkpoints.atomic import existing_checkpoint
from lightning_mp.core.patches import Patches
from lightning_mp.precision.masters.casting import HalfWeights, uncast_weights_
from lightning_mp.precision.masters.loaded_masters import MastersIntoWeights, masters_announced
from lightning_mp.precision.masters.optimizer_hooks import MasterHooks
from lightning_mp.precision.masters.store import MasterStore


class MastersLoad:
    """Lets ``ModelParallelStrategy`` and its kind read the masters of a folder with shards into fp32 weights."""

    def __init__(self, strategy: Strategy, module: nn.Module, hooks: Sequence[MastersIntoWeights]) -> None:
        self._strategy = strategy
        self._module = module
        self._into_weights = hooks
        self._reads_all = isinstance(strategy, ModelParallelStrategy)
        # Others open a file first, and read from it by this method.
        method = "load_checkpoint" if self._reads_all else "load_model_state_dict"
        assert strategy.lightning_module is not None
        self._patch = Patches.of(strategy.lightning_module.trainer).replace(strategy, method, self._load)

    def _load(self, source: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._reads_all:
            return self._patch.original(source, *args, **kwargs)
        path = existing_checkpoint(Path(self._strategy.broadcast(source)))
        with masters_announced(self._module, self._into_weights, path):
            return self._patch.original(source, *args, **kwargs)


class EvaluatedLoad(MastersLoad):
    """While a checkpoint is read that is only evaluated, the model holds fp32 weights, as it does after the run."""

    def __init__(self, strategy: Strategy, cast: HalfWeights) -> None:
        super().__init__(strategy, cast.module, [])
        self._cast = cast

    def _load(self, source: Any, *args: Any, **kwargs: Any) -> Any:
        before = self._cast.before
        wide = {p: value for p, value in before.items() if value.dtype == torch.float32}
        uncast_weights_(self._module, wide)
        try:
            return super()._load(source, *args, **kwargs)
        finally:
            loaded = self._cast.cast_again()
            before.update({p: loaded[p] for p in wide})


class Float32Load(MastersLoad):
    """While a checkpoint is read, the model holds its masters in the place of the 16-bit weights.

    What is read becomes the masters, to the last bit and whatever the weights were before. The optimizers' state is
    read as if their weights were fp32, which also keeps it in fp32.
    """

    def __init__(
        self,
        strategy: Strategy,
        cast: HalfWeights,
        store: MasterStore,
        optimizers: Sequence[Optimizer],
        hooks: Sequence[MasterHooks],
    ) -> None:
        super().__init__(strategy, cast.module, [])
        self._store = store
        self._optimizers = optimizers
        self._hooks = hooks
        self._cast = cast

    def _load(self, source: Any, *args: Any, **kwargs: Any) -> Any:
        for hooks in self._hooks:
            hooks.swap_out()
            hooks.paused = True
        self._into_weights = [MastersIntoWeights(optimizer) for optimizer in self._optimizers]
        uncast_weights_(self._module, {p: self._full(p) for p in self._cast.parameters})
        try:
            result = super()._load(source, *args, **kwargs)
        finally:
            loaded = self._cast.cast_again()
            # What is frozen now had a master if it was trained before: on which epoch it is unfrozen, callbacks know.
            with_master = frozenset[Tensor]().union(*(into_weights.taken for into_weights in self._into_weights))
            for parameter in (p for p in loaded if p in self._store or p in with_master):
                self._store.set(parameter, loaded[parameter], is_exact_fp32=True)
            for into_weights in self._into_weights:
                into_weights.remove()
            for hooks in self._hooks:
                hooks.paused = False
        return result

    def _full(self, parameter: Tensor) -> Tensor:
        return (self._store.get(parameter) if parameter in self._store else parameter).detach().float()
