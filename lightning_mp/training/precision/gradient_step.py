"""One optimizer step from top to bottom: from "backward is done" to "stepped or skipped"."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor
from torch.optim import Optimizer

from lightning_mp.ground.core import private_optimizer_api, private_trainer_api
from lightning_mp.training.accumulation.boundary import repeated_losses
from lightning_mp.training.accumulation.controller import AccumulationController
from lightning_mp.training.gradients.fused_optimizers import (
    applies_grad_scale,
    fused_step,
    momentum_is_missing,
    one_mesh_per_group,
)
from lightning_mp.training.gradients.old_gradients import needs_old_gradients
from lightning_mp.training.gradients.replication import gradient_replication
from lightning_mp.training.optimizer_step.bypassed_steps import found_by_unscaling
from lightning_mp.training.optimizer_step.closures import StepClosure
from lightning_mp.training.optimizer_step.gradient_epilogue import GradientEpilogue
from lightning_mp.training.optimizer_step.gradient_observers import clips_by_itself, gradient_consumers
from lightning_mp.training.optimizer_step.loss_scaler import LossScaleFloorError
from lightning_mp.training.optimizer_step.outcome_dispatcher import StepOutcomeDispatcher, StepReport
from lightning_mp.training.optimizer_step.scaled_backwards import ScaledBackwards, unscaled_gradients
from lightning_mp.training.optimizers.evaluations import evaluates_its_closure_once
from lightning_mp.training.tokens.counter import LOSSES


@dataclass(frozen=True)
class StepPlan:
    """What does not change between an optimizer's steps; determined before the first of them."""

    optimizer: Optimizer
    model: "pl.LightningModule"  # the module that it trains
    plugin: Precision  # clips where a module clips through Lightning's hook
    scaler: torch.amp.GradScaler | None  # the loss scaler, if there is one
    dispatcher: StepOutcomeDispatcher | None  # gets a report of each step; None outside of a fit
    backwards: ScaledBackwards | None  # of scaled losses, where hooks or users may come between
    controller: AccumulationController | None  # normalises windows whose micro-batches are weighted
    epilogue: Callable[..., GradientEpilogue]  # creates the epilogue of a step from the loss scale
    in_kernel: bool  # the optimizer's own kernel multiplies gradients, and skips
    may_evaluate: bool  # the optimizer may evaluate the loss itself
    frees_gradients: bool  # before the next forward, which Lightning lets them live through

    @classmethod
    def of(
        cls,
        optimizer: Optimizer,
        model: "pl.LightningModule",
        plugin: Precision,
        dispatcher: StepOutcomeDispatcher | None,
        backwards: ScaledBackwards | None,
        epilogue_type: Callable[..., GradientEpilogue],
    ) -> Self:
        """Call it on all ranks. ``epilogue_type`` is :class:`GradientEpilogue`, or takes the same arguments."""
        trainer, scaler = model.trainer, getattr(plugin, "scaler", None)
        evaluates_once = evaluates_its_closure_once(type(optimizer))
        return cls(
            optimizer,
            model,
            plugin,
            scaler,
            dispatcher,
            backwards,
            AccumulationController.of(trainer),
            partial(epilogue_type, optimizer, ranks=gradient_replication(trainer), device=model.device),
            # One that evaluates the loss between two changes of the weights needs final gradients, not a factor.
            in_kernel=applies_grad_scale(optimizer) and (evaluates_once or scaler is not None),
            may_evaluate=not evaluates_once,
            frees_gradients=model.automatic_optimization
            and not needs_old_gradients(private_trainer_api.callbacks_of(trainer), model, optimizer),
        )

    def loss_scale(self) -> tuple[torch.Tensor | None, list[torch.Tensor] | None]:
        """The scale of the gradients, and what ``scaler.unscale_`` has found if it has unscaled them already."""
        scaler = self.scaler
        if scaler is None:
            return None, None
        scale = private_optimizer_api.grad_scaler_scale(scaler)
        if scale is None:
            # This rank has not scaled a loss yet, and others may have: all of them need the same scale.
            private_optimizer_api.make_grad_scale(scaler, self.model.device)
            scale = private_optimizer_api.grad_scaler_scale(scaler)
        is_unscaled = private_optimizer_api.has_unscaled(scaler)
        return scale, found_by_unscaling(scaler, self.optimizer, self.model) if is_unscaled else None


