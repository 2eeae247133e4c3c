"""How many gradient values a number format loses, and how large the loss scale may be."""

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_mp.callbacks._gradient_exponents import (
    count_gradients,
    gradients_are_scaled,
    kept_in_fp32,
    largest_on_any_rank,
)
from lightning_mp.callbacks._metrics import CallbackMetrics
from lightning_mp.ground.core.arguments import names_in, positive_number, whole_number
from lightning_mp.ground.core.foreign_trainers import refuse_other_trainers
from lightning_mp.ground.core.host_copy import HostCopy
from lightning_mp.ground.core.messages import WarnOnce
from lightning_mp.ground.core.number_formats import FormatLike
from lightning_mp.ground.core.patches import Patches
from lightning_mp.ground.core.private_optimizer_api import loss_scale_of
from lightning_mp.ground.core.saved_state import checked_state
from lightning_mp.ground.core.settings_repr import SettingsRepr
from lightning_mp.monitors.diagnostics.underflow.exponents import ExponentTable, narrow_format
from lightning_mp.monitors.diagnostics.underflow.observation import (
    STATE_KINDS,
    UnderflowObservation,
    UnderflowSummary,
    logged_numbers,
    pack_observation,
)
from lightning_mp.monitors.diagnostics.underflow.plot import add_to_tensorboard, plot_observation
from lightning_mp.monitors.diagnostics.underflow.watch import ActivationWatch, BackwardWatch, leaf_modules

_KINDS = ("gradients", "activations", "activation_gradients")
#: Number of last observations that the suggested scale must suit.
SUGGESTION_OBSERVATIONS = 10
#: Length of the history.
HISTORY_OBSERVATIONS = 1000


@dataclass(frozen=True)
class _Pending:
    """An observation in transfer to the host."""

    trainer: "pl.Trainer"
    step_index: int
    names: dict[str, list[str]]
    numbers: HostCopy
    kept_in_fp32: tuple[str, ...]


@dataclass
class _Fit:
    """The pending observation of one fit; the monitor keeps the results."""

    pending: _Pending | None = None
    hooks: ActivationWatch | None = None  # on the modules, during a micro-batch of an observed step
    activations: dict[str, ExponentTable] = field(default_factory=dict)  # by kind
    activations_step: int | None = None  # the step that they are of
    backwards: BackwardWatch | None = None  # of the micro-batches of an observed step
    scale_now: Tensor | None = None

    def detach(self) -> None:
        """Removes the hooks from the modules."""
        hooks, self.hooks = self.hooks, None
        if hooks is not None:
            hooks.detach()


