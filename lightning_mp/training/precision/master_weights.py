"""fp32 weights that modules compute with in 16 bit."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from typing_extensions import override

from lightning_mp.ground.core import private_dispatch_api, private_sharding_api
from lightning_mp.ground.core.arguments import true_or_false
from lightning_mp.ground.core.messages import ABOUT_DTYPES
from lightning_mp.ground.core.patches import Patch, Patches
from lightning_mp.ground.core.precisions import MASTER_DTYPES
from lightning_mp.ground.core.saved_state import TEXT, checked_state, listed_of
from lightning_mp.training.distributed.fsdp1_models import FSDP1Model
from lightning_mp.training.gradients.replication import all_hold_the_same
from lightning_mp.training.optimizer_step.gradient_epilogue import GradientEpilogue
from lightning_mp.training.optimizer_step.loss_scaler import LossScaler
from lightning_mp.training.policy.applied import fsdp_mixed_precision, read_policy
from lightning_mp.training.policy.policy import PolicyLike
from lightning_mp.training.policy.weights_in_float32 import kept_in_float32, with_exact_parametrizations
from lightning_mp.training.precision.autocast_context import AutocastRun, warn_about_emulated_bf16
from lightning_mp.training.precision.base import GradientStepPrecision, PluginRun
from lightning_mp.training.precision.masters.checks import (
    Storage,
    check_arguments,
    check_autocast,
    check_strategy,
    dtype_hint,
)
from lightning_mp.training.precision.masters.compressed_weights import (
    CompressedEpilogue,
    CompressedParameters,
    CompressedSteps,
    CompressedWeights,
    compressed_shards,
)
from lightning_mp.training.precision.masters.fp32_gradients import Fp32GradientEpilogue, Fp32Gradients
from lightning_mp.training.precision.masters.fp32_steps import Fp32Steps
from lightning_mp.training.precision.masters.half_range import HalfRange, check_half_range
from lightning_mp.training.precision.masters.lent_weights import LentWeights
from lightning_mp.training.precision.masters.widened_weights import averages_of, widen_trained_weights

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecision as FSDPMixedPrecision


_SPLIT_KEY = "lightning_mp_split_weights"


@dataclass(eq=False)
class MasterWeightsRun(PluginRun):
    """Adds what is lent in a run, and the steps of its optimizers."""

    lent: LentWeights | None = None  # None under FSDP, which gathers 16-bit copies of fp32 shards itself
    compressed: CompressedParameters | None = None  # those that are split between steps
    gradients: Fp32Gradients = field(default_factory=Fp32Gradients)
    steps: dict[Optimizer, Fp32Steps] = field(default_factory=dict)
    half_range: HalfRange | None = None  # of weights of which there are fp16 copies
    in_16_bit: Collection[Tensor] = ()  # weights that are computed with in 16 bit
    has_trained: bool = False  # a training step has begun


class MasterWeightsPrecision(GradientStepPrecision):
    """fp32 weights that modules compute with in 16 bit: cast once per optimizer step, with 16-bit gradients.

    As :class:`~lightning_mp.AutocastPrecision`, but a weight is cast once per window of accumulation, regardless of the
    number of micro-batches and forwards, and its gradient is 16 bit. As accurate as that, and as fast as Lightning's
    "bf16-true" and "16-true", which lose an update smaller than half the last bit of a weight (1e-3 for a bf16 weight
    of 1)::

        trainer = pl.Trainer(plugins=[MasterWeightsPrecision("bf16-true")])

    Parameters are fp32 for steps, hooks, callbacks, optimizers and checkpoints; only inside of a module call the
    module's weights are 16-bit copies of them (:mod:`lightning_mp.training.precision.masters.lent_weights`). Target
    networks, clamps, averages and collectives work on fp32 parameters, and any precision resumes a checkpoint. Steps
    run under autocast with the policy, which casts what no copy reaches (buffers, frozen weights, functional calls).
    Where code turns autocast off, modules compute with their fp32 weights. Norms, parametrizations, modules that a
    policy keeps in another dtype, and a LightningModule's own weights are not copied. Bytes per trainable parameter,
    with Adam:

    =========================================== ====== ======== ====== ======= ===
    between two steps                           weight gradient copy   moments sum
    =========================================== ====== ======== ====== ======= ===
    ``storage="fp32"``                          4      2        2      8       16
    ``storage="fp32", fp32_gradients=True``     4      4        2      8       18
    ``storage="remainder"``                     2 rest 2        2      8       14
    ``storage="24bit"``                         1 rest 2        2      8       13
    ``AutocastPrecision``                       4      4        0      8       16
    Lightning's "bf16-true"                     2      2        0      4       8
    =========================================== ====== ======== ====== ======= ===

    A step temporarily adds an fp32 copy of the gradients (4 bytes). Optimizers of ``torch.optim`` that update each
    parameter independently (all but LBFGS and SparseAdam) step in blocks of 64 MiB or 1/32 of the parameters, whichever
    is larger, unless other hooks surround their steps; these copies then exist for one block at a time. A frozen weight
    takes what it was loaded in, 2 bytes if in 16 bit. Trainable weights that were loaded in 16 bit become fp32.

    Under DDP gradients are reduced in 16 bit; weights that are used outside of a module's forward are refused there.
    Under FSDP nothing is copied: fp32 shards are gathered in 16 bit, and gradients are reduced in fp32.

    The largest fp16 number is 65,504. Initial weights beyond it are refused. A weight that a step would push beyond it
    is clamped to ±65,504; the step counts as taken, and a warning names the weight.

    Args:
        precision: "bf16-true" or "16-true".
        storage: "fp32" keeps parameters as they are. "remainder" and "24bit", of bf16, give their memory away between
            steps: the copy and the 16 bits that it lacks say all about a parameter, and whoever touches it gets it back
            until the next training step (:mod:`lightning_mp.training.precision.masters.split_parameters`). "remainder"
            is exact. "24bit" keeps 8 of these bits: parameters are rounded after each step to 15 bits of fraction, a
            relative error below 2^-15, stochastically, because to nearest every update below 1.5e-5 to a weight of 1
            would be lost, and reproducibly, by number and step alone. With 8-bit moments (``AdamW8bit`` of torchao or
            bitsandbytes) it takes 7 bytes per parameter, gradients included. Parameters are whole, 4 bytes more, until
            the first step of a new run, and while something touches them: a checkpoint, an average in a hook.
            Optimizers that do not step in blocks have all of them whole in a step. Not under FSDP1, nor for subclasses
            of ``nn.Parameter``. ``torch.func`` transforms of a bare parameter read nan: give them ``p.detach()``.
        scaler: any ``torch.amp.GradScaler`` for "16-true"; None creates a :class:`~lightning_mp.LossScaler`.
        fp32_gradients: accumulate the gradients of a window in fp32; not under DDP, and always under FSDP.
        fp32_checkpoints: always True, because weights are fp32.
        policy: a :class:`~lightning_mp.PrecisionPolicy`, or its rules as a mapping: modules and operations that run in
            another dtype. "default" is :meth:`PrecisionPolicy.default() <lightning_mp.PrecisionPolicy.default>`, norms,
            softmax and losses in fp32 on every device; None is torch's autocast alone. Rules that you give are printed
            at set-up.
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
        scaler: "LossScaler | torch.amp.GradScaler | None" = None,
        fp32_gradients: bool = False,
        fp32_checkpoints: bool = True,
        policy: PolicyLike | Literal["default"] | None = "default",
        weight_by: Literal["loss"] | None = "loss",
    ) -> None:
        check_arguments(precision, storage, scaler, fp32_checkpoints)
        super().__init__(precision, LossScaler() if precision == "16-true" and scaler is None else scaler, weight_by)
        self.storage: Storage = storage
        self.fp32_gradients = true_or_false(fp32_gradients, "fp32_gradients", "MasterWeightsPrecision")
        self.fp32_checkpoints = True
        self._announces_policy = policy != "default"
        self._split_weights: list[str] = []  # of the last fit
        self.policy = read_policy(policy, self.scaler, "MasterWeightsPrecision('16-true')")

    @property
    def dtype(self) -> torch.dtype:
        """The 16-bit dtype."""
        return MASTER_DTYPES[self.precision]

    # -- set-up and end ------------------------------------------------------------------------------------------------

    @override
    def _begin_run(self, trainer: "pl.Trainer") -> MasterWeightsRun:
        return MasterWeightsRun(trainer)

    @property
    @override
    def _run(self) -> MasterWeightsRun:
        assert isinstance(self._in_run, MasterWeightsRun)
        return self._in_run

    @property
    def _lent(self) -> LentWeights | None:
        return self._run.lent if self._in_run is not None else None

    @property
    def _compressed(self) -> CompressedParameters | None:
        return self._run.compressed if self._in_run is not None else None

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        """Applies the policy, and has modules get 16-bit copies of their weights when steps call them.

        Raises:
            ValueError: if a rule of the policy matches nothing.
            MisconfigurationException: if the device or the strategy does not support it, or in fp16 if a weight is too
                large.
        """
        module = super().convert_module(module)
        run, strategy = self._run, self._run.trainer.strategy
        device_type = strategy.root_device.type
        check_strategy(strategy, storage=self.storage, fp32_gradients=self.fp32_gradients)
        FSDP1Model.inspect_before_wrapping(module, strategy)
        check_autocast(self.precision, device_type)
        if self.precision == "bf16-true":
            warn_about_emulated_bf16(device_type, "MasterWeightsPrecision('16-true')")
        policy = with_exact_parametrizations(self.policy, module)
        in_float32 = kept_in_float32(module, policy, self.dtype)
        autocast = AutocastRun(module, device_type, self.dtype, eval_dtype=self.dtype, policy=policy)
        self._start_autocast(autocast, announced=self._announces_policy)
        widen_trained_weights(module, copies=averages_of(run.trainer))
        check_half_range(module, self.dtype, in_float32)
        run.in_16_bit = {
            p for part in module.modules() if part not in in_float32 for p in part.parameters(recurse=False)
        }
        if self._is_gathered_in_16_bit(module):
            return module
        settings = module, self.dtype, device_type, in_float32
        if self.storage == "fp32" or not run.is_fit:
            run.lent = LentWeights(*settings, set_grad_dtype=not self.fp32_gradients)
        else:
            run.lent = lent = CompressedWeights(
                *settings,
                set_grad_dtype=not self.fp32_gradients,
                storage=self.storage,
                step_now=self._step_now,
            )
            run.compressed = lent.compressed
        run.cleanups.callback(run.lent.end)
        run.cleanups.callback(self._note_split_weights, run)
        if run.is_fit and isinstance(strategy, DDPStrategy):
            patch = Patches.of(run.trainer).replace(strategy, "configure_ddp", lambda: self._configure_ddp(patch))
        return module

    def _is_gathered_in_16_bit(self, module: nn.Module) -> bool:
        """Whether FSDP makes the 16-bit copies, of fp32 shards; says so."""
        units = [part for part in module.modules() if isinstance(part, FSDPModule)]
        if not units and not isinstance(self._run.trainer.strategy, FSDPStrategy):
            return False
        wide = [unit for unit in units if private_sharding_api.sharding_param_dtype(unit) is None]
        if self.storage != "fp32" and len(wide) == len(units):
            raise MisconfigurationException(
                f"MasterWeightsPrecision(storage={self.storage!r}): fully_shard gathers these weights in fp32, so that"
                " there is no 16-bit copy to keep. Give it"
                f" mp_policy=MixedPrecisionPolicy(param_dtype={self.dtype}, reduce_dtype=torch.float32), use"
                " FSDP2Strategy, or leave storage out."
            )
        rank_zero_info(
            f"{self}: fp32 shards are the masters, and FSDP gathers weights in 16 bit."
            if len(wide) < len(units) or not units
            else f"{self}: fp32 shards are the masters, and fully_shard gathers them in fp32; autocast casts them where"
            " they are used. To gather half the bytes, give fully_shard"
            f" mp_policy=MixedPrecisionPolicy(param_dtype={self.dtype}, reduce_dtype=torch.float32)."
        )
        return True

    def _configure_ddp(self, configure: Patch) -> None:
        """DDP hooks the 16-bit copies, and makes its buckets of them; the ranks' fp32 weights are brought together."""
        lent = self._lent
        assert lent is not None
        for parameter in self._run.trainer.lightning_module.parameters():
            dist.broadcast(parameter.data, 0)
        with lent.as_leaves():
            configure.original()

    @override
    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """In a fit, has optimizers step with fp32 gradients."""
        result = super().connect(model, optimizers, lr_schedulers)
        run, trainer = self._run, self._run.trainer
        if run.is_fit:
            if self.dtype == torch.float16:
                names = trainer.lightning_module.named_parameters
                copied = all_hold_the_same(trainer.strategy)
                run.half_range = HalfRange(lambda: {p: name for name, p in names()}, copied=copied)
                run.cleanups.callback(run.half_range.warn)
            if self.storage != "fp32" and run.compressed is None:
                shards = compressed_shards(trainer.lightning_module, self.dtype, self.storage, self._step_now)
                run.compressed = run.cleanups.enter_context(shards)
            for optimizer in optimizers:
                self._connect_late(optimizer)
        return result

    def _step_now(self) -> int:
        """Of 24 bits, which are rounded by it; without skipped steps, which leave no trace."""
        dispatcher = self._run.dispatcher
        return dispatcher.steps_taken() if dispatcher is not None and self.storage == "24bit" else 0

    @override
    def _connect_late(self, optimizer: Optimizer) -> None:
        run = self._run
        for former in run.steps.keys() - {*run.trainer.optimizers, optimizer}:
            run.steps.pop(former).remove()
        if run.compressed is None:
            steps = Fp32Steps(optimizer, run.gradients)
        else:
            steps = CompressedSteps(optimizer, run.gradients, run.compressed)
        run.steps[optimizer] = steps
        run.cleanups.callback(steps.remove)

    # -- steps ---------------------------------------------------------------------------------------------------------

    @contextmanager
    @override
    def _steps_in(self, loop: str) -> Iterator[None]:
        """Autocast; modules that are called get 16-bit copies of their weights."""
        lent = self._lent
        if loop == "train" and self._compressed is not None and self._step is None:
            self._compressed.begin_step(self._run.trainer.optimizers)
        with super()._steps_in(loop), self._lending_in(loop, lent) if lent is not None else nullcontext():
            try:
                yield
            except (RuntimeError, ValueError) as error:
                if any(words in str(error) for words in ABOUT_DTYPES):
                    error.add_note(dtype_hint(error, self.precision))
                raise

    @contextmanager
    def _lending_in(self, loop: str, lent: LentWeights) -> Iterator[None]:
        run, module = self._run, self._run.trainer.lightning_module
        if loop == "train" and not run.has_trained:
            run.has_trained = True
            lent.warn_about_late_compilation()
        is_trusted = loop == "train" and module.automatic_optimization and self._step is None
        # torch.compile(LightningModule) compiles steps, and what these call is no call of a module any more.
        whole = lent.lending(module) if private_dispatch_api.has_compiled_steps(module) else nullcontext()
        with lent.opened(trusted=is_trusted), whole:
            yield

    @override
    def _steps_after_a_run(self, loop: str) -> torch.autocast:
        return torch.autocast(self._carried.device_type or "cpu", self.dtype)

    @contextmanager
    @override
    def backward_context(self) -> Iterator[None]:
        """Activation checkpoints compute again with the copies of their forward."""
        lent = self._lent
        with super().backward_context(), lent.recomputing() if lent is not None else nullcontext():
            yield

    @override
    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: "pl.LightningModule", optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Adds to 16-bit gradients; under DDP, to those of the copies that it reduces."""
        lent = self._lent
        if self._in_run is not None:
            self._run.gradients.put_back(written=True)
        with lent.gradients_at_leaves() if lent is not None else nullcontext():
            super().backward(tensor, model, optimizer, *args, **kwargs)

    @contextmanager
    def hooked_by_ddp(self) -> Iterator[list[Tensor]]:
        """The tensors whose gradients DDP reduces, with the gradients of their parameters; handed back at the end."""
        lent = self._lent
        if lent is None or not lent.has_leaves:
            yield list(self._run.trainer.lightning_module.parameters())
            return
        leaves = {loan.parameter: loan.lent for loan in lent.loans if loan.lent is not None}
        with lent.gradients_at_leaves():
            yield [leaves.get(p, p) for p in self._run.trainer.lightning_module.parameters()]

    @property
    @override
    def mixed_precision_config(self) -> "FSDPMixedPrecision":
        """For ``FSDPStrategy``: 16-bit parameters in forward and backward, gradients reduced in fp32, fp32 buffers.

        A policy with rules about modules gets fp32 parameters, see
        :func:`~lightning_mp.training.policy.applied.fsdp_mixed_precision`.
        """
        return fsdp_mixed_precision(self.dtype, self.policy)

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizer, model: "pl.LightningModule", closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Runs the closure, then the epilogue, then the step with fp32 gradients; the next forward casts again."""
        if self._in_run is None:
            return super().optimizer_step(optimizer, model, closure, **kwargs)
        run = self._run
        if run.lent is not None:
            run.lent.refuse_gradients_of_leaves()
        try:
            result = super().optimizer_step(optimizer, model, closure, **kwargs)
            if run.half_range is not None:
                run.half_range.clamp_([p for g in optimizer.param_groups for p in g["params"] if p in run.in_16_bit])
            return result
        finally:
            for steps in run.steps.values():
                steps.gather_blocks()
            run.gradients.put_back(p for group in optimizer.param_groups for p in group["params"])
            run.gradients.factor = None
            if run.lent is not None:
                run.lent.end_window()
            if run.compressed is not None:
                run.compressed.compress([p for group in optimizer.param_groups for p in group["params"]])

    @override
    def _notice_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Any other optimizer of the module's weights gets fp32 gradients, too."""
        super()._notice_step(optimizer, args, kwargs)
        if optimizer not in self._run.steps:
            self._run.gradients.show([p for group in optimizer.param_groups for p in group["params"]])

    @override
    def _epilogue_type(self) -> Callable[..., GradientEpilogue]:
        if self._in_run is None:
            return super()._epilogue_type()
        if self._run.compressed is not None:
            return partial(CompressedEpilogue, self._run.compressed, self._run.gradients, self._is_evaluated)
        return partial(Fp32GradientEpilogue, self._run.gradients, self._is_evaluated)

    def _is_evaluated(self) -> bool:
        return self._step is not None and self._step.closure is not None

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Also notes which weights are split between steps, so that a resumed run need not hold them whole at first."""
        super().on_save_checkpoint(checkpoint)
        if self._in_run is not None:
            self._note_split_weights(self._run)
        if self._split_weights:
            checkpoint[_SPLIT_KEY] = self._split_weights

    def _note_split_weights(self, run: MasterWeightsRun) -> None:
        """Also where a run ends, because a checkpoint may be saved afterwards."""
        if run.compressed is not None:
            named = run.trainer.lightning_module.named_parameters()
            self._split_weights = [name for name, parameter in named if run.compressed.splits(parameter)]

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Loads the scaler's state, and which weights are split between steps."""
        names = checkpoint.get(_SPLIT_KEY, [])
        checked_state({_SPLIT_KEY: names}, {_SPLIT_KEY: listed_of(TEXT)}, type(self).__name__)
        super().on_load_checkpoint(checkpoint)
        if self._compressed is not None:
            named = self._run.trainer.lightning_module.named_parameters()
            self._compressed.expect_split(parameter for name, parameter in named if name in set(names))
