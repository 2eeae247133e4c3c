"""The base of our precision plugins: accepted by every stock strategy, it ends each step with the gradient epilogue."""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only, rank_zero_warn
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import FSDPPrecision, MixedPrecision, Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from lightning_mp import seams
from lightning_mp.fused_optimizers import (
    applies_grad_scale,
    momentum_is_missing,
    one_mesh_per_group,
    refuse_fused_without_dtensors,
)
from lightning_mp.loss_scaler import LossScaleFloorError
from lightning_mp.outcome import StepDispatcher, StepReport
from lightning_mp.policy_table import show
from lightning_mp.precision.autocast_run import AutocastRun
from lightning_mp.precision.epilogue import Epilogue
from lightning_mp.precision.observers import someone_looks_at_gradients
from lightning_mp.precision.ranks import stepping_ranks
from lightning_mp.stepping_ranks import SteppingRanks
from lightning_mp.windows import WindowKeeper

__all__ = ["EpiloguePrecision"]

_STOCK_STATE_KEYS = ("MixedPrecision", "FSDPPrecision")
_SKIPPED_STEPS_KEY = "lightning_mp_skipped_steps"


class EpiloguePrecision(MixedPrecision, FSDPPrecision):
    """Base class; users take ``AutocastPrecision``.

    It is a subclass of both stock mixed-precision plugins because ``FSDPStrategy`` accepts nothing but an
    ``FSDPPrecision``. Of ``FSDPPrecision`` nothing is used: its constructor is never called, and its silent casts of
    inputs and outputs are taken back.

    Every step, with any optimizer: the closure runs, the gradients are read once, all ranks agree, and then the step is
    made or skipped. Non-finite gradients never reach the optimizer, in bf16 as in fp16. Who overrides
    ``on_before_optimizer_step`` or ``configure_gradient_clipping`` is shown true gradients; only then are they written
    before the step of a fused optimizer.
    """

    scaler: torch.amp.GradScaler | None  # type: ignore[assignment]  # FSDPPrecision wants a ShardedGradScaler

    _epilogue: Epilogue | None = None
    _gradients_are_true: bool = False
    _dispatcher: StepDispatcher | None = None
    _trainer: "pl.Trainer | None" = None
    _run: AutocastRun | None = None
    _shown_table: str = ""
    _ranks: SteppingRanks | None = None
    _skipped_steps: int = 0

    def __str__(self) -> str:
        return (
            f"{type(self).__name__}({self.precision!r}), a plugin for lightning.pytorch: with it use"
            " `import lightning.pytorch as pl`, not `import pytorch_lightning as pl`"
        )

    # -- set-up and end ------------------------------------------------------------------------------------------------

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Meets the Trainer; changes nothing.

        Raises:
            MisconfigurationException: if there is no ``lightning.pytorch`` Trainer, as under Fabric.
        """
        trainer = _trainer_of(module)
        if trainer is None:
            raise self._no_trainer("got a module without one")
        self._trainer = trainer
        return module

    def _no_trainer(self, what: str) -> MisconfigurationException:
        return MisconfigurationException(
            f"{type(self).__name__} is a plugin for lightning.pytorch.Trainer and {what}, as under Fabric."
            " With Fabric use Fabric(precision=...) and, for fp16, MixedPrecision('16-mixed', device,"
            " scaler=lightning_mp.LossScaler()) from lightning.fabric.plugins."
        )

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Starts telling outcomes, if this is a fit."""
        assert self._trainer is not None
        if self._trainer.state.fn == TrainerFn.FITTING:
            for optimizer in optimizers:
                _refuse_lbfgs(self, optimizer)
                refuse_fused_without_dtensors(optimizer)
            self._ranks = None
            self._dispatcher = StepDispatcher(self._trainer, self._trainer.lightning_module).attach(optimizers)
        return model, optimizers, lr_schedulers

    def teardown(self) -> None:
        """Takes every wrapper away; Lightning calls this at the end and after exceptions."""
        dispatcher, self._dispatcher = self._dispatcher, None
        self._trainer = None
        self._end_run()
        self._ranks = None
        self._update_scale_of_last_batch()
        if dispatcher is not None:
            dispatcher.detach()
            self._skipped_steps = dispatcher.skipped_steps
        super().teardown()

    def _start_run(self, run: AutocastRun) -> None:
        """Forwards run under this autocast from now on. Prints what the policy resolved to, if it has changed."""
        self._end_run()
        self._run = run
        table = str(run.resolved) if run.resolved is not None else ""
        if run.resolved is not None and table != self._shown_table:
            self._shown_table = table
            rank_zero_only(show)(run.resolved)

    def _end_run(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.detach()

    # -- casts that FSDPPrecision makes and mixed precision does not ---------------------------------------------------

    def convert_input(self, data: Any) -> Any:
        """Leaves inputs as they are: autocast casts where an operation wants it."""
        return data

    def convert_output(self, data: Any) -> Any:
        """Leaves outputs as they are."""
        return data

    def tensor_init_context(self) -> AbstractContextManager[None]:
        """Tensors are made in the default dtype."""
        return nullcontext()

    def module_init_context(self) -> AbstractContextManager[None]:
        """Modules are made in the default dtype."""
        return nullcontext()

    # -- what steps run in ---------------------------------------------------------------------------------------------

    def forward_context(self) -> AbstractContextManager[Any]:  # type: ignore[override]  # the parents disagree
        """What forwards run in; this one is for training steps.

        Raises:
            MisconfigurationException: outside of a Trainer's run, as by ``Fabric.autocast()``.
        """
        if self._trainer is None:
            raise self._no_trainer("is asked for its context outside of a Trainer's run")
        return self._steps_in("train")

    def val_step_context(self) -> AbstractContextManager[None]:  # type: ignore[override]  # a generator there
        """The same for validation steps."""
        return self._steps_in("validate")

    def test_step_context(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """The same for test steps."""
        return self._steps_in("test")

    def predict_step_context(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """The same for predict steps."""
        return self._steps_in("predict")

    def _steps_in(self, loop: str) -> AbstractContextManager[None]:
        raise NotImplementedError

    def _outside_forward(self) -> AbstractContextManager[Any]:
        """Leaves the forward's context: in manual optimization optimizers are stepped inside of it."""
        return self._run.outside() if self._run is not None else nullcontext()

    def backward_context(self) -> AbstractContextManager[Any]:
        """What backwards run in, for strategies that run their own."""
        return self._run.backward() if self._run is not None else nullcontext()

    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: "pl.LightningModule", optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Runs the module's backward outside of autocast, also in manual optimization, with the policy in force."""
        with self.backward_context():
            super().backward(tensor, model, optimizer, *args, **kwargs)

    # -- loss and step -------------------------------------------------------------------------------------------------

    def pre_backward(self, tensor: Tensor, module: "pl.LightningModule") -> Tensor:  # type: ignore[override]
        """Scales the loss, once, in float32; then calls ``on_before_backward``."""
        if self.scaler is not None:
            tensor = self.scaler.scale(tensor)
        # Not super(): both stock parents would scale again.
        return Precision.pre_backward(self, tensor, module)

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizer, model: "pl.LightningModule", closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Runs the closure, then the epilogue, then makes or skips the step.

        A closure that returns None (no loss in the last micro-batch, manual optimization, or a module that called its
        closure itself) changes nothing: the gradients that are there are stepped with, as in fp32.
        """
        _refuse_lbfgs(self, optimizer)
        closure_result = closure()
        with self._outside_forward():
            self._step_after_closure(optimizer, model, **kwargs)
        return closure_result

    def _step_after_closure(self, optimizer: Optimizer, model: "pl.LightningModule", **kwargs: Any) -> None:
        if self._dispatcher is not None:
            # After the closure: by now the device is busy with this window's backward and the last step is long over.
            self._dispatcher.settle()
        self._epilogue = epilogue = self._begin_epilogue(optimizer, model)
        try:
            items = self._finish_gradients(epilogue, model)
            waited = self._step_or_skip(epilogue, **kwargs)
            # Manual optimization may go on with a forward under the same autocast, which has cached the old weights.
            torch.clear_autocast_cache()
        finally:
            self._epilogue = None
        if self._dispatcher is not None:
            report = StepReport(
                epilogue.found_inf, epilogue.scale, epilogue.grad_norm, items, epilogue.parameters, epilogue.norms
            )
            self._dispatcher.record(optimizer, report, settle_now=waited)
        self._update_scale(epilogue, model)

    @contextmanager
    def train_step_context(self) -> Generator[None, None, None]:
        """The forward context; a batch of manual optimization begins here, and the last one's scale update is made."""
        self._update_scale_of_last_batch()
        with self.forward_context():
            yield

    def _update_scale_of_last_batch(self) -> None:
        if self.scaler is not None and seams.has_found_inf(self.scaler):
            self.scaler.update()

    def _begin_epilogue(self, optimizer: Optimizer, model: "pl.LightningModule") -> Epilogue:
        scale = seams.grad_scaler_scale(self.scaler) if self.scaler is not None else None
        return Epilogue(optimizer, scale, ranks=self._stepping_ranks(model), device=model.device)

    def _finish_gradients(self, epilogue: Epilogue, model: "pl.LightningModule") -> Tensor | None:
        """Reads, agrees, plans factor and clipping, and lets the hooks look. Returns the items of the window."""
        trainer = model.trainer
        keeper = WindowKeeper.of(trainer)
        totals = epilogue.reduce(keeper.window_totals(model.device) if keeper is not None else None)
        normalisation = keeper.close_window(totals) if keeper is not None and totals is not None else None
        epilogue.plan_factor(normalisation)
        self._gradients_are_true = someone_looks_at_gradients(trainer, model)
        if self._gradients_are_true:
            epilogue.make_true()
            seams.call_before_optimizer_step_hooks(model, epilogue.optimizer)
            seams.clip_through_module(self, model, epilogue.optimizer)
        elif model.automatic_optimization and trainer.gradient_clip_val:
            self.clip_gradients(
                epilogue.optimizer,
                trainer.gradient_clip_val,
                trainer.gradient_clip_algorithm or GradClipAlgorithmType.NORM,
            )
        return totals[0] if totals is not None else None

    def _step_or_skip(self, epilogue: Epilogue, **kwargs: Any) -> bool:
        """Returns whether the device was waited for."""
        optimizer = epilogue.optimizer
        on_device = applies_grad_scale(optimizer) and not momentum_is_missing(optimizer)
        if not on_device and epilogue.wait_for_decision():
            return True
        if not applies_grad_scale(optimizer):
            epilogue.apply()
            with one_mesh_per_group(optimizer):
                optimizer.step(**kwargs)
            return True
        grad_scale = epilogue.fused_grad_scale()
        try:
            optimizer.found_inf = epilogue.found_inf  # type: ignore[attr-defined]  # torch's protocol
            if grad_scale is not None:
                optimizer.grad_scale = grad_scale  # type: ignore[attr-defined]
            with one_mesh_per_group(optimizer):
                optimizer.step(**kwargs)
        finally:
            for name in ("found_inf", "grad_scale"):
                if hasattr(optimizer, name):
                    delattr(optimizer, name)
        return not on_device

    def _update_scale(self, epilogue: Epilogue, model: "pl.LightningModule") -> None:
        """One update per batch. In manual optimization the batch may hold more steps, so it waits for the next one."""
        if self.scaler is None or seams.grad_scaler_scale(self.scaler) is None or not epilogue.parameters:
            return
        seams.record_found_inf(self.scaler, epilogue.optimizer, epilogue.found_inf)
        if not model.automatic_optimization:
            return
        try:
            self.scaler.update()
        except LossScaleFloorError as error:
            names = {id(p): name for name, p in model.named_parameters()}
            shards = zip(epilogue.parameters, epilogue.shards, strict=True)
            bad = [names.get(id(p), "?") for p, shard in shards if not torch.isfinite(shard).all()]
            raise LossScaleFloorError(
                f"Step {model.trainer.global_step}: {error} Non-finite gradients now: {', '.join(bad) or 'none'}."
            ) from None

    def _stepping_ranks(self, model: "pl.LightningModule") -> SteppingRanks:
        """The same for a whole fit."""
        if self._ranks is None:
            self._ranks = stepping_ranks(model.trainer)
        return self._ranks

    # -- clipping ------------------------------------------------------------------------------------------------------

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
        epilogue = self._epilogue
        if epilogue is None or epilogue.optimizer is not optimizer:
            # `self.clip_gradients` in manual optimization: the gradients stay scaled until the step.
            assert self._trainer is not None
            epilogue = self._begin_epilogue(optimizer, self._trainer.lightning_module)
            epilogue.reduce(None)
            epilogue.plan_factor(None)
            epilogue.clip_scaled(float(clip_val), by_value=gradient_clip_algorithm == GradClipAlgorithmType.VALUE)
        elif gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
            epilogue.clip_by_value(float(clip_val))
        else:
            epilogue.clip_by_norm(float(clip_val), fresh=self._gradients_are_true)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Reads the scaler's state from where the stock plugins keep it, if there is none of ours."""
        if self._dispatcher is not None:
            self._dispatcher.skipped_steps = checkpoint.get(_SKIPPED_STEPS_KEY, 0)
        if self.scaler is None or type(self).__qualname__ in checkpoint:
            return
        for key in _STOCK_STATE_KEYS:
            if key in checkpoint:
                self.load_state_dict(checkpoint[key])
                return
        rank_zero_warn(
            f"The checkpoint holds no loss scale under {type(self).__qualname__!r}, {_STOCK_STATE_KEYS[0]!r} or"
            f" {_STOCK_STATE_KEYS[1]!r} (was it trained in another precision?): the scale starts anew at"
            f" {self.scaler.get_scale():g}."
        )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Writes the scaler's state where the stock plugins look for it, too, and how many steps were skipped."""
        if self._dispatcher is not None:
            self._dispatcher.settle()
            self._skipped_steps = self._dispatcher.skipped_steps
        checkpoint[_SKIPPED_STEPS_KEY] = self._skipped_steps
        state = self.state_dict()
        if state:
            for key in _STOCK_STATE_KEYS:
                checkpoint[key] = state

    def state_dict(self) -> dict[str, Any]:
        """The scaler's state; empty without a scaler."""
        self._update_scale_of_last_batch()
        return self.scaler.state_dict() if self.scaler is not None else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from a scaler's state."""
        if self.scaler is not None:
            self.scaler.load_state_dict(state_dict)


def _trainer_of(module: nn.Module) -> "pl.Trainer | None":
    """The module's Trainer; None if it has none, or only Fabric's stand-in."""
    if not isinstance(module, pl.LightningModule):
        return None
    try:
        trainer = module.trainer
    except RuntimeError:
        return None
    return trainer if isinstance(trainer, pl.Trainer) else None


def _refuse_lbfgs(plugin: EpiloguePrecision, optimizer: Optimizer) -> None:
    if isinstance(optimizer, LBFGS):
        raise MisconfigurationException(
            f"{type(plugin).__name__}({plugin.precision!r}) cannot be used with LBFGS, which evaluates the loss several"
            " times in one step. Use another optimizer, or precision='32-true' without this plugin."
        )
