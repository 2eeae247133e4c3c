"""16-bit weights with fp32 masters in the optimizer."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_mp.core.arguments import true_or_false
from lightning_mp.core.devices import default_dtype
from lightning_mp.core.messages import ABOUT_DTYPES
from lightning_mp.distributed.fsdp1_models import FSDP1Model
from lightning_mp.gradients.replication import all_hold_the_same
from lightning_mp.optimizer_step.loss_scaler import LossScaler
from lightning_mp.policy.applied import fsdp_mixed_precision, read_policy
from lightning_mp.policy.policy import PolicyLike
from lightning_mp.precision.autocast_context import AutocastRun, warn_about_emulated_bf16
from lightning_mp.precision.base import GradientStepPrecision
from lightning_mp.precision.masters.casting import cast_weights_, kept_by_policy, restore_weights_
from lightning_mp.precision.masters.checks import (
    DTYPES,
    check_arguments,
    check_autocast,
    check_fit,
    check_parametrizations,
    check_sharding_units,
    check_strategy,
    dtype_hint,
    refuse_copies_of_weights,
    refuse_states_by_memory,
    warn_about_lost_inputs,
)
from lightning_mp.precision.masters.compiled_step import CompiledStep, check_compiled_step
from lightning_mp.precision.masters.first_values import (
    fill,
    former_masters,
    full_value,
    refine_from_weights,
    remember_masters,
)
from lightning_mp.precision.masters.float32_load import CastPlan, EvaluatedLoad, Float32Load, MastersLoad
from lightning_mp.precision.masters.fp32_gradients import HALF_DTYPES, Fp32GradientEpilogue, Fp32Gradients
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
from lightning_mp.precision.masters.optimizer_hooks import MasterHooks
from lightning_mp.precision.masters.store import MasterStore, Storage, make_store

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecision as FSDPMixedPrecision
    from torch.utils.hooks import RemovableHandle


from lightning_mp.checkpoints.fused_qkv import fused_orders
from lightning_mp.gradients.gradient_ops import local_shard
from lightning_mp.precision.masters.store import distribute_like, refine


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
        checkpoint can be loaded in full precision anywhere, including by Lightning's own precisions. The plugins of
        this package, with or without masters, resume exactly without it: the optimizer state holds the masters.
        compiled_step: run the step of ``torch.optim.AdamW``, ``torch.optim.SGD`` or lion-pytorch's ``Lion``, neither
            fused nor foreach, as one loop per parameter compiled by ``torch.compile``, from unscaling to the rounded
            weight. AdamW then moves 28 bytes per parameter, 26 with "remainder", and needs no fp32 gradients. Results
            agree to two units in the last place per step. Not verified on GPUs.
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
        self._set_weights(weight_by, "MasterWeightsPrecision")
        check_arguments(precision, storage, scaler)
        self.precision = precision
        if precision == "16-true" and scaler is None:
            scaler = LossScaler()
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.storage: Storage = storage
        self.fp32_gradients = true_or_false(fp32_gradients, "fp32_gradients", "MasterWeightsPrecision")
        self.fp32_checkpoints = true_or_false(fp32_checkpoints, "fp32_checkpoints", "MasterWeightsPrecision")
        self.compiled_step = true_or_false(compiled_step, "compiled_step", "MasterWeightsPrecision")
        self.policy = read_policy(policy, self.scaler, "MasterWeightsPrecision('16-true')")
        self._before: dict[nn.Parameter, Tensor] = {}
        self._counts_masters = False  # a checkpoint has those of all ranks
        self._were_16_bit: set[nn.Parameter] = set()
        self._widened: dict[nn.Parameter, torch.dtype] = {}
        self._restore: Callable[[], None] | None = None
        self._masters: MasterStore | None = None
        self._hooks: list[MasterHooks] = []
        self._fp32_copies = Fp32Gradients()
        self._full_state: RemovableHandle | None = None
        self._warned_about_rounding = False
        self._cast_plan: CastPlan | None = None
        self._range: HalfRange | None = None
        self._looked_at: set[int | None] = set()
        self._held: list[RemovableHandle | MastersIntoWeights | MastersLoad | FullAverages] = []

    @property
    def dtype(self) -> torch.dtype:
        """The 16-bit dtype."""
        return DTYPES[self.precision]

    # -- set-up and end ------------------------------------------------------------------------------------------------

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Casts the weights in place and keeps the fp32 values for the masters; applies the policy.

        Raises:
            ValueError: if a rule of the policy matches nothing.
            MisconfigurationException: if the device or the strategy does not support it, or in a fit if a
                parameter has no shape yet.
        """
        module = super().convert_module(module)
        assert self._trainer is not None
        strategy = self._trainer.strategy
        device_type = strategy.root_device.type
        self._looked_at = set()
        check_strategy(
            strategy,
            module,
            storage=self.storage,
            fp32_gradients=self.fp32_gradients,
            compiled_step=self.compiled_step,
        )
        if self._trainer.state.fn == TrainerFn.FITTING:
            check_fit(self._trainer, module)
        FSDP1Model.inspect_before_wrapping(module, strategy)
        if self.policy is not None:
            check_autocast(self.precision, device_type)
        if self.precision == "bf16-true":
            warn_about_emulated_bf16(device_type, "MasterWeightsPrecision('16-true')")
        in_float32 = kept_by_policy(module, self.policy, self.dtype)
        check_sharding_units(module, in_float32)
        check_parametrizations(module, self.precision, in_float32)
        if self.policy is not None:
            self._start_run(AutocastRun(module, device_type, self.dtype, eval_dtype=self.dtype, policy=self.policy))
        check_half_range(module, self.dtype, in_float32)
        if isinstance(strategy, FSDPStrategy):
            return module
        former = self._masters = former_masters(module) or self._masters
        if former is not None:
            former.follow_devices()
        self._widened = {p: p.dtype for m in in_float32 for p in m.parameters(recurse=False) if p.dtype in HALF_DTYPES}
        module_dtype = getattr(module, "dtype", None)
        before = cast_weights_(module, self.dtype, in_float32)
        self._cast_plan = CastPlan(module, self.dtype, in_float32, list(before))
        if self._trainer.state.fn == TrainerFn.FITTING:
            self._before = {p: full_value(p, data, former) for p, data in before.items() if p.requires_grad}
            self._were_16_bit = {p for p in self._before if before[p].dtype != torch.float32}
        elif strategy.restore_checkpoint_after_setup:
            self._held = [EvaluatedLoad(strategy, self._cast_plan, before)]
        self._restore = partial(restore_weights_, module, before, module_dtype)
        return module

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """In a fit, creates the masters and hooks the optimizers."""
        result = super().connect(model, optimizers, lr_schedulers)
        assert self._trainer is not None
        if self._trainer.state.fn == TrainerFn.FITTING:
            module, strategy = self._trainer.lightning_module, self._trainer.strategy
            if self.dtype == torch.float16:
                self._range = HalfRange(
                    lambda: {p: name for name, p in module.named_parameters()}, copied=all_hold_the_same(strategy)
                )
            if not isinstance(strategy, FSDPStrategy):
                self._make_masters(self._trainer, optimizers)
                return result
            for optimizer in optimizers:
                self._hold(optimizer)
        return result

    def _make_masters(self, trainer: "pl.Trainer", optimizers: list[Optimizer]) -> None:
        for hooks in self._hooks:
            hooks.remove()
        if self._full_state is not None:
            self._full_state.remove()
        before, self._before, self._restore = self._before, {}, None
        for optimizer in optimizers:
            refuse_copies_of_weights(optimizer)
            refuse_states_by_memory(optimizer, self.storage)
            if self.compiled_step:
                check_compiled_step(optimizer, self.storage)
        self._counts_masters = not trainer.strategy.restore_checkpoint_after_setup
        self._masters = masters = make_store(self.storage)
        masters.changed.watch()
        copied = isinstance(trainer.strategy, DDPStrategy) and all_hold_the_same(trainer.strategy)
        fill(masters, optimizers, before, self._were_16_bit, from_rank_zero=copied)
        remember_masters(trainer.lightning_module, masters)
        self._hooks = [self._hook(optimizer, masters) for optimizer in optimizers]
        module: nn.Module = trainer.lightning_module
        self._held.append(FullAverages(trainer, masters))
        if trainer.strategy.restore_checkpoint_after_setup:
            assert self._cast_plan is not None
            self._held.append(Float32Load(trainer.strategy, self._cast_plan, masters, optimizers, self._hooks))
        if self.fp32_checkpoints:
            self._full_state = module.register_state_dict_post_hook(FullWeightsInState(masters))

    def _connect_late(self, optimizer: Optimizer) -> None:
        """It continues with the masters; a parameter that has none gets one of its 16-bit weight."""
        assert self._trainer is not None
        if isinstance(self._trainer.strategy, FSDPStrategy):
            self._hold(optimizer)
            return
        assert self._masters is not None
        for former in (hooks for hooks in self._hooks if hooks.optimizer not in self._trainer.optimizers):
            former.remove()
        self._hooks = [hooks for hooks in self._hooks if hooks.optimizer in self._trainer.optimizers]
        self._hooks.append(self._hook(optimizer, self._masters))

    def _hook(self, optimizer: Optimizer, masters: MasterStore) -> MasterHooks:
        compiled = CompiledStep(optimizer, masters) if self.compiled_step else None
        return MasterHooks(optimizer, masters, self._fp32_copies, compiled=compiled)

    def _hold(self, optimizer: Optimizer) -> None:
        """Under FSDP1 the optimizer has the fp32 shards itself."""
        self._held.append(MastersIntoWeights(optimizer))
        if self._range is not None and self.mixed_precision_config.param_dtype == torch.float16:
            self._held.append(optimizer.register_step_post_hook(self._range.hold))

    def teardown(self) -> None:
        """Leaves 16-bit weights after a fit, and masters in the optimizers, for a checkpoint written afterwards.

        After an evaluation the original weights are restored.
        """
        if self._range is not None:
            self._range.warn()
            self._range = None
        for handle in self._held:
            handle.remove()
        self._held, self._cast_plan = [], None
        restore, self._restore = self._restore, None
        if restore is not None:
            restore()  # also where the set-up of a fit failed: the next one starts from the same weights
        self._before = {}
        self._swap_out()
        self._fp32_copies.flush_pending()
        if self._masters is not None:
            self._masters.changed.end()
            self._masters.follow_devices()
            for working in self._masters.parameters if self.fp32_gradients else ():
                working.grad = None
                working.grad_dtype = working.dtype
        super().teardown()

    # -- inputs --------------------------------------------------------------------------------------------------------

    def convert_input(self, data: Any) -> Any:
        """Casts the floating-point tensors of a batch to 16 bit; under a policy autocast casts where it has to.

        Warns if the cast changes whole numbers in the first batch of a loop, or makes finite numbers infinite.
        """
        if self.policy is not None:
            return data
        stage = None if self._trainer is None else id(self._trainer.state.stage)
        if stage not in self._looked_at:
            self._looked_at.add(stage)
            warn_about_lost_inputs(data, self.precision)
        return apply_to_collection(data, Tensor, lambda t: t.to(self.dtype) if t.is_floating_point() else t)

    @contextmanager
    def _steps_in(self, loop: str) -> Iterator[None]:
        """Tensors made in steps are 16 bit by default; under a policy they are as autocast has them."""
        with self._run.forward(self.dtype) if self._run is not None else default_dtype(self.dtype):
            try:
                yield
            except (RuntimeError, ValueError) as error:
                if any(words in str(error) for words in ABOUT_DTYPES):
                    error.add_note(dtype_hint(self.precision, str(error), with_policy=self.policy is not None))
                raise

    def _outside_forward(self) -> AbstractContextManager[Any]:
        """Optimizers would count steps in bf16, too."""
        if self._run is None and torch.get_default_dtype() == self.dtype:
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
        self._fp32_copies.flush_pending()
        for hooks in self._hooks if self.fp32_gradients else ():
            hooks.accumulate_in_float32()
        return super().pre_backward(tensor, module)

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizer, model: "pl.LightningModule", closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Runs the closure on 16-bit weights, then the epilogue, then the step on the masters."""
        try:
            result = super().optimizer_step(optimizer, model, closure, **kwargs)
        finally:
            self._swap_out()
            self._fp32_copies.put_back(p for group in optimizer.param_groups for p in group["params"])
        if self._range is not None and self._masters is not None:
            self._range.look([p for g in optimizer.param_groups for p in g["params"] if p in self._masters])
        return result

    def _swap_out(self) -> None:
        """After an exception inside of a step; does nothing otherwise."""
        for hooks in self._hooks:
            hooks.swap_out()

    def _epilogue_type(self) -> Callable[..., Fp32GradientEpilogue]:
        return partial(Fp32GradientEpilogue, self._fp32_copies)

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
        if self._masters is None or self._trainer is None:
            return
        self._masters.steps = checkpoint.get(MASTER_STEPS_KEY, 0)
        module, weights = self._trainer.lightning_module, checkpoint.get("state_dict", {})
        refine_from_weights(module, weights, self._masters, self._were_16_bit, self._widened)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Saves the scaler's state, and records that the masters in the optimizer states belong to the weights."""
        super().on_save_checkpoint(checkpoint)
        if not self._hooks or self._masters is None:
            return
        checkpoint[MASTER_STEPS_KEY] = self._masters.steps
        self._add_late_masters(checkpoint)
        checkpoint[MASTERS_KEY] = "32-true" if self.fp32_checkpoints else self.precision
        if self._counts_masters:
            checkpoint[MASTER_COUNT_KEY] = len(masters_in(checkpoint))
        if not self.fp32_checkpoints and not self._warned_about_rounding:
            self._warned_about_rounding = True
            warn_about_rounding(self.dtype)

    def _add_late_masters(self, checkpoint: dict[str, Any]) -> None:
        """Of optimizers that were made inside of the fit and have not stepped yet."""
        trainer, hooked = self._trainer, {hooks.optimizer for hooks in self._hooks}
        late = [o for o in trainer.optimizers if o not in hooked] if trainer is not None else []
        if late and trainer is not None and "optimizer_states" in checkpoint:
            for optimizer in late:
                self._register_late(optimizer)
            checkpoint["optimizer_states"] = [trainer.strategy.optimizer_state(o) for o in trainer.optimizers]
