"""Ends a run exactly at its budget of tokens, FLOPs or device hours."""

import math
import time
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import lightning.pytorch as pl
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from typing_extensions import override

from lightning_mp.callbacks._common import check_counts, micro_batches_left
from lightning_mp.callbacks._metrics import CallbackMetrics
from lightning_mp.callbacks._report_folder import report_folder
from lightning_mp.callbacks._window_controller import join_window_controller
from lightning_mp.ground.core.arguments import function_or_none, positive_number, true_or_false, whole_tokens
from lightning_mp.ground.core.foreign_trainers import refuse_other_trainers
from lightning_mp.ground.core.known_words import refuse_unknown
from lightning_mp.ground.core.patches import Patches
from lightning_mp.ground.core.quantities import parse_quantity
from lightning_mp.ground.core.run_state import RunState
from lightning_mp.ground.core.saved_state import AMOUNT, checked_state
from lightning_mp.ground.core.settings_repr import SettingsRepr
from lightning_mp.ground.core.trainer_ranks import num_data_ranks
from lightning_mp.ground.flops.chinchilla import FLOPS_PER_PARAMETER_AND_TOKEN, TOKENS_PER_PARAMETER, tokens_for
from lightning_mp.ground.flops.experts import elements_used
from lightning_mp.ground.modules.whole_parameters import agreed_count, whole_parameters
from lightning_mp.training.accumulation.controller import AccumulationController
from lightning_mp.training.distributed.async_sum import AsyncAnyRank
from lightning_mp.training.lr_schedule.scheduler_facts import schedulers_longer_than
from lightning_mp.training.optimizer_step.outcome import StepOutcomeSource
from lightning_mp.training.tokens.budget import LandingMode, TokenBudget, TrimFunction
from lightning_mp.training.tokens.loss_weighting import CountFunction, Weighting
from lightning_mp.training.tokens.run_counts import RunBudget

_DEVICE_SECONDS = "lightning_mp_device_seconds"

Counted = Literal["all", "trainable", "non_embedding"]
OnWaste = Literal["report", "extend"]


@dataclass
class _Fit:
    """The clock of one fit, and which messages it has shown."""

    started: float | None = None  # while the clock runs
    num_devices: int = 1
    hours_are_over: AsyncAnyRank = field(default_factory=AsyncAnyRank)
    ended_before: bool = False  # the budget was spent when it began
    has_reported: bool = False