class UnderflowMonitor(SettingsRepr, Callback):
    """Measures how many gradient values a format loses at the current loss scale, and suggests a better one.

    Every ``every_n_steps`` optimizer steps the exponents of all gradient values are counted on the device, per
    parameter, and copied to the host in one transfer that is read one step later. Other steps cost nothing.

    Gradients are evaluated as the format would store them: the true gradient of the step times the loss scale. Under
    autocast only gradients that pass through 16 bit are evaluated: a parameter used without a cast, such as a
    positional embedding or the weight of a norm, has an fp32 gradient, which no scale makes overflow. Headroom and
    suggested scale follow from the largest 16-bit gradient in the step's backward passes, activations included.

    - Without autocast nothing passes through 16 bit, and all parameter gradients are evaluated.
    - In bf16 and fp32 runs, ``mp/underflow_fraction`` is the share of the non-zero values that would become zero in
      ``format``, at ``scale``. It answers: could this run use fp16, and at which scale?
    - In fp16 runs, a value that became zero inside backward looks like a true zero (unused embeddings, dead units), and
      ``mp/zero_fraction`` counts both. Watch ``mp/subnormal_fraction`` instead, values that have already lost digits
      and vanish next, and ``activation_gradients``.

    The fractions describe the gradient of the whole window; those of a single micro-batch may be larger or smaller. The
    headroom is that of the micro-batches. Where backward cannot be watched (reentrant activation checkpoints, compiled
    code, a pipeline), or parameters are sharded, every parameter's gradient is evaluated.

    Logged at every batch once the first observation is read: ``mp/underflow_fraction``, ``mp/subnormal_fraction``,
    ``mp/zero_fraction``, ``mp/headroom_doublings`` (how often the scale may double before the largest gradient
    overflows), ``mp/suggested_scale`` (the largest power of two that would have suited the last 10 observations with
    one doubling of headroom). Other kinds have their name appended: ``mp/underflow_fraction/activations``. A
    ``TensorBoardLogger`` also gets the histogram of exponents, ``mp/exponents/gradients``. The last observation is
    printed at the end of the fit; it and the history are saved in the checkpoint.

    In distributed runs sharded gradients are counted on all ranks, each value once. Activations are those of rank 0: of
    its batches, and under tensor parallelism of its part of the model. Modules inside a compiled one and outputs inside
    ``torch.vmap`` cannot be watched; a warning names the first of them.

    A Trainer can have one such monitor; for other formats, query the histograms:
    ``monitor.latest.whole().fraction_lost("fp8_e5m2")``.

    On observed steps the precision plugins of this package unscale gradients before the optimizer step, as for any hook
    that reads them.

    Args:
        format: the format to judge, narrower than fp32: "fp16", "bf16", "fp8_e5m2", "fp8_e4m3fn".
        every_n_steps: optimizer steps from one observation to the next; the first step is observed.
        scale: factor for the true gradients; None uses the run's loss scale, or 1 if there is none.
        watch: any of "gradients" (of parameters), "activations" (outputs of leaf modules in the forward),
            "activation_gradients" (of these outputs, what Fig. 3 of the paper shows).

    Raises:
        ValueError: if an argument is out of range.
        MisconfigurationException: at set-up, if gradients cannot be seen (DeepSpeed).

    References:
        Micikevicius et al., "Mixed Precision Training", 2017, section 3.2 and Fig. 3, https://arxiv.org/abs/1710.03740

    Example:
        >>> monitor = UnderflowMonitor("fp16", every_n_steps=200, scale=2.0**13)
        >>> monitor.latest is None
        True
    """

    def __init__(
        self,
        format: FormatLike = "fp16",
        every_n_steps: int = 100,
        *,
        scale: float | None = None,
        watch: str | Sequence[str] = ("gradients",),
    ) -> None:
        self.format = narrow_format(format).name
        self.watch = names_in(watch, "watch", "UnderflowMonitor", "['gradients', 'activations']")
        _check(every_n_steps, scale, self.watch)
        self.every_n_steps = every_n_steps
        self.scale = scale
        self._latest: UnderflowObservation | None = None
        self._history: deque[dict[str, UnderflowSummary]] = deque(maxlen=HISTORY_OBSERVATIONS)
        self._logged: dict[str, float] = {}
        self._warn_once = WarnOnce("UnderflowMonitor")
        self._fit = _Fit()

    # -- what was seen -------------------------------------------------------------------------------------------------

    @property
    def latest(self) -> UnderflowObservation | None:
        """The last observation; reading it may wait for the device."""
        self._flush_pending()
        return self._latest

    @property
    def history(self) -> list[dict[str, UnderflowSummary]]:
        """Summaries by kind, oldest first; the last 1000."""
        self._flush_pending()
        return list(self._history)

    @property
    def suggested_scale(self) -> float | None:
        """The largest power of two that would have suited each of the last 10 observations; None before there are any.

        Gradients of activations, if they are watched, must fit as well. Pass it to ``LossScaler(init_scale=...)`` or
        ``LossScaler.static(...)``.
        """
        self._flush_pending()
        return self._suggestion()

    def plot(self, path: str | Path, kind: str = "gradients", *, by_layer: bool = False) -> None:
        """Draws the latest observation with the format's range marked; needs matplotlib.

        Args:
            path: the image file; its suffix sets the format.
            kind: one of those in ``watch``.
            by_layer: draw one line per layer instead of all together.

        Raises:
            ValueError: if the kind is not watched, or nothing was observed yet.
        """
        if kind not in self.watch:
            raise ValueError(f"plot(kind={kind!r}): this monitor watches {self.watch}. Add it to `watch`.")
        if self.latest is None:
            raise ValueError("There is nothing to plot: no optimizer step was observed yet. Call plot() after a fit.")
        plot_observation(self.latest, self.format, kind, by_layer=by_layer).savefig(Path(path), dpi=150)

    # -- hooks ---------------------------------------------------------------------------------------------------------

    def needs_gradients(self, step_index: int) -> bool:
        """Whether true gradients are needed before this step."""
        return "gradients" in self.watch and step_index % self.every_n_steps == 0

    @override
    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        """Checks the Trainer."""
        refuse_other_trainers(self, trainer)
        if isinstance(trainer.strategy, DeepSpeedStrategy):
            raise MisconfigurationException(
                "UnderflowMonitor cannot be used with DeepSpeed, which does not expose its gradients. Use"
                " strategy='ddp' or 'fsdp', or remove the callback."
            )
        if stage == "fit":
            CallbackMetrics.attach(trainer).add(lambda: self._logged)
            Patches.of(trainer).at_end(self._end)

    def _end(self) -> None:
        fit, self._fit = self._fit, _Fit()
        fit.detach()
        if fit.backwards is not None:
            fit.backwards.detach()

    @override
    def on_train_batch_start(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", batch: Any, batch_idx: int
    ) -> None:
        """Puts hooks on the modules, if the window belongs to an observed step."""
        kinds = [kind for kind in self.watch if kind != "gradients"]
        if not kinds or trainer.global_step % self.every_n_steps:
            return
        if self._fit.activations_step != trainer.global_step:
            names = list(leaf_modules(pl_module))
            self._fit.activations = {kind: ExponentTable(names, pl_module.device) for kind in kinds}
            self._fit.activations_step = trainer.global_step
        self._fit.hooks = ActivationWatch(
            pl_module,
            self._fit.activations.get("activations"),
            self._fit.activations.get("activation_gradients"),
            lambda: self._factor(loss_scale_of(trainer), already_scaled=True),
            self._warn_once,
        ).attach()

    @override
    def on_before_backward(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", loss: Tensor) -> None:
        """Watches the backward of an observed step."""
        if self.needs_gradients(trainer.global_step):
            self._fit.backwards = backwards = self._backwards(pl_module)
            backwards.detach()  # of the part of a split micro-batch before
            backwards.attach(loss)
        if self._fit.hooks is not None:
            # The plugin may have changed it before the end of the batch.
            self._fit.scale_now = self._judged_scale(loss_scale_of(trainer), pl_module.device)

    @override
    def on_after_backward(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Reads the last observation: the device has finished it before this backward."""
        if self._fit.backwards is not None:
            self._fit.backwards.detach()
        if self._fit.pending is not None and self._fit.pending.step_index < trainer.global_step:
            self._flush_pending()

    @override
    def on_before_optimizer_step(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", optimizer: Optimizer
    ) -> None:
        """Counts gradients, if this step is observed, and starts the transfer."""
        step_index = trainer.global_step
        if not self.needs_gradients(step_index):
            return
        loss_scale = loss_scale_of(trainer)
        factor = self._factor(loss_scale, already_scaled=gradients_are_scaled(trainer, optimizer))
        watch, self._fit.backwards = self._backwards(pl_module), None
        table = count_gradients(trainer, pl_module, optimizer, factor, watch)
        # Backward holds gradients times the loss scale; they are unscaled later.
        held_factor = self._factor(loss_scale, already_scaled=True)
        largest = largest_on_any_rank(trainer, watch, held_factor, pl_module.device)
        kept = kept_in_fp32(pl_module, watch)
        self._send(trainer, {"gradients": table}, self._judged_scale(loss_scale, pl_module.device), largest, kept)

    @override
    def on_train_batch_end(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Removes the hooks from the modules."""
        self._fit.detach()
        begun, scale = self._fit.activations_step, self._fit.scale_now
        if begun is not None and scale is not None and trainer.global_step > begun:
            self._send(trainer, {}, scale)  # no gradients were requested, so no hook before the step has

    @override
    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Reads the last observation, and prints it."""
        self._flush_pending()
        if self._latest is not None:
            has_finite = any(self._latest.whole(kind).largest for kind in self.watch)
            scale = self.suggested_scale if has_finite else None
            advice = "" if scale is None else f"\nA loss scale of {scale:.10g} suits the last observations."
            rank_zero_info(f"UnderflowMonitor, the last observation:\n{self._latest}{advice}")

    # -- from the device to the logger ---------------------------------------------------------------------------------

    def _backwards(self, pl_module: "pl.LightningModule") -> BackwardWatch:
        """The watch of the observed step's backwards; empty if the module ran them itself."""
        return self._fit.backwards or BackwardWatch(pl_module.device, self._warn_once)

    def _factor(self, loss_scale: Tensor | None, *, already_scaled: bool) -> Tensor | float | None:
        """What values are multiplied by to be those that the format would hold."""
        if not already_scaled or loss_scale is None:
            return loss_scale if self.scale is None else self.scale
        return None if self.scale is None else self.scale / loss_scale

    def _judged_scale(self, loss_scale: Tensor | None, device: torch.device) -> Tensor:
        """A copy on the device, of shape [1]."""
        if self.scale is None and loss_scale is not None:
            return loss_scale.detach().reshape(1).clone()
        return torch.full((1,), self.scale or 1.0, dtype=torch.float32, device=device)

    def _send(
        self,
        trainer: "pl.Trainer",
        tables: dict[str, ExponentTable],
        scale: Tensor,
        largest: Tensor | None = None,
        kept_in_fp32: tuple[str, ...] = (),
    ) -> None:
        """Starts the one transfer of an observation."""
        self._flush_pending()
        self._fit.detach()
        if self._fit.activations_step is not None:
            tables = tables | self._fit.activations
            step_index, self._fit.activations_step, self._fit.activations = self._fit.activations_step, None, {}
        else:
            step_index = trainer.global_step
        names = {kind: table.names for kind, table in tables.items()}
        numbers = HostCopy(pack_observation(scale, largest, tables.values()))
        self._fit.pending = _Pending(trainer, step_index, names, numbers, kept_in_fp32)

    def _flush_pending(self) -> None:
        """Reads the pending observation, if there is one."""
        pending, self._fit.pending = self._fit.pending, None
        if pending is None:
            return
        self._latest = UnderflowObservation.unpack(
            pending.step_index, self.format, pending.names, pending.numbers.read(), pending.kept_in_fp32
        )
        summaries = {kind: self._latest.summary(kind) for kind in self.watch}
        self._history.append(summaries)
        self._logged = logged_numbers(summaries, self._suggestion())
        if pending.trainer.is_global_zero:
            for logger in pending.trainer.loggers:
                if isinstance(logger, TensorBoardLogger):
                    for kind in self.watch:
                        tag, whole = f"mp/exponents/{kind}", self._latest.whole(kind)
                        add_to_tensorboard(logger.experiment, tag, whole, pending.step_index)

    def _suggestion(self) -> float | None:
        recent = list(self._history)[-SUGGESTION_OBSERVATIONS:]
        scales = [summary.suggested_scale for summaries in recent for summary in summaries.values()]
        return min((scale for scale in scales if scale is not None), default=None)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        """The latest observation and the history."""
        self._flush_pending()
        return {
            "latest": None if self._latest is None else self._latest.as_dict(),
            "history": [{kind: asdict(s) for kind, s in summaries.items()} for summaries in self._history],
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from a saved history."""
        state_dict = checked_state(state_dict, STATE_KINDS, "UnderflowMonitor")
        latest = state_dict["latest"]
        self._latest = None if latest is None else UnderflowObservation.from_dict(latest)
        self._history.clear()
        self._history.extend(
            {kind: UnderflowSummary(**s) for kind, s in summaries.items()} for summaries in state_dict["history"]
        )


def _check(every_n_steps: object, scale: object, watch: tuple[str, ...]) -> None:
    whole_number(every_n_steps, "every_n_steps", "UnderflowMonitor", unit="optimizer steps")
    if scale is not None:
        positive_number(scale, "scale", "UnderflowMonitor", hint="None takes the loss scale of the run.")
    unknown = [kind for kind in watch if kind not in _KINDS]
    if unknown or not watch or len(set(watch)) < len(watch):
        raise ValueError(
            f"UnderflowMonitor(watch={watch!r}) is not valid: it must name one or more of {_KINDS}, each once."
        )
