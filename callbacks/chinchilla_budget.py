"""A run that ends on its budget: tokens, FLOPs or device hours."""

import time
from typing import Any, Literal, get_args

import lightning.pytorch as pl
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_mp.agreed_flag import AgreedFlag
from lightning_mp.callbacks._common import join_window_keeper, log_host_number, refuse_other_trainers, report_folder
from lightning_mp.landing import LandingMode, TokenBudget, TrimFunction
from lightning_mp.outcome import StepDispatcher
from lightning_mp.pipelining.other_stage import whole_again
from lightning_mp.planning.chinchilla import FLOPS_PER_PARAMETER_AND_TOKEN, TOKENS_PER_PARAMETER, tokens_for
from lightning_mp.planning.quantities import parse_quantity
from lightning_mp.weighting import CountFunction, Weighting
from lightning_mp.windows import WindowKeeper

__all__ = ["ChinchillaBudget"]

Counted = Literal["all", "trainable", "non_embedding"]
OnWaste = Literal["report", "extend"]


class ChinchillaBudget(Callback):
    """Ends the run when it has spent its budget, by default 20 tokens per parameter.

    Loss-bearing tokens are counted over all ranks and saved in the checkpoint, so a resumed run spends the rest, also
    on another number of ranks. The run always ends at the end of an accumulation window, after a last validation. Use
    it with ``Trainer(max_epochs=-1)``. Of several targets the one that is reached first ends the run.

    Args:
        tokens_per_parameter: 20, the ratio of Hoffmann et al. 2022, where nothing else is given.
        tokens: the budget itself, a whole number; strings such as "1.5B" are read.
        flops: training compute C; it becomes C / (6 N) tokens, attention scores and recomputation not counted.
        device_hours: time of training, validation included, times the number of devices. The run ends at the first
            window end after it; on several ranks one window later.
        parameters: which parameters N counts: "all" of them, tied ones once; "trainable"; or "non_embedding", all but
            those of ``nn.Embedding`` modules (a head tied to one is left out with it).
        count: a function from a batch to its number of tokens on this rank, where they are not the labels other than
            -100.
        landing: "exact" hides surplus tokens of the last micro-batch from the loss by label -100; "floor" ends before
            the budget would be passed, "ceil" after it is reached, "nearest" where the run is within half of the
            largest micro-batch.
        trim: for "exact" with other batches: ``trim(batch, keep_tokens)`` leaves that many tokens in the loss, in
            place, and returns a function that undoes it.
        on_waste: tokens of skipped optimizer steps are spent ("report"), or made up for ("extend"; it waits for the
            device once, at the last step).
        save: write ``budget_reached-step=<step>.ckpt`` beside the Trainer's checkpoints when the budget is spent.

    Raises:
        ValueError: if an argument is not valid.
        MisconfigurationException: at set-up, if ``on_waste="extend"`` meets a stock precision plugin without
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
        self.tokens_per_parameter = _positive("tokens_per_parameter", tokens_per_parameter, ", for instance 20")
        self.flops = None if flops is None else parse_quantity(flops, "flops")
        self.device_hours = _positive("device_hours", device_hours, " of hours times devices")
        self._tokens = None if tokens is None else _whole_tokens(tokens)
        for name, value, allowed in (("parameters", parameters, Counted), ("on_waste", on_waste, OnWaste)):
            if value not in get_args(allowed):
                raise ValueError(
                    f"ChinchillaBudget({name}={value!r}) is unknown; it must be one of {get_args(allowed)}."
                )
        if trim is not None and landing != "exact":
            raise ValueError(
                f"ChinchillaBudget(trim=..., landing={landing!r}): only landing='exact' trims. Leave trim out, or land"
                " exactly."
            )
        # These raise on a wrong argument now, not at set-up.
        TokenBudget(1 if self._tokens is None else self._tokens, landing)
        Weighting("auto", count)
        self.parameters: Counted = parameters
        self.budget_tokens: int | None = self._tokens
        self.count = count
        self.landing: LandingMode = landing
        self.trim = trim
        self.on_waste: OnWaste = on_waste
        self.save = save
        self._clock: float | None = None
        self._hours_are_over = AgreedFlag()
        self._out_of_time = False
        self._keeper: WindowKeeper | None = None
        self._first_batch = True

    # -- how far the run is --------------------------------------------------------------------------------------------

    @property
    def tokens_seen(self) -> int:
        """Loss-bearing tokens so far over all ranks; during training those of the last window may still be missing."""
        return self._keeper.ledger.tokens if self._keeper is not None else 0

    @property
    def tokens_spent(self) -> int:
        """Those of them that count: without skipped ones if they are made up for."""
        skipped = self._keeper.ledger.skipped_tokens if self._keeper is not None and self.on_waste == "extend" else 0
        return self.tokens_seen - skipped

    @property
    def fraction(self) -> float:
        """Share of the budget that is spent; of several targets, of the one that is nearest to its end."""
        of_tokens = self.tokens_spent / self.budget_tokens if self.budget_tokens else 0.0
        of_time = self.device_seconds / (3600 * self.device_hours) if self.device_hours else 0.0
        return max(of_tokens, of_time)

    @property
    def device_seconds(self) -> float:
        """Time of training so far, validation included, times the number of devices."""
        return self._keeper.device_seconds if self._keeper is not None else 0.0

    @property
    def reached(self) -> bool:
        """Whether the run has spent its budget."""
        return self._keeper is not None and self._keeper.budget_reached

    # -- set-up --------------------------------------------------------------------------------------------------------

    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        """Joins the window keeper."""
        refuse_other_trainers(self, trainer)
        if stage == "fit":
            self._keeper = join_window_keeper(self, trainer, pl_module, self.count)

    def on_fit_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Counts parameters and sets the budget."""
        assert self._keeper is not None
        self.budget_tokens = self._smallest_target(pl_module)
        if self.budget_tokens is not None:
            budget = TokenBudget(self.budget_tokens, self.landing, self.on_waste == "extend", self.trim)
            self._keeper.requests.spend(budget)

    def _smallest_target(self, pl_module: "pl.LightningModule") -> int | None:
        targets = [] if self._tokens is None else [self._tokens]
        if self.tokens_per_parameter is not None or self.flops is not None:
            parameters, which = _count_parameters(pl_module, self.parameters)
            if self.tokens_per_parameter is not None:
                targets.append(tokens_for(parameters, self.tokens_per_parameter))
                rank_zero_info(
                    f"Chinchilla budget: {self.tokens_per_parameter:g} tokens x {parameters:,} parameters ({which})"
                    f" = {targets[-1]:,} tokens."
                )
            if self.flops is not None:
                targets.append(max(1, int(self.flops / (FLOPS_PER_PARAMETER_AND_TOKEN * parameters))))
                rank_zero_info(
                    f"Chinchilla budget: {self.flops:.4g} FLOPs / (6 x {parameters:,} parameters ({which}))"
                    f" = {targets[-1]:,} tokens."
                )
        return min(targets, default=None)

    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Starts the clock."""
        if self.on_waste == "extend" and StepDispatcher.of(trainer) is None:
            raise MisconfigurationException(
                "ChinchillaBudget(on_waste='extend') must know which optimizer steps were skipped, and"
                f" {type(trainer.precision_plugin).__name__} does not tell. Use a precision plugin of lightning_mp, or"
                " add OverflowMonitor() to the callbacks."
            )
        self._clock, self._first_batch = time.monotonic(), True
        if self.reached:
            trainer.should_stop = True

    # -- every batch ---------------------------------------------------------------------------------------------------

    def on_train_batch_start(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", batch: Any, batch_idx: int
    ) -> None:
        """Warns with the first batch if the data or ``max_steps`` end before the budget."""
        if self._first_batch:
            self._first_batch = False
            self._warn_of_an_early_end(trainer, batch)

    def _warn_of_an_early_end(self, trainer: "pl.Trainer", batch: Any) -> None:
        assert self._keeper is not None
        if self.budget_tokens is None:
            return
        left = self.budget_tokens - self.tokens_spent
        per_batch = self._keeper.presented_tokens(batch)
        max_epochs = -1 if trainer.max_epochs is None else trainer.max_epochs
        if max_epochs != -1 and trainer.num_training_batches != float("inf"):
            batches = int(trainer.num_training_batches) * (max_epochs - trainer.current_epoch)
            if batches * per_batch < left:
                rank_zero_warn(
                    f"The data end before the budget: max_epochs={max_epochs} leaves {batches:,} micro-batches of about"
                    f" {per_batch:,} tokens, {batches * per_batch:,} of {left:,} tokens to go. Use"
                    " Trainer(max_epochs=-1), or more data."
                )
        if trainer.max_steps != -1:
            steps = trainer.max_steps - trainer.global_step
            tokens = steps * self._keeper.planned_micro_batches * per_batch
            if tokens < left:
                rank_zero_warn(
                    f"max_steps={trainer.max_steps} ends before the budget: {steps:,} steps of"
                    f" {self._keeper.planned_micro_batches} micro-batches of about {per_batch:,} tokens make"
                    f" {tokens:,} of {left:,} tokens to go. Leave max_steps out, or accumulate more micro-batches."
                )

    def on_train_batch_end(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Logs tokens and share of the budget, as far as they are known without waiting for the device."""
        assert self._keeper is not None
        self._count_time(trainer)
        log_host_number(pl_module, "mp/tokens", self.tokens_seen)
        log_host_number(pl_module, "mp/budget_fraction", self.fraction, prog_bar=True)
        if self.device_hours is not None and not self._keeper.is_open:
            over = self.device_seconds >= 3600 * self.device_hours
            if self._hours_are_over.ask(over, pl_module.device):
                self._out_of_time = self._keeper.budget_reached = trainer.should_stop = True

    def _count_time(self, trainer: "pl.Trainer") -> None:
        assert self._keeper is not None
        now = time.monotonic()
        if self._clock is not None:
            self._keeper.device_seconds += (now - self._clock) * trainer.world_size
        self._clock = now

    # -- the end -------------------------------------------------------------------------------------------------------

    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Gives the account, saves, and says so if the run ended before its budget or beside it."""
        assert self._keeper is not None
        dispatcher = StepDispatcher.of(trainer)
        if dispatcher is not None:
            dispatcher.settle()
        ledger = self._keeper.ledger
        ledger.settle()
        rank_zero_info(
            f"Tokens over all ranks: {ledger.presented_tokens:,} presented, {ledger.nonpad_tokens:,} without padding,"
            f" {ledger.tokens:,} in the loss, of those {ledger.skipped_tokens:,} in skipped steps and"
            f" {ledger.repeated_tokens:,} after the first epoch. {self.device_seconds / 3600:.3g} device hours."
        )
        if not self.reached:
            if self.budget_tokens is not None:
                spent = f"{self.tokens_spent:,} of {self.budget_tokens:,} budgeted tokens ({self.fraction:.1%})"
            else:
                spent = f"{self.fraction:.1%} of its {self.device_hours:g} device hours"
            rank_zero_warn(
                f"The run ended after {spent}: max_steps, max_epochs, max_time or another callback ended it first. Use"
                " Trainer(max_epochs=-1) and resume from the last checkpoint to spend the rest."
            )
            return
        by_tokens = self.budget_tokens is not None and not self._out_of_time
        if by_tokens and self.landing == "exact" and self.tokens_spent != self.budget_tokens:
            rank_zero_warn(
                f"The run ended on {self.tokens_spent:,} tokens instead of {self.budget_tokens:,}: its last"
                " micro-batches had less than two tokens per rank, or one was several times longer than all before it."
            )
        if self.save and trainer.checkpoint_callbacks:
            trainer.save_checkpoint(report_folder(trainer) / f"budget_reached-step={trainer.global_step}.ckpt")


def _count_parameters(module: nn.Module, which: Counted) -> tuple[int, str]:
    """The number, and what it counts; of a pipeline's stage those of the whole model."""
    with whole_again(module):
        return _count(module, which)


def _count(module: nn.Module, which: Counted) -> tuple[int, str]:
    everything = list(module.parameters())
    if which == "trainable":
        return sum(p.numel() for p in everything if p.requires_grad), "the trainable ones, tied ones once"
    if which == "non_embedding":
        tables = {id(p) for m in module.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
        return sum(p.numel() for p in everything if id(p) not in tables), "all but embeddings"
    return sum(p.numel() for p in everything), "all of them, tied ones once"


def _positive(name: str, value: float | None, hint: str) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (is_number and 0 < value < float("inf")):
        raise ValueError(f"ChinchillaBudget({name}={value!r}) must be a positive number{hint}.")
    return value


def _whole_tokens(tokens: object) -> int:
    if isinstance(tokens, str):
        tokens = parse_quantity(tokens, "tokens")
    if isinstance(tokens, bool) or not isinstance(tokens, int | float) or tokens % 1 != 0 or tokens < 1:
        raise ValueError(f"ChinchillaBudget(tokens={tokens!r}): it must be a whole number of tokens, 1 or more.")
    return int(tokens)