class ChinchillaBudget(SettingsRepr, RunBudget):
    """Ends the run when it has spent its budget, by default 20 tokens per parameter.

    Target tokens are counted over all ranks and saved in the checkpoint, so a resumed run spends the rest, even on
    another number of ranks. The run always ends at the end of an accumulation window, after a last validation. Use it
    with ``Trainer(max_epochs=-1)``. If there are several targets, the first to be reached ends the run.

    Args:
        tokens_per_parameter: ratio of tokens to parameters; 20, as in Hoffmann et al. 2022, if no other target is
            given.
        tokens: the budget in tokens, a whole number or a string such as "1.5B".
        flops: training compute C, converted to C / (6 N) tokens, without attention scores and recomputation. For a
            mixture of experts N counts those that a token is routed to, read from its Hugging Face configuration.
        device_hours: training time, validation included, times the number of devices. The run ends at the first window
            end after it; on several ranks one window later.
        parameters: which parameters N counts: "all" of them, tied ones once; "trainable"; or "non_embedding", all but
            those of ``nn.Embedding`` modules (a head tied to one is left out with it).
        count: a function that returns the number of tokens in a batch on this rank; None counts the labels other than
            -100.
        landing: "exact" hides surplus tokens of the last micro-batch from the loss by label -100; "floor" ends before
            the budget would be passed, "ceil" after it is reached, "nearest" where the run is within half of the
            largest micro-batch.
        trim: for "exact" with batches that have no such labels: ``trim(batch, keep_tokens)`` leaves that many tokens in
            the loss, in place, and returns a function that undoes it.
        on_waste: tokens of skipped optimizer steps are spent ("report"), or replaced by as many more ("extend"; this
            waits for the device once, at the last step).
        save: write ``budget_reached-step-<step>.ckpt`` next to the Trainer's checkpoints when the budget is spent.

    Raises:
        ValueError: if an argument is not valid.
        MisconfigurationException: at set-up, if ``on_waste="extend"`` is used with a stock precision plugin and without
            ``OverflowMonitor``; with the first batch, if it is larger than the budget or cannot be trimmed.

    References:
        Hoffmann et al., "Training Compute-Optimal Large Language Models", 2022, section 3.4,
        https://arxiv.org/abs/2203.15556

    Example:
        >>> from lightning_mp import ChinchillaBudget
        >>> ChinchillaBudget(tokens="1.5M").budget_tokens
        1500000
    """

    def __init__(
        self,
        tokens_per_parameter: float | None = None,
        *,
        tokens: float | str | None = None,
        flops: float | str | None = None,
        device_hours: float | None = None,
        parameters: Counted = "all",
        count: CountFunction | None = None,
        landing: LandingMode = "exact",
        trim: TrimFunction | None = None,
        on_waste: OnWaste = "report",
        save: bool = True,
    ) -> None:
        if all(target is None for target in (tokens_per_parameter, tokens, flops, device_hours)):
            tokens_per_parameter = TOKENS_PER_PARAMETER
        for name, target, unit in (
            ("tokens_per_parameter", tokens_per_parameter, ""),
            ("device_hours", device_hours, "hours times devices"),
        ):
            if target is not None:
                positive_number(target, name, "ChinchillaBudget", unit=unit)
        self.tokens_per_parameter = tokens_per_parameter
        self.flops = None if flops is None else parse_quantity(flops, "flops")
        self.device_hours = device_hours
        self._tokens = None if tokens is None else whole_tokens(tokens, "tokens", "ChinchillaBudget")
        words = (
            ("parameters", parameters, Counted),
            ("on_waste", on_waste, OnWaste),
            ("landing", landing, LandingMode),
        )
        for name, value, allowed in words:
            refuse_unknown(value, name, "ChinchillaBudget", get_args(allowed))
        # These raise on a wrong argument now, not at set-up.
        TokenBudget(1 if self._tokens is None else self._tokens, landing)
        Weighting("auto", count)
        self.trim = function_or_none(trim, "trim", "ChinchillaBudget", "from a batch and the labels to keep to an undo")
        _refuse_what_does_nothing(parameters, tokens_per_parameter is not None or flops is not None, trim, landing)
        self.parameters: Counted = parameters
        self._target_tokens: int | None = self._tokens
        self.count = count
        self.landing: LandingMode = landing
        self.on_waste: OnWaste = on_waste
        self.save = true_or_false(save, "save", "ChinchillaBudget")
        self._device_seconds = 0.0
        self._out_of_time = False
        self._controller: AccumulationController | None = None
        self._fit = _Fit()

    # -- how far the run is --------------------------------------------------------------------------------------------

    @property
    @override
    def budget_tokens(self) -> int | None:
        """Tokens on which the run ends: the smallest target, or where ``TokenLearningRate.cooldown_now`` ends it.

        None without such a target; for targets in parameters or FLOPs also before the first ``fit``.
        """
        end_tokens = self._controller.state.end_tokens if self._controller is not None else None
        return self._target_tokens if end_tokens is None else end_tokens

    @property
    def tokens_seen(self) -> int:
        """Target tokens so far over all ranks; during training those of the last window may still be missing."""
        return self._controller.counter.tokens if self._controller is not None else 0

    @property
    def tokens_spent(self) -> int:
        """Tokens that count towards the budget: under ``on_waste="extend"``, without those of skipped steps."""
        skipped = (
            self._controller.counter.skipped_tokens if self._controller is not None and self.on_waste == "extend" else 0
        )
        return self.tokens_seen - skipped

    @property
    def fraction(self) -> float:
        """Share of the budget that is spent; of several targets, the largest share."""
        of_tokens = self.tokens_spent / self.budget_tokens if self.budget_tokens else 0.0
        of_time = self.device_seconds / (3600 * self.device_hours) if self.device_hours else 0.0
        return max(of_tokens, of_time)

    @property
    def device_seconds(self) -> float:
        """Time of training so far, validation included, times the number of devices."""
        if self._fit.started is None:
            return self._device_seconds
        return self._device_seconds + (time.monotonic() - self._fit.started) * self._fit.num_devices

    @property
    def reached(self) -> bool:
        """Whether the run has spent its budget."""
        return self._out_of_time or (self._controller is not None and self._controller.state.budget_reached)

    # -- set-up --------------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        """Joins the accumulation controller."""
        refuse_other_trainers(self, trainer)
        if stage == "fit":
            self._fit = _Fit()
            Patches.of(trainer).at_end(self._end)
            self._controller = join_window_controller(self, trainer, pl_module, self.count)
            CallbackMetrics.attach(trainer).add(self._metrics, self._on_bar)

    def check_setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", batch: Any) -> None:
        """Raises the errors of a fit before it starts; called by preflight.

        Raises:
            MisconfigurationException: as in the fit.
        """
        check_counts(self, trainer, pl_module, batch, needs_tokens=True)

    @override
    def on_fit_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Counts parameters and sets the budget."""
        assert self._controller is not None
        self._controller.at_first_batch(lambda _: self._warn_about_early_end(trainer))
        targets = self._targets(trainer, pl_module)
        for _, said in targets:
            if said:
                rank_zero_info(said)
        self._target_tokens = min((tokens for tokens, _ in targets), default=None)
        if self._target_tokens is not None:
            budget = TokenBudget(self._target_tokens, self.landing, self.on_waste == "extend", self.trim)
            self._controller.settings.spend(budget)

    def planned_tokens(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> int | None:
        """Tokens of the smallest target for this module, also before a fit; None if there are device hours only."""
        return min((tokens for tokens, _ in self._targets(trainer, pl_module)), default=None)

    def _targets(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> list[tuple[int, str]]:
        """Tokens of each target, and its description."""
        targets = [] if self._tokens is None else [(self._tokens, "")]
        if self.tokens_per_parameter is not None or self.flops is not None:
            parameters, used, which = _count_parameters(trainer, pl_module, self.parameters)
            if self.tokens_per_parameter is not None:
                tokens = tokens_for(parameters, self.tokens_per_parameter)
                how = f"{self.tokens_per_parameter:g} tokens x {parameters:,} parameters ({which})"
                targets.append((tokens, f"ChinchillaBudget: {how} = {tokens:,} tokens."))
            if self.flops is not None:
                tokens = max(1, int(self.flops / (FLOPS_PER_PARAMETER_AND_TOKEN * used)))
                which += "; of a mixture the experts that a token is sent to" if used < parameters else ""
                how = f"{self.flops:.4g} FLOPs / (6 x {used:,} parameters ({which}))"
                targets.append((tokens, f"ChinchillaBudget: {how} = {tokens:,} tokens."))
        return targets

    @override
    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Starts the clock."""
        if self.on_waste == "extend" and StepOutcomeSource.of(trainer) is None:
            raise MisconfigurationException(
                "ChinchillaBudget(on_waste='extend') must know which optimizer steps were skipped, and"
                f" {type(trainer.precision_plugin).__name__} does not report them. Use a precision plugin of"
                " lightning_mp, or add OverflowMonitor() to the callbacks."
            )
        self._fit.started, self._fit.num_devices = time.monotonic(), trainer.world_size
        is_late = self.device_hours is not None and self.device_seconds >= 3600 * self.device_hours
        self._out_of_time = bool(trainer.strategy.broadcast(is_late))  # each rank has its own clock
        self._fit.ended_before = self.reached
        trainer.should_stop = trainer.should_stop or self.reached

    # -- every batch ---------------------------------------------------------------------------------------------------

    def _warn_about_early_end(self, trainer: "pl.Trainer") -> None:
        """With the first batch: that the run ends before its budget, or the budget long before a scheduler."""
        assert self._controller is not None
        if self.budget_tokens is None:
            return
        left = self.budget_tokens - self.tokens_spent
        measure = self._controller.measure
        assert measure is not None
        per_batch = num_data_ranks(trainer) * int(measure.tokens)  # waits for the device, once in a fit
        if not per_batch:
            return
        window = self._controller.state.window.planned
        for found in schedulers_longer_than(2 * math.ceil(left / (window * per_batch)), trainer):
            rank_zero_warn(
                f"ChinchillaBudget: {found.name}({found.setting}={found.planned:,}) plans many more optimizer steps"
                f" than the budget allows, about {left // (window * per_batch):,} from here, so the learning"
                " rate hardly falls. Use TokenLearningRate(WarmupCosine()) in its place."
            )
        batches = micro_batches_left(trainer, window)
        tokens = {limit: number * per_batch for limit, number in batches.items()}
        if tokens.get("max_epochs", left) < left:
            rank_zero_warn(
                f"ChinchillaBudget: the data end before the budget. max_epochs={trainer.max_epochs} leaves"
                f" {batches['max_epochs']:,} micro-batches of about {per_batch:,} tokens, {tokens['max_epochs']:,} of"
                f" the {left:,} tokens that remain. Use Trainer(max_epochs=-1), or more data."
            )
        if tokens.get("max_steps", left) < left:
            rank_zero_warn(
                f"ChinchillaBudget: max_steps={trainer.max_steps} ends before the budget."
                f" {batches['max_steps'] // window:,} steps of about {window * per_batch:,} tokens"
                f" make {tokens['max_steps']:,} of the {left:,} tokens that remain. Leave max_steps out, or accumulate"
                " more micro-batches."
            )

    @override
    def on_train_batch_end(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Ends the run when its hours are over."""
        assert self._controller is not None
        if self.device_hours is not None and not self._controller.is_open:
            over = self.device_seconds >= 3600 * self.device_hours
            if self._fit.hours_are_over.ask(over, pl_module.device):
                self._out_of_time = trainer.should_stop = True

    def _stop_clock(self) -> None:
        self._device_seconds, self._fit.started = self.device_seconds, None

    def _end(self) -> None:
        self._fit = _Fit()

    def _metrics(self) -> dict[str, float]:
        """As far as they are known without waiting for the device."""
        return {"mp/tokens": self.tokens_seen, "mp/budget_fraction": self.fraction}

    def _on_bar(self) -> dict[str, float]:
        return {"mp/budget_fraction": self.fraction} if self.tokens_seen or self.device_hours else {}

    # -- the end -------------------------------------------------------------------------------------------------------

    @override
    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Logs the totals, saves, and warns if the run ended before its budget or not exactly on it."""
        assert self._controller is not None
        self._stop_clock()
        RunState.of(trainer).flush()
        counter = self._controller.counter
        counter.flush_pending()
        counted = "in the loss" if self.count is None else "by count="
        rank_zero_info(
            f"ChinchillaBudget, tokens over all ranks: {counter.input_tokens:,} in the inputs,"
            f" {counter.nonpad_tokens:,} without padding, {counter.tokens:,} {counted}, of those"
            f" {counter.skipped_tokens:,} in skipped steps and {counter.repeated_tokens:,} after the first epoch."
            f" {self.device_seconds / 3600:.3g} device hours."
        )
        if not self.reached:
            self._warn_about_rest("something else ended it, such as max_steps, max_epochs or another callback")
            return
        if self._fit.ended_before:
            rank_zero_info(
                f"ChinchillaBudget: the budget was spent before this fit, which made no step: {self.tokens_seen:,}"
                f" tokens, {self.device_seconds / 3600:.3g} device hours. Give a larger budget to train on."
            )
            return
        by_tokens = self.budget_tokens is not None and not self._out_of_time
        if by_tokens and self.landing == "exact" and self.tokens_spent != self.budget_tokens:
            rank_zero_warn(
                f"ChinchillaBudget: the run ended on {self.tokens_spent:,} tokens instead of {self.budget_tokens:,},"
                " because its last micro-batches had fewer than two tokens per rank, or one was several times longer"
                " than all before it."
            )
        saved = ""
        if self.save and trainer.checkpoint_callbacks:
            path = report_folder(trainer) / f"budget_reached-step-{trainer.global_step}.ckpt"
            trainer.save_checkpoint(path, weights_only=False)
            saved = f" Saved {path}."
        of_budget = f" of {self.budget_tokens:,}" if by_tokens else f" in {self.device_hours:g} device hours"
        rank_zero_info(
            f"ChinchillaBudget: the budget is spent, {self.tokens_spent:,}{of_budget} tokens after"
            f" {trainer.global_step:,} steps.{saved}"
        )

    def _warn_about_rest(self, cause: str) -> None:
        """Warns once per fit, if a budget is known and not spent."""
        if self._fit.has_reported or self.reached or not (self.budget_tokens or self.device_hours):
            return
        self._fit.has_reported = True
        if self.budget_tokens is not None:
            spent = f"{self.tokens_spent:,} of {self.budget_tokens:,} budgeted tokens ({self.fraction:.1%})"
        else:
            spent = f"{self.fraction:.1%} of its {self.device_hours:g} device hours"
        rank_zero_warn(
            f"ChinchillaBudget: the run ended after {spent}: {cause}. To spend the rest, resume from the last"
            " checkpoint with Trainer(max_epochs=-1)."
        )

    @override
    def on_fit_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Warns if Lightning had nothing to train."""
        self._warn_about_rest("max_steps or max_epochs was reached before this fit, or there were no batches")

    @override
    def on_exception(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", exception: BaseException) -> None:
        """Reports an interrupt, which Lightning treats as a normal end."""
        self._stop_clock()
        if isinstance(exception, KeyboardInterrupt):
            self._warn_about_rest("it was interrupted")

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    # Not `state_dict`, of which Lightning allows one of a class: two budgets get our own message.
    @override
    def on_save_checkpoint(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", checkpoint: dict[str, Any]
    ) -> None:
        """Saves the time; tokens are in the controller's counter."""
        checkpoint[_DEVICE_SECONDS] = self.device_seconds

    @override
    def on_load_checkpoint(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", checkpoint: dict[str, Any]
    ) -> None:
        """Continues from a checkpoint; from 0 if its run had no budget."""
        saved = {_DEVICE_SECONDS: checkpoint.get(_DEVICE_SECONDS, 0.0)}
        self._device_seconds = checked_state(saved, {_DEVICE_SECONDS: AMOUNT}, "ChinchillaBudget")[_DEVICE_SECONDS]


def _count_parameters(trainer: "pl.Trainer", pl_module: "pl.LightningModule", which: Counted) -> tuple[int, int, str]:
    """The number, of the whole model and equal on all ranks, how many of them a token uses, and what is counted."""
    model = trainer.strategy.model or pl_module
    everything = whole_parameters(model)
    said = "all of them, tied ones once"
    if which == "trainable":
        everything, said = [p for p in everything if p.learns], "the trainable ones, tied ones once"
    elif which == "non_embedding":
        everything = [p for p in everything if not any(isinstance(owner, nn.Embedding) for owner in p.owners)]
        said = "all but embeddings"
    number = agreed_count(sum(p.elements for p in everything), pl_module.device, "parameters")
    if not number:
        raise MisconfigurationException(
            f"ChinchillaBudget(parameters={which!r}) found no such parameters in {type(pl_module).__name__}, so its"
            " budget would be 0 tokens. Give tokens=, or count other parameters."
        )
    try:
        used = sum(elements_used(model, everything))
    except ValueError:
        used, said = number, f"{said}; no configuration says how many experts a token is sent to"
    return number, used, said


def _refuse_what_does_nothing(
    parameters: Counted, counts_parameters: bool, trim: TrimFunction | None, landing: LandingMode
) -> None:
    if parameters != "all" and not counts_parameters:
        raise ValueError(
            f"ChinchillaBudget(parameters={parameters!r}) says which parameters tokens_per_parameter= and flops= count,"
            " and neither is given. Leave parameters out."
        )
    if trim is not None and landing != "exact":
        raise ValueError(
            f"ChinchillaBudget(trim=..., landing={landing!r}): only landing='exact' trims. Leave trim out, or end"
            " exactly."
        )
