"""The base of our precision plugins: accepted by every stock strategy, it ends each step with the gradient epilogue."""

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import FSDPPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import DeepSpeedStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from typing_extensions import override

from lightning_mp.ground.core import private_optimizer_api
from lightning_mp.ground.core.bar_messages import keep_messages_off_the_bar
from lightning_mp.ground.core.foreign_trainers import no_trainer, trainer_of
from lightning_mp.ground.core.namespace_hint import namespace_hint
from lightning_mp.ground.core.patches import Patches
from lightning_mp.ground.core.run_state import RunState
from lightning_mp.ground.core.saved_state import COUNT, MAPPING, TEXT, checked_state
from lightning_mp.ground.core.settings_repr import SettingsRepr
from lightning_mp.ground.core.trainer_ranks import num_data_ranks
from lightning_mp.ground.modules.compiled_names import COMPILED_PREFIX
from lightning_mp.training.accumulation.controller import AccumulationController
from lightning_mp.training.checkpoints.former_masters import take_masters, warn_about_rounded_weights
from lightning_mp.training.distributed.fsdp1_models import FSDP1Model
from lightning_mp.training.distributed.rank_settings import RankSettings
from lightning_mp.training.gradients.fused_optimizers import refuse_without_dtensors, why_steps_wait
from lightning_mp.training.gradients.replication import GradientReplication
from lightning_mp.training.optimizer_step.bypassed_steps import (
    check_step_past_the_plugin,
    holds_parameters_of,
    with_wrapped,
)
from lightning_mp.training.optimizer_step.closures import refuse_closures_under_a_scale
from lightning_mp.training.optimizer_step.gradient_epilogue import GradientEpilogue
from lightning_mp.training.optimizer_step.loss_scaler import ANOMALIES_UNDER_A_SCALE, check_saved_scaler
from lightning_mp.training.optimizer_step.manual_scale import (
    GradientsBeforeBackward,
    gradients_before_backward,
    update_scale,
)
from lightning_mp.training.optimizer_step.outcome_dispatcher import StepOutcomeDispatcher
from lightning_mp.training.optimizer_step.scaled_backwards import ScaledBackwards
from lightning_mp.training.optimizers.adam_moments import refuse_bf16_moments
from lightning_mp.training.optimizers.joint import JointOptimizer, join_saved_states
from lightning_mp.training.optimizers.low_bit_states import save_plain_tensors
from lightning_mp.training.optimizers.matrix_blocks import refuse_unknown_blocks
from lightning_mp.training.optimizers.schedule_free import ScheduleFreeMode
from lightning_mp.training.policy.resolved import show
from lightning_mp.training.precision.autocast_context import AutocastRun
from lightning_mp.training.precision.gradient_step import GradientStep, StepPlan, step_or_skip
from lightning_mp.training.precision.optimizer_states import refuse_other_optimizers
from lightning_mp.training.precision.own_steps import OwnClosure, OwnSteps

_STOCK_STATE_KEYS = ("MixedPrecision", "FSDPPrecision")
_SKIPPED_STEPS_KEY = "lightning_mp_skipped_steps"
_PRECISION_KEY = "lightning_mp_precision"
_WEIGHTS_KEY = "lightning_mp_loss_weights"
_SAVED = {_SKIPPED_STEPS_KEY: COUNT, _PRECISION_KEY: TEXT, _WEIGHTS_KEY: MAPPING}


@dataclass(eq=False)
class PluginRun:
    """The state of a plugin in one run of a Trainer."""

    trainer: "pl.Trainer"
    cleanups: ExitStack = field(default_factory=ExitStack)  # undoes changes to other objects, the last first
    autocast: AutocastRun | None = None  # what forwards, backwards and steps run in; None for plugins without autocast
    dispatcher: StepOutcomeDispatcher | None = None  # reports the outcomes of steps, in a fit
    backwards: ScaledBackwards | None = None  # those of scaled losses, where hooks or users may come between
    own_steps: OwnSteps | None = None  # of a module that has its own `optimizer_step`
    evaluated: ScheduleFreeMode | None = None  # where schedule-free optimizers have their weights, in a fit
    optimizers: set[Optimizer] = field(default_factory=set)  # that were registered
    plans: dict[Optimizer, StepPlan] = field(default_factory=dict)  # made with the first step of each
    planned_for: Sequence[Callback] | None = None  # the Trainer's callbacks when that was
    gradients_before_backward: GradientsBeforeBackward = field(default_factory=dict)  # of manual optimization
    stepped: Optimizer | None = None  # its gradients are freed before the next forward
    weighs: bool = False  # micro-batches are weighed, or there is nothing to weigh

    @property
    def is_fit(self) -> bool:
        """Whether the run trains."""
        return self.trainer.state.fn == TrainerFn.FITTING


