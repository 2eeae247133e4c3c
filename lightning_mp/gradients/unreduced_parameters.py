"""Parameters that were frozen when DDP was set up: it never reduces them, and ranks would drift apart."""

from collections.abc import Mapping
from typing import Self

from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_mp.core import private_sharding_api
from lightning_mp.core.messages import listed

__all__ = ["UnreducedParameters"]


class UnreducedParameters:
    """Refuses the first step of an optimizer that would train such a parameter.

    Args:
        frozen: parameters that DDP does not know, and their names.
    """

    def __init__(self, frozen: Mapping[nn.Parameter, str]) -> None:
        self._frozen = frozen

    @classmethod
    def of(cls, model: nn.Module) -> Self | None:
        """Watches a model right after DDP has wrapped it; None if DDP reduces all of it, or is not there."""
        if not isinstance(model, DistributedDataParallel):
            return None
        known = {n: p for n, p in model.module.named_parameters() if n not in model.parameters_to_ignore}
        frozen = {parameter: name for name, parameter in known.items() if not parameter.requires_grad}
        if not frozen or len(known) - len(frozen) != private_sharding_api.number_reduced_by_ddp(model):
            return None  # or it was frozen after DDP has counted it
        return cls(frozen)

    def check(self, optimizer: Optimizer) -> None:
        """To be called before a step.

        Raises:
            MisconfigurationException: if it would train one of them.
        """
        unfrozen = {parameter: name for parameter, name in self._frozen.items() if parameter.requires_grad}
        if not unfrozen:
            return
        trained = [unfrozen[p] for group in optimizer.param_groups for p in group["params"] if p in unfrozen]
        if trained:
            raise MisconfigurationException(
                f"{listed(trained)} were frozen when DDP was set up and are trained now. DDP reduces only what"
                " required a gradient then, so each rank would train them on its own samples and ranks would drift"
                " apart, silently under plain Lightning. Freeze them after DDP's set-up"
                " (requires_grad_(False) in on_train_start) under strategy='ddp_find_unused_parameters_true'; or train"
                " in two fits, the second with all of them unfrozen before it begins; or use"
                " strategy=FSDP2Strategy(), which reduces whatever requires a gradient."
            )
