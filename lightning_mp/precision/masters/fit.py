"""The masters of one fit: created at its start, stepped by its optimizers, loaded and saved with checkpoints."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_mp.checkpoints.fused_qkv import fused_orders
from lightning_mp.gradients.gradient_ops import local_shard
from lightning_mp.gradients.replication import all_hold_the_same
from lightning_mp.precision.masters.checks import refuse_copies_of_weights, refuse_states_by_memory
from lightning_mp.precision.masters.compiled_step import CompiledStep, check_compiled_step
from lightning_mp.precision.masters.fp32_gradients import Fp32Gradients
from lightning_mp.precision.masters.loaded_masters import MASTER_STEPS_KEY
from lightning_mp.precision.masters.optimizer_hooks import MasterHooks
from lightning_mp.precision.masters.store import (
    MasterStore,
    Storage,
    distribute_like,
    make_store,
    refine,
    remember_masters,
)


class MastersOfFit:
    """The store and the hooks of the optimizers; kept after the fit for a checkpoint that is saved then."""

    def __init__(self, storage: Storage, *, compiled_step: bool, fp32_gradients: bool, fp32_checkpoints: bool) -> None:
        self._storage = storage
        self._compiled_step = compiled_step
        self._fp32_gradients = fp32_gradients
        self._fp32_checkpoints = fp32_checkpoints
        self._full_state: RemovableHandle | None = None
        self.store: MasterStore = make_store(storage)
        self.hooks: list[MasterHooks] = []
        #: fp32 copies in the place of 16-bit gradients.
        self.gradients = Fp32Gradients()
        #: Whether a checkpoint, a single file, has the masters of all ranks.
        self.in_one_file = False

    def begin(
        self,
        trainer: "pl.Trainer",
        optimizers: Sequence[Optimizer],
        values: Mapping[nn.Parameter, Tensor],
        were_16_bit: Collection[nn.Parameter],
    ) -> None:
        """Creates the masters from the weights before their cast, and hooks the optimizers."""
        strategy = trainer.strategy
        for optimizer in optimizers:
            refuse_copies_of_weights(optimizer)
            refuse_states_by_memory(optimizer, self._storage)
            if self._compiled_step:
                check_compiled_step(optimizer, self._storage)
        self.in_one_file = not strategy.restore_checkpoint_after_setup
        copied = isinstance(strategy, DDPStrategy) and all_hold_the_same(strategy)
        self.store.begin(optimizers, values, were_16_bit, broadcast=copied)
        remember_masters(trainer.lightning_module, self.store)
        for optimizer in optimizers:
            self._hook(optimizer)
        if self._fp32_checkpoints:
            module: nn.Module = trainer.lightning_module
            self._full_state = module.register_state_dict_post_hook(FullWeightsInState(self.store))

    def join(self, optimizer: Optimizer, current: Sequence[Optimizer]) -> None:
        """For an optimizer that was created during the fit: it continues with the masters of those that it replaces."""
        for hooks in [hooks for hooks in self.hooks if hooks.optimizer not in current]:
            hooks.remove()
            self.hooks.remove(hooks)
        self._hook(optimizer)

    def _hook(self, optimizer: Optimizer) -> None:
        compiled = CompiledStep(optimizer, self.store) if self._compiled_step else None
        self.hooks.append(MasterHooks(optimizer, self.store, self.gradients, compiled=compiled))

    def before_backward(self) -> None:
        """Gradients are 16 bit when they are added to, or fp32 all the time."""
        self.gradients.flush_pending()
        for hooks in self.hooks if self._fp32_gradients else ():
            hooks.accumulate_in_float32()

    def swap_out(self) -> None:
        """After an exception in a step; does nothing otherwise."""
        for hooks in self.hooks:
            hooks.swap_out()

    def read(self, module: nn.Module, checkpoint: Mapping[str, Any]) -> None:
        """Takes fp32 weights, which were just loaded into a 16-bit module; masters of the optimizers' states follow."""
        self.store.steps = checkpoint.get(MASTER_STEPS_KEY, 0)
        self.store.read_weights(module, checkpoint.get("state_dict", {}))

    def end(self) -> None:
        """The fit is over; weights stay 16 bit, and masters with the optimizers."""
        self.swap_out()
        self.gradients.flush_pending()
        self.store.end()
        for working in self.store.parameters if self._fp32_gradients else ():
            working.grad = None
            working.grad_dtype = working.dtype

    def leave(self) -> None:
        """Removes the hooks: another fit begins."""
        for hooks in self.hooks:
            hooks.remove()
        self.hooks = []
        if self._full_state is not None:
            self._full_state.remove()


class FullWeightsInState:
    """A hook for ``module.register_state_dict_post_hook``.

    Where a weight is not its rounded master (averaged weights are swapped in), the weight itself is written.
    Copies of the module, made by ``deepcopy`` or ``pickle``, carry the hook without the masters; it does nothing there.
    """

    def __init__(self, masters: MasterStore | None = None) -> None:
        self._masters = masters

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        """Writes the masters into ``state_dict``."""
        if self._masters is None:
            return
        orders = fused_orders(module)
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if parameter in self._masters and prefix + name in state_dict:
                working = local_shard(parameter.detach())
                master = local_shard(self._masters.get(parameter).detach())
                full = distribute_like(refine(working, master.to(working.device)), parameter)
                state_dict[prefix + name] = orders[name].to_checkpoint(full) if name in orders else full

    def __reduce__(self) -> tuple[type["FullWeightsInState"], tuple[()]]:
        return FullWeightsInState, ()
