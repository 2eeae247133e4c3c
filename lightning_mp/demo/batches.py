"""Batches of a text: resumable, and shared out among ranks without overlap."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = ["HeldOutBatches", "TextBatches", "cut_blocks"]


def cut_blocks(text: Tensor, block_tokens: int) -> tuple[Tensor, Tensor]:
    """Cuts a text into inputs and the tokens that follow them.

    Args:
        text: Tokens, ``[num_tokens]``.
        block_tokens: Length of a block.

    Returns:
        Inputs and labels, both ``[num_blocks, block_tokens]``, views of ``text``; the tail that fills no block is left
        out.

    Example:
        >>> inputs, labels = cut_blocks(torch.arange(8), 3)
        >>> inputs.tolist(), labels.tolist()
        ([[0, 1, 2], [3, 4, 5]], [[1, 2, 3], [4, 5, 6]])
    """
    num_blocks = max(0, (len(text) - 1) // block_tokens)
    used = num_blocks * block_tokens
    return text[:used].view(num_blocks, block_tokens), text[1 : used + 1].view(num_blocks, block_tokens)


class TextBatches:
    """Training batches ``[inputs, labels]``, int64 ``[batch_size, block_tokens]`` each.

    Every pass over the text takes its blocks in an order drawn from ``(seed, pass)``; a global batch is the next
    ``batch_size * world_size`` of them, and each rank takes its own part. The order does not depend on anything else,
    so the only state is the number of batches served. Lightning keeps it in the checkpoint through ``state_dict``.

    It is a sized iterable and no ``DataLoader``: Lightning adds no sampler to it. One iteration serves ``num_batches``,
    over as many passes as that takes; the iteration after it goes on where it ended.

    Args:
        text: uint8 ``[num_tokens]``.
        batch_size: Sequences per batch and rank.
        block_tokens: Tokens per sequence.
        num_batches: Length of one iteration; None for one pass over the text.
        seed: Chooses the order.
        rank: This process.
        world_size: Number of processes.

    Raises:
        ValueError: If the text does not fill one global batch.

    Example:
        >>> batches = TextBatches(torch.arange(17, dtype=torch.uint8), batch_size=2, block_tokens=4)
        >>> len(batches), [inputs.shape for inputs, labels in batches]
        (2, [torch.Size([2, 4]), torch.Size([2, 4])])
    """

    def __init__(
        self,
        text: Tensor,
        *,
        batch_size: int,
        block_tokens: int,
        num_batches: int | None = None,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._inputs, self._labels = cut_blocks(text, block_tokens)
        self._batch_size = batch_size
        self._seed = seed
        self._rank = rank
        self._world_size = world_size
        self.batches_per_pass = len(self._inputs) // (batch_size * world_size)
        if self.batches_per_pass == 0:
            raise ValueError(
                f"the text has {len(self._inputs)} blocks of {block_tokens} tokens, and one batch over all ranks needs "
                f"{batch_size * world_size}: give more text or a smaller batch size."
            )
        self._num_batches = self.batches_per_pass if num_batches is None else num_batches
        self._served = 0
        self._order: tuple[int, Tensor] | None = None

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[list[Tensor]]:
        end = (self._served // self._num_batches + 1) * self._num_batches
        while self._served < end:
            batch = self._batch(self._served)
            # Counted before it is handed out: a checkpoint written after training on it must not serve it again.
            self._served += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """The number of batches served, and how large a global batch is."""
        return {"served": self._served, "global_batch_size": self._batch_size * self._world_size}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on after the last batch served.

        Raises:
            ValueError: If the batches were of another size over all ranks.
        """
        global_batch_size = self._batch_size * self._world_size
        if state_dict["global_batch_size"] != global_batch_size:
            raise ValueError(
                f"the checkpoint was written with batches of {state_dict['global_batch_size']} sequences over all "
                f"ranks, and this run has {global_batch_size}: resume with the same --batch-size and --devices."
            )
        self._served = state_dict["served"]

    def _batch(self, index: int) -> list[Tensor]:
        pass_index, position = divmod(index, self.batches_per_pass)
        first = (position * self._world_size + self._rank) * self._batch_size
        blocks = self._order_of(pass_index)[first : first + self._batch_size]
        return [self._inputs[blocks].long(), self._labels[blocks].long()]

    def _order_of(self, pass_index: int) -> Tensor:
        if self._order is None or self._order[0] != pass_index:
            # A prime far above any number of passes keeps (seed, pass) pairs apart.
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + pass_index)
            self._order = pass_index, torch.randperm(len(self._inputs), generator=generator)
        return self._order[1]


class HeldOutBatches:
    """The same validation batches every time, spread evenly over the held-out text.

    Args:
        text: uint8 ``[num_tokens]``.
        batch_size: Sequences per batch and rank, fewer if the text is short.
        block_tokens: Tokens per sequence.
        max_batches: At most this many batches per rank.
        rank: This process.
        world_size: Number of processes.

    Raises:
        ValueError: If there is not one sequence for every rank.
    """

    def __init__(
        self,
        text: Tensor,
        *,
        batch_size: int,
        block_tokens: int,
        max_batches: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._inputs, self._labels = cut_blocks(text, block_tokens)
        num_blocks = len(self._inputs)
        if num_blocks < world_size:
            raise ValueError(
                f"the held-out text has {num_blocks} blocks of {block_tokens} tokens, and {world_size} are needed, one "
                "for every rank: give more text."
            )
        batch_size = min(batch_size, num_blocks // world_size)
        num_batches = min(max_batches, num_blocks // (batch_size * world_size))
        chosen = torch.linspace(0, num_blocks - 1, num_batches * batch_size * world_size).long()
        self._batches = chosen.view(world_size, num_batches, batch_size)[rank]

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[Tensor]]:
        for blocks in self._batches:
            yield [self._inputs[blocks].long(), self._labels[blocks].long()]