@dataclass(frozen=True)
class CrossRunState:
    """What later runs and checkpoints need of a run that has ended."""

    device_type: str | None = None  # of the last run; None before the first
    skipped_steps: int = 0  # of the fits so far
    loss_weights: dict[str, Any] | None = None  # see `AccumulationController.weights_state`
    policy_table: str = ""  # what a policy resolved to


class GradientStepPrecision(SettingsRepr, MixedPrecision, FSDPPrecision):
    """Base class; users take ``AutocastPrecision``.

    It is a subclass of both stock mixed-precision plugins because ``FSDPStrategy`` accepts nothing but an
    ``FSDPPrecision``. Of ``FSDPPrecision`` nothing is used: its constructor is never called, and its silent casts of
    inputs and outputs are disabled.

    Every step, with any optimizer: the closure runs, the gradients are read once, all ranks agree, and then the step is
    made or skipped. Non-finite gradients never reach the optimizer, in bf16 as in fp16. Hooks
    (``on_before_optimizer_step``, ``configure_gradient_clipping``) see true gradients; only where one is overridden are
    gradients written before the step of a fused optimizer.
    """

    makes_true_gradients: ClassVar[bool] = True
    scaler: torch.amp.GradScaler | None  # type: ignore[assignment]  # FSDPPrecision has a ShardedGradScaler

    def __init__(
        self, precision: Any, scaler: "torch.amp.GradScaler | None", weight_by: Literal["loss"] | None
    ) -> None:
        """Stores the settings that all plugins share; Lightning's constructors are not called."""
        if weight_by not in ("loss", None):
            raise ValueError(f"{type(self).__name__}(weight_by={weight_by!r}) is unknown; it must be 'loss' or None.")
        self.precision = precision
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.weight_by = weight_by
        self._in_run: PluginRun | None = None
        self._carried = CrossRunState()
        self._step: GradientStep | None = None  # in progress

    @override
    def __getstate__(self) -> dict[str, Any]:
        """A copy has no part in the run, and can be given to another Trainer."""
        return {**vars(self), "_in_run": None, "_step": None}

    @property
    def _run(self) -> PluginRun:
        assert self._in_run is not None
        return self._in_run

    @property
    def _autocast(self) -> AutocastRun | None:
        return self._in_run.autocast if self._in_run is not None else None

    @override
    def __str__(self) -> str:
        return f"{type(self).__name__}({self.precision!r}){namespace_hint('plugin')}"

    # -- set-up and end ------------------------------------------------------------------------------------------------

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        """Stores the Trainer of the module, which it does not change; has micro-batches weighted.

        Raises:
            MisconfigurationException: if there is no ``lightning.pytorch`` Trainer, as under Fabric, or with DeepSpeed.
        """
        trainer = trainer_of(module)
        if trainer is None:
            raise no_trainer(self, "got a module without one")
        if isinstance(trainer.strategy, DeepSpeedStrategy):
            raise MisconfigurationException(
                f"{type(self).__name__} cannot be used with DeepSpeed, whose engine makes masters, scales, clips and"
                " steps itself. Use DeepSpeedStrategy with Trainer(precision=...), or strategy='ddp' or"
                " FSDP2Strategy with this plugin."
            )
        limit = trainer.gradient_clip_val
        if limit is not None and limit < 0:
            raise MisconfigurationException(
                f"Trainer(gradient_clip_val={limit}) must not be negative: nothing would be clipped. Give a positive"
                " value, or leave it out."
            )
        if self._in_run is not None:  # left by a run that ended before the plugin's teardown
            self.teardown()
        RankSettings.compare(trainer)
        self._in_run = run = self._begin_run(trainer)
        self._carry(device_type=trainer.strategy.root_device.type)
        Patches.of(trainer).at_end(self._end)
        keep_messages_off_the_bar(trainer)
        run.weighs = self.weight_by is None
        if not run.weighs and run.is_fit:
            self._weigh_micro_batches(trainer)
        return module

    def _begin_run(self, trainer: "pl.Trainer") -> PluginRun:
        return PluginRun(trainer)

    def _weigh_micro_batches(self, trainer: "pl.Trainer") -> None:
        """Where several make a step: in a window of accumulation, or on ranks with different data."""
        scheduler = RunState.of(trainer).callback(GradientAccumulationScheduler)
        several = trainer.accumulate_grad_batches > 1 or num_data_ranks(trainer) > 1 or scheduler is not None
        if several and trainer.lightning_module.automatic_optimization:
            self._run.weighs = True
            AccumulationController.weigh_by_loss(trainer)

    def _weigh_from_here(self, trainer: "pl.Trainer") -> None:
        """Accumulation begins inside of a fit: a callback has written ``trainer.accumulate_grad_batches``."""
        module, self._run.weighs = trainer.lightning_module, True
        if not module.automatic_optimization or AccumulationController.of(trainer) is not None:
            return
        controller = AccumulationController.weigh_by_loss(trainer)
        if self._carried.loss_weights is not None:
            controller.continue_from(self._carried.loss_weights)
        controller.on_fit_start(trainer, module)
        controller.on_train_start(trainer, module)
        controller.on_train_batch_start(trainer, module, None, trainer.fit_loop.epoch_loop.batch_idx)

    @override
    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Starts reporting outcomes, if this is a fit."""
        run = self._run
        if run.is_fit:
            FSDP1Model.inspect_after_wrapping(run.trainer.strategy)
            for optimizer in optimizers:
                self._register_optimizer(optimizer)
            self._warn_if_nothing_trains(optimizers)
            if self.scaler is not None:
                # An earlier run may have ended between `unscale_` and `update`.
                private_optimizer_api.forget_optimizers(self.scaler)
                run.backwards = ScaledBackwards.of(run.trainer, self, self.scaler)
            # the hook of all optimizers also sees the steps of inner ones
            run.cleanups.callback(register_optimizer_step_pre_hook(self._notice_step).remove)
            run.dispatcher = StepOutcomeDispatcher(run.trainer, run.trainer.lightning_module).attach(optimizers)
            run.cleanups.callback(self._end_reporting, run.dispatcher)
            run.evaluated = ScheduleFreeMode(run.trainer, optimizers)
            run.own_steps = OwnSteps.of(run.trainer, self._begin_own_step, self.scaler)
            compare = partial(RankSettings.compare_at_first_batch, run.trainer)
            Patches.of(run.trainer).around(run.trainer.strategy, "on_train_start", before=compare)
        return model, optimizers, lr_schedulers

    def _warn_if_nothing_trains(self, optimizers: Sequence[Optimizer]) -> None:
        module = self._run.trainer.lightning_module
        trainable = {id(parameter) for parameter in module.parameters() if parameter.requires_grad}
        optimized = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        if optimized and trainable and trainable.isdisjoint(optimized):
            rank_zero_warn(
                f"{self}: none of the {len(trainable)} trainable parameters of {type(module).__name__} is in its"
                " optimizer, so training will not change them. Create the optimizer from self.parameters() in"
                " configure_optimizers."
            )

    def _end_reporting(self, dispatcher: StepOutcomeDispatcher) -> None:
        try:
            dispatcher.detach()
        finally:
            self._carry(skipped_steps=dispatcher.skipped_steps)

    def _register_optimizer(self, optimizer: Optimizer) -> None:
        """Once for each optimizer of a fit."""
        trainer = self._run.trainer
        if self.scaler is not None:
            refuse_closures_under_a_scale(optimizer, self)
        refuse_without_dtensors(optimizer)
        refuse_unknown_blocks([optimizer], knows=JointOptimizer)
        refuse_bf16_moments(optimizer)
        save_plain_tensors(optimizer)
        # With a loss scaler, Lightning's own plugins wait, too.
        waits = why_steps_wait(optimizer) if self.scaler is None else None
        if waits and trainer.strategy.root_device.type != "cpu":
            rank_zero_info(f"{self}: {waits}")
        if isinstance(optimizer, JointOptimizer) and len(trainer.optimizers) < 2:
            optimizer.refuse_unassigned_parameters(trainer.lightning_module)
        self._run.optimizers.add(optimizer)

    def _register_late(self, optimizer: Optimizer) -> None:
        """For an optimizer that was created during the fit, before it steps; those that it replaces are dropped."""
        run = self._run
        if not run.optimizers.isdisjoint(with_wrapped(optimizer)):  # a strategy has wrapped it since
            run.optimizers.add(optimizer)
            return
        current = {*run.trainer.optimizers, optimizer}
        run.optimizers &= current
        run.plans = {o: plan for o, plan in run.plans.items() if o in current}
        self._register_optimizer(optimizer)
        if run.dispatcher is not None:
            run.dispatcher.flush_before_saving(optimizer)
        self._connect_late(optimizer)
        if run.backwards is not None:
            run.backwards.trust(optimizer)
        if run.evaluated is not None:
            run.evaluated.join(optimizer)

    def _connect_late(self, optimizer: Optimizer) -> None:
        """What a plugin does in ``connect`` to each optimizer of a fit."""

    def _start_autocast(self, autocast: AutocastRun, *, announced: bool = True) -> None:
        """Forwards run under it from now on. Prints what the user's policy resolved to, if it has changed."""
        self._run.autocast = autocast
        self._run.cleanups.callback(autocast.detach)
        table = str(autocast.resolved) if autocast.resolved is not None else ""
        if announced and autocast.resolved is not None and table != self._carried.policy_table:
            self._carry(policy_table=table)
            rank_zero_only(show)(autocast.resolved)

    # -- without the casts that FSDPPrecision makes and mixed precision does not ---------------------------------------

    convert_input = Precision.convert_input
    convert_output = Precision.convert_output
    tensor_init_context = Precision.tensor_init_context
    module_init_context = Precision.module_init_context

    # -- what steps run in ---------------------------------------------------------------------------------------------

    @override
    def forward_context(self) -> AbstractContextManager[Any]:  # type: ignore[override]  # the parents disagree
        """What forwards run in; this one is for training steps.

        Raises:
            MisconfigurationException: before a Trainer's run, as by ``Fabric.autocast()``; after one, if it needs what
                the plugin had done to the module.
        """
        return self._context("train")

    @override
    def train_step_context(self) -> AbstractContextManager[None]:  # type: ignore[override]  # a generator there
        """The forward context; the last step's gradients end here, and in manual optimization its scale is updated."""
        context, run = self.forward_context(), self._in_run
        self._update_scale(run)
        if run is not None and run.stepped is not None:
            # Lightning clears them after the forward: 4 bytes per parameter at its peak. Hooks until now may read them.
            for group in run.stepped.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
            run.stepped = None
        if run is not None and not run.weighs and run.trainer.accumulate_grad_batches != 1 and run.is_fit:
            self._weigh_from_here(run.trainer)
        return context

    def _update_scale(self, run: PluginRun | None) -> None:
        """After a batch of manual optimization in which an optimizer has stepped."""
        if self.scaler is None:
            return
        left: GradientsBeforeBackward = {}
        if run is not None:
            left, run.gradients_before_backward = run.gradients_before_backward, left
        if private_optimizer_api.has_stepped(self.scaler):
            update_scale(self.scaler, run.trainer.optimizers if run is not None else [], left)

    @override
    def val_step_context(self) -> AbstractContextManager[None]:  # type: ignore[override]  # a generator there
        """What forwards of validation steps run in."""
        return self._context("validate")

    @override
    def test_step_context(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """The same for test steps."""
        return self._context("test")

    @override
    def predict_step_context(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """The same for predict steps."""
        return self._context("predict")

    def _context(self, loop: str) -> AbstractContextManager[None]:
        if self._in_run is not None:
            return self._steps_in(loop)
        if self._carried.device_type is None:
            raise no_trainer(self, "has no context outside of a Trainer's run")
        reason = self._why_not_after_a_run()
        if reason is not None:
            raise MisconfigurationException(
                f"{self}: its context was entered after the run, and {reason}. Use trainer.predict, trainer.validate"
                " or trainer.test, or torch.autocast."
            )
        return self._steps_in(loop)

    def _why_not_after_a_run(self) -> str | None:
        """What the plugin's contexts miss once a run has ended; None if nothing."""
        if getattr(self, "policy", None) is not None:
            return "its policy is in force on the module for the time of a run only"
        return None

    def _steps_in(self, loop: str) -> AbstractContextManager[None]:
        """Autocast, with the policy in force; only autocast after a run."""
        autocast = self._autocast
        if autocast is None:
            steps = self._steps_after_a_run(loop)
        else:
            steps = autocast.forward(autocast.dtype if loop == "train" else autocast.eval_dtype)
        return steps if loop == "train" else self._evaluation_steps(steps)

    def _evaluation_steps(self, steps: AbstractContextManager[None]) -> AbstractContextManager[None]:
        """The context of an evaluation's steps, made of that of its forward."""
        return steps

    def _steps_after_a_run(self, loop: str) -> AbstractContextManager[None]:
        raise NotImplementedError

    def _outside_forward(self) -> AbstractContextManager[Any]:
        """Leaves the forward's context: in manual optimization optimizers are stepped inside of it."""
        return self._autocast.outside() if self._autocast is not None else nullcontext()

    # -- loss and step -------------------------------------------------------------------------------------------------

    @override
    def pre_backward(self, tensor: Tensor, module: "pl.LightningModule") -> Tensor:  # type: ignore[override]
        """Scales the loss, once, in float32; then calls ``on_before_backward``."""
        if self.scaler is not None:
            if self._in_run is not None and not module.automatic_optimization:
                known, optimizers = self._in_run.gradients_before_backward, module.trainer.optimizers
                self._in_run.gradients_before_backward = gradients_before_backward(self.scaler, optimizers, known)
            backwards = self._in_run.backwards if self._in_run is not None else None
            tensor = self.scaler.scale(tensor) if backwards is None else backwards.scale(self.scaler, tensor)
        return Precision.pre_backward(self, tensor, module)  # not super(): both stock parents would scale again

    def backward_context(self) -> AbstractContextManager[Any]:
        """What backwards run in, for strategies that run their own."""
        return self._autocast.backward() if self._autocast is not None else nullcontext()

    @override
    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: "pl.LightningModule", optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Runs the module's backward outside of autocast, also in manual optimization, with the policy in force."""
        with self.backward_context():
            try:
                super().backward(tensor, model, optimizer, *args, **kwargs)
            except RuntimeError as error:
                if self.scaler is not None and "returned nan values" in str(error):
                    error.add_note(f"HINT: {ANOMALIES_UNDER_A_SCALE}")
                raise

    @override
    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clips true gradients, whatever the optimizer and the strategy; with a fused optimizer in its own kernel."""
        if clip_val <= 0:
            return
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        step = self._step if self._step is not None and self._step.plan.optimizer is optimizer else None
        if step is None and self._in_run is not None and self._in_run.own_steps is not None:
            step = self._in_run.own_steps.shown(optimizer)
        if step is not None:
            step.clip(float(clip_val), gradient_clip_algorithm)
            return
        if self._in_run is None:
            # After a run gradients are not scaled.
            device = optimizer.param_groups[0]["params"][0].device
            epilogue = GradientEpilogue(optimizer, None, ranks=GradientReplication.every_rank(), device=device)
        else:
            # `self.clip_gradients` in manual optimization: the gradients stay scaled until the step.
            plan = self._plan_of(optimizer, self._in_run.trainer.lightning_module)
            scale, unscaled_found = plan.loss_scale()
            epilogue = plan.epilogue(scale, unscaled_found=unscaled_found)
        epilogue.reduce(None)
        epilogue.plan(None)
        epilogue.clip_scaled(float(clip_val), by_value=gradient_clip_algorithm == GradClipAlgorithmType.VALUE)

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizer, model: "pl.LightningModule", closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Runs the closure, then the epilogue, then makes or skips the step.

        A closure that returns None (no loss in the last micro-batch, manual optimization, or a module that called its
        closure itself) changes nothing: the gradients that are there are stepped with, as in fp32.
        """
        run = self._in_run
        if run is not None and optimizer not in run.optimizers:
            self._register_late(optimizer)
        closure_result = closure.run() if isinstance(closure, OwnClosure) else closure()
        plan, outside = self._plan_of(optimizer, model), self._outside_forward()
        if plan.dispatcher is not None:
            # After the closure: by now the device is busy with this window's backward and the last step is long over.
            plan.dispatcher.flush_pending()
        shown = run.own_steps.take(optimizer) if run is not None and run.own_steps is not None else None
        step = shown or GradientStep(plan)
        step.has_loss = closure_result is not None or not model.automatic_optimization
        if plan.may_evaluate:
            # In automatic optimization the closure enters the forward's context itself.
            context = nullcontext if model.automatic_optimization else self.forward_context
            step.enable_reevaluation(closure, closure_result, context)
        with outside:
            outer, self._step = self._step, step  # an optimizer's closure may step another one
            try:
                output = step_or_skip(step, **kwargs)
            finally:
                self._step = outer
        if run is not None:
            run.stepped = optimizer if plan.frees_gradients else None
            if run.backwards is not None:
                run.backwards.forget(optimizer)
        if run is not None and run.gradients_before_backward:
            left = run.gradients_before_backward
            run.gradients_before_backward = {o: those for o, those in left.items() if o is not optimizer}
        return closure_result if output is None else output

    def _begin_own_step(self, optimizer: Optimizer) -> GradientStep:
        if optimizer not in self._run.optimizers:
            self._register_late(optimizer)
        return GradientStep(self._plan_of(optimizer, self._run.trainer.lightning_module))

    def _plan_of(self, optimizer: Optimizer, model: "pl.LightningModule") -> StepPlan:
        """The same for a whole fit; not made before the first step, where strategies have wrapped the model."""
        run, epilogue = self._in_run, self._epilogue_type()
        if run is None:
            return StepPlan.of(optimizer, model, self, None, None, epilogue)
        callbacks = vars(model.trainer)["callbacks"]
        # `LearningRateFinder` trains with another list of callbacks, before the fit itself.
        if callbacks is not run.planned_for:
            run.plans, run.planned_for = {}, callbacks
        if optimizer not in run.plans:
            run.plans[optimizer] = StepPlan.of(optimizer, model, self, run.dispatcher, run.backwards, epilogue)
        return run.plans[optimizer]

    def _epilogue_type(self) -> Callable[..., GradientEpilogue]:
        """The type of the epilogue between backward and a step."""
        return GradientEpilogue

    def _notice_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Before any step of any optimizer: checks one that bypasses the plugin with this module's gradients."""
        if self._step is not None and self._step.is_stepping:
            return
        trainer = self._run.trainer
        module = trainer.lightning_module
        if optimizer in trainer.optimizers or holds_parameters_of(optimizer, module):
            check_step_past_the_plugin(optimizer, self, self.scaler, module)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        """The scaler's state; empty without a scaler."""
        self._update_scale(self._in_run)
        return self.scaler.state_dict() if self.scaler is not None else {}

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Writes the scaler's state where the stock plugins look for it, too, and how many steps were skipped."""
        dispatcher = self._in_run.dispatcher if self._in_run is not None else None
        if dispatcher is not None:
            dispatcher.flush_pending()
            self._carry(skipped_steps=dispatcher.skipped_steps)
        checkpoint[_SKIPPED_STEPS_KEY] = self._carried.skipped_steps
        checkpoint[_PRECISION_KEY] = str(self.precision)
        self._note_loss_weights(settle=True)
        if self._carried.loss_weights is not None:
            checkpoint[_WEIGHTS_KEY] = self._carried.loss_weights
        state = self.state_dict()
        if state:
            for key in _STOCK_STATE_KEYS:
                checkpoint[key] = state

    def _note_loss_weights(self, *, settle: bool) -> None:
        controller = AccumulationController.of(self._in_run.trainer) if self._in_run is not None else None
        if controller is not None:
            self._carry(loss_weights=controller.weights_state(settle=settle))

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from a scaler's state."""
        if self.scaler is not None:
            self.scaler.load_state_dict(state_dict)

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Reads the scaler's state from where the stock plugins keep it, if there is none of ours.

        Raises:
            ValueError: if the checkpoint was written with another optimizer, or holds values that no plugin writes.
        """
        run = self._run
        saved_kinds = {key: kind for key, kind in _SAVED.items() if key in checkpoint}
        checked_state(checkpoint, saved_kinds, type(self).__name__)
        scale_keys = [key for key in (type(self).__qualname__, *_STOCK_STATE_KEYS) if key in checkpoint]
        if self.scaler is not None and scale_keys:
            check_saved_scaler(self.scaler, checkpoint[scale_keys[0]])
        optimizers, strategy = run.trainer.optimizers, run.trainer.strategy
        if "optimizer_states" in checkpoint and optimizers:
            join_saved_states(checkpoint, optimizers)
            # Strategies that restore after their set-up have split parameters, and so optimizers, into parts.
            whole = not strategy.restore_checkpoint_after_setup
            refuse_other_optimizers(checkpoint["optimizer_states"], optimizers, counts_parameters=whole)
        masters = self._former_masters(checkpoint)
        controller = AccumulationController.of(run.trainer)
        weights = checkpoint.get(_WEIGHTS_KEY)
        if controller is not None and weights is not None:
            controller.continue_from(weights)
        self._carry(loss_weights=weights)
        for parameter, master in masters.items():
            parameter.data.copy_(master)
        saved = checkpoint.get(_PRECISION_KEY, self.precision)
        if saved != self.precision:
            rank_zero_info(
                f"{type(self).__name__}({self.precision!r}) resumes a run in {saved!r}: weights and optimizer state are"
                " converted, so results differ from those of that run."
            )
        if run.dispatcher is not None:
            run.dispatcher.skipped_steps = checkpoint.get(_SKIPPED_STEPS_KEY, 0)
        if self.scaler is None:
            return
        if not scale_keys:
            rank_zero_warn(
                f"{type(self).__name__}: the checkpoint holds no loss scale, so the scale starts again at"
                f" {self.scaler.get_scale():.10g}. That is expected if the run had another precision."
            )
        elif scale_keys[0] in _STOCK_STATE_KEYS:  # Lightning hands a plugin its own state
            self.load_state_dict(checkpoint[scale_keys[0]])

    def _former_masters(self, checkpoint: dict[str, Any]) -> dict[Tensor, Tensor]:
        """Strategies that restore after their set-up have read them, if they can, as part of the weights."""
        strategy = self._run.trainer.strategy
        if not strategy.restore_checkpoint_after_setup:
            return take_masters(checkpoint, self._run.trainer.optimizers)
        if not isinstance(strategy, ModelParallelStrategy) or type(strategy) is ModelParallelStrategy:
            warn_about_rounded_weights(checkpoint)
        return {}

    # -- the end -------------------------------------------------------------------------------------------------------

    @override
    def teardown(self) -> None:
        """Undoes all changes to other objects, whatever is raised; Lightning calls it also after exceptions."""
        _explain_checkpoint(sys.exception())
        self._note_loss_weights(settle=False)  # other ranks may have raised
        run, self._in_run = self._in_run, None
        with run.cleanups if run is not None else nullcontext():
            # Manual optimization updates the scale when the next batch begins, and there is none.
            self._update_scale(run)

    def _end(self) -> None:
        """Where a strategy's teardown raised before the plugin's."""
        if self._in_run is not None:
            self.teardown()

    def _carry(self, **changes: Any) -> None:
        self._carried = replace(self._carried, **changes)


def _explain_checkpoint(error: BaseException | None) -> None:
    """Lightning reads a checkpoint, and loads its weights, before it calls any plugin."""
    if isinstance(error, RuntimeError) and "loading state_dict" in str(error) and COMPILED_PREFIX in str(error):
        error.add_note(
            f"HINT: torch.compile(module) puts '{COMPILED_PREFIX}' into names. Add ExactResume() to the callbacks: it"
            " translates them on load, or compile in place with module.compile(), which changes no name."
        )
    if isinstance(error, IsADirectoryError) and error.filename is not None:
        error.add_note(
            f"HINT: {str(error.filename)!r} is a folder, as FSDP2Strategy writes it. Make a single file of it"
            " with lightning_mp.checkpoints.consolidate_checkpoint(folder, file), or resume under FSDP2Strategy."
        )
