"""A run that ends on its token budget."""

from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.callbacks import Callback

from lightning_mp.callbacks._common import log_host_number, refuse_other_trainers, refuse_rivals
from lightning_mp.landing import LandingMode, TokenBudget
from lightning_mp.planning import tokens_for
from lightning_mp.weighting import CountFunction, Weighting
from lightning_mp.windows import WindowKeeper

__all__ = ["ChinchillaBudget"]


class ChinchillaBudget(Callback):
    """Ends the run when it has spent a number of tokens, by default 20 per parameter.

    Loss-bearing tokens are counted over all ranks and saved in the checkpoint, so a resumed run spends the rest. The
    run always ends at the end of an accumulation window, after a last validation. Use it with
    ``Trainer(max_epochs=-1)``.

    Args:
        tokens_per_parameter: 20 is the ratio of Hoffmann et al. 2022. All parameters count, embeddings too; tied ones
            once.
        tokens: the budget itself, instead of the ratio; a whole number (1e9 is one).
        count: a function from a batch to its number of tokens on this rank, where they are not the labels other than
            -100.
        landing: "exact" hides surplus tokens of the last micro-batch from the loss by label -100; "floor" ends before
            the budget would be passed, "ceil" after it is reached.

    Raises:
        ValueError: if an argument is not valid.
        MisconfigurationException: with the first batch, if it is larger than the budget or cannot be trimmed.

    References:
        Hoffmann et al., "Training Compute-Optimal Large Language Models", 2022, section 3.4,
        https://arxiv.org/abs/2203.15556

    Example:
        >>> from lightning_mp import ChinchillaBudget
        >>> ChinchillaBudget(tokens=1_000_000).budget_tokens
        1000000
    """

    def __init__(
        self,
        tokens_per_parameter: float = 20,
        *,
        tokens: float | None = None,
        count: CountFunction | None = None,
        landing: LandingMode = "exact",
    ) -> None:
        is_number = isinstance(tokens_per_parameter, int | float) and not isinstance(tokens_per_parameter, bool)
        if tokens is None and not (is_number and 0 < tokens_per_parameter < float("inf")):
            raise ValueError(
                f"ChinchillaBudget(tokens_per_parameter={tokens_per_parameter!r}) must be a positive number, for"
                " instance 20."
            )
        self._tokens = None if tokens is None else _whole_tokens(tokens)
        # These raise on a wrong argument now, not at set-up.
        TokenBudget(1 if self._tokens is None else self._tokens, landing)
        Weighting("auto", count)
        self.tokens_per_parameter = tokens_per_parameter
        self.budget_tokens: int | None = self._tokens
        self.count = count
        self.landing: LandingMode = landing
        self._keeper: WindowKeeper | None = None

    @property
    def tokens_seen(self) -> int:
        """Loss-bearing tokens so far over all ranks; during training those of the last window may still be missing."""
        return self._keeper.ledger.tokens if self._keeper is not None else 0

    @property
    def fraction(self) -> float:
        """Share of the budget that is spent."""
        return self.tokens_seen / self.budget_tokens if self.budget_tokens else 0.0

    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        """Joins the window keeper."""
        refuse_other_trainers(self, trainer)
        if stage != "fit":
            return
        refuse_rivals(self, trainer, pl_module)
        self._keeper = WindowKeeper.attach(trainer)
        self._keeper.weigh("auto", self.count)

    def on_fit_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Counts parameters and sets the budget."""
        assert self._keeper is not None
        self.budget_tokens = self._tokens
        if self.budget_tokens is None:
            parameters = sum(p.numel() for p in pl_module.parameters())
            self.budget_tokens = tokens_for(parameters, self.tokens_per_parameter)
            rank_zero_info(
                f"Chinchilla budget: {self.tokens_per_parameter:g} tokens x {parameters:,} parameters (all of them,"
                f" tied ones once) = {self.budget_tokens:,} tokens."
            )
        self._keeper.spend(TokenBudget(self.budget_tokens, self.landing))

    def on_train_batch_end(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Logs tokens and share of the budget, as far as they are known without waiting for the device."""
        log_host_number(pl_module, "mp/tokens", self.tokens_seen)
        log_host_number(pl_module, "mp/budget_fraction", self.fraction, prog_bar=True)

    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Says so if the run ended before its budget."""
        assert self._keeper is not None
        assert self.budget_tokens is not None
        self._keeper.ledger.settle()
        if self._keeper.budget_reached and self.landing == "exact" and self.tokens_seen != self.budget_tokens:
            rank_zero_warn(
                f"The run ended on {self.tokens_seen:,} tokens instead of {self.budget_tokens:,}: its last"
                " micro-batches had less than two tokens per rank, or one was several times longer than all before it."
            )
        if not self._keeper.budget_reached:
            rank_zero_warn(
                f"The run ended after {self.tokens_seen:,} of {self.budget_tokens:,} budgeted tokens"
                f" ({self.fraction:.1%}): max_steps, max_epochs, max_time or another callback ended it first. Use"
                " Trainer(max_epochs=-1) and resume from the last checkpoint to spend the rest."
            )


def _whole_tokens(tokens: object) -> int:
    if isinstance(tokens, bool) or not isinstance(tokens, int | float) or tokens % 1 != 0 or tokens < 1:
        raise ValueError(f"ChinchillaBudget(tokens={tokens!r}): it must be a whole number of tokens, 1 or more.")
    return int(tokens)
