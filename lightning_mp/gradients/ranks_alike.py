"""What all ranks must do alike, watched for the time of one ``fit``."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_mp.core import private_sharding_api
from lightning_mp.core.messages import listed
from lightning_mp.core.patches import Patch, Patches
from lightning_mp.core.run_state import RunState
from lightning_mp.gradients.agreed_units import AgreedUnits


class RanksAlike:
    """Sharded ranks run the same units; DDP reduces every parameter that is trained.

    Both are looked at between the last backward of a step and the step, until the run ends. Any part of the pack may
    ask for it; the first one is heard.
    """

    def __init__(self, trainer: "pl.Trainer", optimizers: Sequence[Optimizer]) -> None:
        self._units: AgreedUnits | None = None
        self._unreduced: UnreducedParameters | None = None
        self._method: Patch | None = None
        model = trainer.strategy.model
        run = RunState.of(trainer)
        if run.find(RanksAlike) is not None or model is None:
            return
        run.keep(self)
        self._units = AgreedUnits.of(model, optimizers, trainer.strategy.root_device)
        self._unreduced = UnreducedParameters.of(model)
        if self._units is not None:
            Patches.of(trainer).at_end(self._units.detach)
        if self._units is not None or self._unreduced is not None:
            self._method = Patches.of(trainer).replace(trainer.strategy, "optimizer_step", self._optimizer_step)

    def flush_pending(self) -> None:
        """Makes sure that ranks were alike until now."""
        if self._units is not None:
            self._units.flush_pending()

    def _optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *others: Any, **named: Any) -> Any:
        assert self._method is not None

        def closure_then_inspect() -> Any:
            result = closure()
            if self._units is not None:
                self._units.compare(optimizer)
            if self._unreduced is not None:
                self._unreduced.check(optimizer)
            return result

        return self._method.original(optimizer, closure_then_inspect, *others, **named)


class UnreducedParameters:
    """Refuses the first step of an optimizer that would train such a parameter."""

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
        """To be called before a step."""
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