@dataclass
class GradientStep:
    """The step in progress."""

    plan: StepPlan
    epilogue: GradientEpilogue = field(init=False)  # of the gradients of the last evaluation
    has_loss: bool = True  # the last micro-batch had one on this rank
    closure: StepClosure | None = None  # for an optimizer that may evaluate the loss itself; None for those that do not
    is_stepping: bool = False  # the optimizer's own `step` is running
    has_no_items: Tensor | None = None  # no micro-batch of the window had a loss on any rank
    items: Tensor | None = None  # of the window, over all ranks
    are_shown: bool = False  # true gradients, to the module's own `optimizer_step`
    _gradients_may_have_changed: bool = False
    _clips_last: bool = False  # Lightning's own hook clips, after which nothing looks at gradients

    def clip(self, limit: float, algorithm: "GradClipAlgorithmType | str") -> None:
        """Clips by the norm over all parameters and ranks, or limits every element.

        It is only planned where nothing looks at the gradients between here and the optimizer's kernel. A module's own
        hook may read them next, change them, or clip again.
        """
        if not self._clips_last:
            self.epilogue.clip_now(limit, by_value=algorithm == GradClipAlgorithmType.VALUE)
        elif algorithm == GradClipAlgorithmType.VALUE:
            if self._gradients_may_have_changed:
                self.epilogue.check_again()  # the limit would turn an inf that a hook has left into a number
            self.epilogue.clip_by_value(limit)
        else:
            self.epilogue.clip_by_norm(limit, fresh=self._gradients_may_have_changed)

    def enable_reevaluation(
        self, closure: Callable[[], Any], result: Any, context: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        """For an optimizer that may evaluate the loss itself."""
        evaluate = partial(_evaluate_again, self, closure, context) if self.plan.scaler is None else None
        self.closure = StepClosure(self.plan.optimizer, result, evaluate, self.plan.plugin)


def show_true_gradients(step: GradientStep) -> None:
    """Before a module's own code that runs between its closure and the step: it may read and write gradients."""
    normalisation = _reduce(step)
    step.epilogue.plan(normalisation)
    step.epilogue.make_true()
    step.are_shown = True


def _reduce(step: GradientStep) -> Tensor | None:
    """Reads gradients once, and adds their norm and the items of the window over all ranks; gives its normalisation."""
    plan, model = step.plan, step.plan.model
    trainer, controller = model.trainer, plan.controller
    scale, unscaled_found = plan.loss_scale()
    totals = controller.window_totals(model.device) if controller is not None else None
    found_inf = plan.backwards.found_inf(plan.optimizer) if plan.backwards is not None else ()
    has_scaled = plan.backwards.has_scaled(plan.optimizer) if plan.backwards is not None else None
    step.epilogue = epilogue = plan.epilogue(
        scale, in_kernel=plan.in_kernel, unscaled_found=unscaled_found, found_inf=found_inf, has_scaled=has_scaled
    )
    totals = epilogue.reduce(totals)
    if plan.scaler is not None and not epilogue.anyone_has_scaled() and epilogue.anyone_has_gradients():
        raise unscaled_gradients(plan.optimizer, plan.plugin, plan.scaler.get_scale())
    step.items = totals[0] if totals is not None else None
    step.has_no_items = totals[LOSSES] == 0 if totals is not None and trainer.world_size > 1 else None
    return controller.close_window(totals) if controller is not None else None


def _make_ready(step: GradientStep) -> None:
    """Reduces gradients, decides whether to skip, plans scaling and clipping, and runs the hooks that see gradients."""
    plan, model, trainer = step.plan, step.plan.model, step.plan.model.trainer
    # Reduce: gradients are read once; their norm and the items of the window are added over all ranks.
    normalisation = None if step.are_shown else _reduce(step)
    consumers = gradient_consumers(private_trainer_api.callbacks_of(trainer), model, trainer.global_step)
    if step.are_shown:
        consumers = "writers"
    algorithm = trainer.gradient_clip_algorithm or GradClipAlgorithmType.NORM
    limit = trainer.gradient_clip_val if consumers == "none" and model.automatic_optimization else None
    by_norm = bool(limit) and algorithm != GradClipAlgorithmType.VALUE
    epilogue = step.epilogue

    # Decide and plan: after this every rank knows whether the step is skipped, and the factor for its gradients.
    if not step.are_shown:
        epilogue.plan(normalisation, limit if by_norm else None)
    step.are_shown = False

    # Hooks that read or clip gradients see true ones. The optimizer must get what was checked, so gradients that a hook
    # may have written are checked again.
    if consumers != "none":
        step._gradients_may_have_changed = consumers == "writers"
        epilogue.make_true()
        if plan.scaler is not None:  # a hook that calls `unscale_` gets an error from torch, not a second division
            private_optimizer_api.set_unscaled(plan.scaler, plan.optimizer, epilogue.found_inf)
        private_optimizer_api.call_before_optimizer_step_hooks(model, plan.optimizer)
        step._clips_last = not clips_by_itself(model)
        private_optimizer_api.clip_through_module(plan.plugin, model, plan.optimizer)
        if plan.scaler is not None and private_optimizer_api.has_stepped(plan.scaler, plan.optimizer):
            raise RuntimeError(
                "step() has already been called since the last update(): scaler.step was called by a hook that runs"
                " before the optimizer's step. Leave it out; the step is taken after the hooks."
            )
        step._clips_last = False
        if step._gradients_may_have_changed and not epilogue.is_checked:
            epilogue.check_again()
    elif limit and not by_norm:
        epilogue.clip_by_value(limit)


def step_or_skip(step: GradientStep, **kwargs: Any) -> Any:
    """Makes or skips the step whose gradients the closure has computed."""
    plan, optimizer = step.plan, step.plan.optimizer
    _make_ready(step)
    epilogue, overflow = step.epilogue, step.epilogue.found_inf
    if step.has_no_items is not None:
        epilogue.found_inf = torch.maximum(overflow, step.has_no_items.to(overflow))

    # Step or skip: the host waits for the decision, unless the optimizer's kernel takes it.
    on_device = plan.in_kernel and not momentum_is_missing(optimizer)
    output = None
    if on_device or not epilogue.wait_for_decision():
        step.is_stepping = True
        try:
            if not plan.in_kernel:
                epilogue.apply()
            kernel = fused_step(optimizer, epilogue.found_inf, epilogue.multiplier) if plan.in_kernel else nullcontext()
            with kernel, one_mesh_per_group(optimizer):
                output = optimizer.step(**kwargs) if step.closure is None else step.closure.step(**kwargs)
        finally:
            step.is_stepping = False
    # Manual optimization may continue with a forward under the same autocast, which has cached the old weights.
    torch.clear_autocast_cache()

    # Report.
    if plan.dispatcher is not None:
        found_inf = epilogue.found_inf
        if not step.has_loss and not epilogue.parameters and not epilogue.anyone_has_gradients():
            found_inf = torch.ones_like(found_inf)  # there was nothing to step with
        report = StepReport(
            found_inf, epilogue.scale, epilogue.grad_norm, step.items, epilogue.parameters, epilogue.norms
        )
        plan.dispatcher.record(optimizer, report, flush_now=not on_device)

    # Update the scale: once per batch. In manual optimization the batch may hold more steps, so it waits for the next.
    if plan.scaler is None:
        return output
    if not epilogue.parameters and not epilogue.anyone_has_gradients():
        # Nothing was checked, and `GradScaler.update` raises an error without a check.
        private_optimizer_api.forget_optimizers(plan.scaler, [optimizer])
        return output
    # A window without a loss is skipped like an overflow, but must not lower the loss scale.
    found_inf = overflow if step.has_no_items is not None else epilogue.found_inf
    private_optimizer_api.record_found_inf(plan.scaler, optimizer, found_inf)
    if plan.model.automatic_optimization:
        try:
            plan.scaler.update()
        except LossScaleFloorError as error:
            raise _with_names(error, step) from None
    return output


def _evaluate_again(
    step: GradientStep,
    closure: Callable[[], Any],
    context: Callable[[], AbstractContextManager[Any]],
) -> Any:
    """Evaluates the loss once more, for an optimizer that calls its closure again inside a step.

    See ``enable_reevaluation``.
    """
    controller = step.plan.controller
    if controller is not None and controller.weighting is not None:
        if not controller.settings.follows_trainer:
            raise repeated_losses([step.plan.optimizer])
        controller.weigh_equally(f"{type(step.plan.optimizer).__name__} evaluates the loss again inside of a step")
    torch.clear_autocast_cache()
    with context():
        result = closure()
    _make_ready(step)
    if step.epilogue.wait_for_decision():
        name = type(step.plan.optimizer).__name__
        raise RuntimeError(
            f"{name} evaluated the loss itself and its gradients overflowed, after weights had changed: the step can be"
            f" neither finished nor undone. Resume from a checkpoint, with a lower learning rate or a smaller climb of"
            f" {name}."
        )
    step.epilogue.apply()
    return result


_HIDDEN = (
    "none, as on_after_backward has replaced them. Where they are not finite at any scale, mask them in the loss, or"
    " with Tensor.register_hook"
)


def _with_names(error: LossScaleFloorError, step: GradientStep) -> LossScaleFloorError:
    names = {id(p): name for name, p in step.plan.model.named_parameters()}
    shards = zip(step.epilogue.parameters, step.epilogue.shards, strict=True)
    bad = [names.get(id(p), "?") for p, shard in shards if not torch.isfinite(shard).all()]
    return LossScaleFloorError(
        f"Step {step.plan.model.trainer.global_step}: {error} Non-finite gradients now: {', '.join(bad) or _HIDDEN}."
    )
