"""fp32 masters in the place of 16-bit weights in a module's ``state_dict``."""

from typing import Any

from torch import nn

from lightning_mp.checkpoints.fused_qkv import fused_orders
from lightning_mp.gradients.gradient_ops import local_shard
from lightning_mp.precision.masters.store import MasterStore, distribute_like, refine


class FullWeightsInState:
    """A hook for ``module.register_state_dict_post_hook``.

    Where a weight is not what its master rounds to (averaged weights that stand in for it), the weight is written.
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
