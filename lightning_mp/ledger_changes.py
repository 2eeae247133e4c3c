"""What a token ledger has booked since it was last looked at, with what skipped steps wasted."""

from dataclasses import dataclass

from lightning_mp.ledger import TokenLedger

__all__ = ["LedgerChange", "LedgerChanges"]


@dataclass(frozen=True, slots=True)
class LedgerChange:
    """Sums over all ranks since the last look.

    Attributes:
        windows: accumulation windows read.
        presented_tokens: tokens shown to the model, padding included.
        nonpad_tokens: those of them that an attention mask does not hide.
        useful_tokens: those again without the ones of skipped steps. Negative where a step turns out to be skipped
            after its tokens were read.
    """

    windows: int
    presented_tokens: int
    nonpad_tokens: int
    useful_tokens: int


class LedgerChanges:
    """Looks at a ledger again and again. The ledger counts skipped tokens by their labels; here they count whole.

    Args:
        ledger: what it holds now is not told again.
    """

    def __init__(self, ledger: TokenLedger) -> None:
        self._ledger = ledger
        self._last_nonpad_tokens = 0
        self._seen = self._look()

    @property
    def any(self) -> bool:
        """Whether there is something new."""
        return self._look() != self._seen

    def take(self) -> LedgerChange:
        """What is new; from now on it is old."""
        before, self._seen = self._seen, self._look()
        windows, tokens, skipped_tokens, presented_tokens, nonpad_tokens = (
            after - earlier for after, earlier in zip(self._seen, before, strict=True)
        )
        if windows:
            self._last_nonpad_tokens = nonpad_tokens
            wasted_tokens = round(nonpad_tokens * skipped_tokens / tokens) if tokens else 0
        else:
            # A fused step: its tokens were read before its outcome.
            wasted_tokens = self._last_nonpad_tokens if skipped_tokens else 0
        return LedgerChange(windows, presented_tokens, nonpad_tokens, nonpad_tokens - wasted_tokens)

    def _look(self) -> tuple[int, int, int, int, int]:
        ledger = self._ledger
        return ledger.windows, ledger.tokens, ledger.skipped_tokens, ledger.presented_tokens, ledger.nonpad_tokens
