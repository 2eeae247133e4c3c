"""16-bit weights with fp32 masters in the optimizer."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_mp.core.arguments import true_or_false
from lightning_mp.core.devices import default_dtype
from lightning_mp.core.messages import ABOUT_DTYPES
from lightning_mp.core.precisions import MASTER_DTYPES
from lightning_mp.distributed.fsdp1_models import FSDP1Model
from lightning_mp.gradients.replication import all_hold_the_same
from lightning_mp.optimizer_step.gradient_epilogue import GradientEpilogue
from lightning_mp.optimizer_step.loss_scaler import LossScaler
from lightning_mp.policy.applied import fsdp_mixed_precision, read_policy
from lightning_mp.policy.policy import PolicyLike
from lightning_mp.precision.autocast_context import AutocastRun, warn_about_emulated_bf16
from lightning_mp.precision.base import GradientStepPrecision, PluginRun
from lightning_mp.precision.masters.casting import HalfWeights, kept_by_policy
from lightning_mp.precision.masters.checks import (
    check_arguments,
    check_autocast,
    check_fit,
    check_parametrizations,
    check_sharding_units,
    check_strategy,
    dtype_hint,
    warn_about_16_bit_modules,
    warn_about_lost_inputs,
)
from lightning_mp.precision.masters.fit import MastersOfFit
from lightning_mp.precision.masters.float32_load import EvaluatedLoad, Float32Load
from lightning_mp.precision.masters.fp32_gradients import Fp32GradientEpilogue
from lightning_mp.precision.masters.full_averages import FullAverages
from lightning_mp.precision.masters.half_range import HalfRange, check_half_range
from lightning_mp.precision.masters.loaded_masters import (
    MASTER_COUNT_KEY,
    MASTER_STEPS_KEY,
    MASTERS_KEY,
    MastersIntoWeights,
    drop_stale_masters,
    masters_in,
    refuse_damaged_masters,
    warn_about_rounding,
)
from lightning_mp.precision.masters.store import Storage, former_masters

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecision as FSDPMixedPrecision


@dataclass(eq=False)
class MasterWeightsRun(PluginRun):
    """Adds the 16-bit weights of a run."""

    cast: HalfWeights | None = None  # None under FSDP1, which casts gathered weights itself
    half_range: HalfRange | None = None  # of fp16 weights that are trained
    stages_with_input: set[object] = field(default_factory=set)  # whose first batch was checked


class MasterWeightsPrecision(GradientStepPrecision):
    """fp16 or bf16 weights, activations and gradients; the optimizer updates fp32 master weights.

    Like Lightning's "bf16-true" and "16-true", but accurate: an update smaller than half the last bit of a 16-bit
    weight (1e-3 for a bf16 weight of 1) is not lost, moments are fp32, and fp16 uses a loss scale::

        trainer = L.Trainer(plugins=[MasterWeightsPrecision("bf16-true")])

    A weight is cast once per optimizer step, regardless of the number of micro-batches and forwards. If other code
    changes a weight between steps (clamping, a projection, also through ``.data``), its master is updated to match;
    only weights that may have changed are read for this. Bytes per trainable parameter, with Adam:

    =========================================== ====== ======== ====== ======= ===
    between two steps                           weight gradient master moments sum
    =========================================== ====== ======== ====== ======= ===
    ``storage="fp32"``                          2      2        4      8       16
    ``storage="remainder"``                     2      2        2      8       14
    ``storage="24bit"``                         2      2        1      8       13
    ``storage="fp32", fp32_gradients=True``     2      4        4      8       18
    ``AutocastPrecision``                       4      4        0      8       16
    Lightning's "bf16-true"                     2      2        0      4       8
    =========================================== ====== ======== ====== ======= ===

    A step temporarily adds an fp32 copy of the gradients (4 bytes) and, unless they are stored, fp32 masters (4 bytes).
    Optimizers of ``torch.optim`` that update each parameter independently (all but LBFGS and SparseAdam) step in blocks
    of 64 MiB or 1/32 of the parameters, whichever is larger, unless other hooks surround their steps; these copies then
    exist for one block at a time. A parameter that is frozen, or in no optimizer, takes 2 bytes and has no master. If
    it is unfrozen or added (``add_param_group``) later, its master starts from its 16-bit weight, and is saved and
    loaded from then on.

    As with Lightning's "bf16-true", floating-point tensors in a batch are cast to 16 bit, and tensors created in
    ``forward`` are 16 bit by default. In contrast to it, modules are created in fp32, so that masters start from the
    unrounded initial weights, and these stay fp32: buffers, the weights of norms with running statistics, and the
    states of torchmetrics. A buffer added to activations therefore promotes them to fp32; cast it where it is used:
    ``x + self.table.to(x.dtype)``.

    With a ``policy``, steps run under autocast instead, as with ``AutocastPrecision``: batches are not cast, tensors
    created in ``forward`` are fp32 by default, and autocast decides where no rule matches. 16-bit weights need no cast.
    Weights of modules for which the policy requests another dtype are stored, trained and saved in fp32, without a
    master (4 bytes for the weight, 4 for its gradient), and so are weights that such a module shares with others.

    The largest fp16 number is 65,504. Initial weights beyond it are refused. A weight that a step would push beyond it
    is clamped to ±65,504 together with its master; the step counts as taken, and a warning names the weight.

    Works with any ``torch.optim.Optimizer`` that finds its parameters in its ``param_groups``. Under ``FSDPStrategy``
    the fp32 shards are the masters: weights are cast when they are gathered, and gradients are reduced in fp32.

    Args:
        precision: "bf16-true" or "16-true".
        storage: "fp32" stores whole masters. "remainder" stores only the 16 bits that a bf16 weight lacks:
            bit-identical masters in 2 bytes less (:mod:`lightning_mp.precision.masters.bf16_remainder`). After
            backward, a clipped step of a fused AdamW moves 46 bytes per parameter, 71 with "remainder". "24bit" stores
            8 of these bits, 3 bytes less than "fp32", and moves 81 bytes: after each step masters are rounded to 15
            bits of fraction, a relative error below 2^-15. Rounding is stochastic, because rounding to nearest would
            lose every update below 1.5e-5 to a weight of 1. It is also reproducible: it depends on number and step
            only, so that runs, ranks and resumes are bit-identical. With 8-bit moments (``AdamW8bit`` of torchao or
            bitsandbytes) this takes 7 bytes per parameter, gradients included.
        scaler: any ``torch.amp.GradScaler`` for "16-true"; None creates a :class:`~lightning_mp.LossScaler`.
        fp32_gradients: accumulate the gradients of a window in fp32; on a single device.
        fp32_checkpoints: ``state_dict`` of the module returns the fp32 masters in place of 16-bit weights, so that a
            checkpoint can be loaded in full precision anywhere, including by Lightning's own precisions. The plugins
            of this package, with or without masters, resume exactly without it: the optimizer state holds the masters.
        compiled_step: run the step of ``torch.optim.AdamW``, ``torch.optim.SGD`` or lion-pytorch's ``Lion``, neither
            fused nor foreach, as one loop per parameter compiled by ``torch.compile``, from unscaling to the rounded
            weight. AdamW then moves 28 bytes per parameter, 26 with "remainder", and needs no fp32 gradients. Results
            are those of the optimizer to the bit, except where AdamW's square root in torch is not rounded correctly.
            Not verified on GPUs.
        policy: a :class:`~lightning_mp.PrecisionPolicy`, or its rules as a mapping: modules and operations that run in
            another dtype. The resolved rules are printed at set-up.
        weight_by: see :class:`~lightning_mp.AutocastPrecision`.

    Raises:
        ValueError: if ``precision`` or ``storage`` is unknown; at set-up, if a rule of the policy matches nothing.
        MisconfigurationException: if arguments contradict each other; at set-up, if the device or the strategy does not
            support them.

    References:
        Micikevicius et al., "Mixed Precision Training", 2017, section 3.1, https://arxiv.org/abs/1710.03740

    Example:
        >>> from lightning_mp import MasterWeightsPrecision
        >>> MasterWeightsPrecision("16-true").scaler.get_scale()
        65536.0
    """

    def __init__(
        self,
        precision: Literal["bf16-true", "16-true"],
        *,
        storage: Storage = "fp32",
        scaler: "torch.amp.GradScaler | None" = None,
        fp32_gradients: bool = False,
        fp32_checkpoints: bool = False,
        compiled_step: bool = False,
        policy: PolicyLike | None = None,
        weight_by: Literal["loss"] | None = "loss",
    ) -> None:
        check_arguments(precision, storage, scaler)
        super().__init__(precision, LossScaler() if precision == "16-true" and scaler is None else scaler, weight_by)
        self.storage: Storage = storage
        self.fp32_gradients = true_or_false(fp32_gradients, "fp32_gradients", "MasterWeightsPrecision")
        self.fp32_checkpoints = true_or_false(fp32_checkpoints, "fp32_checkpoints", "MasterWeightsPrecision")
        self.compiled_step = true_or_false(compiled_step, "compiled_step", "MasterWeightsPrecision")
        self.policy = read_policy(policy, self.scaler, "MasterWeightsPrecision('16-true')")
        # Of the last fit, until the next one; None under FSDP1.
        self._masters: MastersOfFit | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The 16-bit dtype."""
        return MASTER_DTYPES[self.precision]

    # -- set-up and end ------------------------------------------------------------------------------------------------

    def _begin_run(self, trainer: "pl.Trainer") -> MasterWeightsRun:
        return MasterWeightsRun(trainer)

    @property
    def _run(self) -> MasterWeightsRun:
        assert isinstance(self._in_run, MasterWeightsRun)
        return self._in_run

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Casts the weights in place and keeps the fp32 values for the masters; applies the policy.

        Raises:
            ValueError: if a rule of the policy matches nothing.
            MisconfigurationException: if the device or the strategy does not support it, or in a fit if a
                parameter has no shape yet.
        """
        module = super().convert_module(module)
        run, strategy = self._run, self._run.trainer.strategy
        device_type = strategy.root_device.type
        check_strategy(
            strategy,
            module,
            storage=self.storage,
            fp32_gradients=self.fp32_gradients,
            compiled_step=self.compiled_step,
        )
        if run.is_fit:
            check_fit(run.trainer, module)
        FSDP1Model.inspect_before_wrapping(module, strategy)
        if self.policy is not None:
            check_autocast(self.precision, device_type)
        if self.precision == "bf16-true":
            warn_about_emulated_bf16(device_type, "MasterWeightsPrecision('16-true')")
        in_float32 = kept_by_policy(module, self.policy, self.dtype)
        check_sharding_units(module, in_float32)
        check_parametrizations(module, self.precision, in_float32)
        if self.policy is not None:
            self._start_autocast(
                AutocastRun(module, device_type, self.dtype, eval_dtype=self.dtype, policy=self.policy)
            )
        if isinstance(strategy, FSDPStrategy):
            check_half_range(module, self.dtype, in_float32)
            return module
        former = former_masters(module) or (self._masters.store if self._masters is not None else None)
        if former is not None:
            former.follow_devices()
        elif self.fp32_checkpoints and run.is_fit:
            warn_about_16_bit_modules(module)
        run.cast = HalfWeights.cast(module, self.dtype, in_float32, former if run.is_fit else None)
        run.ends.callback(run.cast.restore)
        if not run.is_fit and strategy.restore_checkpoint_after_setup:
            EvaluatedLoad(strategy, run.cast)
        return module

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """In a fit, creates the masters and hooks the optimizers."""
        result = super().connect(model, optimizers, lr_schedulers)
        run, trainer, strategy = self._run, self._run.trainer, self._run.trainer.strategy
        if not run.is_fit:
            return result
        if self.dtype == torch.float16:
            names = trainer.lightning_module.named_parameters
            run.half_range = HalfRange(lambda: {p: name for name, p in names()}, copied=all_hold_the_same(strategy))
            run.ends.callback(run.half_range.warn)
        if self._masters is not None:
            self._masters.leave()
            self._masters = None
        if run.cast is None:
            for optimizer in optimizers:
                self._connect_late(optimizer)
            return result
        self._masters = masters = MastersOfFit(
            self.storage,
            compiled_step=self.compiled_step,
            fp32_gradients=self.fp32_gradients,
            fp32_checkpoints=self.fp32_checkpoints,
        )
        run.ends.callback(masters.end)
        masters.begin(trainer, optimizers, *run.cast.take_trained())
        FullAverages(trainer, masters.store)
        if strategy.restore_checkpoint_after_setup:
            Float32Load(strategy, run.cast, masters.store, optimizers, masters.hooks)
        return result

    def _connect_late(self, optimizer: Optimizer) -> None:
        """The optimizer continues with the masters; a parameter without one gets one from its 16-bit weight.

        Under FSDP1 the optimizer has the fp32 shards itself.
        """
        run = self._run
        if self._masters is not None:
            self._masters.join(optimizer, run.trainer.optimizers)
            return
        run.ends.callback(MastersIntoWeights(optimizer).remove)
        if run.half_range is not None and self.mixed_precision_config.param_dtype == torch.float16:
            run.ends.callback(optimizer.register_step_post_hook(run.half_range.clamp_).remove)

    # -- inputs --------------------------------------------------------------------------------------------------------

    def convert_input(self, data: Any) -> Any:
        """Casts the floating-point tensors of a batch to 16 bit; under a policy autocast casts where necessary.

        Warns if the cast changes whole numbers in the first batch of a loop, or makes finite numbers infinite.
        """
        if self.policy is not None:
            return data
        if self._in_run is not None and self._run.trainer.state.stage not in self._run.stages_with_input:
            self._run.stages_with_input.add(self._run.trainer.state.stage)
            warn_about_lost_inputs(data, self.precision)
        return apply_to_collection(data, Tensor, lambda t: t.to(self.dtype) if t.is_floating_point() else t)

    @contextmanager
    def _steps_in(self, loop: str) -> Iterator[None]:
        """Tensors made in steps are 16 bit by default; under a policy they are as autocast has them."""
        with self._autocast.forward(self.dtype) if self._autocast is not None else default_dtype(self.dtype):
            try:
                yield
            except (RuntimeError, ValueError) as error:
                if any(words in str(error) for words in ABOUT_DTYPES):
                    error.add_note(dtype_hint(self.precision, str(error), with_policy=self.policy is not None))
                raise

    def _outside_forward(self) -> AbstractContextManager[Any]:
        """Optimizers would count steps in bf16, too."""
        if self._autocast is None and torch.get_default_dtype() == self.dtype:
            return default_dtype(torch.float32)
        return super()._outside_forward()

    @property
    def mixed_precision_config(self) -> "FSDPMixedPrecision":
        """For ``FSDPStrategy``: 16-bit parameters in forward and backward, gradients reduced in fp32, fp32 buffers.

        A policy with rules about modules gets fp32 parameters, see
        :func:`~lightning_mp.policy.applied.fsdp_mixed_precision`.
        """
        return fsdp_mixed_precision(self.dtype, self.policy)

    # -- loss and step -------------------------------------------------------------------------------------------------

    def pre_backward(self, tensor: Tensor, module: "pl.LightningModule") -> Tensor:  # type: ignore[override]
        """Scales the loss; then calls ``on_before_backward``."""
        if self._masters is not None:
            self._masters.before_backward()
        return super().pre_backward(tensor, module)

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizer, model: "pl.LightningModule", closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Runs the closure on 16-bit weights, then the epilogue, then the step on the masters."""
        masters = self._masters
        if masters is None:
            return super().optimizer_step(optimizer, model, closure, **kwargs)
        try:
            result = super().optimizer_step(optimizer, model, closure, **kwargs)
        finally:
            masters.swap_out()
            masters.gradients.put_back(p for group in optimizer.param_groups for p in group["params"])
        if self._in_run is not None and self._run.half_range is not None:
            self._run.half_range.observe([p for g in optimizer.param_groups for p in g["params"] if p in masters.store])
        return result

    def _epilogue_type(self) -> Callable[..., GradientEpilogue]:
        if self._masters is None:
            return super()._epilogue_type()
        return partial(Fp32GradientEpilogue, self._masters.gradients)

    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clips true gradients in fp32."""
        with self._outside_forward():
            super().clip_gradients(optimizer, clip_val, gradient_clip_algorithm)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Loads the scaler's state, and masters from fp32 weights that were just loaded into a 16-bit module.

        Lightning loads the optimizer's state after this; if it holds masters, those take precedence.
        """
        refuse_damaged_masters(checkpoint, "MasterWeightsPrecision")
        super().on_load_checkpoint(checkpoint)
        drop_stale_masters(checkpoint)
        run = self._run
        if self._masters is not None and run.cast is not None:
            self._masters.read(run.trainer.lightning_module, checkpoint)
            run.cast.read_widened(checkpoint.get("state_dict", {}))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Saves the scaler's state, and records that the masters in the optimizer states belong to the weights."""
        super().on_save_checkpoint(checkpoint)
        masters = self._masters
        if masters is None or not masters.hooks:
            return
        checkpoint[MASTER_STEPS_KEY] = masters.store.steps
        self._add_late_masters(masters, checkpoint)
        checkpoint[MASTERS_KEY] = "32-true" if self.fp32_checkpoints else self.precision
        if masters.in_one_file:
            checkpoint[MASTER_COUNT_KEY] = len(masters_in(checkpoint))
        if not self.fp32_checkpoints and not self._carried.warned_about_rounding:
            self._carry(warned_about_rounding=True)
            warn_about_rounding(self.dtype)

    def _add_late_masters(self, masters: MastersOfFit, checkpoint: dict[str, Any]) -> None:
        """Adds those of optimizers that were created during the fit and have not stepped yet."""
        if self._in_run is None or "optimizer_states" not in checkpoint:
            return
        trainer, hooked = self._run.trainer, {hooks.optimizer for hooks in masters.hooks}
        late = [optimizer for optimizer in trainer.optimizers if optimizer not in hooked]
        for optimizer in late:
            self._register_late(optimizer)
        if late:
            checkpoint["optimizer_states"] = [trainer.strategy.optimizer_state(o) for o in trainer.optimizers]
