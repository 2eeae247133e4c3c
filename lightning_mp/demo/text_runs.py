"""The demo's model and text as short runs of one length, for comparisons of precisions."""

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from lightning_mp.demo.data import Corpus, HeldOutBatches, TextBatches
from lightning_mp.demo.model import GPTConfig
from lightning_mp.demo.module import LanguageModel
from lightning_mp.demo.settings import BLOCK_TOKENS, WARMUP_SHARE, peak_learning_rate

__all__ = ["TextRuns"]


@dataclass(frozen=True)
class TextRuns:
    """What ``compare_precisions`` takes, for the demo's model on a text.

    Args:
        corpus: training and held-out text.
        model: its shape.
        steps: over which the learning rate warms up and falls.
        batch_size: sequences per batch.
        fused: fused AdamW, which Lightning's own mixed precision refuses together with clipping.
        max_validation_batches: of held-out text.
    """

    corpus: Corpus
    model: GPTConfig
    steps: int
    batch_size: int
    fused: bool = True
    max_validation_batches: int = 32

    @property
    def make_module(self) -> Callable[[], LanguageModel]:
        """Makes a model whose weights are drawn from torch's global generator."""
        return lambda: LanguageModel(
            **asdict(self.model),
            learning_rate=peak_learning_rate(self.model.parameters),
            total_steps=self.steps,
            warmup_steps=max(1, round(WARMUP_SHARE * self.steps)),
            fused=self.fused,
        )

    @property
    def make_data(self) -> Callable[[], TextBatches]:
        """Makes training batches in an order that follows from torch's global seed."""
        return lambda: TextBatches(
            self.corpus.train,
            batch_size=self.batch_size,
            block_tokens=BLOCK_TOKENS,
            num_batches=self.steps,
            seed=torch.initial_seed() % 2**32,
        )

    @property
    def validation(self) -> HeldOutBatches:
        """Held-out batches, the same for all runs."""
        return HeldOutBatches(
            self.corpus.validation,
            batch_size=self.batch_size,
            block_tokens=BLOCK_TOKENS,
            max_batches=self.max_validation_batches,
        )
