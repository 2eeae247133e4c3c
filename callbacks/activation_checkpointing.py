"""Activation checkpointing under any strategy."""

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from typing_extensions import override

from lightning_mp.ground.core.arguments import whole_number
from lightning_mp.ground.core.foreign_trainers import refuse_other_trainers
from lightning_mp.ground.core.messages import listed
from lightning_mp.ground.core.patches import Patches
from lightning_mp.ground.core.private_dispatch_api import is_compiled
from lightning_mp.ground.core.run_state import RunState
from lightning_mp.ground.core.settings_repr import SettingsRepr
from lightning_mp.ground.modules.stage_placeholder import full_model
from lightning_mp.training.activation_checkpointing.cost import RecomputeReport, StepCost
from lightning_mp.training.activation_checkpointing.wrapper import CheckpointedModules
from lightning_mp.training.policy.module_selection import ModulePattern, as_patterns, select_modules


class ActivationCheckpointing(SettingsRepr, Callback):
    r"""Recomputes modules in backward instead of storing their activations: less memory for about a third more FLOPs.

    .. code-block:: python

        Trainer(callbacks=[ActivationCheckpointing(Block)])                  # a class
        Trainer(callbacks=[ActivationCheckpointing("my_project.Block")])     # its name, short or in full, as in YAML
        Trainer(callbacks=[ActivationCheckpointing("model.blocks.*")])       # a glob over names of modules
        Trainer(callbacks=[ActivationCheckpointing(Block, every=2)])         # blocks 0, 2, 4, ...

    Works under any strategy and precision, and inside torch.compile. Weights, gradients and names in the state dict are
    bit-identical to a run without it, dropout included: checkpoints are non-reentrant (``torch.utils.checkpoint``),
    recomputation uses the random state, autocast and default dtype of the first forward, and buffers that a forward
    changes (running statistics, the vectors of ``spectral_norm``, a codebook) change once, and recomputation sees their
    original values. For modules that change buffers, all buffers are kept until backward. Compiled modules that change
    buffers are refused, except torch's norms. Forwards without gradients, as in validation, are unaffected. Other side
    effects of a forward (counting calls in a plain attribute, writing to parameters, forward hooks of inner modules)
    happen twice.

    Modules are searched once all of them exist, including those built in ``setup`` or ``configure_model`` or replaced
    by a plugin. Their own forwards are wrapped, so it does not matter whether a strategy has wrapped them. At the end
    of the fit everything is removed.

    In the first micro-batch saved bytes and FLOPs are counted, not timed, and printed once; a compiled model is not
    counted, because it would have to run uncompiled.

    For a chain of ``L`` equal blocks with ``a`` bytes saved in each and ``b`` bytes of input, where ``b`` is part of
    ``a``, at the end of the forward and at the peak of the backward (Chen et al. 2016, "Training Deep Nets with
    Sublinear Memory Cost", section 4):

    ==========================  =====================================  ==================================
    checkpointed                held                                   peak
    ==========================  =====================================  ==================================
    nothing                     :math:`L a`                            :math:`L a`
    every block                 :math:`L b`                            :math:`L b + (a - b)`
    every k-th block            :math:`L/k \; b + (L - L/k) \; a`      the same :math:`+ \; (a - b)`
    segments of ``L/s`` blocks  :math:`s b`                            :math:`s b + (L/s) \; a - b`
    ==========================  =====================================  ==================================

    The last peak is smallest at :math:`s = \sqrt{L a / b}` segments. To checkpoint segments, wrap the blocks of each in
    an ``nn.Sequential`` and name those.

    Args:
        modules: what to checkpoint: a module class, its name, a glob over names, or a list of these. A string is a
            glob; where it matches no name it is the name of a class. Of nested modules the outer one is checkpointed.
            The LightningModule itself, containers without a forward, metrics and TorchScript modules are not supported.
        every: checkpoint the first of each ``every`` modules found, in the order of the model. (The last ones gain
            least: their activations are needed first.)

    Attributes:
        module_names: names of the checkpointed modules.
        report: what was counted in the first micro-batch on this rank; None before, or if it was not counted.

    Raises:
        ValueError: if ``modules`` or ``every`` cannot be read; at the start of a fit, if a pattern matches nothing
            (with the names that exist), or only modules inside those that another pattern matches.
        MisconfigurationException: at the start of a fit, if activations are already checkpointed; in its first
            micro-batch, if a compiled forward changes buffers.

    Example:
        >>> from lightning_mp import ActivationCheckpointing
        >>> ActivationCheckpointing("blocks.*", every=2).module_names
        ()
    """

    def __init__(self, modules: ModulePattern | Sequence[ModulePattern], *, every: int = 1) -> None:
        self.modules = as_patterns(modules, type(self).__name__)
        self.every = whole_number(
            every,
            "every",
            "ActivationCheckpointing",
            hint="1 checkpoints every module that was found, 2 every second one.",
        )
        self.module_names: tuple[str, ...] = ()
        self.report: RecomputeReport | None = None
        self._checkpointed: CheckpointedModules | None = None  # of the current fit

    # -- set-up and end ------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        """Checks the Trainer."""
        refuse_other_trainers(self, trainer)
        if isinstance(trainer.strategy, DeepSpeedStrategy):
            raise MisconfigurationException(
                "ActivationCheckpointing cannot be used with DeepSpeed, which partitions activations itself. Use"
                " DeepSpeedStrategy's own activation checkpointing (deepspeed.checkpointing.checkpoint in the forward)."
            )

    @override
    def on_fit_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Finds the modules, all of which exist by now, and wraps their forwards."""
        with full_model(pl_module):  # a stage of a pipeline may have none of them
            found = select_modules(pl_module, self.modules, type(self).__name__, every=self.every)
        _refuse_other_checkpoints(pl_module)
        self.module_names = tuple(found)
        self.report = None
        self._checkpointed = CheckpointedModules(found.values())
        Patches.of(trainer).at_end(self._end)
        classes = ", ".join(sorted({type(module).__name__ for module in found.values()}))
        rank_zero_info(
            f"ActivationCheckpointing: {len(found)} modules of class {classes} run again in backward:"
            f" {listed(self.module_names)}."
        )

    def _end(self) -> None:
        checkpointed, self._checkpointed = self._checkpointed, None
        if checkpointed is not None:
            checkpointed.detach()

    # -- the first micro-batch -----------------------------------------------------------------------------------------

    @override
    def on_train_batch_start(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", batch: Any, batch_idx: int
    ) -> None:
        """Starts counting in the first micro-batch that has a loss."""
        checkpointed = self._checkpointed
        if checkpointed is None or checkpointed.is_counted:
            return
        if is_compiled(pl_module):
            checkpointed.is_counted = True
            checkpointed.begin_compiled_step()
            rank_zero_info(
                "ActivationCheckpointing: saved bytes and FLOPs are not counted, because the model is compiled and"
                " would have to run uncompiled for it."
            )
            return
        checkpointed.begin_counting(StepCost(pl_module, batch))

    @override
    def on_before_backward(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", loss: Tensor) -> None:
        """The forward has ended."""
        if self._checkpointed is not None:
            self._checkpointed.end_compiled_forward()
            if self._checkpointed.switch.cost is not None:
                self._checkpointed.switch.cost.end_forward()

    @override
    def on_after_backward(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Prints what was counted."""
        cost = self._checkpointed.end_counting() if self._checkpointed is not None else None
        if self._checkpointed is None or cost is None or RunState.of(trainer).is_repeating:
            return
        self._checkpointed.is_counted = True
        self.report = cost.report()
        rank_zero_info(f"ActivationCheckpointing, first micro-batch on this rank: {self.report}")

    @override
    def on_train_batch_end(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """A micro-batch without a loss cannot be counted; the next one is."""
        if self._checkpointed is not None:
            self._checkpointed.end_counting()


def _refuse_other_checkpoints(model: nn.Module) -> None:
    """Refuses nested checkpoints, which would run a module three times."""
    for name, module in model.named_modules():
        if name.endswith("_checkpoint_wrapped_module"):
            raise MisconfigurationException(
                f"ActivationCheckpointing: activations are already checkpointed by a wrapper around {name!r}. Leave"
                " out FSDPStrategy(activation_checkpointing_policy=...), or whatever else wraps it, or remove this"
                " callback."
            )
        if getattr(module, "gradient_checkpointing", False) is True:
            raise MisconfigurationException(
                f"ActivationCheckpointing: {type(module).__name__} at {name!r} has gradient_checkpointing switched on"
                " and checkpoints by itself. Call gradient_checkpointing_disable() on the model, or leave this callback"
                " out."
            )
