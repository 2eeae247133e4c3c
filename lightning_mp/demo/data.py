"""The corpus as Lightning takes it: a data module that knows its rank."""

import lightning.pytorch as pl

from lightning_mp.demo.batches import HeldOutBatches, TextBatches
from lightning_mp.demo.text import Corpus

__all__ = ["TextData"]


class TextData(pl.LightningDataModule):
    """Training and validation batches of a corpus.

    Args:
        corpus: The text.
        batch_size: Sequences per micro-batch and rank.
        block_tokens: Tokens per sequence.
        num_batches: Micro-batches of the whole run per rank. They are served as one epoch, over as many passes of the
            text as it takes, so that no accumulation window is cut at the end of a pass.
        max_validation_batches: At most this many validation batches per rank.
        seed: Chooses the order of the text.
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        batch_size: int,
        block_tokens: int,
        num_batches: int,
        max_validation_batches: int,
        seed: int,
    ) -> None:
        super().__init__()
        self._corpus = corpus
        self._batch_size = batch_size
        self._block_tokens = block_tokens
        self._num_batches = num_batches
        self._max_validation_batches = max_validation_batches
        self._seed = seed

    def train_dataloader(self) -> TextBatches:
        """This rank's part of the training batches."""
        assert self.trainer is not None
        return TextBatches(
            self._corpus.train,
            batch_size=self._batch_size,
            block_tokens=self._block_tokens,
            num_batches=self._num_batches,
            seed=self._seed,
            rank=self.trainer.global_rank,
            world_size=self.trainer.world_size,
        )

    def val_dataloader(self) -> HeldOutBatches:
        """This rank's part of the validation batches."""
        assert self.trainer is not None
        return HeldOutBatches(
            self._corpus.validation,
            batch_size=self._batch_size,
            block_tokens=self._block_tokens,
            max_batches=self._max_validation_batches,
            rank=self.trainer.global_rank,
            world_size=self.trainer.world_size,
        )
